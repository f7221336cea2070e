"""The English for people: one sentence a code, one file for each room that hands on notes.

Comes in: a Note, a code with its figures. Goes out: a sentence. A template formats its figures by name, with a unit
where one is needed: "{peak_bytes:bytes} of {limit_bytes:bytes}"; where the sentence depends on the figures, a function
takes their place. Nothing here decides or calculates.
"""

from __future__ import annotations

from autotune.report.wording.say import say

__all__ = ["say"]
