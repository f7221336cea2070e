"""Resolve the search space on this machine, once before the first trial, and compose configurations.

`resolve` makes a `ResolvedSpace` of a `Basis`; `compose` turns proposed values into a
TrainingConfig, or a reason against it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Literal

from pydantic import ValidationError

from autotune.config.environment import Environment
from autotune.config.plan import Choices, Domain, Objective, SettingValue, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.messages import space as messages
from autotune.note import Note
from autotune.policy import Policy
from autotune.settings_table import BY_NAME, DDP_PREFIX
from autotune.space import constraints as rules
from autotune.space.constraints import most_ranks, without_effect
from autotune.space.ranges import Basis, batch_cap, default_ranges, group_sizes, workers_cap
from autotune.space.scaling import global_batch_of, samples_within

# Notes on a space


def space_notes(basis: Basis, domains: Mapping[str, Domain]) -> tuple[Note, ...]:
    """Return the notes on a space, in the order of a report's settings."""
    return (
        *basis.environment.notes,
        *_memory(basis),
        *_without_effect(basis, domains),
        *_emulated(basis),
        *_loader(basis, domains),
        *_ranks(basis, domains),
        *_hosts(basis, domains),
    )


def _memory(basis: Basis) -> Iterator[Note]:
    """Note how trials allocate host memory, what they leave free, and an unused batch gain."""
    # If training does not allocate so by itself, or the user has chosen it
    environment = basis.environment
    objective = basis.objective
    if environment.malloc:
        yield messages.malloc(switches=environment.malloc, is_ours=environment.keeps_memory)
    device_bytes = environment.device_memory_bytes
    reserve_bytes = objective.reserve_bytes(device_bytes)
    if reserve_bytes:
        yield messages.reserve(reserve_bytes, trial_bytes=objective.limit_bytes(device_bytes))
    if basis.keeps_batch and "larger_batch_gain" in objective.model_fields_set:
        yield messages.larger_batch_gain_unused()


def _without_effect(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Note settings of the baseline without an effect, and listed values without one for any number of ranks."""
    facts = basis.facts
    environment = basis.environment
    for setting, reason in without_effect(basis.baseline, facts, environment).items():
        yield messages.baseline_without_effect(setting, reason, environment.device)
    groups = [TrainingConfig(strategy="ddp", world_size=size) for size in group_sizes(domains)]
    # Only these can be without effect; of a long range, to ask each value takes seconds
    may_be_idle = {name for name, setting in BY_NAME.items() if setting.idle} | {"numa_binding"}
    for setting in sorted(basis.given.keys() & TrainingConfig.model_fields.keys() & may_be_idle):
        for value in basis.given[setting]:
            reasons = [
                without_effect(config.model_copy(update={setting: value}), facts, environment).get(
                    setting
                )
                for config in (TrainingConfig(), *groups)
            ]
            if None not in reasons:
                yield messages.value_without_effect(
                    setting, value, str(reasons[0]), environment.device
                )


def _emulated(basis: Basis) -> Iterator[Note]:
    """Note precisions that the device emulates; `without_effect` covers TF32."""
    known = {"tf32", *basis.environment.native_amp_dtypes}
    listed = basis.given.get("amp_dtype", Choices(values=(basis.baseline.amp_dtype,)))
    emulated = [str(dtype) for dtype in listed if dtype not in known]
    if emulated:
        yield messages.precision_not_native(
            device=basis.environment.device_name, precisions=emulated
        )


def _loader(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Note datasets that limit workers, and the effects of batches out of order if the baseline lacks them."""
    facts = basis.facts
    baseline = basis.baseline
    if not facts.is_sharded:
        is_listed = "num_workers" in basis.given
        yield messages.dataset_not_sharded(None if is_listed else max(1, baseline.num_workers))
    if facts.is_tf_data:
        yield messages.tf_data()
    if False in domains["in_order"] and baseline.in_order:
        # Also why it is tried, if not listed
        share = None if "in_order" in basis.given else facts.slow_tail_fraction
        yield messages.out_of_order_tried(share)


def _ranks(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Note devices that stay unused, and listed DDP settings without the expected effect."""
    environment = basis.environment
    given = basis.given
    listed = [name for name in given if name.startswith(DDP_PREFIX)]
    if listed and not group_sizes(domains):
        yield messages.ddp_settings_without_ddp(listed)
        return
    is_named = 1 < most_ranks(environment) < environment.device_count
    if (
        is_named
        and not given.keys() & {"world_size", "strategy"}
        and environment.device_kind != "cpu"
    ):
        yield messages.trials_stay_on_named_device(environment.device)
    if environment.device_names and max(group_sizes(domains), default=1) > 1:
        yield messages.unlike_devices(environment.device_names)
    searches_unused = given.get(f"{DDP_PREFIX}find_unused_parameters")
    if (
        searches_unused is not None
        and True not in searches_unused
        and basis.facts.has_unused_parameters
    ):
        yield messages.unused_parameters_not_searched()

    # Listed gradient compression that the baseline lacks, since only the user can judge it
    own = basis.baseline.ddp_settings.comm_hook
    listed_hooks = given.get(f"{DDP_PREFIX}comm_hook", ())
    hooks = [str(hook) for hook in listed_hooks if hook not in {None, own}]
    if hooks:
        yield messages.hooks_change_gradients(hooks)
    unscaled = [str(dtype) for dtype in domains["amp_dtype"] if dtype != "float16"]
    if "fp16" in hooks and unscaled:
        yield messages.fp16_hook_overflows(unscaled)


def _hosts(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Note a placement without effect, and devices that no group uses by default."""
    environment = basis.environment
    sizes = group_sizes(domains)
    has_groups = bool(sizes) or basis.baseline.process_count > 1
    if environment.is_spread and (environment.hosts == 1 or not has_groups):
        yield messages.spread_without_effect(environment.hosts)
    most = max(sizes, default=1)
    device_count = most_ranks(environment)
    is_device = environment.device_kind != "cpu" and environment.hosts > 1
    if is_device and sizes and most < device_count and "world_size" not in basis.given:
        yield messages.world_size_capped(most, devices=device_count, hosts=environment.hosts)


# The resolved space


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpace:
    """A domain for every setting, and the facts that composing a configuration needs."""

    domains: Mapping[str, Domain]
    """Domains by setting; those of DistributedDataParallel, such as "ddp.static_graph", only if it is
    tried."""
    given: Mapping[str, Domain]
    """Settings that the user gave, by name."""
    baseline: TrainingConfig
    objective: Objective
    facts: WorkloadFacts
    environment: Environment
    drop_last: bool
    batch_cap: int | None
    """Most samples in a global batch, raised for a listed grad_accum_steps or world_size; None if the
    user lists batch sizes or keeps the global batch."""
    workers_cap: int | None
    """Most loader workers of all ranks on a host, to which proposals are cut; None if the user lists
    num_workers."""
    policy: Policy
    notes: tuple[Note, ...]
    """Notes on settings without effect, and on narrow default ranges."""

    @property
    def keeps_batch(self) -> bool:
        """True if the global batch stays that of the baseline."""
        return self.objective.global_batch == "keep"

    @property
    def parameters(self) -> dict[str, Domain]:
        """Settings that are searched: those with several values that do not follow from others."""
        derived = {"grad_accum_steps"} if self.keeps_batch else set()
        if self.batch_setting == "max_tokens":
            derived.add("micro_batch_size")
        return {
            name: domain
            for name, domain in self.domains.items()
            if len(domain) > 1 and name not in derived
        }

    @property
    def batch_setting(self) -> Literal["micro_batch_size", "max_tokens"]:
        """The setting that is searched for the batch."""
        return self.facts.batch_setting

    @property
    def wanted_batch(self) -> int:
        """The baseline's global batch, in tokens with a token budget, else in samples."""
        return global_batch_of(self.baseline, self.facts)

    @property
    def limit_bytes(self) -> int:
        """Bytes that a trial may use on the probed device."""
        return self.objective.limit_bytes(self.environment.device_memory_bytes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks above one that are tried under DistributedDataParallel."""
        return group_sizes(self.domains)

    @property
    def size(self) -> int:
        """Number of combinations, including those that rules exclude or that behave the same."""
        return prod(len(domain) for domain in self.parameters.values())

    def combinations(self) -> Iterable[dict[str, SettingValue]]:
        """Yield every combination of the searched settings."""
        names = list(self.parameters)
        for values in product(*(self.parameters[name] for name in names)):
            yield dict(zip(names, values, strict=True))


def resolve(basis: Basis) -> ResolvedSpace:
    """Complete the user's settings by default ranges, which include the baseline's values.

    The user's choices override every cap.
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
    """Return the configuration for proposed values of `space.parameters`, or the reason against it."""
    for name, value in params.items():
        if value not in space.domains[name]:
            return f"{name}={value!r} lies outside the space"
    settings = _settings_of(params, space)
    if settings["strategy"] not in space.domains["strategy"]:
        return "one rank is strategy 'single', which lies outside the space; list it too, or more than one rank"
    reason = _keep_global_batch(settings, space)
    if reason is not None:
        return reason
    try:
        config = TrainingConfig.model_validate(settings)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    if space.batch_cap is not None and config.global_batch_size > space.batch_cap:
        return f"the global batch must stay within {space.batch_cap}, but got {config.global_batch_size}"
    reason = rules.obstacle(config, space.facts, space.environment, drop_last=space.drop_last)
    # The user may list a hook and judge its rounding.
    if reason is None and f"{DDP_PREFIX}comm_hook" not in space.given:
        reason = rules.coarse_exchange(config, space.baseline)
    return reason or config


def setting_of(config: TrainingConfig, name: str) -> SettingValue:
    """Return a setting's value by its name in a space; None for one of DDP's with another strategy."""
    value: SettingValue
    if not name.startswith(DDP_PREFIX):
        value = getattr(config, name)
        return value
    value = getattr(config.ddp_settings, name.removeprefix(DDP_PREFIX))
    return value if config.is_ddp else None


def with_batch_setting(config: TrainingConfig, value: int, space: ResolvedSpace) -> TrainingConfig:
    """Return a configuration with another value of the batch setting, and what follows from it."""
    if space.batch_setting == "micro_batch_size":
        return config.model_copy(update={"micro_batch_size": value})
    update = {"max_tokens": value, "micro_batch_size": samples_within(value, space.baseline)}
    return config.model_copy(update=update)


def _settings_of(params: Mapping[str, SettingValue], space: ResolvedSpace) -> dict[str, Any]:
    """Return all settings, normalised, with num_workers within the rank's share of the cap."""
    plain: dict[str, Any] = {name: next(iter(domain)) for name, domain in space.domains.items()}
    plain.update(params)
    ddp = {
        name.removeprefix(DDP_PREFIX): plain.pop(name)
        for name in [*plain]
        if name.startswith(DDP_PREFIX)
    }
    plain.update(lr=space.baseline.lr, ddp=ddp or None)
    if space.batch_setting == "max_tokens":
        plain["micro_batch_size"] = samples_within(plain["max_tokens"], space.baseline)
    settings: dict[str, Any] = rules.normalised(plain, space.facts, space.environment)
    if space.workers_cap is not None and settings["strategy"] == "ddp":
        ranks = rules.ranks_on_host(settings["world_size"], space.environment)
        share = max(1, space.workers_cap // ranks)
        settings["num_workers"] = min(settings["num_workers"], share)
    return settings


def _keep_global_batch(settings: dict[str, Any], space: ResolvedSpace) -> str | None:
    """Set grad_accum_steps so that a kept global batch stays; return the reason if that is impossible."""
    if not space.keeps_batch:
        return None
    name = space.batch_setting
    wanted = space.wanted_batch
    micro = settings[name]
    ranks = settings["world_size"]
    steps, rest = divmod(wanted, micro * ranks)
    if rest or steps == 0:
        on = f" on {ranks} ranks" if ranks > 1 else ""
        return f"the global batch of {wanted} is kept, but {name}={micro}{on} does not divide it"
    if steps not in space.domains["grad_accum_steps"]:
        return f"the global batch of {wanted} is kept, but grad_accum_steps={steps} lies outside the space"
    settings["grad_accum_steps"] = steps
    return None
