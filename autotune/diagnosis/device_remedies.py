"""What helps with the device's work beyond settings: copies ahead of the step, products in float8. Pure.

Comes in: an Evidence, and the share of exposed copies. Goes out: advice without settings, as codes with figures, each
with the interval of its gain.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.analysis.forecast import expectation
from autotune.analysis.forecast.expectation import PINNING_KINDS
from autotune.diagnosis.gains import NEAR_CEILING, advise, figures_of
from autotune.records.diagnosis import Advice, Evidence, Float8Products

__all__ = ["prefetch_to_device", "train_in_float8"]

_MOSTLY = 0.5
"""Of a step's arithmetic, from which on it lies in products that float8 speeds up: our own convention, the larger
part."""
_LEAST_LEFT = 0.05
"""Of the device's time, whatever is saved: our own convention, as for other savings."""


def prefetch_to_device(evidence: Evidence, share: float) -> Iterator[Advice]:
    """Copies of the next batch on a stream of their own, from memory that is pinned already: at best none is exposed.

    How much of them computing hides then is not known: the interval begins at nothing. Its upper end is by how much the
    profiled steps differ in their exposed copies. Nothing is promised where the loader has to become faster first.

    Source: apex's data_prefetcher (examples/imagenet/main_amp.py); pytorch.org, "CUDA semantics", "Use pinned memory
    buffers".
    """
    run, kind = evidence.measurement, evidence.environment.device_kind
    if run.breakdown is None or not evidence.config.pin_memory or kind not in PINNING_KINDS:
        return
    present = run.samples_per_s
    if present >= NEAR_CEILING * expectation.loader_ceiling(evidence):
        return
    expected = expectation.rate_without(evidence, share)
    _, most = run.breakdown.copy_fraction_ci or (share, share)
    high = expectation.rate_without(evidence, most) / present - 1
    figures = {"share": share, "is_spread_known": run.breakdown.copy_fraction_ci is not None}
    yield advise("prefetch_to_device", present, expected, {}, **figures, gain_low=0.0, gain_high=high)


def train_in_float8(evidence: Evidence) -> Iterator[Advice]:
    """Linear layers that multiply in float8, where most of a step's arithmetic is theirs and bfloat16 is today's.

    Or where bfloat16 was measured beside today's precision: then against the rate with that. Saved is what the products
    themselves gain, as timed in their own shapes, less scaling and casting their operands: operator by operator at the
    worst, in fused kernels that only move their bytes as expected, and hidden behind other work at best.

    Source: torchao.float8, convert_to_float8_training; Micikevicius et al. 2022, "FP8 formats for deep learning"
    (arXiv:2209.05433).
    """
    roofline, device = evidence.curves.roofline, _in_bfloat16(evidence)
    products = None if roofline is None else roofline.float8
    if roofline is None or products is None or device is None or evidence.measurement.breakdown is None:
        return
    if products.flops < _MOSTLY * roofline.flops:
        return
    loader, samples = expectation.loader_ceiling(evidence), evidence.config.micro_batch_size
    today = expectation.join_rates(evidence, loader, expectation.device_ceiling(evidence))
    before = expectation.join_rates(evidence, loader, device)

    def rate(cast_s: float) -> float:
        saved_s = (products.bfloat16_s - products.float8_s - cast_s) / samples / evidence.config.world_size
        return expectation.join_rates(evidence, loader, 1.0 / max(1.0 / device - saved_s, _LEAST_LEFT / device))

    low, expected, high = (rate(cast_s) / today for cast_s in (*_casts(products), 0.0))
    if low * today <= before:  # against what bfloat16 alone gives
        return
    present, batch_s = evidence.measurement.samples_per_s, samples * evidence.config.world_size / device
    figures = figures_of(products, "bfloat16_s", "float8_s") | {
        "flops_fraction": min(1.0, products.flops / roofline.flops),
        "step_fraction": min(1.0, products.bfloat16_s / batch_s),
        "products_times": products.bfloat16_s / products.float8_s,
        "is_bfloat16_first": evidence.config.amp_dtype != "bfloat16",
    }
    gains = {"gain_low": low - 1, "gain_high": high - 1}
    yield advise("train_in_float8", present, present * expected, {}, **figures, **gains)


def _in_bfloat16(evidence: Evidence) -> float | None:
    """The device's rate in bfloat16, today's or measured beside it; None where neither is known."""
    if evidence.config.amp_dtype == "bfloat16":
        return expectation.device_ceiling(evidence)
    rates = [
        point.ceiling.samples_per_s
        for point in expectation.advisable_points(evidence, "device")
        if point.ceiling is not None and point.changes == {"amp_dtype": "bfloat16"}
    ]
    return max(rates, default=None)


def _casts(products: Float8Products) -> tuple[float, float]:
    """Seconds of casting at the worst, and as expected."""
    return products.cast_s, min(products.cast_s, products.moved_cast_s)
