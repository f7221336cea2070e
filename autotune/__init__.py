"""autotune: finds the training settings that train your PyTorch model fastest on this machine, by measuring.

Public names only, loaded when first used, so that `import autotune` and the command line start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from warnings import catch_warnings, filterwarnings

from autotune.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.api.calls import diagnose, search
    from autotune.api.diagnose import DiagnosisResult
    from autotune.api.load import load
    from autotune.api.result import SearchResult, open_run
    from autotune.errors import (
        AutotuneError,
        ConfigError,
        InputError,
        LauncherError,
        NothingFeasibleError,
        RepeatedFailureError,
        RunFolderError,
        StudyMismatchError,
        WorkloadError,
    )
    from autotune.records.measurement import Measurement
    from autotune.records.trial import TrialRecord
    from autotune.settings.applied.accumulator import Accumulator
    from autotune.settings.applied.tf_data import TfData
    from autotune.settings.budget import Budget
    from autotune.settings.ddp_config import DdpConfig
    from autotune.settings.exports.export import Export
    from autotune.settings.objective import Objective
    from autotune.settings.search_space import SearchSpace
    from autotune.settings.training_config import TrainingConfig
    from autotune.settings.workload import Workload

__all__ = [
    "Accumulator",
    "AutotuneError",
    "Budget",
    "ConfigError",
    "DdpConfig",
    "DiagnosisResult",
    "Export",
    "InputError",
    "LauncherError",
    "Measurement",
    "NothingFeasibleError",
    "Objective",
    "RepeatedFailureError",
    "RunFolderError",
    "SearchResult",
    "SearchSpace",
    "StudyMismatchError",
    "TfData",
    "TrainingConfig",
    "TrialRecord",
    "Workload",
    "WorkloadError",
    "diagnose",
    "load",
    "open_run",
    "search",
]

_HOMES = {
    "Accumulator": "settings.applied.accumulator",
    "Budget": "settings.budget",
    "DdpConfig": "settings.ddp_config",
    "DiagnosisResult": "api.diagnose",
    "Export": "settings.exports.export",
    "Measurement": "records.measurement",
    "Objective": "settings.objective",
    "SearchResult": "api.result",
    "SearchSpace": "settings.search_space",
    "TfData": "settings.applied.tf_data",
    "TrainingConfig": "settings.training_config",
    "TrialRecord": "records.trial",
    "Workload": "settings.workload",
    "diagnose": "api.calls",
    "load": "api.load",
    "open_run": "api.result",
    "search": "api.calls",
}
"""The module of each public name; the exceptions, left out here, are those of errors.py."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune.api.caller import kept_random_state

    with kept_random_state(), catch_warnings():  # rich draws from the global generator when it is imported
        filterwarnings("ignore", message="IProgress not found")  # optuna's progress bar, which is not shown
        return getattr(import_module(f"autotune.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return list(__all__)
