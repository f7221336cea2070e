"""`TrainingConfig`: the settings of one training run, and the combinations that contradict each other.

The same type is proposed, run, stored, recommended and exported. Its methods for a user's own
loop (`prepare`, `loader`, `autocast`, ...) import `autotune.apply` and `autotune.export`, and with
them torch, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, StrictBool, model_validator

from autotune.frozen import FrozenModel
from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from autotune.apply.prepare import Accumulator
    from autotune.export.table import Export


TORCH_BUCKET_CAP_MB = 25.0
"""Default bucket_cap_mb of DistributedDataParallel, in MiB."""
TORCH_FIRST_BUCKET_MB = 1.0
"""Default size of its first bucket, in MiB: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""

_Megabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DdpConfig(FrozenModel):
    """Arguments of torch.nn.parallel.DistributedDataParallel, under its own names."""

    bucket_cap_mb: _Megabytes | None = None
    """Size of a gradient bucket in MiB. None: torch's default (25)."""
    first_bucket_mb: _Megabytes | None = None
    """Size of the first bucket in MiB. None: torch's default (1, or bucket_cap_mb if given)."""
    gradient_as_bucket_view: StrictBool = False
    """Make gradients views into the buckets, which saves about their size in memory."""
    static_graph: StrictBool = False
    """Promise that every iteration uses the same graph."""
    find_unused_parameters: StrictBool = False
    """Search for parameters without a gradient in each iteration."""
    broadcast_buffers: StrictBool = True
    """Send rank 0's buffers to the other ranks before each forward pass."""
    comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None
    """Compression of the gradients that ranks exchange."""


# Rules that hold on any machine, for any workload. Those that depend on either are in
# space/constraints.


NEUTRAL_WITHOUT_WORKERS = {
    setting.name: setting.neutral for setting in SETTINGS if setting.needs == "num_workers"
}
"""Settings that only loader workers use, each with the value that it must have without workers."""
_NEEDED = {"num_workers": "loader workers", "compile": "compile: true"}


def _contradictions(config: TrainingConfig) -> Iterator[str]:
    """Yield why settings contradict each other.

    Source on compiling under DataParallel: torch compiles the frames of the thread that entered
    the compiled module (set_eval_frame, torch/csrc/dynamo/eval_frame.c), but replicas run in other
    threads (torch/nn/parallel/parallel_apply.py); "it falls back to the non-compile speed",
    pytorch/pytorch#94636. A module that is compiled before it is replicated uses the first device's
    weights on all: its forward is bound to it (Module._replicate_for_data_parallel).
    """
    for setting in SETTINGS:
        needs = setting.needs
        if needs is None or getattr(config, needs):
            continue
        value = getattr(config, setting.name)
        if value != setting.neutral:
            seen = f"{needs}={getattr(config, needs)} and {setting.name}={value!r}"
            yield (
                f"{setting.name} needs {_NEEDED[needs]}, but got {seen}; "
                f"leave {setting.name} out or set {needs}"
            )
    if config.strategy == "single" and config.world_size != 1:
        yield f"strategy 'single' has one rank, but got world_size={config.world_size}; set strategy: ddp"
    if config.ddp is not None and not config.is_ddp:
        yield f"ddp settings need strategy 'ddp', but got strategy {config.strategy!r}; leave ddp out"
    if config.is_dp and config.world_size > 1 and config.compile:
        yield (
            "compile can't be combined with strategy 'dp', in whose threads torch compiles nothing, "
            "but got compile=True; set strategy: ddp, or compile: false"
        )
    if config.ddp_settings.static_graph and config.grad_accum_steps > 1:
        yield (
            "ddp.static_graph can't be combined with gradient accumulation (torch ends in an internal "
            f"assert), but got grad_accum_steps={config.grad_accum_steps}; set static_graph: false"
        )


AmpDtype = Literal["float32", "tf32", "bfloat16", "float16"]
AMP_DTYPES: tuple[AmpDtype, ...] = get_args(AmpDtype)
"""Precisions, from the most to the least exact."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""Modes of torch.compile."""
_GRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})
NumaBinding = Literal["node", "exclusive"]
"""Values of torchrun's --numa-binding."""

TORCH_PREFETCH_FACTOR = 2
"""Default prefetch_factor of torch.utils.data.DataLoader with workers."""

_Count = Annotated[int, Field(strict=True, ge=1)]
_CountOrZero = Annotated[int, Field(strict=True, ge=0)]
_AUTOCAST = frozenset({"bfloat16", "float16"})


class TrainingConfig(FrozenModel):
    """The settings that autotune tunes: batch, precision, data loading, compilation, devices.

    A search returns one as `result.best`. Use it in your own loop, or export it with `to`:

        model = config.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), **config.optimizer_kwargs())
        loader = DataLoader(dataset, shuffle=True, **config.dataloader_kwargs())

    Configurations are immutable; equal settings are equal objects.

    Raises:
        pydantic.ValidationError: A value is out of range, or two settings contradict each other.
    """

    micro_batch_size: _Count = 32
    """Samples per forward and backward pass on one rank."""
    max_tokens: _Count | None = None
    """Tokens per batch, padding included, for a token-budget batch sampler; None: no budget. With a
    budget, `micro_batch_size` is the average number of samples in such a batch."""
    grad_accum_steps: _Count = 1
    """Forward and backward passes per optimizer step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate of the optimizer."""
    amp_dtype: AmpDtype = "float32"
    """Precision: float32 leaves torch's defaults; tf32 allows TF32 in matmuls and convolutions;
    bfloat16 and float16 use autocast, float16 with a GradScaler."""
    num_workers: _CountOrZero = 0
    """Loader processes; 0: the training process loads."""
    prefetch_factor: _Count | None = None
    """Batches that each worker loads in advance; None: torch's default (2), and the only value
    without workers."""
    persistent_workers: StrictBool = False
    """Keep the workers between epochs."""
    pin_memory: StrictBool = False
    """Load into page-locked memory, and copy to the device with non_blocking=True."""
    in_order: StrictBool = True
    """Return batches in the sampler's order. False: as workers finish them, so that a slow one
    delays no other; two runs with one seed then differ."""
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None
    """Start method of loader workers; None: your loader's or torch's default. Other methods than
    fork start more slowly, and need a dataset that can be pickled."""
    worker_threads: _Count | None = None
    """Threads per operation in each loader worker, for torch, OpenCV, BLAS and OpenMP; None: their
    defaults, one for torch and one per core for the others. In forked workers torch always has
    one."""
    channels_last: StrictBool = False
    """Keep 4-D tensors of model and batch in channels-last memory format."""
    compile: StrictBool = False
    """Compile the model with torch.compile."""
    compile_mode: CompileMode = "default"
    """Mode of torch.compile; reduce-overhead records CUDA graphs."""
    cudnn_benchmark: StrictBool = False
    """Let cuDNN time its algorithms for each new shape and use the fastest
    (torch.backends.cudnn.benchmark)."""
    fused: StrictBool = False
    """Use the optimizer's fused implementation: one kernel for the whole step."""
    intra_op_threads: _Count | None = None
    """CPU threads per operation (torch.set_num_threads); None: torch's default."""
    world_size: _Count = 1
    """Number of ranks, each with its own device."""
    strategy: Literal["single", "dp", "ddp"] = "single"
    """One device, DataParallel, or DistributedDataParallel. DataParallel can't be compiled."""
    ddp: DdpConfig | None = None
    """Arguments of DistributedDataParallel; None: torch's defaults."""
    numa_binding: NumaBinding | None = None
    """Cores for a rank and its workers: all of its device's NUMA node ("node"), or a share of them
    for itself ("exclusive"); None: all cores."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for reason in _contradictions(self):
            raise ValueError(reason)
        return self

    @property
    def by_name(self) -> dict[str, Any]:
        """Values by the names in settings_table; `ddp` is flattened to "ddp.static_graph" and so on."""
        values = self.model_dump(exclude={"ddp"})
        ddp = self.ddp_settings.model_dump()
        return values | {f"{DDP_PREFIX}{name}": value for name, value in ddp.items()}

    @property
    def is_ddp(self) -> bool:
        """True under DistributedDataParallel."""
        return self.strategy == "ddp"

    @property
    def is_dp(self) -> bool:
        """True under DataParallel."""
        return self.strategy == "dp"

    @property
    def ddp_settings(self) -> DdpConfig:
        """Arguments of DistributedDataParallel, torch's defaults if none are given."""
        return self.ddp or DdpConfig()

    @property
    def is_half(self) -> bool:
        """True if forward pass and loss run under autocast, in bfloat16 or float16."""
        return self.amp_dtype in _AUTOCAST

    @property
    def has_workers(self) -> bool:
        """True if worker processes load."""
        return self.num_workers > 0

    @property
    def process_count(self) -> int:
        """Number of training processes: one per rank under ddp, else one."""
        return self.world_size if self.is_ddp else 1

    @property
    def devices_per_process(self) -> int:
        """Number of devices that a training process uses: several under dp."""
        return self.world_size // self.process_count

    @property
    def loader_batch_size(self) -> int:
        """Samples in a batch that one process loads; under dp it loads for all devices."""
        return self.micro_batch_size * self.devices_per_process

    @property
    def loader_max_tokens(self) -> int | None:
        """Tokens in a batch that one process loads; None without a token budget."""
        if self.max_tokens is None:
            return None
        return self.max_tokens * self.devices_per_process

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks; an average with a token budget."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    def global_batch_ratio(self, other: TrainingConfig) -> float:
        """Return this global batch divided by another's, in tokens if both have a budget, else in samples."""
        if self.max_tokens is None or other.max_tokens is None:
            return self.global_batch_size / other.global_batch_size
        own = self.max_tokens * self.grad_accum_steps * self.world_size
        return own / (other.max_tokens * other.grad_accum_steps * other.world_size)

    @property
    def records_graphs(self) -> bool:
        """True if torch.compile records CUDA graphs on a device that has them."""
        return self.compile and self.compile_mode in _GRAPH_MODES

    @property
    def loader_settings(self) -> dict[str, object]:
        """Settings that are arguments of a DataLoader, by its names."""
        return {name: getattr(self, name) for name in LOADER_ARGUMENTS}

    @property
    def batches_per_worker(self) -> int:
        """Batches that each worker loads in advance; 0 without workers."""
        if not self.has_workers:
            return 0
        return self.prefetch_factor or TORCH_PREFETCH_FACTOR

    def dataloader_kwargs(
        self, worker_init_fn: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Return the arguments for torch.utils.data.DataLoader in each training process.

        Under dp, `batch_size` counts the samples for all devices. With a token budget it is left
        out: pass `max_tokens` to your batch sampler.

        Args:
            worker_init_fn: Your own function; it runs after the one that sets `worker_threads`.
        """
        arguments = self.loader_settings
        if self.multiprocessing_context is None:  # yours, or torch's default
            del arguments["multiprocessing_context"]
        if self.max_tokens is None:
            arguments = {"batch_size": self.loader_batch_size, **arguments}
        if self.worker_threads is not None:
            from autotune.apply.cores import limited

            worker_init_fn = limited(worker_init_fn, self.worker_threads)
        if worker_init_fn is not None:
            arguments["worker_init_fn"] = worker_init_fn
        return arguments

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy of your DataLoader with these settings, as trials use it.

        The batch size changes only if the loader itself makes the batches, not a batch sampler of
        yours or the dataset. With several ranks, you provide the DistributedSampler.
        """
        from autotune.apply.loader import inner_loader, loader_like

        inner = inner_loader(loader)
        return loader_like(
            inner, self.loader_settings, self.loader_batch_size, worker_threads=self.worker_threads
        )

    def prepare(self, model: nn.Module, device: str | torch.device | None = None) -> nn.Module:
        """Return the model as trials train it, and set up this process like a trial's.

        The model is moved to the device and into its memory format in place, then wrapped
        (DistributedDataParallel or DataParallel) and compiled as the settings say. Make the
        optimizer afterwards. Also set for the whole process, and not restored: the current device,
        the threads per operation, cuDNN's benchmark (left as it is if `cudnn_benchmark` is False)
        and, with tf32, the precision of float32 products. So prepare one configuration per process.

        You still provide each rank's DistributedSampler, call `model.train()`, and start training
        with the trials' malloc settings (see the head of recommended.yaml). With `compile`, the
        trials' compile cache is reused unless you have set TORCHINDUCTOR_CACHE_DIR.

        Args:
            model: The model, neither compiled nor wrapped.
            device: A device such as "cuda:0". None: the accelerator's current device, or that of
                LOCAL_RANK under torchrun; the CPU without an accelerator.

        Raises:
            ConfigError: A process group of another size than this configuration's is open.
            RuntimeError, ValueError: torch has no such device, or under ddp no process group is
                open (see torch.distributed.init_process_group).
        """
        from autotune.apply.prepare import prepared

        return prepared(self, model, device)

    def to_device(self, batch: Any, device: str | torch.device | None = None) -> Any:
        """Return a batch on the device, in this memory format; copies from pinned memory don't block.

        Args:
            batch: A tensor, a container of tensors (mapping, tuple, list, dataclass), or an object
                with a method `to`.
            device: The device given to `prepare`. None: the current device, which `prepare` set.
        """
        import torch

        from autotune.apply.cores import own_device
        from autotune.apply.loader import moved

        place = own_device(is_rank=False) if device is None else torch.device(device)
        return moved(batch, place, channels_last=self.channels_last, non_blocking=self.pin_memory)

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return the arguments for an optimizer of torch: `lr`, and `fused` if it is on."""
        if self.fused:
            return {"lr": self.lr, "fused": True}
        return {"lr": self.lr}

    def accumulator(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: str | torch.device | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Accumulator:
        """Return an Accumulator, which runs backward passes and optimizer steps as trials do.

        Args:
            model: The model that `prepare` returned.
            optimizer: An optimizer of its parameters, made with `optimizer_kwargs`.
            device: The training device; None: that of the model's first parameter.
            scaler: Your own GradScaler for float16; None: one from `grad_scaler`.
        """
        import torch

        from autotune.apply.prepare import Accumulator

        place = device or next((parameter.device for parameter in model.parameters()), "cpu")
        # A compiled model passes no_sync on.
        no_sync = None
        if self.is_ddp and not self.ddp_settings.static_graph:
            no_sync = getattr(model, "no_sync", None)
        return Accumulator(
            optimizer=optimizer,
            scaler=scaler or self.grad_scaler(place),
            steps=self.grad_accum_steps,
            device_type=torch.device(place).type,
            autocast=partial(self.autocast, place) if self.is_half else None,
            no_sync=no_sync,
            gathers=self.is_dp,
            records_graphs=self.records_graphs and torch.device(place).type == "cuda",
        )

    def autocast(self, device: str | torch.device) -> AbstractContextManager[Any]:
        """Return a reusable context for forward pass and loss in this precision.

        float32 changes nothing. tf32 sets the precision of float32 products for the whole process
        while it is active: enter it once around the whole loop, backward passes included, or call
        `prepare`, which sets it for good. Under dp the model must come from `prepare`, since
        torch's DataParallel always uses float16 in its threads.

        Args:
            device: The training device, such as "cuda:0".
        """
        import torch

        from autotune.apply.precision import tf32_products

        device_type = torch.device(device).type
        if self.amp_dtype == "tf32":
            return tf32_products()
        if self.amp_dtype == "float32":
            return torch.autocast(device_type, enabled=False)
        return torch.autocast(device_type, dtype=getattr(torch, self.amp_dtype))

    def grad_scaler(self, device: str | torch.device) -> torch.amp.GradScaler:
        """Return a GradScaler for this precision: active for float16, else a pass-through."""
        import torch

        return torch.amp.GradScaler(torch.device(device).type, enabled=self.amp_dtype == "float16")

    def to(self, target: str, *, device: str | None = None, optimizer: str | None = None) -> Export:
        """Return these settings as another framework takes them.

        Args:
            target: One of hf, accelerate, lightning, deepspeed, torchrun, timm, axolotl,
                ultralytics and composer.
            device: The training device, such as "cpu", which some frameworks need to know; None:
                the framework chooses.
            optimizer: The class of your optimizer, such as "AdamW", which some frameworks need for
                `lr`.

        Returns:
            The text for the framework, and lists of the settings that it can't take and of its
            defaults that differ from trials.

        Raises:
            ConfigError: There is no such target.
        """
        from autotune.export.registry import export_to

        return export_to(self, target, device=device, optimizer=optimizer)


LOADER_ARGUMENTS = tuple(
    name for name in TrainingConfig.model_fields if BY_NAME[name].is_loader_argument
)
"""Settings that are arguments of torch.utils.data.DataLoader, by its names."""
LOADER_SETTINGS = tuple(name for name in TrainingConfig.model_fields if BY_NAME[name].is_of_loader)
"""Settings that affect the loader and not the step."""
