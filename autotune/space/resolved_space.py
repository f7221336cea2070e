"""Which settings are searched: what the user allows, completed by default ranges of this machine and workload.

`resolve` makes a `ResolvedSpace` of a `Basis`: every setting has a domain in it. `compose` turns
proposed values into a TrainingConfig or a reason against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from pydantic import ValidationError

from autotune.note import Note
from autotune.policy import POLICY, Policy
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.environment import Environment
from autotune.settings.objective import Objective
from autotune.settings.search_space import DDP_PREFIX, Domain, SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts
from autotune.space import constraints as rules
from autotune.space.default_ranges import Basis, batch_cap, default_ranges, workers_cap
from autotune.space.domains import group_sizes
from autotune.space.notes import space_notes
from autotune.space.token_budget import global_batch_of, samples_within

__all__ = ["ResolvedSpace", "compose", "resolve", "setting_of", "with_batch_setting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpace:
    """A domain for every setting, and what composing a configuration needs to know."""

    domains: Mapping[str, Domain]
    """By the setting's name; DistributedDataParallel's, such as "ddp.static_graph", only where that is tried."""
    given: Mapping[str, Domain]
    """The settings that the user has given, by name."""
    baseline: TrainingConfig
    objective: Objective
    facts: WorkloadFacts
    environment: Environment
    drop_last: bool
    batch_cap: int | None
    """Most samples of a global batch, raised where a listed grad_accum_steps or world_size needs it; None where the
    user has listed batch sizes, or keeps the global batch."""
    workers_cap: int | None = None
    """Most loader workers of all ranks on a host: more of a proposal are left out; None where the user has listed
    numbers of workers."""
    policy: Policy = POLICY
    notes: tuple[Note, ...] = ()
    """What has no effect here, and why a default range is narrower than usual."""

    @property
    def keeps_batch(self) -> bool:
        """The global batch stays as the baseline's."""
        return self.objective.global_batch == "keep"

    @property
    def parameters(self) -> dict[str, Domain]:
        """The settings that are searched: those with more than one value that do not follow from others."""
        derived = {"grad_accum_steps"} if self.keeps_batch else set()
        if self.batch_setting == "max_tokens":
            derived.add("micro_batch_size")
        return {name: domain for name, domain in self.domains.items() if len(domain) > 1 and name not in derived}

    @property
    def batch_setting(self) -> Literal["micro_batch_size", "max_tokens"]:
        """The setting by which the batch is searched."""
        return self.facts.batch_setting

    @property
    def wanted_batch(self) -> int:
        """The baseline's global batch: in tokens where there is a token budget, else in samples."""
        return global_batch_of(self.baseline, self.facts)

    @property
    def limit_bytes(self) -> int:
        """Memory limit of a trial on the device that was probed."""
        return self.objective.limit_bytes(self.environment.device_memory_bytes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks, more than one, that are tried under DistributedDataParallel."""
        return group_sizes(self.domains)

    @property
    def size(self) -> int:
        """Combinations of values, including those that the rules exclude or that behave the same."""
        return prod(len(domain) for domain in self.parameters.values())

    def combinations(self) -> Iterable[dict[str, SettingValue]]:
        """Every combination of the searched settings."""
        names = list(self.parameters)
        for values in product(*(self.parameters[name] for name in names)):
            yield dict(zip(names, values, strict=True))


def resolve(basis: Basis) -> ResolvedSpace:
    """Complete what the user has given by the default ranges, which include the baseline's values.

    Explicit choices override every cap.
    """
    domains = default_ranges(basis)
    return ResolvedSpace(
        domains=domains,
        given=basis.given,
        baseline=basis.baseline,
        objective=basis.objective,
        facts=basis.facts,
        environment=basis.environment,
        drop_last=basis.drop_last,
        batch_cap=batch_cap(basis, domains),
        workers_cap=workers_cap(basis),
        policy=basis.policy,
        notes=space_notes(basis, domains),
    )


def compose(params: Mapping[str, SettingValue], space: ResolvedSpace) -> TrainingConfig | str:
    """The configuration for proposed values of `space.parameters`, or the reason against it."""
    for name, value in params.items():
        if value not in space.domains[name]:
            return f"{name}={value!r} lies outside the space"
    settings = _settings_of(params, space)
    reason = _one_rank_left_out(settings, space) or _keep_global_batch(settings, space)
    if reason is not None:
        return reason
    try:
        config = TrainingConfig.model_validate(settings)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    if space.batch_cap is not None and config.global_batch_size > space.batch_cap:
        return f"the global batch must stay within {space.batch_cap}, but got {config.global_batch_size}"
    reason = rules.obstacle(config, space.facts, space.environment, drop_last=space.drop_last)
    if reason is None and f"{DDP_PREFIX}comm_hook" not in space.given:  # else the rounding is the user's to judge
        reason = rules.coarse_exchange(config, space.baseline)
    return reason or config


def setting_of(config: TrainingConfig, name: str) -> SettingValue:
    """A setting's value by the name that it has in a space; None for one of DDP's where another strategy runs."""
    value: SettingValue
    if not name.startswith(DDP_PREFIX):
        value = getattr(config, name)
        return value
    value = getattr(config.ddp or DdpConfig(), name.removeprefix(DDP_PREFIX))
    return value if config.strategy == "ddp" else None


def with_batch_setting(config: TrainingConfig, value: int, space: ResolvedSpace) -> TrainingConfig:
    """A configuration with another value of the setting by which the batch is searched, and what follows from it."""
    if space.batch_setting == "micro_batch_size":
        return config.model_copy(update={"micro_batch_size": value})
    update = {"max_tokens": value, "micro_batch_size": samples_within(value, space.baseline)}
    return config.model_copy(update=update)


def _settings_of(params: Mapping[str, SettingValue], space: ResolvedSpace) -> dict[str, Any]:
    """Every setting, normalised; the loader's workers within what the ranks on a host share."""
    plain: dict[str, Any] = {name: next(iter(domain)) for name, domain in space.domains.items()}
    plain.update(params)
    ddp = {name.removeprefix(DDP_PREFIX): plain.pop(name) for name in [*plain] if name.startswith(DDP_PREFIX)}
    plain.update(lr=space.baseline.lr, ddp=ddp or None)
    if space.batch_setting == "max_tokens":
        plain["micro_batch_size"] = samples_within(plain["max_tokens"], space.baseline)
    settings: dict[str, Any] = rules.normalised(plain, space.facts, space.environment)
    if space.workers_cap is not None and settings["strategy"] == "ddp":
        share = max(1, space.workers_cap // rules.ranks_on_host(settings["world_size"], space.environment))
        settings["num_workers"] = min(settings["num_workers"], share)
    return settings


def _one_rank_left_out(settings: Mapping[str, Any], space: ResolvedSpace) -> str | None:
    if settings["strategy"] in space.domains["strategy"]:
        return None
    return "one rank is strategy 'single', which lies outside the space; list it too, or more than one rank"


def _keep_global_batch(settings: dict[str, Any], space: ResolvedSpace) -> str | None:
    """Split a kept global batch anew; the reason where that can't be done, None where it is done, or none is kept."""
    if not space.keeps_batch:
        return None
    name = space.batch_setting
    wanted, micro, ranks = space.wanted_batch, settings[name], settings["world_size"]
    steps, rest = divmod(wanted, micro * ranks)
    if rest or steps == 0:
        on = f" on {ranks} ranks" if ranks > 1 else ""
        return f"the global batch of {wanted} is kept, but {name}={micro}{on} does not divide it"
    if steps not in space.domains["grad_accum_steps"]:
        return f"the global batch of {wanted} is kept, but grad_accum_steps={steps} lies outside the space"
    settings["grad_accum_steps"] = steps
    return None
