"""Sequences of many lengths: tokens, padding, and what batches without it would change on the device.

Comes in: the figures of one or more configurations. Goes out: facts, or a Section that is empty where batches have no
lengths.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.messages.units import NO_VALUE, show
from autotune.records.lengths import BucketForecast, PackForecast
from autotune.records.measurement import Measurement
from autotune.report.blocks import Bullets, Section, side_by_side

__all__ = ["length_facts", "length_section", "padding_of"]

_REMARK = (
    "Padding at random and of like lengths: computed from the lengths of items, for batches of this size. Device time: "
    "from timed batches of several lengths; it shows only where the loader is not the bottleneck."
)


def padding_of(figures: Measurement) -> float | None:
    """The share of padding in the batches: by their masks, else by the lengths of items; None where nothing tells."""
    if figures.tokens is not None and figures.tokens.padding is not None:
        return figures.tokens.padding
    return None if figures.lengths is None else figures.lengths.padding


def length_section(measured: Mapping[str, Measurement]) -> Section:
    """Tokens and lengths of each configuration whose batches have some."""
    known = {title: facts for title, figures in measured.items() if (facts := length_facts(figures))}
    has_lengths = any(figures.lengths is not None for figures in measured.values())
    remarks = Bullets(sentences=(_REMARK,) if has_lengths else (), is_remark=True)
    return Section(title="Lengths: tokens and padding", blocks=(side_by_side(known), remarks))


def length_facts(figures: Measurement) -> dict[str, str]:
    """The same of one configuration, by name; empty where its batches have no lengths."""
    tokens, lengths = figures.tokens, figures.lengths
    if tokens is None:
        return {}
    facts = {
        "tokens/s": show(figures.tokens_per_s, "plain_rate"),
        "tokens a sample": f"{tokens.per_sample:,.4g}{_error(tokens.relative_sd)}, padding included",
        "batches are padded to": f"{tokens.shortest:,} to {tokens.longest:,}",
        "padding": show(padding_of(figures), "share"),
    }
    if lengths is None:
        return facts
    packed = lengths.packed
    return facts | {
        "an item": f"{lengths.mean:,.4g} tokens, median {lengths.median:,.4g}, longest {lengths.longest:,}",
        "padding at random": show(lengths.buckets.random_padding, "share"),
        "padding of like lengths": show(lengths.buckets.bucket_padding, "share"),
        "device time of like lengths": _device_time(lengths.buckets),
        "padding of full rows": show(packed and packed.padding, "share"),
        "device time of full rows": NO_VALUE if packed is None else _device_time(packed),
    }


def _error(relative_sd: float | None) -> str:
    return "" if relative_sd is None else f" (± {show(relative_sd, 'share')})"


def _device_time(forecast: BucketForecast | PackForecast) -> str:
    if forecast.device_time is None or forecast.device_time_ci is None:
        return ""
    low, high = (show(share, "share") for share in forecast.device_time_ci)
    return f"{show(forecast.device_time, 'share')} of today's ({low} to {high})"
