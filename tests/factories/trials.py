"""Trials with their repeats, and recommendations of a search in which the settings FAST are 2.4 times the baseline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autotune.config.plan import OptimizerFacts
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.search import best_believed, interrupted, proven
from autotune.note import Note
from autotune.records.measurement import Interval, Measurement
from autotune.records.result import Recommendation
from autotune.records.trial import Failure, Outcome, Score, TrialRecord, TrialResult
from autotune.space.scaling import scale_lr
from tests.factories.measurements import make_measurement, make_window

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
    update={
        "strategy": "ddp",
        "world_size": 2,
        "ddp": DdpConfig(bucket_cap_mb=50, comm_hook="bf16"),
    }
)
HOSTILE = (
    "ValueError: shape [red](3, 4)[/red] | want `x`\n\x1b[31mnot <b>this</b>\x1b[0m "
    + "and so on " * 40
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "net.py", line 12\n```\nValueError: [bold]no[/bold]'
)


def make_record(
    number: int = 1, *, result: TrialResult | None = None, **changes: Any
) -> TrialRecord:
    """Return a trial whose only run went well, or ended as given; keywords change the record's fields."""
    values = {
        "number": number,
        "config": BASELINE,
        "results": (result or TrialResult(outcome="ok", measurement=make_measurement()),),
        "score": Score(value=1.0, feasible=True, violation=-0.5),
    }
    return TrialRecord.model_validate(values | changes)


def with_first(record: TrialRecord, **changes: Any) -> TrialRecord:
    """Change fields of a trial's first run."""
    return record.model_copy(
        update={"results": (record.result.model_copy(update=changes), *record.repeats)}
    )


def make_trial(
    number: int,
    config: TrainingConfig,
    outcome: Outcome = "ok",
    *,
    measurement: Measurement | None = None,
    **result: Any,
) -> TrialRecord:
    """Return a trial by its outcome, scored under LIMIT if measured; further keywords are the result's fields."""
    score = None
    if measurement is not None:
        over = outcome == "over_memory"
        result["violation"] = measurement.peak_memory_bytes / LIMIT - 1
        reason = f"peak memory must stay within 16,384 MiB, but was {number} MiB" if over else ""
        score = Score(value=1.0, feasible=not over, violation=result["violation"], reason=reason)
    ended: Outcome = "ok" if outcome == "over_memory" else outcome
    return make_record(
        number,
        config=config,
        results=(TrialResult(outcome=ended, measurement=measurement, **result),),
        score=score,
    )


def run_again(trial: TrialRecord, *rates: float | None, **changes: Any) -> TrialRecord:
    """Repeat a trial at these rates, None for a run that failed; keywords change the repeats' measurements.

    Repeats of all trials are interleaved: the first of each, then the second of each.
    """
    assert trial.measurement is not None
    changes = {"gib": trial.measurement.peak_memory_bytes / 2**30, **changes}
    results = list(trial.results)
    for place, rate in enumerate(rates, len(trial.repeats)):
        at_s = 100.0 * (place + 1) + 10.0 * trial.number
        if rate is None:
            results.append(TrialResult(outcome="crashed", reason="ValueError: no", at_s=at_s))
        else:
            results.append(
                TrialResult(outcome="ok", measurement=make_measurement(rate, **changes), at_s=at_s)
            )
    return trial.model_copy(update={"results": tuple(results)})


def run_once(trials: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return trials without their repeats."""
    return tuple(trial.model_copy(update={"results": trial.results[:1]}) for trial in trials)


def make_trials() -> tuple[TrialRecord, ...]:
    """Return trials of each outcome, the baseline first; it and those that are recommended ran three times."""
    big = FAST.model_copy(update={"micro_batch_size": 256})
    crashed: dict[str, Any] = {
        "reason": HOSTILE,
        "failure": Failure(signature="ValueError at net.py:12", traceback=TRACEBACK),
    }
    fast = make_trial(1, FAST, measurement=make_measurement(12345.6, gib=9.3, busy=0.97))
    return (
        run_again(
            make_trial(0, BASELINE, measurement=make_measurement(5123.4, gib=3.0)), 5049.0, 5128.0
        ),
        run_again(fast, 12177.0, 12378.0, gib=9.4),
        run_again(
            make_trial(2, SAME_BATCH, measurement=make_measurement(9876.5, gib=2.1)),
            9752.0,
            9922.0,
            gib=3.0,
        ),
        make_trial(3, big, "over_memory", measurement=make_measurement(12500.0, gib=16.4)),
        make_trial(4, big, "over_memory", measurement=make_measurement(12501.0, gib=16.9)),
        make_trial(
            5, big, "oom", reason="CUDA out of memory. Tried to allocate 20.00 MiB.", violation=0.2
        ),
        make_trial(6, FAST, "crashed", **crashed),
        make_trial(7, SAME_BATCH, "crashed", **crashed),
        make_trial(
            8,
            SAME_BATCH,
            "diverged",
            reason="the loss must stay finite, but was nan after 12 steps",
        ),
        make_trial(9, SAME_BATCH, "pruned", reason="slower than the best beyond noise"),
    )


def make_confirmation(
    number: int,
    *rates: float,
    config: TrainingConfig | None = None,
    noise: float = 0.01,
    gib: float = 1.0,
    is_held_by_device: bool = False,
    **settings: Any,
) -> TrialRecord:
    """Return a trial with a run at each rate; the configuration by itself or by its settings."""
    held = {"host_ahead_s": 1.0 if is_held_by_device else None}
    runs = (
        make_measurement(rate, noise, gib=gib, window=make_window(rate, **held)) for rate in rates
    )
    results = tuple(TrialResult(outcome="ok", measurement=run) for run in runs)
    return TrialRecord(number=number, config=config or TrainingConfig(**settings), results=results)


def list_confirmations(trials: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return what ran more than once, as a recommendation lists it."""
    return tuple(trial for trial in trials if len(trial.runs) > 1)


def said(text: str) -> Note:
    """Return a note that holds a text of any origin."""
    return interrupted(by=text)


def make_recommendation(**changes: Any) -> Recommendation:
    """FAST over BASELINE, with SAME_BATCH as the choice of the same batch; keywords change fields."""
    batch_ratio = FAST.global_batch_size / BASELINE.global_batch_size
    advice = scale_lr(BASELINE.lr, batch_ratio, "auto", OptimizerFacts(name="SGD"))
    values: dict[str, Any] = {
        "config": FAST.model_copy(update={"lr": advice.lr}),
        "number": 1,
        "verdict": "faster",
        "speedup": Interval(value=2.412, low=2.351, high=2.474),
        "gain_probability": 1.0,
        "lr_advice": advice,
        "same_batch": SAME_BATCH,
        "same_batch_number": 2,
        "same_batch_speedup": Interval(value=1.93, low=1.9, high=1.96),
        "reasons": (
            best_believed(configurations=12, is_outrun=False, leaves_out_larger=False),
            proven(least_fraction=1.2, runs=3, baseline_runs=3),
        ),
        "confirmations": list_confirmations(make_trials()),
    }
    return Recommendation(**values | changes)
