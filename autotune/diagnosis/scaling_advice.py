"""What would bring several devices closer to as many times the rate of one, only where figures say so. Pure.

Takes a GroupCase and its brakes; hands on advice, the largest gain first. Gains are what the ceilings leave room for:
expectations, not measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from autotune.diagnosis.advice import LEAST_GAIN
from autotune.diagnosis.scaling_bottlenecks import LEAST_SHARE, Brake, Cause
from autotune.diagnosis.step_time import GroupCase, Pace, Paces, paces_of, smaller_batch, step_changes
from autotune.phrasing import say_rate, say_seconds, say_settings, say_share
from autotune.records.diagnosis import Advice
from autotune.records.ranks import Communication, uneven_ranks
from autotune.space.constraints import hook_obstacle

__all__ = ["list_group_advice"]

_TIMES = (2, 4, 8)
"""Times as many samples for an exchange: our own convention, so that the global batch stays in reach."""
_MOST_SAVED = 0.95
"""Of the group's time, beyond which ceilings are not believed."""
_WAITING_CPU_FRACTION = 0.5
"""Of an item's time on a core, below which it mostly waits, and workers gain beyond the cores: as in core.verdict."""
_FOLLOWS = "the learning rate has to follow the global batch"


def list_group_advice(case: GroupCase, brakes: Sequence[Brake]) -> tuple[Advice, ...]:
    """What would help against each brake; the largest gain first, what has no figure last, less than 3 % not at all.

    A setting is advised once, with the value of the larger gain.
    """
    paces = paces_of(case)
    found = [one for brake in brakes for one in _AGAINST[brake.cause](case, paces)]
    worth = [one for one in found if one.expected_gain is None or one.expected_gain >= LEAST_GAIN]
    advice: list[Advice] = []
    for one in sorted(worth, key=_gain, reverse=True):
        if not one.settings or all(one.settings.keys() != other.settings.keys() for other in advice):
            advice.append(one)
    return tuple(advice)


def _against_communication(case: GroupCase, paces: Paces) -> list[Advice]:
    talk = case.group.communication
    if talk is None:
        return _instead_of_data_parallel(case)
    return [*_fewer_exchanges(case, paces, talk), *_smaller_exchanges(case, paces, talk)]


def _instead_of_data_parallel(case: GroupCase) -> list[Advice]:
    """Source: pytorch.org, torch.nn.DataParallel, which recommends DistributedDataParallel instead."""
    if case.is_ddp_tried:
        return []
    text = "Let the search try strategy ddp, which no trial had: a process for each device, gradients alone exchanged"
    return [_without_figure(text, "no trial has measured it")]


def _fewer_exchanges(case: GroupCase, paces: Paces, talk: Communication) -> list[Advice]:
    """More samples for each exchange: by a larger batch where memory has room, else by accumulation.

    A batch of k times the samples takes at most k times the time and the memory, and the exchange takes what it took.
    """
    config, exposed_s = case.group.config, talk.exposed_s
    enough = [one for one in _TIMES if exposed_s / (one * talk.step_alone_s + exposed_s) < LEAST_SHARE]
    wanted = min(enough, default=_TIMES[-1])
    fitting = [one for one in _TIMES if one <= wanted and one * case.group.limit_share <= 1]
    times = max(fitting, default=wanted)
    memory = f"peak memory is {say_share(case.group.limit_share)} of the limit"
    settings: dict[str, object] = {"grad_accum_steps": times * config.grad_accum_steps}
    if fitting:
        settings = {"micro_batch_size": times * config.micro_batch_size}
    after = replace(paces.actual, exchange_s=paces.actual.exchange_s / times)
    text = f"Set {say_settings(settings)}: {times} times the samples for each exchange ({_FOLLOWS})"
    basis = f"an exchange adds {say_seconds(exposed_s)} to a step of {say_seconds(talk.step_alone_s)}, and {memory}"
    return [_expecting(paces, paces.actual, after, text=text, settings=settings, basis=basis)]


def _smaller_exchanges(case: GroupCase, paces: Paces, talk: Communication) -> list[Advice]:
    """Gradients in 16 bits on their way: half the bytes save at most half of the exchange.

    Source: pytorch.org, DDP communication hooks.
    """
    if case.is_hook_tried:
        return []
    is_bfloat16 = case.group.config.amp_dtype == "bfloat16" and hook_obstacle("bf16", case.environment) is None
    settings: dict[str, object] = {"ddp.comm_hook": "bf16" if is_bfloat16 else "fp16"}
    left_s = max(0.0, talk.exposed_s - talk.exchange_s / 2)
    after = replace(paces.actual, exchange_s=left_s / case.group.config.global_batch_size)
    text = (
        f"Set {say_settings(settings)}: half the bytes on their way; the gain is the most it can be, compressing costs "
        "too (check that the loss still falls as before)"
    )
    basis = f"the exchange alone takes {say_seconds(talk.exchange_s)}, {say_seconds(talk.exposed_s)} of it not hidden"
    return [_expecting(paces, paces.actual, after, text=text, settings=settings, basis=basis)]


def _against_loader(case: GroupCase, paces: Paces) -> list[Advice]:
    """More workers where cores are left or items wait, else more cores."""
    config, even, cores = case.group.config, paces.even, case.cores
    if even.computing_s <= 0:
        return []
    loaders, times = config.process_count, even.loader_s / even.computing_s
    running = max(1, config.num_workers) * loaders
    waits = case.loader_costs is not None and case.loader_costs.cpu_fraction < _WAITING_CPU_FRACTION
    if running >= cores and not waits:
        return [_more_cores(case, paces, times)]
    workers = _whole(running * times / loaders)
    if not waits:
        workers = min(workers, max(config.num_workers + 1, cores // loaders))
    settings: dict[str, object] = {"num_workers": workers}
    after = replace(even, loader_s=even.loader_s * running / (workers * loaders), is_overlapped=True)
    text = f"Set {say_settings(settings)}{' for each rank' if loaders > 1 else ''}"
    basis = f"today {running} loader processes on {cores} cores reach {say_rate(1 / even.loader_s)} together"
    return [_expecting(paces, even, after, text=text, settings=settings, basis=basis)]


def _more_cores(case: GroupCase, paces: Paces, times: float) -> Advice:
    config, even, cores = case.group.config, paces.even, case.cores
    workers = max(1, config.num_workers) * config.process_count
    taken = f"{workers} loader processes on {cores} cores reach {say_rate(1 / even.loader_s)}"
    if case.environment.device_kind == "cpu":
        return _without_figure("Take more cores: loading and training share those that there are", taken)
    text = f"Take about {_whole(cores * times)} cores instead of {cores}, or make an item cheaper"
    basis = f"{taken}, the devices {say_rate(1 / even.computing_s)}"
    return _expecting(paces, even, replace(even, loader_s=even.computing_s), text=text, settings={}, basis=basis)


def _against_uneven_rank(case: GroupCase, paces: Paces) -> list[Advice]:
    slow = ", ".join(str(number) for number in uneven_ranks(case.group.ranks))
    text = f"Find out what slows rank {slow} down: in every step the others wait for it"
    return [_expecting(paces, paces.actual, paces.even, text=text, settings={}, basis="the pace of the other ranks")]


def _against_small_batch(case: GroupCase, paces: Paces) -> list[Advice]:
    batch, single, ideal_s = smaller_batch(case), case.single, paces.ideal_device_s
    if batch is None or single is None or ideal_s is None:
        return []
    settings: dict[str, object] = {"micro_batch_size": batch}
    text = f"Set {say_settings(settings)} on each rank, as on one device ({_FOLLOWS})"
    basis = f"one device by itself; it took {say_share(single.limit_share)} of the memory limit"
    after = replace(paces.even, device_s=ideal_s)
    return [_expecting(paces, paces.even, after, text=text, settings=settings, basis=basis)]


def _against_settings(case: GroupCase, paces: Paces) -> list[Advice]:
    settings, ideal_s = step_changes(case), paces.ideal_device_s
    if ideal_s is None:
        return []
    text = f"Set {say_settings(settings)}, as in the best trial on one device"
    after = replace(paces.even, device_s=ideal_s)
    return [_expecting(paces, paces.even, after, text=text, settings=settings, basis="one device by itself")]


def _against_shared_machine(case: GroupCase, paces: Paces) -> list[Advice]:  # noqa: ARG001 - one signature
    if case.environment.device_kind != "cpu":
        return []
    cores = case.cores
    return [_without_figure("Take more cores: ranks on a CPU share those that there are", f"{cores} cores here")]


_AGAINST: dict[Cause, Callable[[GroupCase, Paces], list[Advice]]] = {
    "communication": _against_communication,
    "loader": _against_loader,
    "uneven_rank": _against_uneven_rank,
    "small_batch": _against_small_batch,
    "settings": _against_settings,
    "shared_machine": _against_shared_machine,
}


def _expecting(
    paces: Paces, before: Pace, after: Pace, *, text: str, settings: dict[str, object], basis: str
) -> Advice:
    gain = 1.0 / (1.0 - min(paces.saved(before, after), _MOST_SAVED)) - 1.0
    return Advice(
        text=text,
        settings=settings,
        expected_samples_per_s=paces.samples_per_s * (1.0 + gain),
        expected_gain=gain,
        basis=basis,
    )


def _whole(number: float) -> int:
    """Rounded up, but for what floating point has added."""
    return ceil(number - 1e-6)


def _without_figure(text: str, basis: str) -> Advice:
    return Advice(text=text, settings={}, expected_samples_per_s=None, expected_gain=None, basis=basis)


def _gain(advice: Advice) -> float:
    return -1.0 if advice.expected_gain is None else advice.expected_gain
