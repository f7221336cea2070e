"""TrainingConfig: the settings of one training run, proposed, run, stored, recommended and exported as one type.

Comes in: a user's mapping, a study's proposal or a recommended.yaml. Goes out: to a trial, and to the user's own loop
through `dataloader_kwargs`, `autocast` and `grad_scaler`, the only places here that import torch (when called).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from autotune.frozen import FrozenModel
from autotune.settings.contradictions import loader_contradiction
from autotune.settings.float32_precision import tf32_products

if TYPE_CHECKING:
    import torch

__all__ = [
    "AMP_DTYPES",
    "LOADER_SETTINGS",
    "TORCH_BUCKET_CAP_MB",
    "TORCH_FIRST_BUCKET_MB",
    "TORCH_PREFETCH_FACTOR",
    "AmpDtype",
    "DdpConfig",
    "TrainingConfig",
]

AmpDtype = Literal["float32", "tf32", "bfloat16", "float16"]
AMP_DTYPES: tuple[AmpDtype, ...] = get_args(AmpDtype)
"""From the most to the least exact."""

LOADER_SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
"""Arguments of torch.utils.data.DataLoader that are settings here, under their own names."""
TORCH_PREFETCH_FACTOR = 2
"""torch.utils.data.DataLoader's own, where workers load and None is given."""
TORCH_BUCKET_CAP_MB = 25.0
"""DistributedDataParallel's own, where no bucket_cap_mb is given."""
TORCH_FIRST_BUCKET_MB = 1.0
"""Its first bucket, where no bucket_cap_mb is given: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""

_Count = Annotated[int, Field(strict=True, ge=1)]
_CountOrZero = Annotated[int, Field(strict=True, ge=0)]
_Flag = Annotated[bool, Field(strict=True)]
_Megabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DdpConfig(FrozenModel):
    """Arguments of torch.nn.parallel.DistributedDataParallel, under its own names."""

    bucket_cap_mb: _Megabytes | None = None
    """Size of a gradient bucket in MiB; None: torch's own (25)."""
    first_bucket_mb: _Megabytes | None = None
    """Size of the bucket that is exchanged first; None: torch's own (1, or bucket_cap_mb where that is given)."""
    gradient_as_bucket_view: _Flag = False
    """Let gradients be views into the buckets; saves about the gradients' size."""
    static_graph: _Flag = False
    """Promise that every iteration uses the same graph."""
    find_unused_parameters: _Flag = False
    """Look for parameters that got no gradient, each iteration."""
    broadcast_buffers: _Flag = True
    """Send rank 0's buffers to the others before each forward pass."""
    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """Compression of the gradients on their way."""


class TrainingConfig(FrozenModel):
    """The settings of one training run. Equal settings are equal objects.

    Raises:
        pydantic.ValidationError: a value is out of its range, or two settings contradict each other.
    """

    micro_batch_size: _Count = 32
    """Samples of one forward and backward pass, on one rank."""
    grad_accum_steps: _Count = 1
    """Forward and backward passes for one optimizer step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate of the optimizer."""
    amp_dtype: AmpDtype = "float32"
    """Precision of the computation: float32 leaves torch's defaults, tf32 allows TF32 in matmuls and convolutions,
    bfloat16 and float16 run under autocast, float16 with a GradScaler."""
    num_workers: _CountOrZero = 0
    """Loader processes; 0: the training process loads."""
    prefetch_factor: _Count | None = None
    """Batches that each worker prepares in advance; None: torch's own (2), the only value without workers."""
    persistent_workers: _Flag = False
    """Keep the workers from one epoch to the next."""
    pin_memory: _Flag = False
    """Page-locked batches, copied to the device with non_blocking=True."""
    in_order: _Flag = True
    """Batches in the sampler's order; False: in the order in which workers finish them, so that a slow one holds up no
    other, and two runs of one seed are not alike bit for bit. Not searched unless it is listed."""
    channels_last: _Flag = False
    """Keep 4-D tensors of the model and the batch in channels-last layout."""
    compile: _Flag = False
    """Run the model through torch.compile."""
    intra_op_threads: _Count | None = None
    """Threads of one operation on the CPU (torch.set_num_threads); None: torch's own."""
    world_size: _Count = 1
    """Ranks, each a process with a device of its own."""
    strategy: Literal["single", "dp", "ddp"] = "single"
    """One device, DataParallel, or DistributedDataParallel. A model in DataParallel can't be compiled."""
    ddp: DdpConfig | None = None
    """Arguments of DistributedDataParallel; None: torch's own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        reason = loader_contradiction(self.num_workers, self.loader_settings) or self._strategy_contradiction()
        if reason is not None:
            raise ValueError(reason)
        return self

    @property
    def process_count(self) -> int:
        """Processes that train side by side: one a rank under ddp, one otherwise."""
        return self.world_size if self.strategy == "ddp" else 1

    @property
    def loader_batch_size(self) -> int:
        """Samples of a batch that one process loads: under dp the one process loads for all of its devices."""
        return self.micro_batch_size * self.world_size // self.process_count

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    @property
    def loader_settings(self) -> dict[str, object]:
        """The settings that a DataLoader takes under their own names; all others are the step's."""
        return {name: getattr(self, name) for name in LOADER_SETTINGS}

    @property
    def batches_per_worker(self) -> int:
        """Batches that each worker prepares in advance, torch's number where none is given; 0 without workers."""
        return (self.prefetch_factor or TORCH_PREFETCH_FACTOR) if self.num_workers else 0

    def dataloader_kwargs(self) -> dict[str, Any]:
        """Arguments for torch.utils.data.DataLoader in each process: under dp, `batch_size` is that of all devices."""
        return {"batch_size": self.loader_batch_size, **self.loader_settings}

    def autocast(self, device: str | torch.device) -> AbstractContextManager[Any]:
        """A context for forward pass and loss in this precision, on a device such as "cuda:0"; may be entered again.

        float32 changes nothing. tf32 sets torch's precision of float32 products for the whole process while it is
        entered, and puts it back after it; enter it once, around the whole loop: the backward pass belongs to it, and
        while it is entered or left other threads may compute in another precision for some microseconds. Under strategy
        dp, enter bfloat16 inside the model's forward: DataParallel takes float16 in its threads, whatever it is called
        under.
        """
        import torch

        device_type = torch.device(device).type
        if self.amp_dtype == "tf32":
            return tf32_products()
        if self.amp_dtype == "float32":
            return torch.autocast(device_type, enabled=False)
        return torch.autocast(device_type, dtype=getattr(torch, self.amp_dtype))

    def grad_scaler(self, device: str | torch.device) -> torch.amp.GradScaler:
        """A GradScaler for this precision: active for float16, a pass-through otherwise."""
        import torch

        return torch.amp.GradScaler(torch.device(device).type, enabled=self.amp_dtype == "float16")

    def _strategy_contradiction(self) -> str | None:
        """Why the strategy can't have the other settings, or None.

        Source on compiling under DataParallel: torch compiles the frames of the thread that has entered the compiled
        module (set_eval_frame, torch/csrc/dynamo/eval_frame.c), and replicas run in other threads
        (torch/nn/parallel/parallel_apply.py); "it falls back to the non-compile speed", pytorch/pytorch#94636. A module
        that is compiled first and replicated then runs on the first device's weights: its forward is bound to it
        (Module._replicate_for_data_parallel).
        """
        if self.strategy == "single" and self.world_size != 1:
            return f"strategy 'single' has one rank, but got world_size={self.world_size}; set strategy: ddp"
        if self.strategy != "ddp" and self.ddp is not None:
            return f"ddp settings need strategy 'ddp', but got strategy {self.strategy!r}; leave ddp out"
        if self.strategy == "dp" and self.world_size > 1 and self.compile:
            return (
                "compile can't stand with strategy 'dp', whose replicas run in threads of their own, where torch "
                "compiles nothing, but got compile=True; set strategy: ddp, or compile: false"
            )
        if self.ddp is not None and self.ddp.static_graph and self.grad_accum_steps > 1:
            return (
                "ddp.static_graph can't stand with gradient accumulation (torch ends in an internal assert), but got "
                f"grad_accum_steps={self.grad_accum_steps}; set static_graph: false"
            )
        return None
