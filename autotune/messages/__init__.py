"""Sentences for users: one function for each note.

A message is a function of figures that returns a sentence; `@message` makes it return a Note:

    @message
    def no_time_for_a_trial(timeout_s: float) -> str:
        return f"the time-out of {timeout_s:g} s leaves no room for another trial"

The function's name is the note's code, its arguments are the note's figures. A figure may be a note
itself, such as a reason. Names of figures carry units (`_s`, `_bytes`, `_fraction` in 0..1);
`units` formats them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec

from pydantic_core import to_jsonable_python

from autotune.note import Note

__all__ = ["message"]

_P = ParamSpec("_P")


def message(sentence: Callable[_P, str]) -> Callable[_P, Note]:
    """Turn a function that returns a sentence into one that returns a note.

    Args:
        sentence: The function; its name becomes the note's code, its arguments the figures.
    """
    parameters = signature(sentence)

    @wraps(sentence)
    def write(*args: _P.args, **kwargs: _P.kwargs) -> Note:
        given = parameters.bind(*args, **kwargs)
        given.apply_defaults()
        figures = to_jsonable_python(given.arguments, inf_nan_mode="constants")
        return Note(code=sentence.__name__, figures=figures, text=sentence(*args, **kwargs))

    return write
