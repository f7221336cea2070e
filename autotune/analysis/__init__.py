"""Pure calculations over records: rates with their intervals, models, and what follows from them for a search.

It owns the statistics of one run, scores and estimates of time. Rooms inside: `decisions` (the spread between runs,
what they allow to say and to recommend), `forecast` (the rates of settings that were not tried, and what to try next),
which uses it, and `memory` (the same of peak memory).
Records, settings and the space come in. Numbers, forecasts, plans and Notes go out. Nothing here reads a file, a
clock or a device. A trial imports some of these modules, so what needs scipy imports it where it is called.
"""
