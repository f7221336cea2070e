"""Other searches on this machine: they share cores, memory and devices, so that each disturbs what the other measures.

Comes in: the list of processes. Goes out: a note for each search that was not told yet, with whose it is. A search is
known by its workers' command line, which other users may read unless /proc is mounted with hidepid; those in other
containers are not seen, and are noticed by what they use (records/host_load, records/conditions).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from contextlib import suppress

import psutil

from autotune.messages.trials import another_search
from autotune.note import Note
from autotune.settings.command import without_secrets

__all__ = ["Neighbours"]

_WORKER = ("-m", "autotune.worker")
_MOST_TOLD = 3  # our convention: more say nothing new
_LONGEST = 120  # characters of a command line, our convention: a line and a half of a terminal


class Neighbours:
    """Other searches that were seen while this one runs."""

    def __init__(self) -> None:
        self._told = set[tuple[int, float]]()

    def new(self) -> tuple[Note, ...]:
        """A note for each search that runs now and was not told before; of many, the first ones."""
        notes = []
        for pid in sorted(_searches()) if len(self._told) < _MOST_TOLD else ():
            with suppress(psutil.Error):  # it has ended
                process = psutil.Process(pid)
                key = pid, process.create_time()
                if key not in self._told and len(self._told) < _MOST_TOLD:
                    self._told.add(key)
                    notes.append(another_search(pid, user=_user(process), command=_command(process)))
        return tuple(notes)


def _searches() -> set[int]:
    """Processes that have workers of ours: not this one, nor one of its own tree."""
    parents = {process.pid: process.info["ppid"] for process in _workers()}
    return {parent for parent in parents.values() if parent not in parents and _is_strange(parent, parents)}


def _workers() -> list[psutil.Process]:
    found = psutil.process_iter(["ppid", "cmdline"])
    return [process for process in found if _is_worker(process.info["cmdline"] or ())]


def _is_worker(words: Collection[str]) -> bool:
    """`python -P -m autotune.worker ...`, and the ranks that were forked from it."""
    return tuple(words)[2:4] == _WORKER


def _is_strange(search: int, workers: Collection[int]) -> bool:
    """Whether a search is neither this one, nor started by it, nor an orphan's, which init has taken over."""
    if search in {0, 1, os.getpid()}:
        return False
    with suppress(psutil.Error):
        above = [process.pid for process in psutil.Process(search).parents()]
        return os.getpid() not in above and not set(above) & set(workers)
    return False


def _user(process: psutil.Process) -> str:
    with suppress(psutil.Error, KeyError):  # a number that has no name
        return process.username()
    return "?"


def _command(process: psutil.Process) -> str:
    """Its command line without secrets, cut."""
    with suppress(psutil.Error):
        words = shlex.join(without_secrets(process.cmdline()))
        return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
    return "?"
