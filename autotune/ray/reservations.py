"""Whole hosts reserved in Ray for one search, so that no other job of the cluster runs beside a trial.

A placement group over a trial's hosts is kept for a moment after the trial: to reserve them again for the next one
would take up to a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Condition, Timer

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from autotune.protocol.clock import monotonic
from autotune.ray.nodes import OneHost

__all__ = ["Reservations"]

_KEPT_S = 1.0  # our convention: longer than a search thinks between two trials
_NODE_LABEL = "ray.io/node-id"


@dataclass(slots=True, eq=False)
class _Reservation:
    group: PlacementGroup
    begun: float
    ending: Timer | None = None
    """Gives the hosts back; None while a trial runs."""


class Reservations:
    """The placement groups of a search, by the ids of their nodes. Every method takes the pool's lock."""

    def __init__(self, lock: Condition) -> None:
        self._lock = lock
        self._kept: dict[tuple[str, ...], _Reservation] = {}

    def reserve(self, hosts: Sequence[OneHost]) -> PlacementGroup:
        """The group of the last trial on these hosts where it is still kept, else a new one, which may not be ready."""
        nodes = tuple(host.node for host in hosts)
        with self._lock:
            kept = self._kept.get(nodes)
            if kept is None:
                self.give_back(nodes)
                group = placement_group(
                    [host.bundle for host in hosts],
                    strategy="STRICT_PACK" if len(nodes) == 1 else "STRICT_SPREAD",
                    bundle_label_selector=[{_NODE_LABEL: node} for node in nodes],
                )
                kept = self._kept[nodes] = _Reservation(group, monotonic())
            elif kept.ending is not None:
                kept.ending.cancel()
                kept.ending = None
            return kept.group

    def give_back_soon(self, nodes: tuple[str, ...]) -> None:
        """A trial on these nodes has ended; the next one most likely comes at once."""
        with self._lock:
            kept = self._kept.get(nodes)
            if kept is None:
                return
            if monotonic() - kept.begun > 60.0:  # then other jobs that wait for the host come first
                self.give_back(nodes)
                return
            kept.ending = Timer(_KEPT_S, self._give_back_unused, (nodes, kept))
            kept.ending.daemon = True
            kept.ending.start()

    def give_back(self, nodes: Collection[str] | None = None) -> None:
        """Give back all that includes one of these nodes; None: everything."""
        with self._lock:
            for key in [key for key in self._kept if nodes is None or set(nodes) & set(key)]:
                reservation = self._kept.pop(key)
                if reservation.ending is not None:
                    reservation.ending.cancel()
                remove_placement_group(reservation.group)

    def _give_back_unused(self, nodes: tuple[str, ...], kept: _Reservation) -> None:
        with self._lock:
            if self._kept.get(nodes) is kept and kept.ending is not None:
                self.give_back(nodes)
