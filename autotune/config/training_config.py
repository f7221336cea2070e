"""`TrainingConfig`: every setting that is searched, with the combinations that contradict each other.

The same object is proposed, run, stored, recommended and exported. Its methods for a user's own
loop (`prepare`, `loader`, `autocast`, ...) import `autotune.apply` and `autotune.export` when they
are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from autotune.frozen import FrozenModel
from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from autotune.apply.prepare import Accumulator
    from autotune.export.table import Export


# DdpConfig: the arguments of DistributedDataParallel that are settings here.
#
# Part of a TrainingConfig; a model is wrapped with them in applied/parallel.


TORCH_BUCKET_CAP_MB = 25.0
"""DistributedDataParallel's own, where no bucket_cap_mb is given."""
TORCH_FIRST_BUCKET_MB = 1.0
"""Its first bucket, where no bucket_cap_mb is given: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""

_Flag = Annotated[bool, Field(strict=True)]
_Megabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DdpConfig(FrozenModel):
    """Arguments of torch.nn.parallel.DistributedDataParallel, under its own names."""

    bucket_cap_mb: _Megabytes | None = None
    """Size of a gradient bucket in MiB; None: torch's own (25)."""
    first_bucket_mb: _Megabytes | None = None
    """Size of the bucket that is exchanged first; None: torch's own (1, or bucket_cap_mb where that
    is given)."""
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


# Settings that contradict each other on any machine, with any workload.
#
# Comes in: the settings that the rule is about. Goes out: the rule, the values and the remedy, or
# None. What depends on the machine or the workload stands in space/constraints.


NEUTRAL_WITHOUT_WORKERS = {
    setting.name: setting.neutral for setting in SETTINGS if setting.needs == "num_workers"
}
"""Settings that only loader workers use, and the one value of each without workers."""
_NEEDED = {"num_workers": "loader workers", "compile": "compile: true"}


def needs_contradiction(settings: Mapping[str, object]) -> str | None:
    """Return the reason why a setting can't stand without the one that it needs, or None.

    Args:
        settings: All of a TrainingConfig's, by name.
    """
    for setting in SETTINGS:
        name = setting.name
        needs = setting.needs
        if needs is not None and not settings[needs] and settings[name] != setting.neutral:
            return (
                f"{name} needs {_NEEDED[needs]}, but got {needs}={settings[needs]} and "
                f"{name}={settings[name]!r}; "
                f"leave {name} out or set {needs}"
            )
    return None


def strategy_contradiction(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why a strategy can't have the other settings, all by their names; None where it can.

    Source on compiling under DataParallel: torch compiles the frames of the thread that has entered
    the compiled module (set_eval_frame, torch/csrc/dynamo/eval_frame.c), and replicas run in other
    threads (torch/nn/parallel/parallel_apply.py); "it falls back to the non-compile speed",
    pytorch/pytorch#94636. A module that is compiled first and replicated then runs on the first
    device's weights: its forward is bound to it (Module._replicate_for_data_parallel).
    """
    strategy, world_size, grad_accum_steps = (
        settings[name] for name in ("strategy", "world_size", "grad_accum_steps")
    )
    ddp: DdpConfig | None = settings["ddp"]
    if strategy == "single" and world_size != 1:
        return f"strategy 'single' has one rank, but got world_size={world_size}; set strategy: ddp"
    if strategy != "ddp" and ddp is not None:
        return f"ddp settings need strategy 'ddp', but got strategy {strategy!r}; leave ddp out"
    if strategy == "dp" and world_size > 1 and settings["compile"]:
        return (
            "compile can't stand with strategy 'dp', whose replicas run in threads of their own, "
            "where torch "
            "compiles nothing, but got compile=True; set strategy: ddp, or compile: false"
        )
    if ddp is not None and ddp.static_graph and grad_accum_steps > 1:
        return (
            "ddp.static_graph can't stand with gradient accumulation (torch ends in an internal "
            "assert), but got "
            f"grad_accum_steps={grad_accum_steps}; set static_graph: false"
        )
    return None


# TrainingConfig: the settings of one training run, proposed, run, stored, recommended and exported
# as one type.
#
# Comes in: a user's mapping, a study's proposal or a recommended.yaml. Goes out: to a trial, and to
# the user's own loop through `dataloader_kwargs`, `prepare`, `to_device` and `accumulator`, which
# do what trials do (applied/) and import torch when they are called.


AmpDtype = Literal["float32", "tf32", "bfloat16", "float16"]
AMP_DTYPES: tuple[AmpDtype, ...] = get_args(AmpDtype)
"""From the most to the least exact."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""torch.compile's own names."""
_GRAPH_MODES = frozenset({"reduce-overhead", "max-autotune"})
NumaBinding = Literal["node", "exclusive"]
"""Names of torchrun's --numa-binding."""

TORCH_PREFETCH_FACTOR = 2
"""torch.utils.data.DataLoader's own, where workers load and None is given."""

_Count = Annotated[int, Field(strict=True, ge=1)]
_CountOrZero = Annotated[int, Field(strict=True, ge=0)]
_AUTOCAST = frozenset({"bfloat16", "float16"})


class TrainingConfig(FrozenModel):
    """The settings of one training run. Equal settings are equal objects.

    Raises:
        pydantic.ValidationError: a value is out of its range, or two settings contradict each
            other.
    """

    micro_batch_size: _Count = 32
    """Samples of one forward and backward pass, on one rank."""
    max_tokens: _Count | None = None
    """Tokens of one such batch, padding included, that a token-budget batch sampler fills; None: no
    budget. `micro_batch_size` is then what such a batch holds on average."""
    grad_accum_steps: _Count = 1
    """Forward and backward passes for one optimizer step."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Learning rate of the optimizer."""
    amp_dtype: AmpDtype = "float32"
    """Precision of the computation: float32 leaves torch's defaults, tf32 allows TF32 in matmuls
    and convolutions, bfloat16 and float16 run under autocast, float16 with a GradScaler."""
    num_workers: _CountOrZero = 0
    """Loader processes; 0: the training process loads."""
    prefetch_factor: _Count | None = None
    """Batches that each worker prepares in advance; None: torch's own (2), the only value without
    workers."""
    persistent_workers: _Flag = False
    """Keep the workers from one epoch to the next."""
    pin_memory: _Flag = False
    """Page-locked batches, copied to the device with non_blocking=True."""
    in_order: _Flag = True
    """Batches in the sampler's order; False: in the order in which workers finish them, so that a
    slow one holds up no other, and two runs of one seed are not alike bit for bit."""
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None
    """How loader workers start; None: your loader's own or torch's. Workers that are not forked
    start more slowly, and in your own loop the dataset must be picklable for them."""
    worker_threads: _Count | None = None
    """Threads of one operation in each loader worker, of torch, OpenCV, BLAS and OpenMP; None: as
    these have it, which is one for torch and one a core for the others. In forked workers torch
    keeps its one."""
    channels_last: _Flag = False
    """Keep 4-D tensors of the model and the batch in channels-last layout."""
    compile: _Flag = False
    """Run the model through torch.compile."""
    compile_mode: CompileMode = "default"
    """torch.compile's mode; reduce-overhead records CUDA graphs."""
    cudnn_benchmark: _Flag = False
    """Time cuDNN's algorithms for each new shape, and take the fastest
    (torch.backends.cudnn.benchmark)."""
    fused: _Flag = False
    """The optimizer's fused implementation, all of a step in one kernel; False: not fused."""
    intra_op_threads: _Count | None = None
    """Threads of one operation on the CPU (torch.set_num_threads); None: torch's own."""
    world_size: _Count = 1
    """Ranks, each a process with a device of its own."""
    strategy: Literal["single", "dp", "ddp"] = "single"
    """One device, DataParallel, or DistributedDataParallel. A model in DataParallel can't be
    compiled."""
    ddp: DdpConfig | None = None
    """Arguments of DistributedDataParallel; None: torch's own."""
    numa_binding: NumaBinding | None = None
    """Cores that a rank and its workers stay on: those of its device's NUMA node, or a share of
    these of its own; None: all."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        settings = dict(self)
        reason = needs_contradiction(settings) or strategy_contradiction(settings)
        if reason is not None:
            raise ValueError(reason)
        return self

    @property
    def by_name(self) -> dict[str, Any]:
        """The values by the names of settings_table: DistributedDataParallel's as "ddp.static_graph", without `ddp`."""
        values = self.model_dump(exclude={"ddp"})
        ddp = self.ddp or DdpConfig()
        return values | {f"{DDP_PREFIX}{name}": value for name, value in ddp.model_dump().items()}

    @property
    def process_count(self) -> int:
        """Processes that train side by side: one a rank under ddp, one otherwise."""
        return self.world_size if self.strategy == "ddp" else 1

    @property
    def loader_batch_size(self) -> int:
        """Samples of a batch that one process loads: under dp the one process loads for all of its devices."""
        return self.micro_batch_size * self.world_size // self.process_count

    @property
    def loader_max_tokens(self) -> int | None:
        """Tokens of a batch that one process loads; None without a token budget."""
        return (
            None
            if self.max_tokens is None
            else self.max_tokens * self.world_size // self.process_count
        )

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks; with a token budget on average."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size

    def global_batch_ratio(self, other: TrainingConfig) -> float:
        """This global batch over another one: in tokens where both have a token budget, else in samples."""
        if self.max_tokens is None or other.max_tokens is None:
            return self.global_batch_size / other.global_batch_size
        own = self.max_tokens * self.grad_accum_steps * self.world_size
        return own / (other.max_tokens * other.grad_accum_steps * other.world_size)

    @property
    def records_graphs(self) -> bool:
        """Whether torch.compile records CUDA graphs, where the device has them. Source: torch.compile, its modes."""
        return self.compile and self.compile_mode in _GRAPH_MODES

    @property
    def loader_settings(self) -> dict[str, object]:
        """The settings that a DataLoader takes under their own names."""
        return {name: getattr(self, name) for name in LOADER_ARGUMENTS}

    @property
    def batches_per_worker(self) -> int:
        """Batches that each worker prepares in advance, torch's number where none is given; 0 without workers."""
        return (self.prefetch_factor or TORCH_PREFETCH_FACTOR) if self.num_workers else 0

    def dataloader_kwargs(
        self, worker_init_fn: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Arguments for torch.utils.data.DataLoader in each process: under dp, `batch_size` is that of all devices.

        With a token budget there is no `batch_size`, which a DataLoader refuses beside the batch
        sampler that `max_tokens` goes to. With `worker_threads` there is a `worker_init_fn`, which
        sets them.

        Args:
            worker_init_fn: Your own, which a DataLoader can't be given twice: it runs in each
                worker after that.
        """
        size = {} if self.max_tokens is not None else {"batch_size": self.loader_batch_size}
        settings = self.loader_settings
        if settings["multiprocessing_context"] is None:  # yours, or torch's default
            del settings["multiprocessing_context"]
        return {**size, **settings, **self._worker_init(worker_init_fn)}

    def _worker_init(self, own: Callable[[int], None] | None) -> dict[str, Any]:
        if self.worker_threads is None:
            return {} if own is None else {"worker_init_fn": own}
        from autotune.apply.cores import limited

        return {"worker_init_fn": limited(own, self.worker_threads)}

    def loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A copy of your DataLoader with these settings, as trials load by; all else is as in yours.

        Its batch size changes where the loader makes its batches itself: not with a batch sampler
        of your own, nor where the dataset makes them. The sampler of each rank remains with you.
        """
        from autotune.apply.loader import inner_loader, loader_like

        inner = inner_loader(loader)
        return loader_like(
            inner, self.loader_settings, self.loader_batch_size, worker_threads=self.worker_threads
        )

    def prepare(self, model: nn.Module, device: str | torch.device | None = None) -> nn.Module:
        """The model as trials train it, and this process set up as theirs.

        The model is moved to the device and into its layout, in place. Handed on is what to call:
        under strategy ddp the model in DistributedDataParallel, under dp in DataParallel, compiled
        if asked. Make the optimizer afterwards. The current device, the threads of an operation,
        cuDNN's benchmark and, with tf32, the precision of float32 products are set for the whole
        process, and stay: prepare one configuration a process. Where `cudnn_benchmark` is False,
        the switch stays as your own code has it; trials had it off. Trials call `model.train()`;
        here the model keeps its mode. What remains with you is each rank's DistributedSampler, and
        starting training with the malloc that trials had (the head of recommended.yaml says how).

        With `compile`, TORCHINDUCTOR_CACHE_DIR is set unless you have set it, to the folder in
        which trials have compiled: what they have compiled is not compiled again.

        Args:
            model: The model, uncompiled and in no wrapper.
            device: Such as "cuda:0"; None: the accelerator's current device, for a rank of torchrun
                that of its LOCAL_RANK, and the CPU where there is no accelerator.

        Raises:
            ConfigError: a process group is open, and is of another size than this configuration has
                processes.
            RuntimeError, ValueError: torch has no such device, or under ddp no process group is
                open (see torch.distributed.init_process_group).
        """
        from autotune.apply.prepare import prepared

        return prepared(self, model, device)

    def arrange(
        self, model: nn.Module, device: torch.device, *, is_trial: bool = False
    ) -> nn.Module:
        """The part of `prepare` that is the model's: device, layout, strategy, compilation.

        Args:
            model: As in `prepare`.
            device: Where it shall lie.
            is_trial: The hook powersgd compresses from the third step on, since a trial ends before
                torch would begin.
        """
        from autotune.apply.prepare import arranged

        return arranged(self, model, device, is_trial=is_trial)

    def to_device(self, batch: Any, device: str | torch.device | None = None) -> Any:
        """A batch on the device, in this layout; copies from pinned memory don't block.

        Args:
            batch: What the loader hands on: a tensor, a container of them (mapping, tuple, list,
                dataclass), or an object with a method `to`, which is asked to move itself.
            device: What `prepare` was given, where that was the CPU beside an accelerator; None:
                the current device, which `prepare` has set.
        """
        import torch

        from autotune.apply.cores import own_device
        from autotune.apply.loader import moved

        place = own_device(is_rank=False) if device is None else torch.device(device)
        return moved(batch, place, channels_last=self.channels_last, non_blocking=self.pin_memory)

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Arguments for your optimizer: `lr`, and `fused` where it is on; an optimizer of torch's takes both."""
        return {"lr": self.lr, **({"fused": True} if self.fused else {})}

    def accumulator(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: str | torch.device | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Accumulator:
        """What runs backward passes and the optimizer's steps as trials do: see Accumulator for the loop.

        Args:
            model: What `prepare` has handed on.
            optimizer: Over its parameters, made with `optimizer_kwargs`.
            device: Where it trains; None: where the model's first parameter lies.
            scaler: A GradScaler of your own for float16; None: `grad_scaler`.
        """
        import torch

        from autotune.apply.prepare import Accumulator

        place = device or next((parameter.device for parameter in model.parameters()), "cpu")
        is_synced = self.strategy == "ddp" and not (self.ddp is not None and self.ddp.static_graph)
        return Accumulator(
            optimizer=optimizer,
            scaler=scaler or self.grad_scaler(place),
            steps=self.grad_accum_steps,
            device_type=torch.device(place).type,
            autocast=partial(self.autocast, place) if self.amp_dtype in _AUTOCAST else None,
            no_sync=getattr(model, "no_sync", None)
            if is_synced
            else None,  # a compiled model hands it on
            gathers=self.strategy == "dp",
            records_graphs=self.records_graphs and torch.device(place).type == "cuda",
        )

    def autocast(self, device: str | torch.device) -> AbstractContextManager[Any]:
        """A context for forward pass and loss in this precision, on a device such as "cuda:0"; may be entered again.

        float32 changes nothing. tf32 sets torch's precision of float32 products for the whole
        process while it is entered; enter it once, around the whole loop, backward passes too, or
        call `prepare`, which sets it for good. Under strategy dp the model must come from
        `prepare`: torch's own DataParallel takes float16 in its threads, whatever it is called
        under.
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
        """A GradScaler for this precision: active for float16, a pass-through otherwise."""
        import torch

        return torch.amp.GradScaler(torch.device(device).type, enabled=self.amp_dtype == "float16")

    def to(self, target: str, *, device: str | None = None, optimizer: str | None = None) -> Export:
        """These settings for another framework: `.text`, `.settings`, and what is `.dropped` or differs (`.defaults`).

        Args:
            target: One of hf, accelerate, lightning, deepspeed, torchrun, timm, axolotl,
                ultralytics and composer.
            device: Where it shall train, such as "cpu": some frameworks must be told. None: on
                their own choice.
            optimizer: The class of your optimizer, such as "AdamW", for a target that takes no `lr`
                without.

        Raises:
            ConfigError: there is no such target.
        """
        from autotune.export.registry import export_to

        return export_to(self, target, device=device, optimizer=optimizer)


LOADER_ARGUMENTS = tuple(
    name for name in TrainingConfig.model_fields if BY_NAME[name].is_loader_argument
)
"""Arguments of torch.utils.data.DataLoader that are settings here, under their own names."""
LOADER_SETTINGS = tuple(name for name in TrainingConfig.model_fields if BY_NAME[name].is_of_loader)
"""Settings of the loader alone: all others are the step's, but for `numa_binding`, which places
both."""
