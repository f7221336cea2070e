"""Every message is one line of text, whatever its figures are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from autotune import messages
from autotune.diagnosis.scaling import Cause
from autotune.messages.advice import _VARIABLES, AdviceText
from autotune.messages.diagnosis import BOTTLENECKS, CHECKS, RUN_PART_NAMES, UnevenRank
from autotune.messages.search import _CEILINGS
from autotune.messages.space import _NO_EFFECT, _UNREACHED
from autotune.messages.trials import _STAGES
from autotune.messages.units import MODES, OUTCOMES, THROTTLE_REASONS
from autotune.note import Note
from autotune.records.result import Bottleneck
from autotune.records.watched_run import RUN_PARTS
from autotune.report.words import CAUSES

EXAMPLES: dict[object, Sequence[object]] = {
    int: (0, 1, 2000),
    float: (0.0, 0.005, 3e9),
    bool: (False, True),
    str: ("x",),
    object: ("x",),
    Note: (Note(code="x", text="why"),),
    NoneType: (None,),
    UnevenRank: ({"rank": 1, "device": "cuda:1", "side": "loader", "fraction": 0.5},),
}
CODES: dict[str, Sequence[object]] = {
    "bottleneck": tuple(BOTTLENECKS),
    "second": (None, "copy"),
    "part": tuple(RUN_PART_NAMES),
    "so_far.parts": ({}, {"checkpoint": 0.3, "compute": 0.2}),
    "parts": (["checkpoint"], ["checkpoint", "validation", "collection"]),
    "reasons": (["thermal"], [*THROTTLE_REASONS]),
    "bound": tuple(_CEILINGS),
    "stage": tuple(_STAGES),
    "stages": (["copy"], ["copy", "lengths", "transfer"]),
    "outcome": tuple(OUTCOMES),
    "mode": tuple(MODES),
    "not_excluded.cause": tuple(CHECKS),
    "unset_variable.name": tuple(_VARIABLES),
    "baseline_without_effect.reason": tuple(_NO_EFFECT),
    "value_without_effect.reason": tuple(_NO_EFFECT),
    "setting_unreached.reason": tuple(_UNREACHED),
}
"""Arguments that are codes, by their names alone or with their message's."""


def test_every_bottleneck_and_part_has_its_name() -> None:
    assert list(BOTTLENECKS) == list(get_args(Bottleneck))
    assert list(RUN_PART_NAMES) == list(RUN_PARTS)
    assert list(CAUSES) == list(get_args(Cause))


def functions() -> Iterator[Callable[..., Note | AdviceText]]:
    """Yield the functions that return a note, or advice."""
    for found in iter_modules(messages.__path__, f"{messages.__name__}."):
        for function in vars(import_module(found.name)).values():
            if (
                inspect.isfunction(function)
                and function.__module__ == found.name
                and hasattr(function, "__wrapped__")
            ):
                yield function


def values_of(kind: Any) -> Sequence[object]:
    """Return examples of a type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in {Union, UnionType}:
        return [value for part in get_args(kind) for value in values_of(part)]
    if get_origin(kind) is Sequence:
        return [], list(values_of(get_args(kind)[0]))
    if get_origin(kind) is Mapping:
        return {}, {"amp_dtype": values_of(get_args(kind)[1])[-1]}
    return EXAMPLES[kind]


@pytest.mark.parametrize("function", [*functions()], ids=lambda function: function.__name__)
def test_a_message_is_a_line_of_text(function: Callable[..., Note | AdviceText]) -> None:
    code, kinds = function.__name__, get_type_hints(inspect.unwrap(function))
    del kinds["return"]
    examples = {
        name: CODES.get(f"{code}.{name}", CODES.get(name)) or values_of(kind)
        for name, kind in kinds.items()
    }
    for place in range(max(map(len, examples.values()), default=1)):
        written = function(
            **{name: values[place % len(values)] for name, values in examples.items()}
        )
        note = written.note if isinstance(written, AdviceText) else written
        assert note.code == code
        assert note.text.isprintable()
