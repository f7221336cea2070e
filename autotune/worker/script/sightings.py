"""Record what a script does by itself: loaders, steps, precision, evaluation, traits of its step."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from autotune.note import Note
from autotune.worker.batch import leaves_of, tensors_of
from autotune.worker.build import is_stream, length_of, optimizer_facts
from autotune.worker.device import has_convolutions, is_deterministic
from autotune.worker.script.hooks import has_epochs
from autotune.worker.script.overrides import Begun, accelerate_state, as_begun, can_bind_script

# What a script's own step is like, as far as settings of the step depend on it, and which of these
# are within reach.
#
# Comes in: the script's modules, its batches and its optimizer, as Sightings have them. Goes out:
# values that are observed, facts of the workload, and for each of these settings whether it can be
# changed from outside.


@dataclass(slots=True)
class BatchShapes:
    """Shapes of the batches that a script trains on."""

    seen: Counter[tuple[torch.Size, ...]] = field(default_factory=Counter)

    def see(self, batch: object) -> None:
        """Its loader has handed one on; one without tensors tells nothing."""
        shapes = tuple(tensor.shape for tensor in tensors_of(batch))
        if shapes:
            self.seen[shapes] += 1

    @property
    def are_fixed(self) -> bool | None:
        """Whether all are of the same shapes, but for an epoch's last one; None: too few were seen."""
        if self.seen.total() < 3:  # two may be alike by chance
            return None
        is_alike = (
            len({tuple((len(shape), *shape[1:]) for shape in each) for each in self.seen}) == 1
        )
        return (
            is_alike and len(self.seen) <= 2
        )  # one size, and the smaller one that an epoch may end with


def observed_step(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The values that a script has of these settings; of an optimizer that is not known, torch's own."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "fused": any(bool(group.get("fused")) for group in groups),
    }


def asked_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate that the script has asked for: before a schedule has changed it; its peak, where that is told.

    Source: torch.optim.lr_scheduler, LRScheduler (initial_lr) and OneCycleLR (max_lr).
    """
    group = optimizer.param_groups[0]
    rate = group.get("max_lr", group.get("initial_lr", group.get("lr")))
    return float(rate) if rate is not None and float(rate) > 0 else None


def is_channels_last(module: nn.Module) -> bool:
    """Whether the 4-D parameters of a module are laid out so, wherever that can be told."""
    images = [
        part for part in module.parameters() if part.ndim == IMAGE_DIMS and min(part.shape[1:]) > 1
    ]
    return bool(images) and all(
        part.is_contiguous(memory_format=torch.channels_last) and not part.is_contiguous()
        for part in images
    )


def step_facts(modules: Iterable[nn.Module], shapes: BatchShapes) -> dict[str, Any]:
    """What of WorkloadFacts says whether these settings can bring anything."""
    return {"has_convolutions": has_convolutions(modules), "has_fixed_shapes": shapes.are_fixed}


def reached_step(device_type: str) -> Iterator[str]:
    """Settings of the step that can be changed from outside."""
    if device_type == "cuda" and not is_deterministic():
        yield "cudnn_benchmark"


def unreached_step(
    optimizer: torch.optim.Optimizer,
    device_type: str,
    modules: Iterable[nn.Module],
    *,
    is_compiled: bool,
) -> dict[str, str]:
    """Those that can't be, each with a code of the reason; one that could bring nothing here is left out."""
    reasons: dict[str, str] = {}
    if is_compiled:
        reasons["compile_mode"] = "in_the_script"
    is_torchs = (
        type(optimizer).__module__.startswith("torch.optim.") and "fused" in optimizer.defaults
    )
    if is_torchs and not observed_step(optimizer)["fused"]:
        reasons["fused"] = "own_optimizer"
    if device_type == "cuda" and has_convolutions(modules):
        reasons["cudnn_benchmark"] = "own_algorithms"
    return reasons


# Tracks a script's other loaders: an evaluation is no training, a second loader in step with the
# first one is.
#
# Comes in: when such a loader is begun, gives a batch, or ends, when an optimizer steps, and when a
# batch of the training loader is asked for. Goes out: seconds that belong to no block, and how many
# of them were training on such a loader.


_IN_A_ROW = 2
"""Batches of such loaders without a training batch between them that make an evaluation, if a
loader does not end by itself: our convention. Loaders that are iterated in step (zip) give one at a
time."""


@dataclass(slots=True)
class Beside:
    """The other loaders of a script whose training loader is known."""

    trained_s: float = 0.0
    """Seconds of training on other loaders, all of which are left out."""
    waited_s: float = 0.0
    """Seconds of them in which it waited for a batch."""
    site: LoaderSite | None = None
    """The last of these loaders, where its place is known."""
    steps: int = 0
    """Optimizer steps on its batches, with no batch of the training loader since."""
    _turn_since: float | None = None
    """When the first of these steps was made."""
    _seconds: float = 0.0
    _since: float | None = None
    """When one was begun, with no training batch since."""
    _until: float = 0.0
    _batches: int = 0
    _since_training: int = 0
    """Batches of other loaders since the last one of the training loader, whenever they were begun."""
    _trains: bool = False
    _waited_s: float = 0.0

    def begin(self) -> None:
        """A loader is about to be iterated."""
        if self._since is None:
            self._since = perf_counter()
            self._batches = 0
            self._trains = False
            self._waited_s = 0.0

    @property
    def turn_s(self) -> float:
        """Seconds since the first of these steps."""
        return 0.0 if self._turn_since is None else perf_counter() - self._turn_since

    def on_batch(self, waited_s: float) -> None:
        """It has given a batch, after some seconds."""
        self._batches = self._batches + 1
        self._since_training = self._since_training + 1
        self._until = perf_counter()
        self._waited_s += waited_s

    def on_step(self) -> None:
        """An optimizer has stepped."""
        if self._since_training:
            self._trains = True
            self.steps = self.steps + 1
            self._turn_since = self._turn_since or perf_counter()

    def end(self) -> None:
        """It has come to its end by itself."""
        self._leave_out(perf_counter())

    def on_training(self) -> None:
        """A batch of the training loader is asked for."""
        if self._batches >= _IN_A_ROW:
            self._leave_out(self._until)
        self._since = self._turn_since = None
        self.steps = self._since_training = 0

    def _leave_out(self, until: float) -> None:
        if self._since is not None:
            self._seconds += until - self._since
            if self._trains:
                self.trained_s = self.trained_s + until - self._since
                self.waited_s = self.waited_s + self._waited_s
        self._since = None

    def add(self, seconds: float) -> None:
        """Leave out seconds in which nobody could tell what was trained on."""
        self._seconds += seconds

    def take(self) -> float:
        """Seconds that were no training, since this was last asked."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


# What a script does by itself, as seen at torch's seams: its loaders, its steps, its precision, who
# runs its loop.
#
# Comes in: what the session is told while the script trains. Goes out: the baseline and the facts
# of a probe, and for each setting whether it is within reach.


_IN_STEP_FROM = 0.5
"""Batches of another loader for each batch of the training loader, from which on both are read in
step: ours."""
_FRAMEWORKS = (("transformers.trainer", "transformers"), ("lightning.pytorch.trainer.trainer", "lightning"),
               ("pytorch_lightning.trainer.trainer", "lightning"), ("composer.trainer.trainer", "composer"),
               ("ignite.engine.engine", "ignite"), ("fastai.learner", "fastai"), ("timm.data.loader", "timm"),
               ("accelerate.state", "accelerate"))  # fmt: skip
"""Modules whose code stands in the stack where an optimizer steps, or that were imported, the most
special first."""
_FULL = {"float32", "tf32"}
"""Precisions of weights and activations in float32: an autocast may be put around these."""
_ON_STACK = {"transformers", "lightning", "composer", "ignite", "fastai"}


@dataclass(slots=True)
class Made:
    """A loader that was made."""

    site: LoaderSite
    loader: Callable[[], DataLoader[Any] | None]
    """None once the script holds it no more: whoever makes a loader for each epoch lets its workers
    end by that."""
    dataset: Callable[[], object]
    """None once nobody holds it any more."""
    takes_batch_size: bool
    """It was given a batch size, not batches."""
    was_iterated: bool = False
    is_trained_on: bool = False
    """It was iterated while gradients were on."""
    is_between_epochs: bool = False
    """It was made while a training epoch was over and the next had not begun."""
    is_searched: bool = True
    """It has the settings of the trial, or there are none."""


@dataclass(slots=True)
class Sightings:
    """What was seen so far."""

    made: list[Made] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    """Steps of each optimizer, those that are gone too, in the order of their first steps."""
    _known: WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=WeakKeyDictionary)
    """Which of them each is, as long as it lives: a script may make one, and a model, for each
    client."""
    _latest: torch.optim.Optimizer | None = None
    outermost: list[nn.Module] = field(default_factory=list)
    """Modules with parameters to train that the script calls by itself, while gradients are on."""
    samples: list[int] = field(default_factory=list)
    """Of the batches, or of the largest outermost module's inputs."""
    shapes: BatchShapes = field(default_factory=BatchShapes)
    batches: int = 0
    batches_beside: int = 0
    """Batches beside which another loader gave one, or several, while gradients were on."""
    spans: list[int] = field(default_factory=list)
    """Batches of each step of the optimizer that steps most, be it a new one for each client."""
    autocast: str | None = None
    """The precision that the script itself computes in, where that is not float32."""
    is_double: bool = False
    """It computes in float64, which an autocast leaves alone."""
    has_images: bool = False
    framework: str = "plain loop"
    lr: float | None = None
    """That of the first step, or before a schedule of torch's has changed it."""
    ddp: DistributedDataParallel | None = None
    threads: int = field(default_factory=torch.get_num_threads)
    """Before the script's first line."""
    begun: Begun = field(default_factory=as_begun)

    @property
    def most_steps(self) -> int:
        """Steps of the optimizer that has made most."""
        return max(self.steps.values(), default=0)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that live."""
        return list(self._known)

    @property
    def main_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that has made most steps, of those that live."""
        return max(self._known, key=lambda one: self.steps[self._known[one]])

    @property
    def main_module(self) -> nn.Module | None:
        """The outermost module with most parameters."""
        sizes = [
            (sum(part.numel() for part in module.parameters()), module) for module in self.outermost
        ]
        return max(sizes, key=lambda pair: pair[0])[1] if sizes else None

    def iterated(self, loader: DataLoader[Any]) -> None:
        """A loader is about to be iterated."""
        for made in self.made:
            if made.loader() is loader:
                made.was_iterated = True
                made.is_trained_on |= torch.is_grad_enabled()

    @property
    def accumulation(self) -> int:
        """Return the most frequent number of batches of a step, on a tie the larger: an epoch's last step has fewer."""
        counts = Counter(self.spans)
        return max(counts, key=lambda span: (counts[span], span), default=1)

    @property
    def is_in_step(self) -> bool:
        """Another loader gives a batch to about each step as well: a change of one of them would break their ratio."""
        return (
            self.batches > 1
            and _IN_STEP_FROM * self.batches <= self.batches_beside <= self.batches + 1
        )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        key = self._known.get(optimizer)
        if key is None:
            key = self._known[optimizer] = len(self.steps)
            self.framework = _framework()
            self.lr = self.lr or asked_lr(optimizer)
        self.steps[key] = self.steps.get(key, 0) + 1
        self._latest = optimizer

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """An outermost module was called; whether it is one that trains."""
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
        """The training loader, last, and the loaders of its data that were only made to be rebuilt."""
        place = next(
            (place for place, made in enumerate(self.made) if made.loader() is loader), None
        )
        if place is None:
            return []
        last = self.made[place]
        rebuilt = (
            made
            for made in self.made[:place]
            if made.dataset() is last.dataset()
            and not made.was_iterated
            and made.site.is_drawn == last.site.is_drawn
        )
        return [*rebuilt, last]

    def is_remade(self, loader: DataLoader[Any], former: DataLoader[Any]) -> bool:
        """Return whether a loader was made between two epochs as a former one was, of the same type of data."""
        new = self._made(loader)
        old = self._made(former)
        if new is None or old is None or not new.is_between_epochs:
            return False
        return old.site.is_like(new.site, ignores_batch_size=True)

    def is_anew(self, loader: DataLoader[Any], former: DataLoader[Any]) -> bool:
        """Return whether one that is remade is so of the same data, or to be trained on."""
        new = self._made(loader)
        old = self._made(former)
        if not self.is_remade(loader, former) or new is None or old is None:
            return False
        has_its_batches = new.is_searched or (old.site.is_like(new.site) and new.site.is_drawn)
        return new.dataset() is old.dataset() or (has_its_batches and torch.is_grad_enabled())

    def site_of(self, loader: DataLoader[Any]) -> LoaderSite | None:
        """Return where a loader was made; None where nobody saw that."""
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
        """What the script does by itself; what nobody sees, and what its command takes as words, is as given."""
        size = getattr(loader, "batch_size", None) or (
            median_low(self.samples) if self.samples else 0
        )
        own: dict[str, Any] = {
            "micro_batch_size": size or given.micro_batch_size,
            "grad_accum_steps": self.accumulation,
            "lr": self.lr or given.lr,
            "amp_dtype": self._precision(),
            "compile": any(map(_is_compiled, self.outermost)),
            "channels_last": self.has_images and any(map(is_channels_last, self.outermost)),
            "intra_op_threads": None
            if torch.get_num_threads() == self.threads
            else torch.get_num_threads(),
            **observed_step(self.main_optimizer if self.steps else None),
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
    ) -> ScriptFacts:
        """What is within reach, and what is not."""
        family = [] if loader is None else self.family_of(loader)
        reached = dict.fromkeys(self._reached(observed, family, placeholders))
        return ScriptFacts(
            observed=observed,
            framework=self.framework,
            loaders=tuple(made.site for made in family),
            reached=tuple(reached),
            unreached=tuple(self._unreached(observed, family, frozenset(reached))),
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
        """The facts that any probe finds, as far as a script shows them."""
        optimizer = self.main_optimizer
        dataset = None if loader is None else loader.dataset
        trained = [
            part
            for own in self.optimizers
            for group in own.param_groups
            for part in group["params"]
        ]
        trained = list({id(part): part for part in trained if part.requires_grad}.values())
        everything = {id(part): part for module in self.outermost for part in module.parameters()}
        parts = [*everything.values()] or trained
        return WorkloadFacts(
            dataset_length=None if dataset is None else length_of(dataset),
            is_iterable=dataset is not None and is_stream(dataset),
            is_sharded=is_sharded,
            fixed_batch_size=None
            if "micro_batch_size" in script.reached
            else observed.micro_batch_size,
            has_4d_input=self.has_images,
            **step_facts(self.outermost, self.shapes),
            parameter_count=sum(part.numel() for part in parts),
            trainable_parameter_count=sum(part.numel() for part in trained),
            gradient_bytes=sum(part.nbytes for part in trained),
            has_buffers=any(True for module in self.outermost for _ in module.buffers()),
            has_unused_parameters=self.ddp is not None and self.ddp.find_unused_parameters,
            is_deterministic=is_deterministic(),
            optimizer=optimizer_facts(optimizer),
            step_source="the script's own",
            script=script,
        )

    def _precision(self) -> str:
        mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(
            str(accelerate_state().get("_mixed_precision"))
        )
        is_tf32 = (
            device_of(self.main_optimizer).type == "cuda" and allows_tf32() if self.steps else False
        )
        return mixed or self.autocast or ("tf32" if is_tf32 else "float32")

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

    def _takes_precision(self, observed: TrainingConfig) -> bool:
        """Return whether an autocast can be put around its modules: it computes in float32 by itself."""
        return observed.amp_dtype in _FULL and not self.is_double

    def _why_no_precision(self, observed: TrainingConfig, family: list[Made]) -> str:
        if not self._takes_precision(observed):
            return "own_precision"
        if observed.world_size > 1:
            return "several_ranks"
        return "not_comparable" if not family else "no_module"

    def _reached(
        self, observed: TrainingConfig, family: list[Made], placeholders: tuple[str, ...]
    ) -> Iterator[str]:
        yield from (name for name in placeholders if name != "lr")
        if family:
            is_told = has_epochs(family[-1].dataset())
            yield from (
                name for name in LOADER_SETTINGS if name != "persistent_workers" or not is_told
            )
            if family[0].takes_batch_size and not self.is_in_step:
                yield "micro_batch_size"
        if (
            self._takes_precision(observed)
            and self.outermost
            and family
            and observed.world_size == 1
        ):
            yield "amp_dtype"
        if self.has_images and self.outermost and not observed.channels_last:
            yield "channels_last"
        if observed.intra_op_threads is None and device_of(self.main_optimizer).type == "cpu":
            yield "intra_op_threads"
        if can_bind_script(self.begun, observed.world_size, device_of(self.main_optimizer)):
            yield "numa_binding"
        if self.ddp is not None:
            yield from (f"ddp.{name}" for name in DdpConfig.model_fields)
        yield from reached_step(device_of(self.main_optimizer).type)

    def _unreached(
        self, observed: TrainingConfig, family: list[Made], reached: frozenset[str]
    ) -> Iterator[Note]:
        reasons = {
            "micro_batch_size": "no_loader"
            if not family
            else "in_step"
            if self.is_in_step
            else "own_batches",
            "num_workers": "no_loader",
            "grad_accum_steps": "in_the_script",
            "amp_dtype": self._why_no_precision(observed, family),
            "compile": "in_the_script",
        }
        if family and has_epochs(family[-1].dataset()):
            reasons["persistent_workers"] = "data_by_epoch"
        if self.has_images:
            reasons["channels_last"] = "own_layout" if observed.channels_last else "no_module"
        if observed.intra_op_threads is not None:
            reasons["intra_op_threads"] = "own_threads"
        kind = device_of(self.main_optimizer).type
        reasons |= unreached_step(
            self.main_optimizer, kind, self.outermost, is_compiled=observed.compile
        )
        for name, reason in reasons.items():
            if name not in reached:
                yield setting_unreached(
                    setting=name, reason=reason, has_placeholder=name in PLACEHOLDERS
                )


def is_trained(module: nn.Module) -> bool:
    """Whether a module that is being called trains."""
    return torch.is_grad_enabled() and any(own.requires_grad for own in module.parameters())


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a module was compiled, by torch.compile or in place by its own `compile`."""
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _weights_half(module: nn.Module) -> str | None:
    """The 16-bit precision of most of a module's weights, which it computes in without any autocast."""
    dtype = _dtype_of(module)
    return str(dtype).removeprefix("torch.") if dtype in {torch.bfloat16, torch.float16} else None


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The type of most of a module's weights."""
    sizes = Counter[torch.dtype]()
    for part in module.parameters():
        sizes[part.dtype] += part.numel()
    return max(sizes, key=sizes.__getitem__)


def _framework() -> str:
    """Who calls the optimizer: by the stack, else by what was imported."""
    frame = sys._getframe(2)  # noqa: SLF001 - the way that inspect goes, without its cost
    files = set[str]()
    while frame is not None:
        files.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back  # type: ignore[assignment] # None at the outermost
    for module, name in _FRAMEWORKS:
        is_there = module in sys.modules and (name != "accelerate" or accelerate_state())
        if is_there and (
            name not in _ON_STACK
            or any(file.startswith(module.rsplit(".", 1)[0]) for file in files)
        ):
            return name
    return "plain loop"


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where the parameters of an optimizer lie."""
    return next(
        (part.device for group in optimizer.param_groups for part in group["params"]),
        torch.device("cpu"),
    )
