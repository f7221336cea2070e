"""The seam between the loop of a search and what proposes its trials, and its plain side: Optuna's samplers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from autotune.analysis.decisions.early_stopping import PruningThreshold
from autotune.analysis.forecast.observations import mean_log_rates
from autotune.launch.runner import TrialRunner
from autotune.note import Note
from autotune.records.ceilings import CeilingBook
from autotune.records.diagnosis import Curves
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig
from autotune.study.proposals import Params
from autotune.study.study import Study

__all__ = ["Proposal", "Proposer", "SamplerProposer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Values to try next."""

    params: Params
    is_promising: bool = False
    """They are expected to win most: a search that may stop counts how often such a trial brought nothing."""


class Proposer(Protocol):
    """Proposes trials from what a study holds. `best` is the feasible trial with the best score so far, if any."""

    @property
    def has_model(self) -> bool:
        """Whether it measures loader and device alone before it proposes; trials need not repeat that."""
        ...

    @property
    def is_informed(self) -> bool:
        """Whether it has measured what its proposals rest on: then it leads, and fewer vain trials end the search."""
        ...

    def prepare(self, runner: TrialRunner, deadline_s: float, ceilings: CeilingBook, /) -> Note | None:
        """Measure what proposals rest on, once, after the baseline; what of it failed, or None. Keeps ceilings."""
        ...

    def recall(self, curves: Curves, ceilings: CeilingBook, /) -> None:
        """Take up what `prepare` measured before an interruption."""
        ...

    def propose(self, best: TrialRecord | None, /) -> Proposal | None:
        """What to try next; None: the study's sampler draws."""
        ...

    def at_same_batch(self, best: TrialRecord | None, /) -> Params | None:
        """What to try at the baseline's global batch before the search ends; None where nothing is left to try."""
        ...

    def plainer(self, config: TrainingConfig, /) -> Params | None:
        """What to try before the search ends: what would be recommended, without what is not believed to win."""
        ...

    def skip(self, config: TrainingConfig, /) -> Note | None:
        """Why a sample is not worth a run ("would_not_fit", "would_tell_nothing"), or None."""
        ...

    def pruning_threshold(self, trial: TrialRecord, /) -> PruningThreshold | None:
        """The rate below which a trial is stopped early; None: it runs to its end."""
        ...

    def why_enough(self, best: TrialRecord | None, /) -> Note | None:
        """Why no further trial is worth its time, or None."""
        ...

    def believed(self) -> Mapping[int, float]:
        """Of feasible trials, by number, the logarithm of the rate that is believed from all runs so far."""
        ...

    def can_win(self, best: TrialRecord | None, /) -> float | None:
        """What other settings can win at most over the best, as a share of its rate; None where nothing tells."""
        ...


@dataclass(slots=True)
class SamplerProposer:
    """Leaves every proposal to the study's sampler; it measures, skips, prunes and ends nothing."""

    study: Study
    has_model: bool = field(default=False, init=False)
    is_informed: bool = field(default=False, init=False)
    _believed: dict[int, float] = field(default_factory=dict, init=False)
    _known: dict[int, TrialRecord] = field(default_factory=dict, init=False)
    """What `_believed` was made from, by number: it is asked for several times a trial."""

    def prepare(self, _runner: TrialRunner, _deadline_s: float, _ceilings: CeilingBook) -> None:
        """Nothing to measure."""

    def recall(self, _curves: Curves, _ceilings: CeilingBook) -> None:
        """Nothing to take up."""

    def propose(self, _best: TrialRecord | None) -> None:
        """The sampler draws."""

    def at_same_batch(self, _best: TrialRecord | None) -> None:
        """Nothing beyond what the loop itself derives from the best trial."""

    def plainer(self, _best: TrainingConfig) -> None:
        """Nothing is believed of single settings."""

    def skip(self, _config: TrainingConfig) -> None:
        """Every sample is run."""

    def pruning_threshold(self, _trial: TrialRecord) -> None:
        """Every trial runs to its end."""

    def why_enough(self, _best: TrialRecord | None) -> None:
        """Patience alone ends the search."""

    def believed(self) -> Mapping[int, float]:
        """The mean of a trial's runs."""
        new = [record for record in self.study.ended if self._known.get(record.number) is not record]
        self._known.update((record.number, record) for record in new)
        self._believed |= mean_log_rates(new)
        return self._believed

    def can_win(self, _best: TrialRecord | None) -> None:
        """Not known."""
