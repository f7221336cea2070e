"""Training scripts that are slow, or grow, for one reason each that people complained about in public.

`scripts` has them as people write them, with the threads in their docstrings; `expectations` states
for each the right cause and the right remedy. benchmarks/complaints.py diagnoses them all.
"""
