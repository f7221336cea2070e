"""Which settings are searched: what the user allows, completed by default ranges of this machine and workload.

`SearchSpace` is the user's side; `resolve` makes a `ResolvedSpace` of it, in which every setting has a domain, and
`compose` turns proposed values into a TrainingConfig or a reason against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo

from autotune.core import rules
from autotune.core.environment import Environment
from autotune.core.objective import Objective
from autotune.core.training_config import TrainingConfig
from autotune.core.workload import WorkloadFacts

__all__ = [
    "Choices",
    "Domain",
    "IntRange",
    "ResolvedSpace",
    "SearchSpace",
    "SettingValue",
    "compose",
    "resolve",
    "whole_numbers",
]

SettingValue = bool | int | float | str | None
_MIN_WORKERS_TRIED = 8  # loaders that wait for I/O gain far beyond the cores
_SMALLEST_BATCH_SHARE = 4
_PREFETCH_FACTORS = (2, 4, 8)
_ACCUM_STEPS = (1, 2, 4)


class Choices(BaseModel):
    """A list of values to choose from; one value fixes the setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: tuple[SettingValue, ...] = Field(min_length=1)

    def __contains__(self, value: object) -> bool:
        return any(value == own and type(value) is type(own) for own in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[SettingValue]:  # type: ignore[override] # values, not the model's fields
        return iter(self.values)


class IntRange(BaseModel):
    """Whole numbers from low to high, both included; log: tried evenly on a logarithmic scale."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: Annotated[int, Field(strict=True)]
    high: Annotated[int, Field(strict=True)]
    log: Annotated[bool, Field(strict=True)] = False

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[int]:  # type: ignore[override] # values, not the model's fields
        return iter(range(self.low, self.high + 1))


Domain = Choices | IntRange


def whole_numbers(domain: Domain) -> list[int]:
    """The whole numbers among a domain's values, in its order."""
    return [value for value in domain if isinstance(value, int) and not isinstance(value, bool)]


def _parse_domain(value: object, info: ValidationInfo) -> Domain:
    name = str(info.field_name)
    if isinstance(value, IntRange):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return _parse_range(name, value)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    values = value if isinstance(value, Choices | list | tuple | range) else (value,)
    if not values:
        raise ValueError("a list of choices must hold at least one value, but got []")
    return Choices(values=tuple(dict.fromkeys(_checked(name, one) for one in values)))


def _parse_range(name: str, value: Mapping[Any, Any]) -> IntRange:
    try:
        domain = IntRange.model_validate(dict(value))
    except ValidationError as error:
        detail = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        rule = "a range is {low: int, high: int[, log: bool]}"
        raise ValueError(f"{rule}, but got {dict(value)!r} ({detail})") from None
    if domain.low > domain.high:
        raise ValueError(f"`low <= high` must hold, but got (low={domain.low}, high={domain.high})")
    if domain.log and domain.low < 1:
        raise ValueError(f"a logarithmic range must start at 1 or more, but got low={domain.low}")
    for end in (domain.low, domain.high):
        _checked(name, end)
    return domain


def _checked(name: str, value: object) -> Any:
    info = TrainingConfig.model_fields[name]
    annotation: Any = Annotated[info.annotation, info]
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{value!r} can't be a value of {name}: {error.errors()[0]['msg']}") from None


_Setting = Annotated[Domain | None, BeforeValidator(_parse_domain)]


class SearchSpace(BaseModel):
    """The user's part of the space: a setting left out takes its default range, a single value fixes it.

    Each setting takes a list of choices, {low, high[, log]}, or one value. The learning rate is not searched: it
    follows the global batch by `objective.lr_rule`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    micro_batch_size: _Setting = None
    grad_accum_steps: _Setting = None
    amp_dtype: _Setting = None
    num_workers: _Setting = None
    prefetch_factor: _Setting = None
    persistent_workers: _Setting = None
    pin_memory: _Setting = None
    channels_last: _Setting = None
    compile: _Setting = None
    intra_op_threads: _Setting = None
    world_size: _Setting = None
    strategy: _Setting = None

    def given(self) -> dict[str, Domain]:
        """The settings that the user has given, by name."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpace:
    """A domain for every setting, and what composing a configuration needs to know."""

    domains: Mapping[str, Domain]
    baseline: TrainingConfig
    objective: Objective
    facts: WorkloadFacts
    environment: Environment
    drop_last: bool
    batch_cap: int | None
    """Most samples of a global batch, raised where a listed grad_accum_steps needs it; None where the user has listed
    batch sizes, or keeps the global batch."""
    notes: tuple[str, ...] = field(default=())
    """Why a default range is narrower than usual, a sentence each."""

    @property
    def parameters(self) -> dict[str, Domain]:
        """The settings that are searched: those with more than one value that do not follow from others."""
        derived = {"grad_accum_steps"} if self.objective.global_batch == "keep" else set()
        return {name: domain for name, domain in self.domains.items() if len(domain) > 1 and name not in derived}

    @property
    def size(self) -> int:
        """Combinations of values, those included that the rules exclude or that run alike."""
        return prod(len(domain) for domain in self.parameters.values())

    def combinations(self) -> Iterable[dict[str, SettingValue]]:
        """Every combination of the searched settings."""
        names = list(self.parameters)
        for values in product(*(self.parameters[name] for name in names)):
            yield dict(zip(names, values, strict=True))


def resolve(
    space: SearchSpace,
    *,
    baseline: TrainingConfig,
    objective: Objective,
    facts: WorkloadFacts,
    environment: Environment,
    drop_last: bool = True,
) -> ResolvedSpace:
    """Complete a user's space by the default ranges, which hold the baseline's values too.

    Explicit choices override every cap.
    """
    given = space.given()
    domains = {**_loader_defaults(baseline, facts, environment), **_device_defaults(baseline, facts, environment)}
    cap = int(objective.max_batch_scale * baseline.global_batch_size)
    if facts.dataset_length is not None and drop_last:
        cap = max(1, min(cap, facts.dataset_length))
    keep = objective.global_batch == "keep"
    domains["micro_batch_size"] = _batch_domain(baseline, facts, cap, keep)
    domains["grad_accum_steps"] = _accum_domain(baseline, keep, domains["micro_batch_size"], given)
    domains.update(given)
    return ResolvedSpace(
        domains=dict(sorted(domains.items())),
        baseline=baseline,
        objective=objective,
        facts=facts,
        environment=environment,
        drop_last=drop_last,
        batch_cap=None if keep else _batch_cap(baseline, cap, domains, given),
        notes=_notes(baseline, facts, environment, given),
    )


def compose(params: Mapping[str, SettingValue], space: ResolvedSpace) -> TrainingConfig | str:
    """The configuration for proposed values of `space.parameters`, or the reason against it."""
    for name, value in params.items():
        if value not in space.domains[name]:
            return f"{name}={value!r} lies outside the space"
    settings: dict[str, Any] = {name: next(iter(domain)) for name, domain in space.domains.items()}
    settings.update(params)
    settings.update(lr=space.baseline.lr, ddp=space.baseline.ddp)
    if space.objective.global_batch == "keep":
        reason = _keep_global_batch(settings, space)
        if reason is not None:
            return reason
    settings = rules.normalised(settings, space.facts, space.environment)
    try:
        config = TrainingConfig.model_validate(settings)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    if space.batch_cap is not None and config.global_batch_size > space.batch_cap:
        return f"the global batch must stay within {space.batch_cap}, but got {config.global_batch_size}"
    return rules.obstacle(config, space.facts, drop_last=space.drop_last) or config


def _keep_global_batch(settings: dict[str, Any], space: ResolvedSpace) -> str | None:
    wanted, micro = space.baseline.global_batch_size, settings["micro_batch_size"]
    steps, rest = divmod(wanted, micro * settings["world_size"])
    if rest or steps == 0:
        return f"the global batch of {wanted} is kept, but micro_batch_size={micro} does not divide it"
    if steps not in space.domains["grad_accum_steps"]:
        return f"the global batch of {wanted} is kept, but grad_accum_steps={steps} lies outside the space"
    settings["grad_accum_steps"] = steps
    return None


def _loader_defaults(baseline: TrainingConfig, facts: WorkloadFacts, environment: Environment) -> dict[str, Domain]:
    most = max(_MIN_WORKERS_TRIED, 2 * environment.cores) if facts.is_sharded else 1
    prefetch_factors = {*_PREFETCH_FACTORS, baseline.prefetch_factor or _PREFETCH_FACTORS[0]}
    return {
        "num_workers": IntRange(low=0, high=max(most, baseline.num_workers)),
        "prefetch_factor": Choices(values=tuple(sorted(prefetch_factors))),
        "persistent_workers": Choices(values=(False, True)),
        "pin_memory": Choices(values=(False,) if environment.device_kind in {"cpu", "mps"} else (False, True)),
    }


def _device_defaults(baseline: TrainingConfig, facts: WorkloadFacts, environment: Environment) -> dict[str, Domain]:
    threads: tuple[SettingValue, ...] = (None,)
    if environment.device_kind == "cpu":
        threads = (None, *(2**power for power in range(environment.cores.bit_length()) if 2**power < environment.cores))
    return {
        "amp_dtype": Choices(values=environment.native_amp_dtypes),
        "channels_last": Choices(values=(False, True) if facts.has_4d_input else (False,)),
        "compile": Choices(values=(False, True) if baseline.compile else (False,)),
        "intra_op_threads": Choices(values=tuple(dict.fromkeys((*threads, baseline.intra_op_threads)))),
        "world_size": Choices(values=(1,)),
        "strategy": Choices(values=("single",)),
    }


def _batch_domain(baseline: TrainingConfig, facts: WorkloadFacts, cap: int, keep: bool) -> Domain:
    if facts.fixed_batch_size is not None:
        return Choices(values=(facts.fixed_batch_size,))
    if keep:
        wanted = baseline.global_batch_size
        powers = [2**power for power in range(wanted.bit_length()) if wanted % 2**power == 0]
        sizes = {*powers, *(wanted // power for power in powers), baseline.micro_batch_size}
        return Choices(values=tuple(sorted(size for size in sizes if size <= cap)))
    low = max(1, baseline.micro_batch_size // _SMALLEST_BATCH_SHARE)
    sizes = {2**power for power in range(cap.bit_length()) if low <= 2**power <= cap}
    return Choices(values=tuple(sorted(sizes | {min(baseline.micro_batch_size, cap)})))


def _batch_cap(
    baseline: TrainingConfig, cap: int, domains: Mapping[str, Domain], given: Mapping[str, Domain]
) -> int | None:
    if "micro_batch_size" in given:
        return None
    smallest = min(whole_numbers(domains["micro_batch_size"]))
    listed_steps = max(whole_numbers(domains["grad_accum_steps"])) if "grad_accum_steps" in given else 1
    return max(cap, baseline.global_batch_size, smallest * listed_steps)


def _accum_domain(baseline: TrainingConfig, keep: bool, batches: Domain, given: Mapping[str, Domain]) -> Domain:
    if keep:
        micro_sizes = whole_numbers(given.get("micro_batch_size", batches))
        wanted = baseline.global_batch_size
        steps = {wanted // micro for micro in micro_sizes if micro and micro <= wanted and wanted % micro == 0}
        return Choices(values=tuple(sorted(steps | {baseline.grad_accum_steps})))
    if "micro_batch_size" in given:
        return Choices(values=(baseline.grad_accum_steps,))
    return Choices(values=tuple(sorted({*_ACCUM_STEPS, baseline.grad_accum_steps})))


def _notes(
    baseline: TrainingConfig, facts: WorkloadFacts, environment: Environment, given: Mapping[str, Domain]
) -> tuple[str, ...]:
    effects = rules.without_effect(baseline, facts, environment)
    notes = [f"The baseline's {setting} has no effect here: {reason}." for setting, reason in effects.items()]
    listed = given.get("amp_dtype", Choices(values=(baseline.amp_dtype,)))
    for setting in ("amp_dtype", "channels_last", "pin_memory"):
        for value in given.get(setting, ()):
            config = TrainingConfig().model_copy(update={setting: value})
            reason = rules.without_effect(config, facts, environment).get(setting)
            if reason is not None:
                notes.append(f"{setting}={value} has no effect here: {reason}.")
    emulated = [str(one) for one in listed if one != "tf32" and one not in environment.native_amp_dtypes]
    if emulated:
        notes.append(f"{environment.device_name} does not compute {', '.join(emulated)} natively: tried as given.")
    if not facts.is_sharded:
        repeated = "each further worker would repeat the data: shard it by torch.utils.data.get_worker_info()"
        if "num_workers" in given:
            notes.append(f"The iterable dataset is not sharded; {repeated}. The choices given were kept.")
        else:
            most = max(1, baseline.num_workers)
            notes.append(f"The iterable dataset is not sharded, so num_workers stayed within {most}; {repeated}.")
    return tuple(notes)
