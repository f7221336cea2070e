"""Searches, comparisons and diagnoses that, with the variants of tests.factories, bring up every message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import Any

from autotune.config.plan import ObjectFacts
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import judge
from autotune.messages.diagnosis import largest_share, not_excluded, remedy_expected
from autotune.messages.search import little_gain_expected
from autotune.messages.trials import clock_lowered, float32_unknown, others_on_device
from autotune.note import Note
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import (
    NVML_SOURCE,
    PROFILER_SOURCE,
    WAIT_SOURCE,
    BucketForecast,
    BusyReading,
    Ceilings,
    Fullness,
    HostLoad,
    Interval,
    Lengths,
    Measurement,
    PackForecast,
    SwitchGain,
    Tokens,
)
from autotune.records.result import (
    Advice,
    Curves,
    Diagnosis,
    LargerBatch,
    RunSummary,
    RunVariation,
)
from autotune.records.trial import Failure, Outcome, TrialRecord
from autotune.records.watched_run import RUN_PARTS, Modes, RunPart, RunShare, Startup, WatchedRun
from autotune.report.comparison import Comparison, compare_summaries
from autotune.space.scaling import LrAdvice
from tests.factories import (
    BASELINE,
    CPU,
    FAST,
    GROUP,
    HOT,
    NO_ADVICE,
    SAME_BATCH,
    TALK,
    make_breakdown,
    make_conditions_summary,
    make_evidence,
    make_group_summary,
    make_guard,
    make_loader_costs,
    make_measurement,
    make_point,
    make_rank,
    make_recommendation,
    make_rich_summary,
    make_roofline,
    make_script,
    make_summary,
    make_trial,
    make_trials,
    make_variants,
    make_window,
    run_again,
    with_first,
    with_run_changes,
)

TOKENS = Tokens(per_sample=50.0, relative_sd=0.02, batches=90, shortest=20, longest=80, padding=0.4)
BUCKETS = BucketForecast(
    pool_batches=50,
    random_padding=0.42,
    bucket_padding=0.05,
    device_time=0.6,
    device_time_ci=(0.5, 0.7),
)
ROWS = PackForecast(
    row_tokens=90, samples_per_row=2.9, padding=0.02, device_time=0.5, device_time_ci=(0.4, 0.6)
)
LENGTHS = Lengths(
    items=500,
    mean=30.0,
    median=25.0,
    longest=90,
    padding=0.39,
    buckets=BUCKETS,
    packed=ROWS,
)
ASSUMED = RunVariation(sd=0.05, degrees_of_freedom=4.0, source="assumed")
SAME_RATE = Interval(value=1.0, low=1.0, high=1.0)
NO_OTHERS: dict[str, Any] = {"same_batch": None, "same_batch_number": None}
STAYS: dict[str, Any] = {
    "config": BASELINE,
    "number": 0,
    "verdict": "already_best",
    "lr_advice": NO_ADVICE,
}
CAPPED: dict[str, Any] = {"throttle_reasons": ("power_cap",)}


def single_runs(
    own: Any = None, best: Any = None, *, baseline: TrainingConfig = BASELINE, **found: Any
) -> RunSummary:
    """Build a search with single trials of 1,000 and 4,000 samples/s that measured this besides."""
    trials = (
        make_trial(0, baseline, measurement=make_measurement(1000.0, **(own or {}))),
        make_trial(1, FAST, measurement=make_measurement(4000.0, **(best or {}))),
    )
    return make_summary(
        trials=trials, baseline=baseline, recommendation=make_recommendation(**NO_OTHERS | found)
    )


def ceilings(
    loader: float | None = None,
    device: float | None = None,
    copy: float | None = None,
    host: float | None = None,
) -> dict[str, float]:
    """Return each side's throughput alone, as a measurement's fields."""
    rates = {
        "loader_ceiling": loader,
        "device_ceiling": device,
        "copy_ceiling": copy,
        "host_ceiling": host,
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


LAUNCHED: dict[str, Any] = {
    **ceilings(1819.1, 1313.3, 122_065.0, 1302.1),
    "breakdown": make_breakdown(wait=0.021, copy=0.008, idle=0.252),
    "busy_readings": (
        BusyReading(fraction=0.727, source=PROFILER_SOURCE),
        BusyReading(fraction=0.995, source=WAIT_SOURCE),
    ),
    "window": make_window(1000.0, host_ahead_s=0.0),
    "data_wait_fraction": 0.005,
}
"""Of a loop of 1,000 samples/s, in the proportions of an H200's 18 narrow layers (`launch_bound` in
benchmarks/results/gpu-nvidia-h200.json)."""


def loaded(baseline: float, fast: float) -> RunSummary:
    """Build a search on two cores, of which other processes used some next to a trial that used one."""
    loads = [
        HostLoad(
            seconds=1.0, cores=2, reachable_cores=2, busy_s=1.0 + others, own_s=1.0, stolen_s=0.0
        )
        for others in (baseline, fast)
    ]
    return single_runs({"host_load": loads[0]}, {"host_load": loads[1]})


def larger_batch(
    over: Interval | None = None,
    break_even: Interval | None = None,
    *,
    is_kept: bool = False,
    **parts: Any,
) -> RunSummary:
    """Build a search whose larger batch pays above a noise scale; `is_kept`: the baseline's batch wins."""
    larger = LargerBatch(
        config=FAST,
        number=1,
        speedup=None,
        over_same_batch=over or Interval(value=1.25, low=1.2, high=1.3),
        is_worth_it=not is_kept,
        break_even=break_even or Interval(value=640.0, low=500.0, high=830.0),
    )
    own = {"config": SAME_BATCH, "number": 2} if is_kept else {}
    return make_summary(recommendation=make_recommendation(larger_batch=larger, **own | parts))


def failed_baseline(
    outcome: Outcome, measurement: Measurement | None = None, **result: Any
) -> RunSummary:
    """Build a search whose baseline failed."""
    infeasible = make_variants()["baseline_infeasible"]
    own = make_trial(0, BASELINE, outcome, measurement=measurement, **result)
    return infeasible.model_copy(update={"trials": (own, *infeasible.trials[1:])})


def failed_trials(*outcomes: Outcome, **result: Any) -> RunSummary:
    """Build a search that recommends nothing."""
    trials = tuple(
        make_trial(number, BASELINE, outcome, **result) for number, outcome in enumerate(outcomes)
    )
    return make_summary(recommendation=None, trials=trials)


def thrashing() -> Measurement:
    """Return a measurement with allocator retries in its window."""
    run = make_measurement(5000.0, gib=15.9)
    return run.model_copy(update={"memory": run.memory.model_copy(update={"alloc_retries": 4})})


def verdict_cases() -> dict[str, RunSummary]:
    """Build a search for each headline."""
    undecided = make_variants()["unconfirmed"]
    assert undecided.recommendation is not None
    without_end = undecided.recommendation.model_copy(update={"more_s": None})
    return {
        "undecided": undecided,
        "undecided, for how long is not known": undecided.model_copy(
            update={"recommendation": without_end}
        ),
        "nothing faster so far": single_runs(
            **STAYS | {"verdict": "unconfirmed", "speedup": SAME_RATE}
        ),
        "already the best": single_runs(**STAYS | {"speedup": SAME_RATE}),
        "already the best that may be used": single_runs(
            **STAYS | {"speedup": SAME_RATE, "is_outrun": True}
        ),
        "faster ones overload": single_runs(**STAYS | {"speedup": SAME_RATE, "overloaded": (1,)}),
        "undecided, and a larger batch is faster": larger_batch(
            verdict="unconfirmed", speedup=Interval(value=1.1, low=0.98, high=1.2)
        ),
        "larger batches are faster": larger_batch(
            **STAYS,
            speedup=SAME_RATE,
            same_batch=BASELINE,
            same_batch_number=0,
            same_batch_speedup=None,
        ),
        "baseline fails later": single_runs(verdict="baseline_infeasible", speedup=None),
        "baseline out of memory": failed_baseline(
            "oom", reason="CUDA out of memory", violation=0.1
        ),
        "baseline out of time": failed_baseline("timeout", reason="it took too long"),
        "baseline crashes": failed_baseline("crashed", reason="ValueError: no"),
        "baseline without room": failed_baseline("over_memory", thrashing()),
        "nothing measured": make_summary(trials=(), recommendation=None),
        "all without room": make_summary(
            recommendation=None,
            trials=(make_trial(0, BASELINE, "over_memory", measurement=thrashing()),),
        ),
        "all out of memory": failed_trials("oom", "oom", violation=0.2),
        "out of memory by how much is not known": failed_trials("oom", "crashed", "oom"),
        "all crashed": failed_trials("crashed", "crashed", reason="ValueError: no"),
        "all fail when run again": make_summary(
            recommendation=None,
            trials=(run_again(make_trial(0, BASELINE, measurement=make_measurement()), None),),
        ),
    }


def batch_cases() -> dict[str, RunSummary]:
    """Build searches with larger batches, reasons and learning rates."""
    own: dict[str, Any] = {
        "same_batch": BASELINE,
        "same_batch_number": 0,
        "same_batch_speedup": None,
    }
    advice = LrAdvice(
        lr=0.004, rule="linear", batch_ratio=4.0, betas=(0.6, 0.996), eps=5e-9, notes=()
    )
    return {
        "the larger pays above a scale": larger_batch(),
        "the larger pays at any scale": larger_batch(
            break_even=Interval(value=0.0, low=0.0, high=0.0), **own, config=FAST, number=1
        ),
        "the larger pays at no scale, perhaps": larger_batch(
            break_even=Interval(value=640.0, low=500.0, high=inf)
        ),
        "the baseline does not work": larger_batch(
            verdict="baseline_infeasible", speedup=None, same_batch_speedup=None
        ),
        "too little": larger_batch(Interval(value=1.04, low=1.02, high=1.06), is_kept=True),
        "perhaps noise": larger_batch(Interval(value=1.01, low=0.97, high=1.05), is_kept=True),
        "faster ones at the own batch overload": make_summary(
            recommendation=make_recommendation(**own, overloaded=(2,))
        ),
        "learning rate, betas and eps": single_runs(lr_advice=advice),
        "claimed and measured": make_summary(
            recommendation=make_recommendation(
                measured_speedup=Interval(value=2.5, low=2.4, high=2.6)
            )
        ),
        "pays for itself": make_summary(wall_s=200.0, promised_s=150.0),
        "little is expected": make_summary(
            stopped_because=little_gain_expected(gain_fraction=0.003)
        ),
    }


def headroom_cases() -> dict[str, RunSummary]:
    """Build a search for each sentence on headroom."""
    with_workers, four = TrainingConfig(num_workers=2), GROUP.model_copy(update={"world_size": 4})
    own_best = STAYS | {"speedup": SAME_RATE}
    return {
        "loader holds, little is left": single_runs(
            ceilings(1050.0, 2300.0), ceilings(9000.0, 4160.0)
        ),
        "device holds": single_runs(ceilings(5000.0, 1010.0), baseline=with_workers),
        "devices hold": single_runs(ceilings(5000.0, 1010.0), baseline=four),
        "sides alternate": single_runs(ceilings(2000.0, 2000.0)).model_copy(
            update={"environment": CPU}
        ),
        "no side holds": single_runs(ceilings(2000.0, 2000.0)),
        "loader not measured": single_runs(ceilings(None, 2000.0)),
        "device not measured": single_runs(ceilings(2000.0)),
        "device's ceiling too low": single_runs(ceilings(5000.0, 500.0)),
        "copies hold": single_runs(
            ceilings(9000.0, 2300.0, 1100.0), ceilings(9000.0, 5000.0, 4100.0)
        ),
        "host holds": single_runs(
            ceilings(9000.0, 2300.0, None, 1100.0), ceilings(9000.0, 5000.0, None, 4100.0)
        ),
        "host holds the device alone as well": single_runs(LAUNCHED),
        "host of several devices holds": single_runs(
            ceilings(9000.0, 2300.0, None, 1100.0), baseline=four
        ),
        "nothing is left": single_runs(best=ceilings(9000.0, 4000.0)),
        "much is left": single_runs(best=ceilings(8000.0, 9000.0)),
        "own is best": single_runs(ceilings(5000.0, 1020.0), **own_best),
    }


def condition_cases() -> dict[str, RunSummary]:
    """Build a search for each thing that makes throughput doubtful."""
    tf32 = {"tf32_overrides": ("NVIDIA_TF32_OVERRIDE=0",)}
    sources = {
        source: [BusyReading(source=source, fraction=0.9)] for source in ("its own", NVML_SOURCE)
    }
    unlike = single_runs(
        {"busy_readings": sources["its own"]}, {"busy_readings": sources[NVML_SOURCE]}
    )
    own, fast, *others = make_trials()
    return {
        "hot": make_conditions_summary(HOT, HOT, retries=7),
        "one switch": make_conditions_summary(tf32),
        "others' memory": make_conditions_summary({"others_memory_bytes": 3 * 2**30}),
        "others' load": make_conditions_summary({"others_busy_fraction": 0.2}),
        "cores shared": loaded(0.9, 0.1),
        "no runs compared": make_summary(run_variation=ASSUMED),
        "held by the host and by the device": held_apart(),
        "unlike sources": without_scores_source(unlike),
        "unlike numbers of runs": make_summary(
            trials=(own, fast.model_copy(update={"results": fast.results[:2]}), *others)
        ),
        "many trials": make_summary(
            trials=[
                make_trial(number, BASELINE, measurement=make_measurement(1000.0))
                for number in range(201)
            ]
        ),
        "lengths": single_runs({"tokens": TOKENS, "lengths": LENGTHS}),
        "remark on the precision guard": remarked_guard(),
    }


def held_apart() -> RunSummary:
    """Build a search on an accelerator whose host holds the baseline and whose device the recommended settings."""
    steady = RunVariation(sd=0.004, degrees_of_freedom=3.0)
    spread = RunVariation(sd=0.062, degrees_of_freedom=5.0, source="workload", device=steady)
    window = make_window(4000.0, host_ahead_s=0.1)
    return single_runs(None, {"window": window}).model_copy(update={"run_variation": spread})


def without_scores_source(summary: RunSummary) -> RunSummary:
    """Remove the busy fraction that scores are made from."""
    trials = []
    for trial in summary.trials:
        assert trial.measurement is not None
        run = trial.measurement.model_copy(update={"busy_fraction": None, "busy_source": None})
        trials.append(with_first(trial, measurement=run))
    return summary.model_copy(update={"trials": tuple(trials)})


def remarked_guard() -> RunSummary:
    """Build a search whose precision checks all have the same remark."""
    guard = make_guard().model_copy(
        update={"notes": (float32_unknown(variable="NVIDIA_TF32_OVERRIDE"),)}
    )
    rich = make_rich_summary()
    return rich.model_copy(
        update={"trials": tuple(with_first(trial, guard=guard) for trial in rich.trials)}
    )


def hostile_summary(attack: str) -> RunSummary:
    """Build a search with this text wherever a user's code or machine may put one."""
    rich = make_rich_summary()
    failure = Failure(signature=attack, traceback=f"Traceback\n  {attack}\nValueError")
    crash = make_trial(11, FAST, "crashed", reason=attack, failure=failure)
    machine = {"device_name": attack, "versions": {attack: attack}}
    hostile = {
        "name": attack,
        "notes": (attack,),
        "memory_source": attack,
        "stopped_because": attack,
        "environment": rich.environment.model_copy(update=machine),
        "facts": rich.facts.model_copy(update={"step_source": attack}),
        "trials": (*rich.trials, crash),
    }
    return rich.model_copy(update=hostile)


def group_cases() -> dict[str, RunSummary]:
    """Build searches on several devices."""
    four = GROUP.model_copy(update={"world_size": 4})
    uneven = (make_rank(0, device_ceiling=20_000.0), make_rank(1, device_ceiling=12_800.0))
    group, rich = make_group_summary(), make_rich_summary()
    assert group.recommendation is not None
    assert rich.recommendation is not None
    refuted = group.recommendation.model_copy(
        update={"overloaded": (2, 3), "config": FAST, "number": 1}
    )
    facts = rich.facts.model_copy(update={"gradient_bytes": 2 * 2**30})
    whole = rich.recommendation.model_copy(update={"config": GROUP})
    return {
        "ddp helps": group,
        "an uneven rank holds": make_group_summary(ranks=uneven),
        "two help": one_against(2000.0),
        "no measurable help": one_against(1000.0),
        "no help": one_against(800.0, ranks=(make_rank(0), make_rank(1))),
        "four help": one_against(3900.0, four),
        "four don't": one_against(900.0, four),
        "interval without an end": one_against(1050.0, noise=inf),
        "all refuted": group.model_copy(update={"recommendation": refuted}),
        "nothing to compare with": group.model_copy(update={"trials": group.trials[2:]}),
        "stress run in one process": rich.model_copy(
            update={"recommendation": whole, "facts": facts}
        ),
        "lines of two groups": memory_cases()["two groups"],
        "lines with workers": memory_cases()["workers"],
    }


def one_against(rate: float, config: TrainingConfig = GROUP, **measured: Any) -> RunSummary:
    """Build a search that recommends the baseline, of 1,000 samples/s, over a group; each was measured once."""
    trials = (
        make_trial(0, BASELINE, measurement=make_measurement(1000.0)),
        make_trial(1, config, measurement=make_measurement(rate, **measured)),
    )
    return make_summary(trials=trials, recommendation=make_recommendation(**STAYS | NO_OTHERS))


def memory_cases() -> dict[str, RunSummary]:
    """Build searches to whose memory peaks lines can be fitted."""

    def batch(size: int, config: TrainingConfig = BASELINE, workers: int = 0) -> TrainingConfig:
        return config.model_copy(update={"micro_batch_size": size, "num_workers": workers})

    group = TrainingConfig(strategy="ddp", world_size=2)
    sizes = (32, 64, 128)
    alone = {batch(size): 1 + size / 64 for size in sizes}
    both = alone | {batch(size, group): 3 + size / 32 for size in sizes}
    workers = {
        batch(size, workers=own): 1 + size / 64 + own / 8 for size in sizes for own in (0, 2, 4)
    }
    return {
        "one group": peaks(alone),
        "two groups": peaks(both),
        "two groups, the larger recommended": peaks(both, chosen=group),
        "workers": peaks(workers, kind="cpu", chosen=batch(32, workers=2)),
        "workers, GPU": peaks(workers),
    }


def peaks(
    gib: dict[TrainingConfig, float], *, kind: str = "cuda", chosen: TrainingConfig = BASELINE
) -> RunSummary:
    """Build a search with a trial for each configuration and its peak in GiB."""
    trials = [
        make_trial(number, config, measurement=make_measurement(1000.0, gib=peak))
        for number, (config, peak) in enumerate(gib.items())
    ]
    environment = make_summary().environment.model_copy(update={"device_kind": kind})
    found = make_recommendation(config=chosen)
    return make_summary(trials=tuple(trials), recommendation=found, environment=environment)


def comparison_cases() -> dict[str, Comparison]:
    """Compare two searches, in each way that they can differ."""
    plain, rich = make_summary(), make_rich_summary()
    machine = plain.environment.model_copy(update={"torch": "9.9.9", "cores": 96})
    facts = plain.facts.model_copy(update={"dataset_length": 77})
    changed = make_summary(
        environment=machine,
        facts=facts,
        seed=7,
        baseline=SAME_BATCH,
        recommendation=make_recommendation(config=FAST.model_copy(update={"num_workers": 2})),
        trials=trials_at(1.25),
    )
    small = make_recommendation(
        config=SAME_BATCH, number=2, same_batch=SAME_BATCH, same_batch_number=2
    )
    unmeasured = make_summary(trials=(), recommendation=make_recommendation(**NO_OTHERS))
    second = {
        "same": plain,
        "changed": changed,
        "rich": rich,
        "nothing-recommended": make_summary(recommendation=None, run_variation=ASSUMED),
        "nothing-measured": unmeasured,
        "another-batch": make_summary(recommendation=small),
        "held-apart": held_apart(),
    }
    return {
        name: compare_summaries(rich if name == "rich" else plain, other, ("runs/a", "runs/b"))
        for name, other in second.items()
    }


def trials_at(times: float) -> tuple[TrialRecord, ...]:
    """Return the trials of a machine that is `times` as fast."""
    faster = []
    for trial in make_trials()[:3]:
        rates = [times * run.samples_per_s for run in trial.runs]
        measured = [{"samples_per_s": rate, "window": make_window(rate)} for rate in rates]
        faster.append(with_run_changes(trial, *measured))
    return tuple(faster)


def diagnosis_cases() -> dict[str, Diagnosis]:
    """Build a diagnosis for each answer and each part of its report."""
    wait: dict[str, Any] = {"breakdown": make_breakdown(wait=0.57)}
    costs = make_loader_costs(item_p99_s=0.077, batches_per_worker_per_s=31.0)
    broken = make_point(None, num_workers=8).model_copy(update={"reason": "it broke"})
    curves = Curves(
        loader=(make_point(440.0), make_point(900.0, num_workers=4), broken),
        device=(make_point(1000.0), make_point(1500.0, amp_dtype="bfloat16")),
        copy=(make_point(1000.0), make_point(6000.0, pin_memory=True)),
        roofline=make_roofline(),
    )
    fullness = Fullness(
        sm_fraction=0.91, sm_occupancy=None, tensor_fraction=0.13, dram_fraction=0.47
    )
    hot = make_conditions_summary(HOT).trials[1].measurement
    assert hot is not None
    known = {
        "loader-holds": make_evidence(
            430.0,
            **wait,
            loader_ceiling=440.0,
            device_ceiling=1000.0,
            loader_costs=costs,
            fullness=fullness,
            curves=curves,
            busy_readings=(BusyReading(source=NVML_SOURCE, fraction=0.4),),
        ),
        "healthy": make_evidence(
            1000.0, device_ceiling=1005.0, breakdown=make_breakdown(wait=0.01)
        ),
        "in-turns": make_evidence(
            500.0,
            config=TrainingConfig(),
            environment=CPU,
            **wait,
            loader_ceiling=1000.0,
            device_ceiling=1000.0,
        ),
        "copies-hold": make_evidence(
            500.0, breakdown=make_breakdown(copy=0.5), device_ceiling=1000.0, copy_ceiling=520.0
        ),
        "host-holds": make_evidence(
            500.0,
            breakdown=make_breakdown(idle=0.5),
            device_ceiling=1000.0,
            host_ceiling=520.0,
            ceilings=Ceilings(
                device=Ceiling(
                    samples_per_s=1000.0, samples=3200, seconds=3.2, batches=100, host_s=0.0415
                )
            ),
            window=make_window(500.0, take_s=0.02),
            loader_costs=make_loader_costs(batch_tensors=3),
        ),
        "host-holds-the-device-alone": make_evidence(1000.0, **LAUNCHED),
        "modes-left-on": make_evidence(
            500.0,
            config=TrainingConfig(),
            environment=CPU,
            switches=(
                SwitchGain(
                    name="anomaly",
                    ratio=Interval(value=4.1, low=3.8, high=4.4),
                    rounds=8,
                    steps=3,
                ),
                SwitchGain(
                    name="denormals",
                    ratio=Interval(value=1.8, low=1.7, high=1.9),
                    rounds=8,
                    steps=3,
                    share=0.31,
                    is_at_one_thread=True,
                ),
            ),
            modes=Modes(
                is_anomaly_detected=True,
                is_profiled=True,
                variables={"PYTHONMALLOC": "debug"},
                places={"anomaly": "train.py:41", "profiler": "train.py:52"},
            ),
        ),
        "device-not-measured": make_evidence(
            430.0, **wait, loader_ceiling=440.0, device_ceiling=None
        ),
        "loader-not-measured": make_evidence(
            430.0, **wait, loader_ceiling=None, device_ceiling=1000.0
        ),
        "window-alone": make_evidence(
            430.0,
            breakdown=None,
            loader_ceiling=None,
            device_ceiling=None,
            loader_costs=None,
            data_wait_fraction=0.57,
        ),
        "ranks-lengths-a-hot-device": make_evidence(
            1000.0,
            ranks=(make_rank(0), make_rank(1, device_ceiling=6_400.0)),
            communication=TALK,
            tokens=TOKENS,
            lengths=LENGTHS,
            conditions=hot.conditions,
            breakdown=make_breakdown(wait=0.6, restart=0.5),
        ),
    }
    found = {name: judge("resnet", evidence, wall_s=83.0) for name, evidence in known.items()}
    return found | hour_cases()


def hour_cases() -> dict[str, Diagnosis]:
    """Build a diagnosis of a script for each kind of hour that its training may have."""
    steps: dict[RunPart, float] = {
        "forward": 0.17,
        "backward": 0.14,
        "optimizer": 0.04,
        "waiting": 0.008,
    }
    steps |= {"startup": 0.006, "copy": 0.0, "other": 0.006}
    save = make_advice(
        "Save a checkpoint every 60 steps, or in the background: "
        "torch.distributed.checkpoint.async_save",
        gain=(1.36, 1.1, 1.7),
        place="train.py:41",
    )
    sixteen = make_advice("Set amp_dtype=bfloat16", gain=(0.12, 0.05, 0.2), amp_dtype="bfloat16")
    larger = make_advice(
        "Set micro_batch_size=128, amp_dtype=bfloat16",
        gain=(0.14, -0.02, 0.31),
        micro_batch_size=128,
        amp_dtype="bfloat16",
    )
    rarely = make_advice(
        "Validate every 200 steps, on fewer batches, or in larger ones under torch.inference_mode()",
        gain=(0.63, 0.2, inf),
        place="train.py:66",
    )
    anomaly = make_advice(
        "Remove torch.autograd.set_detect_anomaly(True)", gain=(0.87, 0.8, 0.95), place="train.py:9"
    )
    workers = make_advice("Set num_workers=8", gain=(0.25, 0.18, 0.33), num_workers=8)
    checkpoint = make_share(
        "checkpoint", 0.63, (0.55, 0.7), seen=11, period="every 5 steps", place="train.py:41"
    )
    validation = make_share(
        "validation", 0.41, (0.2, 0.66), seen=1, period="each epoch", place="train.py:66"
    )
    logging = make_share("logging", 0.012, (0.01, 0.014), seen=190, period="each step")
    forbidden = not_excluded("lines", "py-spy may not read the process: no ptrace here")
    too_short = not_excluded("growth", "no epoch ended")
    return {
        "checkpoints": of_hour(
            [checkpoint, *map(make_share, steps, steps.values())], [save, sixteen, larger]
        ),
        "validation-seen-once": of_hour(
            [validation, logging, *(make_share(part, 1.6 * steps[part]) for part in steps)],
            [rarely, workers],
            unchecked=[forbidden],
        ),
        "nothing-recurs": of_hour(
            [
                make_share("waiting", 0.71, (0.66, 0.76), place="data/images.py:128"),
                *(make_share(part, 0.6 * steps[part]) for part in ("forward", "backward")),
                make_share("other", 0.1, (0.07, 0.13), place="train.py:88"),
            ],
            [workers],
            watched_s=6.2,
            host_load=HostLoad(
                seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=0.5, stolen_s=0.0
            ),
        ),
        "gpu": of_hour(
            [
                make_share("synchronise", 0.34, (0.3, 0.38), place="train.py:88"),
                make_share("copy", 0.12, (0.1, 0.14), place="train.py:80"),
                make_share("restart", 0.09, (0.04, 0.15), seen=1, period="each epoch"),
                make_share("collection", 0.02, (0.01, 0.03), seen=9, period="every 100 steps"),
                *(make_share(part, fraction) for part, fraction in steps.items()),
            ],
            [workers, sixteen],
        ),
        "anomaly-mode": of_hour(
            [
                make_share("backward", 0.57, place="train.py:35"),
                make_share("forward", 0.31, place="train.py:33"),
                make_share("other", 0.08, place="train.py:31"),
                make_share("waiting", 0.04),
            ],
            [anomaly, sixteen, workers, larger],
            unchecked=[forbidden, too_short],
            memory_over_limit=True,
        ),
        "longest": longest_hour(),
    }


def longest_hour() -> Diagnosis:
    """Build a diagnosis with every part, note and kind of text that takes space."""
    place = f"/home/someone/{'projects/of-a-long-name/' * 4}train_the_model.py:1234"
    share = 0.076
    shares = [
        make_share(part, share, (0.05, 0.1), seen=7, period="every 1,000 steps", place=place)
        for part in RUN_PARTS
    ]
    words = "decode images with a faster library, or once and offline, " * 8
    advice = [
        make_advice(f"{words}{number}", gain=(0.3, 0.1, 0.5), place=place) for number in range(9)
    ]
    found = of_hour(
        shares,
        advice,
        unchecked=[not_excluded(cause, "no py-spy " * 9) for cause in ("lines", "growth", "modes")],
        host_load=HostLoad(
            seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=0.5, stolen_s=0.0
        ),
        memory_over_limit=True,
    )
    doubts = (others_on_device(held_bytes=2**33, busy_fraction=0.4), clock_lowered(["thermal"]))
    return found.model_copy(
        update={"headline": f"{found.headline} {words.strip()}", "notes": (*doubts, *found.notes)}
    )


def of_hour(
    shares: Iterable[RunShare],
    advice: Sequence[Advice],
    *,
    unchecked: Iterable[Note] = (),
    watched_s: float = 12.3,
    memory_over_limit: bool = False,
    **measured: Any,
) -> Diagnosis:
    """Build the diagnosis of a script from an hour of its training and the advice."""
    shares = tuple(share for share in shares if share.fraction > 0)
    watched = WatchedRun(
        startup=Startup(before_loader_s=3.0, first_batch_s=0.5, first_step_s=0.4),
        steps=57,
        watched_s=watched_s,
        parts_s={},
    )
    evidence = make_evidence(100.0, environment=CPU, **measured)
    evidence = evidence.model_copy(update={"watched": watched})
    if memory_over_limit:
        evidence = evidence.model_copy(update={"limit_bytes": 2**20})
    found = judge("train.py", evidence, wall_s=41.0)
    top = max(shares, key=lambda share: share.fraction)
    gain = advice[0].gain_interval
    assert gain is not None
    headline = (
        largest_share(part=top.part, share=top.fraction, period=top.period, place=top.place),
        remedy_expected(
            advice[0].text,
            gain=gain.value,
            low=gain.low,
            high=gain.high if isfinite(gain.high) else None,
        ),
    )
    return found.model_copy(
        update={
            "headline": " ".join(map(str, headline)),
            "headline_notes": headline,
            "shares": shares,
            "advice": tuple(advice),
            "not_excluded": tuple(unchecked),
            "is_healthy": False,
        }
    )


def make_share(
    part: RunPart, fraction: float, ends: tuple[float, float] | None = None, **about: Any
) -> RunShare:
    """Build a part's share; certain, unless it has ends."""
    low, high = ends or (fraction, fraction)
    return RunShare(part=part, fraction=fraction, low=low, high=high, **about)


def make_advice(
    text: str, *, gain: tuple[float, float, float], place: str = "", **settings: object
) -> Advice:
    """Build advice with the interval of its gain."""
    value, low, high = gain
    return Advice(
        kind="settings",
        settings=settings,
        expected_samples_per_s=None,
        expected_gain=value,
        gain_interval=Interval(value=value, low=low, high=high),
        text=text,
        basis="measured",
        place=place,
    )


def recommended_cases() -> dict[str, RunSummary]:
    """Build a search for each head of a recommended.yaml."""
    group = TrainingConfig(strategy="ddp", world_size=2)
    own: dict[str, Any] = {"has_loader": True}
    replaced_arguments = own | {"replaced_arguments": ("collate_fn", "batch_sampler")}
    malloc = make_summary().environment.model_copy(
        update={"malloc": ("A=1", "B=2"), "keeps_memory": True}
    )
    script = make_summary().facts.model_copy(update={"script": make_script()})
    switches = {"baseline": TrainingConfig(fused=True, cudnn_benchmark=True)}
    trainers = {"transformers.Trainer": "during_training", "Lightning's Trainer": "during_training"}
    trainers |= {"accelerate": "prepared_by"}
    return {
        "map-style dataset": recommending(TrainingConfig()),
        "ddp, bound": recommending(group.model_copy(update={"numa_binding": "node"})),
        "dp": recommending(TrainingConfig(strategy="dp", world_size=2)),
        "stream": recommending(TrainingConfig(), is_iterable=True),
        "tf.data": recommending(TrainingConfig(), is_tf_data=True, is_iterable=True),
        "token budget": recommending(TrainingConfig(max_tokens=9), has_token_budget=True),
        "own batches": recommending(
            TrainingConfig(worker_threads=1, num_workers=2), fixed_batch_size=2
        ),
        "own loader, ddp": recommending(group, own),
        "own loader, and something beside it": recommending(TrainingConfig(), replaced_arguments),
        "switches, malloc": recommending(TrainingConfig()).model_copy(
            update=switches | {"environment": malloc}
        ),
        "script": make_summary(facts=script, command=("python", "train.py")),
        **{
            name: recommending(TrainingConfig(fused=True), replaced_arguments).model_copy(
                update={
                    "notes": (Note(code=code, figures={"framework": name, "names": ["logging"]}),)
                }
            )
            for name, code in trainers.items()
        },
    }


def recommending(
    config: TrainingConfig, objects: dict[str, Any] | None = None, **facts: Any
) -> RunSummary:
    """Build a search that found this configuration, for a workload with these objects and facts."""
    summary = make_summary(recommendation=make_recommendation(config=config))
    known = summary.facts.model_copy(
        update={"objects": ObjectFacts.model_validate(objects or {}), **facts}
    )
    return summary.model_copy(update={"facts": known})


def every_case() -> dict[str, dict[str, RunSummary]]:
    """Return all searches whose sentences stand in golden files, by group."""
    return {
        "verdicts": verdict_cases(),
        "batches": batch_cases(),
        "headroom": headroom_cases(),
        "conditions": condition_cases(),
        "devices": group_cases(),
    }
