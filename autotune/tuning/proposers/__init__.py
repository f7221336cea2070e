"""What proposes trials: one Protocol, and two implementations, chosen in `make_proposer` alone.

Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the study's sampler is to
draw; reasons to skip a sample, to stop a trial early, and to end the search. The loop proposes; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.records.diagnosis import Curves
from autotune.tuning.proposers.model import ModelProposer
from autotune.tuning.proposers.proposer import Proposal, Proposer, SamplerProposer
from autotune.tuning.time_budget import TimeBudget

__all__ = ["ModelProposer", "Proposal", "Proposer", "SamplerProposer", "make_proposer"]


def make_proposer(time: TimeBudget, *, seed: int, keep: Callable[[Curves], None] = lambda _: None) -> Proposer:
    """The proposer of the study's search method; the arguments are ModelProposer's."""
    has_model = time.study.method.has_model
    return ModelProposer(time, seed, keep) if has_model else SamplerProposer(time.study)
