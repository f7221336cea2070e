"""A mode that slows steps down is a finding and a fault to remove; one without a difference is neither."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import rank_advice, undo_modes
from autotune.diagnosis.bottlenecks import find_bottlenecks, is_healthy, judge
from autotune.records.measurement import Interval, SwitchGain, SwitchName
from autotune.records.result import Evidence
from autotune.records.watched_run import Modes, Startup, WatchedRun
from tests.factories import CPU, make_breakdown, make_evidence, make_facts


def switch_of(name: SwitchName, ratio: float, within: float = 0.05, **more: Any) -> SwitchGain:
    interval = Interval(value=ratio, low=ratio * (1 - within), high=ratio * (1 + within))
    return SwitchGain(name=name, ratio=interval, rounds=8, steps=10, **more)


def evidence_of(*switches: SwitchGain, modes: Modes | None = None, **more: Any) -> Evidence:
    return make_evidence(switches=switches, modes=modes, **more)


def test_gain_is_that_of_steps_where_the_loader_keeps_up() -> None:
    evidence = evidence_of(switch_of("anomaly", 4.0), loader_ceiling=1e6)
    (piece,) = undo_modes(evidence)
    assert piece.kind == "switch_off_mode"
    assert piece.is_fault
    assert piece.expected_gain == pytest.approx(3.0, rel=0.02)
    assert piece.figures["gain_low"] < 3.0 < piece.figures["gain_high"]  # type: ignore[operator]


def test_slow_loader_limits_the_gain() -> None:
    evidence = evidence_of(switch_of("anomaly", 4.0), loader_ceiling=1500.0)
    (piece,) = undo_modes(evidence)
    assert piece.expected_gain is not None
    assert piece.expected_gain < 1.0, "the loader takes two fifths of the time"


@pytest.mark.parametrize(
    "switch", [switch_of("deterministic", 1.02), switch_of("anomaly", 1.1, 0.2)]
)
def test_mode_without_a_clear_difference_is_not_mentioned(switch: SwitchGain) -> None:
    modes = Modes(is_anomaly_detected=True, is_deterministic=True)
    evidence = evidence_of(switch, switch_of("anomaly", 1.0), modes=modes)
    assert list(undo_modes(evidence)) == []
    assert [finding.bottleneck for finding in find_bottlenecks(evidence)] == ["compute"]


@pytest.mark.parametrize(
    ("name", "bottleneck"),
    [
        ("anomaly", "debugging"),
        ("tracer", "debugging"),
        ("deterministic", "debugging"),
        ("denormals", "denormals"),
    ],
)
def test_finding_takes_its_share_of_computing(name: SwitchName, bottleneck: str) -> None:
    breakdown = make_breakdown(wait=0.2)
    evidence = evidence_of(switch_of(name, 4.0, share=0.5), breakdown=breakdown)
    findings = {str(one.bottleneck): one.share for one in find_bottlenecks(evidence)}
    assert findings[bottleneck] == pytest.approx(0.8 * 0.75)
    assert findings["compute"] == pytest.approx(0.8 * 0.25)


def test_modes_take_no_more_than_all_of_the_work() -> None:
    evidence = evidence_of(switch_of("anomaly", 10.0), switch_of("tracer", 10.0))
    findings = find_bottlenecks(evidence)
    assert sum(finding.share for finding in findings) <= 1.0
    assert findings[0].bottleneck == "debugging"


def test_mode_is_no_health() -> None:
    evidence = evidence_of(modes=Modes(is_profiled=True))
    findings = find_bottlenecks(evidence)
    advice = rank_advice(evidence, findings)
    assert [(piece.kind, piece.expected_gain) for piece in advice][:1] == [
        ("switch_off_mode", None)
    ]
    assert not is_healthy(evidence, findings, advice)


def test_modes_of_the_watched_run_count_first() -> None:
    startup = Startup(before_loader_s=1.0, first_batch_s=0.1, first_step_s=0.1)
    modes = Modes(is_traced=True, places={"anomaly": "train.py:41"})
    watched = WatchedRun(startup=startup, steps=10, watched_s=1.0, parts_s={}, modes=modes)
    evidence = evidence_of(switch_of("anomaly", 3.0), modes=Modes(is_profiled=True))
    evidence = evidence.model_copy(update={"watched": watched})
    advised = {piece.figures["mode"]: piece.figures["place"] for piece in undo_modes(evidence)}
    assert advised == {"anomaly": "train.py:41", "tracer": ""}


def test_variables_are_named_without_a_figure() -> None:
    modes = Modes(variables={"CUDA_LAUNCH_BLOCKING": "1", "PYTHONMALLOC": "debug"})
    found = list(undo_modes(evidence_of(modes=modes)))
    assert [piece.figures["name"] for piece in found] == [*modes.variables]
    assert all(piece.expected_gain is None and piece.is_fault for piece in found)


@pytest.mark.parametrize(
    ("is_script", "device", "has_fixed_shapes", "is_advised"),
    [
        (True, "cuda", False, True),
        (False, "cuda", False, True),
        (True, "cuda", True, False),
        (True, "cuda", None, False),
        (True, "cpu", False, False),
    ],
)
def test_benchmarking_of_changing_shapes(
    is_script: bool, device: str, has_fixed_shapes: bool | None, is_advised: bool
) -> None:
    machine = {"environment": CPU} if device == "cpu" else {}
    facts = make_facts().model_copy(update={"has_fixed_shapes": has_fixed_shapes})
    evidence = evidence_of(
        modes=Modes(is_cudnn_benchmark=is_script),
        config=TrainingConfig(cudnn_benchmark=not is_script),
        facts=facts,
        **machine,
    )
    found = list(undo_modes(evidence))
    assert [piece.kind for piece in found] == ["stop_benchmarking"] * is_advised
    if found:
        assert found[0].settings == ({} if is_script else {"cudnn_benchmark": False})


def test_diagnosis_with_a_mode_survives_json() -> None:
    found = judge("x", evidence_of(switch_of("anomaly", 3.0), modes=Modes()))
    assert found.verdict == "debugging"
    assert type(found).model_validate_json(found.model_dump_json()) == found
