"""Describe each setting once: what it moves, what it depends on, what is tried, and what others call it.

A `Setting` stands for a field of TrainingConfig or, as "ddp.bucket_cap_mb", of DdpConfig. Default
ranges, constraints, ceilings, the models of throughput and memory, reports and exports read this
table; so a new setting is an entry here, a field of TrainingConfig, and the code that applies it.

Entries stand in the order in which people read settings. Priors are standard deviations of
logarithms, and lengths in doublings: our own conventions, chosen by the density that forecasts give
to what was left out of benchmarks/surfaces, and judged together by benchmarks/regret.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from math import log2
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from autotune.config.environment import Environment
    from autotune.config.plan import SettingValue, WorkloadFacts
    from autotune.config.training_config import TrainingConfig
    from autotune.export.table import Wanted
    from autotune.space.ranges import Ranges


DDP_PREFIX = "ddp."
"""Begins the names of DistributedDataParallel's settings where they stand with the others:
"ddp.bucket_cap_mb"."""
_OWN_INIT_FN = (
    "its workers have a worker_init_fn of its own; OMP_NUM_THREADS={value} before the command "
    "limits them, and "
    "training too"
)
_IDLE_WITH_TF_DATA = {"tf_data": lambda _, facts, __: facts.is_tf_data}
_KEEPS_ORDER = "its loader keeps the order"
_PERSIST_BY_THEMSELVES = "its workers persist by themselves"
_CHECK_THE_LOSS = "check that the loss still falls as before"

Side = Literal["loader", "device", "copy"]
"""Part of a training that is measured alone."""


@dataclass(frozen=True, slots=True)
class Name:
    """A framework's name for a setting."""

    name: str
    """The name, with dots if it is nested."""
    _: KW_ONLY
    kind: Literal["count", "number", "flag"] = "count"
    own: object = None
    """The framework's default; None: the same as ours, or not known."""
    is_rare: bool = False
    """True to write it only if it differs from torch's default, since older releases lack the name."""
    is_whole: bool = False
    """True if the framework only takes whole numbers."""
    among: tuple[object, ...] = ()
    """Values that the framework supports; (): all."""
    is_own: bool = False
    """True if the framework's module in export/ computes what it writes, or decides whether to write
    it. A value read from a file counts as it is, unless the module takes it out before."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a setting on costs of the throughput model."""

    sds: Mapping[str, float]
    """Prior standard deviations of the costs' logarithms, by models/throughput_law.COSTS."""
    of: Callable[[TrainingConfig], object] | None = None
    """Function of the configuration that the cost depends on; None: the setting's value."""
    length: float | None = None
    """Distance over which a number's effect changes; None: a category, each value free of the
    others."""


@dataclass(frozen=True, slots=True)
class MemoryEffect:
    """A setting's term in the law of peak memory."""

    sd: float
    """Prior standard deviation, as a share of the highest peak."""
    of: Callable[[TrainingConfig], bool]
    is_either: bool = False
    """Neither value is known to need more memory; else True needs as much or more."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a training run."""

    name: str
    """Name of a TrainingConfig's field, or "ddp." and that of a DdpConfig's."""
    _: KW_ONLY
    neutral: SettingValue = None
    """The value without an effect: the field's default, which is torch's own."""
    torch_value: Callable[[TrainingConfig], SettingValue] | None = None
    """Return the value that torch takes where None leaves it to torch; None: nobody needs to know
    it."""
    sides: tuple[Side, ...] = ("device",)
    """Parts whose throughput depends on it."""
    needs: str | None = None
    """The setting without which this one must be neutral."""
    is_of_group: bool = False
    """True if it says which devices train together, and how."""
    is_placeholder: bool = False
    """True if it may be a placeholder of a command."""
    is_loader_argument: bool = False
    """True if it is an argument of torch's DataLoader of this name."""
    tried: Callable[[Ranges], Iterable[SettingValue]] | None = None
    """Return what is tried by default; a `range` becomes an IntRange. None: it is not searched."""
    idle: Mapping[str, Callable[[Any, WorkloadFacts, Environment], bool]] = field(
        default_factory=dict
    )
    """Conditions under which a value has no effect, by the code of the reason."""
    is_kept: bool = False
    """True to keep the baseline's value unless there is a reason for another."""
    is_in_curves: bool = False
    """True if a device's curve varies it. Not cudnn_benchmark: a process keeps the algorithms that it has
    found for a shape, by whichever way it came to them, so a second value would be measured with
    the first one's. Source: torch, ATen/native/cudnn/Conv_v8.cpp, where the key of benchmark_cache
    does not hold the switch."""
    spares_host: bool = False
    """True if turning it on leaves the host less work for each sample."""
    explains: Literal["often", "rarely"] | None = None
    """Frequency with which it alone explains a failure, since torch runs other code for each value;
    None: never."""
    guess: SettingValue = None
    """Value that an expert tries first; None: the baseline's."""
    effects: tuple[Effect, ...] = ()
    """Effects on the costs of the throughput model."""
    memory: MemoryEffect | None = None
    words: Callable[[TrainingConfig], str] | None = None
    """Describe its value in a few words; None: it has none of its own."""
    worded_by: str | None = None
    """The setting whose words describe this one too."""
    is_always_named: bool = False
    """True to describe it even if it has torch's default."""
    caution: str | None = None
    """Advice on what to check after changing it."""
    left_on: str | None = None
    """The user's code that switches it on, if a configuration without it does not switch it off."""
    elsewhere: str | None = None
    """Remedy if a framework can't take it; None: an argument in the user's own loop."""
    names: Mapping[str, Name] = field(default_factory=dict)
    """Its names by framework."""
    unnamed: Mapping[str, Callable[[Wanted], bool]] = field(default_factory=dict)
    """Conditions by framework under which it takes a value other than the neutral one without a
    name, in an export's text or by itself."""
    process_line: Callable[[Any], str] | None = None
    """Return the line of Python that sets a value other than the neutral one for the whole process;
    "" if there is none."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Remedies by framework, where they differ from `elsewhere`."""

    @property
    def value(self) -> Callable[[TrainingConfig], object]:
        """Return the function of a configuration that gives its value, torch's own where that is left to torch."""
        return self.torch_value or attrgetter(self.name)

    @property
    def is_of_ddp(self) -> bool:
        """True for an argument of DistributedDataParallel."""
        return self.name.startswith(DDP_PREFIX)

    @property
    def is_of_loader(self) -> bool:
        """True if the loader depends on it and the step does not."""
        return "loader" in self.sides and "device" not in self.sides

    @property
    def is_of_kernels(self) -> bool:
        """True if the device runs other kernels for each value."""
        return self.explains is not None and "loader" not in self.sides and not self.is_of_ddp


def _always(_: Wanted) -> bool:
    return True


def _on_gpu(found: Wanted) -> bool:
    """Return False if the device is known to be the CPU."""
    return found.device != "cpu"


def format_ddp(config: TrainingConfig) -> str:
    """List the arguments of DistributedDataParallel that differ from torch's; "" if none do."""
    own = config.ddp_settings.model_dump(exclude_defaults=True)
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in own.items()
    )


def _name_batch(config: TrainingConfig) -> str:
    accumulated = f" × {config.grad_accum_steps}" if config.grad_accum_steps > 1 else ""  # noqa: RUF001 - a times sign
    batch = (
        f"batch {config.micro_batch_size}"
        if config.max_tokens is None
        else f"{config.max_tokens:,} tokens"
    )
    return batch + accumulated


def _name_workers(config: TrainingConfig) -> str:
    if not config.has_workers:
        return "no workers"
    return f"{config.num_workers:,} worker{'s' if config.num_workers > 1 else ''}"


def _log_batch(config: TrainingConfig) -> float:
    return log2(config.micro_batch_size)


def _half(config: TrainingConfig) -> str:
    """Return the precision, with bfloat16 and float16 as one: if one is slow, as on many CPUs, so is the other."""
    return "half" if config.is_half else config.amp_dtype


SETTINGS = (
    Setting(
        "micro_batch_size",
        neutral=32,
        is_placeholder=True,
        sides=("loader", "device"),
        tried=lambda ranges: ranges.batch_sizes,
        is_in_curves=True,
        # The effects of workers and batch on `items` and `samples` are what the law does not
        # explain of them.
        effects=(
            Effect(
                {"items": 0.2, "samples": 0.2, "copies": 0.1, "launching": 0.05, "taking": 0.3},
                _log_batch,
                length=3.0,
            ),
            Effect({"shortfall": 0.07}, _log_batch, length=2.0),
        ),
        words=_name_batch,
        is_always_named=True,
        caution="scale the learning rate with the batch",
        elsewhere="your DataLoader takes it: batch_size={value!r}",
        names={
            "hf": Name("per_device_train_batch_size", own=8),
            "deepspeed": Name("train_micro_batch_size_per_gpu"),
            "timm": Name("batch_size"),
            "axolotl": Name("micro_batch_size", own=1),
            "ultralytics": Name("batch", is_own=True),
            "composer": Name("device_train_microbatch_size"),
        },
    ),
    Setting(
        "max_tokens",
        sides=("loader", "device"),
        tried=lambda ranges: ranges.token_budgets,
        is_in_curves=True,
        worded_by="micro_batch_size",
        elsewhere="your own batch sampler takes it: max_tokens={value!r}",
        reasons={
            "hf": "give your Trainer a get_train_dataloader whose loader has your own batch sampler, made with "
            "max_tokens={value!r}; by itself it makes batches of 8",
            "deepspeed": "your own DataLoader takes it, by a batch sampler made with max_tokens={value!r}",
            "timm": "its loader makes batches of a fixed size, 128 unless --batch-size says otherwise",
            "axolotl": "its loader makes batches of a fixed size, 1 unless micro_batch_size says otherwise; "
            "sample_packing fills sequences with tokens instead",
            "ultralytics": "its loader makes batches of a fixed size, 16 unless `batch` says otherwise",
        },
    ),
    Setting(
        "grad_accum_steps",
        neutral=1,
        is_placeholder=True,
        tried=lambda ranges: ranges.accumulations,
        effects=(
            Effect({"samples": 0.05}, lambda config: log2(config.grad_accum_steps), length=2.0),
        ),
        memory=MemoryEffect(0.1, lambda config: config.grad_accum_steps > 1),
        worded_by="micro_batch_size",
        elsewhere="your loop makes {value} backward passes for one optimizer step",
        names={
            "hf": Name("gradient_accumulation_steps"),
            "lightning": Name("accumulate_grad_batches"),
            "deepspeed": Name("gradient_accumulation_steps"),
            "timm": Name("grad_accum_steps"),
            "axolotl": Name("gradient_accumulation_steps", own=1),
            "ultralytics": Name("nbs", is_own=True),
        },
        unnamed={"composer": lambda found: not found.has_budget},
        reasons={
            "accelerate": "Accelerator(gradient_accumulation_steps={value}) and `with accelerator.accumulate(model)` "
            "in your script, or ACCELERATE_GRADIENT_ACCUMULATION_STEPS={value} in the environment",
            "composer": "give a DataSpec with a split_batch of your own, for {value} parts of a batch by tokens",
            "ultralytics": "it is nbs / batch, which a token budget does not say; set both",
        },
    ),
    Setting(
        "num_workers",
        neutral=0,
        is_placeholder=True,
        sides=("loader",),
        is_loader_argument=True,
        tried=lambda ranges: range(ranges.most_workers_of_a_rank + 1),
        effects=(
            Effect(
                {"items": 0.4, "taking": 0.2, "shortfall": 0.1},
                lambda config: log2(1 + config.num_workers),
                length=1.5,
            ),
            Effect({"items": 0.6}, lambda config: config.has_workers),
        ),
        words=_name_workers,
        is_always_named=True,
        names={
            "hf": Name("dataloader_num_workers"),
            "timm": Name("workers"),
            "axolotl": Name("dataloader_num_workers"),
            "ultralytics": Name("workers"),
        },
    ),
    Setting(
        "amp_dtype",
        neutral="float32",
        is_placeholder=True,
        tried=lambda ranges: ranges.environment.native_amp_dtypes,
        idle={
            "no_nvidia_gpu": lambda dtype, _, machine: (
                dtype == "tf32" and machine.device_kind != "cuda"
            )
        },
        is_in_curves=True,
        explains="often",
        effects=(
            Effect({"samples": 0.4, "per_micro_batch": 0.24}, _half),
            # autocast launches casts as well
            Effect({"samples": 0.3, "per_micro_batch": 0.18, "launching": 0.3, "shortfall": 0.05}),
        ),
        words=lambda config: config.amp_dtype,
        is_always_named=True,
        caution=_CHECK_THE_LOSS,
        process_line=lambda dtype: (
            'torch.set_float32_matmul_precision("high")' if dtype == "tf32" else ""
        ),
    ),
    Setting(
        "compile",
        neutral=False,
        tried=lambda ranges: (False, ranges.baseline.compile),
        explains="often",
        effects=(
            Effect(
                {"samples": 0.4, "launching": 0.8},
                lambda config: (config.compile, config.compile_mode),
            ),
            Effect({"per_micro_batch": 0.5}),
        ),
        memory=MemoryEffect(0.1, lambda config: config.compile, is_either=True),
        words=lambda config: "compiled" if config.compile else "not compiled",
        elsewhere="in your script: model = torch.compile(model)",
        names={
            "hf": Name("torch_compile", kind="flag"),
            "accelerate": Name("dynamo_config.dynamo_backend", is_own=True),
            "timm": Name("torchcompile", is_own=True),
            "axolotl": Name("torch_compile", kind="flag"),
            "ultralytics": Name("compile"),  # or a mode of torch.compile
            "composer": Name("compile_config", is_own=True),
        },
        unnamed={"lightning": _always},
        reasons={"deepspeed": "in your script: engine.compile()"},
    ),
    Setting(
        "compile_mode",
        neutral="default",
        needs="compile",
        tried=lambda ranges: ("default", *ranges.graph_modes, ranges.baseline.compile_mode),
        idle={
            "no_cuda_graphs": lambda mode, _, machine: (
                mode == "reduce-overhead" and not machine.has_cuda_graphs
            )
        },
        is_kept=True,
        explains="often",
        memory=MemoryEffect(0.3, lambda config: config.records_graphs),
        words=lambda config: config.compile_mode,
        elsewhere="in your script: torch.compile(model, mode={value!r})",
        names={
            "hf": Name("torch_compile_mode", is_rare=True),
            "accelerate": Name("dynamo_config.dynamo_mode", is_own=True),
            "timm": Name("torchcompile_mode", is_rare=True),
            "axolotl": Name(
                "torch_compile_mode",
                is_rare=True,
                among=("default", "reduce-overhead", "max-autotune"),
            ),
            "ultralytics": Name("compile", is_own=True),
            "composer": Name("compile_config.mode", is_own=True),
        },
        unnamed={"lightning": _always},
        reasons={
            "deepspeed": "in your script: engine.compile(compile_kwargs=dict(mode={value!r}))"
        },
    ),
    Setting(
        "cudnn_benchmark",
        neutral=False,
        tried=lambda ranges: (*ranges.cudnn_searches, ranges.baseline.cudnn_benchmark),
        # A model without modules that convolve may convolve all the same.
        idle={"no_cudnn": lambda _, __, machine: not machine.has_cuda_graphs},
        is_kept=True,
        explains="rarely",
        guess=True,
        effects=(Effect({"samples": 0.1}),),
        memory=MemoryEffect(0.1, lambda config: config.cudnn_benchmark),
        words=lambda config: f"cudnn.benchmark {'on' if config.cudnn_benchmark else 'off'}",
        names={"lightning": Name("benchmark", is_rare=True)},
        unnamed={"timm": _on_gpu, "composer": _always},
        left_on="torch.backends.cudnn.benchmark = True",
        process_line=lambda _: "torch.backends.cudnn.benchmark = True",
        reasons={
            "axolotl": "its models have no convolutions",
            "ultralytics": "it has no switch for it, and its own deterministic=True stands against it",
        },
    ),
    Setting(
        "fused",
        neutral=False,
        tried=lambda ranges: (False, ranges.facts.optimizer.can_fuse, ranges.baseline.fused),
        # A script makes its own optimizer, fused or not.
        idle={
            "no_fused_optimizer": lambda _, facts, __: (
                facts.script is None and not facts.optimizer.can_fuse
            )
        },
        is_kept=True,
        is_in_curves=True,
        spares_host=True,
        explains="rarely",
        guess=True,
        effects=(Effect({"samples": 0.05, "per_step": 0.5, "launching": 0.2}),),
        words=lambda config: "fused optimizer" if config.fused else "optimizer as it is",
        left_on="fused=True of the optimizer",
        elsewhere="your optimizer takes it: fused=True",
        names={"deepspeed": Name("optimizer.params.fused", is_own=True)},
        reasons={
            "hf": "of its optimizers only AdamW is fused, as optim adamw_torch_fused; give your Trainer an optimizer "
            "of your own, made with fused=True: optimizers=(optimizer, None)",
            "lightning": "the optimizer of your configure_optimizers takes it: fused=True",
            "deepspeed": "it stands in the params of an optimizer that torch fuses, such as SGD; or take your own, "
            "made with fused=True",
            "timm": "with torch's own optimizers (--opt sgd, momentum, adam or adamw) it takes --opt-kwargs fused=True",
            "axolotl": "of torch's optimizers it fuses AdamW, as optimizer: adamw_torch_fused",
            "ultralytics": "on a GPU it fuses Adam and AdamW by itself, and no other optimizer",
            "composer": "your optimizer takes it, as Trainer(optimizers=...): fused=True",
        },
    ),
    Setting(
        "channels_last",
        neutral=False,
        sides=("device", "copy"),
        tried=lambda ranges: (False, ranges.facts.has_4d_input),
        idle={"no_4d_input": lambda _, facts, __: not facts.has_4d_input},
        is_in_curves=True,
        explains="often",
        guess=True,
        effects=(Effect({"samples": 0.2, "copies": 0.1, "launching": 0.1}),),
        memory=MemoryEffect(0.1, lambda config: config.channels_last, is_either=True),
        words=lambda config: "channels last" if config.channels_last else "channels first",
        elsewhere="in your script: model = model.to(memory_format=torch.channels_last)",
        names={
            "timm": Name("channels_last"),
            "ultralytics": Name("channels_last"),  # left out, it is on wherever CUDA trains
        },
        unnamed={"lightning": _always, "composer": _always},
        reasons={"axolotl": "its models have no images"},
    ),
    Setting(
        "pin_memory",
        neutral=False,
        sides=("loader", "copy"),
        is_loader_argument=True,
        tried=lambda ranges: (False, ranges.environment.device_kind not in {"cpu", "mps"}),
        idle={"no_copy_to_accelerator": lambda _, __, machine: machine.has_only_ram},
        is_kept=True,
        spares_host=True,
        guess=True,
        effects=(Effect({"items": 0.1, "copies": 0.7, "hidden": 0.7, "taking": 0.5}),),
        words=lambda config: "pinned" if config.pin_memory else "not pinned",
        names={
            "hf": Name("dataloader_pin_memory", kind="flag", own=True),
            "timm": Name("pin_mem"),
            "axolotl": Name("dataloader_pin_memory", kind="flag"),
        },
        unnamed={"ultralytics": lambda found: found.config.has_workers},
        reasons={"ultralytics": "its loader pins by itself"},
    ),
    Setting(
        "persistent_workers",
        neutral=False,
        sides=("loader",),
        needs="num_workers",
        is_loader_argument=True,
        tried=lambda ranges: (False, not ranges.facts.is_tf_data),
        idle=_IDLE_WITH_TF_DATA,
        guess=True,
        effects=(Effect({"items": 0.15}),),
        words=lambda config: "persistent" if config.persistent_workers else "not persistent",
        names={"hf": Name("dataloader_persistent_workers", kind="flag")},
        unnamed={"timm": _always, "ultralytics": _always},
        reasons={
            "timm": _PERSIST_BY_THEMSELVES,
            "axolotl": "its workers start anew each epoch",
            "ultralytics": _PERSIST_BY_THEMSELVES,
        },
    ),
    Setting(
        "in_order",
        neutral=True,
        sides=("loader",),
        needs="num_workers",
        is_loader_argument=True,
        tried=lambda ranges: (*ranges.orders, ranges.baseline.in_order),
        is_kept=True,
        effects=(Effect({"items": 0.4}, lambda config: config.in_order or config.num_workers < 2),),
        words=lambda config: "in order" if config.in_order else "out of order",
        caution="batches come in another order, so two runs of one seed differ",
        names={"hf": Name("dataloader_in_order", kind="flag", is_rare=True)},
        reasons={"timm": _KEEPS_ORDER, "axolotl": _KEEPS_ORDER, "ultralytics": _KEEPS_ORDER},
    ),
    Setting(
        "worker_threads",
        sides=("loader",),
        needs="num_workers",
        tried=lambda ranges: (*ranges.threads_in_workers, ranges.baseline.worker_threads),
        idle=_IDLE_WITH_TF_DATA,
        is_kept=True,
        effects=(Effect({"items": 0.4}),),
        words=lambda config: f"{config.worker_threads or 'default'} threads a worker",
        elsewhere="your DataLoader takes it: worker_init_fn=config.dataloader_kwargs()['worker_init_fn']",
        unnamed={"ultralytics": lambda found: found.config.worker_threads == 1},
        reasons={
            "hf": "its Trainer gives workers a worker_init_fn of its own; call this in each worker before your "
            "dataset's first item: autotune.TrainingConfig(num_workers=1, "
            "worker_threads={value}).dataloader_kwargs()"
            "['worker_init_fn'](0)",
            "timm": _OWN_INIT_FN,
            "axolotl": _OWN_INIT_FN,
            "ultralytics": "OMP_NUM_THREADS={value} before the command; it sets 1 otherwise, and OpenCV's to none",
        },
    ),
    Setting(
        "multiprocessing_context",
        sides=("loader",),
        needs="num_workers",
        is_loader_argument=True,
        tried=lambda ranges: (
            ranges.baseline.multiprocessing_context,
        ),  # others only where the user lists them
        idle=_IDLE_WITH_TF_DATA,
        is_kept=True,
        explains="often",  # such as a dataset that can't be pickled
        effects=(Effect({"items": 0.1}),),
        # Workers that are not forked share no pages with the trial.
        memory=MemoryEffect(
            0.1, lambda config: config.multiprocessing_context in {"forkserver", "spawn"}
        ),
        words=lambda config: f"workers by {config.multiprocessing_context or 'default'}",
    ),
    Setting(
        "prefetch_factor",
        sides=("loader",),
        needs="num_workers",
        is_placeholder=True,
        is_loader_argument=True,
        torch_value=lambda config: config.batches_per_worker,
        tried=lambda ranges: ranges.prefetch_factors,
        effects=(
            Effect(
                {"items": 0.15},
                lambda config: log2(config.batches_per_worker) if config.has_workers else 0.0,
                length=2.0,
            ),
        ),
        words=lambda config: f"prefetch {config.prefetch_factor or 2}",
        names={
            "hf": Name("dataloader_prefetch_factor"),  # None is left out: 0 workers refuse it
            "axolotl": Name("dataloader_prefetch_factor"),
        },
        unnamed={"ultralytics": lambda found: found.config.prefetch_factor == 4},
        reasons={"timm": "its loader keeps torch's own, 2", "ultralytics": "its loader has 4"},
    ),
    Setting(
        "intra_op_threads",
        tried=lambda ranges: (None, *ranges.thread_counts, ranges.baseline.intra_op_threads),
        is_in_curves=True,
        effects=(
            Effect({"samples": 0.5, "per_micro_batch": 0.3}),
            Effect(
                {"shortfall": 0.15},
                lambda config: (config.has_workers, config.intra_op_threads),
            ),
        ),
        words=lambda config: f"{config.intra_op_threads or 'default'} threads",
        elsewhere="in your script: torch.set_num_threads({value}), or OMP_NUM_THREADS={value} before the command",
        unnamed={"lightning": _always, "torchrun": _always, "composer": _always},
        process_line=lambda threads: f"torch.set_num_threads({threads})",
        reasons={
            "accelerate": "accelerate launch --num_cpu_threads_per_process {value}",
            "axolotl": "OMP_NUM_THREADS={value} before the command",
            "ultralytics": "OMP_NUM_THREADS={value} before the command; it sets 1 otherwise",
        },
    ),
    Setting(
        "world_size",
        neutral=1,
        is_of_group=True,
        sides=("loader", "device", "copy"),
        tried=lambda ranges: ranges.rank_counts,
        effects=(
            Effect(
                {"items": 0.4, "samples": 0.4, "exchange": 0.3, "copies": 0.2},
                lambda config: log2(config.world_size),
                length=2.0,
            ),
        ),
        worded_by="strategy",
        elsewhere="start {value} processes: torchrun --nproc-per-node {value}",
        names={
            "lightning": Name("devices", is_own=True),
            "deepspeed": Name("train_batch_size", is_own=True),
            "torchrun": Name("nproc_per_node", is_own=True),
        },
        # On a CPU, accelerate launch and Ultralytics start one process.
        unnamed={"accelerate": _on_gpu, "ultralytics": _on_gpu},
        reasons={
            "accelerate": "accelerate launch starts one process on a CPU, unless mpirun_config has a hostfile; start "
            "{value} by ACCELERATE_USE_CPU=true torchrun --nproc-per-node {value}, with ACCELERATE_MIXED_PRECISION",
            "deepspeed": "start {value} processes: deepspeed --num_gpus {value}",
            "axolotl": "start {value} processes: axolotl train ... --launcher torchrun -- --nproc_per_node={value}",
            "ultralytics": "it trains in one process on a CPU",
            "composer": "start {value} processes: composer -n {value} train.py",
        },
    ),
    Setting(
        "strategy",
        neutral="single",
        is_of_group=True,
        sides=("loader", "device", "copy"),
        tried=lambda ranges: ranges.strategies,
        explains="often",
        effects=(
            Effect({"items": 0.3, "samples": 0.3, "copies": 0.3, "launching": 0.3}),
            Effect({"shortfall": 0.1}, lambda config: (config.strategy, config.world_size)),
        ),
        words=lambda config: config.group_name,
        elsewhere="it has no DataParallel; search again with strategy ddp",
        reasons={
            "hf": "its Trainer takes DataParallel by itself over all GPUs that one process sees: CUDA_VISIBLE_DEVICES "
            "says which",
        },
    ),
    Setting(
        "ddp",
        is_of_group=True,
        effects=(
            Effect({"samples": 0.1}),
            Effect({"exchange": 0.3}, lambda config: (config.strategy, config.ddp)),
        ),
        words=lambda config: format_ddp(config) or "torch's own ddp settings",
    ),
    Setting(
        "ddp.bucket_cap_mb",
        tried=lambda ranges: (None, *ranges.bucket_caps, ranges.ddp.bucket_cap_mb),
        elsewhere="DistributedDataParallel takes it: bucket_cap_mb={value!r}",
        names={
            "hf": Name("ddp_bucket_cap_mb", is_whole=True),
            "deepspeed": Name("zero_optimization.reduce_bucket_size", is_own=True),
            "axolotl": Name("ddp_bucket_cap_mb", is_whole=True),
        },
    ),
    Setting(
        "ddp.first_bucket_mb",
        tried=lambda ranges: (None, ranges.ddp.first_bucket_mb),
        elsewhere="DistributedDataParallel takes it where torch has bucket_cap_mb_list=[{value!r}, ...]",
        reasons={
            "accelerate": "its DistributedDataParallelKwargs has no bucket_cap_mb_list either",
            "lightning": "DDPStrategy hands bucket_cap_mb_list on to DistributedDataParallel, where torch has it",
        },
    ),
    Setting(
        "ddp.gradient_as_bucket_view",
        neutral=False,
        tried=lambda _: (False, True),
        explains="often",
        guess=True,
    ),
    Setting(
        "ddp.static_graph",
        neutral=False,
        tried=lambda ranges: (False, ranges.may_be_static or ranges.ddp.static_graph),
        explains="often",
        names={"hf": Name("ddp_static_graph", kind="flag", is_rare=True)},
    ),
    Setting(
        "ddp.find_unused_parameters",
        neutral=False,
        tried=lambda ranges: (
            ranges.facts.has_unused_parameters,
            ranges.facts.has_unused_parameters or ranges.ddp.find_unused_parameters,
        ),
        explains="often",
        unnamed={"ultralytics": lambda found: not found.config.compile},
        names={
            "hf": Name("ddp_find_unused_parameters", kind="flag"),
            "axolotl": Name("ddp_find_unused_parameters", kind="flag"),
        },
    ),
    Setting(
        "ddp.broadcast_buffers",
        neutral=True,
        # As in the baseline: anything else would change what is learned.
        tried=lambda ranges: (ranges.ddp.broadcast_buffers,),
        idle={"no_buffers": lambda _, facts, __: not facts.has_buffers},
        names={
            "hf": Name("ddp_broadcast_buffers", kind="flag"),
            "axolotl": Name("ddp_broadcast_buffers", kind="flag"),
        },
        unnamed={"timm": _always, "ultralytics": _always},
    ),
    Setting(
        "ddp.comm_hook",
        tried=lambda ranges: (None, *ranges.hooks, ranges.ddp.comm_hook),
        caution=_CHECK_THE_LOSS,
        explains="often",
        elsewhere="DistributedDataParallel takes it: register_comm_hook, for {value}",
        names={"deepspeed": Name("communication_data_type", is_own=True)},
        reasons={
            "accelerate": "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=...)]) in your script",
        },
    ),
    Setting(
        "numa_binding",
        sides=("loader", "device", "copy"),
        tried=lambda ranges: (None, *ranges.bindings, ranges.baseline.numa_binding),
        is_kept=True,
        effects=(Effect({"items": 0.1, "samples": 0.1, "copies": 0.1}),),
        words=lambda config: {
            None: "not bound to cores",
            "node": "bound to a NUMA node",
            "exclusive": "bound to own cores",
        }[config.numa_binding],
        elsewhere="config.prepare binds in your own loop; next to NVIDIA's and AMD's GPUs: torchrun --numa-binding "
        "{value}",
        names={
            "accelerate": Name("enable_cpu_affinity", is_own=True),
            "torchrun": Name("numa_binding", is_own=True),
        },
        reasons={
            "accelerate": "its enable_cpu_affinity is numa_binding node, next to NVIDIA's GPUs alone; config.prepare "
            "binds in your own loop",
            "torchrun": "it binds next to NVIDIA's and AMD's GPUs alone; config.prepare binds in your own loop",
            "axolotl": "start its processes bound: axolotl train ... --launcher torchrun -- --numa-binding={value}",
            "ultralytics": "it starts its ranks itself; numactl before the command binds all of them to one node",
            "composer": "its launcher binds no process; numactl before the command binds one",
        },
    ),
    Setting(
        "lr",
        neutral=1e-3,
        is_placeholder=True,
        sides=(),
        words=lambda config: f"lr {config.lr:.4g}",
        elsewhere="your optimizer takes it: lr={value!r}",
        names={
            "hf": Name("learning_rate", kind="number", own=5e-5),
            "deepspeed": Name("optimizer.params.lr", is_own=True),
            "timm": Name(
                "lr"
            ),  # without it train.py works one out from lr_base and the global batch
            "axolotl": Name("learning_rate", kind="number"),
            "ultralytics": Name("lr0"),
        },
        reasons={
            "lightning": "the optimizer of your configure_optimizers takes it: lr={value!r}",
            "deepspeed": "make your optimizer in your script with lr={value!r}, and pass it on: "
            "deepspeed.initialize(optimizer=...)",
            "composer": "your optimizer takes it, as Trainer(optimizers=...): lr={value!r}",
        },
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
"""The settings by name."""
BATCH_SETTINGS = frozenset({"micro_batch_size", "max_tokens"})
"""Settings of the size of a micro batch: in samples, and in tokens."""


def must_be_neutral(values: Mapping[str, object]) -> frozenset[str]:
    """Return the settings that need another one which is off in these values."""
    return frozenset(
        setting.name
        for setting in SETTINGS
        if setting.needs is not None and not values.get(setting.needs, True)
    )
