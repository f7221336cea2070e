"""How Python processes that a command starts come to attach: an environment variable and a folder on PYTHONPATH.

Comes in: what they are to know, as JSON, and settings that frameworks take from the environment. Goes out: variables.
Does not import torch: every Python process below a command reads this.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.settings.command import filled, is_python
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import ScriptFacts

__all__ = [
    "ACCELERATE_NAMES",
    "ATTACH_VARIABLE",
    "attached_environment",
    "changed_settings",
    "framework_environment",
    "is_own_python",
    "unwatch_children",
    "with_own_python",
    "words_to_start",
    "workers_unwatched",
]

ATTACH_VARIABLE = "AUTOTUNE_ATTACH"
"""Set where a Python process is to attach: JSON of what it is to do."""
ACCELERATE_NAMES = {"bfloat16": "bf16", "float16": "fp16"}
"""Of precisions, as ACCELERATE_MIXED_PRECISION takes them. Source: accelerate's documentation of its environment."""
_LIGHTNING_NAMES = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
"""The same for PL_TRAINER_PRECISION. Source: lightning/pytorch/utilities/argparse.py."""
_SITE = Path(__file__).resolve().parents[1] / "worker" / "attach" / "site"


def attached_environment(told: Mapping[str, Any]) -> dict[str, str]:
    """The variables under which Python processes attach; this interpreter's own programs come first on PATH."""
    own = str(Path(sys.executable).parent)
    paths = os.environ.get("PATH", os.defpath)
    searched = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        ATTACH_VARIABLE: json.dumps(told),
        "PYTHONPATH": os.pathsep.join(searched),
        "PATH": paths if own in paths.split(os.pathsep)[:1] else os.pathsep.join([own, paths]),
    }


@contextmanager
def workers_unwatched() -> Iterator[None]:
    """Processes that start meanwhile are a loader's workers: they protect files, and watch nothing."""
    told = os.environ.get(ATTACH_VARIABLE)
    unwatch_children()
    try:
        yield
    finally:
        if told is not None:
            os.environ[ATTACH_VARIABLE] = told


def unwatch_children() -> None:
    """Let processes that this one starts from now on be none of the training: they protect files at the most."""
    told = os.environ.pop(ATTACH_VARIABLE, None)
    folder = None if told is None else json.loads(told).get("folder")
    if folder is not None:
        os.environ[ATTACH_VARIABLE] = json.dumps({"folder": folder})


def is_own_python(program: str) -> bool:
    """Whether a program that starts Python is this interpreter: a bare `python`, or one beside it."""
    if os.sep not in program:
        return True
    ours, theirs = (Path(path).absolute().parent.resolve() for path in (sys.executable, program))
    return ours == theirs  # an environment may be reached by a link; its python is one to the interpreter of all


def words_to_start(command: Sequence[str], config: TrainingConfig) -> tuple[str, ...]:
    """What is started: a command with its placeholders filled, and this interpreter where it names a bare `python`."""
    return with_own_python(filled(command, config))


def with_own_python(words: Sequence[str]) -> tuple[str, ...]:
    """A command whose program is found where this interpreter's own are, a bare `python` among them."""
    beside = Path(sys.executable).parent / words[0]
    is_bare = os.sep not in words[0]
    if is_bare and is_python(words[0]):
        return (str(beside) if beside.exists() else sys.executable, *words[1:])
    if is_bare and shutil.which(words[0]) is None and beside.exists():
        return (str(beside), *words[1:])
    return tuple(words)


def changed_settings(config: TrainingConfig, script: ScriptFacts) -> frozenset[str]:
    """Settings that a script must be given, since it does otherwise by itself; "ddp" for any of DDP's."""
    own, wanted = script.observed.model_dump(), config.model_dump()
    names = {name for name in script.reached if not name.startswith("ddp.") and wanted[name] != own[name]}
    if any(name.startswith("ddp.") for name in script.reached) and wanted["ddp"] != own["ddp"]:
        names.add("ddp")
    return frozenset(names - set(script.placeholders))


def framework_environment(config: TrainingConfig, script: ScriptFacts | None) -> dict[str, str]:
    """Variables by which frameworks take a precision themselves; a script's own arguments may win over them."""
    if script is None or "amp_dtype" not in changed_settings(config, script):
        return {}
    if script.framework in {"accelerate", "transformers"} and config.amp_dtype in ACCELERATE_NAMES:
        return {"ACCELERATE_MIXED_PRECISION": ACCELERATE_NAMES[config.amp_dtype]}
    if script.framework == "lightning" and config.amp_dtype in _LIGHTNING_NAMES:
        return {"PL_TRAINER_PRECISION": _LIGHTNING_NAMES[config.amp_dtype]}
    return {}
