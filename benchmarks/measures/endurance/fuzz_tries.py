"""What is tried with made-up input in one process: a configuration read and searched, a public function called.

Comes in: an input. Goes out: nothing where the promise was kept; a BrokenError with a sentence where it was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time

from autotune.api.commands import check_plan
from autotune.errors import AutotuneError, ConfigError
from autotune.files.plan_file import read_plan
from autotune.testing import FakeLauncher

__all__ = ["BrokenError", "try_call", "try_config", "user_code"]

_LONGEST_S = 10.0
"""Of a refusal, in time of the processor: the machine may have others to serve."""


class BrokenError(AssertionError):
    """A promise was not kept."""


def user_code(folder: Path) -> None:
    """The files that configurations name."""
    (folder / "user_code.py").write_text(
        "def model(): ...\ndef dataset(): ...\ndef loss(a, b): ...\n"
    )


def try_config(folder: Path, raw: bytes, overrides: tuple[str, ...] = ()) -> str:
    """Read a configuration, and resolve its space where it is one: "plan", "space" or "refused"."""
    file = folder / "autotune.yaml"
    file.write_bytes(raw)
    with _told(folder) as seen:
        plan = read_plan(file, overrides)
        seen.append("plan")
        if plan.executor.kind == "local":
            check_plan(plan, launcher=FakeLauncher())
            seen.append("space")
    return seen[-1] if seen else "refused"


def try_call(folder: Path, call: Callable[[], object], *, writes: bool = False) -> str:
    """A call of a public function: "result" or "refused"; a TypeError is one for a keyword that there is not."""
    with _told(folder, writes=writes) as seen:
        try:
            call()
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            return "refused"
        seen.append("result")
    return seen[-1] if seen else "refused"


@contextmanager
def _told(folder: Path, *, writes: bool = False) -> Iterator[list[str]]:
    """Hold the promise over what is done inside."""
    before, begun, seen = _files(folder), process_time(), list[str]()
    try:
        yield seen
    except AutotuneError as error:
        text = str(error)
        problems = error.problems if isinstance(error, ConfigError) else (text.splitlines() or [""])
        if not all(problems):
            raise BrokenError(f"an error says nothing: {problems!r:.300}") from error
        if any(not character.isprintable() for one in problems for character in one):
            raise BrokenError(
                f"an error can't be shown on a terminal: {problems!r:.300}"
            ) from error
        if any(len(one) > 1500 for one in problems):
            raise BrokenError(f"an error is endless: {problems!r:.300}") from error
        if isinstance(error, ConfigError) and not writes and _files(folder) != before:
            raise BrokenError("something was written on a refusal") from error
    except BrokenError:
        raise
    except Exception as error:
        raise BrokenError(f"{type(error).__name__} got through: {error!s:.300}") from error
    if not writes and _files(folder) != before:
        raise BrokenError("something was written")
    if process_time() - begun > _LONGEST_S:
        raise BrokenError(f"it took {process_time() - begun:.0f} s")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
