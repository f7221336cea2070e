"""Optuna's samplers as a proposer: an expert's first guesses where the method begins with them, then samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.launch.runner import TrialRunner
from autotune.note import Note
from autotune.records.ceilings import CeilingBook
from autotune.records.diagnosis import Curves
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.proposals import Params, first_guesses
from autotune.study.study import Trial
from autotune.tuning.proposers.proposer import Proposal

__all__ = ["SamplerProposer"]


@dataclass(frozen=True, slots=True)
class SamplerProposer:
    """Leaves every proposal to the study's sampler. It foresees nothing: it skips, prunes and ends nothing."""

    space: ResolvedSpace
    has_guesses: bool
    has_model: bool = False
    is_informed: bool = False

    def prepare(self, _runner: TrialRunner, _deadline_s: float, _ceilings: CeilingBook) -> None:
        """Nothing to measure."""

    def recall(self, _curves: Curves, _ceilings: CeilingBook) -> None:
        """Nothing to take up."""

    def first(self) -> Sequence[Params]:
        """An expert's guesses."""
        return first_guesses(self.space) if self.has_guesses else ()

    def propose(self, _best: TrialRecord | None) -> Proposal | None:
        """The sampler draws."""
        return None

    def at_same_batch(self, _best: TrialRecord | None) -> Params | None:
        """None beyond what the loop itself derives from the best trial."""
        return None

    def skip(self, _config: TrainingConfig) -> Note | None:
        """Every sample is run."""
        return None

    def pruning_threshold(self, _trial: Trial) -> None:
        """Every trial runs to its end."""

    def why_enough(self, _best: TrialRecord | None) -> Note | None:
        """Patience alone ends the search."""
        return None

    def can_win(self, _best: TrialRecord | None) -> float | None:
        """Not known."""
        return None
