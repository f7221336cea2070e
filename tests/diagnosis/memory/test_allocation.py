"""Segments that grow, where fragments take the room; and a GPU shared by several jobs, where one leaves it empty."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.records.diagnosis import Advice, Evidence
from autotune.records.lengths import Tokens
from autotune.records.measurement import MemorySample
from autotune.records.utilization import Fullness
from autotune.settings.training_config import TrainingConfig
from tests.factories import CPU, GPU, make_breakdown, make_evidence, make_facts

GIB = 2**30
VARIED = make_facts(has_fixed_shapes=False)


def advised(found: Evidence, kind: str) -> Advice | None:
    return next((piece for piece in rank_advice(found, find_bottlenecks(found)) if piece.kind == kind), None)


def fragmented(reserved: float = 60.0, allocated: float | None = 40.0, retries: int = 0, **changes: Any) -> Evidence:
    """Of 64 GiB so many are reserved, and so many taken."""
    memory = MemorySample(
        peak_bytes=round(reserved * GIB),
        source="max reserved",
        reserved_bytes=round(reserved * GIB),
        allocated_bytes=None if allocated is None else round(allocated * GIB),
        alloc_retries=retries,
    )
    values: dict[str, Any] = {"facts": VARIED, "memory": memory, "peak_memory_bytes": memory.peak_bytes}
    return make_evidence(1000.0, **values | changes)


def test_what_is_reserved_beyond_tensors_is_promised_at_the_most() -> None:
    advice = advised(fragmented(), "expandable_segments")
    assert advice is not None
    assert advice.expected_gain is None
    assert advice.figures["unused_bytes"] == 20 * GIB
    assert advice.figures["limit_fraction"] == pytest.approx(60 / 64)


def test_retries_tell_of_fragments_even_where_little_is_unused() -> None:
    assert advised(fragmented(allocated=55.0), "expandable_segments") is None
    advice = advised(fragmented(allocated=55.0, retries=1), "expandable_segments")
    assert advice is not None
    assert advice.figures["alloc_retries"] == 1
    full = advised(fragmented(allocated=59.0, retries=9), "expandable_segments")
    assert full is None, "tensors take nearly all: it is room that is missing, and segments that grow make none"


@pytest.mark.parametrize(
    "changes",
    [
        {"reserved": 50.0, "allocated": 20.0},
        {"allocated": None},
        {"facts": make_facts(has_fixed_shapes=True)},
        {"environment": GPU.model_copy(update={"has_expandable_segments": True})},
        {"environment": GPU.model_copy(update={"device_kind": "rocm"})},
        {"environment": CPU},
    ],
    ids=["far from the limit", "not counted", "fixed shapes", "set already", "another allocator", "no allocator"],
)
def test_segments_stay_where_fragments_are_no_trouble(changes: dict[str, Any]) -> None:
    assert advised(fragmented(**changes), "expandable_segments") is None


def test_lengths_that_vary_in_the_window_outweigh_the_probes_one_look() -> None:
    facts, tokens = make_facts(has_fixed_shapes=True), Tokens(per_sample=100.0, batches=50, shortest=60, longest=180)
    assert advised(fragmented(facts=facts, tokens=tokens), "expandable_segments") is not None


def empty(sm: float | None = 0.1, gib: float = 8.0, name: str = "NVIDIA H100 80GB HBM3", **changes: Any) -> Evidence:
    """A job of 8 GiB on a GPU of 80 GiB, a tenth of whose multiprocessors work."""
    fullness = Fullness(sm_fraction=sm, sm_occupancy=0.05, tensor_fraction=None, dram_fraction=None)
    environment = changes.pop("environment", GPU)
    environment = environment.model_copy(update={"device_name": name, "device_memory_bytes": 80 * GIB})
    values: dict[str, Any] = {
        "environment": environment,
        "fullness": fullness,
        "peak_memory_bytes": round(gib * GIB),
        "breakdown": make_breakdown(idle=0.8),
    }
    return make_evidence(1000.0, **values | changes)


@pytest.mark.parametrize(
    ("name", "sm", "gib", "slices", "jobs"),
    [
        ("NVIDIA H100 80GB HBM3", 0.1, 8.0, 1, 7),
        ("NVIDIA A100-SXM4-80GB", 0.1, 12.0, 2, 3),  # more than an eighth of its memory
        ("NVIDIA H100 80GB HBM3", 0.1, 9.6, 2, 3),  # of an eighth, 12 %: an instance has less, and a peak may grow
        ("NVIDIA H200", 0.4, 8.0, 3, 2),
        ("NVIDIA A30", 0.2, 8.0, 1, 4),
        ("NVIDIA H100 80GB HBM3", 0.45, 8.0, None, 2),  # more than the largest half has
        ("NVIDIA L40S", 0.1, 8.0, None, 8),
        ("NVIDIA GeForce RTX 4090", 0.3, 8.0, None, 3),
        ("NVIDIA L40S", 0.01, 0.1, None, 48),
    ],
)
def test_as_many_jobs_share_a_gpu_as_its_parts_have_room_for(
    name: str, sm: float, gib: float, slices: int | None, jobs: int
) -> None:
    advice = advised(empty(sm, gib, name), "share_gpu")
    assert advice is not None
    assert advice.expected_gain is None, "of this job no rate is promised"
    assert (advice.figures["mig_slices"], advice.figures["jobs"]) == (slices, jobs)
    assert advice.figures["memory_fraction"] == pytest.approx(gib / 80)


@pytest.mark.parametrize(
    "changes",
    [
        {"sm": 0.6},
        {"sm": None},
        {"gib": 41.0},
        {"fullness": None},
        {"breakdown": make_breakdown(wait=0.8)},
        {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"},
        {"environment": GPU.model_copy(update={"device_kind": "rocm"})},
        {"config": TrainingConfig(strategy="ddp", world_size=2)},
    ],
    ids=[
        "its multiprocessors work",
        "not told",
        "its memory is full",
        "no GPM",
        "data hold it up",
        "a part already",
        "no MPS",
        "several GPUs",
    ],
)
def test_a_gpu_is_not_shared_where_it_is_used_or_waits(changes: dict[str, Any]) -> None:
    assert advised(empty(**changes), "share_gpu") is None


def test_by_mps_a_tenth_of_the_device_stays_free_whatever_the_limit_is() -> None:
    found = empty(0.1, 8.0, "NVIDIA L40S").model_copy(update={"limit_bytes": 80 * GIB})
    advice = advised(found, "share_gpu")
    assert advice is not None
    assert advice.figures["jobs"] == 9


def test_it_is_shared_where_it_computes_in_few_of_its_multiprocessors() -> None:
    assert advised(empty(breakdown=make_breakdown()), "share_gpu") is not None
