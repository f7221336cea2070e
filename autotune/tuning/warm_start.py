"""Start from an earlier search's result: of the same workload elsewhere, or of a similar one.

Comes in: a run folder or a recommended.yaml. Goes out: Hints, the configurations to try first, and
the differences between the two machines. Throughput is not taken over: it is measured again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path

from autotune.config.environment import Environment
from autotune.config.plan import Plan, SettingValue
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
    """Description of the machine (name, driver, cores, torch, fingerprint and more); empty if unknown.
    Source: recommended.yaml."""


def hints_of(plan: Plan) -> Hints | None:
    """Return the hints of a plan's warm start; None if it names none."""
    if plan.search.warm_start is None:
        return None
    return read_hints(plan.search.warm_start, plan.policy.trials.hinted)


def read_hints(path: Path, most: int = POLICY.trials.hinted) -> Hints:
    """Read a run folder, finished or interrupted, or a recommended.yaml.

    Args:
        path: The folder or file.
        most: The most trials of a folder, besides its recommendation.

    Raises:
        ConfigError: it is neither, or can't be read.
    """
    try:
        path = path.expanduser()
    except RuntimeError:
        text = f"warm_start: '~' must stand for a known home folder, but got {str(path)!r}; write the path out"
        raise ConfigError(text) from None
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
    """Return a note if a recommended.yaml comes from another machine, or from this one before it changed.

    None if it comes from this one as it is, does not describe its machine, or can't be read.
    """
    try:
        differing = differences(read_machine(path), here)
    except ConfigError:
        return None
    return None if differing is None else stale(str(path), differing)


def seed_params(hints: Hints, space: ResolvedSpace) -> list[Params]:
    """Return the hints' configurations in this space, each setting at its nearest value.

    Leave out those that break a rule at every batch, and those that run like the baseline or like
    an earlier one.
    """
    found: dict[str, Params] = {}
    for hint in hints.configs:
        params = _with_allowed_batch(_nearest_params(hint, space), space)
        if params is None:
            continue
        config = compose_allowed(params, space)
        if config is not None:
            found.setdefault(_behaviour(config, space), params)
    found.pop(_behaviour(space.baseline, space), None)
    return list(found.values())


def note_of_hints(hints: Hints, space: ResolvedSpace) -> Note:
    """Return a note of the source of the first trials, and of the differences between the machines."""
    count = len(seed_params(hints, space))
    differing = differences(hints.machine, space.environment)
    return warm_start(str(hints.source), configurations=count, differences=differing)


def _best_of(summary: RunSummary, most: int) -> Iterator[TrainingConfig]:
    """Yield the recommendation, the best at the baseline's batch, and the best trials."""
    chosen = summary.recommendation
    if chosen is not None:
        yield chosen.config
        if chosen.same_batch is not None:
            yield chosen.same_batch
    feasible = [trial for trial in summary.trials if trial.is_feasible and trial.number != 0]
    for trial in sorted(feasible, key=score_value, reverse=True)[:most]:
        yield trial.config


def _nearest_params(hint: TrainingConfig, space: ResolvedSpace) -> Params:
    """Return a value for each searched setting: the hint's, the number nearest to it, or the baseline's."""
    hinted = params_of(hint, space)
    found: Params = {}
    for name, domain in space.parameters.items():
        own = setting_of(space.baseline, name)
        value = hinted.get(name, own)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if value not in domain and not is_number and own in domain:
            value = own
        found[name] = nearest(domain, value)
    return found


def _with_allowed_batch(params: Params, space: ResolvedSpace) -> Params | None:
    """Return the values with the largest micro batch, up to their own, that breaks no rule; None if each does.

    Accumulating gradients over fewer batches is tried before a smaller batch.
    """
    options = dict[str, list[SettingValue]]()
    for name in (space.batch_setting, "grad_accum_steps"):
        # the value, then those nearest to half of it, a quarter and so on
        own = int(params.get(name) or 0)
        if own:
            halves = [nearest(space.domains[name], own >> n) for n in range(own.bit_length())]
            options[name] = [half for half in dict.fromkeys(halves) if isinstance(half, int)]
    return first_allowed(params, space, options)


def _behaviour(config: TrainingConfig, space: ResolvedSpace) -> str:
    return same_behaviour_key(config, space.facts, space.environment)
