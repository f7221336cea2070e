"""Prepare a training loop: the model's layout and wrappers, the optimizer, gradient accumulation, compilation."""

from __future__ import annotations

import inspect
import os
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
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


# A model on several devices: DataParallel in one process, or DistributedDataParallel among the
# ranks of a group.
#
# Takes a built model; hands on what the training loop calls in its place. Arguments that the
# installed torch lacks are left out, found by DDP's own signature.


_AS_TORCH_HAS_THEM = {
    "gradient_as_bucket_view",
    "static_graph",
    "find_unused_parameters",
    "bucket_cap_mb",
}


def replicated(model: nn.Module, device: torch.device, count: int) -> nn.Module:
    """The model in DataParallel, over so many devices from this one on."""
    first = device.index or 0
    return _DataParallel(model, device_ids=list(range(first, first + count)))


def check_group(process_count: int) -> None:
    """See that a process group, where one is open, is of the size that a configuration was measured with.

    Raises:
        ConfigError: it is of another.
    """
    group: Any = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() != process_count:
        raise ConfigError(
            f"a process group must be as large as the configuration's, {process_count}, since its "
            f"global batch and "
            f"learning rate rest on that, but it has {group.get_world_size()}; start training with "
            f"{process_count} "
            f"processes (on one machine: torchrun --nproc-per-node {process_count}), or search "
            f"with `world_size` as "
            "you train"
        )


def distributed(
    model: nn.Module, device: torch.device, wanted: DdpConfig, *, is_trial: bool = False
) -> nn.Module:
    """The model in DistributedDataParallel, with its hook for the exchange. The process group must be open."""
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
    """Arguments of DistributedDataParallel for these settings, as far as the installed torch has them."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    arguments = wanted.model_dump(include=_AS_TORCH_HAS_THEM, exclude_none=True)
    if wanted.first_bucket_mb is not None and "bucket_cap_mb_list" in known:
        arguments["bucket_cap_mb_list"] = [
            wanted.first_bucket_mb,
            wanted.bucket_cap_mb or TORCH_BUCKET_CAP_MB,
        ]
        arguments.pop("bucket_cap_mb", None)
    if (
        not wanted.broadcast_buffers
    ):  # true is torch's own, and to name the old argument makes a newer torch warn
        newer = "forward_sync_buffers"
        arguments[newer if newer in known else "broadcast_buffers"] = False
    return {name: value for name, value in arguments.items() if name in known}


def without_effect_here(wanted: DdpConfig) -> tuple[Note, ...]:
    """Settings that the installed torch can't follow."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if wanted.first_bucket_mb is not None and "bucket_cap_mb_list" not in known:
        return (first_bucket_without_effect(torch.__version__),)
    return ()


class _DataParallel(nn.DataParallel[nn.Module]):
    """DataParallel whose replicas compute in the precision of the autocast that the model is called under.

    Each replica runs in a thread of its own, and what a thread casts to is its own. torch enters
    autocast there again, but without the dtype: in CUDA's default, float16, and so without the
    GradScaler that float16 needs. Source: torch/nn/parallel/parallel_apply.py, torch 2.9 to 2.13.

    These threads launch all devices' kernels under one GIL, and each step copies the model to the
    devices: where launching holds a step, several devices are slower than one. Searches begin with
    DistributedDataParallel, which has neither (first_guesses in tuning/proposals.py), and one trial
    then shows what DataParallel reaches. Source: pytorch.org, "CUDA semantics", "Use
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
    """State and hook. Source: torch.distributed.algorithms.ddp_comm_hooks."""
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


# An optimizer like the user's: made anew for each trial, since its state belongs to one training.
#
# Comes in: an optimizer, or what a framework has put around it. Goes out: another one of its class
# with its groups, settings and hooks, without state. The one that was given is not changed. A fresh
# one is switched to torch's fused implementation, where torch has one for it, or from it.


_WRAPPERS = {("accelerate", "AcceleratedOptimizer"), ("lightning", "LightningOptimizer")}
"""Package and class of what frameworks put around an optimizer, which they keep as `optimizer`."""


class ForeignParametersError(ValueError):
    """An optimizer does not train the model that it was given with; the message says what to do."""


def inner_optimizer(given: Any) -> Any:
    """The optimizer inside of a framework's wrapper; anything else as it is."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(given).__mro__}
    return given.optimizer if kinds & _WRAPPERS else given


def base_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate of the first group, before any schedule; None where there is none above 0.

    A schedule keeps what it began from as `initial_lr`: with a warm-up the current one is 0.
    Source: torch.optim.lr_scheduler.LRScheduler.
    """
    lr = _lr_of(optimizer.param_groups[0])
    return lr or None


def stateless(given: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer without its state, to be restored by `__setstate__`.

    Without `step` too, which a schedule has put around the class's own. Hooks can be added to the
    copy alone.
    """
    kept = {name: value for name, value in vars(given).items() if name != "step"}
    hooks = {
        name: OrderedDict(value) for name, value in kept.items() if isinstance(value, OrderedDict)
    }
    return {**kept, **hooks, "state": defaultdict(dict)}


def optimizer_like(
    given: torch.optim.Optimizer, parameters: Sequence[Tensor], lr: float
) -> torch.optim.Optimizer:
    """An optimizer of the class, groups and settings of another, without its state; learning rates keep their ratio.

    Args:
        given: The user's.
        parameters: What is trained: the parameters in its groups that require a gradient must be
            among them.
        lr: Of the first group; of all groups where the first has none above 0.

    Raises:
        ForeignParametersError: some are not.
    """
    trained = set(parameters)
    own = [parameter for group in given.param_groups for parameter in group["params"]]
    strangers = sum(parameter.requires_grad and parameter not in trained for parameter in own)
    if strangers:
        raise ForeignParametersError(
            f"an optimizer must train parameters of the model that is given, but {strangers} of "
            f"its {len(own)} belong "
            "to none of its modules; give the model itself in place of a function that makes one, "
            "or "
            "optimizer=lambda params, lr: ..."
        )
    base = base_lr(given)
    groups = []
    for group in given.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        before = _lr_of(group)
        changed = {} if before is None else {"lr": lr if base is None else before * (lr / base)}
        if trainable:
            groups.append({**group, **changed, "params": trainable})
    made: torch.optim.Optimizer = object.__new__(
        type(given)
    )  # its constructor may ask for more than groups hold
    defaults = {**given.defaults, **({"lr": lr} if "lr" in given.defaults else {})}
    made.__setstate__({**stateless(given), "param_groups": groups, "defaults": defaults})
    return made


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it steps by torch's fused implementation."""
    return any(bool(group.get("fused")) for group in optimizer.param_groups)


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has a fused implementation of an optimizer for the parameters that it trains.

    It has them of its own classes alone; a subclass may inherit one where it leaves the
    constructor's arguments and the step as they are. One step of it on a number of each type and
    device tells whether its kernels are there. Sparse gradients, which none takes, show in training
    only.
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
    """Have an optimizer step by torch's fused implementation, or no longer: what its constructor does for that.

    Switched off, it steps as torch would choose by itself (foreach on a GPU): `fused` is None then,
    since False, given, would have torch loop over the parameters. Steps that were counted stay,
    where the implementation looks for them. Source: torch/optim/sgd.py, adam.py, adagrad.py
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
    """Whether it is a class of torch's that knows `fused`, or one with the same arguments and step.

    torch wraps the step of a class when the first optimizer of it is made.
    """
    base: Any = next(
        (own for own in kind.__mro__ if own.__module__.startswith("torch.optim.")), None
    )
    if base is None or "fused" not in (arguments := signature(base.__init__).parameters):
        return False
    return [*signature(kind.__init__).parameters] == [*arguments] and unwrap(kind.step) is unwrap(
        base.step
    )


def _steps_fused(kind: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a fused step on one number can be done."""
    number = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    number.grad = torch.zeros_like(number)
    try:
        kind([number], fused=True).step()
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # torch has no such kernel, or the class no such combination
        return False
    return True


def _lr_of(group: dict[str, Any]) -> float | None:
    """A group's learning rate before any schedule; None where it has none, as where the optimizer finds its own."""
    lr = group.get("initial_lr", group.get("lr"))
    return None if lr is None else float(lr)


# The accumulator: backward passes, and the optimizer's step after as many as were asked for; trials
# have it too.


class _Stage(Enum):
    """Where a batch stands, in words for a message."""

    OUTSIDE = "outside of one"
    FORWARD = "in the forward pass"
    DONE = "a second time"


@dataclass(slots=True, kw_only=True)
class Accumulator:
    """Trains batch after batch, one `with` each: forward pass and loss inside it, then one `backward`.

        accumulator = config.accumulator(model, optimizer) for batch in loader:
            with accumulator:
                loss = loss_of(model, config.to_device(batch)) accumulator.backward(loss)

    Where the model was compiled so that CUDA graphs are recorded, what it returns, a loss of its
    own among that, is overwritten by the next batch: read it before, or clone it.

    Inside it autocast is on where the configuration has it. Gradients are zeroed here after each
    step: do not zero them yourself. Batches that an epoch's end leaves over count for the next
    epoch's first step, as in trials; `reset` drops them.
    """

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    steps: int
    """Batches of one optimizer step, on one rank."""
    device_type: str = "cpu"
    """torch's name for the kind of device that the model lies on."""
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    """None: the precision holds for the whole process, or is torch's own."""
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    """DDP's no_sync: gradients stay with their rank while it is entered. None where nothing is
    exchanged, and for a static graph, in which DDP can't do without an exchange here and there."""
    gathers: bool = False
    """The model is in DataParallel, which gathers one loss of each device where the model computes
    its own."""
    exchanges_nothing: bool = False
    """Exchange nothing, not even in an optimizer step's last batch."""
    records_graphs: bool = False
    """The model was compiled in a mode that records CUDA graphs, whose outputs the next batch
    overwrites."""
    accumulated: int = 0
    """Batches since the optimizer's last step."""
    _cast: AbstractContextManager[Any] | None = field(default=None, init=False)
    _unsynced: AbstractContextManager[None] | None = field(default=None, init=False)
    _stage: _Stage = field(default=_Stage.OUTSIDE, init=False)

    def __enter__(self) -> Self:
        """Begin a batch. DDP prepares the exchange in the forward pass: no_sync stands around both passes.

        Raises:
            RuntimeError: the batch before has not ended yet.
        """
        if self._stage is not _Stage.OUTSIDE:
            raise RuntimeError(
                "a batch must end before the next begins: one `with accumulator` for each, but it "
                "is entered twice"
            )
        if self.records_graphs:
            # else one output without a backward pass would have torch keep those of all batches
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call] # torch
        if self.no_sync is not None and (
            self.exchanges_nothing or self.accumulated + 1 < self.steps
        ):
            self._unsynced = self.no_sync()
            self._unsynced.__enter__()
        if self.autocast is not None:
            self._cast = self.autocast()
            self._cast.__enter__()
        self._stage = _Stage.FORWARD
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stage = _Stage.OUTSIDE
        cast = self._cast
        self._cast = None
        if cast is not None:
            cast.__exit__(*raised)
        unsynced = self._unsynced
        self._unsynced = None
        if unsynced is not None:
            unsynced.__exit__(*raised)

    def backward(self, loss: Tensor, *, before_step: Callable[[], object] | None = None) -> bool:
        """The backward pass of this batch's share of the loss, and the optimizer's step where one is due.

        It runs without autocast, as torch wants it. An exception on the way drops the batches since
        the last step.

        Args:
            loss: The mean loss of the batch, a scalar.
            before_step: Called right before a step, with gradients as they are (unscaled): to clip
                them, for example. With float16 they may be infinite there; the GradScaler then
                skips the step. Trials don't clip: what it costs is not in their rate.

        Returns:
            Whether a step was due. float16's GradScaler may skip it where gradients are not finite.

        Raises:
            RuntimeError: it is called outside `with`, or a second time within one.
        """
        if self._stage is not _Stage.FORWARD:
            raise RuntimeError(
                "backward must be called once in each `with accumulator`, but was called "
                f"{self._stage.value}; of several losses give the sum"
            )
        self._stage = _Stage.DONE
        if self.gathers and loss.ndim == 1:
            loss = loss.mean()
        share = (
            loss if self.steps == 1 else loss / self.steps
        )  # to divide by one costs 14 us, the way back included
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
        """Drop the gradients that are there: after a step, and where a loop was broken off before one."""
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulated = 0

    def _keep_gradients(self) -> None:
        """Copy a first batch's gradients out of a CUDA graph's memory; later ones are added to the copies in place.

        A graph's backward pass hands its gradients to autograd, which takes them as they are for
        `grad`; the next batch would overwrite them, and torch raises. Parameters without a gradient
        stay without, which buffers of zeros would not leave them. Source:
        github.com/pytorch/pytorch/issues/169545, and in torch 2.13
        torch/_inductor/cudagraph_trees.py, format_dealloc_msg.

        A copy of each would have the host launch a kernel for every parameter, which graphs are
        there to spare. Those of a dtype are copied in a few launches, as torch's optimizers do
        their steps; that has no public name.
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
                else:  # of an embedding outside of the graph
                    parameter.grad = gradient.clone()
        for pairs in dense.values():
            copies = [torch.empty_like(gradient) for _, gradient in pairs]
            torch._foreach_copy_(copies, [gradient for _, gradient in pairs])
            for (parameter, _), copy in zip(pairs, copies, strict=True):
                parameter.grad = copy

    def _without_autocast(self, loss: Tensor) -> None:
        if self._cast is None:
            loss.backward()  # type: ignore[no-untyped-call] # torch
            return
        # What the weights were cast to is not needed beside their gradients.
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
            with suppress(AssertionError):  # it had not looked at them yet
                self.scaler.update()  # else it takes the next gradients for unscaled
            raise
        self.scaler.update()
        self.reset()


# A model as trials train it, and the process set up as theirs: what TrainingConfig.prepare and
# arrange do.
#
# Comes in: a configuration, and a built model. Goes out: what the training loop calls in its place.


def prepared(
    config: TrainingConfig, model: nn.Module, device: str | torch.device | None
) -> nn.Module:
    """See TrainingConfig.prepare."""
    check_group(config.process_count)
    if (
        config.cudnn_benchmark
    ):  # off leaves the user's own: a configuration that nobody has searched is off by default
        set_cudnn_benchmark(is_on=True)
    place = own_device(is_rank=config.process_count > 1) if device is None else torch.device(device)
    set_current(place)
    binding = config.numa_binding
    if binding is not None and not can_bind(place):
        warnings.warn(
            "numa_binding has no effect: processes are bound to cores on Linux alone, beside CUDA "
            "and ROCm devices or "
            "on the CPU",
            stacklevel=3,
        )
        binding = None
    if binding is None:
        set_threads(
            config.intra_op_threads,
            local_ranks(config.process_count) if config.process_count > 1 else None,
        )
    else:
        _bind(config, binding, place)
    if config.amp_dtype == "tf32":
        tf32_products().__enter__()
    if config.compile:
        os.environ.update(compile_cache_variables())
    return arranged(config, model, place)


def _bind(config: TrainingConfig, binding: str, device: torch.device) -> None:
    """Bind this process as a trial's rank is bound, and set its threads; what a launcher has bound stays so.

    Raises:
        ConfigError: it can't be bound.
    """
    ranks = local_ranks(config.process_count) if config.process_count > 1 else 1
    threads = usable_cores()
    if binding != "exclusive" or ranks == 1 or not is_bound_by_launcher():
        rank = local_rank() if ranks > 1 else 0
        count = config.world_size if config.strategy == "dp" else 1
        threads = bind_rank(
            binding,
            rank,
            addresses_of_ranks(device, rank, ranks, count),
            is_alone=config.process_count == 1,
        )
    set_threads(config.intra_op_threads or max(1, threads), None)


def arranged(
    config: TrainingConfig, model: nn.Module, device: torch.device, *, is_trial: bool = False
) -> nn.Module:
    """See TrainingConfig.arrange."""
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack the keyword alone
    if config.strategy == "dp":
        model = replicated(model, device, config.world_size)
    elif config.strategy == "ddp":
        model = distributed(model, device, config.ddp or DdpConfig(), is_trial=is_trial)
    if not config.compile:
        return model
    return torch.compile(model, mode=config.compile_mode)  # type: ignore[return-value] # an OptimizedModule is a Module
