"""What a person or a script gets to see: progress while a search runs, and reports of what it found.

Comes in: records' Progress, RunSummary and Diagnosis. Goes out: text on a console, Markdown, HTML,
JSON. `model` calculates and words a report once (`figures` joins the runs of a configuration,
`sections` fill `blocks`, `plots` hold what is drawn, `wording` has all English); `render` lays it
out. Nothing here measures, decides what to run or writes a file; text that stems from user code is
never taken for markup.
"""
