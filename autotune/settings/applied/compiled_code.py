"""Compiled code that a search has kept in the user's cache folder, and torch's own folder, into which it is put.

Comes in: what shapes the code. Goes out: where it lies, and what lies there in torch's folder. torch unpickles and runs
what it finds, so a file counts only where it and its folder are this user's own and for nobody else to write, and
where its content is whole.

Source: torch.compiler.save_cache_artifacts and load_cache_artifacts.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import stat
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Protocol

import torch
from platformdirs import user_cache_path
from torch import nn
from torch.nn.parameter import is_lazy

from autotune.settings.applied.cores.processor import processor_name

__all__ = [
    "CodeSettings",
    "code_file",
    "load_code",
    "load_compiled",
    "own_torch_cache",
    "script_code_file",
    "sealed",
]

_LOG = logging.getLogger(__name__)
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_HASH_BYTES = 64
"""Before the content: SHA-256 in hexadecimal digits."""
_DAY_S = 24 * 3600.0


class CodeSettings(Protocol):
    """What of a TrainingConfig shapes the code, beside the model."""

    @property
    def micro_batch_size(self) -> int:
        """Samples of a batch."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """A budget in place of them."""
        ...

    @property
    def amp_dtype(self) -> str:
        """The precision."""
        ...

    @property
    def channels_last(self) -> bool:
        """The layout."""
        ...

    @property
    def compile_mode(self) -> str:
        """How torch compiles."""
        ...

    @property
    def intra_op_threads(self) -> int | None:
        """Threads of an operator on the CPU; None: torch's own."""
        ...


def code_file(config: CodeSettings, model: nn.Module, device: torch.device) -> Path | None:
    """Where code of these settings and this model lies in the user's cache folder; None: nowhere.

    There is one file for all that must be equal for the code to be of use; what differs beside, torch finds out. A
    model whose parameters have no shapes yet has none, nor has a user without a home.
    """
    parameters = list(model.parameters())
    if any(map(is_lazy, parameters)):
        return None
    place = [device.type]
    if device.type == "cpu":
        place.append(str(torch.get_num_threads()))  # stands in C++ code
    elif device.type == "cuda":
        place += [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    kinds = [type(module).__qualname__ for module in model.modules()]  # a script's module has another name in a trial
    shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
    return _file_of(config, [place, kinds, shapes])


def script_code_file(config: CodeSettings, script: Sequence[str]) -> Path | None:
    """The same of a script that compiles its model, by the words that name it.

    It holds what the last search with these settings has compiled: what else shapes the code, such as the script's
    arguments, the GPU and an edited model, torch finds out.
    """
    return _file_of(config, [list(script), config.intra_op_threads])


def _file_of(config: CodeSettings, key: list[object]) -> Path | None:
    """The file of a key and these settings, on this processor and with this torch."""
    here = [torch.__version__, platform.machine(), processor_name(), torch.backends.cpu.get_cpu_capability()]
    batch = (config.micro_batch_size, config.max_tokens)
    settings = (*batch, config.amp_dtype, config.channels_last, config.compile_mode)
    digest = sha256(json.dumps([here, settings, key]).encode()).hexdigest()
    try:
        file = user_cache_path("autotune") / "compiled" / f"{digest[:32]}.bin"
    except RuntimeError:
        return None
    return file if file.is_absolute() else None


def sealed(content: bytes) -> bytes:
    """What is written: the content after its own hash, which shows that it is whole."""
    return sha256(content).hexdigest().encode() + content


def load_compiled(config: CodeSettings, model: nn.Module, device: torch.device) -> bool:
    """Put the code that a search has kept for these settings and this model into torch's folder: `load_code`."""
    return load_code(lambda: code_file(config, model, device))


def load_code(find: Callable[[], Path | None]) -> bool:
    """Put the code in a file into torch's folder; whether it is there.

    It is put there once a day, since what nobody uses is removed from /tmp. Whatever is wrong with it, or with finding
    it, is no error: torch compiles anew.
    """
    try:
        file = find()
        if file is None or not file.exists():
            return False
        cache = own_torch_cache()
        content = None if cache is None else _read(file)
        if cache is None or content is None:
            return False
        stamp, digest = cache / f"autotune-{file.stem}", content[:_HASH_BYTES]
        if stamp.is_file() and stamp.read_bytes() == digest and time() - stamp.stat().st_mtime < _DAY_S:
            return True
        if torch.compiler.load_cache_artifacts(content[_HASH_BYTES:]) is None:
            return False
        stamp.write_bytes(digest)
    except Exception as error:  # noqa: BLE001 - whatever torch, a disk or a model makes of it
        _LOG.info("compiled code of a search is not used: %s", error)
        return False
    return True


def own_torch_cache() -> Path | None:
    """Torch's folder of compiled code, made where it is not there; None where others own or may write it.

    One that the user has named by TORCHINDUCTOR_CACHE_DIR is taken as it is. torch's usual one is a name in a shared
    /tmp that anybody can know and make first.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # no public name

    usual = Path(default_cache_dir()).absolute()
    named = os.environ.get(_VARIABLE)
    if named and Path(named).absolute() != usual:  # torch itself names its usual one there, too
        return Path(named)
    try:
        usual.mkdir(mode=0o700, exist_ok=True)
        status = usual.lstat()
    except OSError:
        return None
    return usual if stat.S_ISDIR(status.st_mode) and _is_own(status) else None


def _read(file: Path) -> bytes | None:
    """A file's content with its hash, where file and folder are ours and it is whole; None also where there is none.

    Both are asked once they are open, so nobody can put another in their place meanwhile.
    """
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        with open(os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as found:  # noqa: PTH123 - flags
            status = os.fstat(found.fileno())
            is_fit = stat.S_ISREG(status.st_mode) and _is_own(status) and _is_own(os.fstat(folder))
            content = found.read() if is_fit else b""
    except FileNotFoundError:
        return None
    finally:
        os.close(folder)
    if sealed(content[_HASH_BYTES:]) != content:
        _LOG.warning(
            "%s must be whole, and it and its folder yours and for nobody else to write, but that does not hold, and "
            "it is not used; remove it",
            file,
        )
        return None
    return content


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
