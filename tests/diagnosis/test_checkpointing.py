"""Checkpointing is advised where a batch that fits only so is faster, or today's does not fit: bytes, batch, rate."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.records.measurement import Activations, MemorySample, PairedRatio, SavedBytes
from autotune.records.result import Advice, Curves, Evidence
from tests.factories import make_evidence, make_facts, make_point

GIB = 2**30


def saved(samples: int, gib: float) -> SavedBytes:
    """Of all that is kept nearly all lies inside ten blocks, a tenth of it their inputs."""
    inside = 0.9 * gib * GIB
    return SavedBytes(
        samples=samples,
        total_bytes=round(gib * GIB),
        inside_bytes=round(inside),
        inputs_bytes=round(0.1 * inside),
        largest_bytes=round(0.09 * inside),
    )


def activations(**changes: Any) -> Activations:
    """A batch of 32 keeps 20 GiB; half of a step does not grow with the batch, and the blocks take a fifth of it."""
    values: dict[str, Any] = {
        "block": "Block",
        "blocks": 10,
        "whole": saved(32, 20.0),
        "half": saved(16, 10.0),
        "forward": PairedRatio(value=0.2, sd=0.002),
        "half_step": PairedRatio(value=0.75, sd=0.002),
    }
    return Activations.model_validate(values | changes)


def point(batch: int, gib: float) -> Any:
    made = make_point(1000.0, micro_batch_size=batch)
    return made.model_copy(update={"peak_memory_bytes": round(gib * GIB)})


def evidence(limit_gib: float = 40.0, peak_gib: float = 24.0, **changes: Any) -> Evidence:
    """A batch of 32 takes 24 GiB, 4 of which do not grow; one of 64 would take 44."""
    memory = changes.pop(
        "memory", MemorySample(peak_bytes=round(peak_gib * GIB), source="max reserved")
    )
    values: dict[str, Any] = {
        "activations": activations(),
        "memory": memory,
        "peak_memory_bytes": memory.peak_bytes,
        "curves": Curves(device=(point(16, peak_gib - 10), point(32, peak_gib))),
    }
    found = make_evidence(1000.0, **values | changes)
    return found.model_copy(update={"limit_bytes": round(limit_gib * GIB)})


def advised(found: Evidence) -> Advice | None:
    advice = rank_advice(found, find_bottlenecks(found))
    return next((piece for piece in advice if piece.kind == "checkpoint_activations"), None)


def test_batch_that_fits_only_so() -> None:
    advice = advised(evidence())
    assert advice is not None
    figures = advice.figures
    assert (figures["own_batch"], figures["micro_batch_size"], figures["blocks"]) == (32, 128, 10)
    # half of the step is shared by four times the samples; the forward pass comes once more
    assert advice.expected_gain == pytest.approx(1 / (0.5 / 4 + 0.5 + 0.2) - 1, rel=1e-3)
    inside = 4 * 0.9 * 20 * GIB
    assert figures["most_saved_bytes"] == pytest.approx(0.9 * inside)
    assert figures["least_saved_bytes"] == pytest.approx(0.81 * inside)


def test_interval_has_the_error_of_the_times() -> None:
    sure, unsure = (
        advised(evidence(activations=activations(half_step=PairedRatio(value=0.75, sd=sd))))
        for sd in (0.0, 0.02)
    )
    assert sure is not None
    assert unsure is not None
    for advice in (sure, unsure):
        low, high = advice.figures["gain_low"], advice.figures["gain_high"]
        assert isinstance(low, float)
        assert isinstance(high, float)
        assert advice.expected_gain is not None
        assert 0 < low <= advice.expected_gain <= high
    assert unsure.figures["gain_low"] < sure.figures["gain_low"]  # type: ignore[operator] # both are numbers


def test_advised_batch_fits() -> None:
    advice = advised(evidence(limit_gib=25.0))
    assert advice is not None
    assert advice.figures["micro_batch_size"] == 64, (
        "of 44 GiB 15 are left; of the 84 of a batch of 128, 26"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"activations": None},
        {"activations": activations(whole=saved(32, 0.0), half=None)},
        {"limit_gib": 200.0},
        {"activations": activations(whole=saved(32, 3.0), half=saved(16, 1.5)), "limit_gib": 25.0},
        {"activations": activations(half_step=PairedRatio(value=0.5, sd=0.002))},
        {"activations": activations(half_step=PairedRatio(value=0.6, sd=0.002))},
        {"activations": activations(half_step=PairedRatio(value=0.75, sd=0.2))},
        {"activations": activations(half_step=PairedRatio(value=0.75, sd=None))},
        {"activations": activations(half_step=None, half=None)},
        {"facts": make_facts(dataset_length=48)},
        {"loader_ceiling": 1000.0, "device_ceiling": 5000.0},
        {"config": TrainingConfig(max_tokens=4096)},
    ],
    ids=[
        "not measured",
        "nothing kept in blocks",
        "every batch fits as it is",
        "too little is saved",
        "no batch is faster",
        "faster by less than the forward pass takes",
        "the scatter leaves it open",
        "too few turns",
        "half of a batch refused",
        "no larger batch in the data",
        "the loader is the limit",
        "a token budget",
    ],
)
def test_no_advice_without_a_gain(changes: dict[str, Any]) -> None:
    assert advised(evidence(**changes)) is None


def test_must_beat_batches_that_fit_anyway() -> None:
    # 64 fits today and wins a third; 128, which does not, wins too little more for its second forward pass
    assert (
        advised(
            evidence(
                limit_gib=60.0, activations=activations(forward=PairedRatio(value=0.24, sd=0.0))
            )
        )
        is None
    )


def test_too_large_batch_has_bytes_alone() -> None:
    advice = advised(evidence(limit_gib=20.0))
    assert advice is not None
    assert advice.expected_gain is None
    assert advice.figures["micro_batch_size"] == 32
    assert advice.figures["left_bytes"] == pytest.approx(24 * GIB - 0.81 * 18 * GIB)


def test_no_advice_if_the_batch_never_fits() -> None:
    assert advised(evidence(limit_gib=9.0)) is None, "9.4 GiB would be left"


def test_thrashing_has_no_bytes_left() -> None:
    memory = MemorySample(peak_bytes=19 * GIB, source="max reserved", alloc_retries=9)
    advice = advised(evidence(limit_gib=20.0, memory=memory))
    assert advice is not None
    assert advice.expected_gain is None
    assert advice.figures["left_bytes"] is None
    assert advice.figures["least_saved_bytes"] == pytest.approx(0.81 * 18 * GIB)
