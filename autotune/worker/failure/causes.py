"""All errors in an exception: itself, its causes, and those that torch quotes from another process or thread.

Takes an exception; hands on each error in it, and one line that names the cause. An exception of a loader worker, of
the pin thread or of a replica is raised again in the main thread, with its traceback as text in the message
(torch/_utils.py, ExceptionWrapper).
"""

from __future__ import annotations

import builtins
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ErrorText", "cause_of", "errors_in", "printable"]

_LONGEST = 300  # characters of one line in a report: our own convention
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_QUOTE = re.compile(r"Caught \w+ .*\nOriginal Traceback")
_TRACEBACK = "Traceback (most recent call last):\n"
_QUOTED = re.compile(
    r"(?P<stack>(?:[ ][^\n]*\n)*)(?:[\w<>]+\.)*(?P<kind>\w+)(?:: (?P<message>.*?))?"
    r"(?:\n\n(?:The above exception was|During handling of)[^\n]*)?\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """One exception: raised here, or quoted in the message of one that was."""

    kinds: tuple[str, ...]
    """Names of its type and of what that derives from, as far as is known; its own first."""
    message: str
    stack: str
    """Where it was raised, as Python formats a traceback, the innermost frame last; "" where it is not known."""

    @property
    def first_line(self) -> str:
        """The first line of the message, as it can be printed; its type where there is none."""
        # the longest of torch's allocator has some 800 characters
        return printable((self.message.strip() or self.kinds[0]).splitlines()[0][:2000])


def errors_in(error: BaseException | None) -> Iterator[ErrorText]:
    """The exception and its causes, the outermost first; of each that quotes another error, that one.

    What was raised `from None` is followed too: torch.compile raises so, from whatever the compiled code did.
    """
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield from _errors_of(error)
        error = error.__cause__ or error.__context__


def cause_of(error: BaseException) -> str:
    """Type and first line; the last one where torch quotes the traceback of a loader worker."""
    kind = type(error).__name__
    lines = (str(error).strip() or "no message").splitlines()
    line = lines[-1].removeprefix(f"{kind}: ") if lines[0].startswith("Caught ") else lines[0]
    return printable(f"{kind}: {line[:_LONGEST]}")[:_LONGEST]


def printable(text: str) -> str:
    r"""Foreign text without colours; what else steers a terminal, or is no character, stands as an escape such as \x1b.

    Half of a surrogate pair, as in file names that are no UTF-8, can't be written to any file of ours either.
    """
    plain = _COLOURS.sub("", text.replace("\r\n", "\n"))
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], plain)


def _errors_of(error: BaseException) -> Iterator[ErrorText]:
    message, kinds = str(error), tuple(kind.__name__ for kind in type(error).__mro__)
    quotes = message.split(_TRACEBACK)[1:] if _QUOTE.match(message) else []
    matches = [match for quote in reversed(quotes) if (match := _QUOTED.fullmatch(quote))]
    for match in matches:
        kind = match["kind"]
        own = kinds if kind == kinds[0] else _kinds_of(kind)
        yield ErrorText(kinds=own, message=match["message"] or "", stack=match["stack"])
    if not matches:
        yield ErrorText(kinds=kinds, message=message, stack="".join(traceback.format_tb(error.__traceback__)))


def _kinds_of(name: str) -> tuple[str, ...]:
    """Names of a type that is known by its own alone; one that Python does not have is taken for a RuntimeError."""
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return tuple(kind.__name__ for kind in known.__mro__)
    return name, "RuntimeError"
