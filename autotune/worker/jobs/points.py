"""The points of curves as they come: each measured on its own, and kept before and after it is measured.

Takes a function that measures a point; hands on CurvePoints, and the Curves so far. The caller is given these to keep:
before each point with that point as one that the process did not outlive, then with its figures. A failed kernel ends
them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch

from autotune.note import Note, note
from autotune.records.diagnosis import CurvePoint, Curves, Roofline
from autotune.worker.failure.causes import cause_of
from autotune.worker.failure.kernel_failures import is_kernel_failure
from autotune.worker.failure.out_of_memory import shortage_of

__all__ = ["CurvesSoFar", "DeviceLostError", "Figures"]

Figures = dict[str, Any]
"""What a point has shown, by the names of CurvePoint's fields: at least its ceiling, or the reason why it has none."""
_Side = Literal["loader", "device"]


class DeviceLostError(Exception):
    """A kernel has failed: everything measured in this process from here on would fail too."""


@dataclass(slots=True)
class CurvesSoFar:
    """The points so far, each kept before and after it is measured."""

    keep: Callable[[Curves], None]
    known: Curves
    """What an earlier process has left."""
    points: dict[_Side, tuple[CurvePoint, ...]] = field(default_factory=lambda: {"loader": (), "device": ()})

    def add(
        self, side: _Side, changes: dict[str, object], measure: Callable[[], Figures], ends_at: float
    ) -> CurvePoint:
        """Take over a point of an earlier process, or measure it; a failure becomes the point's reason.

        Raises:
            DeviceLostError: nothing can be measured in this process any more; the point is kept, with its reason.
        """
        before, earlier = self.points[side], getattr(self.known, side)
        point, is_lost = next((point for point in earlier if point.changes == changes), None), False
        if point is None:
            died = CurvePoint(changes=changes, ceiling=None, reason=note("process_ended_at_point"))
            self._take(side, (*before, died))
            point, is_lost = _measured(changes, measure, ends_at)
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
        return self.curves(None, note("curves_cut"), is_cut=True)

    def _take(self, side: _Side, points: tuple[CurvePoint, ...]) -> None:
        self.points[side] = points
        self.keep(self.cut())


def _measured(changes: dict[str, object], measure: Callable[[], Figures], ends_at: float) -> tuple[CurvePoint, bool]:
    """A point, measured where there is time, or the reason why not; and whether a kernel has failed."""
    begun, is_lost = perf_counter(), False
    if begun > ends_at:
        return CurvePoint(changes=changes, ceiling=None, reason=note("no_time_left")), False
    try:
        figures = measure()
    except Exception as error:  # noqa: BLE001 - the user's code runs in it: one point fails, not the curve
        shortage, is_lost = shortage_of(error), is_kernel_failure(error)
        figures = {"reason": cause_of(error) if shortage is None else shortage.reason}
    return CurvePoint(changes=changes, took_s=perf_counter() - begun, **{"ceiling": None, **figures}), is_lost
