"""autotune: finds the training settings that train your PyTorch model fastest on this machine, by measuring.

Public names only, loaded when first used, so that `import autotune` and the command line start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from warnings import catch_warnings, filterwarnings

from autotune.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.api.entry import DiagnosisResult, SearchResult, diagnose, load, search
    from autotune.errors import AutotuneError
    from autotune.records.measurement import Measurement
    from autotune.records.trial import TrialRecord
    from autotune.settings.budget import Budget
    from autotune.settings.objective import Objective
    from autotune.settings.search_space import SearchSpace
    from autotune.settings.training_config import DdpConfig, TrainingConfig
    from autotune.settings.workload import Workload

__all__ = [
    "AutotuneError",
    "Budget",
    "DdpConfig",
    "DiagnosisResult",
    "Measurement",
    "Objective",
    "SearchResult",
    "SearchSpace",
    "TrainingConfig",
    "TrialRecord",
    "Workload",
    "diagnose",
    "load",
    "search",
]

_HOMES = {
    "AutotuneError": "autotune.errors",
    "Budget": "autotune.settings.budget",
    "DdpConfig": "autotune.settings.training_config",
    "DiagnosisResult": "autotune.api.entry",
    "Measurement": "autotune.records.measurement",
    "Objective": "autotune.settings.objective",
    "SearchResult": "autotune.api.entry",
    "SearchSpace": "autotune.settings.search_space",
    "TrainingConfig": "autotune.settings.training_config",
    "TrialRecord": "autotune.records.trial",
    "Workload": "autotune.settings.workload",
    "diagnose": "autotune.api.entry",
    "load": "autotune.api.entry",
    "search": "autotune.api.entry",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune.api.random_state import kept_random_state

    with kept_random_state(), catch_warnings():  # rich draws from the global generator when it is imported
        filterwarnings("ignore", message="IProgress not found")  # optuna's progress bar, which is not shown
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
