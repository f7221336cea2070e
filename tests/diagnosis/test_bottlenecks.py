from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import breakdown_of, find_bottlenecks, fixed_step_share
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Ceilings, Fullness
from autotune.records.result import Bottleneck, Curves, Evidence
from tests.factories import (
    CPU,
    make_breakdown,
    make_evidence,
    make_loader_costs,
    make_point,
    make_roofline,
    make_window,
)


def shares(evidence: Evidence) -> dict[Bottleneck, Any]:
    return {
        finding.bottleneck: pytest.approx(finding.share) for finding in find_bottlenecks(evidence)
    }


def batch_curve(fixed_s: float, slope_s: float) -> Curves:
    """The device alone in several batches, each of which takes fixed_s + slope_s * batch."""
    points = [make_point(b / (fixed_s + slope_s * b), micro_batch_size=b) for b in (16, 64, 128)]
    return Curves(
        device=(make_point(32 / (fixed_s + slope_s * 32)), *points),
        roofline=make_roofline(operators=1000),
    )


def of_gpm(dram: float, tensor: float) -> Evidence:
    """Make an evidence whose operators' bytes do not count, since GPM is measured."""
    fullness = Fullness(
        sm_fraction=1.0, sm_occupancy=1.0, tensor_fraction=tensor, dram_fraction=dram
    )
    curves = Curves(roofline=make_roofline(moved_bytes=1e12))
    return make_evidence(curves=curves, fullness=fullness, busy_fraction=0.9)


def of_data(costs: LoaderCosts | None, workers: int = 0) -> Evidence:
    return make_evidence(
        config=TrainingConfig(num_workers=workers),
        breakdown=make_breakdown(wait=0.7),
        loader_costs=costs,
    )


def of_items(cores_busy: float, workers: int) -> Evidence:
    return of_data(make_loader_costs(1e-3, item_cpu_s=cores_busy * 1e-3), workers)


def of_threads(**settings: Any) -> Evidence:
    config = TrainingConfig(**settings)
    return make_evidence(1000.0, config=config, environment=CPU, device_ceiling=4000.0)


HALF_MOVING = 0.5e11 * 0.032
"""Bytes that take half of a batch's 32 ms at the peak."""
CASES: dict[str, tuple[Evidence, dict[Bottleneck, float]]] = {
    "items compute": (of_data(make_loader_costs()), {"data_cpu": 0.7, "compute": 0.3}),
    "items wait": (
        of_data(make_loader_costs(item_cpu_s=0.4e-3)),
        {"data_io": 0.7, "compute": 0.3},
    ),
    "slow tail": (
        of_data(make_loader_costs(slow_tail_fraction=0.5, item_cpu_s=0.0)),
        {"data_tail": 0.7, "compute": 0.3},
    ),
    "unknown items": (of_data(None), {"data_cpu": 0.7, "compute": 0.3}),
    "threads of items": (of_items(2.5, 4), {"threads": 0.7, "compute": 0.3}),
    "enough cores for threads of items": (of_items(2.5, 3), {"data_cpu": 0.7, "compute": 0.3}),
    "items in one thread": (of_items(1.4, 8), {"data_cpu": 0.7, "compute": 0.3}),
    "restarts": (
        make_evidence(breakdown=make_breakdown(wait=0.6, restart=0.6)),
        {"restart": 0.6, "compute": 0.4},
    ),
    "copies and gaps": (
        make_evidence(breakdown=make_breakdown(copy=0.5, idle=0.3)),
        {"copy": 0.5, "launch": 0.3, "compute": 0.2},
    ),
    "the host's waits": (
        make_evidence(breakdown=make_breakdown(synchronise=0.4, idle=0.05)),
        {"synchronise": 0.4, "compute": 0.55},
    ),
    "less than a tenth": (
        make_evidence(breakdown=make_breakdown(wait=0.09, copy=0.09, idle=0.09)),
        {"compute": 0.73},
    ),
    # 1,000 operators in 10 ms; 9 of the 10 ms stay whatever the batch
    "small operators on a CPU": (
        make_evidence(
            3200.0,
            environment=CPU,
            curves=batch_curve(9e-3, 1e-3 / 32),
            breakdown=make_breakdown(idle=0.2),
        ),
        {"launch": 0.2 + 0.8 * 0.9},
    ),
    # an operator takes 1 ms
    "large operators on a CPU": (
        make_evidence(32.0, environment=CPU, curves=batch_curve(9e-1, 1e-1 / 32)),
        {"compute": 1.0},
    ),
    "moving bytes": (
        make_evidence(1000.0, curves=Curves(roofline=make_roofline(moved_bytes=HALF_MOVING))),
        {"memory": 1.0},
    ),
    "a product that takes longer": (
        make_evidence(
            1000.0,
            curves=Curves(roofline=make_roofline(moved_bytes=HALF_MOVING, flops=0.9e12 * 0.032)),
        ),
        {"compute": 1.0},
    ),
    "GPM: memory": (of_gpm(0.5, 0.1), {"memory": 1.0}),
    "GPM: little memory": (of_gpm(0.2, 0.1), {"compute": 1.0}),
    "GPM: more tensor": (of_gpm(0.6, 0.9), {"compute": 1.0}),
    "more threads than cores": (of_threads(num_workers=4), {"threads": 0.75, "compute": 0.25}),
    "as many threads as cores": (
        of_threads(num_workers=1, intra_op_threads=3),
        {"compute": 1.0},
    ),
    "threads on a GPU": (
        make_evidence(1000.0, config=TrainingConfig(num_workers=64), device_ceiling=4000.0),
        {"compute": 1.0},
    ),
    "fewer threads measured": (
        make_evidence(
            1000.0,
            config=TrainingConfig(intra_op_threads=16),
            environment=CPU,
            curves=Curves(
                device=(make_point(1000.0), make_point(5000.0, intra_op_threads=4)), threads=16
            ),
        ),
        {"threads": 0.8, "compute": 0.2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shares_of_bottlenecks(name: str) -> None:
    evidence, expected = CASES[name]
    assert shares(evidence) == expected


COPIES = Curves(copy=(make_point(1500.0), make_point(4500.0, pin_memory=True)))


@pytest.mark.parametrize(
    ("is_pinned", "today", "exposed"),
    [(False, 1600.0, 0.8), (True, 4000.0, 1.0)],
    ids=["pageable", "pinned"],
)
def test_copies_are_judged_by_copying_alone(is_pinned: bool, today: float, exposed: float) -> None:
    # half of the time for the copies of 1,000 samples/s: 0.5 ms a sample, of the 0.625 ms that pageable ones take
    points = (
        COPIES
        if not is_pinned
        else Curves(copy=(make_point(4500.0), make_point(1500.0, pin_memory=False)))
    )
    config = TrainingConfig(pin_memory=is_pinned)
    evidence = make_evidence(
        config=config, breakdown=make_breakdown(copy=0.5), curves=points, copy_ceiling=today
    )
    (copy,) = [finding for finding in find_bottlenecks(evidence) if finding.bottleneck == "copy"]
    assert copy.figures == {
        "share": 0.5,
        "is_pinned": is_pinned,
        "pageable_samples_per_s": 1500.0 if is_pinned else today,
        "pinned_samples_per_s": today if is_pinned else 4500.0,
        "exposed_fraction": pytest.approx(exposed),
    }


def test_unmeasured_copies_have_no_figures() -> None:
    (copy, _) = find_bottlenecks(make_evidence(breakdown=make_breakdown(copy=0.6)))
    assert (copy.bottleneck, copy.figures["exposed_fraction"]) == ("copy", None)


def test_long_gaps_are_the_scripts_own_code() -> None:
    curves = Curves(roofline=make_roofline(operators=50))
    asleep = make_evidence(
        1600.0, curves=curves, breakdown=make_breakdown(idle=0.8)
    )  # 16 ms of 20 a batch
    (finding, _) = find_bottlenecks(asleep)
    assert finding.bottleneck == "script"
    assert finding.share == pytest.approx(0.8)
    assert finding.figures == {
        "share": finding.share,
        "outside_s": pytest.approx(0.016),
        "operators": 50,
    }
    launching = make_evidence(
        16_000.0, curves=curves, breakdown=make_breakdown(idle=0.8)
    )  # 32 us between two
    assert shares(launching) == {"launch": 0.8, "compute": 0.2}


def test_taking_batches_is_the_hosts_work() -> None:
    """Five operators and 1.6 ms of taking: gaps as long as a script's own code, which are not that."""
    device = Ceiling(samples_per_s=32_000.0, samples=320, seconds=0.01, batches=10, host_s=0.3e-3)
    evidence = make_evidence(
        16_000.0,
        curves=Curves(roofline=make_roofline(operators=5)),
        breakdown=make_breakdown(idle=0.9),
        ceilings=Ceilings(device=device),
        window=make_window(16_000.0, take_s=1.6e-3),
    )
    finding, *_ = find_bottlenecks(evidence)
    assert finding.bottleneck == "launch"
    assert finding.figures == {
        "share": 0.9,
        "launch_s": 0.3e-3,
        "take_s": 1.6e-3,
        "batch_s": pytest.approx(2e-3),
    }


def test_threads_of_items_have_their_figures() -> None:
    costs = make_loader_costs(2e-3, item_cpu_s=5e-3)
    evidence = make_evidence(
        config=TrainingConfig(num_workers=4), loader_costs=costs, breakdown=make_breakdown(wait=0.7)
    )
    figures = {"cores_per_item": 2.5, "item_s": 2e-3, "loader_processes": 4, "cores": 8}
    assert find_bottlenecks(evidence)[0].figures == figures


@pytest.mark.parametrize(("wait", "has_figures"), [(0.4, True), (0.02, False)])
def test_oversubscription_is_one_finding(wait: float, has_figures: bool) -> None:
    # computing takes four times as long as alone: three quarters of what is left beside the waits
    evidence = make_evidence(
        1000.0 * (1 - wait),
        config=TrainingConfig(num_workers=4),
        environment=CPU,
        device_ceiling=4000.0,
        loader_costs=make_loader_costs(item_cpu_s=2e-3),
        breakdown=make_breakdown(wait=wait),
    )
    assert shares(evidence) == {"threads": wait + 0.75 * (1 - wait), "compute": 0.25 * (1 - wait)}
    figures = find_bottlenecks(evidence)[0].figures
    assert figures["slowdown"] == pytest.approx(4.0)
    assert ("cores_per_item" in figures) == has_figures


def test_window_without_a_breakdown() -> None:
    evidence = make_evidence(breakdown=None, data_wait_fraction=0.6)
    assert shares(evidence) == {"data_cpu": 0.6, "compute": 0.4}
    parts = breakdown_of(evidence).shares()
    assert sum(part.fraction for part in parts.values()) == pytest.approx(1.0)
    assert {name for name, part in parts.items() if part.source == "not measured"} == set(parts) - {
        "data_wait"
    }
    (compute,) = [
        finding for finding in find_bottlenecks(evidence) if finding.bottleneck == "compute"
    ]
    assert compute.figures["is_measured"] is False


@given(fixed_s=st.floats(0, 1), slope_s=st.floats(1e-6, 1e-2))
def test_fixed_share_of_a_line(fixed_s: float, slope_s: float) -> None:
    rate = 32 / (fixed_s + slope_s * 32)
    share = fixed_step_share(
        make_evidence(rate, environment=CPU, curves=batch_curve(fixed_s, slope_s))
    )
    assert share == pytest.approx(fixed_s / (fixed_s + slope_s * 32), abs=1e-3)


def test_two_batches_are_too_few_for_a_line() -> None:
    curves = Curves(device=(make_point(1000.0, micro_batch_size=64),))
    assert fixed_step_share(make_evidence(curves=curves)) == 0.0


@given(
    parts=st.tuples(*[st.floats(0.0, 1.0)] * 5).map(
        lambda raw: [part / max(1.0, sum(raw)) for part in raw]
    ),
    restart=st.floats(0.0, 1.0),
    alone=st.floats(0.1, 100.0),
    workers=st.integers(0, 8),
)
def test_findings_are_sorted_and_bounded(
    parts: list[float], restart: float, alone: float, workers: int
) -> None:
    wait, copy, synchronise, idle, _ = parts
    idle = max(0.0, min(idle, 1 - wait - copy - synchronise))
    breakdown = make_breakdown(
        wait=wait, copy=copy, synchronise=synchronise, idle=idle, restart=restart * wait
    )
    config = TrainingConfig(num_workers=workers)
    evidence = make_evidence(
        config=config, environment=CPU, breakdown=breakdown, device_ceiling=1000.0 * alone
    )
    found = [finding.share for finding in find_bottlenecks(evidence)]
    assert found
    assert found == sorted(found, reverse=True)
    assert sum(found) <= 1 + 1e-6
