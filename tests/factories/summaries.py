"""Summaries of whole searches, and their variants."""

from __future__ import annotations

from typing import Any

from autotune.config.plan import Budget, Objective
from autotune.messages.search import (
    baseline_is_no_reference,
    best_believed,
    most_trials,
    not_proven,
    nothing_beats_baseline,
)
from autotune.messages.trials import curves_cut
from autotune.records.measurement import (
    NVML_SOURCE,
    PROFILER_SOURCE,
    BusyReading,
    DeviceConditions,
    Fullness,
    Interval,
    MemorySample,
    RankFigures,
)
from autotune.records.result import RunSummary, RunVariation
from autotune.records.trial import StressFigures, TrialRecord
from autotune.space.scaling import LrAdvice
from tests.factories.machines import RESNET, SERVER
from tests.factories.measurements import (
    HOT,
    TALK,
    make_breakdown,
    make_conditions,
    make_guard,
    make_loader_costs,
    make_measurement,
    make_rank,
)
from tests.factories.trials import (
    BASELINE,
    FAST,
    GROUP,
    LIMIT,
    list_confirmations,
    make_recommendation,
    make_trial,
    make_trials,
    run_again,
    run_once,
    said,
    with_first,
)

STARVED = make_breakdown(wait=0.6, copy=0.02, idle=0.05, restart=0.15)
"""A step that waits for its data most of the time."""
FED = make_breakdown(wait=0.02, copy=0.02, idle=0.05, restart=0.005)
"""A step that hardly waits for its data."""
RESNET_LOADER = make_loader_costs(
    1.25e-3,
    items=128,
    item_cpu_s=1.2e-3,
    item_median_s=1.1e-3,
    item_p99_s=4e-3,
    item_slowest_s=0.02,
    slow_tail_fraction=0.01,
    item_bytes=600_000.0,
    collate_s=3e-3,
)
"""Costs of an image that is decoded and augmented."""
LEARNED = RunVariation(sd=0.012, degrees_of_freedom=9.0, source="workload")
"""Between runs of the same settings."""
NO_ADVICE = LrAdvice(lr=BASELINE.lr, rule="none", batch_ratio=1.0)


def make_summary(**changes: Any) -> RunSummary:
    """Return a search of ten trials that found FAST; keywords change fields."""
    values: dict[str, Any] = {
        "name": "resnet | [quick]",
        "environment": SERVER,
        "facts": RESNET,
        "objective": Objective(),
        "budget": Budget(n_trials=10),
        "baseline": BASELINE,
        "limit_bytes": LIMIT,
        "memory_source": "max reserved + outside torch",
        "seed": 0,
        "trials": make_trials(),
        "run_variation": LEARNED,
        "recommendation": make_recommendation(),
        "notes": (curves_cut(), said("[long] targets")),
        "stopped_because": most_trials(trials=6),
        "wall_s": 200.4,
        "autotune_version": "0.1.0",
    }
    return RunSummary(**values | changes)


def make_rich_summary(**changes: Any) -> RunSummary:
    """Return a search whose every part was measured: the loader limits the baseline, the device the winner."""
    readings = (
        BusyReading(fraction=0.33, source=PROFILER_SOURCE),
        BusyReading(fraction=0.52, source=NVML_SOURCE),
    )
    fullness = Fullness(sm_fraction=0.7, sm_occupancy=0.3, tensor_fraction=None, dram_fraction=0.4)
    before = {"breakdown": STARVED, "busy_readings": readings, "fullness": fullness}
    before |= {"loader_ceiling": 5_400.0, "device_ceiling": 11_900.0, "loader_costs": RESNET_LOADER}
    after = {"breakdown": FED, "loader_ceiling": 30_000.0, "device_ceiling": 12_800.0}
    stress = StressFigures(
        steps=60,
        seconds=12.0,
        items_seen=5000,
        median_item_bytes=600_000.0,
        largest_item_bytes=1_400_000,
        memory=MemorySample(peak_bytes=10 * 2**30, source="max reserved + outside torch"),
    )
    first, second, *others = make_trials()
    first = with_run_changes(first, before)
    second = with_run_changes(second, {}, after)
    guarded = with_first(second, guard=make_guard())
    half = FAST.model_copy(update={"amp_dtype": "float16"})
    broken = make_trial(10, half, "diverged", reason="nan", guard=make_guard(is_good=False))
    trials = (first, guarded, *others, broken)
    recommendation = make_recommendation(confirmations=list_confirmations(trials), stress=stress)
    values = {"trials": trials, "recommendation": recommendation}
    return make_summary(**values | changes)


def make_group_summary(ranks: tuple[RankFigures, ...] = (), **changes: Any) -> RunSummary:
    """Return a search on four devices whose best is ddp on two; rank 1 has the slower loader, without harm."""
    ranks = ranks or (make_rank(0), make_rank(1, loader_ceiling=15_000.0))
    measured: dict[str, Any] = {"ranks": ranks, "communication": TALK, "breakdown": FED}
    single = {"loader_ceiling": 30_000.0, "device_ceiling": 12_800.0}
    both = FAST.model_copy(update={"strategy": "dp", "world_size": 2})
    trials = (
        run_again(
            make_trial(0, BASELINE, measurement=make_measurement(5123.4, gib=3.0)), 5049.0, 5128.0
        ),
        run_again(
            make_trial(1, FAST, measurement=make_measurement(12345.6, gib=9.3, **single)), 12177.0
        ),
        make_trial(2, both, measurement=make_measurement(11_000.0, gib=3.0)),
        run_again(
            make_trial(3, GROUP, measurement=make_measurement(20_480.0, gib=9.6, **measured)),
            20_196.0,
            20_524.0,
        ),
        make_trial(
            4,
            GROUP.model_copy(update={"world_size": 4}),
            "crashed",
            reason="rank 3: ValueError: no",
        ),
    )
    recommendation = make_recommendation(
        config=GROUP,
        number=3,
        same_batch=None,
        same_batch_number=None,
        same_batch_speedup=None,
        confirmations=list_confirmations(trials),
    )
    environment = SERVER.model_copy(update={"device_count": 4})
    values = {"trials": trials, "recommendation": recommendation, "environment": environment}
    return make_summary(**values | changes)


def with_run_changes(trial: TrialRecord, *changes: dict[str, Any]) -> TrialRecord:
    """Change the measurements of a trial's first runs, each by its own fields."""
    results = list(trial.results)
    for place, fields in enumerate(changes):
        result = results[place]
        assert result.measurement is not None
        results[place] = result.model_copy(
            update={"measurement": result.measurement.model_copy(update=fields)}
        )
    return trial.model_copy(update={"results": tuple(results)})


def make_conditions_summary(
    *after: dict[str, Any], retries: int = 0, before: dict[str, Any] | None = None
) -> RunSummary:
    """Return a search whose baseline ran under the usual conditions, and its winner under these, run by run."""
    usual = make_conditions(power_w=255.0, **(before or {}))
    changed = [make_conditions(**changes) for changes in (*after, {}, {}, {})[:3]]
    baseline, fast, *others = make_trials()
    trials = (_under(baseline, [usual] * 3), _under(fast, changed, retries), *others)
    return make_summary(
        recommendation=make_recommendation(confirmations=list_confirmations(trials)), trials=trials
    )


def _under(trial: TrialRecord, conditions: list[DeviceConditions], retries: int = 0) -> TrialRecord:
    memory = trial.runs[0].memory.model_copy(
        update={"allocated_bytes": 2 * 2**30, "alloc_retries": retries}
    )
    return with_run_changes(
        trial, *({"conditions": during, "memory": memory} for during in conditions)
    )


def make_variants() -> dict[str, RunSummary]:
    """One summary for each verdict, and for nothing feasible."""
    over = make_trial(0, BASELINE, "over_memory", measurement=make_measurement(5000.0, gib=17.2))
    failed = tuple(trial for trial in make_trials() if trial.number >= 3)
    own = {
        "same_batch": BASELINE,
        "same_batch_number": 0,
        "same_batch_speedup": None,
        "lr_advice": NO_ADVICE,
    }
    no_gain = Interval(value=1.0, low=1.0, high=1.0)
    stays = (
        nothing_beats_baseline(
            configurations=12, is_outrun=False, leaves_out_larger=False, most_fraction=0.04
        ),
    )
    already_best = make_recommendation(
        config=BASELINE,
        number=0,
        verdict="already_best",
        speedup=no_gain,
        gain_probability=None,
        reasons=stays,
        **own,
    )
    believed = Interval(value=2.3, low=0.97, high=2.9)
    undecided = make_recommendation(
        verdict="unconfirmed",
        speedup=believed,
        same_batch_speedup=Interval(value=1.9, low=0.95, high=2.4),
        gain_probability=0.96,
        more_s=40.0,
        reasons=(
            best_believed(configurations=12, is_outrun=False, leaves_out_larger=False),
            not_proven(gain_fraction=0.96, runs=1, baseline_runs=1),
        ),
        confirmations=(),
    )
    no_reference = {"speedup": None, "same_batch_speedup": None, "gain_probability": None}
    infeasible = make_recommendation(
        verdict="baseline_infeasible",
        reasons=(baseline_is_no_reference(), *undecided.reasons[:1]),
        confirmations=list_confirmations(make_trials()[1:]),
        **no_reference,
    )
    return {
        "faster": make_summary(),
        "already_best": make_summary(recommendation=already_best),
        "unconfirmed": make_summary(recommendation=undecided, trials=run_once(make_trials())),
        "baseline_infeasible": make_summary(
            recommendation=infeasible, trials=(over, *make_trials()[1:])
        ),
        "rich": make_rich_summary(),
        "group": make_group_summary(),
        "hot": make_conditions_summary(HOT, HOT, retries=7),
        "nothing_feasible": make_summary(recommendation=None, trials=(over, *failed)),
    }
