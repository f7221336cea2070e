"""A warm start: the result of an earlier search, for the same workload elsewhere or for a similar one here.

Comes in: a run folder or a recommended.yaml. Goes out: Hints, that is configurations worth trying
first, and how the machine that they come from differs from this one. Rates are not taken over: they
are measured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path

from autotune.config.environment import Environment
from autotune.config.plan import Domain, Plan, SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.files.recommended import (
    describe_machine,
    differing_fields,
    read_machine,
    read_recommended,
)
from autotune.files.run_folder import read_summary
from autotune.messages.search import stale, warm_start
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.result import RunSummary
from autotune.records.trial import score_value
from autotune.space.constraints import same_behaviour_key
from autotune.space.space import ResolvedSpace, setting_of
from autotune.tuning.proposals import Params, compose_allowed, first_allowed, nearest, params_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """The result of an earlier search."""

    source: Path
    configs: tuple[TrainingConfig, ...]
    """The best first."""
    machine: Mapping[str, object]
    """As recommended.yaml describes it: name, driver, cores, torch, fingerprint and more; empty
    where it does not."""


def hints_of(plan: Plan) -> Hints | None:
    """What a plan is to start from; None where it names nothing."""
    return (
        None
        if plan.search.warm_start is None
        else read_hints(plan.search.warm_start, plan.policy.trials.hinted)
    )


def read_hints(path: Path, most: int = POLICY.trials.hinted) -> Hints:
    """Read a run folder, finished or interrupted, or a recommended.yaml; `most` limits the trials of a folder.

    Raises:
        ConfigError: it is neither, or can't be read.
    """
    path = _expanded(path)
    try:
        if not isdir(path):  # noqa: PTH112 - unlike Path's, no error for a name that no file system takes
            return Hints(source=path, configs=(read_recommended(path),), machine=read_machine(path))
        summary = read_summary(path)
    except ConfigError as error:
        problems = [f"warm_start: {problem}" for problem in error.problems]
        settings = path / "recommended.yaml"
        if isfile(settings):  # noqa: PTH113 - unlike Path's, no error for a name that no file system takes
            problems[-1] += f"; {settings} may do in its place"
        raise ConfigError(*problems) from error
    return Hints(
        source=path,
        configs=tuple(_best_of(summary, most)),
        machine=describe_machine(summary.environment),
    )


def differences(there: Mapping[str, object], here: Environment) -> list[str] | None:
    """Describe how the machine of an earlier result differs from this one.

    None if it does not differ or is not described; empty if it differs in something without a name.
    """
    if there.get("fingerprint") in (None, here.fingerprint):  # a file may hold anything, a list too
        return None
    return differing_fields(there, describe_machine(here))


def note_of_stale(path: Path, here: Environment) -> Note | None:
    """That a recommended.yaml was found on another machine than this, or on this one as it was.

    None where it was found on this one, where it does not say, and where there is none that can be
    read.
    """
    try:
        differing = differences(read_machine(path), here)
    except ConfigError:
        return None
    return None if differing is None else stale(str(path), differing)


def seed_params(hints: Hints, space: ResolvedSpace) -> list[Params]:
    """The hints' configurations in this space, each setting at its nearest value.

    Left out is what breaks a rule at every batch, and what runs as the baseline or another one
    does.
    """
    found: dict[str, Params] = {}
    for hint in hints.configs:
        params = _with_allowed_batch(_nearest_params(hint, space), space)
        if params is not None and (config := compose_allowed(params, space)) is not None:
            found.setdefault(_behaviour(config, space), params)
    found.pop(_behaviour(space.baseline, space), None)
    return list(found.values())


def note_of_hints(hints: Hints, space: ResolvedSpace) -> Note:
    """Where the first trials come from, and whether the rates that were found there still hold here."""
    count = len(seed_params(hints, space))
    differing = differences(hints.machine, space.environment)
    return warm_start(str(hints.source), configurations=count, differences=differing)


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        text = f"warm_start: '~' must stand for a known home folder, but got {str(path)!r}; write the path out"
        raise ConfigError(text) from None


def _best_of(summary: RunSummary, most: int) -> Iterator[TrainingConfig]:
    """What was recommended, the best at the baseline's batch, and the best trials."""
    chosen = summary.recommendation
    if chosen is not None:
        yield chosen.config
        if chosen.same_batch is not None:
            yield chosen.same_batch
    feasible = [trial for trial in summary.trials if trial.is_feasible and trial.number != 0]
    for trial in sorted(feasible, key=score_value, reverse=True)[:most]:
        yield trial.config


def _nearest_params(hint: TrainingConfig, space: ResolvedSpace) -> Params:
    """A value for each searched setting, after the hint; the baseline's where the hint has none."""
    hinted = params_of(hint, space)
    own = {name: setting_of(space.baseline, name) for name in space.parameters}
    return {
        name: _near(hinted.get(name, own[name]), own[name], domain)
        for name, domain in space.parameters.items()
    }


def _near(value: SettingValue, own: SettingValue, domain: Domain) -> SettingValue:
    """The value itself, the number nearest to it, or else the baseline's own where the domain has that."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (
        own if value not in domain and not is_number and own in domain else nearest(domain, value)
    )


def _with_allowed_batch(params: Params, space: ResolvedSpace) -> Params | None:
    """The values with the largest micro batch, up to their own, that breaks no rule; None where each breaks one.

    Accumulating gradients less is tried before a smaller batch.
    """
    names = [name for name in (space.batch_setting, "grad_accum_steps") if params.get(name)]
    return first_allowed(
        params, space, {name: _halved(params[name], name, space) for name in names}
    )


def _halved(own: SettingValue, name: str, space: ResolvedSpace) -> list[int]:
    """A setting's value, then what its domain has near half of it, a quarter and so on."""
    whole = int(own or 0)
    halves = dict.fromkeys(
        nearest(space.domains[name], whole >> n) for n in range(whole.bit_length())
    )
    return [value for value in halves if isinstance(value, int)]


def _behaviour(config: TrainingConfig, space: ResolvedSpace) -> str:
    return same_behaviour_key(config, space.facts, space.environment)
