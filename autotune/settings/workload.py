"""What is trained: references from a YAML file or live objects from a Python call, and the facts that a probe finds.

A Workload is what a trial builds its model, data and step from. Only the worker opens live objects.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from autotune.frozen import FrozenModel

__all__ = ["PARTS", "OptimizerFacts", "Ref", "StartMethod", "Workload", "WorkloadFacts"]

StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A place in the user's code, resolved inside the trial: "pkg.mod:name" or "path/to/file.py:name".

    `folders` are tried in order for a relative path: the configuration file's folder, then the working directory.
    """

    target: str
    folders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The user's training job. Each part is a live object or a Ref."""

    model: Any
    """nn.Module, or a zero-argument callable that returns one."""
    dataset: Any
    """Dataset, IterableDataset, or a zero-argument callable that returns one."""
    loss: Any = None
    """loss(outputs, targets) -> scalar."""
    step: Any = None
    """step(model, batch) -> scalar loss, for what inference does not cover."""
    optimizer: Any = None
    """optimizer(params, lr) -> torch.optim.Optimizer; None: SGD."""
    collate_fn: Any = None
    sampler: Any = None
    """A Sampler, or a callable: sampler(dataset) -> Sampler. Takes the place of shuffling."""
    batch_sampler: Any = None
    """A batch sampler, or a callable: batch_sampler(dataset, batch_size) -> iterable of index lists."""
    worker_init_fn: Any = None
    shuffle: bool = True
    drop_last: bool = True
    multiprocessing_context: StartMethod | None = None
    """How loader workers start; None: Python's default."""


PARTS = tuple(field.name for field in fields(Workload) if field.name not in {"shuffle", "drop_last"})
"""The parts of a workload that are the user's objects or references (and the start method)."""


class OptimizerFacts(FrozenModel):
    """The optimizer that the workload builds, as far as learning-rate rules need it."""

    name: str
    """The class's name, such as "AdamW"."""
    betas: tuple[float, float] | None = None
    eps: float | None = None


class WorkloadFacts(FrozenModel):
    """What the probe has found: one training step of the workload, in a process of its own."""

    dataset_length: int | None
    """Items of one epoch; None where the dataset has no length."""
    is_iterable: bool
    is_sharded: bool = True
    """Whether several loader workers share the data out among them (an unsharded iterable repeats it)."""
    fixed_batch_size: int | None = None
    """Batch size that the user's own batch sampler imposes."""
    has_4d_input: bool
    parameter_count: int
    gradient_bytes: int = 0
    """Bytes of all gradients: what the ranks of a group exchange each step."""
    has_buffers: bool = False
    """The model has buffers, such as the running averages of batch norm, which ranks may share."""
    has_unused_parameters: bool = False
    """Some parameters that require a gradient got none in one step: DDP must search for them."""
    optimizer: OptimizerFacts
    step_source: str
    """How the loss is computed, in words: what the user gave, or what was inferred."""
