"""What a user asks for, as frozen models: workload, search space, objective, budget, search options, executor.

`Plan` holds all of them. Each model is checked once, where it is made; an error names rule, value
and remedy.
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
from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.policy import POLICY, Policy
from autotune.settings_table import DDP_PREFIX

# What is trained: references from a YAML file or live objects from a Python call, and the facts
# that a probe finds.
#
# A Workload is what a trial builds its model, data and step from. Only the worker opens live
# objects.


READ_PART = "read_part"
"""Key of the validation context: the function by which a border that writes parts as text reads
one."""

BESIDE_A_COMMAND = "nothing can stand beside workload.command, whose script decides all else"

StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A place in the user's code, resolved inside the trial: "pkg.mod:name" or "path/to/file.py:name".

    `folders` are tried in order for a relative path: the configuration file's folder, then the
    working directory.
    """

    target: str
    folders: tuple[str, ...] = ()


def _read_part(value: object, info: ValidationInfo) -> object:
    read = (info.context or {}).get(READ_PART)
    return value if read is None or value is None else read(value)


_Part = Annotated[Any, AfterValidator(_read_part), WithJsonSchema({"type": "string"})]  # as in YAML
_Flag = Annotated[bool, Field(strict=True)]


def _read_command(value: object) -> object:
    return None if value is None else command_words(value)


def _check_command(command: tuple[str, ...] | None) -> tuple[str, ...] | None:
    fault = None if command is None else command_fault(command)
    if fault is not None:
        raise ValueError(fault)
    return command


_Command = Annotated[
    tuple[str, ...] | None, BeforeValidator(_read_command), AfterValidator(_check_command)
]


@validated_dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True),
)
class Workload:
    """The user's training job: a model and a dataset, each a live object or a Ref, or the command of a script.

    Of a DataLoader trials have copies with their own settings; its own are the baseline where that
    says nothing else.
    """

    model: _Part = None
    """an nn.Module, or a function without arguments that returns one (in YAML:
    "train.py:build_model")"""
    dataset: _Part = None
    """a Dataset or a DataLoader, or a function without arguments that returns one (in YAML:
    "train.py:make_dataset")"""
    command: _Command = None
    """what starts a training script, in place of all else here: [python, train.py, --lr, "{lr}"],
    or one text that is split as a shell does; placeholders stand for settings that the script takes
    as words of its own"""
    loss: _Part = None
    """loss(outputs, targets) -> scalar."""
    step: _Part = None
    """step(model, batch) -> scalar loss, for what inference does not cover."""
    optimizer: _Part = None
    """optimizer(params, lr) -> torch.optim.Optimizer, or an optimizer of the model's parameters, of
    which class, groups and settings are taken; None: SGD."""
    collate_fn: _Part = None
    """collate_fn(items) -> batch, as of torch's DataLoader; None: torch's own."""
    sampler: _Part = None
    """A Sampler, or a callable: sampler(dataset) -> Sampler. Takes the place of shuffling."""
    batch_sampler: _Part = None
    """A batch sampler, or a callable: batch_sampler(dataset, batch_size) -> iterable of index
    lists; one with a parameter `max_tokens` fills a token budget: batch_sampler(dataset,
    max_tokens=4096), see `baseline.max_tokens`."""
    worker_init_fn: _Part = None
    """worker_init_fn(worker_id), called in each loader worker as it starts."""
    shuffle: _Flag = True
    """Load the items in random order, anew each epoch. A DataLoader keeps its own order."""
    drop_last: _Flag = True
    """Leave out an epoch's last batch where it is smaller than the others. A DataLoader keeps its
    own way."""
    multiprocessing_context: StartMethod | None = None
    """How loader workers start; None: Python's default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        idle = [name for name in PARTS if getattr(self, name) is not None]
        idle += [name for name in _SWITCHES if not getattr(self, name)]
        if self.command is not None and idle:
            raise ValueError(
                f"{BESIDE_A_COMMAND}, but got {', '.join(idle)}; leave out what you don't need"
            )
        fault = beside_tf_data(self) if isinstance(self.dataset, TfData) else None
        if fault is not None:
            raise ValueError(fault)
        return self


INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders that hold installed packages, by their own names."""
_SWITCHES = ("shuffle", "drop_last")
BESIDE_A_LOADER = (
    "collate_fn",
    "sampler",
    "batch_sampler",
    "worker_init_fn",
    "multiprocessing_context",
)
"""Arguments of a DataLoader that take the place of its own where a DataLoader is given."""
PARTS = tuple(field.name for field in fields(Workload) if field.name not in {"command", *_SWITCHES})
"""The parts of a workload that are the user's objects or references (and the start method)."""


def beside_tf_data(workload: Workload) -> str | None:
    """What a DataLoader would take of a workload and a tf.data pipeline has no use for, as a reason; or None."""
    parts = (*BESIDE_A_LOADER, *_SWITCHES)
    idle = [name for name in parts if getattr(workload, name) not in {None, True}]
    if not idle:
        return None
    return (
        "a tf.data pipeline itself says how its elements are drawn, batched and loaded, but got "
        f"{', '.join(idle)} beside it; leave that out, and do it in the function that TfData "
        f"builds it by"
    )


class OptimizerFacts(FrozenModel):
    """The optimizer that the workload builds, as far as learning-rate rules need it."""

    name: str
    """The class's name, such as "AdamW"."""
    betas: tuple[float, float] | None = None
    """Of the Adam family; None elsewhere."""
    eps: float | None = None
    """Of the Adam family; None elsewhere."""
    can_fuse: bool = False
    """torch has a fused implementation of it for these parameters on this device."""


class LoaderSite(FrozenModel):
    """Place and arguments of a DataLoader as the script makes it; `autotune apply` finds the loader again by them."""

    file: str
    """Path of the source file: the script's own, where the call of a framework is made there."""
    line: int
    """Line of the call."""
    nth: int = 0
    """How many loaders this line had made before: a function may make all of them."""
    code: str = ""
    """That line's text, which finds it again where lines before it have changed."""
    dataset: str = ""
    """The dataset's type."""
    length: int | None = None
    """The dataset's length; None where it has none."""
    order: str = ""
    """Order of the samples: "shuffle", the sampler's type, or "" for sequential."""
    batch_size: int | None = None
    """None where the script gives batches of its own."""

    @property
    def is_drawn(self) -> bool:
        """Samples are drawn, as for a training."""
        return self.order not in {"", "SequentialSampler"}

    def is_like(self, other: LoaderSite, *, ignores_batch_size: bool = False) -> bool:
        """Return whether another loader is made at the same place and in the same manner, of any length."""
        is_there = self.code == other.code if self.code else self.line == other.line
        is_same_size = ignores_batch_size or self.batch_size == other.batch_size
        manner, others = ((one.file, one.dataset, one.order) for one in (self, other))
        return is_there and is_same_size and manner == others


class ScriptFacts(FrozenModel):
    """What a script does, as seen while it trained some steps."""

    observed: TrainingConfig
    """What it does by itself: the baseline."""
    framework: str = "plain loop"
    """Who runs its steps: "plain loop", "accelerate", "transformers", "lightning", ..."""
    loaders: tuple[LoaderSite, ...] = ()
    """The training loader, last, and those of the same data that it was rebuilt from."""
    reached: tuple[str, ...] = ()
    """Settings that can be changed from outside, by name."""
    unreached: tuple[Note, ...] = ()
    """Settings that can't be, each with the reason and the way to reach it."""
    modules: tuple[str, ...] = ()
    """Modules of installed packages that it had imported, in their order."""
    new_files: tuple[str, ...] = ()
    """Files and folders that its first trial has made and that could not be removed, or may be
    somebody else's."""
    is_in_process: bool = True
    """It runs in the trial's own process; else a launcher or a shell starts it."""
    placeholders: tuple[str, ...] = ()
    """Settings that the command takes as words of its own."""
    device: str = "cpu"
    """Where its parameters lie, by torch's name."""

    @property
    def own_loader(self) -> LoaderSite | None:
        """Where the script itself makes its training loader; None where only an installed package makes one."""
        own = (
            site
            for site in reversed(self.loaders)
            if not INSTALLED & set(PurePath(site.file).parts)
        )
        return next(own, None)


class ObjectFacts(FrozenModel):
    """What the user's own objects are set to: today's settings, where the baseline does not say otherwise."""

    observed: TrainingConfig = Field(default_factory=TrainingConfig)
    """The settings, of which `names` are the objects' own."""
    names: tuple[str, ...] = ()
    """Settings that a DataLoader or an optimizer says."""
    has_loader: bool = False
    """A DataLoader was given, not a dataset alone."""
    drop_last: bool | None = None
    """Of the DataLoader; None: there is none."""
    beside: tuple[str, ...] = ()
    """Arguments of a loader that were given beside the DataLoader, in place of its own, such as
    "collate_fn"."""


class WorkloadFacts(FrozenModel):
    """What the probe has found: one training step of the workload, in a process of its own."""

    dataset_length: int | None
    """Items of one epoch; None where the dataset has no length."""
    is_iterable: bool
    """The dataset is an IterableDataset."""
    is_sharded: bool = True
    """Whether several loader workers share the data out among them (an unsharded iterable repeats
    it)."""
    is_tf_data: bool = False
    """The dataset is a tf.data pipeline, loaded by threads of its own."""
    fixed_batch_size: int | None = None
    """Batch size that the user's own batch sampler imposes."""
    has_token_budget: bool = False
    """The user's batch sampler takes `max_tokens`: that is searched in place of the micro batch,
    which follows it."""
    budget_samples: float | None = None
    """Samples that a batch of the baseline's token budget holds on average; None without a budget,
    and where the sampler takes a batch size beside it."""
    has_4d_input: bool
    """A batch has a tensor of four dimensions, such as images."""
    parameter_count: int
    """Numbers in all parameters."""
    trainable_parameter_count: int = 0
    """Numbers in the parameters that require a gradient: what an optimizer keeps state for. 0: not
    known."""
    gradient_bytes: int = 0
    """Bytes of all gradients: what the ranks of a group exchange each step."""
    has_buffers: bool = False
    """The model has buffers, such as the running averages of batch norm, which ranks may share."""
    has_unused_parameters: bool = False
    """Some parameters that require a gradient got none in one step: DDP must search for them."""
    has_convolutions: bool = False
    """The model has modules that convolve."""
    has_fixed_shapes: bool | None = None
    """All batches that were looked at have the same shapes; None: not known."""
    is_deterministic: bool = False
    """The user's code asks torch for deterministic algorithms, or cuDNN for them: nothing that
    undoes it is tried."""
    slow_tail_fraction: float | None = None
    """Share of the time of the items that were looked at in items of over 8 times the median; None:
    not known."""
    cores_per_item: float | None = None
    """Cores that an item keeps busy while it is computed, by threads that are not torch's; None:
    not known."""
    optimizer: OptimizerFacts
    step_source: str
    """How the loss is computed, in words: what the user gave, or what was inferred."""
    script: ScriptFacts | None = None
    """What was seen of a script; None where a model and a dataset were given."""
    objects: ObjectFacts = Field(default_factory=ObjectFacts)
    """What a DataLoader and an optimizer that were given are set to."""

    @property
    def batch_setting(self) -> Literal["micro_batch_size", "max_tokens"]:
        """The setting by which the batch is searched; the other one follows it, or is not used."""
        return "max_tokens" if self.has_token_budget else "micro_batch_size"


# The space as a user writes it: for each setting a list of choices, {low, high[, log]}, or one
# value.
#
# Comes in: such values, from the YAML border or a Python call. Goes out: a SearchSpace of Choices
# and IntRanges, whose values the field of the same name of a TrainingConfig (or DdpConfig) takes.


SettingValue = bool | int | float | str | None


class Choices(FrozenModel):
    """A list of values to choose from; one value fixes the setting."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # an error says what is missing

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

    model_config = ConfigDict(use_attribute_docstrings=True)  # an error says what is missing

    low: Annotated[int, Field(strict=True)]
    """The smallest value."""
    high: Annotated[int, Field(strict=True)]
    """The largest value."""
    log: Annotated[bool, Field(strict=True)] = False
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
    """The domain that the user has written for the field of the same name of a model."""
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
    return Choices(values=tuple(dict.fromkeys(_checked(model, name, choice) for choice in values)))


def _parse_range(model: type[BaseModel], name: str, value: Mapping[Any, Any]) -> IntRange:
    try:
        domain = IntRange.model_validate(dict(value))
    except ValidationError as error:
        detail = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        rule = "a range is {low: int, high: int[, log: bool]}"
        raise ValueError(f"{rule}, but got {dict(value)!r} ({detail})") from None
    if domain.low > domain.high:
        raise ValueError(f"`low <= high` must hold, but got (low={domain.low}, high={domain.high})")
    if domain.log and domain.low < 1:
        raise ValueError(f"a logarithmic range must start at 1 or more, but got low={domain.low}")
    for end in (domain.low, domain.high):
        _checked(model, name, end)
    return domain


def _checked(model: type[BaseModel], name: str, value: object) -> Any:
    info = model.model_fields[name]
    annotation: Any = Annotated[info.annotation, info]
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(
            f"{value!r} can't be a value of {name}: {error.errors()[0]['msg']}"
        ) from None


_Setting = Annotated[Domain | None, BeforeValidator(partial(_parse_domain, TrainingConfig))]
_DdpSetting = Annotated[Domain | None, BeforeValidator(partial(_parse_domain, DdpConfig))]


class DdpSpace(FrozenModel):
    """DistributedDataParallel's part of the space, written as the other settings are."""

    bucket_cap_mb: _DdpSetting = None
    first_bucket_mb: _DdpSetting = None
    gradient_as_bucket_view: _DdpSetting = None
    static_graph: _DdpSetting = None
    find_unused_parameters: _DdpSetting = None
    broadcast_buffers: _DdpSetting = None
    comm_hook: _DdpSetting = None


class SearchSpace(FrozenModel):
    """The user's part of the space: a setting left out takes its default range, a single value fixes it.

    Each setting takes a list of choices, {low, high[, log]}, or one value. The learning rate is not
    searched: it follows the global batch by `objective.lr_rule`.
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
        """The settings that the user has given, by name; those of `ddp` by names such as "ddp.bucket_cap_mb"."""
        found = {name: getattr(self, name) for name in self.model_fields_set - {"ddp"}}
        if self.ddp is not None:
            found |= {
                f"{DDP_PREFIX}{name}": getattr(self.ddp, name) for name in self.ddp.model_fields_set
            }
        return dict(sorted(found.items()))


# What is searched for: what counts as better, and under which limits.


LrRule = Literal["auto", "linear", "sqrt", "none"]
"""How the learning rate follows the global batch; auto: by the optimizer."""

_BYTE_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)


def _parse_memory_limit(value: object) -> int | float:
    number = _number_of(value)
    if 0 < number <= 1:
        return number
    if 1 < number < inf and number == int(number):
        return int(number)
    rule = (
        'memory_limit must be bytes, a size such as "20GiB", or a fraction of the device in (0, 1]'
    )
    raise ValueError(f"{rule}, but got {value!r}")


def _parse_reserve(value: object) -> int | float:
    number = _number_of(value)
    if 0 < number < 1:
        return number
    if 0 <= number < inf and number == int(number) != 1:
        return int(number)
    rule = 'reserve must be 0, bytes, a size such as "4GiB", or a fraction of the device in (0, 1)'
    raise ValueError(f"{rule}, but got {value!r}")


def _number_of(value: object) -> float:
    """A number, also as text, or the bytes of a size; not a number for all else, and for a size of one byte or less."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return nan
    with suppress(ValueError):
        return float(value)
    with suppress(ValidationError):
        size = _BYTE_SIZE.validate_python(value)
        return size if size > 1 else nan
    return nan


_SIZE_SCHEMA = WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}]})
MemoryLimit = Annotated[
    int | float,
    BeforeValidator(_parse_memory_limit),
    _SIZE_SCHEMA,
]
"""A fraction of the device's memory where at most 1, bytes otherwise."""
MemoryReserve = Annotated[
    int | float,
    BeforeValidator(_parse_reserve),
    _SIZE_SCHEMA,
]
"""A fraction of the device's memory where below 1, bytes otherwise."""


class Objective(FrozenModel):
    """What counts as better, and under which limits."""

    memory_limit: MemoryLimit = 0.9
    """Bytes, a size such as "20GiB", or a fraction of the device's memory."""
    reserve: MemoryReserve = 0
    """Of it, what trials leave free for what training does beside steps, such as validation and
    checkpoints: bytes, a size such as "4GiB", or a fraction of the device's memory."""
    busy_weight: Annotated[float, Field(ge=0, le=1)] = 0.02
    """How much an idle device lowers the score: enough to choose between equals."""
    global_batch: Literal["scale", "keep"] = "scale"
    """`scale`: the global batch may grow, and the learning rate with it; `keep`: it stays, split
    differently."""
    max_batch_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 8
    """How far the global batch may grow beyond the baseline's."""
    larger_batch_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05
    """By how much, as measured, a larger global batch must beat the fastest at the baseline's own
    to be recommended, beside being faster beyond noise."""
    lr_rule: LrRule = "auto"
    """How the learning rate follows the global batch."""

    def limit_bytes(self, device_memory_bytes: int) -> int:
        """What a trial may take on a device with so many bytes, the limit less the reserve; not above 0: nothing."""
        return _bytes_of(self.memory_limit, device_memory_bytes) - self.reserve_bytes(
            device_memory_bytes
        )

    def reserve_bytes(self, device_memory_bytes: int) -> int:
        """What trials leave free below the memory limit."""
        return _bytes_of(self.reserve, device_memory_bytes)


def _bytes_of(size: float, device_memory_bytes: int) -> int:
    return int(size * device_memory_bytes) if isinstance(size, float) else size


# How much a search may spend.


ASSUMED_TRAINING_HOURS = 24.0
"""Of a training of which nothing is said: our convention."""
MAX_TRIALS = 40
"""Trials of a search whose number was left open: our convention."""


class Budget(FrozenModel):
    """Trials and seconds; the baseline is the first trial."""

    n_trials: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Measured trials; None: at most 40, and the search may stop by itself."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds for one call, proving the gain included; a search that goes on has them anew. None:
    no limit."""

    training_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Hours of training that are still to come: a search that may stop by itself tries nothing that
    costs more of them than it is expected to win. None: 24 are assumed."""

    @property
    def training_s(self) -> float:
        """Seconds of training that are still to come, as far as is known."""
        return 3600 * (self.training_hours or ASSUMED_TRAINING_HOURS)

    @property
    def max_trials(self) -> int:
        """The most trials that are measured."""
        return MAX_TRIALS if self.n_trials is None else self.n_trials

    @property
    def may_stop_early(self) -> bool:
        """Whether the search may stop by itself."""
        return self.n_trials is None


# How a search proceeds: what proposes its trials, and what it starts from.


Method = Literal["model", "tpe", "gp", "random", "grid"]


def checked_path(value: object, what: str) -> str | Path:
    """A path that a file system can take.

    Raises:
        ValueError: it is none; `what` should be given.
    """
    if not isinstance(value, str | Path) or value == "" or "\0" in str(value):
        raise ValueError(f"must be {what}, but got {value!r}")
    return value


def _check_source(value: object) -> object:
    return (
        None
        if value is None
        else checked_path(value, "the path of a run folder or of a recommended.yaml")
    )


class SearchOptions(FrozenModel):
    """What proposes trials, and what the search starts from."""

    method: Method = "model"
    """model: a model of this machine, learned during the search, with Optuna's TPE where it does
    not explain the measurements; trials that fall behind are stopped early. tpe, gp, random:
    Optuna's sampler of that name, tpe and gp after an expert's guesses. grid: every combination, in
    random order, of 20,000 at the most. With these each trial is measured to its end."""
    warm_start: Annotated[Path | None, BeforeValidator(_check_source)] = None
    """A run folder, or a recommended.yaml, of the same workload on another machine or of a similar
    one: what it found best is tried right after the baseline."""


# Where trials run: on this machine, or on the machines of a Ray cluster; and how a trial's ranks
# lie on its hosts.
#
# Comes in from the YAML border, the command line or a Python call; goes to the launcher and to the
# space.


ExecutorKind = Literal["local", "ray"]

_ADDRESS = re.compile(r"auto|(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def _check_address(address: str) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"] or 1) not in range(1, 2**16):
        rule = 'must be auto, or host and port of the cluster, such as "10.0.0.1:6379"'
        raise ValueError(f"{rule}, but got {short_repr(address)}")
    return address


class Executor(FrozenModel):
    """Who runs trials. A plain text is taken as the kind: `executor: ray`."""

    kind: ExecutorKind = "local"
    """local: this machine; ray: the machines of a Ray cluster."""
    address: Annotated[str, Field(strict=True), AfterValidator(_check_address)] | None = None
    """Of the Ray cluster, such as "10.0.0.1:6379"; None: the one that Ray finds by itself."""
    ranks: Literal["pack", "spread"] = "pack"
    """How the ranks of a trial lie on the cluster's machines: on as few as have room for them, or
    on as many as there are."""

    @model_validator(mode="before")
    @classmethod
    def _take_text_as_kind(cls, value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, Mapping | Executor):
            return value
        raise ValueError(
            f"must be local, ray, or a mapping of kind, address and ranks, but got "
            f"{short_repr(value)}"
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        idle = [f"{name}={value!r}" for name, value in given.items()]
        if self.kind == "local" and idle:
            raise ValueError(
                "address and ranks say how to use a Ray cluster, and have no effect on this "
                "machine alone, but got "
                f"kind='local' with {' and '.join(idle)}; set kind: ray, or leave them out"
            )
        return self


def places(ranks: int, *, hosts: int, per_host: int, spread: bool) -> tuple[int, ...]:
    """How many ranks of a trial lie on each host that it uses, as even as possible, the larger numbers first.

    Args:
        ranks: of the trial.
        hosts: that there are.
        per_host: ranks that a host has room for.
        spread: use as many hosts as possible, not as few.

    Raises:
        ValueError: they do not fit.
    """
    if min(ranks, hosts, per_host) < 1 or ranks > hosts * per_host:
        raise ValueError(
            "a trial's ranks, one or more, must fit on its hosts, but got "
            f"(ranks={ranks}, hosts={hosts}, per_host={per_host})"
        )
    used = min(ranks, hosts) if spread else -(-ranks // per_host)
    share, more = divmod(ranks, used)
    return (*[share + 1] * more, *[share] * (used - more))


# A search or a diagnosis, parsed and checked once: what the YAML border and the Python call both
# make.
#
# Comes in: a file's sections or a call's arguments, by the same names. Goes out: a Plan, which
# everything after trusts.


_COUNTED_DEVICES = frozenset({"cuda", "xpu", "hpu", "mlu", "mtia", "musa", "npu", "privateuseone"})
"""Kinds of device of which a machine may have several: torch's own (torch.device) and those of its
plug-ins."""


def _check_device(value: str, info: ValidationInfo) -> str:
    kind, colon, index = value.partition(":")
    if value not in {"auto", "cpu", "mps"} and not (
        kind in _COUNTED_DEVICES and (index.isdecimal() or not colon)
    ):
        raise ValueError(f"must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, but got {value!r}")
    executor = info.data.get("executor")  # missing where it is wrong itself
    if executor is not None and executor.kind == "ray" and colon:
        rule = "must name a kind of device with executor ray, which gives each rank a device of its host"
        raise ValueError(f"{rule}, but got {value!r}; write {kind}")
    return value


def _check_run_dir(value: object) -> object:
    try:
        return None if value is None else Path(checked_path(value, "a folder's path")).expanduser()
    except RuntimeError:
        raise ValueError(
            f"'~' must stand for a known home folder, but got {value!r}; write the path out"
        ) from None


class ReadOver(NamedTuple):
    """Where a setting comes from that was read over from a framework's own file."""

    name: str
    """The file's own name for it."""
    optimizer: str | None = None
    """The class of the optimizer that `fused` is of there; None: not known."""


@validated_dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True),
)
class Plan:
    """Everything that a search is asked for."""

    name: Annotated[str, Field(exclude=True)]  # no key of the YAML file
    """A few words for reports: the configuration file's name, the model's class, or the command's
    script."""
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
    """torch's name for the device; "auto": the accelerator where there is one, else the CPU."""
    run_dir: Annotated[Path | None, BeforeValidator(_check_run_dir)] = None
    """None: a new folder below ./runs."""
    notes: Annotated[tuple[Note, ...], Field(exclude=True)] = ()  # no key of the YAML file
    """What could not be taken over from a caller's own objects."""
    read_over: Annotated[Mapping[str, ReadOver], Field(exclude=True)] = Field(default_factory=dict)
    """Settings of the baseline that a framework's own file says, and its user may never have
    chosen; no key of the YAML file."""
    policy: Annotated[Policy, SkipValidation, Field(exclude=True)] = (
        POLICY  # no key of the YAML file
    )
    """Thresholds and shares of the search; tests and benchmarks vary them."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = (
        0  # numpy.random.seed takes no larger one
    )
    """Of the search's proposals, and of every trial."""
