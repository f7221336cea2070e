"""Record what a script does by itself: its loaders, steps, precision and evaluations.

In: events from torch's calls, passed on by the session while the script trains. Out: the baseline
and the facts of a probe, including which settings can be changed from outside; and the seconds that
the script spends on loaders other than the training loader.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from autotune.apply.cores import threads_in_workers
from autotune.apply.loader import IMAGE_DIMS, argument_of
from autotune.apply.precision import allows_tf32
from autotune.config.command import PLACEHOLDERS
from autotune.config.plan import LoaderSite, ScriptFacts, WorkloadFacts
from autotune.config.training_config import (
    LOADER_ARGUMENTS,
    LOADER_SETTINGS,
    NEUTRAL_WITHOUT_WORKERS,
    DdpConfig,
    TrainingConfig,
)
from autotune.messages.space import setting_unreached
from autotune.worker.batch import leaves_of, tensors_of
from autotune.worker.build import is_stream, length_of, optimizer_facts
from autotune.worker.device import has_convolutions, is_deterministic
from autotune.worker.script.hooks import has_epochs
from autotune.worker.script.overrides import Begun, accelerate_state, can_bind_script

# Time spent on the script's other loaders: an evaluation is not training, a second loader read in
# step with the first one is


_IN_A_ROW = 2
"""Batches of other loaders in a row that make an evaluation, if the loader does not end by itself.
Loaders that are iterated in step (zip) give one at a time. Source: our convention."""


@dataclass(slots=True)
class SideBatches:
    """Track the loaders other than the training loader, once that is known.

    All time spent on them is left out of the measurement, training on them included.
    """

    trained_s: float = 0.0
    """Seconds of training on other loaders."""
    waited_s: float = 0.0
    """Seconds of `trained_s` spent waiting for a batch."""
    site: LoaderSite | None = None
    """Call site of the last of these loaders, if known."""
    steps: int = 0
    """Optimizer steps on its batches since the last batch of the training loader."""
    _turn_since: float | None = None
    """Time of the first of these steps, by perf_counter."""
    _seconds: float = 0.0
    """Seconds to leave out that were not taken yet."""
    _since: float | None = None
    """Time at which such a loader was begun; None after a training batch."""
    _until: float = 0.0
    """Time of the last batch of such a loader."""
    _batches: int = 0
    """Number of batches since `_since`."""
    _since_training: int = 0
    """Number of batches since the last training batch, whenever their loader was begun."""
    _trains: bool = False
    """True if an optimizer stepped on these batches."""
    _waited_s: float = 0.0
    """Seconds of waiting for these batches."""

    def begin(self) -> None:
        """Start the clock: another loader is about to be iterated."""
        if self._since is None:
            self._since = perf_counter()
            self._batches = 0
            self._trains = False
            self._waited_s = 0.0

    @property
    def turn_s(self) -> float:
        """Seconds since the first optimizer step on these batches; 0 if there was none."""
        return 0.0 if self._turn_since is None else perf_counter() - self._turn_since

    def on_batch(self, waited_s: float) -> None:
        """Record a batch of another loader, and the seconds that the script waited for it."""
        self._batches += 1
        self._since_training += 1
        self._until = perf_counter()
        self._waited_s += waited_s

    def on_step(self) -> None:
        """Record an optimizer step."""
        if self._since_training:
            self._trains = True
            self.steps += 1
            self._turn_since = self._turn_since or perf_counter()

    def end(self) -> None:
        """Leave out the time since `begin`: the loader has ended by itself."""
        self._leave_out(perf_counter())

    def on_training(self) -> None:
        """Record that a batch of the training loader is requested."""
        if self._batches >= _IN_A_ROW:
            self._leave_out(self._until)
        self._since = self._turn_since = None
        self.steps = self._since_training = 0

    def _leave_out(self, until: float) -> None:
        if self._since is None:
            return
        self._seconds += until - self._since
        if self._trains:
            self.trained_s = self.trained_s + until - self._since
            self.waited_s += self._waited_s
        self._since = None

    def add(self, seconds: float) -> None:
        """Leave out seconds in which the batches trained on are unknown."""
        self._seconds += seconds

    def take(self) -> float:
        """Return the seconds left out since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


# The record itself, and the probe's baseline and facts that follow from it


_IN_STEP_FROM = 0.5
"""Batches of another loader per batch of the training loader from which both are read in step.
Source: our convention."""
_FRAMEWORKS = (("transformers.trainer", "transformers"), ("lightning.pytorch.trainer.trainer", "lightning"),
               ("pytorch_lightning.trainer.trainer", "lightning"), ("composer.trainer.trainer", "composer"),
               ("ignite.engine.engine", "ignite"), ("fastai.learner", "fastai"), ("timm.data.loader", "timm"),
               ("accelerate.state", "accelerate"))  # fmt: skip
"""Modules of frameworks and their names, the most specific first."""
_FULL = {"float32", "tf32"}
"""Precisions with float32 weights and activations, which an autocast may be put around."""
_ON_STACK = {"transformers", "lightning", "composer", "ignite", "fastai"}
"""Frameworks that must be on the stack where the optimizer steps; for the others an import is
enough."""


@dataclass(slots=True)
class Made:
    """A loader that the script made."""

    site: LoaderSite
    loader: Callable[[], DataLoader[Any] | None]
    """Weak reference to the loader, so that its workers end when the script drops it."""
    dataset: Callable[[], object]
    """Weak reference to its dataset."""
    takes_batch_size: bool
    """True if it was given a batch size, not a batch sampler."""
    was_iterated: bool = False
    is_trained_on: bool = False
    """True if it was iterated while gradients were on."""
    is_between_epochs: bool = False
    """True if it was made between two training epochs."""
    is_searched: bool = True
    """True if the trial's settings apply to it, or there is no trial."""


@dataclass(slots=True)
class Sightings:
    """Record a script's loaders, modules, optimizers and batches; derive baseline and facts."""

    made: list[Made] = field(default_factory=list)
    """All loaders, in the order in which they were made."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps of each optimizer, deleted ones included, in the order of their first steps."""
    _known: WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=WeakKeyDictionary)
    """Key in `steps` of each live optimizer: a script may make a model and an optimizer for each
    client (federated learning)."""

    _latest: torch.optim.Optimizer | None = None
    """The optimizer that stepped last; never read, but held so that at least one still exists."""
    outermost: list[nn.Module] = field(default_factory=list)
    """Modules with trainable parameters that the script itself calls while gradients are on."""
    samples: list[int] = field(default_factory=list)
    """Samples of each batch, or of the first input of the largest outermost module."""
    shapes: Counter[tuple[torch.Size, ...]] = field(default_factory=Counter)
    """Shapes of the tensors of each batch that has some."""
    batches: int = 0
    """Number of batches of the training loader."""
    side_batches: int = 0
    """Number of them for which another loader gave batches too, while gradients were on."""
    spans: list[int] = field(default_factory=list)
    """Batches per step of the optimizer that steps most, even if each client has a new one."""
    autocast: str | None = None
    """The script's own precision if that is not float32."""
    is_double: bool = False
    """True if it computes in float64, which autocast does not change."""
    has_images: bool = False
    framework: str = "plain loop"
    lr: float | None = None
    """Learning rate at the first step, or before torch's schedule changed it."""
    ddp: DistributedDataParallel | None = None
    threads: int = field(default_factory=torch.get_num_threads)
    """Intra-op threads before the script's first line."""
    begun: Begun = field(default_factory=Begun)
    """Cores and launcher before the script's first line."""

    @property
    def most_steps(self) -> int:
        """Number of steps of the optimizer with the most steps."""
        return max(self.steps.values(), default=0)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that still exist."""
        return list(self._known)

    @property
    def main_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer with the most steps, of those that still exist."""
        return max(self._known, key=lambda one: self.steps[self._known[one]])

    @property
    def main_module(self) -> nn.Module | None:
        """The outermost module with the most parameters; None if there is none."""
        return max(
            self.outermost,
            key=lambda module: sum(part.numel() for part in module.parameters()),
            default=None,
        )

    def iterated(self, loader: DataLoader[Any]) -> None:
        """Record that a loader is about to be iterated."""
        for made in self.made:
            if made.loader() is loader:
                made.was_iterated = True
                made.is_trained_on |= torch.is_grad_enabled()

    def batch(self, batch: object, samples: int) -> None:
        """Record a batch of the training loader, and its number of samples."""
        self.batches += 1
        self.samples.append(samples)
        shapes = tuple(tensor.shape for tensor in tensors_of(batch))
        if shapes:
            self.shapes[shapes] += 1

    @property
    def has_fixed_shapes(self) -> bool | None:
        """True if all batches but an epoch's last have the same shapes; None after under three."""
        if self.shapes.total() < 3:  # two may be alike by chance
            return None
        without_sizes = set()
        for shapes in self.shapes:
            without_sizes.add(tuple((len(shape), *shape[1:]) for shape in shapes))
        # An epoch may end with a smaller batch, so that two sizes are allowed.
        return len(without_sizes) == 1 and len(self.shapes) <= 2

    @property
    def accumulation(self) -> int:
        """Most frequent number of batches per step; the larger on a tie, as an epoch's end has fewer."""
        counts = Counter(self.spans)
        return max(counts, key=lambda span: (counts[span], span), default=1)

    @property
    def is_in_step(self) -> bool:
        """True if another loader gives a batch to most steps: their sizes must keep their ratio."""
        if self.batches <= 1:
            return False
        return _IN_STEP_FROM * self.batches <= self.side_batches <= self.batches + 1

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer's step."""
        key = self._known.get(optimizer)
        if key is None:
            key = self._known[optimizer] = len(self.steps)
            self.framework = _framework()
            self.lr = self.lr or _asked_lr(optimizer)
        self.steps[key] += 1
        self._latest = optimizer

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Record the call of an outermost module; return whether the module trains."""
        if not is_trained(module):
            return False
        if not any(module is own for own in self.outermost):
            self.outermost.append(module)
            self.autocast = self.autocast or _weights_half(module)
            self.is_double |= _dtype_of(module) == torch.float64
        device_type = next(module.parameters()).device.type
        if torch.is_autocast_enabled(device_type):
            self.autocast = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
        inputs = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        self.has_images |= any(
            tensor.ndim == IMAGE_DIMS and tensor.is_floating_point() for tensor in inputs
        )
        return True

    def family_of(self, loader: DataLoader[Any]) -> list[Made]:
        """Return the loaders that a framework rebuilt the training loader from, then that loader.

        The former are loaders of the same data that were made earlier and never iterated.
        """
        last = self._made(loader)
        if last is None:
            return []
        family = []
        for made in self.made:
            if made is last:
                break
            is_of_same_data = made.dataset() is last.dataset()
            is_drawn_alike = made.site.is_drawn == last.site.is_drawn
            if is_of_same_data and is_drawn_alike and not made.was_iterated:
                family.append(made)
        return [*family, last]

    def is_remade(self, loader: DataLoader[Any], former: DataLoader[Any]) -> bool:
        """Return whether a loader was made between epochs, like a former one in type and order."""
        new = self._made(loader)
        old = self._made(former)
        if new is None or old is None or not new.is_between_epochs:
            return False
        return old.site.is_like(new.site, ignores_batch_size=True)

    def is_rebuilt_from(self, loader: DataLoader[Any], former: DataLoader[Any]) -> bool:
        """Return whether a remade loader has the former one's data, or is to be trained on."""
        new = self._made(loader)
        old = self._made(former)
        if not self.is_remade(loader, former) or new is None or old is None:
            return False
        has_its_batches = new.is_searched or (old.site.is_like(new.site) and new.site.is_drawn)
        return new.dataset() is old.dataset() or (has_its_batches and torch.is_grad_enabled())

    def site_of(self, loader: DataLoader[Any]) -> LoaderSite | None:
        """Return the call site of a loader; None if it is unknown."""
        made = self._made(loader)
        return None if made is None else made.site

    def _made(self, loader: DataLoader[Any]) -> Made | None:
        return next((made for made in self.made if made.loader() is loader), None)

    def observed(
        self,
        given: TrainingConfig,
        loader: DataLoader[Any] | None,
        ranks: int,
        placeholders: tuple[str, ...],
    ) -> TrainingConfig:
        """Return the script's own configuration, the baseline of a search.

        Args:
            given: The configuration that the user gave; source of values that can't be observed.
            loader: The training loader; None if there is none.
            ranks: Number of processes that train in step.
            placeholders: Settings that the command takes as words; these are as given, too.
        """
        size = getattr(loader, "batch_size", None)
        if not size and self.samples:
            size = median_low(self.samples)
        threads = torch.get_num_threads()
        groups = self.main_optimizer.param_groups if self.steps else []
        own: dict[str, Any] = {
            "micro_batch_size": size or given.micro_batch_size,
            "grad_accum_steps": self.accumulation,
            "lr": self.lr or given.lr,
            "amp_dtype": self._precision(),
            "compile": any(map(_is_compiled, self.outermost)),
            "channels_last": self.has_images and any(map(_is_channels_last, self.outermost)),
            "intra_op_threads": None if threads == self.threads else threads,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "fused": any(bool(group.get("fused")) for group in groups),
        }
        if loader is not None:
            own |= {name: argument_of(loader, name) for name in LOADER_ARGUMENTS}
            own["worker_threads"] = threads_in_workers(loader.worker_init_fn)
        own |= {name: getattr(given, name) for name in placeholders}
        if not own.get("num_workers"):
            own |= NEUTRAL_WITHOUT_WORKERS
        if ranks > 1:
            own |= {"world_size": ranks, "strategy": "ddp", "ddp": self._ddp()}
        return TrainingConfig.model_validate(own)

    def facts(
        self,
        observed: TrainingConfig,
        loader: DataLoader[Any] | None,
        placeholders: tuple[str, ...],
        *,
        modules: tuple[str, ...] = (),
        is_in_process: bool = True,
    ) -> ScriptFacts:
        """Return the facts of a probe: which settings can be changed, and which can't.

        Args:
            observed: The script's own configuration, from `observed`.
            loader: The training loader; None if there is none.
            placeholders: Settings that the command takes as words.
            modules: Modules of installed packages that the script imported.
            is_in_process: The script runs in the trial's process.
        """
        family = [] if loader is None else self.family_of(loader)
        obstacles = self._obstacles(observed, family)
        obstacles |= {name: None for name in placeholders if name != "lr"}
        unreached = [
            setting_unreached(setting=name, reason=code, has_placeholder=name in PLACEHOLDERS)
            for name, code in obstacles.items()
            if code is not None
        ]
        return ScriptFacts(
            observed=observed,
            framework=self.framework,
            loaders=tuple(made.site for made in family),
            reached=tuple(name for name, code in obstacles.items() if code is None),
            unreached=tuple(unreached),
            modules=modules,
            is_in_process=is_in_process,
            placeholders=placeholders,
            device=str(device_of(self.main_optimizer)),
        )

    def workload_facts(
        self,
        observed: TrainingConfig,
        loader: DataLoader[Any] | None,
        script: ScriptFacts,
        *,
        is_sharded: bool,
    ) -> WorkloadFacts:
        """Return the facts that every probe finds, as far as a script shows them.

        Args:
            observed: The script's own configuration.
            loader: The training loader; None if there is none.
            script: The facts from `facts`.
            is_sharded: Workers split a stream between them.
        """
        dataset = None if loader is None else loader.dataset
        has_fixed_size = "micro_batch_size" not in script.reached

        # Parameters by id: modules and optimizers may share them.
        by_id: dict[int, Tensor] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                by_id |= {id(part): part for part in group["params"] if part.requires_grad}
        trained = list(by_id.values())
        in_modules: dict[int, Tensor] = {}
        for module in self.outermost:
            in_modules |= {id(part): part for part in module.parameters()}
        parts = list(in_modules.values()) or trained

        return WorkloadFacts(
            dataset_length=None if dataset is None else length_of(dataset),
            is_iterable=dataset is not None and is_stream(dataset),
            is_sharded=is_sharded,
            fixed_batch_size=observed.micro_batch_size if has_fixed_size else None,
            has_4d_input=self.has_images,
            has_convolutions=has_convolutions(self.outermost),
            has_fixed_shapes=self.has_fixed_shapes,
            parameter_count=sum(part.numel() for part in parts),
            trainable_parameter_count=sum(part.numel() for part in trained),
            gradient_bytes=sum(part.nbytes for part in trained),
            has_buffers=any(True for module in self.outermost for _ in module.buffers()),
            has_unused_parameters=self.ddp is not None and self.ddp.find_unused_parameters,
            is_deterministic=is_deterministic(),
            optimizer=optimizer_facts(self.main_optimizer),
            step_source="the script's own",
            script=script,
        )

    def _precision(self) -> str:
        by_accelerate = str(accelerate_state().get("_mixed_precision"))
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(by_accelerate) or self.autocast
        if mixed:
            return mixed
        is_on_cuda = bool(self.steps) and device_of(self.main_optimizer).type == "cuda"
        return "tf32" if is_on_cuda and allows_tf32() else "float32"

    def _ddp(self) -> DdpConfig | None:
        if self.ddp is None:
            return None
        own = {
            "gradient_as_bucket_view": self.ddp.gradient_as_bucket_view,
            "static_graph": self.ddp.static_graph,
            "find_unused_parameters": self.ddp.find_unused_parameters,
        }
        config = DdpConfig.model_validate(own)
        return None if config == DdpConfig() else config

    def _obstacles(self, observed: TrainingConfig, family: list[Made]) -> dict[str, str | None]:
        """Return the code of the reason why each setting can't be changed from outside; None if it can.

        Settings that would not help here are left out.
        """
        device = device_of(self.main_optimizer)
        found: dict[str, str | None] = {}

        # Settings of the loader
        if family:
            own_size = None if family[0].takes_batch_size else "own_batches"
            found["micro_batch_size"] = "in_step" if self.is_in_step else own_size
            found |= dict.fromkeys(LOADER_SETTINGS)
            if has_epochs(family[-1].dataset()):
                found["persistent_workers"] = "data_by_epoch"
        else:
            found |= dict.fromkeys(("micro_batch_size", "num_workers"), "no_loader")

        # Settings of the modules' calls
        found["amp_dtype"] = self._why_no_precision(observed, family)
        if observed.channels_last:
            found["channels_last"] = "own_layout"
        elif self.has_images:
            found["channels_last"] = None if self.outermost else "no_module"

        # Settings of the process
        if observed.intra_op_threads is not None:
            found["intra_op_threads"] = "own_threads"
        elif device.type == "cpu":
            found["intra_op_threads"] = None
        if can_bind_script(self.begun, observed.world_size, device):
            found["numa_binding"] = None
        if self.ddp is not None:
            found |= dict.fromkeys(f"ddp.{name}" for name in DdpConfig.model_fields)

        return found | self._step_obstacles(observed, device)

    def _why_no_precision(self, observed: TrainingConfig, family: list[Made]) -> str | None:
        """Return why no autocast can be put around the modules, or None."""
        if observed.amp_dtype not in _FULL or self.is_double:
            return "own_precision"
        if observed.world_size > 1:
            return "several_ranks"
        if not family:
            return "not_comparable"  # to float32, batch by batch
        return None if self.outermost else "no_module"

    def _step_obstacles(
        self, observed: TrainingConfig, device: torch.device
    ) -> dict[str, str | None]:
        """Return the same for the settings of the training step."""
        optimizer = self.main_optimizer
        found: dict[str, str | None] = dict.fromkeys(
            ("grad_accum_steps", "compile"), "in_the_script"
        )
        if observed.compile:
            found["compile_mode"] = "in_the_script"
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        if is_torchs and "fused" in optimizer.defaults and not observed.fused:
            found["fused"] = "own_optimizer"
        if device.type == "cuda" and not is_deterministic():
            found["cudnn_benchmark"] = None
        elif device.type == "cuda" and has_convolutions(self.outermost):
            found["cudnn_benchmark"] = "own_algorithms"
        return found


def _asked_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate that the script configured: the peak, or the rate before scheduling.

    Source: torch.optim.lr_scheduler, LRScheduler (initial_lr) and OneCycleLR (max_lr).
    """
    group = optimizer.param_groups[0]
    rate = group.get("max_lr", group.get("initial_lr", group.get("lr")))
    return float(rate) if rate is not None and float(rate) > 0 else None


def _is_channels_last(module: nn.Module) -> bool:
    """Return whether all 4-D parameters are channels_last; shapes that fit both layouts are skipped."""
    images = [
        part for part in module.parameters() if part.ndim == IMAGE_DIMS and min(part.shape[1:]) > 1
    ]
    return bool(images) and all(
        part.is_contiguous(memory_format=torch.channels_last) and not part.is_contiguous()
        for part in images
    )


def is_trained(module: nn.Module) -> bool:
    """Return whether a module trains in the present call: with gradients, and parameters to train."""
    return torch.is_grad_enabled() and any(own.requires_grad for own in module.parameters())


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by torch.compile or in place by its own `compile`."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _weights_half(module: nn.Module) -> str | None:
    """Return the precision of a module whose weights are 16-bit; None for other weights."""
    dtype = _dtype_of(module)
    return str(dtype).removeprefix("torch.") if dtype in {torch.bfloat16, torch.float16} else None


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of most of a module's weights."""
    sizes = Counter[torch.dtype]()
    for part in module.parameters():
        sizes[part.dtype] += part.numel()
    return max(sizes, key=sizes.__getitem__)


def _framework() -> str:
    """Return the framework that calls the optimizer: by the stack, else by the imports."""
    frame = sys._getframe(2)  # noqa: SLF001 - as inspect does, without its cost
    on_stack = set[str]()
    while frame is not None:
        on_stack.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back  # type: ignore[assignment] # None at the outermost
    for module, name in _FRAMEWORKS:
        if module not in sys.modules:
            continue
        if name == "accelerate" and not accelerate_state():
            continue
        package = module.rsplit(".", 1)[0]
        if name in _ON_STACK and not any(one.startswith(package) for one in on_stack):
            continue
        return name
    return "plain loop"


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of an optimizer's parameters; the CPU if it has none."""
    return next(
        (part.device for group in optimizer.param_groups for part in group["params"]),
        torch.device("cpu"),
    )
