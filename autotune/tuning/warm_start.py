"""A warm start: what an earlier search has found, for the same workload elsewhere or for a similar one here.

Takes a run folder or a recommended.yaml; hands on Hints: configurations worth trying first, and how the machine that
they come from differs from this one. Rates are not taken over: they are measured anew. Composition, like api, from
which alone it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import ConfigError
from autotune.files.recommended_file import describe_machine, read_recommended, read_recommended_machine
from autotune.files.run_folder import read_summary
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord
from autotune.settings.environment import Environment
from autotune.settings.plan import Plan
from autotune.settings.search_space import Domain, SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.space.constraints import same_behaviour_key
from autotune.space.resolved_space import ResolvedSpace, compose, setting_of
from autotune.study.proposals import nearest, params_of

__all__ = ["Hints", "hints_of", "read_hints", "say_hints", "say_stale", "seed_params", "staleness"]

_MOST_SEEDS = 3
_LONGEST_VALUE = 60  # characters of what a file tells of its machine
_FIELDS = {
    "name": "device",
    "devices": "devices",
    "driver": "driver",
    "cores": "cores",
    "torch": "torch",
    "cuda": "CUDA",
}
"""What a machine is compared by, and what each is called in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What an earlier search has found."""

    source: Path
    configs: tuple[TrainingConfig, ...]
    """The best first."""
    machine: Mapping[str, object]
    """As recommended.yaml tells it: name, driver, cores, torch, fingerprint and more; empty where it does not."""


def hints_of(plan: Plan) -> Hints | None:
    """What a plan is to start from; None where it names nothing."""
    return None if plan.search.warm_start is None else read_hints(plan.search.warm_start)


def read_hints(path: Path) -> Hints:
    """Read a run folder, finished or interrupted, or a recommended.yaml.

    Raises:
        ConfigError: it is neither, or can't be read.
    """
    path = _expanded(path)
    try:
        if not _is_true(path.is_dir):
            return Hints(source=path, configs=(read_recommended(path),), machine=read_recommended_machine(path))
        summary = read_summary(path)
    except ConfigError as error:
        problems = [f"warm_start: {one}" for one in error.problems]
        settings = path / "recommended.yaml"
        if _is_true(settings.is_file):
            problems[-1] += f"; {settings} may do in its place"
        raise ConfigError(*problems) from error
    return Hints(source=path, configs=tuple(_best_of(summary)), machine=describe_machine(summary.environment))


def staleness(there: Mapping[str, object], here: Environment) -> str | None:
    """How the machine that something was found on differs from this one, in a clause.

    None where it does not, and where nothing is told of it.
    """
    own = describe_machine(here)
    if there.get("fingerprint") in (None, own["fingerprint"]):  # a file may hold anything, a list too
        return None
    differing = [name for name in _FIELDS if name in there and there[name] != own[name]]
    told = "; ".join(f"{_FIELDS[name]} {_say(there[name])} there, {_say(own[name])} here" for name in differing)
    return told or "devices or their runtime differ"


def say_stale(path: Path, here: Environment) -> str | None:
    """That a recommended.yaml was found on another machine than this, or on this one as it was, in a sentence.

    None where it was found on this one, where it does not say, and where there is none that can be read.
    """
    try:
        differing = staleness(read_recommended_machine(path), here)
    except ConfigError:
        return None
    return None if differing is None else f"{path} is stale: {differing}; run again with --fresh."


def seed_params(hints: Hints, space: ResolvedSpace) -> list[dict[str, SettingValue]]:
    """The hints' configurations in this space, each setting at its nearest value.

    Left out is what breaks a rule at every batch, and what runs as the baseline or another one does.
    """
    found: list[dict[str, SettingValue]] = []
    known = {_behaviour(space.baseline, space)}
    for hint in hints.configs:
        params = _fitting(_nearest_params(hint, space), space)
        config = None if params is None else compose(params, space)
        if params is None or not isinstance(config, TrainingConfig) or _behaviour(config, space) in known:
            continue
        known.add(_behaviour(config, space))
        found.append(params)
    return found


def say_hints(hints: Hints, space: ResolvedSpace) -> str:
    """Where the first trials come from, and whether what was found there still holds here."""
    count = len(seed_params(hints, space))
    begun = f"Warm start: {count} configurations of {hints.source} are tried before others"
    if count < 2:
        begun = f"Warm start: one configuration of {hints.source} is tried before others"
    if count == 0:
        begun = f"Warm start: {hints.source} holds nothing that this space allows beside your own settings"
    stale = staleness(hints.machine, space.environment)
    return f"{begun}." if stale is None else f"{begun}; what it says of their speed is stale here ({stale})."


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        text = f"warm_start: '~' must stand for a known home folder, but got {str(path)!r}; write the path out"
        raise ConfigError(text) from None


def _best_of(summary: RunSummary) -> Iterator[TrainingConfig]:
    """What was recommended, the best at the baseline's batch, and the best trials."""
    chosen = summary.recommendation
    if chosen is not None:
        yield chosen.config
        if chosen.same_batch is not None:
            yield chosen.same_batch
    feasible = [trial for trial in summary.trials if trial.is_feasible and trial.number != 0]
    for trial in sorted(feasible, key=_score, reverse=True)[:_MOST_SEEDS]:
        yield trial.config


def _score(trial: TrialRecord) -> float:
    return trial.score.value if trial.score is not None else 0.0


def _nearest_params(hint: TrainingConfig, space: ResolvedSpace) -> dict[str, SettingValue]:
    """A value for each searched setting, after the hint; the baseline's where the hint tells none."""
    told = params_of(hint, space)
    own = {name: setting_of(space.baseline, name) for name in space.parameters}
    return {name: _near(told.get(name, own[name]), own[name], domain) for name, domain in space.parameters.items()}


def _near(value: SettingValue, own: SettingValue, domain: Domain) -> SettingValue:
    """The value itself, the number nearest to it, or else the baseline's own where the domain has that."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return own if value not in domain and not is_number and own in domain else nearest(domain, value)


def _fitting(params: dict[str, SettingValue], space: ResolvedSpace) -> dict[str, SettingValue] | None:
    """The values with the largest micro batch, up to their own, that breaks no rule; None where each breaks one.

    To accumulate gradients less is tried before a smaller batch.
    """
    for batch in _halved(params, "micro_batch_size", space):
        for steps in _halved(params, "grad_accum_steps", space):
            smaller = {**params, **batch, **steps}
            if isinstance(compose(smaller, space), TrainingConfig):
                return smaller
    return None


def _halved(params: Mapping[str, SettingValue], name: str, space: ResolvedSpace) -> list[dict[str, SettingValue]]:
    """A setting's value, then what its domain has near half of it, a quarter and so on; nothing where it is fixed."""
    own = params.get(name)
    if not isinstance(own, int):
        return [{}]
    return [
        {name: one} for one in dict.fromkeys(nearest(space.domains[name], own >> n) for n in range(own.bit_length()))
    ]


def _behaviour(config: TrainingConfig, space: ResolvedSpace) -> str:
    return same_behaviour_key(config, space.facts, space.environment)


def _say(value: object) -> str:
    """A value that a file tells, which may hold anything, in a few printable characters."""
    text = "none" if value is None else str(value)
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST_VALUE])


def _is_true(ask: Callable[[], bool]) -> bool:
    """What a path answers; no where no file system takes its name, or it may not be looked at."""
    try:
        return ask()
    except (OSError, ValueError):
        return False
