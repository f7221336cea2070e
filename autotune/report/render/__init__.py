"""The forms of a report: terminal, Markdown, HTML page, notebook, JSON document, and the progress of a search.

Comes in: a finished ReportModel or the sections of a Diagnosis. Goes out: text. A renderer lays blocks out and makes
foreign text harmless; it calculates nothing and words nothing.
"""
