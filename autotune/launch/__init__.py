"""Run jobs in processes of their own: a typed job in, the ranks' report out.

Owns the seam behind which launchers stand, the launchers (`local`, `ray_launcher`), deadlines and memory
limits of trials, and what the end of a process means. Whatever happens to a trial becomes its
report; no process of a trial outlives it.
"""
