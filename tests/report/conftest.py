"""Small factories for RunSummary: a complete search with several outcomes, and its variants."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest

from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.conditions import DeviceConditions
from autotune.records.measurement import Block, Measurement, MemorySample, Window
from autotune.records.precision_check import PrecisionFigures
from autotune.records.ranks import Communication, RankFigures
from autotune.records.recommendation import Confirmation, Ratio, Recommendation
from autotune.records.run_summary import RunSummary
from autotune.records.stress_check import StressFigures
from autotune.records.trial import Failure, Outcome, Score, TrialRecord, TrialResult
from autotune.records.utilization import NVML_SOURCE, PROFILER_SOURCE, BusyReading, Fullness
from autotune.settings.budget import Budget
from autotune.settings.environment import Environment
from autotune.settings.objective import Objective
from autotune.settings.training_config import DdpConfig, TrainingConfig
from autotune.settings.workload import OptimizerFacts, WorkloadFacts
from autotune.space.learning_rate import LrAdvice, scale_lr

LIMIT = 16 * 2**30
BASELINE = TrainingConfig()
FAST = TrainingConfig(
    micro_batch_size=128,
    num_workers=4,
    prefetch_factor=4,
    persistent_workers=True,
    pin_memory=True,
    amp_dtype="bfloat16",
)
SAME_BATCH = TrainingConfig(num_workers=4, prefetch_factor=4, pin_memory=True, amp_dtype="bfloat16")
GROUP = FAST.model_copy(
    update={"strategy": "ddp", "world_size": 2, "ddp": DdpConfig(bucket_cap_mb=50, comm_hook="bf16")}
)
HOSTILE = "ValueError: shape [red](3, 4)[/red] | want `x`\n\x1b[31mnot <b>this</b>\x1b[0m " + "and so on " * 40
TRACEBACK = 'Traceback (most recent call last):\n  File "net.py", line 12\n```\nValueError: [bold]no[/bold]'


def make_measurement(
    rate: float, *, gib: float = 3.0, busy: float | None = 0.9, spread: float = 0.01, **more: Any
) -> Measurement:
    blocks = tuple(Block(samples=int(rate), batches=10, seconds=1.0, data_wait_s=0.03) for _ in range(3))
    window = Window(
        blocks=blocks,
        whole_epochs=False,
        epoch_samples=50_000,
        queue_capacity=16,
        queue_at_start=3,
        queue_at_end=2,
        warm_up_batches=20,
        warm_up_s=1.5,
        is_drained=True,
        is_steady=True,
        stopped_by="precision",
    )
    return Measurement(
        samples_per_s=rate,
        samples_per_s_ci=(rate * (1 - spread), rate * (1 + spread)),
        busy_fraction=busy,
        busy_source=None if busy is None else "share of time with a kernel running (NVML)",
        data_wait_fraction=0.034,
        peak_memory_bytes=int(gib * 2**30),
        startup_s=0.4,
        build_s=0.2,
        memory=MemorySample(peak_bytes=int(gib * 2**30), source="max reserved + outside torch"),
        window=window,
        loss=0.7,
        **more,
    )


def make_breakdown(wait: float = 0.6, idle: float = 0.05) -> TimeBreakdown:
    profiler = "profiler, 5 extra steps"
    return TimeBreakdown(
        data_wait=Share(fraction=wait, source="clock around the loader"),
        device_copy=Share(fraction=0.02, source=profiler),
        compute=Share(fraction=1 - 0.02 - wait - idle, source=profiler),
        synchronise=Share(fraction=0.0, source=profiler),
        idle=Share(fraction=idle, source="the rest of the step"),
        restart_fraction=wait / 4,
    )


def make_loader_costs(**parts: Any) -> LoaderCosts:
    given: dict[str, Any] = {
        "items": 128,
        "item_s": 1.25e-3,
        "item_cpu_s": 1.2e-3,
        "item_median_s": 1.1e-3,
        "item_p99_s": 4e-3,
        "item_slowest_s": 0.02,
        "slow_tail_fraction": 0.01,
        "disk_bytes_per_item": 0.0,
        "item_bytes": 600_000.0,
        "collate_s": 3e-3,
    }
    return LoaderCosts(**{**given, **parts})


def make_guard(*, is_good: bool = True) -> PrecisionFigures:
    losses = tuple(2.3 / (step + 1) for step in range(20))
    return PrecisionFigures(
        steps=20,
        micro_batch_size=32,
        reference_losses=losses,
        losses=losses if is_good else (*losses[:-1], nan),
        gradient_cosine=0.9991 if is_good else None,
        repeat_cosine=1.0,
        repeat_deviation=0.0,
        skipped_steps=(True, *[False] * 19),
    )


def make_trial(number: int, config: TrainingConfig, outcome: Outcome = "ok", **parts: Any) -> TrialRecord:
    measurement = parts.pop("measurement", None)
    violation = parts.get("violation")
    score = None
    if measurement is not None:
        over = outcome == "over_memory"
        violation = measurement.peak_memory_bytes / LIMIT - 1
        reason = f"peak memory must stay within 16,384 MiB, but was {number} MiB" if over else ""
        score = Score(value=1.0, feasible=not over, violation=violation, reason=reason)
    result = TrialResult(outcome="ok" if outcome == "over_memory" else outcome, measurement=measurement, **parts)
    return TrialRecord(number=number, config=config, result=result, score=score)


def make_trials() -> tuple[TrialRecord, ...]:
    big = FAST.model_copy(update={"micro_batch_size": 256})
    crashed = {"reason": HOSTILE, "failure": Failure(signature="ValueError at net.py:12", traceback=TRACEBACK)}
    return (
        make_trial(0, BASELINE, measurement=make_measurement(5123.4)),
        make_trial(1, FAST, measurement=make_measurement(12345.6, gib=9.3, busy=0.97)),
        make_trial(2, SAME_BATCH, measurement=make_measurement(9876.5, gib=2.1)),
        make_trial(3, big, "over_memory", measurement=make_measurement(12500.0, gib=16.4)),
        make_trial(4, big, "over_memory", measurement=make_measurement(12501.0, gib=16.9)),
        make_trial(5, big, "oom", reason="CUDA out of memory. Tried to allocate 20.00 MiB.", violation=0.2),
        make_trial(6, FAST, "crashed", **crashed),
        make_trial(7, SAME_BATCH, "crashed", **crashed),
        make_trial(8, SAME_BATCH, "diverged", reason="the loss must stay finite, but was nan after 12 steps"),
        make_trial(9, SAME_BATCH, "pruned", reason="slower than the best beyond noise"),
    )


def make_recommendation(**parts: Any) -> Recommendation:
    optimizer = OptimizerFacts(name="SGD")
    advice = scale_lr(BASELINE.lr, FAST.global_batch_size / BASELINE.global_batch_size, "auto", optimizer)
    given: dict[str, Any] = {
        "config": FAST.model_copy(update={"lr": advice.lr}),
        "number": 1,
        "verdict": "faster",
        "speedup": Ratio(value=2.412, low=2.351, high=2.474),
        "lr_advice": advice,
        "same_batch": SAME_BATCH,
        "same_batch_number": 2,
        "same_batch_speedup": Ratio(value=1.93, low=1.9, high=1.96),
        "reasons": ("Within 2 % of the fastest, it has the best score.", "Loading limited the baseline."),
        "confirmations": (
            make_confirmation(0, BASELINE, 5100.0),
            make_confirmation(1, FAST, 12300.0, gib=9.4),
            make_confirmation(2, SAME_BATCH, 9850.0),
        ),
    }
    return Recommendation(**{**given, **parts})


def make_confirmation(number: int, config: TrainingConfig, rate: float, gib: float = 3.0) -> Confirmation:
    rounds = tuple(make_measurement(rate * factor, gib=gib) for factor in (0.99, 1.0, 1.01))
    return Confirmation(number=number, config=config, rounds=rounds)


def make_environment() -> Environment:
    return Environment(
        device="cuda:0",
        device_kind="cuda",
        device_name="NVIDIA H200",
        device_memory_bytes=139 * 2**30,
        device_count=1,
        native_amp_dtypes=("float32", "tf32", "bfloat16", "float16"),
        driver="570.86.15",
        cores=16,
        ram_bytes=128 * 2**30,
        platform="Linux-6.8.0-x86_64-with-glibc2.39",
        python="3.11.9",
        torch="2.13.0",
        cuda="13.0",
        versions={"optuna": "5.0.0", "numpy": "2.3.1"},
    )


def make_facts(**parts: Any) -> WorkloadFacts:
    given: dict[str, Any] = {
        "dataset_length": 50_000,
        "is_iterable": False,
        "has_4d_input": True,
        "parameter_count": 11_173_962,
        "optimizer": OptimizerFacts(name="SGD"),
        "step_source": "cross-entropy, inferred from integer targets",
    }
    return WorkloadFacts(**{**given, **parts})


def make_summary(**parts: Any) -> RunSummary:
    given: dict[str, Any] = {
        "name": "resnet | [quick]",
        "environment": make_environment(),
        "facts": make_facts(),
        "objective": Objective(),
        "budget": Budget(n_trials=10),
        "baseline": BASELINE,
        "limit_bytes": LIMIT,
        "memory_source": "max reserved + outside torch",
        "seed": 0,
        "trials": make_trials(),
        "recommendation": make_recommendation(),
        "notes": ("The loss was inferred: cross-entropy, since the targets are integers [long].",),
        "stopped_because": "all trials of the budget ran",
        "wall_s": 200.4,
        "autotune_version": "0.1.0",
    }
    return RunSummary(**{**given, **parts})


def make_rich_summary(**parts: Any) -> RunSummary:
    """A search whose every part was measured: the loader holds the baseline, the device the recommended settings."""
    readings = (BusyReading(fraction=0.33, source=PROFILER_SOURCE), BusyReading(fraction=0.52, source=NVML_SOURCE))
    fullness = Fullness(sm_fraction=0.7, sm_occupancy=0.3, tensor_fraction=None, dram_fraction=0.4)
    before = {"breakdown": make_breakdown(), "busy_readings": readings, "fullness": fullness}
    before |= {"loader_ceiling": 5_400.0, "device_ceiling": 11_900.0, "loader_costs": make_loader_costs()}
    after = {"breakdown": make_breakdown(0.02), "loader_ceiling": 30_000.0, "device_ceiling": 12_800.0}
    baseline, fast, same = make_recommendation().confirmations
    stress = StressFigures(
        steps=60,
        seconds=12.0,
        items_seen=5000,
        median_item_bytes=600_000.0,
        largest_item_bytes=1_400_000,
        memory=MemorySample(peak_bytes=10 * 2**30, source="max reserved + outside torch"),
    )
    recommendation = make_recommendation(
        confirmations=(_with_first_round(baseline, before), _with_first_round(fast, after), same), stress=stress
    )
    first, second, *others = make_trials()
    guarded = second.model_copy(update={"result": second.result.model_copy(update={"guard": make_guard()})})
    diverged = {"amp_dtype": "float16"}
    broken = make_trial(10, FAST.model_copy(update=diverged), "diverged", reason="nan", guard=make_guard(is_good=False))
    given = {"importances": {"num_workers": 0.7, "micro_batch_size": 0.3}, "recommendation": recommendation}
    return make_summary(**{"trials": (first, guarded, *others, broken), **given, **parts})


def make_rank(number: int, **changes: Any) -> RankFigures:
    given: dict[str, Any] = {
        "rank": number,
        "device": f"cuda:{number}",
        "samples_per_s": 10_240.0,
        "data_wait_fraction": 0.034,
        "busy_fraction": 0.97,
        "peak_memory_bytes": int(9.6 * 2**30),
        "loader_ceiling": 30_000.0,
        "device_ceiling": 12_800.0,
    }
    return RankFigures(**{**given, **changes})


TALK = Communication(step_s=0.0125, step_alone_s=0.01, exchange_s=0.008, bytes_exchanged=22 * 2**20)
"""Of 256 samples: a fifth of a step is exposed."""


def make_group_summary(ranks: tuple[RankFigures, ...] = (), **parts: Any) -> RunSummary:
    """A search on four devices whose best is ddp on two; rank 1 has the slower loader, which holds nobody."""
    ranks = ranks or (make_rank(0), make_rank(1, loader_ceiling=15_000.0))
    measured: dict[str, Any] = {"ranks": ranks, "communication": TALK, "breakdown": make_breakdown(0.02)}
    single = {"loader_ceiling": 30_000.0, "device_ceiling": 12_800.0}
    both = FAST.model_copy(update={"strategy": "dp", "world_size": 2})
    trials = (
        make_trial(0, BASELINE, measurement=make_measurement(5123.4)),
        make_trial(1, FAST, measurement=make_measurement(12345.6, gib=9.3, **single)),
        make_trial(2, both, measurement=make_measurement(11_000.0)),
        make_trial(3, GROUP, measurement=make_measurement(20_480.0, gib=9.6, **measured)),
        make_trial(4, GROUP.model_copy(update={"world_size": 4}), "crashed", reason="rank 3: ValueError: no"),
    )
    recommendation = make_recommendation(
        config=GROUP,
        number=3,
        same_batch=None,
        same_batch_number=None,
        same_batch_speedup=None,
        confirmations=(
            make_confirmation(0, BASELINE, 5100.0),
            make_confirmation(1, FAST, 12300.0, gib=9.4),
            make_confirmation(3, GROUP, 20_400.0, gib=9.6),
        ),
    )
    environment = make_environment().model_copy(update={"device_count": 4})
    return make_summary(**{"trials": trials, "recommendation": recommendation, "environment": environment, **parts})


def _with_first_round(one: Confirmation, more: dict[str, Any]) -> Confirmation:
    first, *others = one.rounds
    assert first is not None
    return one.model_copy(update={"rounds": (first.model_copy(update=more), *others)})


def make_conditions(**changes: Any) -> DeviceConditions:
    """A GPU by itself, at its highest clock."""
    given: dict[str, Any] = {
        "sm_clock_mhz": (1980, 1980),
        "max_sm_clock_mhz": 1980,
        "memory_clock_mhz": (2619, 2619),
        "temperature_c": (41, 55),
        "power_w": 410.0,
        "energy_j": 1230.0,
        "others_memory_bytes": 480 * 2**20,
        "others_busy_fraction": 0.0,
        "persistence_mode": True,
    }
    return DeviceConditions(**{**given, **changes})


def make_conditions_summary(
    *after: dict[str, Any], retries: int = 0, before: dict[str, Any] | None = None
) -> RunSummary:
    """A search whose baseline ran under the usual conditions, and whose recommendation had these in its rounds."""
    usual = [make_conditions(power_w=255.0, **(before or {}))] * 3
    changed = [make_conditions(**changes) for changes in (*after, {}, {}, {})[:3]]
    baseline, fast, same = make_recommendation().confirmations
    confirmations = (_under(baseline, usual), _under(fast, changed, retries), same)
    first, second, third, *others = make_trials()
    trials = (_trial_under(first, usual[0]), second, _trial_under(third, changed[0]), *others)
    return make_summary(recommendation=make_recommendation(confirmations=confirmations), trials=trials)


def _under(one: Confirmation, seen: list[DeviceConditions], retries: int = 0) -> Confirmation:
    told = {"allocated_bytes": 2 * 2**30, "alloc_retries": retries}
    return one.model_copy(
        update={
            "rounds": tuple(
                run.model_copy(update={"conditions": conditions, "memory": run.memory.model_copy(update=told)})
                for run, conditions in zip(one.runs, seen, strict=True)
            )
        }
    )


def _trial_under(trial: TrialRecord, seen: DeviceConditions) -> TrialRecord:
    assert trial.measurement is not None
    measurement = trial.measurement.model_copy(update={"conditions": seen})
    return trial.model_copy(update={"result": trial.result.model_copy(update={"measurement": measurement})})


HOT: dict[str, Any] = {
    "sm_clock_mhz": (1980, 1755),
    "temperature_c": (60, 87),
    "throttle_reasons": ("power_cap", "thermal"),
    "others_memory_bytes": 3 * 2**30,
    "others_busy_fraction": 0.2,
    "persistence_mode": False,
    "tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"),
}
"""All at once that a device can say against a window."""


NO_ADVICE = LrAdvice(lr=BASELINE.lr, rule="none", batch_ratio=1.0)


def make_variants() -> dict[str, RunSummary]:
    """One summary for each verdict, and for nothing feasible."""
    over = make_trial(0, BASELINE, "over_memory", measurement=make_measurement(5000.0, gib=17.2))
    failed = tuple(trial for trial in make_trials() if trial.number >= 3)
    unmeasured = {"speedup": None, "same_batch_speedup": None}
    own = {"same_batch": BASELINE, "same_batch_number": 0, "same_batch_speedup": None, "lr_advice": NO_ADVICE}
    one = Ratio(value=1.0, low=1.0, high=1.0)
    already_best = make_recommendation(config=BASELINE, number=0, verdict="already_best", speedup=one, **own)
    unconfirmed = make_recommendation(verdict="unconfirmed", confirmations=(), **unmeasured)
    infeasible = make_recommendation(verdict="baseline_infeasible", confirmations=(), **unmeasured)
    return {
        "faster": make_summary(),
        "already_best": make_summary(recommendation=already_best),
        "unconfirmed": make_summary(recommendation=unconfirmed),
        "baseline_infeasible": make_summary(recommendation=infeasible, trials=(over, *make_trials()[1:])),
        "rich": make_rich_summary(),
        "group": make_group_summary(),
        "hot": make_conditions_summary(HOT, HOT, retries=7),
        "nothing_feasible": make_summary(recommendation=None, trials=(over, *failed)),
    }


@pytest.fixture(params=sorted(make_variants()))
def any_summary(request: pytest.FixtureRequest) -> RunSummary:
    return make_variants()[request.param]
