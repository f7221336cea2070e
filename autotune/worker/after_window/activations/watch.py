"""What one forward pass keeps for its backward pass, storage by storage, and inside which block.

Takes the tensors that autograd keeps and the calls of blocks; hands on SavedBytes. Hooks stand on blocks only as long
as a context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from autotune.records.memory import SavedBytes
from autotune.worker.measure.batch import tensors_of

__all__ = ["Watch", "hooked"]

Hook: TypeAlias = tuple[nn.Module, Callable[[Iterable[Any]], None], Callable[[], None]]
"""A block, what is called before it with its inputs, and what is called after it."""


@dataclass(slots=True)
class _Kept:
    """A storage that is kept for the backward pass, and where that was asked for."""

    size: int
    places: set[tuple[int | None, ...]] = field(default_factory=set)
    """For each class of blocks the number of the block's call; None: outside of all."""


@dataclass(slots=True)
class Watch:
    """What one forward pass keeps, by storages, and the blocks' calls in it."""

    left_out: frozenset[int]
    """Addresses of parameters and buffers."""
    calls: list[int]
    """So far, of each class of blocks."""
    inside: list[list[int]]
    """Numbers of the calls under way, of each class: a block may hold another of its class."""
    is_over: bool = False
    kept: dict[int, _Kept] = field(default_factory=dict)
    inputs: list[dict[int, int]] = field(default_factory=list)
    """Bytes of what blocks were given, by address, for each class."""
    alive: list[Any] = field(default_factory=list)
    """Storages, so that no address stands for two of them."""

    def enter(self, kind: int, inputs: Iterable[Any]) -> None:
        """A block's forward pass begins."""
        if self.is_over:
            return
        if not self.inside[kind]:
            self.calls[kind] += 1
            for tensor in tensors_of(list(inputs)):
                address, size = self._storage(tensor)
                if size:
                    self.inputs[kind][address] = size
        self.inside[kind].append(self.calls[kind] - 1)

    def leave(self, kind: int) -> None:
        """It has ended, or failed."""
        if not self.is_over and self.inside[kind]:
            self.inside[kind].pop()

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor is kept; its values stay as they are.

        Handed on is never the tensor itself: an operation that keeps its own output would hold itself through it until
        a backward pass comes (torch, torch.autograd.graph.saved_tensors_hooks).
        """
        if not self.is_over:
            address, size = self._storage(tensor)
            if size:
                place = tuple(calls[0] if calls else None for calls in self.inside)
                self.kept.setdefault(address, _Kept(size)).places.add(place)
        return tensor.detach()

    def end(self) -> None:
        """The forward pass is over: the backward pass may free what it has used."""
        self.is_over = True
        self.alive.clear()

    def saved(self, kind: int | None, samples: int) -> SavedBytes:
        """The bytes, as a class of blocks divides them; None: none does."""
        total = sum(one.size for one in self.kept.values())
        if kind is None:
            return SavedBytes(samples=samples, total_bytes=total)
        within = {at: one for at, one in self.kept.items() if all(place[kind] is not None for place in one.places)}
        inputs = {at: size for at, size in self.inputs[kind].items() if at in within or at not in self.kept}
        of_calls = [0] * self.calls[kind]
        for at, one in within.items():
            for call in {place[kind] for place in one.places} if at not in inputs else ():
                of_calls[call or 0] += one.size
        return SavedBytes(
            samples=samples,
            total_bytes=total,
            inside_bytes=sum(one.size for one in within.values()),
            inputs_bytes=sum(inputs.values()),
            largest_bytes=max(of_calls, default=0),
        )

    def left_bytes(self, kind: int) -> int:
        """What is left at the most where each block of a class is checkpointed."""
        saved = self.saved(kind, 1)
        return saved.total_bytes - saved.least_saved_bytes

    def _storage(self, tensor: Tensor) -> tuple[int, int]:
        """Address and bytes; no bytes of what is left out, and of tensors without a storage of their own."""
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse ones and the like
            return 0, 0
        if not address or address in self.left_out:
            return 0, 0
        self.alive.append(storage)
        return address, size


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Call a function before each block with its inputs, and another after it, whether it fails or not."""
    handles = list[Any]()

    def before(enter: Callable[[Iterable[Any]], None], _: nn.Module, args: Any, kwargs: Any) -> None:
        enter((*args, *kwargs.values()))

    def after(leave: Callable[[], None], *_: Any) -> None:
        leave()

    try:
        for block, enter, leave in hooks:
            handles.append(block.register_forward_pre_hook(partial(before, enter), with_kwargs=True))
            handles.append(block.register_forward_hook(partial(after, leave), always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
