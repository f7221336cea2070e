"""Prepare a training loop: the model's layout and wrappers, the optimizer, gradient accumulation.

Used by trials and, through TrainingConfig's methods, by the user's own loop.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from inspect import signature, unwrap
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.apply.cores import (
    addresses_of_ranks,
    bind_rank,
    can_bind,
    compile_cache_variables,
    is_bound_by_launcher,
    local_rank,
    local_ranks,
    own_device,
    set_cudnn_benchmark,
    set_current,
    set_threads,
    usable_cores,
)
from autotune.apply.precision import tf32_products
from autotune.config.training_config import TORCH_BUCKET_CAP_MB, DdpConfig
from autotune.errors import ConfigError
from autotune.messages.space import first_bucket_without_effect
from autotune.note import Note

if TYPE_CHECKING:
    from autotune.config.training_config import TrainingConfig


# A model on several devices


_AS_TORCH_HAS_THEM = {
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "bucket_cap_mb",
}


def check_group(process_count: int) -> None:
    """Check that an open process group has the size that a configuration was measured with.

    Raises:
        ConfigError: It has another size.
    """
    group: Any = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() != process_count:
        raise ConfigError(
            f"a process group must be as large as the configuration's, {process_count}, since its "
            f"global batch and learning rate rest on that, but it has {group.get_world_size()}; "
            f"start training with {process_count} processes (on one machine: torchrun "
            f"--nproc-per-node {process_count}), or search with `world_size` as you train"
        )


def distributed(
    model: nn.Module, device: torch.device, wanted: DdpConfig, *, is_trial: bool = False
) -> nn.Module:
    """Wrap the model in DistributedDataParallel with its communication hook; a process group must be open."""
    if not is_trial and without_effect_here(wanted):  # a trial notes it
        warnings.warn(
            f"ddp.first_bucket_mb has no effect with torch {torch.__version__}", stacklevel=4
        )
    ids = None if device.index is None else [device.index]
    parallel = DistributedDataParallel(model, device_ids=ids, **ddp_arguments(wanted))
    if wanted.comm_hook is not None:
        parallel.register_comm_hook(*comm_hook(wanted.comm_hook, is_trial=is_trial))
    return parallel


def ddp_arguments(wanted: DdpConfig) -> dict[str, Any]:
    """Return the arguments of DistributedDataParallel that the installed torch has for these settings."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments = wanted.model_dump(include=_AS_TORCH_HAS_THEM, exclude_none=True)
    if wanted.first_bucket_mb is not None and "bucket_cap_mb_list" in known:
        arguments["bucket_cap_mb_list"] = [
            wanted.first_bucket_mb,
            wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB,
        ]
        arguments.pop("bucket_cap_mb", None)
    # True is torch's default, and a newer torch warns about the old argument.
    if not wanted.broadcast_buffers:
        newer = "forward_sync_buffers"
        arguments[newer if newer in known else "broadcast_buffers"] = False
    return {name: value for name, value in arguments.items() if name in known}


def without_effect_here(wanted: DdpConfig) -> tuple[Note, ...]:
    """Return notes on settings that the installed torch lacks."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if wanted.first_bucket_mb is not None and "bucket_cap_mb_list" not in known:
        return (first_bucket_without_effect(torch.__version__),)
    return ()


class _DataParallel(nn.DataParallel[nn.Module]):
    """DataParallel whose replicas use the caller's autocast dtype.

    Each replica runs in a thread, and autocast is per thread. torch enters it there again, but
    without the dtype: in CUDA's default, float16, and so without the GradScaler that float16 needs.
    Source: torch/nn/parallel/parallel_apply.py, torch 2.9 to 2.13.

    These threads launch all devices' kernels under one GIL, and each step copies the model to the
    devices, so several devices can be slower than one. Searches therefore begin with
    DistributedDataParallel (first_guesses in tuning/proposals.py) and try DataParallel in one
    trial. Source: pytorch.org, "CUDA semantics", "Use
    nn.parallel.DistributedDataParallel instead of multiprocessing or nn.DataParallel".
    """

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica on its share of the batch."""
        kind = self.src_device_obj.type
        dtype = torch.get_autocast_dtype(kind)
        is_on = torch.is_autocast_enabled(kind)

        def in_precision(replica: nn.Module) -> Callable[..., Any]:
            def run(
                *args: Any, **named: Any
            ) -> Any:  # autocast's own decorator would copy the replica's attributes
                with torch.autocast(kind, dtype=dtype, enabled=is_on):
                    return replica(*args, **named)

            return run

        cast: Any = [in_precision(replica) for replica in replicas]  # torch only calls them
        return super().parallel_apply(cast, inputs, kwargs)


def comm_hook(name: str, *, is_trial: bool) -> tuple[Any, Any]:
    """Return the state and the hook. Source: torch.distributed.algorithms.ddp_comm_hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None)
        if is_trial:
            state.start_powerSGD_iter = 2  # torch's own is 1000 iterations, far beyond a trial
        return state, powerSGD_hook.powerSGD_hook
    return None, {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }[name]


# The optimizer: each trial makes a fresh one like the user's, and switches `fused`


_WRAPPERS = {("accelerate", "AcceleratedOptimizer"), ("lightning", "LightningOptimizer")}
"""Package and class of framework wrappers, which keep the optimizer as `optimizer`."""


class ForeignParametersError(ValueError):
    """Raised if an optimizer does not train the model given with it; the message has the remedy."""


def inner_optimizer(given: Any) -> Any:
    """Unwrap an optimizer from a framework's wrapper; return anything else as it is."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__}
    return given.optimizer if kinds & _WRAPPERS else given


def base_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of the first group before any schedule; None if it is missing or 0.

    A schedule keeps the initial one as `initial_lr`: with a warm-up the current one is 0.
    Source: torch.optim.lr_scheduler.LRScheduler.
    """
    lr = _lr_of(optimizer.param_groups[0])
    return lr or None


def stateless(given: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes without its state, for `__setstate__`.

    Also without `step`, which a schedule wraps. Hook dicts are copied, so that hooks added to the
    new optimizer do not reach the old one.
    """
    kept = {name: value for name, value in vars(given).items() if name != "step"}
    hooks = {
        name: OrderedDict(value) for name, value in kept.items() if isinstance(value, OrderedDict)
    }
    return {**kept, **hooks, "state": defaultdict(dict)}


def optimizer_like(
    given: torch.optim.Optimizer, parameters: Sequence[Tensor], lr: float
) -> torch.optim.Optimizer:
    """Return a fresh optimizer with the class, groups, settings and hooks of another.

    The given one is not changed. Learning rates of the groups keep their ratio.

    Args:
        given: The user's optimizer.
        parameters: Parameters of the model; all in the groups that require a gradient must be
            among them.
        lr: Learning rate of the first group; of all groups if the first has none above 0.

    Raises:
        ForeignParametersError: A parameter is not among them.
    """
    trained = set(parameters)
    own = [parameter for group in given.param_groups for parameter in group["params"]]
    strangers = sum(parameter.requires_grad and parameter not in trained for parameter in own)
    if strangers:
        raise ForeignParametersError(
            f"an optimizer must train parameters of the model that is given, but {strangers} of its "
            f"{len(own)} belong to none of its modules; give the model itself in place of a "
            "function that makes one, or optimizer=lambda params, lr: ..."
        )
    base = base_lr(given)
    groups = []
    for group in given.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not trainable:
            continue
        changed = {**group, "params": trainable}
        before = _lr_of(group)
        if before is not None:
            changed["lr"] = lr if base is None else before * (lr / base)
        groups.append(changed)
    # Not by the constructor, which may need more than the groups have.
    made: torch.optim.Optimizer = object.__new__(type(given))
    defaults = dict(given.defaults)
    if "lr" in defaults:
        defaults["lr"] = lr
    made.__setstate__({**stateless(given), "param_groups": groups, "defaults": defaults})
    return made


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if it uses torch's fused implementation."""
    return any(bool(group.get("fused")) for group in optimizer.param_groups)


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if torch has a fused implementation of an optimizer for its parameters.

    Only torch's own classes have one; a subclass inherits it if it keeps the constructor's arguments
    and the step. A trial step on one number of each dtype and device shows if the kernels exist.
    Sparse gradients, which no fused step accepts, only show up in training.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not _has_fused_step(type(optimizer)) or any(group.get("differentiable") for group in groups):
        return False
    if not all(
        type(one) in {Tensor, nn.Parameter} and one.is_floating_point() for one in parameters
    ):
        return False
    places = {(parameter.dtype, parameter.device) for parameter in parameters}
    return all(_steps_fused(type(optimizer), *place) for place in places)


def set_fused(optimizer: torch.optim.Optimizer, *, is_on: bool) -> None:
    """Switch an optimizer to or from torch's fused implementation, as its constructor would.

    When switched off, `fused` is None, so that torch chooses (foreach on a GPU); with False it would
    loop over the parameters. Step counts are kept on the device where the implementation expects
    them. Source: torch/optim/sgd.py, adam.py, adagrad.py
    (constructors, _init_group, "Respect when the user inputs False/True") and
    torch/amp/grad_scaler.py (_step_supports_amp_scaling), torch 2.9 to 2.13.
    """
    chosen = {"fused": True if is_on else None, "foreach": None}
    optimizer.defaults.update(chosen)
    for name in ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"):
        setattr(optimizer, name, is_on)
    for group in optimizer.param_groups:
        group.update(chosen)
        for parameter in group["params"]:
            step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if step is not None:
                place = parameter.device if is_on or group.get("capturable") else "cpu"
                optimizer.state[parameter]["step"] = torch.as_tensor(
                    step, dtype=torch.float32, device=place
                )


def _has_fused_step(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True for a class of torch with `fused`, or a subclass with the same arguments and step.

    torch wraps the step of a class when its first optimizer is made.
    """
    torch_kinds = [own for own in kind.__mro__ if own.__module__.startswith("torch.optim.")]
    if not torch_kinds:
        return False
    base: Any = torch_kinds[0]
    arguments = [*signature(base.__init__).parameters]
    if "fused" not in arguments or [*signature(kind.__init__).parameters] != arguments:
        return False
    return unwrap(kind.step) is unwrap(base.step)


def _steps_fused(kind: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a fused step on one number works."""
    number = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    number.grad = torch.zeros_like(number)
    try:
        kind([number], fused=True).step()
    except (RuntimeError, TypeError, ValueError):  # no such kernel, or no such combination
        return False
    return True


def _lr_of(group: dict[str, Any]) -> float | None:
    """Return a group's learning rate before any schedule; None if the optimizer finds its own."""
    lr = group.get("initial_lr", group.get("lr"))
    return None if lr is None else float(lr)


# The accumulator


class _Stage(Enum):
    """Progress within a batch, in words for a message."""

    OUTSIDE = "outside of one"
    FORWARD = "in the forward pass"
    DONE = "a second time"


@dataclass(slots=True, kw_only=True)
class Accumulator:
    """Run backward passes and optimizer steps: precision, gradient accumulation, DDP's exchange.

        accumulator = config.accumulator(model, optimizer)
        for batch in loader:
            with accumulator:
                loss = loss_of(model, config.to_device(batch))
                accumulator.backward(loss)

    Inside the `with`, autocast is on if the configuration has it. Gradients are zeroed after each
    step: do not zero them yourself. Batches left over at the end of an epoch count for the next
    epoch's first step, as in trials; `reset` drops them.

    With CUDA graphs, the next batch overwrites the model's outputs, including a loss that it
    computes: read or clone them before.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    steps: int
    """Batches per optimizer step on one rank."""
    device_type: str = "cpu"
    """torch's name for the kind of device that the model is on."""
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    """Makes the autocast context. None: the precision holds for the whole process, or is torch's default."""
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    """DDP's no_sync, which keeps gradients on their rank. None without DDP, and for a static graph,
    where DDP can't skip the exchange."""
    gathers: bool = False
    """True for DataParallel, which returns one loss per device if the model computes its loss."""
    exchanges_nothing: bool = False
    """True to never exchange gradients, not even in the last batch of a step."""
    records_graphs: bool = False
    """True if the model is compiled in a mode that records CUDA graphs."""
    accumulated: int = 0
    """Batches since the last optimizer step."""
    _contexts: ExitStack = field(default_factory=ExitStack, init=False)
    """Contexts of the batch that is under way."""
    _stage: _Stage = field(default=_Stage.OUTSIDE, init=False)

    def __enter__(self) -> Self:
        """Begin a batch. no_sync covers both passes, since DDP prepares the exchange in the forward pass.

        Raises:
            RuntimeError: The batch before has not ended.
        """
        if self._stage is not _Stage.OUTSIDE:
            raise RuntimeError(
                "a batch must end before the next begins: one `with accumulator` for each, but it "
                "is entered twice"
            )
        if self.records_graphs:
            # Otherwise an output without a backward pass makes torch keep those of all batches.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call] # torch
        is_last = self.accumulated + 1 >= self.steps
        if self.no_sync is not None and (self.exchanges_nothing or not is_last):
            self._contexts.enter_context(self.no_sync())
        if self.autocast is not None:
            self._contexts.enter_context(self.autocast())
        self._stage = _Stage.FORWARD
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stage = _Stage.OUTSIDE
        self._contexts.__exit__(*raised)

    def backward(self, loss: Tensor, *, before_step: Callable[[], object] | None = None) -> bool:
        """Run the backward pass of a batch, and the optimizer step if one is due.

        It runs without autocast, as torch recommends. If it raises, the batches since the last step
        are dropped.

        Args:
            loss: The mean loss of the batch, a scalar.
            before_step: Called right before a step with unscaled gradients, for example to clip
                them. With float16 they may be infinite; the GradScaler then skips the step. Trials
                don't clip, so their throughput does not include its cost.

        Returns:
            True if a step was due. The GradScaler may have skipped it if gradients were not finite.

        Raises:
            RuntimeError: It is called outside of a `with`, or a second time in one.
        """
        if self._stage is not _Stage.FORWARD:
            raise RuntimeError(
                "backward must be called once in each `with accumulator`, but was called "
                f"{self._stage.value}; of several losses give the sum"
            )
        self._stage = _Stage.DONE
        if self.gathers and loss.ndim == 1:
            loss = loss.mean()
        # Dividing by 1 would cost 14 us, backward pass included.
        share = loss if self.steps == 1 else loss / self.steps
        try:
            self._without_autocast(self.scaler.scale(share))
            self.accumulated += 1
            if self.accumulated < self.steps:
                self._keep_gradients()
                return False
            self._step(before_step)
        except BaseException:
            self.reset()
            raise
        return True

    def reset(self) -> None:
        """Drop the accumulated gradients, as after a step or when a loop stops before one."""
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

    def _keep_gradients(self) -> None:
        """Copy the first batch's gradients out of a CUDA graph's memory; later ones are added in place.

        autograd uses a graph's gradients as `grad` without a copy; the next batch would overwrite
        them, and torch raises. Preallocated zeros would give a gradient to parameters that have
        none. Source:
        github.com/pytorch/pytorch/issues/169545, and in torch 2.13
        torch/_inductor/cudagraph_trees.py, format_dealloc_msg.

        Gradients of a dtype are copied in a few launches, as torch's optimizers step, since one
        kernel per parameter would cost what graphs save. That function has no public name.
        """
        if not self.records_graphs or self.accumulated != 1:
            return
        dense = defaultdict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]](list)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.layout == torch.strided:
                    dense[gradient.device, gradient.dtype].append((parameter, gradient))
                else:  # from an embedding outside of the graph
                    parameter.grad = gradient.clone()
        for pairs in dense.values():
            copies = [torch.empty_like(gradient) for _, gradient in pairs]
            torch._foreach_copy_(copies, [gradient for _, gradient in pairs])
            for (parameter, _), copy in zip(pairs, copies, strict=True):
                parameter.grad = copy

    def _without_autocast(self, loss: Tensor) -> None:
        if self.autocast is None:
            loss.backward()  # type: ignore[no-untyped-call] # torch
            return
        # Free the cast weights before the gradients need memory.
        torch.clear_autocast_cache()
        was_on = torch.is_autocast_enabled(self.device_type)
        torch.set_autocast_enabled(self.device_type, False)
        try:
            loss.backward()  # type: ignore[no-untyped-call] # torch
        finally:
            torch.set_autocast_enabled(self.device_type, was_on)

    def _step(self, before_step: Callable[[], object] | None) -> None:
        try:
            if before_step is not None:
                self.scaler.unscale_(self.optimizer)
                before_step()
            self.scaler.step(self.optimizer)
        except BaseException:
            with suppress(AssertionError):  # raised if it has not unscaled yet
                self.scaler.update()  # otherwise it takes the next gradients for unscaled
            raise
        self.scaler.update()
        self.reset()


# TrainingConfig.prepare


def prepared(
    config: TrainingConfig, model: nn.Module, device: str | torch.device | None
) -> nn.Module:
    """Implement TrainingConfig.prepare."""
    check_group(config.process_count)
    # False leaves the switch as it is, since it is the default of a configuration.
    if config.cudnn_benchmark:
        set_cudnn_benchmark(is_on=True)
    is_rank = config.process_count > 1
    place = own_device(is_rank=is_rank) if device is None else torch.device(device)
    set_current(place)
    # Bind to cores, or set the threads of an unbound process.
    binding = config.numa_binding
    if binding is not None and not can_bind(place):
        warnings.warn(
            "numa_binding has no effect: processes are bound to cores on Linux alone, with CUDA "
            "and ROCm devices or on the CPU",
            stacklevel=3,
        )
        binding = None
    if binding is None:
        ranks_here = local_ranks(config.process_count) if is_rank else None
        set_threads(config.intra_op_threads, ranks_here)
    else:
        _bind(config, binding, place)
    if config.amp_dtype == "tf32":
        tf32_products().__enter__()
    if config.compile:
        os.environ.update(compile_cache_variables())
    return arranged(config, model, place)


def _bind(config: TrainingConfig, binding: str, device: torch.device) -> None:
    """Bind this process like a trial's rank, unless a launcher has, and set its threads.

    Raises:
        ConfigError: It can't be bound.
    """
    ranks = local_ranks(config.process_count) if config.process_count > 1 else 1
    threads = usable_cores()
    if binding != "exclusive" or ranks == 1 or not is_bound_by_launcher():
        rank = local_rank() if ranks > 1 else 0
        threads = bind_rank(
            binding,
            rank,
            addresses_of_ranks(device, rank, ranks, config.devices_per_process),
            is_alone=config.process_count == 1,
        )
    set_threads(config.intra_op_threads or max(1, threads), None)


def arranged(
    config: TrainingConfig, model: nn.Module, device: torch.device, *, is_trial: bool = False
) -> nn.Module:
    """Return the model moved, wrapped and compiled; no state of the process changes.

    Args:
        config: The settings.
        model: The model, neither compiled nor wrapped.
        device: The device to move it to.
        is_trial: Start powersgd's compression at the third step, as a trial ends before torch
            would start it.
    """
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
    if config.is_dp:
        first = device.index or 0
        count = config.devices_per_process
        model = _DataParallel(model, device_ids=list(range(first, first + count)))
    elif config.is_ddp:
        model = distributed(model, device, config.ddp_settings, is_trial=is_trial)
    if not config.compile:
        return model
    return torch.compile(model, mode=config.compile_mode)  # type: ignore[return-value] # an OptimizedModule is a Module
