"""Advise on the data beyond the loader's settings: batches without padding. Pure.

Comes in: an Evidence. Goes out: advice without settings, each with the interval of its gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autotune.analysis.forecast import expectation
from autotune.diagnosis.gains import LEAST_GAIN, advise, loader_bounds
from autotune.messages import advice as messages
from autotune.records.breakdown import LoaderCosts
from autotune.records.diagnosis import Advice, Evidence

__all__ = ["loader_without", "remove_padding"]

_LEAST_LEFT = 0.01
"""Of a sample's time in the loader, whatever is saved: our own convention."""


def remove_padding(evidence: Evidence) -> Iterator[Advice]:
    """Batches of sequences of like length, and rows that several of them fill, where these win 3 % more.

    They win what the device then saves, no more: the loader's rate is taken to stay. The rate expected is today's times
    what the law of both sides says; its interval is by what the device's time leaves open, and by how far a loader
    alone is from the same loader in a run.

    Source: for rows, Krell et al. 2021 (arXiv:2107.02027), and transformers' DataCollatorWithFlattening.
    """
    lengths, present, reached = evidence.measurement.lengths, evidence.measurement.samples_per_s, 1.0
    if lengths is None:
        return
    buckets, packed = lengths.buckets, lengths.packed
    padding = buckets.random_padding if lengths.padding is None else lengths.padding
    if buckets.device_time is not None and buckets.device_time_ci is not None:
        gains = _gains(evidence, buckets.device_time, buckets.device_time_ci)
        if gains is not None:
            reached = gains.expected
            words = messages.batch_like_lengths(
                pool_batches=buckets.pool_batches,
                padding=padding,
                bucket_padding=buckets.bucket_padding,
                items=lengths.items,
                timed=len(lengths.steps),
                device_time=buckets.device_time,
                gain_low=gains.low - 1,
                gain_high=gains.high - 1,
            )
            yield advise(words, present, present * gains.expected)
    if packed is not None:
        gains = _gains(evidence, packed.device_time, packed.device_time_ci)
        if gains is not None and gains.expected >= (1 + LEAST_GAIN) * reached:
            words = messages.pack_sequences(
                row_tokens=packed.row_tokens,
                samples_per_row=packed.samples_per_row,
                padding=padding,
                packed_padding=packed.padding,
                items=lengths.items,
                timed=len(lengths.steps),
                device_time=packed.device_time,
                gain_low=gains.low - 1,
                gain_high=gains.high - 1,
            )
            yield advise(words, present, present * gains.expected)


def loader_without(evidence: Evidence, costs: LoaderCosts, item_fraction: float) -> float:
    """The loader's rate without this share of its items' time, in samples per second.

    Collating stays as it is, and so does a batch's way from its worker. Shares of times that were measured together
    are taken, since a neighbour's load lengthens all of them.
    """
    today, workers = expectation.loader_ceiling(evidence), expectation.loader_processes(evidence.config)
    item_share = costs.item_s / max(expectation.with_collating(evidence, costs, costs.item_s), 1e-9)
    way_s = min((costs.transfer_s or 0.0) / evidence.config.micro_batch_size, workers / today)
    return workers / (way_s + (workers / today - way_s) * max(1.0 - item_share * item_fraction, _LEAST_LEFT))


class _Times(NamedTuple):
    """Times today's rate."""

    expected: float
    low: float
    high: float


def _gains(evidence: Evidence, device_time: float, interval: tuple[float, float]) -> _Times | None:
    """What is reached where the device needs this share of its time; None where that may be nothing."""
    loader, device = expectation.loader_ceiling(evidence), expectation.device_ceiling(evidence)
    today = expectation.join_rates(evidence, loader, device)
    slowest, fastest = loader_bounds(evidence, loader)

    def times(device_time: float, loader: float) -> float:
        return expectation.join_rates(evidence, loader, device / device_time) / today

    least, most = interval
    low, high = times(most, slowest), times(least, fastest)
    return None if low <= 1 else _Times(times(device_time, loader), low, high)
