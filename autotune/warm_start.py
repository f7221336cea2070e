"""A warm start: what an earlier search has found, for the same workload elsewhere or for a similar one here.

Takes a run folder or a recommended.yaml; hands on Hints: configurations worth trying first, and how the machine that
they come from differs from this one. Rates are not taken over: they are measured anew. Composition, like api, from
which alone it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.environment import Environment
from autotune.core.result import RunSummary
from autotune.core.search_space import ResolvedSpace, SettingValue, compose
from autotune.core.training_config import TrainingConfig
from autotune.core.trial import TrialRecord
from autotune.run_config import describe_machine, read_recommended, read_recommended_machine
from autotune.run_folder import read_summary
from autotune.study.proposals import nearest, params_of

__all__ = ["Hints", "read_hints", "say_hints", "seed_params", "staleness"]

_MOST_SEEDS = 3
_FIELDS = {"name": "device", "driver": "driver", "cores": "cores", "torch": "torch"}
"""What a machine is compared by, and what each is called in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What an earlier search has found."""

    source: Path
    configs: tuple[TrainingConfig, ...]
    """The best first."""
    machine: Mapping[str, object]
    """As recommended.yaml tells it: device, name, driver, cores, torch, python, fingerprint."""


def read_hints(path: Path) -> Hints:
    """Read a run folder, finished or not yet confirmed, or a recommended.yaml.

    Raises:
        ConfigError: it is neither, or can't be read.
    """
    if not path.is_dir():
        return Hints(source=path, configs=(read_recommended(path),), machine=read_recommended_machine(path))
    summary = read_summary(path)
    return Hints(source=path, configs=tuple(_best_of(summary)), machine=describe_machine(summary.environment))


def staleness(there: Mapping[str, object], here: Environment) -> str | None:
    """How the machine that something was found on differs from this one, in a clause; None where it does not."""
    own = describe_machine(here)
    if there.get("fingerprint") == own["fingerprint"]:
        return None
    differing = [name for name in _FIELDS if there.get(name) != own[name]]
    told = "; ".join(f"{_FIELDS[name]} {there.get(name)} there, {own[name]} here" for name in differing)
    return told or "devices or their runtime differ"


def seed_params(hints: Hints, space: ResolvedSpace) -> list[dict[str, SettingValue]]:
    """The hints' configurations in this space: each setting at its nearest value, those left out that break a rule."""
    found: list[dict[str, SettingValue]] = []
    for config in hints.configs:
        first = {name: next(iter(domain)) for name, domain in space.parameters.items()}
        told = {name: nearest(space.domains[name], value) for name, value in params_of(config, space).items()}
        params = {**first, **told}
        if params not in found and isinstance(compose(params, space), TrainingConfig):
            found.append(params)
    return found


def say_hints(hints: Hints, space: ResolvedSpace) -> str:
    """Where the first trials come from, and whether what was found there still holds here."""
    count = len(seed_params(hints, space))
    tried = f"{count} configurations" if count != 1 else "one configuration"
    begun = (
        f"Warm start: {tried} of {hints.source} were tried first"
        if count != 1
        else (f"Warm start: {tried} of {hints.source} was tried first")
    )
    stale = staleness(hints.machine, space.environment)
    return f"{begun}." if stale is None else f"{begun}; as it stands it is stale here ({stale})."


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
