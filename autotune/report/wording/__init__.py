"""The English for people: units, names, a report's own sentences, and one sentence for each code that rooms hand on.

Comes in: figures, a Note (a code with its figures), a RunSummary with its columns. Goes out: sentences. `units` is the
one library of units. The sentences of codes stand in english/, a file a room, as templates that `catalogue` fills.
"""

from __future__ import annotations

from autotune.report.wording.say import say

__all__ = ["say"]
