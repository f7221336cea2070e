"""Attach to the Python processes of a command, and mute experiment trackers in trials."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.config.command import filled, is_python
from autotune.config.plan import ScriptFacts
from autotune.config.training_config import TrainingConfig

# Attach to the Python processes that a command starts, by an environment variable and a folder on
# PYTHONPATH.
#
# In: what they are to know, as JSON, and settings that frameworks take from the environment. Out:
# variables. Does not import torch: every Python process below a command reads this.


ATTACH_VARIABLE = "AUTOTUNE_ATTACH"
"""Variable of a Python process that is to attach: JSON of what it is to do."""
ACCELERATE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
"""Names of precisions for ACCELERATE_MIXED_PRECISION. Source: accelerate's documentation of its
environment."""
_PRECISIONS = {
    "accelerate": ("ACCELERATE_MIXED_PRECISION", ACCELERATE_NAMES),
    "transformers": ("ACCELERATE_MIXED_PRECISION", ACCELERATE_NAMES),
    "lightning": ("PL_TRAINER_PRECISION", {"bfloat16": "bf16-mixed", "float16": "16-mixed"}),
}
"""By framework: the variable by which it takes a precision, and the names of precisions. Source:
lightning/pytorch/utilities/argparse.py."""
_SITE = Path(__file__).resolve().parents[1] / "worker" / "script" / "site"


def attached_environment(attached: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables by which Python processes attach; this interpreter's programs come first on PATH."""
    own = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", os.defpath)
    searched = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        ATTACH_VARIABLE: json.dumps(attached),
        "PYTHONPATH": os.pathsep.join(searched),
        "PATH": paths if own in paths.split(os.pathsep)[:1] else os.pathsep.join([own, paths]),
    }


@contextmanager
def workers_unwatched() -> Iterator[None]:
    """Let processes that start meanwhile, a loader's workers, protect files, be sampled, and watch nothing."""
    attached = os.environ.get(ATTACH_VARIABLE)
    unwatch_children()
    try:
        yield
    finally:
        if attached is not None:
            os.environ[ATTACH_VARIABLE] = attached


def unwatch_children() -> None:
    """Let processes that this one starts from now on protect files, and be sampled, at the most."""
    attached = json.loads(os.environ.pop(ATTACH_VARIABLE, "{}"))
    folder = attached.get("folder")
    if folder is not None:
        kept = {"folder": folder}
        if attached.get("is_watched") or "sampled_by" in attached:
            kept["sampled_by"] = attached.get("sampled_by", os.getpid())
        os.environ[ATTACH_VARIABLE] = json.dumps(kept)


def is_own_python(program: str) -> bool:
    """Return whether a program is this Python: a bare `python`, or one in the same folder."""
    if os.sep not in program:
        return True
    # An environment may be reached by a link; its python is one to the interpreter of all.
    ours, theirs = (Path(path).absolute().parent.resolve() for path in (sys.executable, program))
    return ours == theirs


def words_to_start(command: Sequence[str], config: TrainingConfig) -> tuple[str, ...]:
    """Return a command with its placeholders filled, and this interpreter for a bare `python`."""
    return with_own_python(filled(command, config))


def with_own_python(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command whose program, such as a bare `python`, is found next to this interpreter."""
    program, *arguments = words
    own = Path(sys.executable).parent / program
    is_bare = os.sep not in program
    if is_bare and is_python(program):
        program = str(own) if own.exists() else sys.executable
    elif is_bare and shutil.which(program) is None and own.exists():
        program = str(own)
    return (program, *arguments)


def changed_settings(config: TrainingConfig, script: ScriptFacts) -> frozenset[str]:
    """Return the settings that a script must be given, since it has other values; "ddp" for any of DDP's."""
    names = {name.partition(".")[0] for name in script.reached} - {*script.placeholders}
    return frozenset(
        name for name in names if getattr(config, name) != getattr(script.observed, name)
    )


def before_changes(config: TrainingConfig, script: ScriptFacts) -> TrainingConfig:
    """Return the configuration with the script's own value of each setting that it must be given."""
    own = {name: getattr(script.observed, name) for name in changed_settings(config, script)}
    return config.model_copy(update=own)


def framework_environment(config: TrainingConfig, script: ScriptFacts | None) -> dict[str, str]:
    """Return variables by which frameworks take a precision; a script's own arguments may win."""
    if script is None or before_changes(config, script).amp_dtype == config.amp_dtype:
        return {}
    variable, names = _PRECISIONS.get(script.framework, ("", {}))
    return {variable: names[config.amp_dtype]} if config.amp_dtype in names else {}


# Environment variables that keep experiment trackers and hubs from logging or uploading what a
# trial does.
#
# Comes in: the trial's scratch, for what they can only write elsewhere. Goes out: variables. They
# hold where a script names no mode itself: an argument in its code (`wandb.init(mode="online")`)
# wins over each of them.


_YES = frozenset({"1", "on", "true", "yes"})

_MUTED: Mapping[str, tuple[str, frozenset[str]]] = {
    # docs.wandb.ai/support/testing_code_turn_off; the modes: wandb/sdk/wandb_settings.py
    "WANDB_MODE": ("disabled", frozenset({"disabled", "dryrun", "offline"})),
    # huggingface_hub/constants.py; datasets/config.py follows it, so do downloads: a model must be
    # cached already
    "HF_HUB_OFFLINE": ("1", _YES),
    "HF_HUB_DISABLE_TELEMETRY": ("1", _YES),
    # comet.com/docs, ExperimentConfig.disabled = comet.auto_log.disable: no network communication
    # at all
    "COMET_AUTO_LOG_DISABLE": ("true", _YES),
    # docs.neptune.ai/logging/modes and environment_variables: the one mode that neptune 1 and
    # neptune-scale share
    "NEPTUNE_MODE": ("offline", frozenset({"debug", "disabled", "offline", "read-only"})),
    # clearml-docs, guide on offline mode: "Before running a task, set CLEARML_OFFLINE_MODE=1"
    "CLEARML_OFFLINE_MODE": ("1", _YES),
    # docs.swanlab.cn/en/api/cli-swanlab-offline, transformers/integrations/integration_utils.py
    "SWANLAB_MODE": ("disabled", frozenset({"disabled", "local", "offline"})),
    # dvclive/live.py: _init_test() instead of _init_dvc(), so that no experiment is committed to
    # the repository
    "DVCLIVE_TEST": ("true", _YES),
}
"""By variable: the value that mutes, and the user's own values which mute as well."""

_IN_SCRATCH: Mapping[str, str] = {
    # mlflow.org/docs/latest/ml/tracking/backend-stores: a database by its address; the registry
    # follows the tracking (mlflow/tracking/_model_registry/utils.py). Newer releases deprecate the
    # store of plain files.
    "MLFLOW_TRACKING_URI": "sqlite:///{scratch}/mlflow.db",
    "MLFLOW_REGISTRY_URI": "sqlite:///{scratch}/mlflow.db",
    # docs.neptune.ai/api/environment_variables (neptune 1),
    # docs.neptune.ai/3.4.7/environment_variables (neptune-scale)
    "NEPTUNE_DATA_DIRECTORY": "{scratch}/neptune",
    "NEPTUNE_LOG_DIRECTORY": "{scratch}/neptune",
    # trackio/utils.py; with a TRACKIO_SPACE_ID it goes to a Space by the hub, which is offline
    "TRACKIO_DIR": "{scratch}/trackio",
}
"""Places below scratch of what would write natively, or to a server that the user has named."""

_OFFLINE: Mapping[str, str] = {
    # docs.wandb.ai/platform/hosting/env-vars: offline it writes the same records, below WANDB_DIR,
    # and opens no connection. Its folder must exist by then.
    "WANDB_MODE": "offline",
    "WANDB_DIR": "{scratch}",
    "WANDB_ARTIFACT_DIR": "{scratch}/wandb-artifacts",
    "WANDB_CACHE_DIR": "{scratch}/wandb-cache",
    "WANDB_CONFIG_DIR": "{scratch}/wandb-config",
    "WANDB_DATA_DIR": "{scratch}/wandb-data",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables by which a tracker works as in training, but offline and below scratch."""

_COUNTED_ONLY: Mapping[str, tuple[str, str]] = {
    "comet_ml": ("COMET_AUTO_LOG_DISABLE", "true"),
    "dvclive": ("DVCLIVE_TEST", "true"),
    "swanlab": ("SWANLAB_MODE", "disabled"),
    "wandb": ("WANDB_MODE", "disabled"),
}
"""By package: the variable and value that keep a tracker from doing anything."""


def quiet_environment(
    scratch: Path, environment: Mapping[str, str] | None = None, *, is_timed: bool = False
) -> dict[str, str]:
    """Return variables that keep experiment trackers and hubs from logging or uploading anything.

    Args:
        scratch: where those write that can't be switched off.
        environment: what the user has set; os.environ where it is left out. A mode of the user's is
            kept where it uploads nothing either (WANDB_MODE=offline); a place of the user's never
            is: it may be a server, or old.
        is_timed: let those that can work offline do so, as their calls are to cost what they cost.
    """
    muted = muted_environment(os.environ if environment is None else environment)
    places = dict(_IN_SCRATCH)
    if is_timed and "WANDB_MODE" in muted:
        places |= _OFFLINE
    return muted | {name: place.format(scratch=scratch) for name, place in places.items()}


def is_muted_by(package: str, environment: Mapping[str, str]) -> bool:
    """Return whether the environment keeps a tracker's package from doing anything."""
    variable, value = _COUNTED_ONLY.get(package, ("", ""))
    return bool(variable) and environment.get(variable) == value


def muted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return those without a folder, which packages read if they are imported before any trial."""
    return {
        name: value
        for name, (value, also) in _MUTED.items()
        if environment.get(name, "?").lower() not in also
    }
