"""The English for people: units, names, a report's own sentences, and one sentence for each code that rooms hand on.

Comes in: figures, a Note (a code with its figures), a RunSummary with its columns. Goes out: sentences. `units` is the
one library of units; a template formats its figures by name, with a unit where one is needed: "{peak_bytes:bytes}".
Where the sentence depends on the figures, a function takes the template's place. Each room's table is a file of its
own, joined in `say`.
"""

from __future__ import annotations

from autotune.report.wording.say import say

__all__ = ["say"]
