"""What an exception says: itself, what it stems from, and what torch quotes of another process or thread.

A loader worker's exception, a pin thread's and a replica's are raised anew in the main thread, with their traceback as
text in the message (torch/_utils.py, ExceptionWrapper). Takes exceptions; hands on what was said, and one line of it.
"""

from __future__ import annotations

import builtins
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Told", "cause_of", "told_by"]

_LONGEST = 300
_QUOTE = re.compile(r"Caught \w+ .*\nOriginal Traceback")
_TRACEBACK = "Traceback (most recent call last):\n"
_QUOTED = re.compile(
    r"(?P<stack>(?:[ ][^\n]*\n)*)(?:[\w<>]+\.)*(?P<kind>\w+)(?:: (?P<message>.*?))?"
    r"(?:\n\n(?:The above exception was|During handling of)[^\n]*)?\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One exception: raised here, or quoted in the message of one that was."""

    kinds: tuple[str, ...]
    """Names of its type and of what that derives from, as far as is known; its own first."""
    message: str
    stack: str
    """Where it was raised, as Python formats a traceback, the innermost frame last; "" where nobody knows."""

    @property
    def first_line(self) -> str:
        """What it says, in its first line; its type where it says nothing."""
        return (self.message.strip() or self.kinds[0]).splitlines()[0]


def told_by(error: BaseException | None) -> Iterator[Told]:
    """The exception and those that it stems from, the outermost first, with what each quotes in its place.

    What was raised `from None` is followed too: torch.compile raises so, from whatever the compiled code did.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from _said(error)
        error = error.__cause__ or error.__context__


def cause_of(error: BaseException) -> str:
    """Type and first line; the last one where torch quotes the traceback of a loader worker."""
    kind = type(error).__name__
    lines = (str(error).strip() or "no message").splitlines()
    told = lines[-1].removeprefix(f"{kind}: ") if lines[0].startswith("Caught ") else lines[0]
    return f"{kind}: {told}"[:_LONGEST]


def _said(error: BaseException) -> Iterator[Told]:
    message, kinds = str(error), tuple(one.__name__ for one in type(error).__mro__)
    quotes = message.split(_TRACEBACK)[1:] if _QUOTE.match(message) else []
    matches = [match for quote in reversed(quotes) if (match := _QUOTED.fullmatch(quote))]
    for match in matches:
        kind = match["kind"]
        own = kinds if kind == kinds[0] else _kinds_of(kind)
        yield Told(kinds=own, message=match["message"] or "", stack=match["stack"])
    if not matches:
        yield Told(kinds=kinds, message=message, stack="".join(traceback.format_tb(error.__traceback__)))


def _kinds_of(name: str) -> tuple[str, ...]:
    """Names of a type that is known by its own alone; one that Python does not have is taken for a RuntimeError."""
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return tuple(one.__name__ for one in known.__mro__)
    return name, "RuntimeError"
