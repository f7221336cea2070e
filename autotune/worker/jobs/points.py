"""Points of curves as they come: each on its own, kept around its measuring, until a kernel's failure ends them all.

Takes what measures a point; hands on CurvePoints, and the Curves so far. Whoever asked for them is given these to keep
before each point, with it as the one that the process did not outlive, and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch

from autotune.records.ceilings import Ceiling
from autotune.records.diagnosis import CurvePoint, Curves, Roofline
from autotune.worker.failure.causes import cause_of
from autotune.worker.failure.kernel_failures import is_kernel_failure
from autotune.worker.failure.out_of_memory import shortage_of

__all__ = ["NO_TIME", "DeviceLostError", "Seen", "Side", "Traced", "guarded"]

NO_TIME = "no time was left"
"""Why a point was not measured near the deadline."""
_CUT = "The job ended before the rest was measured."
_DIED = "the process ended while it was measured"

Side = Literal["loader", "device"]
Seen = tuple[Ceiling, float | None]
"""A ceiling, and the CPU seconds that a sample took."""


class DeviceLostError(Exception):
    """A kernel has failed: what is measured in this process from here on would fail too."""

    def __init__(self, point: CurvePoint) -> None:
        super().__init__(point.reason)
        self.point = point
        """The one that was measured then."""


@dataclass(slots=True)
class Traced:
    """The points so far, each kept as it comes, and before it as the one that the process did not outlive."""

    keep: Callable[[Curves], None]
    known: Curves
    """What an earlier process has left."""
    points: dict[Side, tuple[CurvePoint, ...]] = field(default_factory=lambda: {"loader": (), "device": ()})

    def add(self, side: Side, changes: dict[str, object], measure: Callable[[], CurvePoint]) -> None:
        """Take up a point of an earlier process, or measure it.

        Raises:
            DeviceLostError: nothing can be measured in this process any more; the point is there, with its reason.
        """
        before = self.points[side]
        earlier = self.known.loader if side == "loader" else self.known.device
        point = next((one for one in earlier if one.changes == changes), None)
        if point is None:
            self._take(side, (*before, CurvePoint(changes=changes, ceiling=None, reason=_DIED)))
            try:
                point = measure()
            except DeviceLostError as lost:
                self._take(side, (*before, lost.point))
                raise
        self._take(side, (*before, point))

    def curves(self, roofline: Roofline | None, *remarks: str, is_cut: bool = False) -> Curves:
        """All that is known."""
        loader, device = self.points["loader"], self.points["device"]
        threads = torch.get_num_threads()
        return Curves(loader=loader, device=device, roofline=roofline, threads=threads, remarks=remarks, is_cut=is_cut)

    def cut(self) -> Curves:
        """All that is known where the process ends here."""
        return self.curves(None, _CUT, is_cut=True)

    def _take(self, side: Side, points: tuple[CurvePoint, ...]) -> None:
        self.points[side] = points
        self.keep(self.cut())


def guarded(changes: dict[str, object], measure: Callable[[], Seen], ends_at: float) -> CurvePoint:
    """Measure a point; what fails leaves its reason there.

    Raises:
        DeviceLostError: a kernel has failed.
    """
    if perf_counter() > ends_at:
        return CurvePoint(changes=changes, ceiling=None, reason=NO_TIME)
    begun = perf_counter()
    try:
        ceiling, cpu_s = measure()
    except Exception as error:  # user code runs in it: one point fails, not the curve
        shortage, took_s = shortage_of(error), perf_counter() - begun
        reason = cause_of(error) if shortage is None else shortage.reason
        point = CurvePoint(changes=changes, ceiling=None, reason=reason, took_s=took_s)
        if is_kernel_failure(error):
            raise DeviceLostError(point) from error
        return point
    return CurvePoint(changes=changes, ceiling=ceiling, cpu_s_per_sample=cpu_s, took_s=perf_counter() - begun)
