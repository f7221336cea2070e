"""Ways to search a recorded surface: the product's, Optuna's samplers with trials of fixed length, and others' ways.

Each is a function of a surface and a seed that hands on a Course: what it would recommend after so many seconds of the
device. Of the product these are those of the search alone; what its confirmation makes of it is told apart. The
baseline's trial is counted for nobody.
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
from autotune.records.trial import TrialResult
from autotune.report.wording import say
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.objective import Objective
from autotune.settings.plan import Plan
from autotune.settings.search_options import Method
from autotune.settings.search_space import SearchSpace
from autotune.settings.workload import Workload
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import SearchOutcome
from benchmarks.replay.product import search_whole
from benchmarks.replay.replay import ReplayLauncher, Surface

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


@dataclass(slots=True)
class Course:
    """A search, from its first trial after the baseline to its end."""

    steps: list[Step]
    seconds: float
    """Of the device, until the search ended by itself."""
    trials: int
    out_of_memory: int
    ended: str = ""
    confirmed: TrainingConfig | None = None
    """What the product recommends after its confirmation, whose seconds are not among these."""


@dataclass(slots=True)
class _Bench:
    """Trials of fixed length, each to the end of its window, and the best one so far."""

    surface: Surface
    seed: int
    seconds: float = 0.0
    trials: int = 0
    out_of_memory: int = 0
    best: TrainingConfig | None = None
    best_rate: float = -inf
    steps: list[Step] = field(default_factory=list)
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self.recommend(self.surface.baseline)
        base = self._chance.choice(self.surface.visits[self.surface.baseline])
        self.best, self.best_rate = self.surface.baseline, _rate(base)

    def run(self, config: TrainingConfig) -> TrialResult:
        """Measure a configuration; the best so far is what would be recommended."""
        result = self._chance.choice(self.surface.visits[config])
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
        return result.measurement.peak_memory_bytes / self.surface.limit_bytes - 1

    def course(self) -> Course:
        """What came of it."""
        return Course(self.steps, self.seconds, self.trials, self.out_of_memory)


def _product(method: Method) -> Callable[[Surface, int], Course]:
    def search(surface: Surface, seed: int) -> Course:
        return _search(surface, seed, method)

    return search


def _search(surface: Surface, seed: int, method: Method) -> Course:
    """The product's own search, on the surface's clock."""
    launcher = ReplayLauncher(surface, seed)
    domains = surface.header["domains"]
    fixed = surface.baseline.model_dump(exclude={"lr", "world_size", "strategy", "ddp", *domains})
    plan = Plan(
        name="replay",
        workload=Workload(model=None, dataset=None),
        baseline=surface.baseline,
        space=SearchSpace.model_validate({**fixed, **domains}),
        objective=Objective(memory_limit=surface.limit_bytes),
        seed=seed,
    )
    steps, baseline_s, course = list[Step](), 0.0, Course([], 0.0, 0, 0)

    def note(search: Search, record: TrialRecord) -> None:
        nonlocal baseline_s
        if record.number == 0:
            baseline_s = launcher.now_s
        best = search.best
        steps.append(Step(launcher.now_s - baseline_s, surface.baseline if best is None else best.config))

    def keep(found: SearchOutcome) -> None:
        nonlocal course
        ended = "" if found.ended_because is None else say(found.ended_because)
        course = Course(steps, launcher.now_s - baseline_s, launcher.trials - 1, launcher.out_of_memory, ended)

    recommended = search_whole(plan, launcher, method=method, on_record=note, on_found=keep).recommendation
    if recommended is not None:
        course.confirmed = recommended.config.model_copy(update={"lr": surface.baseline.lr})
    return course


def _sampled(make_sampler: Callable[[int], optuna.samplers.BaseSampler]) -> Callable[[Surface, int], Course]:
    """Plain Optuna: a trial of fixed length for each proposal, repeats measured anew, memory as a constraint."""

    def search(surface: Surface, seed: int) -> Course:
        bench, domains = _Bench(surface, seed), _distributions(surface)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(direction="maximize", sampler=make_sampler(seed))
            for _ in range(_MOST_TRIALS):
                trial = study.ask(domains)
                result = bench.run(_config_of(surface, trial.params))
                trial.set_constraint("memory", bench.violation(result))
                study.tell(trial, _rate(result) if result.measurement is not None else 0.0)
        return bench.course()

    return search


def _grid(surface: Surface, seed: int) -> Course:
    """Every point once, in random order."""
    bench, configs = _Bench(surface, seed), list(surface.configs)
    random.Random(seed).shuffle(configs)
    for config in configs:
        bench.run(config)
    return bench.course()


def _doubling(surface: Surface, seed: int) -> Course:
    """Lightning's batch-size finder: the baseline's batch doubled until memory runs out; the last that fitted."""
    bench = _Bench(surface, seed)
    for batch in _values(surface, "micro_batch_size"):
        if batch >= surface.baseline.micro_batch_size:
            config = _changed(surface, surface.baseline, micro_batch_size=batch)
            if bench.violation(bench.run(config)) > 0:
                break
            bench.recommend(config)
    return bench.course()


def _log_log(surface: Surface, seed: int) -> Course:
    """Ultralytics' autobatch: memory at the smallest batches, a line through the logarithms, and what fills 60 %."""
    bench, batches, peaks = _Bench(surface, seed), list[int](), list[int]()
    for batch in _values(surface, "micro_batch_size")[:3]:
        result = bench.run(_changed(surface, surface.baseline, micro_batch_size=batch))
        if result.measurement is not None:
            batches.append(batch)
            peaks.append(result.measurement.peak_memory_bytes)
    slope, intercept = np.polyfit(np.log(batches), np.log(peaks), 1)
    wanted = np.exp(min(50.0, (log(_FITTED_SHARE * surface.limit_bytes) - intercept) / max(slope, 1e-3)))
    fitting = [batch for batch in _values(surface, "micro_batch_size") if batch <= wanted]
    bench.recommend(_changed(surface, surface.baseline, micro_batch_size=max(fitting, default=min(batches))))
    return bench.course()


def _plateau(surface: Surface, seed: int) -> Course:
    """DeepSpeed's micro-batch tuning: batches from the smallest on until one brings less than 5 %; the fastest."""
    bench, before = _Bench(surface, seed), 0.0
    for batch in _values(surface, "micro_batch_size"):
        result = bench.run(_changed(surface, surface.baseline, micro_batch_size=batch))
        if bench.violation(result) > 0 or _rate(result) < (1 + _PLATEAU) * before:
            break
        before = _rate(result)
    return bench.course()


def _sweeps(surface: Surface, seed: int) -> Course:
    """The way of loadtune: workers swept at a fixed batch, prefetching, precision; the batch doubled while it helps."""
    bench = _Bench(surface, seed)
    for name in ("num_workers", "prefetch_factor", "amp_dtype"):
        start = bench.best or surface.baseline
        for value in _values(surface, name):
            config = _changed(surface, start, **{name: value})
            if config != start:
                bench.run(config)
    start, before = bench.best or surface.baseline, bench.best_rate
    for batch in _values(surface, "micro_batch_size"):
        if batch > start.micro_batch_size:
            result = bench.run(_changed(surface, start, micro_batch_size=batch))
            if bench.violation(result) > 0 or _rate(result) <= before:
                break
            before = _rate(result)
    return bench.course()


def _values(surface: Surface, name: str) -> list[Any]:
    values = list(surface.header["domains"].get(name, [getattr(surface.baseline, name)]))
    return sorted(values) if name in _ORDERED else values


def _changed(surface: Surface, config: TrainingConfig, **changes: Any) -> TrainingConfig:
    """The grid's point with other values: with workers, what the grid has of their settings, none without."""
    settings = config.model_dump() | changes
    domains: Mapping[str, Sequence[Any]] = surface.header["domains"]
    if settings["num_workers"] == 0:
        settings |= NEUTRAL_WITHOUT_WORKERS
    else:
        prefetch = domains["prefetch_factor"]
        if settings["prefetch_factor"] not in prefetch:
            settings["prefetch_factor"] = prefetch[0]
        if settings["persistent_workers"] not in domains["persistent_workers"]:
            settings["persistent_workers"] = domains["persistent_workers"][0]
    return TrainingConfig.model_validate(settings)


def _distributions(surface: Surface) -> dict[str, BaseDistribution]:
    """Numbers in order by their places, everything else as categories; what has one value is left out."""
    found: dict[str, BaseDistribution] = {}
    for name, values in surface.header["domains"].items():
        if len(values) > 1:
            is_ordered = name in _ORDERED
            found[name] = (
                IntDistribution(0, len(values) - 1) if is_ordered else CategoricalDistribution(range(len(values)))
            )
    return found


def _config_of(surface: Surface, places: Mapping[str, int]) -> TrainingConfig:
    chosen = {name: _values(surface, name)[place] for name, place in places.items()}
    return _changed(surface, surface.baseline, **chosen)


def _rate(result: TrialResult) -> float:
    return -inf if result.measurement is None else result.measurement.samples_per_s


def _all() -> Iterator[tuple[str, Callable[[Surface, int], Course]]]:
    yield "autotune", _product("model")
    yield "autotune tpe", _product("tpe")
    yield "TPE", _sampled(lambda seed: optuna.samplers.TPESampler(seed=seed))
    yield "GP", _sampled(lambda seed: optuna.samplers.GPSampler(seed=seed))
    yield "random", _sampled(lambda seed: optuna.samplers.RandomSampler(seed=seed))
    yield "grid", _grid
    yield "doubling", _doubling
    yield "log-log fit", _log_log
    yield "plateau", _plateau
    yield "sweeps", _sweeps


METHODS: Mapping[str, Callable[[Surface, int], Course]] = dict(_all())
"""By name: ours, our search with TPE alone, plain Optuna, and others' ways."""
