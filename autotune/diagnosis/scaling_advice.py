"""What brings several devices closer to as many times the rate of a single device: a table from cause to advice. Pure.

Comes in: a GroupCase and its bottlenecks. Goes out: advice as codes with figures, the largest gain first. Gains are
what the ceilings leave room for: expectations, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil

from pydantic import JsonValue

from autotune.diagnosis.bottlenecks import WAITING_CPU_FRACTION
from autotune.diagnosis.gains import advise, figures_of, worth_giving
from autotune.diagnosis.scaling_bottlenecks import LEAST_SHARE, Cause, ScalingBottleneck
from autotune.diagnosis.step_time import GroupCase, GroupTimes, StepTime, group_times, smaller_batch, step_changes
from autotune.records.diagnosis import Advice
from autotune.records.ranks import Communication, uneven_ranks
from autotune.space.constraints import hook_obstacle

__all__ = ["list_scaling_advice"]

_FACTORS = (2, 4, 8)
"""Times as many samples for an exchange: our own convention, so that the global batch stays in reach."""
_MOST_SAVED = 0.95
"""Of the group's time, beyond which ceilings are not believed: our own convention."""


def list_scaling_advice(case: GroupCase, bottlenecks: Sequence[ScalingBottleneck]) -> tuple[Advice, ...]:
    """What helps against each bottleneck; the largest gain first, what has no figure last, below 3 % not at all.

    A setting is advised only once, with the value of the larger gain.
    """
    times = group_times(case)
    found = worth_giving(piece for bottleneck in bottlenecks for piece in _AGAINST[bottleneck.cause](case, times))
    advice: list[Advice] = []
    for piece in found:
        if not piece.settings or all(piece.settings.keys() != other.settings.keys() for other in advice):
            advice.append(piece)
    return tuple(advice)


def _communication(case: GroupCase, times: GroupTimes) -> Iterator[Advice]:
    """Source: pytorch.org, torch.nn.DataParallel, which recommends DistributedDataParallel instead."""
    exchange = case.group.communication
    if exchange is not None:
        yield _fewer_exchanges(case, times, exchange)
        if not case.is_hook_tried:
            yield _smaller_exchanges(case, times, exchange)
    elif not case.is_ddp_tried:
        yield _advise(times, "try_ddp")


def _fewer_exchanges(case: GroupCase, times: GroupTimes, exchange: Communication) -> Advice:
    """More samples for each exchange: by a larger batch where memory has room, else by accumulation.

    A batch of k times the samples takes at most k times the time and the memory, and the exchange takes what it took.
    """
    config, exposed_s, used = case.group.config, exchange.exposed_s, case.group.limit_share
    enough = [factor for factor in _FACTORS if exposed_s / (factor * exchange.step_alone_s + exposed_s) < LEAST_SHARE]
    wanted = min(enough, default=_FACTORS[-1])
    fitting = [factor for factor in _FACTORS if factor <= wanted and factor * used <= 1]
    factor, setting = max(fitting, default=wanted), "micro_batch_size" if fitting else "grad_accum_steps"
    return _advise(
        times,
        "more_samples_per_exchange",
        (times.actual, replace(times.actual, exchange_s=times.actual.exchange_s / factor)),
        settings={setting: factor * getattr(config, setting)},
        figures={"factor": factor, "exposed_s": exposed_s, "step_s": exchange.step_alone_s, "limit_fraction": used},
    )


def _smaller_exchanges(case: GroupCase, times: GroupTimes, exchange: Communication) -> Advice:
    """Gradients in 16 bits during the exchange: half the bytes save at most half of it.

    Source: pytorch.org, DDP communication hooks.
    """
    is_bfloat16 = case.group.config.amp_dtype == "bfloat16" and hook_obstacle("bf16", case.environment) is None
    left_s = max(0.0, exchange.exposed_s - exchange.exchange_s / 2)
    return _advise(
        times,
        "compress_gradients",
        (times.actual, replace(times.actual, exchange_s=left_s / case.group.config.global_batch_size)),
        settings={"ddp.comm_hook": "bf16" if is_bfloat16 else "fp16"},
        figures=figures_of(exchange, "exchange_s", "exposed_s"),
    )


def _loader(case: GroupCase, times: GroupTimes) -> Iterator[Advice]:
    """More workers where cores are free or items wait, else more cores."""
    config, even, cores = case.group.config, times.even, case.cores
    if even.computing_s <= 0:
        return
    loaders, factor = config.process_count, even.loader_s / even.computing_s
    running = max(1, config.num_workers) * loaders
    figures = {"loader_processes": running, "cores": cores, "loader_samples_per_s": 1 / even.loader_s}
    waits = case.loader_costs is not None and case.loader_costs.cpu_fraction < WAITING_CPU_FRACTION
    if waits or running < cores:
        workers = _whole(running * factor / loaders)
        if not waits:
            workers = min(workers, max(config.num_workers + 1, cores // loaders))
        after = replace(even, loader_s=even.loader_s * running / (workers * loaders), is_overlapped=True)
        settings = {"num_workers": workers}
        yield _advise(times, "more_workers", (even, after), settings=settings, figures={**figures, "ranks": loaders})
    elif case.environment.device_kind == "cpu":
        yield _advise(times, "more_cores_for_loaders", figures=figures)
    else:
        after = replace(even, loader_s=even.computing_s)
        needed = {"cores_needed": _whole(cores * factor), "device_samples_per_s": 1 / even.computing_s}
        yield _advise(times, "more_cores_or_cheaper_items", (even, after), figures=figures | needed)


def _uneven_rank(case: GroupCase, times: GroupTimes) -> Iterator[Advice]:
    slow: list[JsonValue] = [*uneven_ranks(case.group.ranks)]
    yield _advise(times, "find_slow_rank", (times.actual, times.even), figures={"ranks": slow})


def _small_batch(case: GroupCase, times: GroupTimes) -> Iterator[Advice]:
    batch, single, after = smaller_batch(case), case.single, _as_single(times)
    if batch is not None and single is not None and after is not None:
        settings, figures = {"micro_batch_size": batch}, {"limit_fraction": single.limit_share}
        yield _advise(times, "batch_of_single_device", after, settings=settings, figures=figures)


def _settings(case: GroupCase, times: GroupTimes) -> Iterator[Advice]:
    after = _as_single(times)
    if after is not None:
        yield _advise(times, "settings_of_single_device", after, settings=step_changes(case))


def _shared_machine(case: GroupCase, times: GroupTimes) -> Iterator[Advice]:
    if case.environment.device_kind == "cpu":
        yield _advise(times, "more_cores_for_ranks", figures={"cores": case.cores})


_AGAINST: dict[Cause, Callable[[GroupCase, GroupTimes], Iterator[Advice]]] = {
    "communication": _communication,
    "loader": _loader,
    "uneven_rank": _uneven_rank,
    "small_batch": _small_batch,
    "settings": _settings,
    "shared_machine": _shared_machine,
}


def _as_single(times: GroupTimes) -> tuple[StepTime, StepTime] | None:
    """Before and after: each device as fast as a single device; None where that was not measured."""
    if times.ideal_device_s is None:
        return None
    return times.even, replace(times.even, device_s=times.ideal_device_s)


def _advise(
    times: GroupTimes,
    kind: str,
    change: tuple[StepTime, StepTime] | None = None,
    *,
    settings: Mapping[str, object] | None = None,
    figures: Mapping[str, JsonValue] | None = None,
) -> Advice:
    """Advice from the step times before and after a change; None: without a figure."""
    saved = 0.0 if change is None else min(times.saved(*change), _MOST_SAVED)
    expected = None if change is None else times.samples_per_s / (1.0 - saved)
    return advise(kind, present=times.samples_per_s, expected=expected, settings=settings, figures=figures)


def _whole(number: float) -> int:
    """Rounded up, without what floating point has added."""
    return ceil(number - 1e-6)
