# ruff: noqa: SLF001 - torch's own names
"""Hook into torch, so that a Session sees and can change what a script does.

In: a Session, and modules as they are imported. Out: calls of the session, in the script's own
thread: for loaders, iterators, optimizers, losses, outermost modules and DDP. Each hook is on a
method that subclasses share (`_BaseDataLoaderIter.__next__`), so that frameworks' loaders go
through it too. A process has one session.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Integral
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune.config.plan import INSTALLED, LoaderSite
from autotune.protocol.attach import workers_unwatched
from autotune.worker.lines import shown_line
from autotune.worker.modes import remember_places
from autotune.worker.script.overrides import switched
from autotune.worker.script.patching import after_import

if TYPE_CHECKING:
    from autotune.worker.script.session import Session

# Loaders that get `persistent_workers` from autotune, but must train as without it
#
# Persistent workers hold the dataset as it was when they started, so they are restarted if the
# script has changed it since (`set_epoch`, a curriculum). A loader has only one such iterator, so a
# second one within an epoch gets workers of its own; otherwise the first would begin again. Changes
# inside a list or a tensor of the dataset are not detected.


_OVER = "autotune_is_over"
_State = tuple[object, ...]
_GUARDED: WeakKeyDictionary[DataLoader[Any], _State] = WeakKeyDictionary()
"""State of the dataset that each loader's workers hold."""


def guard_persistent(loader: DataLoader[Any]) -> None:
    """Let a new loader train as if its workers ended with each epoch."""
    _GUARDED[loader] = ()


def begin_persistent(loader: DataLoader[Any], own_iter: Callable[[Any], Any]) -> Any:
    """Return an iterator of a loader; restart persistent workers that would change the training.

    Args:
        loader: The loader.
        own_iter: The loader's own `__iter__`.
    """
    if loader not in _GUARDED:
        return own_iter(loader)

    # A second iterator within an epoch gets workers of its own.
    is_held = _references(loader) > _UNHELD
    former = loader._iterator
    state = _state_of(loader.dataset)
    if former is not None and is_held and not getattr(former, _OVER, False):
        loader._iterator = None
        try:
            return own_iter(loader)
        finally:
            loader._iterator = former

    # Workers that hold an old state of the dataset are started again.
    if former is not None and state != _GUARDED[loader]:
        loader._iterator = None
        former._shutdown_workers()  # type: ignore[attr-defined] # only one with workers persists
    _GUARDED[loader] = state
    iterator = own_iter(loader)
    with suppress(AttributeError):  # a subclass may return a generator, which takes no attributes
        setattr(iterator, _OVER, False)
    return iterator


def is_over(iterator: Any) -> None:
    """Mark an iterator as having no more batches in its epoch."""
    setattr(iterator, _OVER, True)


def has_epochs(dataset: object) -> bool:
    """Return whether a dataset, or one inside it, has `set_epoch`: persistent workers miss the call."""
    return any(callable(getattr(one, "set_epoch", None)) for one in _datasets_in(dataset))


def _references(loader: Any) -> int:
    return sys.getrefcount(loader._iterator)


_UNHELD = _references(SimpleNamespace(_iterator=object()))
"""Reference count of an iterator that only the loader holds; it differs between Python versions."""


def _datasets_in(dataset: object) -> list[object]:
    """Return a dataset and those that it consists of (a Subset's, a ConcatDataset's)."""
    found = [dataset]
    for one in found:
        for value in _attributes_of(one).values():
            # Longer lists in a dataset hold samples.
            parts = value if isinstance(value, list | tuple) and len(value) <= 64 else [value]
            new = [part for part in parts if isinstance(part, Dataset)]
            found += [part for part in new if not any(part is known for known in found)]
    return found


def _state_of(dataset: object) -> _State:
    """Return a dataset's plain values, and the ids of the objects that it refers to."""
    state: list[object] = []
    for one in _datasets_in(dataset):
        for name, value in _attributes_of(one).items():
            is_plain = value is None or isinstance(value, bool | int | float | str)
            state.append((name, value if is_plain else id(value)))
    return tuple(state)


def _attributes_of(one: object) -> Mapping[str, object]:
    found: object = getattr(one, "__dict__", {})
    return found if isinstance(found, Mapping) else {}


# Hooks into torch


_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_OWN = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = ("<frozen ", sysconfig.get_path("stdlib"))

plain_next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__
"""torch's own function, for the iterators of all loaders."""
_plain_call = nn.Module.__call__
_plain_iters: dict[type, Callable[[Any], Any]] = {DataLoader: DataLoader.__iter__}


def install(session: Session) -> None:
    """Patch torch, so that it calls a session from now on."""
    if session.observes_modes:
        remember_places(_caller)
    _patch_loader(DataLoader, session)
    after_import(_STATEFUL, lambda module: _patch_loader(module.StatefulDataLoader, session))

    def next_batch(self: Any) -> Any:
        try:
            return session.on_next(self)
        except StopIteration:
            is_over(self)
            raise

    _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda *_: session.before_step())
    register_optimizer_step_post_hook(lambda optimizer, *_: session.on_step(optimizer))
    _patch_backward(session)
    _patch_calls(session)
    _patch_ddp(session)


def plain_iter(loader: DataLoader[Any]) -> Any:
    """Return torch's iterator of a loader, made without calling the session."""
    kind = next(base for base in type(loader).__mro__ if base in _plain_iters)
    return torchs_own(_plain_iters[kind](loader))


def torchs_own(iterator: Any) -> Any:
    """Return torch's iterator inside a wrapper (as of torch_geometric); else the iterator itself."""
    if isinstance(iterator, _BaseDataLoaderIter):
        return iterator
    inside = getattr(iterator, "__dict__", {}).values()
    return next((value for value in inside if isinstance(value, _BaseDataLoaderIter)), iterator)


def release_module_calls() -> None:
    """Stop calling the session for module calls, since it costs each call a little."""
    nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
    _CALLS.is_inside = _CALLS.is_released = True


def _patch_loader(kind: type[DataLoader[Any]], session: Session) -> None:
    """Patch a loader class that has its own `__init__` and `__iter__`."""
    plain_init = kind.__init__
    signature = inspect.signature(kind.__init__)
    made = Counter[tuple[str, int]]()
    own_iter = kind.__iter__
    _plain_iters[kind] = own_iter

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        place = _caller()
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # torch raises the error itself
            plain_init(self, *args, **kwargs)
            return
        arguments = dict(bound.arguments)
        arguments.pop("self")
        arguments |= arguments.pop("kwargs", {})
        site = _site_of(*place, made[place], arguments)
        made[place] += 1
        is_persistent = arguments.get("persistent_workers")
        is_searched = session.overrides.loader(site, arguments)
        plain_init(self, **arguments)
        if self.persistent_workers and not is_persistent:
            guard_persistent(self)
        session.loader_made(site, self, is_searched=is_searched)

    @wraps(own_iter)
    def begin(self: Any) -> Any:
        instead = session.before_iter(self)
        if instead is not None:
            return instead
        with workers_unwatched(), session.making_iterator(self), session.iterating(self):
            iterator = begin_persistent(self, own_iter)
        session.after_iter(self, iterator)
        return iterator

    kind.__init__ = init  # type: ignore[method-assign]
    kind.__iter__ = begin  # type: ignore[method-assign]


def _caller() -> tuple[str, int]:
    """Return file and line of the script's running code; else of a package other than torch."""
    frame: FrameType | None = sys._getframe(1)
    nearest: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH)):
            nearest = nearest or frame
            if not name.startswith(_LIBRARY) and not INSTALLED & set(Path(name).parts):
                nearest = frame
                break
        frame = frame.f_back
    if nearest is None:
        return "unknown", 0
    return str(Path(nearest.f_code.co_filename).absolute()), nearest.f_lineno


def users_place() -> str:
    """Return the name of the file and the line of the script's running code, such as "train.py:41"."""
    return shown_line(*_caller())


def _site_of(file: str, line: int, nth: int, arguments: dict[str, Any]) -> LoaderSite:
    """Return the call site of a loader, with its dataset, order and batch size.

    Args:
        file: File of the call.
        line: Line of the call.
        nth: Number of loaders made there before.
        arguments: The loader's arguments by name.
    """
    dataset = arguments.get("dataset")
    batches = arguments.get("batch_sampler")
    sampler = arguments.get("sampler")
    if batches is not None:
        sampler = getattr(batches, "sampler", batches)
    order = "shuffle" if arguments.get("shuffle") else ""
    if sampler is not None:
        order = type(sampler).__name__
    size = arguments.get("batch_size", 1)
    has_size = batches is None and isinstance(size, Integral)
    kind = type(dataset)
    length = None
    with suppress(Exception):  # the user's own dataset may not be ready yet
        length = len(dataset)  # type: ignore[arg-type]
    return LoaderSite(
        file=file,
        line=line,
        nth=nth,
        code=linecache.getline(file, line).strip(),
        dataset=f"{kind.__module__}.{kind.__qualname__}",
        length=length,
        order=order,
        batch_size=int(size) if has_size else None,
    )


def _patch_backward(session: Session) -> None:
    """Patch torch.autograd.backward, which Tensor.backward looks up by name."""
    plain = torch.autograd.backward

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(loss, torch.Tensor):
            session.on_loss(loss)
        with session.inside("backward"):
            plain(tensors, *args, **kwargs)
        session.after_backward()

    torch.autograd.backward = backward


@dataclass(slots=True)
class _Calls:
    """State of the patched module calls.

    A module that torch.compile wraps keeps our `call` for ever, and is compiled with this state as
    constants: once released it stays released, or the module would be compiled again.
    """

    is_inside: bool = False
    """True during an outermost module's call."""
    is_released: bool = False
    """True once the session is no longer called."""


_CALLS = _Calls()


def _patch_calls(session: Session) -> None:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _CALLS.is_inside:
            return _plain_call(self, *args, **kwargs)
        _CALLS.is_inside = True
        try:
            session.on_call(self, args, kwargs)
            with session.calling(self):
                return switched(self, partial(_plain_call, self), args, kwargs)
        finally:
            _CALLS.is_inside = _CALLS.is_released

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _patch_ddp(session: Session) -> None:
    plain_init = DistributedDataParallel.__init__
    signature = inspect.signature(DistributedDataParallel.__init__)

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop("self")
        session.overrides.ddp(arguments)
        plain_init(self, **arguments)
        session.ddp_made(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
