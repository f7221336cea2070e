"""A user's request as frozen models: workload, search space, objective, budget, search options, executor.

`Plan` holds all of them. A YAML file, the command line and a Python call all make a Plan, which is
checked once, where it is made; the code after that trusts it. Errors name rule, value and remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from math import inf, nan
from pathlib import Path, PurePath
from reprlib import repr as short_repr
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SkipValidation,
    StrictBool,
    StrictInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.dataclasses import dataclass as validated_dataclass

from autotune.config.command import command_fault, command_words
from autotune.config.tf_data import TfData
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import remedy_of, rule_of
from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.policy import POLICY, Policy
from autotune.settings_table import DDP_PREFIX

# The workload, and the facts that a probe finds about it. Only the worker opens live objects.


READ_PART = "read_part"
"""Key in the validation context of the function that reads a part of the workload from text."""

StartMethod = Literal["fork", "spawn", "forkserver"]
BatchSetting = Literal["micro_batch_size", "max_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A reference to the user's code, resolved in the trial: "pkg.mod:name" or "path/to/file.py:name"."""

    target: str
    folders: tuple[str, ...] = ()
    """Folders to try in order for a relative path: the configuration file's, the working directory."""


def _read_part(value: object, info: ValidationInfo) -> object:
    read = (info.context or {}).get(READ_PART)
    return value if read is None or value is None else read(value)


_Part = Annotated[Any, AfterValidator(_read_part), WithJsonSchema({"type": "string"})]  # as in YAML


def _read_command(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    command = command_words(value)
    fault = command_fault(command)
    if fault is not None:
        raise ValueError(fault)
    return command


_INPUT = ConfigDict(extra="forbid", use_attribute_docstrings=True)
"""Errors quote the docstrings of fields."""


@validated_dataclass(frozen=True, slots=True, kw_only=True, config=_INPUT)
class Workload:
    """A training job: a model and a dataset, or the command of a training script.

    A Python call gives live objects, a YAML file references such as "train.py:build_model". With a
    DataLoader as dataset, trials use copies of it, and its settings are the baseline's defaults.
    """

    model: _Part = None
    """an nn.Module, or a function without arguments that returns one (in YAML:
    "train.py:build_model")"""
    dataset: _Part = None
    """a Dataset or a DataLoader, or a function without arguments that returns one (in YAML:
    "train.py:make_dataset")"""
    command: Annotated[tuple[str, ...] | None, BeforeValidator(_read_command)] = None
    """the command of a training script, instead of everything else here: [python, train.py, --lr,
    "{lr}"], or one string that is split as in a shell; a placeholder stands for a setting that the
    script takes as an argument"""
    loss: _Part = None
    """loss(outputs, targets) -> scalar tensor."""
    step: _Part = None
    """step(model, batch) -> scalar loss, where a loss alone is not enough."""
    optimizer: _Part = None
    """optimizer(params, lr) -> torch.optim.Optimizer, or an optimizer of the model's parameters,
    whose class, groups and settings are used; None: SGD."""
    collate_fn: _Part = None
    """collate_fn(items) -> batch, as for torch's DataLoader; None: torch's default."""
    sampler: _Part = None
    """A Sampler, or sampler(dataset) -> Sampler. Replaces shuffling."""
    batch_sampler: _Part = None
    """A batch sampler, or batch_sampler(dataset, batch_size) -> iterable of index lists. With a
    parameter `max_tokens` it fills a token budget: batch_sampler(dataset, max_tokens=4096), see
    `baseline.max_tokens`."""
    worker_init_fn: _Part = None
    """worker_init_fn(worker_id), called in each loader worker when it starts."""
    shuffle: StrictBool = True
    """Load the items in a new random order each epoch. A DataLoader keeps its own order."""
    drop_last: StrictBool = True
    """Leave out the last batch of an epoch if it is smaller. A DataLoader keeps its own setting."""
    multiprocessing_context: StartMethod | None = None
    """Start method of loader workers; None: Python's default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        idle = [name for name in PARTS if getattr(self, name) is not None]
        idle += [name for name in _SWITCHES if not getattr(self, name)]
        if self.command is not None and idle:
            raise ValueError(
                "workload.command excludes all other fields, since its script decides the rest, "
                f"but got {', '.join(idle)}; leave out what you don't need"
            )
        fault = conflict_with_tf_data(self) if isinstance(self.dataset, TfData) else None
        if fault is not None:
            raise ValueError(fault)
        return self


INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders that hold installed packages."""
_SWITCHES = ("shuffle", "drop_last")
WITH_A_LOADER = (
    "collate_fn",
    "sampler",
    "batch_sampler",
    "worker_init_fn",
    "multiprocessing_context",
)
"""Parts that replace those of a DataLoader given as dataset."""
PARTS = tuple(field.name for field in fields(Workload) if field.name not in {"command", *_SWITCHES})
"""Parts of a workload that are the user's objects or references, and the start method."""


def conflict_with_tf_data(workload: Workload) -> str | None:
    """Return why a workload of a tf.data pipeline can't have its other parts, or None."""
    parts = (*WITH_A_LOADER, *_SWITCHES)
    idle = [name for name in parts if getattr(workload, name) not in {None, True}]
    if not idle:
        return None
    return (
        "a tf.data pipeline itself draws, batches and loads its elements, but got "
        f"{', '.join(idle)} next to it; leave that out, and do it in the function that TfData calls"
    )


class OptimizerFacts(FrozenModel):
    """Facts about the workload's optimizer, for the learning-rate rules."""

    name: str
    """Name of its class, such as "AdamW"."""
    betas: tuple[float, float] | None = None
    """Betas of an Adam variant; None for others."""
    eps: float | None = None
    """Epsilon of an Adam variant; None for others."""
    can_fuse: bool = False
    """True if torch has a fused implementation for these parameters on this device."""


class LoaderSite(FrozenModel):
    """Place and arguments of a script's DataLoader; `autotune apply` finds the loader again by them."""

    file: str
    """Path of the source file: the script, if it calls the framework that makes the loader."""
    line: int
    """Line of the call, from 1."""
    nth: int = 0
    """Number of loaders that this line had made before this one."""
    code: str = ""
    """Text of that line, to find it again after lines before it have changed."""
    dataset: str = ""
    """Type of the dataset."""
    length: int | None = None
    """Length of the dataset; None if it has none."""
    order: str = ""
    """Order of the samples: "shuffle", the sampler's type, or "" for sequential."""
    batch_size: int | None = None
    """Batch size; None if the script makes the batches."""

    @property
    def is_drawn(self) -> bool:
        """True if the samples are drawn in some order, as for training."""
        return self.order not in {"", "SequentialSampler"}

    def is_like(self, other: LoaderSite, *, ignores_batch_size: bool = False) -> bool:
        """Return True if both are made at the same place in the same way, whatever their length."""
        is_same_place = self.code == other.code if self.code else self.line == other.line
        is_same_size = ignores_batch_size or self.batch_size == other.batch_size
        return (
            is_same_place
            and is_same_size
            and self.file == other.file
            and self.dataset == other.dataset
            and self.order == other.order
        )


class ScriptFacts(FrozenModel):
    """Facts about a script, observed while it trained some steps."""

    observed: TrainingConfig
    """Settings that it uses by itself: the baseline."""
    framework: str = "plain loop"
    """Framework that runs its steps: "plain loop", "accelerate", "transformers", "lightning", ..."""
    loaders: tuple[LoaderSite, ...] = ()
    """The training loader, last, after those of the same data that it was rebuilt from."""
    reached: tuple[str, ...] = ()
    """Settings that can be changed from outside, by name."""
    unreached: tuple[Note, ...] = ()
    """Notes on settings that can't be, with the reason and the remedy."""
    modules: tuple[str, ...] = ()
    """Modules of installed packages that it imported, in order."""
    new_files: tuple[str, ...] = ()
    """Files and folders of its first trial that were not removed: they could not be, or may belong
    to another process."""
    is_in_process: bool = True
    """True if it runs in the trial's process; False if a launcher or a shell starts it."""
    placeholders: tuple[str, ...] = ()
    """Settings that the command takes as arguments."""
    device: str = "cpu"
    """Device of its parameters, by torch's name."""

    @property
    def own_loader(self) -> LoaderSite | None:
        """The last training loader that the script itself makes; None if only a package makes one."""
        for site in reversed(self.loaders):
            if INSTALLED.isdisjoint(PurePath(site.file).parts):
                return site
        return None


class ObjectFacts(FrozenModel):
    """Settings of the user's own objects, which the baseline takes unless it sets them itself."""

    observed: TrainingConfig = Field(default_factory=TrainingConfig)
    """The settings; those in `names` come from the objects."""
    names: tuple[str, ...] = ()
    """Settings that the DataLoader or the optimizer has."""
    has_loader: bool = False
    """True if a DataLoader was given, not only a dataset."""
    drop_last: bool | None = None
    """drop_last of the DataLoader; None without one."""
    replaced_arguments: tuple[str, ...] = ()
    """Loader arguments given next to the DataLoader, in place of its own, such as "collate_fn"."""


class WorkloadFacts(FrozenModel):
    """Facts that the probe found by running one training step in a process of its own."""

    dataset_length: int | None
    """Items per epoch; None if the dataset has no length."""
    is_iterable: bool
    """True for an IterableDataset."""
    is_sharded: bool = True
    """True if loader workers share the data; an unsharded iterable repeats it in each."""
    is_tf_data: bool = False
    """True for a tf.data pipeline, which loads in its own threads."""
    fixed_batch_size: int | None = None
    """Batch size that the user's batch sampler imposes."""
    has_token_budget: bool = False
    """True if the user's batch sampler takes `max_tokens`, which is then searched instead of the
    micro batch."""
    budget_samples: float | None = None
    """Average samples in a batch of the baseline's token budget; None without a budget, or if the
    sampler takes a batch size too."""
    has_4d_input: bool
    """True if a batch has a tensor of four dimensions, such as images."""
    parameter_count: int
    """Elements in all parameters."""
    trainable_parameter_count: int = 0
    """Elements in the parameters that require a gradient, which the optimizer has state for. 0: not
    known."""
    gradient_bytes: int = 0
    """Bytes of all gradients, which ranks exchange each step."""
    has_buffers: bool = False
    """True if the model has buffers, such as batch norm's running averages."""
    has_unused_parameters: bool = False
    """True if parameters that require a gradient got none in one step, so DDP must search for them."""
    has_convolutions: bool = False
    """True if the model has convolution modules."""
    has_fixed_shapes: bool | None = None
    """True if all batches seen have the same shapes; None: not known."""
    is_deterministic: bool = False
    """True if the user's code asks torch or cuDNN for deterministic algorithms: nothing that undoes
    it is tried."""
    slow_tail_fraction: float | None = None
    """Share of the loading time spent in items of over 8 times the median; None: not known."""
    cores_per_item: float | None = None
    """Cores busy while an item is computed, by threads that are not torch's; None: not known."""
    optimizer: OptimizerFacts
    step_source: str
    """Description of how the loss is computed: as the user gave it, or as inferred."""
    script: ScriptFacts | None = None
    """Facts about a script; None if a model and a dataset were given."""
    objects: ObjectFacts = Field(default_factory=ObjectFacts)
    """Settings of the DataLoader and the optimizer that were given."""

    @property
    def batch_setting(self) -> BatchSetting:
        """The setting that is searched for the batch; the other one follows it, or is not used."""
        return "max_tokens" if self.has_token_budget else "micro_batch_size"


# The search space: each setting's values are checked by the field of the same name of
# TrainingConfig or DdpConfig.


SettingValue = bool | int | float | str | None


class Choices(FrozenModel):
    """A list of values to choose from; one value fixes the setting."""

    values: tuple[SettingValue, ...] = Field(min_length=1)
    """Each at most once."""

    def __contains__(self, value: object) -> bool:
        return any(value == own and type(value) is type(own) for own in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[SettingValue]:  # type: ignore[override] # values, not the model's fields
        return iter(self.values)


class IntRange(FrozenModel):
    """Whole numbers from low to high, both included; log: tried evenly on a logarithmic scale."""

    low: StrictInt
    """The smallest value."""
    high: StrictInt
    """The largest value."""
    log: StrictBool = False
    """Small values are tried as densely as large ones, by their logarithms."""

    def __contains__(self, value: object) -> bool:
        return (
            isinstance(value, int)
            and not isinstance(value, bool)
            and self.low <= value <= self.high
        )

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[int]:  # type: ignore[override] # values, not the model's fields
        return iter(range(self.low, self.high + 1))


Domain = Choices | IntRange


def _parse_domain(model: type[BaseModel], value: object, info: ValidationInfo) -> Domain:
    """Return the values that the user wrote for a setting, checked by the model's field of that name."""
    name = str(info.field_name)
    if isinstance(value, IntRange):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return _parse_range(model, name, value)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    values = value if isinstance(value, Choices | list | tuple | range) else (value,)
    if not values:
        raise ValueError("a list of choices must have at least one value, but got []")
    return Choices(
        values=tuple(dict.fromkeys(_checked_value(model, name, choice) for choice in values))
    )


def _parse_range(model: type[BaseModel], name: str, value: Mapping[Any, Any]) -> IntRange:
    domain: IntRange = _checked(IntRange, dict(value), "a range {low: int, high: int[, log: bool]}")
    if domain.low > domain.high:
        raise ValueError(f"`low <= high` must hold, but got (low={domain.low}, high={domain.high})")
    if domain.log and domain.low < 1:
        raise ValueError(f"a logarithmic range must start at 1 or more, but got low={domain.low}")
    for end in (domain.low, domain.high):
        _checked_value(model, name, end)
    return domain


def _checked_value(model: type[BaseModel], name: str, value: object) -> Any:
    info = model.model_fields[name]
    return _checked(Annotated[info.annotation, info], value, f"a value of {name}")


def _checked(kind: Any, value: object, what: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), rule_of(first)])
        raise ValueError(f"{value!r} can't be {what}: {reason}{remedy_of(first)}") from None


_Setting = Annotated[Domain | None, BeforeValidator(partial(_parse_domain, TrainingConfig))]
_DdpSetting = Annotated[Domain | None, BeforeValidator(partial(_parse_domain, DdpConfig))]


class DdpSpace(FrozenModel):
    """The settings of DistributedDataParallel to search, written like those of SearchSpace."""

    bucket_cap_mb: _DdpSetting = None
    first_bucket_mb: _DdpSetting = None
    gradient_as_bucket_view: _DdpSetting = None
    static_graph: _DdpSetting = None
    find_unused_parameters: _DdpSetting = None
    broadcast_buffers: _DdpSetting = None
    comm_hook: _DdpSetting = None


class SearchSpace(FrozenModel):
    """The settings to search: a list of choices, {low, high[, log]}, or one value, which fixes a setting.

    A setting left out has a default range that fits machine and workload. The learning rate is not
    searched; it follows the global batch by `objective.lr_rule`.
    """

    micro_batch_size: _Setting = None
    max_tokens: _Setting = None
    grad_accum_steps: _Setting = None
    amp_dtype: _Setting = None
    num_workers: _Setting = None
    prefetch_factor: _Setting = None
    persistent_workers: _Setting = None
    pin_memory: _Setting = None
    in_order: _Setting = None
    multiprocessing_context: _Setting = None
    worker_threads: _Setting = None
    channels_last: _Setting = None
    compile: _Setting = None
    compile_mode: _Setting = None
    cudnn_benchmark: _Setting = None
    fused: _Setting = None
    intra_op_threads: _Setting = None
    world_size: _Setting = None
    strategy: _Setting = None
    ddp: DdpSpace | None = None
    numa_binding: _Setting = None

    def given(self) -> dict[str, Domain]:
        """Return the settings that the user gave, by their names in settings_table."""
        found = {name: getattr(self, name) for name in self.model_fields_set - {"ddp"}}
        if self.ddp is not None:
            found |= {
                f"{DDP_PREFIX}{name}": getattr(self.ddp, name) for name in self.ddp.model_fields_set
            }
        return dict(sorted(found.items()))


LrRule = Literal["auto", "linear", "sqrt", "none"]
"""Rule by which the learning rate follows the global batch; auto: chosen by the optimizer."""

_BYTE_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)


def _parse_size(value: object) -> int | float:
    """Return a fraction of the device's memory, at most 1, or bytes as an int."""
    number = _number_of(value)
    if 0 < number <= 1:
        return number
    if 0 <= number < inf and number == int(number):
        return int(number)
    rule = 'must be bytes, a size such as "20GiB", or a fraction of the device of at most 1'
    raise ValueError(f"{rule}, but got {value!r}")


def _leave_some(reserve: float) -> float:
    if reserve == 1:
        raise ValueError(
            f"must leave memory to trials, but got {reserve} (100 % of the device); give bytes, a size such "
            'as "4GiB", or a fraction below 1'
        )
    return reserve


def _number_of(value: object) -> float:
    """Return a number, also from text, or the bytes of a size such as "4GiB"; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return nan
    with suppress(ValueError, OverflowError):
        return float(value)
    with suppress(ValidationError):
        size = _BYTE_SIZE.validate_python(value)
        return size if size > 1 else nan  # a size of one byte would be read as a fraction
    return nan


_Size = Annotated[
    int | float,
    BeforeValidator(_parse_size),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]}),
]


class Objective(FrozenModel):
    """The goal of a search: throughput within a memory limit, and rules for the global batch."""

    memory_limit: Annotated[_Size, Field(gt=0)] = 0.9
    """Memory limit: bytes, a size such as "20GiB", or a fraction of the device's memory."""
    reserve: Annotated[_Size, AfterValidator(_leave_some)] = 0
    """Part of the limit that trials leave free, for validation, checkpoints and the like: bytes, a
    size such as "4GiB", or a fraction of the device's memory."""
    busy_weight: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Weight of an idle device in the score, enough to decide between equals."""
    global_batch: Literal["scale", "keep"] = "scale"
    """`scale`: the global batch may grow, and the learning rate with it; `keep`: it stays, split
    differently."""
    max_batch_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 8
    """Largest global batch, as a multiple of the baseline's."""
    larger_batch_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """Gain that a larger global batch needs to be recommended, over the fastest configuration with
    the baseline's. It must also be faster by more than noise."""
    lr_rule: LrRule = "auto"
    """Rule by which the learning rate follows the global batch."""

    def limit_bytes(self, device_memory_bytes: int) -> int:
        """Return the bytes that a trial may use: the limit less the reserve, 0 or less if nothing is left."""
        limit = _bytes_of(self.memory_limit, device_memory_bytes)
        return limit - self.reserve_bytes(device_memory_bytes)

    def reserve_bytes(self, device_memory_bytes: int) -> int:
        """Return the bytes that trials leave free below the memory limit."""
        return _bytes_of(self.reserve, device_memory_bytes)


def _bytes_of(size: float, device_memory_bytes: int) -> int:
    return int(size * device_memory_bytes) if isinstance(size, float) else size


ASSUMED_TRAINING_HOURS = 24.0
"""Default of training_hours. Source: our convention."""
MAX_TRIALS = 40
"""Most trials of a search without n_trials. Source: our convention."""


class Budget(FrozenModel):
    """The trials and seconds that a search may spend; the baseline is the first trial."""

    n_trials: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Measured trials. None: at most 40, and the search may stop early."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds for one call, verification included; a search that is continued has them again. None:
    no limit."""

    training_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Hours of training still to come: a search that may stop early tries nothing that costs more
    time than it is expected to save. None: 24."""

    @property
    def training_s(self) -> float:
        """Seconds of training still to come."""
        return 3600 * (self.training_hours or ASSUMED_TRAINING_HOURS)

    @property
    def max_trials(self) -> int:
        """Most trials to measure."""
        return MAX_TRIALS if self.n_trials is None else self.n_trials

    @property
    def may_stop_early(self) -> bool:
        """True if the search may stop before max_trials."""
        return self.n_trials is None


Method = Literal["model", "tpe", "gp", "random", "grid"]


def _check_path(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, str | Path) or value == "" or "\0" in str(value):
        raise ValueError(f"must be a path, but got {value!r}")
    return value


class SearchOptions(FrozenModel):
    """The method that proposes trials, and an earlier search to start from."""

    method: Method = "model"
    """model: a model of this machine's throughput, learned during the search, with Optuna's TPE if
    it does not explain the measurements; slow trials are stopped early. tpe, gp, random: Optuna's
    sampler of that name, tpe and gp after an expert's guesses. grid: every combination, in random
    order, 20,000 at most. With all but model, each trial is measured to its end."""
    warm_start: Annotated[Path | None, BeforeValidator(_check_path)] = None
    """A run folder or a recommended.yaml of the same workload on another machine, or of a similar
    workload: its winner is tried right after the baseline."""


ExecutorKind = Literal["local", "ray"]

_ADDRESS = re.compile(r"auto|(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def _check_address(address: str) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"] or 1) not in range(1, 2**16):
        rule = 'must be auto, or host and port of the cluster, such as "10.0.0.1:6379"'
        raise ValueError(f"{rule}, but got {short_repr(address)}")
    return address


class Executor(FrozenModel):
    """The machines that run trials. A string is taken as the kind: `executor: ray`."""

    kind: ExecutorKind = "local"
    """local: this machine; ray: the machines of a Ray cluster."""
    address: Annotated[str, Field(strict=True), AfterValidator(_check_address)] | None = None
    """Address of the Ray cluster, such as "10.0.0.1:6379"; None: the one that Ray finds."""
    ranks: Literal["pack", "spread"] = "pack"
    """Placement of a trial's ranks on the cluster: on as few machines as possible, or on as many."""

    @model_validator(mode="before")
    @classmethod
    def _take_text_as_kind(cls, value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, Mapping | Executor):
            return value
        raise ValueError(
            "must be local, ray, or a mapping of kind, address and ranks, but got "
            f"{short_repr(value)}"
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        idle = [f"{name}={value!r}" for name, value in given.items()]
        if self.kind == "local" and idle:
            raise ValueError(
                "address and ranks have an effect only with kind: ray, but got "
                f"kind='local' with {' and '.join(idle)}; set kind: ray, or leave them out"
            )
        return self


def places(ranks: int, *, hosts: int, per_host: int, spread: bool) -> tuple[int, ...]:
    """Distribute a trial's ranks over hosts as evenly as possible.

    Args:
        ranks: Number of ranks.
        hosts: Number of hosts.
        per_host: Ranks that fit on a host.
        spread: Use as many hosts as possible, instead of as few.

    Returns:
        The number of ranks on each host that is used, the largest first.

    Raises:
        ValueError: The ranks do not fit.
    """
    if min(ranks, hosts, per_host) < 1 or ranks > hosts * per_host:
        raise ValueError(
            "a trial's ranks, one or more, must fit on its hosts, but got "
            f"(ranks={ranks}, hosts={hosts}, per_host={per_host})"
        )
    used = min(ranks, hosts) if spread else -(-ranks // per_host)
    share, more = divmod(ranks, used)
    return (*[share + 1] * more, *[share] * (used - more))


_COUNTED_DEVICES = frozenset({"cuda", "xpu", "hpu", "mlu", "mtia", "musa", "npu", "privateuseone"})
"""Kinds of device that a machine may have several of. Source: torch.device, and torch's plug-ins."""


def _check_device(value: str, info: ValidationInfo) -> str:
    kind, colon, index = value.partition(":")
    if value not in {"auto", "cpu", "mps"} and not (
        kind in _COUNTED_DEVICES and (index.isdecimal() or not colon)
    ):
        raise ValueError(f"must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, but got {value!r}")
    executor = info.data.get("executor")  # missing if it is invalid itself
    if executor is not None and executor.kind == "ray" and colon:
        rule = "must name a kind of device with executor ray, which gives each rank a device of its host"
        raise ValueError(f"{rule}, but got {value!r}; write {kind}")
    return value


def _expand_home(path: Path | None) -> Path | None:
    try:
        return None if path is None else path.expanduser()
    except RuntimeError:
        raise ValueError(
            f"'~' must stand for a known home folder, but got {str(path)!r}; write the path out"
        ) from None


class ReadOver(NamedTuple):
    """The origin of a setting that was read from a framework's file."""

    name: str
    """Name of the setting in the file."""
    optimizer: str | None = None
    """Class of the optimizer that `fused` belongs to; None: not known."""


@validated_dataclass(frozen=True, slots=True, kw_only=True, config=_INPUT)
class Plan:
    """A complete request for a search or a diagnosis."""

    name: Annotated[str, Field(exclude=True)]  # no key of the YAML file
    """Name for reports: that of the configuration file, the model's class, or the script."""
    workload: Workload
    """the functions that make the model and the dataset, as workload.model and workload.dataset; or
    the command that trains, as workload.command"""
    baseline: TrainingConfig = Field(default_factory=TrainingConfig)
    space: SearchSpace = Field(default_factory=SearchSpace)
    objective: Objective = Field(default_factory=Objective)
    budget: Budget = Field(default_factory=Budget)
    search: SearchOptions = Field(default_factory=SearchOptions)
    executor: Executor = Field(default_factory=Executor)
    device: Annotated[str, Field(strict=True), AfterValidator(_check_device)] = "auto"
    """torch's name for the device; "auto": the accelerator if there is one, else the CPU."""
    run_dir: Annotated[Path | None, BeforeValidator(_check_path), AfterValidator(_expand_home)] = (
        None
    )
    """Run folder. None: a new folder in ./runs."""
    notes: Annotated[tuple[Note, ...], Field(exclude=True)] = ()  # no key of the YAML file
    """Notes on parts of the caller's objects that could not be taken over."""
    read_over: Annotated[Mapping[str, ReadOver], Field(exclude=True)] = Field(default_factory=dict)
    """Settings of the baseline that come from a framework's file, so the user may never have chosen
    them; no key of the YAML file."""
    policy: Annotated[Policy, SkipValidation, Field(exclude=True)] = POLICY
    """Thresholds of the search; tests and benchmarks vary them. No key of the YAML file."""
    # numpy.random.seed takes no larger one.
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    """Seed of the search and of every trial."""
