"""What no setting does, with its figure: computed from the share of the time that it takes and from the ceilings."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks, is_healthy
from autotune.records.diagnosis import Advice, Curves, Evidence
from autotune.settings.training_config import TrainingConfig
from tests.evidence import CPU, FACTS, make_breakdown, make_costs, make_evidence, make_point, make_roofline

MEMORY_BOUND = Curves(roofline=make_roofline(moved_bytes=0.8e11 * 0.032))
PINNED = TrainingConfig(pin_memory=True)


def remedies(evidence: Evidence) -> list[Advice]:
    return [one for one in rank_advice(evidence, find_bottlenecks(evidence)) if not one.settings]


def gain(evidence: Evidence) -> float | None:
    """Of the first remedy, which names what its figure rests on."""
    first = remedies(evidence)[0]
    assert "at best" in first.basis
    return first.expected_gain


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_small_operations_give_at_best_their_share(share: float) -> None:
    assert gain(make_evidence(breakdown=make_breakdown(idle=share))) == pytest.approx(1 / (1 - share) - 1)


def test_half_of_the_bytes_give_at_best_half_of_the_share() -> None:
    evidence = make_evidence(1000.0, curves=MEMORY_BOUND, breakdown=make_breakdown(wait=0.2))
    (fewer,) = [one for one in remedies(evidence) if "fewer bytes" in one.text]
    assert fewer.expected_gain == pytest.approx(1 / (1 - 0.8 / 2) - 1)
    assert "at best, half of the bytes" in fewer.basis


@pytest.mark.parametrize(
    ("float32", "left", "text", "basis"),
    [
        (None, 0.25, "uint8 images instead of float32", "at most, were all of it float32"),
        (1.0, 0.25, "uint8 images instead of float32", "100 % of the bytes are float32"),
        (0.8, 0.4, "uint8 images instead of float32", "80 % of the bytes are float32"),
        (0.1, 0.5, "narrower types, smaller items", "half of the bytes"),
    ],
)
def test_fewer_bytes_shorten_copies_by_what_is_known_of_them(
    float32: float | None, left: float, text: str, basis: str
) -> None:
    costs = make_costs(float32_fraction=float32)
    evidence = make_evidence(config=PINNED, loader_costs=costs, breakdown=make_breakdown(copy=0.6))
    assert gain(evidence) == pytest.approx(1 / (0.4 + 0.6 * left) - 1)
    assert text in remedies(evidence)[0].text
    assert basis in remedies(evidence)[0].basis


def test_on_the_cpu_batches_are_to_be_laid_out_before() -> None:
    evidence = make_evidence(environment=CPU, breakdown=make_breakdown(copy=0.5))
    assert gain(evidence) == pytest.approx(1.0)
    assert "channels_last" in remedies(evidence)[0].text


def test_no_less_time_on_the_device_gives_more_than_the_loader_does() -> None:
    evidence = make_evidence(1000.0, loader_ceiling=1500.0, breakdown=make_breakdown(idle=0.5))
    assert gain(evidence) == pytest.approx(0.5)
    assert "the loader alone reaches 1,500 samples/s" in remedies(evidence)[0].basis


@pytest.mark.parametrize("loader_ceiling", [900.0, 1000.0, 1025.0])
def test_what_a_loader_at_its_ceiling_holds_is_advised_without_a_figure(loader_ceiling: float) -> None:
    evidence = make_evidence(1000.0, config=PINNED, loader_ceiling=loader_ceiling, breakdown=make_breakdown(copy=0.6))
    assert gain(evidence) is None
    assert "has to become more first" in remedies(evidence)[0].basis


def test_in_turns_the_loaders_ceiling_does_not_bound_what_computing_loses() -> None:
    evidence = make_evidence(1000.0, environment=CPU, loader_ceiling=1500.0, breakdown=make_breakdown(idle=0.5))
    assert gain(evidence) == pytest.approx(1.0)


def computing(roofline: Any, **changes: Any) -> Advice:
    evidence = make_evidence(1000.0, curves=Curves(roofline=roofline), **changes)
    findings = find_bottlenecks(evidence)
    advice = rank_advice(evidence, findings)
    assert is_healthy(evidence, findings, advice) == (len(findings) == 1)
    assert advice[-1].expected_gain is None
    return advice[-1]


def test_what_computes_is_told_how_far_it_is_from_a_large_matrix_product() -> None:
    # 32 ms a batch; the arithmetic alone takes 8 ms of them
    roofline = make_roofline(flops=0.25e12 * 0.032)
    found = computing(roofline)
    assert "at most 4.0 times" in found.text
    assert "at 25 % of the rate of a large matrix product" in found.basis
    partly = computing(roofline, breakdown=make_breakdown(idle=0.4))
    assert "at most +54 %" in partly.text, "0.4 of the time stays, and 8 ms of the rest"


def test_the_rate_of_a_group_is_held_against_all_its_devices() -> None:
    roofline, group = make_roofline(flops=0.25e12 * 0.032), TrainingConfig(strategy="ddp", world_size=2)
    found = computing(roofline, config=group)
    assert "at most 8.0 times" in found.text, "each of the two computes half of the samples"
    assert "at 12 % of the rate of a large matrix product" in found.basis


@pytest.mark.parametrize("roofline", [None, make_roofline(flops=0.0)])
def test_what_computes_without_a_matrix_product_is_told_so_without_a_figure(roofline: Any) -> None:
    found = computing(roofline)
    assert "at most" not in found.text
    assert "was not measured" in found.basis


def test_arithmetic_at_the_peak_has_nothing_to_gain() -> None:
    assert "at most +0 %" in computing(make_roofline(flops=1.02e12 * 0.032)).text


@pytest.mark.parametrize("changes", [{"breakdown": make_breakdown(wait=0.6)}, {"breakdown": None}])
def test_what_computes_least_or_was_not_looked_at_is_not_to_compute_less(changes: dict[str, Any]) -> None:
    evidence = make_evidence(1000.0, curves=Curves(roofline=make_roofline()), **changes)
    assert not any("Make a step cheaper" in one.text for one in remedies(evidence))


def fighting(**changes: Any) -> Evidence:
    """Four workers, whose items keep two cores busy each, on four cores."""
    facts = FACTS.model_copy(update={"dataset_length": None})
    arguments: dict[str, Any] = {
        "config": TrainingConfig(num_workers=4),
        "environment": CPU.model_copy(update={"device_kind": "cuda", "cores": 4}),
        "facts": facts,
        "breakdown": make_breakdown(wait=0.9),
        "loader_costs": make_costs(1e-3, item_cpu_s=2e-3),
        "loader_ceiling": 500.0,
        "device_ceiling": 10_000.0,
    }
    return make_evidence(490.0, **(arguments | changes))


def test_threads_of_items_are_to_be_one_a_worker_at_the_rate_that_their_cpu_time_allows() -> None:
    cheaper, threads = remedies(fighting())
    assert "cv2.setNumThreads(0)" in threads.text
    assert "OMP_NUM_THREADS=1" in threads.text
    assert threads.expected_samples_per_s == pytest.approx(2000.0), "four cores, 2 ms of each item"
    assert "make an item cheaper" in cheaper.text


def test_one_thread_a_worker_gives_no_more_than_the_device_and_the_cores_do() -> None:
    assert remedies(fighting(device_ceiling=1500.0))[0].expected_samples_per_s == pytest.approx(1500.0)
    # on the CPU, computing takes 1 ms of a core besides
    curves = Curves(device=(make_point(10_000.0, cpu_s=1e-3),))
    shared = fighting(environment=CPU, curves=curves)
    (threads,) = [one for one in remedies(shared) if "cv2" in one.text]
    assert threads.expected_samples_per_s == pytest.approx(4 / 3e-3)


def test_threads_that_cost_nothing_that_was_measured_get_no_figure() -> None:
    (threads,) = [one for one in remedies(fighting(loader_ceiling=2000.0)) if "cv2" in one.text]
    assert threads.expected_gain is None
    assert "the loader alone reaches 2,000 samples/s today" in threads.basis


def test_computings_own_threads_are_no_matter_of_the_workers() -> None:
    config = TrainingConfig(num_workers=4)
    evidence = make_evidence(1000.0, config=config, environment=CPU, device_ceiling=4000.0)
    assert find_bottlenecks(evidence)[0].bottleneck == "threads"
    assert not any("cv2" in one.text for one in remedies(evidence))
