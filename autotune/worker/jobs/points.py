"""The points of curves as they come: each measured on its own, and kept before and after it is measured.

Takes a function that measures a point; hands on CurvePoints, and the Curves so far. The caller is given these to keep:
before each point with that point as one that the process did not outlive, then with its figures. A failed kernel ends
them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch

from autotune.messages.trials import curves_cut, no_time_left, process_ended_at_point
from autotune.note import Note
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves, Roofline
from autotune.worker.failure.causes import cause_of
from autotune.worker.failure.kernel_failures import is_kernel_failure
from autotune.worker.failure.out_of_memory import shortage_of

__all__ = ["CurvesSoFar", "DeviceLostError", "PointFigures"]

_Side = Literal["loader", "device", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFigures:
    """What a point has shown: a ceiling, or the reason why it has none; for the rest see CurvePoint."""

    ceiling: Ceiling | None = None
    cpu_s_per_sample: float | None = None
    peak_memory_bytes: int | None = None
    reason: Note | str = ""


class DeviceLostError(Exception):
    """A kernel has failed: everything measured in this process from here on would fail too."""


@dataclass(slots=True)
class CurvesSoFar:
    """The points so far, each kept before and after it is measured."""

    keep: Callable[[Curves], None]
    known: Curves
    """What an earlier process has left."""
    points: dict[_Side, tuple[CurvePoint, ...]] = field(
        default_factory=lambda: {"loader": (), "device": (), "copy": ()}
    )

    def add(
        self, side: _Side, changes: dict[str, object], measure: Callable[[], PointFigures], ends_at: float
    ) -> CurvePoint:
        """Take over a point of an earlier process, or measure it; a failure becomes the point's reason.

        Raises:
            DeviceLostError: nothing can be measured in this process any more; the point is kept, with its reason.
        """
        before, earlier = self.points[side], getattr(self.known, side)
        point, is_lost = next((point for point in earlier if point.changes == changes), None), False
        if point is None:
            died = CurvePoint(changes=changes, ceiling=None, reason=process_ended_at_point())
            self._take(side, (*before, died))
            point, is_lost = _measure(changes, measure, ends_at)
        self._take(side, (*before, point))
        if is_lost:
            raise DeviceLostError
        return point

    def curves(self, roofline: Roofline | None, *remarks: Note, is_cut: bool = False) -> Curves:
        """All that is known."""
        threads = torch.get_num_threads()
        return Curves(**self.points, roofline=roofline, threads=threads, remarks=remarks, is_cut=is_cut)

    def cut(self) -> Curves:
        """All that is known where the process ends here."""
        return self.curves(None, curves_cut(), is_cut=True)

    def _take(self, side: _Side, points: tuple[CurvePoint, ...]) -> None:
        self.points[side] = points
        self.keep(self.cut())


def _measure(
    changes: dict[str, object], measure: Callable[[], PointFigures], ends_at: float
) -> tuple[CurvePoint, bool]:
    """Measure a point where there is time; the point, with the reason where it failed; and whether a kernel has."""
    begun, is_lost = perf_counter(), False
    if begun > ends_at:
        return CurvePoint(changes=changes, ceiling=None, reason=no_time_left()), False
    try:
        figures = measure()
    except Exception as error:  # noqa: BLE001 - the user's code runs in it: one point fails, not the curve
        shortage, is_lost = shortage_of(error), is_kernel_failure(error)
        figures = PointFigures(reason=cause_of(error) if shortage is None else shortage.reason)
    point = CurvePoint(
        changes=changes,
        ceiling=figures.ceiling,
        cpu_s_per_sample=figures.cpu_s_per_sample,
        peak_memory_bytes=figures.peak_memory_bytes,
        took_s=perf_counter() - begun,
        reason=figures.reason,
    )
    return point, is_lost
