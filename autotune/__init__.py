"""autotune: finds the training settings that train your PyTorch model fastest on this machine, by measuring.

Public names only, loaded when first used, so that `import autotune` and the command line start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from warnings import catch_warnings, filterwarnings

if TYPE_CHECKING:
    from autotune.api import DiagnosisResult, SearchResult, diagnose, load, search
    from autotune.core.budget import Budget
    from autotune.core.measurement import Measurement
    from autotune.core.objective import Objective
    from autotune.core.search_space import SearchSpace
    from autotune.core.training_config import DdpConfig, TrainingConfig
    from autotune.core.trial import TrialRecord
    from autotune.core.workload import Workload
    from autotune.errors import AutotuneError

__version__ = "0.1.0"

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
    "Budget": "autotune.core.budget",
    "DdpConfig": "autotune.core.training_config",
    "DiagnosisResult": "autotune.api",
    "Measurement": "autotune.core.measurement",
    "Objective": "autotune.core.objective",
    "SearchResult": "autotune.api",
    "SearchSpace": "autotune.core.search_space",
    "TrainingConfig": "autotune.core.training_config",
    "TrialRecord": "autotune.core.trial",
    "Workload": "autotune.core.workload",
    "diagnose": "autotune.api",
    "load": "autotune.api",
    "search": "autotune.api",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune.random_state import kept_random_state

    with kept_random_state(), catch_warnings():  # rich draws from the global generator when it is imported
        filterwarnings("ignore", message="IProgress not found")  # optuna's progress bar, which is not shown
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return list(__all__)
