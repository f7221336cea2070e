"""How likely configurations are to run at all, as far as those tell that have failed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autotune.analysis.statistics import Floats
from autotune.records.trial import TrialRecord
from autotune.settings.training_config import TrainingConfig

__all__ = ["chance_to_run", "has_failed"]

_SURE_OF_BLAME = 0.99
"""A failure may have been the machine's for once: our own convention."""
_SETTINGS = tuple(name for name in TrainingConfig.model_fields if name != "lr")


def has_failed(record: TrialRecord) -> bool:
    """Whether a trial ended before it had shown anything, for another reason than memory."""
    has_shown = record.measurement is not None or bool(record.result.blocks)
    return not has_shown and record.outcome not in {"oom", "host_oom", "pruned"}


def chance_to_run(
    configs: Sequence[TrainingConfig], failed: Collection[TrainingConfig], ran: Collection[TrainingConfig]
) -> Floats:
    """The probability that each does not fail as others have.

    A failure is put down to one of the settings in which it differs from everything that ran, each as likely as the
    next: what shares half of these values with it has half a chance.
    """
    chances: Floats = np.ones(len(configs))
    values = {name: {getattr(one, name) for one in ran} for name in _SETTINGS}
    for failure in failed:
        suspects = [name for name in _SETTINGS if getattr(failure, name) not in values[name]]
        if suspects:
            shared = [sum(getattr(one, name) == getattr(failure, name) for name in suspects) for one in configs]
            chances *= 1 - _SURE_OF_BLAME * np.array(shared, dtype=np.float64) / len(suspects)
    return chances
