"""Make PyTorch training faster: diagnose what is slow, and find the fastest settings by measuring.

    import autotune

    print(autotune.diagnose(model, dataset).report())  # why is it slow?
    result = autotune.search(model, dataset)           # which settings are fastest?

All public names are here; they are imported when first used, so `import autotune` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from warnings import catch_warnings, filterwarnings

from autotune.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.api.calls import diagnose, search
    from autotune.api.commands import load
    from autotune.api.diagnose import DiagnosisResult
    from autotune.api.search import SearchResult, open_run
    from autotune.apply.prepare import Accumulator
    from autotune.config.plan import Budget, Objective, SearchSpace, Workload
    from autotune.config.tf_data import TfData
    from autotune.config.training_config import DdpConfig, TrainingConfig
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
    from autotune.export.table import Export
    from autotune.records.measurement import Measurement
    from autotune.records.trial import TrialRecord

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
    "Accumulator": "apply.prepare",
    "Budget": "config.plan",
    "DdpConfig": "config.training_config",
    "DiagnosisResult": "api.diagnose",
    "Export": "export.table",
    "Measurement": "records.measurement",
    "Objective": "config.plan",
    "SearchResult": "api.search",
    "SearchSpace": "config.plan",
    "TfData": "config.tf_data",
    "TrainingConfig": "config.training_config",
    "TrialRecord": "records.trial",
    "Workload": "config.plan",
    "diagnose": "api.calls",
    "load": "api.commands",
    "open_run": "api.search",
    "search": "api.calls",
}
"""Module of each public name; exceptions, which are not listed, are in errors.py."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune.api.setup import kept_random_state

    # rich draws from the global generator when it is imported, and optuna warns about its progress
    # bar, which is not used.
    with kept_random_state(), catch_warnings():
        filterwarnings("ignore", message="IProgress not found")
        return getattr(import_module(f"autotune.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return list(__all__)
