"""What commands show: results on stdout, all else on stderr, and how they end.

Comes in: text, or what draws on a console. Only click is imported at the top, as in autotune.cli.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FAILED", "end_if", "say", "show", "write"]

FAILED = 1
"""Exit code of a command that has failed."""
_NOT_WELL = 4


def end_if(is_told: bool) -> None:
    """End with the code that --exit-code asks for, where there is something to tell."""
    if is_told:
        raise click.exceptions.Exit(_NOT_WELL)


def write(text: str) -> None:
    """Text on stdout."""
    show(lambda _: click.echo(text))


def show(draw: Callable[[Console], None]) -> None:
    """Draw on stdout; a reader that went away (`| head`) ends the command without a traceback."""
    from rich.console import Console

    try:
        draw(Console())
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(FAILED) from None


def say(text: str) -> None:
    """Text on stderr; what a file or the user's code has put into it can't steer the terminal."""
    from autotune.report.text import without_controls

    click.echo(without_controls(text), err=True)
