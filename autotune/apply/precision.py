"""Set the precision of torch's float32 products, TF32 or float32, and restore it.

torch stores the precision twice: in a tree (`fp32_precision` of all backends, a backend, or one of
its operators, each of which may inherit from the one above) and in two older settings,
`get_float32_matmul_precision()` and `cudnn.allow_tf32`. It raises on reading the older ones if the
two differ. Both are saved and restored separately. Source: aten/src/ATen/Context.cpp and
Context.h, torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

_Node = tuple[str, str]
"""A backend and an operator, by torch's names."""
_GENERIC: _Node = ("generic", "all")
_CUDA: _Node = ("cuda", "all")
_MKLDNN: _Node = ("mkldnn", "all")
_MATMULS: tuple[_Node, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))
"""Nodes that set_float32_matmul_precision writes to."""
_CUDNN: tuple[_Node, ...] = (("cuda", "conv"), ("cuda", "rnn"))
"""Nodes that cudnn.allow_tf32 writes to."""
_PARENTS: dict[_Node, _Node] = {
    _CUDA: _GENERIC,
    _MKLDNN: _GENERIC,
    **{node: (node[0], "all") for node in _MATMULS + _CUDNN},
}
"""The node that each node may inherit its precision from, backends first."""
_INHERITED = "none"
_AMPERE = (8, 0)
"""Compute capability of the first GPUs with TF32. Source: NVIDIA, CUDA C++ Programming Guide,
compute capabilities."""


class _Before(NamedTuple):
    """The settings to restore."""

    own: dict[_Node, str]
    """Own value of each node, "none" if it inherits."""
    matmul: str
    """The older setting: "highest", "high" or "medium"."""
    cudnn: bool
    """The older setting for convolutions and recurrent layers."""


class Float32Precision(AbstractContextManager[None]):
    """A reusable, reentrant context that sets the precision of float32 products for the whole process."""

    def __init__(self, enter: Callable[[_Before], None]) -> None:
        self._enter = enter
        self._before = list[_Before]()

    def __enter__(self) -> None:
        own = _own_values()
        self._before.append(_Before(own, _older_matmul(own), _older_cudnn(own)))
        self._enter(self._before[-1])

    def __exit__(self, *_: object) -> None:
        _put_back(self._before.pop())


def tf32_products() -> Float32Precision:
    """Return a context that runs matrix products, convolutions and recurrent layers in TF32."""
    return Float32Precision(_allow_tf32)


def allows_tf32() -> bool:
    """Return True if the process computes matrix products in TF32 and its GPU can."""
    torch = _torch()
    if torch.version.hip is not None or (
        torch.cuda.is_available() and torch.cuda.get_device_capability() < _AMPERE
    ):
        return False
    return _get(("cuda", "matmul")) == "tf32"


def exact_matmuls() -> Float32Precision:
    """Return a context that runs matrix products in float32, whatever the environment or user code allows.

    Convolutions and recurrent layers keep torch's default, TF32.
    """
    return Float32Precision(lambda _: _torch().set_float32_matmul_precision("highest"))


def _allow_tf32(before: _Before) -> None:
    torch = _torch()
    torch.set_float32_matmul_precision("high")
    if not before.cudnn:
        torch.backends.cudnn.allow_tf32 = True
    for node in (_CUDA, *_CUDNN):
        if _get(node) != "tf32":
            _set(node, "tf32")


def _put_back(before: _Before) -> None:
    torch = _torch()
    # This also writes to the operators' nodes, so they are restored afterwards.
    torch.set_float32_matmul_precision(before.matmul)
    if not before.cudnn:
        torch.backends.cudnn.allow_tf32 = False
    for node, value in before.own.items():
        if value != _INHERITED or node not in _CUDNN or not before.cudnn:
            _set(node, value)


def _own_values() -> dict[_Node, str]:
    """Return each node's own value; a node that changes with its parent inherits.

    Nodes that inherit are not written to: even writing "none" may lose torch's initial state, in
    which convolutions and recurrent layers run in TF32 unless a parent has another precision.
    """
    own = {_GENERIC: _get(_GENERIC)}
    for node, parent in _PARENTS.items():
        other = "tf32" if node[0] == "cuda" else "bf16"  # each backend's alternative to float32
        read = []
        for value in ("ieee", other):
            with _held_at(value, {parent: own[parent]}):
                read.append(_get(node))
        own[node] = _INHERITED if read == ["ieee", other] else read[0]
    return own


def _older_matmul(own: Mapping[_Node, str]) -> str:
    """Return the older setting, which torch only returns if the operators' nodes agree with it."""
    with _held_at("ieee", {node: own[node] for node in _MATMULS}):
        return str(_torch().get_float32_matmul_precision())


def _older_cudnn(own: Mapping[_Node, str]) -> bool:
    """Return the older setting, which torch only returns if its nodes agree: all in TF32 if it is True."""
    held = {node: own[node] for node in _CUDNN if own[node] != _INHERITED}
    with suppress(RuntimeError), _held_at("tf32", {_CUDA: own[_CUDA], **held}):
        return bool(_torch().backends.cudnn.allow_tf32)
    return False


@contextmanager
def _held_at(value: str, own: Mapping[_Node, str]) -> Iterator[None]:
    """Set these nodes to a value, and restore their own at the end."""
    for node in own:
        _set(node, value)
    try:
        yield
    finally:
        for node, before in own.items():
            _set(node, before)


def _get(node: _Node) -> str:
    """Return a node's precision, its own or inherited.

    This uses private functions, since the public name for cuDNN's recurrent layers came later, and
    setting `mkldnn.fp32_precision` changes all backends. Source: torch/backends/__init__.py,
    mkldnn/__init__.py, torch 2.13.
    """
    return str(_torch()._C._get_fp32_precision_getter(*node))  # noqa: SLF001 - see above


def _set(node: _Node, value: str) -> None:
    _torch()._C._set_fp32_precision_setter(*node, value)  # noqa: SLF001 - see _get


def _torch() -> Any:
    import torch

    return torch
