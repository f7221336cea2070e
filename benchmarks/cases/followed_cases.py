"""What benchmarks/advice.py follows beside settings: a job as it is, and the same job with a piece of advice followed.

Nothing here knows how it is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.cases.cpu import Case

__all__ = ["FollowedCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedCase:
    """A piece of advice, and the two jobs that show what it brings."""

    name: str
    kind: str
    """Of the advice."""
    today: Case
    followed: Case
    """The same job, with the advice followed; its settings may differ. Of a batch that is promised it takes that."""
    samples_per_item: float = 1.0
    """Today's samples that an item of the followed job holds: several to a packed row."""
    memory_limit: str | None = None
    """That the diagnosis is given; None: the default."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the processes that are measured."""
    why: str
    """Why the advice is given to such a job."""
