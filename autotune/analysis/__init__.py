"""Pure calculations over records: rates with their intervals, models, and what follows from them for a search.

It owns the statistics (intervals, rates, scores, the rules of selection), the models that a search learns (rates and
memory of settings that were not tried), the choice of what to try next and when to stop, and estimates of time.
Records, settings and the space come in. Numbers, forecasts, plans and Notes go out. Nothing here reads a file, a
clock or a device. A trial imports some of these modules, so what needs scipy imports it where it is called.
"""
