"""Ways to search a ground: the product's, Optuna's samplers with trials of fixed length, and others' ways.

Each is a function of a ground and a seed that hands on a Course: what it would recommend after so many seconds of the
device, from the end of the baseline's trial on; what it recommends in the end; and what the whole took, the baseline
included. The product proves what it has found, the others recommend the best that they have measured.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune import TrainingConfig, TrialRecord
from autotune.config.plan import Budget, Method, Objective, Plan, SearchSpace, Workload
from autotune.config.training_config import NEUTRAL_WITHOUT_WORKERS
from autotune.records.trial import TrialResult
from autotune.tuning.loop import Search
from benchmarks.measures.verdicts import recommended_of
from benchmarks.replay.ground import Ground, Server
from benchmarks.replay.product import search_whole

__all__ = ["METHODS", "Course", "Step"]

_MOST_TRIALS = 60
_PLATEAU = 0.05  # DeepSpeed: a micro batch that brings less ends the search of a stage
_FITTED_SHARE = 0.6  # Ultralytics: of the memory that the fit may fill
_ORDERED = {"micro_batch_size", "grad_accum_steps", "num_workers", "prefetch_factor"}


@dataclass(frozen=True, slots=True)
class Step:
    """After so many seconds of the device, what would be recommended."""

    seconds: float
    recommended: TrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A search."""

    steps: Sequence[Step]
    """From the end of the baseline's trial on."""
    recommended: TrainingConfig
    """In the end."""
    seconds: float
    """Of the device from the end of the baseline's trial until nothing promised more, looks at the sides and checks of
    precision included."""
    whole_s: float
    """Of the device in all: the probe, the baseline, what decides and the stress run as well."""
    trials: int
    """Of the search, less the baseline."""
    out_of_memory: int
    spent_s: Mapping[str, float] = field(default_factory=dict)
    """What the product's seconds went to."""
    promised: Sequence[tuple[float, float]] = ()
    """Seconds at which the product promised a search of how many in all."""
    ended: str = ""
    verdict: str = ""
    """The product's."""
    speedup: tuple[float, ...] | None = None
    """The product's claim over the baseline, with both ends."""


@dataclass(slots=True)
class _Bench:
    """Trials of fixed length, each to the end of its window, and the best one so far."""

    ground: Ground
    seed: int
    seconds: float = 0.0
    trials: int = 0
    out_of_memory: int = 0
    best: TrainingConfig | None = None
    best_rate: float = -inf
    steps: list[Step] = field(default_factory=list)
    _run: Callable[[TrainingConfig], TrialResult] = field(init=False)
    _baseline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._run = self.ground.trials_of(self.seed)
        self.recommend(self.ground.baseline)
        base = self._run(self.ground.baseline)
        self.best, self.best_rate, self._baseline_s = self.ground.baseline, _rate(base), base.wall_s

    def run(self, config: TrainingConfig) -> TrialResult:
        """Measure a configuration; the best so far is what would be recommended."""
        result = self._run(config)
        self.seconds, self.trials = self.seconds + result.wall_s, self.trials + 1
        is_over = self.violation(result) > 0
        self.out_of_memory += is_over
        if not is_over and _rate(result) > self.best_rate:
            self.best, self.best_rate = config, _rate(result)
            self.recommend(config)
        return result

    def recommend(self, config: TrainingConfig) -> None:
        """Note what would be recommended from here on."""
        self.steps.append(Step(self.seconds, config))

    def violation(self, result: TrialResult) -> float:
        """Share by which the memory limit was passed; negative: room left."""
        if result.measurement is None:
            return result.violation if result.violation is not None else 0.25
        return result.measurement.peak_memory_bytes / self.ground.limit_bytes - 1

    def course(self) -> Course:
        """What came of it."""
        return Course(
            steps=self.steps,
            recommended=self.steps[-1].recommended,
            seconds=self.seconds,
            whole_s=self._baseline_s + self.seconds,
            trials=self.trials,
            out_of_memory=self.out_of_memory,
        )


def _product(method: Method, budget: Budget | None = None) -> Callable[[Ground, int], Course]:
    def search(ground: Ground, seed: int) -> Course:
        return _search(ground, seed, method, budget or Budget())

    return search


def _search(ground: Ground, seed: int, method: Method, budget: Budget) -> Course:
    """The product's own search, on the ground's clock."""
    launcher = ground.launcher(seed)
    steps, baseline_s = list[Step](), 0.0
    at_the_end: dict[str, Any] = {}

    def note(search: Search, record: TrialRecord) -> None:
        nonlocal baseline_s
        if record.number == 0:
            baseline_s = launcher.now()
        best = search.best
        steps.append(
            Step(launcher.now() - baseline_s, ground.baseline if best is None else best.config)
        )

    def keep(_: Search | None = None) -> None:
        at_the_end.update(
            seconds=launcher.now() - baseline_s,
            trials=launcher.trials - 1,
            out_of_memory=launcher.out_of_memory,
            spent_s=_spent_s(launcher, baseline_s),
        )

    ended = search_whole(
        _plan(ground, seed), launcher, method=method, budget=budget, on_record=note, on_settled=keep
    )
    if not at_the_end:
        keep()
    spent_s, reason = at_the_end.pop("spent_s"), ended.found.ended_because
    deciding_s = launcher.spent_s["trial"] - spent_s["baseline"] - spent_s["trial"]
    found = ended.recommendation
    return Course(
        steps=steps,
        recommended=recommended_of(found, ground.baseline),
        whole_s=launcher.now(),
        spent_s={**spent_s, "deciding": deciding_s, "stress": launcher.spent_s["stress"]},
        promised=ended.promised,
        ended="" if reason is None else str(reason),
        verdict="" if found is None else found.verdict,
        speedup=None
        if found is None or found.speedup is None
        else tuple(found.speedup.model_dump().values()),
        **at_the_end,
    )


def _spent_s(launcher: Server, baseline_s: float) -> dict[str, float]:
    """Seconds until the end of the search; "trial": without the baseline's."""
    by_kind = launcher.spent_s
    first_s = baseline_s - by_kind["probe"] - by_kind["describe"]
    return {
        "probe": by_kind["probe"] + by_kind["describe"],
        "baseline": first_s,
        "curves": by_kind["curves"],
        "guard": by_kind["guard"],
        "trial": by_kind["trial"] - first_s,
    }


def _plan(ground: Ground, seed: int) -> Plan:
    fixed = ground.baseline.model_dump(
        exclude={"lr", "world_size", "strategy", "ddp", *ground.domains}
    )
    return Plan(
        name="replay",
        workload=Workload(model=None, dataset=None),
        baseline=ground.baseline,
        space=SearchSpace.model_validate({**fixed, **ground.domains}),
        objective=Objective(memory_limit=ground.limit_bytes),
        seed=seed,
    )


def _sampled(
    make_sampler: Callable[[int], optuna.samplers.BaseSampler],
) -> Callable[[Ground, int], Course]:
    """Plain Optuna: a trial of fixed length for each proposal, repeats measured anew, memory as a constraint."""

    def search(ground: Ground, seed: int) -> Course:
        bench, domains = _Bench(ground, seed), _distributions(ground)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(direction="maximize", sampler=make_sampler(seed))
            for _ in range(_MOST_TRIALS):
                trial = study.ask(domains)
                result = bench.run(_config_of(ground, trial.params))
                trial.set_constraint("memory", bench.violation(result))
                study.tell(trial, _rate(result) if result.measurement is not None else 0.0)
        return bench.course()

    return search


def _grid(ground: Ground, seed: int) -> Course:
    """Every point once, in random order."""
    bench, configs = _Bench(ground, seed), list(ground.configs)
    random.Random(seed).shuffle(configs)
    for config in configs:
        bench.run(config)
    return bench.course()


def _doubling(ground: Ground, seed: int) -> Course:
    """Lightning's batch-size finder: the baseline's batch doubled until memory runs out; the last that fitted."""
    bench = _Bench(ground, seed)
    for batch in _values(ground, "micro_batch_size"):
        if batch >= ground.baseline.micro_batch_size:
            config = _changed(ground, ground.baseline, micro_batch_size=batch)
            if bench.violation(bench.run(config)) > 0:
                break
            bench.recommend(config)
    return bench.course()


def _log_log(ground: Ground, seed: int) -> Course:
    """Ultralytics' autobatch: memory at the smallest batches, a line through the logarithms, and what fills 60 %."""
    bench, batches, peaks = _Bench(ground, seed), list[int](), list[int]()
    for batch in _values(ground, "micro_batch_size")[:3]:
        result = bench.run(_changed(ground, ground.baseline, micro_batch_size=batch))
        if result.measurement is not None:
            batches.append(batch)
            peaks.append(result.measurement.peak_memory_bytes)
    slope, intercept = np.polyfit(np.log(batches), np.log(peaks), 1)
    wanted = np.exp(
        min(50.0, (log(_FITTED_SHARE * ground.limit_bytes) - intercept) / max(slope, 1e-3))
    )
    fitting = [batch for batch in _values(ground, "micro_batch_size") if batch <= wanted]
    bench.recommend(
        _changed(ground, ground.baseline, micro_batch_size=max(fitting, default=min(batches)))
    )
    return bench.course()


def _plateau(ground: Ground, seed: int) -> Course:
    """DeepSpeed's micro-batch tuning: batches from the smallest on until one brings less than 5 %; the fastest."""
    bench, before = _Bench(ground, seed), 0.0
    for batch in _values(ground, "micro_batch_size"):
        result = bench.run(_changed(ground, ground.baseline, micro_batch_size=batch))
        if bench.violation(result) > 0 or _rate(result) < (1 + _PLATEAU) * before:
            break
        before = _rate(result)
    return bench.course()


def _sweeps(ground: Ground, seed: int) -> Course:
    """The way of loadtune: workers swept at a fixed batch, prefetching, precision; the batch doubled while it helps."""
    bench = _Bench(ground, seed)
    for name in ("num_workers", "prefetch_factor", "amp_dtype"):
        start = bench.best or ground.baseline
        for value in _values(ground, name):
            config = _changed(ground, start, **{name: value})
            if config != start:
                bench.run(config)
    start, before = bench.best or ground.baseline, bench.best_rate
    for batch in _values(ground, "micro_batch_size"):
        if batch > start.micro_batch_size:
            result = bench.run(_changed(ground, start, micro_batch_size=batch))
            if bench.violation(result) > 0 or _rate(result) <= before:
                break
            before = _rate(result)
    return bench.course()


def _values(ground: Ground, name: str) -> list[Any]:
    values = list(ground.domains.get(name, [getattr(ground.baseline, name)]))
    return sorted(values) if name in _ORDERED else values


def _changed(ground: Ground, config: TrainingConfig, **changes: Any) -> TrainingConfig:
    """The grid's point with other values: with workers, what the grid has of their settings, none without."""
    settings = config.model_dump() | changes
    domains: Mapping[str, Sequence[Any]] = ground.domains
    if settings["num_workers"] == 0:
        settings |= NEUTRAL_WITHOUT_WORKERS
    else:
        prefetch = domains["prefetch_factor"]
        if settings["prefetch_factor"] not in prefetch:
            settings["prefetch_factor"] = prefetch[0]
        if settings["persistent_workers"] not in domains["persistent_workers"]:
            settings["persistent_workers"] = domains["persistent_workers"][0]
    return TrainingConfig.model_validate(settings)


def _distributions(ground: Ground) -> dict[str, BaseDistribution]:
    """Numbers in order by their places, everything else as categories; what has one value is left out."""
    found: dict[str, BaseDistribution] = {}
    for name, values in ground.domains.items():
        if len(values) > 1:
            is_ordered = name in _ORDERED
            found[name] = (
                IntDistribution(0, len(values) - 1)
                if is_ordered
                else CategoricalDistribution(range(len(values)))
            )
    return found


def _config_of(ground: Ground, places: Mapping[str, int]) -> TrainingConfig:
    chosen = {name: _values(ground, name)[place] for name, place in places.items()}
    return _changed(ground, ground.baseline, **chosen)


def _rate(result: TrialResult) -> float:
    return -inf if result.measurement is None else result.measurement.samples_per_s


def _all() -> Iterator[tuple[str, Callable[[Ground, int], Course]]]:
    yield "autotune", _product("model")
    yield "autotune tpe", _product("tpe")
    yield "autotune tpe 60", _product("tpe", Budget(n_trials=_MOST_TRIALS))
    yield "TPE", _sampled(lambda seed: optuna.samplers.TPESampler(seed=seed))
    yield "GP", _sampled(lambda seed: optuna.samplers.GPSampler(seed=seed))
    yield "random", _sampled(lambda seed: optuna.samplers.RandomSampler(seed=seed))
    yield "grid", _grid
    yield "doubling", _doubling
    yield "log-log fit", _log_log
    yield "plateau", _plateau
    yield "sweeps", _sweeps


METHODS: Mapping[str, Callable[[Ground, int], Course]] = dict(_all())
"""By name: ours; ours with TPE alone, as long as it has patience and for 60 trials, both confirmed as ours is; plain
Optuna; and others' ways."""
