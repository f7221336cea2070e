"""What the analysis of trials notes: memory within the limit, trials that were stopped early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.report.wording.template import Wording
from autotune.report.wording.units import show

__all__ = ["ANALYSIS"]


def _with_measured(sentence: str) -> Wording:
    def say(figures: Mapping[str, Any]) -> str:
        measured = f"measured peak: {show(figures['peak_bytes'], 'bytes')}"
        if figures["predicted_bytes"] is not None:
            predicted, error = show(figures["predicted_bytes"], "bytes"), show(figures["error_bytes"], "bytes")
            measured += f"; predicted from other batches: {predicted} ± {error}"
        fits = sentence.format(batch=figures["micro_batch_size"], limit=show(figures["limit_bytes"], "bytes"))
        return f"{fits} ({measured})."

    return say


ANALYSIS: dict[str, Wording] = {
    "largest_batch_of_limit": _with_measured("The largest micro batch that the limit of {limit} allows is {batch}"),
    "largest_batch_of_space": _with_measured("The largest micro batch of the space, {batch}, stays within {limit}"),
    "largest_batch_that_ran": _with_measured("The largest micro batch that ran within {limit} is {batch}"),
    "stopped_early": (
        "stopped early: {samples_per_s:,.0f} ± {half_width:,.0f} samples/s are below trial {threshold_number}'s, at "
        "least {threshold_samples_per_s:,.0f}"
    ),
}
