"""Keep a trial's record, and judge its checks: the precision guard and the stress run."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.search import (
    gradient_not_finite,
    gradients_differ,
    loss_not_finite,
    steps_skipped,
    too_few_steps_compared,
)
from autotune.note import Note
from autotune.records.measurement import MemorySample
from autotune.records.trial import (
    Failure,
    Load,
    Outcome,
    PrecisionFigures,
    Score,
    StressFigures,
    TrialRecord,
    TrialResult,
    deviation_of,
    guard_key,
    load_of,
    needs_guard,
    objection,
    sample_scan_s,
    shortfall,
)
from autotune.testing import fake_environment, fake_facts
from tests.factories import make_measurement, make_record, make_trial, run_again


@pytest.mark.parametrize(
    ("result", "score", "expected"),
    [
        ("ok", Score(value=1.0, feasible=True), ("ok", "", True)),
        (
            "ok",
            Score(value=2.0, feasible=False, violation=0.1, reason="above the limit"),
            ("over_memory", "above the limit", False),
        ),
        ("oom", None, ("oom", "oom", False)),
        ("ok", None, ("ok", "", False)),  # not scored yet
    ],
)
def test_outcome_and_reason(
    result: Outcome, score: Score | None, expected: tuple[str, str, bool]
) -> None:
    reason = "" if result == "ok" else result
    record = make_record(result=TrialResult(outcome=result, reason=reason), score=score)
    assert (record.outcome, record.reason, record.is_feasible) == expected


def run_often(*outcomes: Outcome, number: int = 1) -> TrialRecord:
    """A trial that went well, and whose further runs ended so."""
    record = make_trial(number, TrainingConfig(), measurement=make_measurement())
    for one in outcomes:
        record = record.with_run(TrialResult(outcome=one, reason=one))
    return record


@pytest.mark.parametrize("number", [0, 1])
def test_a_further_run_that_failed_refutes_its_trial_for_good(number: int) -> None:
    refuted = run_often("ok", "oom", "ok", number=number)
    assert not refuted.is_feasible
    assert refuted.refuted_by is not None
    assert refuted.refuted_by.outcome == "oom"
    assert refuted.outcome == "ok", "of its first run"


@pytest.mark.parametrize(
    ("number", "outcomes", "is_feasible"),
    [
        (1, ("ok", "ok"), True),
        (1, ("timeout",), True),
        (1, ("timeout", "ok"), True),
        (1, ("timeout", "ok", "timeout"), False),
        (0, ("timeout", "timeout", "timeout"), True),
        (0, ("timeout", "crashed"), False),
    ],
)
def test_one_deadline_may_be_chance_and_two_refute_any_but_the_baseline(
    number: int, outcomes: tuple[Outcome, ...], is_feasible: bool
) -> None:
    assert run_often(*outcomes, number=number).is_feasible == is_feasible


def test_a_trial_that_failed_is_no_candidate_however_its_further_runs_ended() -> None:
    record = make_record(result=TrialResult(outcome="oom"), score=None)
    again = record.with_run(TrialResult(outcome="ok", measurement=make_measurement()))
    assert not again.is_feasible


def test_runs_are_the_measurements_of_all_runs_in_their_order() -> None:
    record = run_again(
        make_trial(1, TrainingConfig(), measurement=make_measurement(100.0)), 90.0, None, 110.0
    )
    assert [run.samples_per_s for run in record.runs] == [100.0, 90.0, 110.0]


def test_a_record_comes_back_from_json_exactly() -> None:
    result = TrialResult(
        outcome="oom",
        reason='wörds, "quotes"\nand lines',
        measurement=make_measurement(1 / 3, samples_per_s_ci=(0.1, inf), loss=nan),
        failure=Failure(signature="ValueError at net.py:12", traceback="Traceback…"),
        violation=0.1 + 0.2,
        wall_s=1e-9,
        log="logs/7.log",
    )
    record = make_record(number=7, results=(result, result.model_copy(update={"at_s": 1 / 3})))
    line = record.model_dump_json()
    assert "\n" not in line
    assert repr(TrialRecord.model_validate_json(line)) == repr(record)


def test_a_trials_own_time_leaves_out_what_came_after_its_window() -> None:
    result = TrialResult(outcome="ok", measurement=make_measurement(1.0, after_s=3.0), wall_s=10.0)
    assert result.own_s == 7
    assert TrialResult(outcome="oom", wall_s=2.0).own_s == 2


FALLING = tuple(1.0 / (step + 1) for step in range(20))
LOSSES = st.lists(st.floats(0.01, 100), min_size=1, max_size=20)


def figures(**changes: Any) -> PrecisionFigures:
    values = {
        "steps": 20,
        "micro_batch_size": 32,
        "reference_losses": FALLING,
        "losses": FALLING,
        "gradient_cosine": 1.0,
        "repeat_cosine": 1.0,
        "repeat_deviation": 0.0,
    }
    return PrecisionFigures.model_validate(values | changes)


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * loss for loss in FALLING)


FINDS_ITS_SCALE = (True, True, *[False] * 20)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"losses": scaled(1.004)},  # rounding
        {"losses": scaled(1.08), "repeat_deviation": 0.04},  # float32's own deviation is added
        {"losses": (1.0, nan), "reference_losses": (1.0, inf), "steps": 2},
        {"skipped_steps": FINDS_ITS_SCALE},
        {"gradient_cosine": 0.35, "repeat_cosine": 0.6},  # a model that draws at random
        {"gradient_cosine": -0.1, "repeat_cosine": 0.05},  # a gradient that is chance
        {"gradient_cosine": None, "repeat_cosine": None},
    ],
)
def test_no_objection(changes: dict[str, Any]) -> None:
    assert objection(figures(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "against"),
    [
        (
            {"losses": (1.0, nan), "reference_losses": (1.0, 0.5), "steps": 2},
            loss_not_finite(loss="nan", step=2, steps=20),
        ),
        (
            {"skipped_steps": (*FINDS_ITS_SCALE, True)},
            steps_skipped(last_skipped=1, last=5, skipped=3, attempts=23),
        ),
        ({"gradient_cosine": 0.5}, gradients_differ(cosine=0.5, least_cosine=0.95)),
        (
            {"gradient_cosine": 0.25, "repeat_cosine": 0.6},
            gradients_differ(cosine=0.25, least_cosine=0.3),
        ),
        ({"gradient_cosine": None}, gradient_not_finite()),
    ],
)
def test_objection(changes: dict[str, Any], against: Note) -> None:
    assert objection(figures(**changes)) == against


def test_ten_times_the_rounding_is_objected_to() -> None:
    against = objection(figures(losses=scaled(1.08)))
    assert against is not None
    assert against.code == "losses_deviate"
    assert against.figures["deviation_fraction"] == pytest.approx(0.08)
    assert against.figures["allowed_fraction"] == pytest.approx(0.05)


def test_few_steps_are_too_few_unless_a_loss_or_the_scaler_ended_them() -> None:
    few = {"steps": 3, "losses": FALLING[:3], "reference_losses": FALLING[:3]}
    assert shortfall(figures(**few)) == too_few_steps_compared(steps=3, least_steps=5)
    assert shortfall(figures()) is None
    assert shortfall(figures(steps=1, losses=(nan,), reference_losses=(1.0,))) is None
    assert (
        shortfall(figures(steps=0, losses=(), reference_losses=(), skipped_steps=(True,) * 37))
        is None
    )


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"num_workers": 4, "micro_batch_size": 256}, False),
        ({"amp_dtype": "bfloat16"}, True),
        ({"amp_dtype": "tf32"}, True),
        ({"compile": True}, True),
        ({"fused": True}, False),
        ({"cudnn_benchmark": True}, False),
    ],
)
def test_what_computes_less_exactly_needs_the_guard(changes: dict[str, Any], needs: bool) -> None:
    assert needs_guard(TrainingConfig(**changes), TrainingConfig()) is needs


def test_what_the_user_runs_today_needs_no_guard() -> None:
    today = TrainingConfig(amp_dtype="bfloat16")
    assert not needs_guard(TrainingConfig(amp_dtype="bfloat16", micro_batch_size=64), today)
    assert not needs_guard(TrainingConfig(), today)
    assert guard_key(today) != guard_key(TrainingConfig(amp_dtype="bfloat16", compile=True))


def test_each_mode_of_a_compiled_model_is_compared_by_itself_and_a_fused_optimizer_is_not() -> None:
    compiled, tuned = (
        TrainingConfig(compile=True, compile_mode=mode) for mode in ("default", "max-autotune")
    )
    assert needs_guard(tuned, compiled)
    assert guard_key(compiled) == guard_key(TrainingConfig(compile=True, fused=True))


@given(LOSSES, st.floats(0.5, 2))
def test_the_deviation_is_the_share_by_which_losses_are_off(
    losses: list[float], factor: float
) -> None:
    assert deviation_of(losses, losses) == 0
    assert deviation_of(losses, [factor * loss for loss in losses]) == pytest.approx(
        abs(factor - 1), abs=1e-9
    )


def test_figures_survive_json() -> None:
    measured = figures(losses=(*FALLING[:-1], inf), reference_losses=(*FALLING[:-1], nan))
    read = PrecisionFigures.model_validate_json(measured.model_dump_json())
    assert read.losses == measured.losses


MIB = 2**20
FACTS = fake_facts().model_copy(update={"gradient_bytes": 64 * MIB})
STRESS = StressFigures(
    steps=10,
    seconds=12.0,
    items_seen=100,
    median_item_bytes=1024.0,
    largest_item_bytes=1024,
    memory=MemorySample(peak_bytes=500 * MIB, source="made up"),
)
VIEWS = DdpConfig(gradient_as_bucket_view=True)


def load(kind: str = "cuda", hosts: int = 1, **settings: object) -> Load:
    device = "cpu" if kind == "cpu" else f"{kind}:0"
    environment = fake_environment(device_count=4).model_copy(
        update={"device_kind": kind, "device": device, "hosts": hosts, "is_spread": hosts > 1}
    )
    return load_of(STRESS, TrainingConfig.model_validate(settings), environment, FACTS)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_trains_in_one_process_takes_what_it_took(kind: str) -> None:
    alone = load(kind)
    assert (alone.peak_bytes, alone.is_more, alone.where) == (500 * MIB, False, "")


def test_ranks_with_devices_of_their_own_add_their_buckets() -> None:
    group = load(strategy="ddp", world_size=4)
    assert (group.peak_bytes, group.where) == (564 * MIB, "in one process")
    assert (group.ranks, group.bucket_bytes) == (1, 64 * MIB)
    assert not load(strategy="ddp", world_size=4, ddp=VIEWS).is_more
    replicas = load(strategy="dp", world_size=4)
    assert (replicas.peak_bytes, replicas.where) == (500 * MIB, "on one device")


def test_ranks_that_share_the_ram_add_up_on_each_host() -> None:
    group = load("cpu", strategy="ddp", world_size=2)
    assert group.peak_bytes == 2 * (500 + 64) * MIB
    assert (group.ranks, group.bucket_bytes) == (2, 64 * MIB)
    views = load("cpu", strategy="ddp", world_size=2, ddp=VIEWS)
    assert (views.peak_bytes, views.bucket_bytes, views.ranks) == (1000 * MIB, 0, 2)
    assert load("cpu", hosts=2, strategy="ddp", world_size=4).ranks == 2


def test_samples_are_looked_at_for_a_share_of_the_time_that_is_left() -> None:
    assert [sample_scan_s(left_s) for left_s in (inf, 100.0, 10.0, 0.0, -1.0)] == [
        4.0,
        4.0,
        2.0,
        0.0,
        0.0,
    ]
