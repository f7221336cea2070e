"""The throughput of a script that nobody watches, by the lines of progress that it prints itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from benchmarks.measures.commands import Line

__all__ = ["Pace", "read_pace"]

_PAUSE_FROM = 3.0
"""Times the median between two lines, from which on the script did something else meanwhile: our own convention. On an
H200 minGPT samples text for 5 and 12 times as long as ten steps take; ImageNet's lines are up to 1.9 times apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Batches and seconds of steady training."""

    batches: int
    seconds: float
    begun_s: float
    """Seconds from the command's start to the first line that counts."""
    ended_s: float
    """The same of the last one."""

    @property
    def batches_per_s(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds


@dataclass(frozen=True, slots=True)
class _Progress:
    at_s: float
    epoch: int
    batch: int


def read_pace(lines: Iterable[Line], pattern: str) -> Pace | None:
    """Return batches over seconds between lines of progress of the same epoch; None where there are none.

    The stretch that an epoch begins with is left out, for which batches lay ready while its first step ran, and so is
    each that lasts over three times the median one: the script evaluated or sampled text in it.

    Args:
        lines: What the script printed.
        pattern: Regular expression of a line of progress; `batch` counts batches within `epoch`, if it has that group.
    """
    steady = list[tuple[_Progress, _Progress]]()
    for _, epoch in groupby(_progress(lines, pattern), key=lambda one: one.epoch):
        steady += list(pairwise(epoch))[1:]
    if not steady:
        return None
    usual_s = median(after.at_s - before.at_s for before, after in steady)
    kept = [
        (before, after)
        for before, after in steady
        if after.at_s - before.at_s <= _PAUSE_FROM * usual_s
    ]
    return Pace(
        batches=sum(after.batch - before.batch for before, after in kept),
        seconds=sum(after.at_s - before.at_s for before, after in kept),
        begun_s=kept[0][0].at_s,
        ended_s=kept[-1][1].at_s,
    )


def _progress(lines: Iterable[Line], pattern: str) -> Iterator[_Progress]:
    for line in lines:
        match = re.search(pattern, line.text)
        if match is not None:
            known = match.groupdict()
            yield _Progress(line.at_s, int(known.get("epoch") or 0), int(known["batch"]))
