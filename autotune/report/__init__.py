"""Report a search or a diagnosis: progress while it runs, and its result.

Takes a Progress, RunSummary or Diagnosis; returns or prints text, Markdown, HTML and JSON. `model`
calculates a report once: `figures` joins the runs of a configuration, `sections` fill `blocks` with
them, `sentences` and `words` hold the English. `console`, `markdown`, `html`, `drawing` and
`json_document` render it. Nothing here measures or writes a file; text that comes from user code is
never taken for markup.
"""
