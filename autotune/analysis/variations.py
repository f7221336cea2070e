"""What a look at loader and device alone varies, around the baseline. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.analysis.expected_gain import AMPLE
from autotune.analysis.observations import changed
from autotune.records.ceilings import CeilingBook, device_key, loader_key
from autotune.settings.training_config import TrainingConfig
from autotune.space.domains import spread, whole_numbers
from autotune.space.resolved_space import ResolvedSpace

__all__ = ["device_variations", "loader_variations"]

_MOST_VALUES = 6  # of a number that are looked at
_FASTEST_PRECISION = 8.0  # times float32's rate, where tensor cores are: our own convention


def loader_variations(space: ResolvedSpace, book: CeilingBook) -> Iterator[TrainingConfig]:
    """The baseline with another value of one of the loader's settings; none where no step could keep up with it.

    What a batch costs a loader shows where many workers share its items: there the ends of the batch are looked at.
    """
    domains, own = space.domains, space.baseline
    if _is_loader_out_of_reach(space, book):
        return
    for count in spread(whole_numbers(domains["num_workers"]), _MOST_VALUES):
        yield changed(space, {"num_workers": count, **_lasting(space, count)})
    workers = own.num_workers or min(max(whole_numbers(domains["num_workers"])), space.environment.cores)
    for name in ("prefetch_factor", "persistent_workers", "pin_memory") if workers else ():
        for value in domains[name]:
            yield changed(space, {"num_workers": workers, **_lasting(space, workers), name: value})
    most, batches = max(whole_numbers(domains["num_workers"])), whole_numbers(domains["micro_batch_size"])
    for batch in {min(batches), max(batches)} - {own.micro_batch_size} if most else ():
        yield changed(space, {"num_workers": most, **_lasting(space, most), "micro_batch_size": batch})


def device_variations(space: ResolvedSpace) -> Iterator[TrainingConfig]:
    """The baseline with another value of one of the step's settings.

    Those that cost no more than the baseline's own batch come first, then larger batches and last smaller ones: the
    time may end before all were seen. torch.compile is left out: a trial alone has the time for it.
    """
    domains, own = space.domains, space.baseline.micro_batch_size
    for name in ("amp_dtype", "channels_last", "intra_op_threads"):
        for value in domains[name]:
            yield changed(space, {name: value})
    batches = spread(whole_numbers(domains["micro_batch_size"]), _MOST_VALUES)
    for batch in sorted(batches, key=lambda one: (one < own, abs(one - own))):
        yield changed(space, {"micro_batch_size": batch})


def _is_loader_out_of_reach(space: ResolvedSpace, book: CeilingBook) -> bool:
    """Whether even the largest batch, and the fastest precision on top, would leave the device the slower side."""
    own, batches = space.baseline, whole_numbers(space.domains["micro_batch_size"])
    loader, device = book.loader.get(loader_key(own)), book.device.get(device_key(own))
    if loader is None or device is None:
        return False
    growth = max(1.0, max(batches) / own.micro_batch_size) * _FASTEST_PRECISION
    return loader.samples_per_s > AMPLE * growth * device.samples_per_s


def _lasting(space: ResolvedSpace, workers: int) -> dict[str, object]:
    """Workers that stay from epoch to epoch, where the space has that."""
    return {"persistent_workers": workers > 0 and True in space.domains["persistent_workers"]}
