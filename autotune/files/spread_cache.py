"""What searches have learned of the spread between runs, kept for the user's next searches on the same machine.

Comes in: a machine's fingerprint, a workload's key, a RunSpread. Goes out: the spread to begin the next search with.
The file lies in the user's own cache folder, holds figures alone, and may be deleted at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Literal

from platformdirs import user_cache_path
from pydantic import Field, ValidationError

from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.errors import RunFolderError
from autotune.frozen import FrozenModel
from autotune.protocol.disk import read_own, write_model
from autotune.protocol.private_folder import make_private
from autotune.records.run_spread import RunSpread
from autotune.settings.environment import DeviceKind

__all__ = ["known_spread", "remember_spread"]

_LOG = logging.getLogger(__name__)
_MOST_CARRIED = 20.0
"""Degrees of freedom that a workload's own spread brings along: our own convention, so that a new day still counts."""
_OF_THE_MACHINE = 4.0
"""The same of other workloads' on the machine, together: our own convention, a little more than what is assumed."""
_MOST_WORKLOADS = 100
"""Kept for a machine, the latest ones."""


class _Known(FrozenModel):
    version: Literal[1] = 1
    workloads: dict[str, RunSpread] = Field(default_factory=dict)
    """By the workload's key, the latest last."""


def known_spread(fingerprint: str, workload: str, device_kind: DeviceKind) -> RunSpread:
    """The spread to begin with: this workload's on this machine, else that of others here, else what is assumed.

    Where runs are of two kinds, each is looked up by itself.
    """
    file, assumed = _file_of(fingerprint), assumed_spread(device_kind)
    known = {} if file is None else _read(file).workloads
    if assumed.device is None:
        return _begin_with(assumed, known, workload)
    by_kind = {key: spread for key, spread in known.items() if spread.device is not None}  # older ones mix the kinds
    of_device = {key: spread.device for key, spread in by_kind.items() if spread.device is not None}
    host = _begin_with(assumed, by_kind, workload)
    return host.model_copy(update={"device": _begin_with(assumed.device, of_device, workload)})


def _begin_with(assumed: RunSpread, known: Mapping[str, RunSpread], workload: str) -> RunSpread:
    """Return the spread of one kind of runs to begin with, from what workloads have learned of it."""
    learned = {key: spread for key, spread in known.items() if spread.source == "workload"}
    if (own := learned.get(workload)) is not None:
        return own.model_copy(update={"degrees_of_freedom": min(own.degrees_of_freedom, _MOST_CARRIED)})
    if not learned:
        return assumed
    sd = exp(fmean(log(spread.sd) for spread in learned.values()))
    return RunSpread(sd=sd, degrees_of_freedom=_OF_THE_MACHINE, source="machine")


def remember_spread(fingerprint: str, workload: str, spread: RunSpread) -> None:
    """Keep what a search has learned; where no folder can be written, the next one begins as this one did."""
    file = _file_of(fingerprint)
    if file is None:
        return
    others = {key: known for key, known in _read(file).workloads.items() if key != workload}
    kept = dict([*others.items(), (workload, spread)][-_MOST_WORKLOADS:])
    try:
        make_private(file.parent)
        write_model(file, _Known(workloads=kept))
    except (OSError, RunFolderError) as error:
        _LOG.info("the spread between runs could not be kept in %s: %s", file, error)


def _file_of(fingerprint: str) -> Path | None:
    """None for a user who has no home: older platformdirs would then name a folder "~" where the search runs."""
    try:
        file = user_cache_path("autotune") / "spread" / f"{fingerprint}.json"
    except RuntimeError:
        return None
    return file if file.is_absolute() else None


def _read(file: Path) -> _Known:
    try:
        return _Known.model_validate_json(read_own(file))
    except (OSError, ValidationError):  # not there, no file, cut, or of another version: as if nothing was known
        return _Known()
