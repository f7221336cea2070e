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

from autotune.note import Note, note
from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves, Roofline
from autotune.worker.failure.causes import cause_of
from autotune.worker.failure.kernel_failures import is_kernel_failure
from autotune.worker.failure.out_of_memory import shortage_of

__all__ = ["CurvesSoFar", "DeviceLostError", "Figures", "PointRefusedError", "Side", "measure_point"]

Side = Literal["loader", "device"]
Figures = tuple[Ceiling, float | None]
"""A ceiling, and the CPU seconds that a sample took."""


class PointRefusedError(Exception):
    """A point is not measured, since it might end the whole job; carries a Note that says why."""

    def __init__(self, reason: Note) -> None:
        super().__init__(reason.code)
        self.reason = reason


class DeviceLostError(Exception):
    """A kernel has failed: everything measured in this process from here on would fail too."""

    def __init__(self, point: CurvePoint) -> None:
        super().__init__(point.reason)
        self.point = point
        """The point that was being measured."""


@dataclass(slots=True)
class CurvesSoFar:
    """The points so far, each kept before and after it is measured."""

    keep: Callable[[Curves], None]
    known: Curves
    """What an earlier process has left."""
    points: dict[Side, tuple[CurvePoint, ...]] = field(default_factory=lambda: {"loader": (), "device": ()})

    def add(self, side: Side, changes: dict[str, object], measure: Callable[[], CurvePoint]) -> None:
        """Take over a point of an earlier process, or measure it.

        Raises:
            DeviceLostError: nothing can be measured in this process any more; the point is kept, with its reason.
        """
        before = self.points[side]
        earlier = self.known.loader if side == "loader" else self.known.device
        point = next((point for point in earlier if point.changes == changes), None)
        if point is None:
            died = CurvePoint(changes=changes, ceiling=None, reason=note("process_ended_at_point"))
            self._take(side, (*before, died))
            try:
                point = measure()
            except DeviceLostError as lost:
                self._take(side, (*before, lost.point))
                raise
        self._take(side, (*before, point))

    def curves(self, roofline: Roofline | None, *remarks: Note, is_cut: bool = False) -> Curves:
        """All that is known."""
        threads = torch.get_num_threads()
        return Curves(**self.points, roofline=roofline, threads=threads, remarks=remarks, is_cut=is_cut)

    def cut(self) -> Curves:
        """All that is known where the process ends here."""
        return self.curves(None, note("curves_cut"), is_cut=True)

    def _take(self, side: Side, points: tuple[CurvePoint, ...]) -> None:
        self.points[side] = points
        self.keep(self.cut())


def measure_point(changes: dict[str, object], measure: Callable[[], Figures], ends_at: float) -> CurvePoint:
    """Measure a point; a failure becomes the point's reason.

    Raises:
        DeviceLostError: a kernel has failed.
    """
    begun = perf_counter()
    if begun > ends_at:
        return CurvePoint(changes=changes, ceiling=None, reason=note("no_time_left"))
    try:
        ceiling, cpu_s = measure()
    except PointRefusedError as refusal:
        return CurvePoint(changes=changes, ceiling=None, reason=refusal.reason)
    except Exception as error:  # the user's code runs in it: one point fails, not the curve
        shortage, took_s = shortage_of(error), perf_counter() - begun
        reason = cause_of(error) if shortage is None else shortage.reason
        point = CurvePoint(changes=changes, ceiling=None, reason=reason, took_s=took_s)
        if is_kernel_failure(error):
            raise DeviceLostError(point) from error
        return point
    return CurvePoint(changes=changes, ceiling=ceiling, cpu_s_per_sample=cpu_s, took_s=perf_counter() - begun)
