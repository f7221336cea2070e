"""What is trained: references from a YAML file or live objects from a Python call, and the facts that a probe finds.

A Workload is what a trial builds its model, data and step from. Only the worker opens live objects.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator
from pydantic.dataclasses import dataclass as validated_dataclass

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.settings.applied.tf_data import TfData
from autotune.settings.command import command_fault, command_words
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "BESIDE_A_COMMAND",
    "BESIDE_A_LOADER",
    "INSTALLED",
    "PARTS",
    "READ_PART",
    "LoaderSite",
    "ObjectFacts",
    "OptimizerFacts",
    "Ref",
    "ScriptFacts",
    "StartMethod",
    "Workload",
    "WorkloadFacts",
    "beside_tf_data",
]

READ_PART = "read_part"
"""Key of the validation context: the function by which a border that writes parts as text reads one."""

BESIDE_A_COMMAND = "nothing can stand beside workload.command, whose script decides all else"

StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A place in the user's code, resolved inside the trial: "pkg.mod:name" or "path/to/file.py:name".

    `folders` are tried in order for a relative path: the configuration file's folder, then the working directory.
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


_Command = Annotated[tuple[str, ...] | None, BeforeValidator(_read_command), AfterValidator(_check_command)]


@validated_dataclass(
    frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True)
)
class Workload:
    """The user's training job: a model and a dataset, each a live object or a Ref, or the command of a script.

    Of a DataLoader trials have copies with their own settings; its own are the baseline where that says nothing else.
    """

    model: _Part = None
    """an nn.Module, or a function without arguments that returns one (in YAML: "train.py:build_model")"""
    dataset: _Part = None
    """a Dataset or a DataLoader, or a function without arguments that returns one (in YAML: "train.py:make_dataset")"""
    command: _Command = None
    """what starts a training script, in place of all else here: [python, train.py, --lr, "{lr}"], or one text that is
    split as a shell does; placeholders stand for settings that the script takes as words of its own"""
    loss: _Part = None
    """loss(outputs, targets) -> scalar."""
    step: _Part = None
    """step(model, batch) -> scalar loss, for what inference does not cover."""
    optimizer: _Part = None
    """optimizer(params, lr) -> torch.optim.Optimizer, or an optimizer of the model's parameters, of which class, groups
    and settings are taken; None: SGD."""
    collate_fn: _Part = None
    """collate_fn(items) -> batch, as of torch's DataLoader; None: torch's own."""
    sampler: _Part = None
    """A Sampler, or a callable: sampler(dataset) -> Sampler. Takes the place of shuffling."""
    batch_sampler: _Part = None
    """A batch sampler, or a callable: batch_sampler(dataset, batch_size) -> iterable of index lists; one with a
    parameter `max_tokens` fills a token budget: batch_sampler(dataset, max_tokens=4096), see `baseline.max_tokens`."""
    worker_init_fn: _Part = None
    """worker_init_fn(worker_id), called in each loader worker as it starts."""
    shuffle: _Flag = True
    """Load the items in random order, anew each epoch. A DataLoader keeps its own order."""
    drop_last: _Flag = True
    """Leave out an epoch's last batch where it is smaller than the others. A DataLoader keeps its own way."""
    multiprocessing_context: StartMethod | None = None
    """How loader workers start; None: Python's default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        idle = [name for name in PARTS if getattr(self, name) is not None]
        idle += [name for name in _SWITCHES if not getattr(self, name)]
        if self.command is not None and idle:
            raise ValueError(f"{BESIDE_A_COMMAND}, but got {', '.join(idle)}; leave out what you don't need")
        fault = beside_tf_data(self) if isinstance(self.dataset, TfData) else None
        if fault is not None:
            raise ValueError(fault)
        return self


INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders that hold installed packages, by their own names."""
_SWITCHES = ("shuffle", "drop_last")
BESIDE_A_LOADER = ("collate_fn", "sampler", "batch_sampler", "worker_init_fn", "multiprocessing_context")
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
        f"{', '.join(idle)} beside it; leave that out, and do it in the function that TfData builds it by"
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
    """Files and folders that its first trial has made and that could not be removed, or may be somebody else's."""
    is_in_process: bool = True
    """It runs in the trial's own process; else a launcher or a shell starts it."""
    placeholders: tuple[str, ...] = ()
    """Settings that the command takes as words of its own."""
    device: str = "cpu"
    """Where its parameters lie, by torch's name."""

    @property
    def own_loader(self) -> LoaderSite | None:
        """Where the script itself makes its training loader; None where only an installed package makes one."""
        own = (site for site in reversed(self.loaders) if not INSTALLED & set(PurePath(site.file).parts))
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
    """Arguments of a loader that were given beside the DataLoader, in place of its own, such as "collate_fn"."""


class WorkloadFacts(FrozenModel):
    """What the probe has found: one training step of the workload, in a process of its own."""

    dataset_length: int | None
    """Items of one epoch; None where the dataset has no length."""
    is_iterable: bool
    """The dataset is an IterableDataset."""
    is_sharded: bool = True
    """Whether several loader workers share the data out among them (an unsharded iterable repeats it)."""
    is_tf_data: bool = False
    """The dataset is a tf.data pipeline, loaded by threads of its own."""
    fixed_batch_size: int | None = None
    """Batch size that the user's own batch sampler imposes."""
    has_token_budget: bool = False
    """The user's batch sampler takes `max_tokens`: that is searched in place of the micro batch, which follows it."""
    budget_samples: float | None = None
    """Samples that a batch of the baseline's token budget holds on average; None without a budget, and where the
    sampler takes a batch size beside it."""
    has_4d_input: bool
    """A batch has a tensor of four dimensions, such as images."""
    parameter_count: int
    """Numbers in all parameters."""
    trainable_parameter_count: int = 0
    """Numbers in the parameters that require a gradient: what an optimizer keeps state for. 0: not known."""
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
    """The user's code asks torch for deterministic algorithms, or cuDNN for them: nothing that undoes it is tried."""
    slow_tail_fraction: float | None = None
    """Share of the time of the items that were looked at in items of over 8 times the median; None: not known."""
    cores_per_item: float | None = None
    """Cores that an item keeps busy while it is computed, by threads that are not torch's; None: not known."""
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
