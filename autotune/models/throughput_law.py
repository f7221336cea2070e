"""The law of a training rate: what loader, device, copies, host and all together reach, from a few costs. Pure.

Comes in: what of configurations the law depends on (Circumstances), and a state of costs, each a
row of logarithms. Goes out: the logarithms of the rates, and their derivatives by the state.

An optimizer step takes k (a + b B) + c seconds (k micro batches of B samples), and in a group what
is seen of exchanging gradients on top. Where batches are copied to the device, the copies that
computing does not hide add to a run's time. Workers share the items, up to where more no longer
help, and handing a batch over costs each of them something. Side by side the slowest of loader,
training, cores and host sets the rate, softened; in turns the times add up. Runs fall short of that
by a share.

The host of an accelerator launches the work of each micro batch, which takes longer in a loop than
alone. Before that it takes the batch from the queue, or makes it where there are no workers, and
waits for copies from pageable memory: these are one after the other, and add up.

A copy on the stream that computes follows the kernels before it, so that its time adds to theirs,
from pinned memory too; one from pageable memory makes the host wait as well, which launches nothing
meanwhile. What runs hide of it (the device waits for the host's launches, or the user's code copies
ahead on a stream of its own) shows in runs alone. Source: docs.pytorch.org, "A guide on good usage
of non_blocking and pin_memory() in PyTorch".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.models.statistics import Floats

COSTS = (
    "items",
    "per_batch",
    "most_workers",
    "samples",
    "per_micro_batch",
    "per_step",
    "exchange",
    "copies",
    "hidden",
    "launching",
    "slower",
    "taking",
    "softness",
    "crowding",
    "shortfall",
)
"""The rows of a state. `items`: samples per second of one loader process; `most_workers`: processes
beyond which more don't help; `samples`: samples per second of one device if the batch were endless;
the costs `per_batch` (that a worker hands over), `per_micro_batch`, `per_step` and `exchange` (seen
in a run, of a group) over the time of a usual batch's samples; `copies`: samples per second that
copies bring to one device; `hidden`: the logit of the share of that time which a run hides;
`launching`: samples per second of usual batches that a host launches; `slower`: the seconds of
launching in a loop over those alone; `taking`: samples per second of usual batches that lie ready
and are taken; `softness` of the minimum, the larger the harder: two equal sides reach 2 ** (-1 /
softness) of either together, as random items and a short queue between them have it; `crowding`: by
how much the logarithm of a run's rate is less with more threads than cores, as a rule little, but
many times the rate where threads spin; `shortfall`: a run's rate over the joint one. Logarithms all
but `hidden`."""
(
    _ITEMS,
    _PER_BATCH,
    _MOST_WORKERS,
    _SAMPLES,
    _PER_MICRO_BATCH,
    _PER_STEP,
    _EXCHANGE,
    _COPIES,
    _HIDDEN,
    _LAUNCHING,
    _SLOWER,
    _TAKING,
    _SOFTNESS,
    _CROWDING,
    _SHORTFALL,
) = range(len(COSTS))
USUAL_SOFTNESS = 8.0
"""Where no run tells it, two equal sides reach 92 % of either together: our own convention."""
_WORKERS_SOFTNESS = 4.0
"""Of the minimum of the workers that there are and those that help: our own convention."""


class Rates(NamedTuple):
    """Of each side alone, and of runs. Rates as logarithms, (configs,), or derivatives, (costs, configs)."""

    loader: Floats
    device: Floats
    """On batches that it holds, in a tight loop: the slower of its kernels and of their launching."""
    run: Floats
    copy: Floats
    """Infinite where nothing is copied."""
    launch: Floats
    """Of a host that launches and does nothing else. Infinite where that is not known, as those
    below."""
    take: Floats
    """Of a host that takes batches from a full queue."""
    host: Floats
    """Of a host in a loop that waits neither for the device nor for data."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What the law depends on beside the costs, element by element of some configurations."""

    workers: Floats
    """Of each rank; 0: the training process loads."""
    ranks: Floats
    relative_batch: Floats
    """The micro batch over the usual one."""
    micro_batches: Floats
    """Of an optimizer step."""
    is_overlapped: NDArray[np.bool_]
    """Loader and device run side by side; else one after the other."""
    is_crowded: NDArray[np.bool_]
    """There are more threads and workers than cores, on a CPU."""
    is_copied: NDArray[np.bool_]
    """Batches are copied to the device, and what that takes is known."""
    is_blocking: NDArray[np.bool_]
    """The host waits for these copies: they come from pageable memory."""
    is_launched: NDArray[np.bool_]
    """A host launches work for an accelerator, and what that takes is known."""
    is_taken: NDArray[np.bool_]
    """Workers load, and what taking a batch that lies ready costs is known."""
    busy: Floats
    """Cores that training keeps busy."""
    cores: Floats
    """Cores that there are."""
    loader_cpu_s: Floats | float
    """CPU seconds of the loader for a sample."""

    @cached_property
    def has_groups(self) -> bool:
        """Whether one has several ranks."""
        return bool((self.ranks > 1).any())

    @cached_property
    def log_ranks(self) -> Floats:
        """Logarithm of the ranks, as those below."""
        return np.asarray(np.log(self.ranks), dtype=np.float64)

    @cached_property
    def log_batch(self) -> Floats:
        """Of the relative batch."""
        return np.asarray(np.log(self.relative_batch), dtype=np.float64)

    @cached_property
    def log_micro_batches(self) -> Floats:
        """Of an optimizer step's micro batches."""
        return np.asarray(np.log(self.micro_batches), dtype=np.float64)

    @cached_property
    def log_processes(self) -> Floats:
        """Of the processes of each rank that load."""
        return np.asarray(np.log(np.maximum(self.workers, 1.0)), dtype=np.float64)


def law(state: Floats, here: Circumstances) -> tuple[Rates, Callable[[], Rates]]:
    """The logarithms of all rates in a state, (costs, configs), and a call for their derivatives by it."""
    (kernels, of_kernels), loader, copy = (
        _device(state, here),
        _loader(state, here),
        _copy(state, here),
    )
    training, of_training = _training(state, here, kernels, of_kernels, copy)
    launch = _launch(state, here)
    take = _take(state, here)
    host, shares = _host(state, here, launch, take, loader, copy)
    device, of_which = _slower_of(kernels, launch)
    bounds = _bounds(loader, kernels, training, host, here)
    crowding = here.is_crowded * np.exp(state[_CROWDING])
    joint, weights = _joint(bounds, state[_SOFTNESS], here.is_overlapped)

    def slopes() -> Rates:
        of_loader = np.zeros_like(state)
        of_loader[_ITEMS] = 1.0
        of_loader[_PER_BATCH] = np.where(
            here.workers > 0, -_share(state[_PER_BATCH] - here.log_batch), 0.0
        )
        of_loader[_MOST_WORKERS] = _share(
            _WORKERS_SOFTNESS * (here.log_processes - state[_MOST_WORKERS])
        )
        of_copy = np.zeros_like(state)
        of_launch = np.zeros_like(state)
        of_take = np.zeros_like(state)
        of_copy[_COPIES] = here.is_copied
        of_launch[_LAUNCHING] = here.is_launched
        of_take[_TAKING] = here.is_taken
        of_sides = zip(shares, (of_launch, of_take, of_loader, of_copy), strict=True)
        of_host = sum((share * slope for share, slope in of_sides), np.zeros_like(state))
        of_host[_SLOWER] = -shares[0]
        of_cores = here.busy * np.exp(-kernels) / _cpu_s(kernels, here) * of_kernels
        bounding = zip(weights, (of_loader, of_training, of_cores, of_host), strict=True)
        of_run = sum((weight * slope for weight, slope in bounding), np.zeros_like(state))
        known = np.where(np.isfinite(bounds), bounds, 0.0)  # what is infinite has no weight
        of_run[_SOFTNESS] = np.where(here.is_overlapped, (weights * known).sum(axis=0) - joint, 0.0)
        of_run[_SHORTFALL] = 1.0
        of_run[_CROWDING] = -crowding
        of_device = of_which[0] * of_kernels + of_which[1] * of_launch
        return Rates(of_loader, of_device, of_run, of_copy, of_launch, of_take, of_host)

    return Rates(
        loader, device, joint + state[_SHORTFALL] - crowding, copy, launch, take, host
    ), slopes


def rates_of(state: Floats, here: Circumstances) -> Rates:
    """The logarithms of all rates in a state, (costs, configs)."""
    return law(state, here)[0]


def slopes_of(state: Floats, here: Circumstances) -> Rates:
    """The derivatives of the logarithms of all rates by the state."""
    return law(state, here)[1]()


def joint_rate(loader: float, device: float, *, is_overlapped: bool) -> float:
    """The rate of a loader and a device together, where no run tells how much they hold each other up."""
    return 1.0 / joint_s(1.0 / loader, 1.0 / device, is_overlapped=is_overlapped)


def joint_s(loader_s: float, training_s: float, *, is_overlapped: bool) -> float:
    """The same as seconds of a sample; 0 for a side that takes no time."""
    short_s, long_s = sorted((loader_s, training_s))
    softness = USUAL_SOFTNESS if is_overlapped else 1.0  # with 1 both times add up
    return (
        float(long_s * (1.0 + (short_s / long_s) ** softness) ** (1.0 / softness))
        if long_s > 0
        else 0.0
    )


def _loader(state: Floats, here: Circumstances) -> Floats:
    """Items side by side, and what handing a batch over costs."""
    useful = -_WORKERS_SOFTNESS * here.log_processes, -_WORKERS_SOFTNESS * state[_MOST_WORKERS]
    processes = -np.logaddexp(*useful) / _WORKERS_SOFTNESS
    cost = np.where(here.workers > 0, np.logaddexp(0.0, state[_PER_BATCH] - here.log_batch), 0.0)
    return np.asarray(state[_ITEMS] + here.log_ranks + processes - cost, dtype=np.float64)


def _device(state: Floats, here: Circumstances, *more: int) -> tuple[Floats, Floats]:
    """Of the device on batches that it holds, and its derivatives; `more`: other costs of a step that count."""
    of_step = (_PER_STEP, *more)
    shares = [state[_PER_MICRO_BATCH], *(state[row] - here.log_micro_batches for row in of_step)]
    terms = np.stack([np.zeros_like(here.ranks), *(share - here.log_batch for share in shares)])
    cost = np.logaddexp.reduce(terms, axis=0)
    slopes = np.zeros_like(state)
    slopes[_SAMPLES] = 1.0
    slopes[[_PER_MICRO_BATCH, *of_step]] = -np.exp(terms[1:] - cost)
    return state[_SAMPLES] + here.log_ranks - cost, slopes


def _training(
    state: Floats, here: Circumstances, device: Floats, of_device: Floats, copy: Floats
) -> tuple[Floats, Floats]:
    """The same in a run, where a group exchanges gradients, and the copies that nothing hides add to the time."""
    if here.has_groups:
        exchanging = zip((device, of_device), _device(state, here, _EXCHANGE), strict=True)
        device, of_device = (np.where(here.ranks > 1, seen, alone) for alone, seen in exchanging)
    exposed = -np.logaddexp(0.0, state[_HIDDEN])  # the logarithm of a share
    rate = -np.logaddexp(-device, exposed - copy)
    copying = np.exp(exposed - copy + rate)  # its share of the time
    slopes = (1.0 - copying) * of_device
    slopes[_COPIES], slopes[_HIDDEN] = copying, copying * _share(state[_HIDDEN])
    return rate, slopes


def _copy(state: Floats, here: Circumstances) -> Floats:
    """Of copies alone, each rank's to its own device."""
    return np.where(here.is_copied, state[_COPIES] + here.log_ranks, inf)


def _launch(state: Floats, here: Circumstances) -> Floats:
    """Return the rate of launching alone; each rank has a host process of its own."""
    return np.where(here.is_launched, state[_LAUNCHING] + here.log_batch + here.log_ranks, inf)


def _take(state: Floats, here: Circumstances) -> Floats:
    """Return the rate of fetching prefetched batches, as each rank does."""
    return np.where(here.is_taken, state[_TAKING] + here.log_batch + here.log_ranks, inf)


def _host(
    state: Floats, here: Circumstances, launch: Floats, take: Floats, loader: Floats, copy: Floats
) -> tuple[Floats, Floats]:
    """Return the rate of a host, and the share of each of its tasks in its time, (4, configs).

    One after the other it launches, takes a batch from the queue or makes it, and waits for a copy
    that blocks.
    """
    makes = here.is_launched & (here.workers == 0)
    blocks = here.is_launched & here.is_blocking
    rates = np.stack(
        [
            launch - state[_SLOWER],
            np.where(here.is_launched, take, inf),
            np.where(makes, loader, inf),
            np.where(blocks, copy, inf),
        ]
    )
    rate = -np.logaddexp.reduce(-rates, axis=0)
    return rate, np.where(
        here.is_launched, np.exp(np.where(here.is_launched, rate, 0.0) - rates), 0.0
    )


def _slower_of(kernels: Floats, launch: Floats) -> tuple[Floats, Floats]:
    """The softened minimum of kernels and their launching side by side, and its slopes by both, (2, configs)."""
    both = np.stack([kernels, launch])
    rate = -np.logaddexp.reduce(-USUAL_SOFTNESS * both, axis=0) / USUAL_SOFTNESS
    return rate, np.exp(USUAL_SOFTNESS * (rate - both))


def _bounds(
    loader: Floats, kernels: Floats, training: Floats, host: Floats, here: Circumstances
) -> Floats:
    """Return the limits of a run, (4, configs): loader, training with its copies, cores and host."""
    return np.stack([loader, training, np.log(here.cores / _cpu_s(kernels, here)), host])


def _joint(
    bounds: Floats, softness: Floats, is_overlapped: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Side by side the softened minimum of the bounds, else loader and training one after the other; and its slopes."""
    hardness = np.where(is_overlapped, np.exp(softness), 1.0)
    nothing = np.full_like(bounds[2], inf)
    joined = np.where(is_overlapped, bounds, np.stack([bounds[0], bounds[1], nothing, nothing]))
    rate = -np.logaddexp.reduce(-hardness * joined, axis=0) / hardness
    return rate, np.exp(hardness * (rate - joined))


def _cpu_s(device: Floats, here: Circumstances) -> Floats:
    """CPU seconds of a sample in all."""
    # keeps the logarithm finite where no CPU time was observed
    return np.maximum(here.loader_cpu_s + here.busy * np.exp(-device), 1e-12)


def _share(logit: Floats) -> Floats:
    """The logistic function."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logit)), dtype=np.float64)
