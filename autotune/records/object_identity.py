"""What a live object is: a short text that changes with its code and data, and is equal in another process.

Comes in: a model, dataset or function of a Python call. Goes out: an ObjectIdentity. Functions count by their bytecode,
defaults, closures and the globals that they name; classes by their methods and bases; instances by their class and
attributes; code of the standard library and of installed packages by its name alone. Weights of a model are random, so
that only their shapes count. Nothing of the object's is called, addresses and hash seeds play no part, and the work is
bounded: what was left out is listed.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from itertools import islice
from pathlib import PurePath
from re import Pattern
from typing import Any

__all__ = ["LIBRARY_FOLDERS", "ObjectIdentity", "identify_object"]

_PATHS = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
LIBRARY_FOLDERS = (*_PATHS, str(PurePath(__file__).parents[1]))
"""Where code lies that is known by its name: Python's, that of installed packages, and our own."""

# Our conventions: an unusually large workload is described in about half a second.
_MOST_OBJECTS = 100_000
_MOST_ITEMS = 20_000  # of one container
_MOST_BYTES = 64 * 1024  # of one text, array or tensor
_DEEPEST = 40
_SHORT = 80  # characters of a value that stands for itself, without a digest
_MOST_NAMED = 3

_READ = {
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    type(functools.lru_cache(len)): ("__wrapped__",),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    range: ("start", "stop", "step"),
    slice: ("start", "stop", "step"),
    Pattern: ("pattern", "flags"),
    types.CellType: ("cell_contents",),
    types.MethodType: ("__func__", "__self__"),
    types.CodeType: ("co_name", "co_code", "co_names", "co_consts", "co_argcount", "co_kwonlyargcount", "co_flags"),
}
"""Python's own types that are what these attributes are."""
_PLAIN = frozenset(map(id, (type(None), bool, int, float, complex, str, type(...))))  # a metaclass may refuse to hash
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType)
_NAMED = (types.ModuleType, types.BuiltinFunctionType, types.WrapperDescriptorType, *_DESCRIPTORS)
"""Types that are what they are called."""
_TEXTS = (str, bytes, bytearray)
_NUMBERS = (int, float, complex)
_BUILT_IN = (*_TEXTS, *_NUMBERS, list, tuple, deque, dict, set, frozenset)
_DTYPES = ("torch.dtype", "torch.device", "numpy.dtype")
_ARRAYS = ("torch.Tensor", "numpy.ndarray", "numpy.generic")
_WITHOUT_EFFECT = frozenset({"_abc", "_thread", "collections", "logging", "threading", "typing", "weakref"})
"""Modules of Python whose objects change nothing about training, and need no mention."""
_READ_INSIDE = frozenset({"argparse", "torch", "torchaudio", "torchvision", "types"})
"""Packages whose objects hold what the user put into them: TensorDataset, SimpleNamespace."""
_QUALIFIED_NAME = type.__dict__["__qualname__"].__get__  # whatever a metaclass has in its place


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectIdentity:
    """An object as a text, and what of it the text leaves out."""

    text: str
    """Such as "Photos#3f2a9c01d4e5": a name, and a digest of all that was compared."""
    not_compared: tuple[str, ...]
    """Such as "dataset.reader (Connection)", a few of them; () where all was compared."""


def identify_object(value: object, name: str) -> ObjectIdentity:
    """Describe an object; `name` is what it is called where something of it is not compared."""
    reader = _Reader()
    digest = reader.describe(value, name)
    left_out = tuple(reader.left_out)
    named = left_out[:_MOST_NAMED] + (("and more",) if len(left_out) > _MOST_NAMED else ())
    remark = f" (not compared: {', '.join(named)})" if named else ""
    return ObjectIdentity(text=f"{_label(value)}#{digest}{remark}", not_compared=named)


class _Reader:
    """Describes one object and all that it leads to, each once."""

    def __init__(self) -> None:
        self.left_out: dict[str, None] = {}
        self._done: dict[int, tuple[object, str]] = {}  # holds each object, so that its id stays its own
        self._open: dict[int, int] = {}
        self._objects = 0

    def describe(self, value: object, where: str) -> str:
        """A digest of a value; `where` is its name in messages."""
        self._objects += 1
        if id(type(value)) in _PLAIN and len(short := _plain(value)) <= _SHORT:
            return short
        key = id(value)
        if key in self._done:
            return self._done[key][1]
        if key in self._open:
            return f"cycle {len(self._open) - self._open[key]}"
        if self._objects > _MOST_OBJECTS or len(self._open) >= _DEEPEST:
            return self._leave_out(value, where)
        self._open[key] = len(self._open)
        try:
            digest = _digest(repr((_label(type(value)), *self._parts(value, where))))
        except Exception:  # noqa: BLE001 - whatever reading an attribute raises, a search must not fail for it
            digest = self._leave_out(value, where)
        finally:
            del self._open[key]
        self._done[key] = (value, digest)
        return digest

    def _parts(self, value: Any, where: str) -> Iterable[str]:  # noqa: PLR0911 - one return for each kind of value
        """What a value is made of, each part as a text."""
        kind = type(value)
        if id(kind) in _PLAIN and kind is not str:
            return [_plain(value)]
        if issubclass(kind, _NAMED):
            return [str(getattr(value, "__module__", None)), getattr(value, "__qualname__", value.__name__)]
        if issubclass(kind, type):
            return self._class(value, where)
        if kind is types.FunctionType:
            return self._function(value, where)
        names = next((_READ[base] for base in kind.__mro__ if base in _READ), None)
        if names is not None:
            return [self.describe(getattr(value, name), where) for name in names]
        if issubclass(kind, Enum):
            return [self.describe(kind, where), value._name_]
        if _is_library(kind) and (issubclass(kind, PurePath) or _is_a(kind, *_DTYPES)):
            return [str(value)]
        if _is_library(kind) and _is_a(kind, *_ARRAYS):
            return self._array(value, where)
        return [*self._content(value, where), *self._instance(value, where)]

    def _content(self, value: Any, where: str) -> Iterable[str]:
        """The characters, digits or items of a value of a built-in type, or of a class derived from one."""
        base: Any = next((base for base in _BUILT_IN if issubclass(type(value), base)), None)
        if base is None or base in _NUMBERS:
            return [base.__repr__(value)] if base is not None else []
        length, most = base.__len__(value), _MOST_BYTES if base in _TEXTS else _MOST_ITEMS
        if length > most:
            self._leave_out(value, f"{where} from item {most} on")
        if base in _TEXTS:
            return [str(length), repr(base.__getitem__(value, slice(most)))]
        return [str(length), *self._items(value, base, where)]

    def _items(self, value: Any, base: Any, where: str) -> Iterable[str]:
        if base in (set, frozenset):
            # The order depends on the hash seed: which members would be the first can't be said.
            few = base.__iter__(value) if base.__len__(value) <= _MOST_ITEMS else ()
            return sorted(self.describe(member, where) for member in few)
        if base is dict:
            pairs = [(self.describe(key, where), key, item) for key, item in islice(dict.items(value), _MOST_ITEMS)]
            places = [f"{where}[{key!r:.20}]" if type(key) is str else where for _, key, _ in pairs]
            return sorted(
                f"{name} {self.describe(item, place)}" for (name, _, item), place in zip(pairs, places, strict=True)
            )
        first = islice(base.__iter__(value), _MOST_ITEMS)
        return [self.describe(item, f"{where}[{index}]") for index, item in enumerate(first)]

    def _instance(self, value: Any, where: str) -> Iterable[str]:
        """Class and attributes."""
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        if _is_library(kind) and root not in _READ_INSIDE:
            if root not in _WITHOUT_EFFECT and not issubclass(kind, _BUILT_IN):
                self._leave_out(value, where)
            return [f"{kind.__module__}.{_label(kind)}"]
        if _is_a(kind, *_ARRAYS):  # a class of the user's: its content can't be read without their code
            self._leave_out(value, where)
        attributes, shapes = _attributes(value), list[str]()
        if _is_a(kind, "torch.nn.Module"):
            attributes, shapes = _without_weights(attributes)
        texts = [f"{name} {self.describe(attributes[name], f'{where}.{name}')}" for name in sorted(attributes)]
        return [self.describe(kind, f"{where}'s class"), *shapes, *texts]

    def _array(self, value: Any, where: str) -> Iterable[str]:
        """Shape and dtype of an array or tensor; of a small one in the host's memory the content too."""
        parts = [_label(type(value)), _shape(value)]
        if value.nbytes > _MOST_BYTES or str(getattr(value, "device", "cpu")) != "cpu":
            self._leave_out(value, f"{where}'s values")
            return parts
        if _is_a(type(value), "torch.Tensor"):
            torch = sys.modules["torch"]
            value = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        return [*parts, _digest(value.tobytes()) if value.dtype != object else self.describe(value.tolist(), where)]

    def _function(self, function: types.FunctionType, where: str) -> Iterable[str]:
        if _is_library(function):
            return [f"{function.__module__}.{_label(function)}"]
        names = sorted(set(_names(function.__code__)))
        used: dict[str, object] = {name: function.__globals__[name] for name in names if name in function.__globals__}
        for module in [held for held in used.values() if type(held) is types.ModuleType and not _is_library(held)]:
            used |= {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
        own = (function.__code__, function.__defaults__, function.__kwdefaults__, function.__closure__)
        globals_ = [f"{name} {self.describe(held, name)}" for name, held in used.items() if not name.startswith("__")]
        return [function.__qualname__, *(self.describe(part, where) for part in own), *globals_]

    def _class(self, kind: Any, where: str) -> Iterable[str]:
        if _is_library(kind):
            return [f"{kind.__module__}.{_label(kind)}"]
        attributes, bases = (type.__getattribute__(kind, name) for name in ("__dict__", "__bases__"))
        callables = (types.FunctionType, staticmethod, classmethod, property)
        names = sorted(
            name for name, held in attributes.items() if not name.startswith("__") or type(held) in callables
        )
        texts = [f"{name} {self.describe(attributes[name], f'{where}.{name}')}" for name in names]
        return [_label(kind), *texts, *(self.describe(base, where) for base in bases)]

    def _leave_out(self, value: object, where: str) -> str:
        if len(self.left_out) <= _MOST_NAMED:
            self.left_out[f"{where} ({_label(type(value))})"] = None
        return f"left out {_label(type(value))}"


def _plain(value: Any) -> str:
    """A number, a text or a constant as it is written, texts in front only: repr() refuses the longest numbers."""
    return f"{value:#x}" if type(value) is int else repr(value[: _SHORT + 1] if type(value) is str else value)


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as they are stored, in the instance or in slots; no property or __getattr__ runs."""
    slots = (item for base in type(value).__mro__ for item in type.__getattribute__(base, "__dict__").items())
    members = [(name, held) for name, held in slots if isinstance(held, types.MemberDescriptorType)]
    found = dict[str, Any]()
    for name, member in members:
        with suppress(AttributeError):  # nothing was assigned
            found[name] = member.__get__(value)
    with suppress(AttributeError):  # of slots alone
        found |= object.__getattribute__(value, "__dict__")
    return found


def _without_weights(attributes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A module's submodules and public attributes, and the shapes of its tensors, whose values may be random."""
    held = [*attributes["_parameters"].items(), *attributes["_buffers"].items()]
    held += [(name, value) for name, value in attributes.items() if _is_a(type(value), "torch.Tensor")]
    public = {name for name in attributes if not name.startswith("_")} - {"training", *dict(held)}
    kept = {name: attributes[name] for name in (*public, "_modules")}
    return kept, [f"{name} {_shape(tensor)}" for name, tensor in sorted(held, key=lambda pair: pair[0])]


def _names(code: types.CodeType) -> Iterable[str]:
    """The globals and attributes that a function's code names, those of the functions in it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _shape(array: Any) -> str:
    """Shape and dtype; of a lazy parameter, which has no shape before its first batch, that alone."""
    try:
        return "None" if array is None else f"{tuple(array.shape)} {array.dtype}"
    except RuntimeError:
        return "lazy"


def _is_a(kind: type, *names: str) -> bool:
    """Whether a type is one of these of a package, or derived from one; nothing is imported to find out."""
    homes = (name.rpartition(".") for name in names)
    owners = (getattr(sys.modules.get(module), name, None) for module, _, name in homes)
    return any(isinstance(owner, type) and issubclass(kind, owner) for owner in owners)


def _is_library(thing: Any) -> bool:
    """Whether code comes with Python or with an installed package: its name says what it is."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    if isinstance(file, str):
        return any(PurePath(file).is_relative_to(folder) for folder in LIBRARY_FOLDERS)
    return str(name).partition(".")[0] in sys.stdlib_module_names


def _label(value: Any) -> str:
    """A few words for people: a function's or class's name, or that of an instance's class."""
    kind = type(value)
    if kind is functools.partial:
        return f"partial({_label(value.func)})"
    if kind is types.FunctionType or kind is types.BuiltinFunctionType:
        return str(value.__qualname__)
    return str(_QUALIFIED_NAME(value if issubclass(kind, type) else kind))


def _digest(content: str | bytes) -> str:
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return sha256(raw).hexdigest()[:12]
