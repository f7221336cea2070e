"""What proposes trials: one Protocol, and two implementations, chosen in `make_proposer` alone.

Comes in: the study as it grows, and its space. Goes out: values to try next, or None where the study's sampler is to
draw; reasons to skip a sample, to stop a trial early, and to end the search. The loop proposes; nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from autotune.records.diagnosis import Curves
from autotune.study.study import Study
from autotune.tuning.proposers.model import ModelProposer
from autotune.tuning.proposers.proposer import Proposal, Proposer, SamplerProposer

__all__ = ["ModelProposer", "Proposal", "Proposer", "SamplerProposer", "make_proposer"]


def make_proposer(
    study: Study,
    *,
    seed: int,
    keep: Callable[[Curves], None] = lambda _: None,
    longest_s: Callable[[], float] = lambda: inf,
) -> Proposer:
    """The proposer of the study's search method; `keep` and `longest_s` are ModelProposer's."""
    return ModelProposer(study, seed, keep, longest_s) if study.method.has_model else SamplerProposer(study)
