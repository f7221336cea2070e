"""What explains a window, measured once it is over: time breakdown, costs of an item, communication, roofline.

Comes in: a run whose window is over, and its Measurement. Goes out: the same Measurement with figures added, and notes
on what could not be measured. What the window has measured is never changed, and never lost.
"""
