"""What brings several devices closer to as many times the rate of a single device: a table from cause to advice. Pure.

Comes in: a GroupCase and its bottlenecks. Goes out: advice, the largest gain first. Gains are
what the ceilings leave room for: expectations, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil

from autotune.analysis.forecast.expectation import loader_processes
from autotune.analysis.memory.lines import memory_of_trials
from autotune.diagnosis.bottlenecks import WAITING_CPU_FRACTION
from autotune.diagnosis.gains import advise, worth_giving
from autotune.diagnosis.scaling_bottlenecks import LEAST_SHARE, Cause, GroupCase, ScalingBottleneck, StepTime
from autotune.messages import advice as messages
from autotune.messages.advice import AdviceText
from autotune.policy import POLICY
from autotune.records.diagnosis import Advice
from autotune.records.ranks import Communication, uneven_ranks
from autotune.space.constraints import hook_obstacle
from autotune.space.token_budget import with_batch

__all__ = ["list_scaling_advice"]

_FACTORS = (2, 4, 8)
"""Times as many samples for an exchange: our own convention, so that the global batch stays in reach."""
_MOST_SAVED = 0.95
"""Of the group's time, beyond which ceilings are not believed: our own convention."""


def list_scaling_advice(case: GroupCase, bottlenecks: Sequence[ScalingBottleneck]) -> tuple[Advice, ...]:
    """What helps against each bottleneck; the largest gain first, what has no figure last, below 3 % not at all.

    A setting is advised only once, with the value of the larger gain.
    """
    advice: list[Advice] = []
    against = [piece for bottleneck in bottlenecks for piece in _AGAINST[bottleneck.cause](case)]
    for piece in worth_giving(against):
        if not piece.settings or all(piece.settings.keys() != other.settings.keys() for other in advice):
            advice.append(piece)
    return tuple(advice)


def _communication(case: GroupCase) -> Iterator[Advice]:
    """Source: pytorch.org, torch.nn.DataParallel, which recommends DistributedDataParallel instead."""
    exchange, tried = case.group.communication, [record.config for record in case.records]
    if exchange is not None:
        yield _fewer_exchanges(case, exchange)
        if not any(config.ddp is not None and config.ddp.comm_hook for config in tried):
            yield _smaller_exchanges(case, exchange)
    elif all(config.strategy != "ddp" for config in tried):
        yield _advise(case, messages.try_ddp())


def _fewer_exchanges(case: GroupCase, exchange: Communication) -> Advice:
    """More samples for each exchange: by a larger batch where memory has room, else by accumulation.

    A batch of k times the samples takes at most k times the time, and the exchange takes what it took.
    """
    exposed_s, step_s, used = exchange.exposed_s, exchange.step_alone_s, case.group.limit_share
    enough = [factor for factor in _FACTORS if exposed_s / (factor * step_s + exposed_s) < LEAST_SHARE]
    wanted = min(enough, default=_FACTORS[-1])
    fitting = [factor for factor in _FACTORS if factor <= wanted and _fits(case, factor)]
    factor, setting = max(fitting, default=wanted), "micro_batch_size" if fitting else "grad_accum_steps"
    change = case.actual, replace(case.actual, exchange_s=case.actual.exchange_s / factor)
    words = messages.more_samples_per_exchange(
        settings={setting: factor * getattr(case.group.config, setting)},
        factor=factor,
        exposed_s=exposed_s,
        step_s=step_s,
        limit_fraction=used,
    )
    return _advise(case, words, change)


def _fits(case: GroupCase, factor: int) -> bool:
    """Whether the group's memory is sure to stay within the limit with so many times its micro batch."""
    config = case.group.config
    run = next(record.measurement for record in case.records if record.number == case.group.number)
    limit_bytes = 0 if run is None else round(run.peak_memory_bytes / case.group.limit_share)
    memory = memory_of_trials((), case.records, limit_bytes, limit_is_ram=case.environment.has_only_ram)
    larger = with_batch(config, factor * config.micro_batch_size)
    return bool(memory.chance_to_fit([larger], limit_bytes)[0] >= POLICY.trials.sure_to_fit)


def _smaller_exchanges(case: GroupCase, exchange: Communication) -> Advice:
    """Gradients in 16 bits during the exchange: half the bytes save at most half of it.

    Source: pytorch.org, DDP communication hooks.
    """
    config = case.group.config
    is_bfloat16 = config.amp_dtype == "bfloat16" and hook_obstacle("bf16", case.environment) is None
    left_s = max(0.0, exchange.exposed_s - exchange.exchange_s / 2)
    change = case.actual, replace(case.actual, exchange_s=left_s / config.global_batch_size)
    words = messages.compress_gradients(
        settings={"ddp.comm_hook": "bf16" if is_bfloat16 else "fp16"},
        exchange_s=exchange.exchange_s,
        exposed_s=exchange.exposed_s,
    )
    return _advise(case, words, change)


def _loader(case: GroupCase) -> Iterator[Advice]:
    """More workers where cores are free or items wait, else more cores."""
    config, even, cores = case.group.config, case.even, case.cores
    if even.computing_s <= 0:
        return
    loaders, factor, running = config.process_count, even.loader_s / even.computing_s, loader_processes(config)
    reached = 1 / even.loader_s
    costs = (record.measurement.loader_costs for record in case.records if record.measurement is not None)
    cost = next(filter(None, costs), None)
    waits = cost is not None and cost.cpu_fraction < WAITING_CPU_FRACTION
    if waits or running < cores:
        workers = _whole(running * factor / loaders)
        if not waits:
            workers = min(workers, max(config.num_workers + 1, cores // loaders))
        after = replace(even, loader_s=even.loader_s * running / (workers * loaders), is_overlapped=True)
        words = messages.more_workers(
            settings={"num_workers": workers},
            ranks=loaders,
            loader_processes=running,
            cores=cores,
            loader_samples_per_s=reached,
        )
        yield _advise(case, words, (even, after))
    elif case.environment.device_kind == "cpu":
        words = messages.more_cores_for_loaders(loader_processes=running, cores=cores, loader_samples_per_s=reached)
        yield _advise(case, words)
    else:
        words = messages.more_cores_or_cheaper_items(
            cores_needed=_whole(cores * factor),
            loader_processes=running,
            cores=cores,
            loader_samples_per_s=reached,
            device_samples_per_s=1 / even.computing_s,
        )
        yield _advise(case, words, (even, replace(even, loader_s=even.computing_s)))


def _uneven_rank(case: GroupCase) -> Iterator[Advice]:
    words = messages.find_slow_rank(ranks=[*uneven_ranks(case.group.ranks)])
    yield _advise(case, words, (case.actual, case.even))


def _small_batch(case: GroupCase) -> Iterator[Advice]:
    if case.single is not None:
        words = messages.batch_of_single_device(
            settings={"micro_batch_size": case.single.config.micro_batch_size}, limit_fraction=case.single.limit_share
        )
        yield _advise(case, words, _as_single(case))


def _settings(case: GroupCase) -> Iterator[Advice]:
    yield _advise(case, messages.settings_of_single_device(settings=case.step_changes), _as_single(case))


def _shared_machine(case: GroupCase) -> Iterator[Advice]:
    if case.environment.device_kind == "cpu":
        yield _advise(case, messages.more_cores_for_ranks(cores=case.cores))


_AGAINST: dict[Cause, Callable[[GroupCase], Iterator[Advice]]] = {
    "communication": _communication,
    "loader": _loader,
    "uneven_rank": _uneven_rank,
    "small_batch": _small_batch,
    "settings": _settings,
    "shared_machine": _shared_machine,
}


def _as_single(case: GroupCase) -> tuple[StepTime, StepTime] | None:
    """Before and after: each device as fast as a single device; None where that was not measured."""
    return None if case.ideal_device_s is None else (case.even, replace(case.even, device_s=case.ideal_device_s))


def _advise(case: GroupCase, words: AdviceText, change: tuple[StepTime, StepTime] | None = None) -> Advice:
    """Return advice from the step times before and after a change; None: without a figure."""
    present = case.group.samples_per_s.value
    expected = None if change is None else present / (1.0 - min(case.saved(*change), _MOST_SAVED))
    return advise(words, present, expected)


def _whole(number: float) -> int:
    """Rounded up, without what floating point has added."""
    return ceil(number - 1e-6)
