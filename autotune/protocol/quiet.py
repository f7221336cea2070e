"""Environment variables that keep experiment trackers and hubs from logging or uploading what a trial does.

Comes in: the trial's scratch, for what they can only write elsewhere. Goes out: variables. They hold where a script
names no mode itself: an argument in its code (`wandb.init(mode="online")`) wins over each of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["muted_environment", "quiet_environment"]

_YES = frozenset({"1", "on", "true", "yes"})

_MUTED: Mapping[str, tuple[str, frozenset[str]]] = {
    # docs.wandb.ai/support/testing_code_turn_off; the modes: wandb/sdk/wandb_settings.py
    "WANDB_MODE": ("disabled", frozenset({"disabled", "dryrun", "offline"})),
    # huggingface_hub/constants.py; datasets/config.py follows it, so do downloads: a model must be cached already
    "HF_HUB_OFFLINE": ("1", _YES),
    "HF_HUB_DISABLE_TELEMETRY": ("1", _YES),
    # comet.com/docs, ExperimentConfig.disabled = comet.auto_log.disable: no network communication at all
    "COMET_AUTO_LOG_DISABLE": ("true", _YES),
    # docs.neptune.ai/logging/modes and environment_variables: the one mode that neptune 1 and neptune-scale share
    "NEPTUNE_MODE": ("offline", frozenset({"debug", "disabled", "offline", "read-only"})),
    # clearml-docs, guide on offline mode: "Before running a task, set CLEARML_OFFLINE_MODE=1"
    "CLEARML_OFFLINE_MODE": ("1", _YES),
    # docs.swanlab.cn/en/api/cli-swanlab-offline, transformers/integrations/integration_utils.py
    "SWANLAB_MODE": ("disabled", frozenset({"disabled", "local", "offline"})),
    # dvclive/live.py: _init_test() instead of _init_dvc(), so that no experiment is committed to the repository
    "DVCLIVE_TEST": ("true", _YES),
}
"""The value that mutes, and the user's own values which mute as well."""

_IN_SCRATCH: Mapping[str, str] = {
    # mlflow.org/docs/latest/ml/tracking/backend-stores: a database by its address; the registry follows the tracking
    # (mlflow/tracking/_model_registry/utils.py). Newer releases deprecate the store of plain files.
    "MLFLOW_TRACKING_URI": "sqlite:///{scratch}/mlflow.db",
    "MLFLOW_REGISTRY_URI": "sqlite:///{scratch}/mlflow.db",
    # docs.neptune.ai/api/environment_variables (neptune 1), docs.neptune.ai/3.4.7/environment_variables (neptune-scale)
    "NEPTUNE_DATA_DIRECTORY": "{scratch}/neptune",
    "NEPTUNE_LOG_DIRECTORY": "{scratch}/neptune",
    # trackio/utils.py; with a TRACKIO_SPACE_ID it goes to a Space by the hub, which is offline
    "TRACKIO_DIR": "{scratch}/trackio",
}
"""What would write natively, or to a server that the user has named: its place below scratch."""


def quiet_environment(scratch: Path, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that keep experiment trackers and hubs from logging or uploading anything.

    Args:
        scratch: where those write that can't be switched off.
        environment: what the user has set; os.environ where it is left out. A mode of the user's is kept where it
            uploads nothing either (WANDB_MODE=offline); a place of the user's never is: it may be a server, or old.
    """
    muted = muted_environment(os.environ if environment is None else environment)
    return muted | {name: place.format(scratch=scratch) for name, place in _IN_SCRATCH.items()}


def muted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of them that no folder belongs to: what packages read when they are imported before any trial."""
    return {name: value for name, (value, also) in _MUTED.items() if environment.get(name, "?").lower() not in also}
