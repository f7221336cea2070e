"""Remedies outside the settings: their gain comes from the share of the time that they save and from the ceilings."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks, is_healthy, judge
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Ceilings
from autotune.records.result import Advice, Curves, Evidence
from tests.factories import (
    CPU,
    make_breakdown,
    make_evidence,
    make_facts,
    make_loader_costs,
    make_point,
    make_roofline,
    make_window,
)

MEMORY_BOUND = Curves(roofline=make_roofline(moved_bytes=0.8e11 * 0.032))
PINNED = TrainingConfig(pin_memory=True)


def remedies(evidence: Evidence) -> list[Advice]:
    """Advice that no measured setting gives."""
    found = rank_advice(evidence, find_bottlenecks(evidence))
    assert "None" not in "".join(piece.text + piece.basis for piece in found)
    return [piece for piece in found if piece.kind != "set"]


def gain(evidence: Evidence) -> float | None:
    return remedies(evidence)[0].expected_gain


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_small_operations_save_their_share(share: float) -> None:
    assert gain(make_evidence(breakdown=make_breakdown(idle=share))) == pytest.approx(
        1 / (1 - share) - 1
    )


@pytest.mark.parametrize(
    ("take_s", "kinds"),
    [(0.5e-3, ["fuse_operations", "hand_over_less"]), (0.1e-3, ["fuse_operations"])],
)
def test_long_fetches_are_worth_fewer_tensors(take_s: float, kinds: list[str]) -> None:
    device = Ceiling(samples_per_s=32_000.0, samples=320, seconds=0.01, batches=10, host_s=1e-3)
    evidence = make_evidence(
        16_000.0,
        breakdown=make_breakdown(idle=0.5),
        ceilings=Ceilings(device=device),
        window=make_window(16_000.0, take_s=take_s),
        loader_costs=make_loader_costs(batch_tensors=4),
    )
    found = remedies(evidence)
    assert [advice.kind for advice in found] == kinds
    if len(found) == 2:
        assert found[1].figures["batch_tensors"] == 4
        assert found[1].expected_gain == pytest.approx(1 / 0.75 - 1), (
            "the quarter of a batch's 2 ms is saved"
        )


def test_fewer_bytes_save_half_of_the_share() -> None:
    evidence = make_evidence(1000.0, curves=MEMORY_BOUND, breakdown=make_breakdown(wait=0.2))
    (fewer,) = [piece for piece in remedies(evidence) if piece.kind == "move_fewer_bytes"]
    assert fewer.expected_gain == pytest.approx(1 / (1 - 0.8 / 2) - 1)
    assert fewer.figures == {"share": 0.8, "is_dtype_known": False}


@pytest.mark.parametrize(
    ("float32", "left", "kind"),
    [
        (None, 0.25, "copy_uint8"),
        (1.0, 0.25, "copy_uint8"),
        (0.8, 0.4, "copy_uint8"),
        (0.1, 0.5, "copy_narrower_types"),
    ],
)
def test_narrower_types_shorten_copies(float32: float | None, left: float, kind: str) -> None:
    costs = make_loader_costs(float32_fraction=float32)
    evidence = make_evidence(config=PINNED, loader_costs=costs, breakdown=make_breakdown(copy=0.6))
    (fewer,) = remedies(evidence)
    assert fewer.expected_gain == pytest.approx(1 / (0.4 + 0.6 * left) - 1)
    assert fewer.kind == kind
    assert fewer.figures.get("float32_fraction") == (float32 if kind == "copy_uint8" else None)


def test_cpu_converts_batches_in_the_loader() -> None:
    evidence = make_evidence(environment=CPU, breakdown=make_breakdown(copy=0.5))
    assert gain(evidence) == pytest.approx(1.0)
    assert remedies(evidence)[0].kind == "convert_batches_in_collate"


def test_savings_are_bounded_by_the_loader() -> None:
    evidence = make_evidence(1000.0, loader_ceiling=1500.0, breakdown=make_breakdown(idle=0.5))
    assert gain(evidence) == pytest.approx(0.5)
    figures = remedies(evidence)[0].figures
    assert (figures["loader_samples_per_s"], figures["is_loader_first"]) == (1500.0, False)


@pytest.mark.parametrize("loader_ceiling", [900.0, 1000.0, 1025.0])
def test_loader_at_its_ceiling_comes_first(loader_ceiling: float) -> None:
    evidence = make_evidence(
        1000.0, config=PINNED, loader_ceiling=loader_ceiling, breakdown=make_breakdown(copy=0.6)
    )
    assert gain(evidence) is None
    assert remedies(evidence)[0].figures["is_loader_first"]


def test_loader_is_no_bound_where_sides_alternate() -> None:
    evidence = make_evidence(
        1000.0, environment=CPU, loader_ceiling=1500.0, breakdown=make_breakdown(idle=0.5)
    )
    assert gain(evidence) == pytest.approx(1.0)


def computing(roofline: Any, **changes: Any) -> Advice:
    evidence = make_evidence(1000.0, curves=Curves(roofline=roofline), **changes)
    findings = find_bottlenecks(evidence)
    advice = rank_advice(evidence, findings)
    assert is_healthy(evidence, findings, advice) == (len(findings) == 1)
    assert advice[-1].expected_gain is None
    return advice[-1]


def test_computing_is_compared_with_a_matrix_product() -> None:
    # 32 ms a batch; the arithmetic alone takes 8 ms of them
    roofline = make_roofline(flops=0.25e12 * 0.032)
    found = computing(roofline)
    assert found.kind == "make_step_cheaper"
    assert found.figures["most_gain"] == pytest.approx(3.0)
    assert found.figures["peak_fraction"] == pytest.approx(0.25)
    partly = computing(roofline, breakdown=make_breakdown(idle=0.4))
    assert partly.figures["most_gain"] == pytest.approx(1 / 0.65 - 1), (
        "0.4 of the time stays, and 8 ms of the rest"
    )


def test_group_is_compared_with_all_devices() -> None:
    roofline, group = (
        make_roofline(flops=0.25e12 * 0.032),
        TrainingConfig(strategy="ddp", world_size=2),
    )
    found = computing(roofline, config=group)
    assert found.figures["most_gain"] == pytest.approx(7.0), (
        "each of the two computes half of the samples"
    )
    assert found.figures["peak_fraction"] == pytest.approx(0.125)


@pytest.mark.parametrize("roofline", [None, make_roofline(flops=0.0)])
def test_computing_without_a_roofline(roofline: Any) -> None:
    assert computing(roofline).figures == {"share": 1.0, "most_gain": None, "peak_fraction": None}


def test_peak_arithmetic_has_no_gain() -> None:
    assert computing(make_roofline(flops=1.02e12 * 0.032)).figures["most_gain"] == 0.0


@pytest.mark.parametrize("changes", [{"breakdown": make_breakdown(wait=0.6)}, {"breakdown": None}])
def test_cheaper_step_only_if_computing_is_first(
    changes: dict[str, Any],
) -> None:
    evidence = make_evidence(1000.0, curves=Curves(roofline=make_roofline()), **changes)
    assert "make_step_cheaper" not in [piece.kind for piece in remedies(evidence)]


def oversubscribed(**changes: Any) -> Evidence:
    """Four workers, whose items keep two cores busy each, on four cores."""
    facts = make_facts(dataset_length=None)
    arguments: dict[str, Any] = {
        "config": TrainingConfig(num_workers=4),
        "environment": CPU.model_copy(update={"device_kind": "cuda", "cores": 4}),
        "facts": facts,
        "breakdown": make_breakdown(wait=0.9),
        "loader_costs": make_loader_costs(1e-3, item_cpu_s=2e-3),
        "loader_ceiling": 500.0,
        "device_ceiling": 10_000.0,
    }
    return make_evidence(490.0, **(arguments | changes))


def test_one_thread_reaches_what_cpu_time_allows() -> None:
    cheaper, threads = remedies(oversubscribed())
    assert threads.expected_samples_per_s == pytest.approx(2000.0), "four cores, 2 ms of each item"
    assert [cheaper.kind, threads.kind] == ["make_items_cheaper", "one_thread_per_worker"]
    assert judge("job", oversubscribed()).advice[0].kind == threads.kind, "the fault first"


def test_one_thread_is_a_setting_of_workers() -> None:
    _, threads = remedies(oversubscribed())
    assert threads.is_fault
    assert threads.settings == {"worker_threads": 1}
    alone = oversubscribed(config=TrainingConfig(), environment=CPU.model_copy(update={"cores": 1}))
    (threads,) = [piece for piece in remedies(alone) if piece.kind == "one_thread_per_worker"]
    assert threads.settings == {}


def test_measured_threads_replace_the_estimate() -> None:
    measured = Curves(loader=(make_point(1800.0, worker_threads=1, persistent_workers=True),))
    assert [piece.kind for piece in remedies(oversubscribed(curves=measured))] == [
        "make_items_cheaper"
    ]


def test_one_thread_is_bounded() -> None:
    # 2000 of the loader hold a device of 1500 up a little
    assert remedies(oversubscribed(device_ceiling=1500.0))[
        0
    ].expected_samples_per_s == pytest.approx(1482.2, rel=1e-3)
    # on the CPU, computing takes 1 ms of a core besides
    curves = Curves(device=(make_point(10_000.0, cpu_s=1e-3),))
    shared = oversubscribed(environment=CPU, curves=curves)
    (threads,) = [piece for piece in remedies(shared) if piece.kind == "one_thread_per_worker"]
    assert threads.expected_samples_per_s == pytest.approx(4 / 3e-3)


def test_harmless_threads_have_no_gain() -> None:
    found = remedies(oversubscribed(loader_ceiling=2000.0))
    (threads,) = [piece for piece in found if piece.kind == "one_thread_per_worker"]
    assert (threads.expected_gain, threads.figures["loader_samples_per_s"]) == (None, 2000.0)


def test_threads_of_computing_are_not_workers() -> None:
    config = TrainingConfig(num_workers=4)
    evidence = make_evidence(1000.0, config=config, environment=CPU, device_ceiling=4000.0)
    assert find_bottlenecks(evidence)[0].bottleneck == "threads"
    assert "one_thread_per_worker" not in [piece.kind for piece in remedies(evidence)]
