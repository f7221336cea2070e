# ruff: noqa: SLF001 - torch's own names
"""The seams of torch at which a script is observed and changed, and imports as they happen."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import linecache
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Integral
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol
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
from autotune.worker.script.overrides import switched

# Act once a module has been imported, whoever imports it and whenever. Imports neither torch nor
# anything heavy.


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Act on a module now, where it is imported, else once it is executed."""
    module = sys.modules.get(name)
    if module is not None and not _is_half_done(module):
        act(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, act))


def _is_half_done(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module by the finders behind it, and acts once that is executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act
        self._loader: Any = None
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with this as its loader."""
        if (
            fullname != self._name or self._is_asking
        ):  # another that waits for the same module asks this one too
            return None
        self._is_asking = True
        try:
            spec = self._found(path, target)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does; then act."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if (
            self in sys.meta_path
        ):  # until here: many ask for a spec only to know whether there is such a module
            sys.meta_path.remove(self)
        self._act(module)

    def _found(
        self, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the other finders say."""
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(self._name, path, target)
                if spec is not None:
                    return spec
        return None


# Workers that outlive their epoch because autotune says so: in all else the script is to train as
# if they did not.
#
# Comes in: a loader that is given `persistent_workers` from outside, whenever it is iterated. Goes
# out: an iterator. Such workers hold the dataset as it was when they began, so that they are
# started again where the script has changed it since (`set_epoch`, a curriculum); and a loader has
# one such iterator, so that a second one within an epoch gets workers of its own, or the first
# would begin again. Changes inside of a list or a tensor of the dataset are not seen.


_OVER = "autotune_is_over"
_State = tuple[object, ...]
_GUARDED: WeakKeyDictionary[DataLoader[Any], _State] = WeakKeyDictionary()
"""The state of the dataset that the workers of each loader hold."""


def guard_persistent(loader: DataLoader[Any]) -> None:
    """Have a loader, just made, train as if its workers ended with each epoch."""
    _GUARDED[loader] = ()


def begin_persistent(loader: DataLoader[Any], own_iter: Callable[[Any], Any]) -> Any:
    """Iterate a loader by its own `__iter__`."""
    if loader not in _GUARDED:
        return own_iter(loader)
    is_held = _references(loader) > _UNHELD
    former = loader._iterator
    state = _state_of(loader.dataset)
    if former is not None and is_held and not getattr(former, _OVER, False):
        loader._iterator = None
        try:
            return own_iter(loader)
        finally:
            loader._iterator = former
    if former is not None and state != _GUARDED[loader]:
        loader._iterator = None
        former._shutdown_workers()  # type: ignore[attr-defined] # only one with workers persists
    _GUARDED[loader] = state
    iterator = own_iter(loader)
    with suppress(AttributeError):  # a subclass's may be a generator, which nothing can be noted on
        setattr(iterator, _OVER, False)
    return iterator


def is_over(iterator: Any) -> None:
    """An iterator has no more batches for its epoch: whoever still holds it will ask for none."""
    setattr(iterator, _OVER, True)


def has_epochs(dataset: object) -> bool:
    """Return whether a dataset, or one inside of it, is told of its epoch, which workers that persist never hear of."""
    return any(callable(getattr(one, "set_epoch", None)) for one in _datasets_in(dataset))


def _references(loader: Any) -> int:
    return sys.getrefcount(loader._iterator)


class _Alone:
    """Holds an iterator that nobody else does."""

    def __init__(self) -> None:
        self._iterator = object()


_UNHELD = _references(_Alone())
"""References of an iterator that the loader alone holds; it differs between versions of Python."""


def _datasets_in(dataset: object) -> list[object]:
    """A dataset and those that it is made of: a Subset's, a ConcatDataset's."""
    found = [dataset]
    for one in found:
        for value in _attributes_of(one).values():
            # longer lists in a dataset are samples
            parts = value if isinstance(value, list | tuple) and len(value) <= 64 else [value]
            found += [
                part
                for part in parts
                if isinstance(part, Dataset) and not any(part is known for known in found)
            ]
    return found


def _state_of(dataset: object) -> _State:
    """What of a dataset can be compared: plain values, and which objects it refers to."""
    state: list[object] = []
    for one in _datasets_in(dataset):
        for name, value in _attributes_of(one).items():
            is_plain = value is None or isinstance(value, bool | int | float | str)
            state.append((name, value if is_plain else id(value)))
    return tuple(state)


def _attributes_of(one: object) -> Mapping[str, object]:
    found: object = getattr(one, "__dict__", {})
    return found if isinstance(found, Mapping) else {}


# The seams of torch at which a script is seen and changed: loaders, iterators, optimizers, losses,
# outermost modules.
#
# Comes in: a Watcher. Its methods are called from here on, in the script's own thread, at what
# torch does. Each seam is the one that subclasses share (`_BaseDataLoaderIter.__next__`), so that
# frameworks' loaders go through it too. A process has one watcher.


_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
_OWN = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = ("<frozen ", sysconfig.get_path("stdlib"))

plain_next: Callable[[Any], Any] = _BaseDataLoaderIter.__next__
"""torch's own, for iterators of every loader."""
_plain_call = nn.Module.__call__
_plain_iters: dict[type, Callable[[Any], Any]] = {}


class Watcher(Protocol):
    """What is told of the script's doings; what may change them says so."""

    def loader_arguments(self, site: LoaderSite, arguments: dict[str, Any]) -> None:
        """A loader is about to be made with these arguments by name, which may be changed."""
        ...

    def loader_made(self, site: LoaderSite, loader: DataLoader[Any]) -> None:
        """A loader was made."""
        ...

    def before_iter(self, loader: DataLoader[Any]) -> object | None:
        """A loader is about to be iterated; an iterator to take the place of its own, or None."""
        ...

    def making_iterator(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        """Return the context in which its own iterator is made."""
        ...

    def after_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """It has an iterator now."""
        ...

    def on_next(self, iterator: Any) -> Any:
        """The script asks for a batch."""
        ...

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        ...

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        ...

    def on_loss(self, loss: torch.Tensor) -> None:
        """A backward pass begins from here."""
        ...

    def after_backward(self) -> None:
        """A backward pass has been made."""
        ...

    def on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is called that no other module has called; until `release_module_calls`. May not raise."""
        ...

    def ddp_arguments(self, arguments: dict[str, Any]) -> None:
        """A model is about to be wrapped; the arguments may be changed."""
        ...

    def ddp_made(self, model: DistributedDataParallel) -> None:
        """A model was wrapped."""
        ...


def install(watcher: Watcher) -> None:
    """Have a watcher told of everything from now on."""
    _patch_loader(DataLoader, watcher)
    after_import(_STATEFUL, lambda module: _patch_loader(module.StatefulDataLoader, watcher))

    def next_batch(self: Any) -> Any:
        try:
            return watcher.on_next(self)
        except StopIteration:
            is_over(self)
            raise

    _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda optimizer, *_: watcher.before_step(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: watcher.on_step(optimizer))
    _patch_backward(watcher)
    _patch_calls(watcher)
    _patch_ddp(watcher)


def plain_iter(loader: DataLoader[Any]) -> Any:
    """A loader's own iterator, which nobody is told of; torch's within a wrapper around it."""
    own = next(
        (_plain_iters[base] for base in type(loader).__mro__ if base in _plain_iters),
        DataLoader.__iter__,
    )
    return torchs_own(own(loader))


def torchs_own(iterator: Any) -> Any:
    """Torch's iterator within one that wraps it, as torch_geometric's do; else the iterator itself."""
    if isinstance(iterator, _BaseDataLoaderIter):
        return iterator
    inside = getattr(iterator, "__dict__", {}).values()
    return next((value for value in inside if isinstance(value, _BaseDataLoaderIter)), iterator)


def release_module_calls() -> None:
    """Let modules be called without anyone being told: it would cost each call a little."""
    nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
    _CALLS.is_inside = _CALLS.is_released = True


def _patch_loader(kind: type[DataLoader[Any]], watcher: Watcher) -> None:
    """Watch the loaders of a class that has an `__init__` and an `__iter__` of its own."""
    plain_init = kind.__init__
    signature = inspect.signature(kind.__init__)
    made = Counter[tuple[str, int]]()
    own_iter = kind.__iter__
    _plain_iters[kind] = own_iter
    _plain_iters.setdefault(DataLoader, own_iter)

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        place = _caller()
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # torch says what is wrong with them
            plain_init(self, *args, **kwargs)
            return
        arguments = dict(bound.arguments)
        arguments.pop("self")
        arguments |= arguments.pop("kwargs", {})
        site = _site_of(*place, made[place], arguments)
        made[place] += 1
        is_persistent = arguments.get("persistent_workers")
        watcher.loader_arguments(site, arguments)
        plain_init(self, **arguments)
        if self.persistent_workers and not is_persistent:
            guard_persistent(self)
        watcher.loader_made(site, self)

    @wraps(own_iter)
    def begin(self: Any) -> Any:
        instead = watcher.before_iter(self)
        if instead is not None:
            return instead
        with workers_unwatched(), watcher.making_iterator(self):
            iterator = begin_persistent(self, own_iter)
        watcher.after_iter(self, iterator)
        return iterator

    kind.__init__ = init  # type: ignore[method-assign]
    kind.__iter__ = begin  # type: ignore[method-assign]


def _caller() -> tuple[str, int]:
    """Where the script's own code stands that is running; where there is none, that of a package other than torch."""
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
    return (
        ("unknown", 0)
        if nearest is None
        else (str(Path(nearest.f_code.co_filename).absolute()), nearest.f_lineno)
    )


def _site_of(file: str, line: int, nth: int, arguments: dict[str, Any]) -> LoaderSite:
    """Where and how a loader is made with these arguments by name."""
    dataset = arguments.get("dataset")
    batches = arguments.get("batch_sampler")
    drawing = (
        getattr(batches, "sampler", batches) if batches is not None else arguments.get("sampler")
    )
    size = arguments.get("batch_size", 1)
    kind = type(dataset)
    length = None
    with suppress(Exception):  # the user's own, which may not be ready yet
        length = len(dataset)  # type: ignore[arg-type]
    return LoaderSite(
        file=file,
        line=line,
        nth=nth,
        code=linecache.getline(file, line).strip(),
        dataset=f"{kind.__module__}.{kind.__qualname__}",
        length=length,
        order=type(drawing).__name__
        if drawing is not None
        else "shuffle"
        if arguments.get("shuffle")
        else "",
        batch_size=int(size) if batches is None and isinstance(size, Integral) else None,
    )


def _patch_backward(watcher: Watcher) -> None:
    """Tensor.backward calls the function of torch.autograd by its name there."""
    plain = torch.autograd.backward

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(loss, torch.Tensor):
            watcher.on_loss(loss)
        plain(tensors, *args, **kwargs)
        watcher.after_backward()

    torch.autograd.backward = backward


@dataclass(slots=True)
class _Calls:
    """Whether an outermost module's call is under way.

    A module that torch.compile wraps keeps our `call` for ever, and is compiled with what this says
    inside of it: once released it stays so, or the module would be compiled anew.
    """

    is_inside: bool = False
    is_released: bool = False


_CALLS = _Calls()


def _patch_calls(watcher: Watcher) -> None:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _CALLS.is_inside:
            return _plain_call(self, *args, **kwargs)
        _CALLS.is_inside = True
        try:
            watcher.on_call(self, args, kwargs)
            return switched(self, partial(_plain_call, self), args, kwargs)
        finally:
            _CALLS.is_inside = _CALLS.is_released

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _patch_ddp(watcher: Watcher) -> None:
    plain_init = DistributedDataParallel.__init__
    signature = inspect.signature(DistributedDataParallel.__init__)

    @wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop("self")
        watcher.ddp_arguments(arguments)
        plain_init(self, **arguments)
        watcher.ddp_made(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
