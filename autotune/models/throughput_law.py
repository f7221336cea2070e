"""Compute throughputs by a law: loader, device, copies, host and a whole run, from a few costs. Pure functions.

Comes in: `Circumstances`, the properties of configurations that the law depends on, and a state,
the logarithm of each cost. Goes out: the logarithms of throughputs, and their derivatives by the
state.

Device: an optimizer step takes k (a + b B) + c seconds (k micro batches of B samples), plus the
exposed gradient exchange in a group. Copies to the device that computing does not hide add to a
run's time.

Loader: workers share the items, up to the number where more no longer help. Handing over a batch
costs each worker something.

Run: with workers, the slowest of loader, training, cores and host sets the throughput, as a
softened minimum; one after the other, the times add up. Runs fall short of that by a share.

Host of an accelerator: it launches the work of each micro batch, which takes longer in a loop than
alone. Before that it takes the batch from the queue, or makes it without workers, and waits for
copies from pageable memory. These times add up.

Copies on the computing stream follow the kernels before them, so their time adds to the kernels',
from pinned memory too. A copy from pageable memory also blocks the host, which launches nothing
meanwhile. The hidden share (the device waits for launches, or user code copies ahead on its own
stream) is visible in runs only. Source: docs.pytorch.org, "A guide on good usage of non_blocking
and pin_memory() in PyTorch".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.models.statistics import Floats
from autotune.policy import POLICY, Throughput

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
"""Rows of a state, logarithms except `hidden`. `items`: samples/s of one loader process.
`per_batch`: time per batch that a worker hands over. `most_workers`: processes beyond which more
don't help. `samples`: samples/s of one device with an infinite batch. `per_micro_batch`,
`per_step`, `exchange`: time per micro batch, per step, and the exposed exchange in a group's run.
These times, and `per_batch`, are relative to the time of a usual batch's samples. `copies`:
samples/s of copies to one device. `hidden`: logit of the share of their time that a run hides.
`launching`: samples/s of usual batches that a host launches. `slower`: launching time in a loop
over that alone. `taking`: samples/s of usual ready batches that a host takes. `softness` of the
minimum, larger is harder: two equal sides reach 2 ** (-1 / softness) of either alone, because of
random items and a short queue. `crowding`: decrease of the log throughput with more threads than
cores, usually small, but large where threads spin. `shortfall`: a run's throughput over the joint
one."""
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


class Rates(NamedTuple):
    """Logarithms of throughputs, (configs,), or their derivatives, (costs, configs)."""

    loader: Floats
    """The loader alone."""
    device: Floats
    """The device alone, on batches in its memory in a tight loop: the slower of kernels and
    launching."""
    run: Floats
    """A whole run."""
    copy: Floats
    """Copies alone; infinite if nothing is copied."""
    launch: Floats
    """A host that only launches; infinite if not known, as the fields below."""
    take: Floats
    """A host that takes batches from a full queue."""
    host: Floats
    """A host in a loop that waits neither for the device nor for data."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Properties of configurations that the law depends on, element by element."""

    has_workers: NDArray[np.bool_]
    """Workers load; otherwise the training process does."""
    log_processes: Floats
    """Loading processes per rank; like the next fields, the logarithm of it."""
    log_ranks: Floats
    """Ranks of the group."""
    log_batch: Floats
    """Micro batch over the usual one."""
    log_micro_batches: Floats
    """Micro batches per optimizer step."""
    is_overlapped: NDArray[np.bool_]
    """Loader and device run side by side; otherwise one after the other."""
    is_crowded: NDArray[np.bool_]
    """More threads and workers than cores, on a CPU."""
    is_copied: bool
    """Batches are copied to the device, and the time of that is known."""
    is_blocking: NDArray[np.bool_]
    """The host waits for these copies, since they come from pageable memory."""
    is_launched: bool
    """A host launches work for an accelerator, and the time of that is known."""
    is_taken: NDArray[np.bool_]
    """Workers load, and the time of taking a ready batch is known."""
    busy: Floats
    """Cores that training keeps busy."""
    cores: Floats
    """Cores available."""
    loader_cpu_s: Floats
    """CPU seconds of the loader per sample."""


def law(
    state: Floats, here: Circumstances, model: Throughput = POLICY.throughput
) -> tuple[Rates, Callable[[], Rates]]:
    """Calculate all log throughputs in a state, and their derivatives on demand.

    Args:
        state: Costs, see `COSTS`, (costs, configs).
        here: Properties of the configurations.
        model: Softness of the minima that no cost gives.

    Returns:
        Log throughputs, (configs,) each, and a call for their derivatives by the state, (costs,
            configs) each.
    """
    # Each side alone; each rank copies to its own device, and has its own host process
    kernels, of_kernels = _device(state, here)
    loader = _loader(state, here, model.workers_softness)
    copy = np.where(here.is_copied, state[_COPIES] + here.log_ranks, inf)
    batches = here.log_batch + here.log_ranks
    launch = np.where(here.is_launched, state[_LAUNCHING] + batches, inf)
    take = np.where(here.is_taken, state[_TAKING] + batches, inf)
    device, of_which = _softened_minimum(np.stack([kernels, launch]), model.softness)

    # In a run: training with its copies, and the host, which launches, takes a batch from the queue
    # or makes it, and waits for a blocking copy, one after the other
    training, of_training = _training(state, here, kernels, of_kernels, copy)
    tasks = [
        launch - state[_SLOWER],
        np.where(here.is_launched, take, inf),
        np.where(here.is_launched & ~here.has_workers, loader, inf),
        np.where(here.is_launched & here.is_blocking, copy, inf),
    ]
    host, shares = _softened_minimum(np.stack(tasks), 1.0)

    # All together: side by side the softened minimum of all bounds, otherwise loader and training
    # one after the other. At least 1e-12 s, which keeps the logarithm finite without CPU time
    cpu_s = np.maximum(here.loader_cpu_s + here.busy * np.exp(-kernels), 1e-12)
    bounds = np.stack([loader, training, np.log(here.cores / cpu_s), host])
    bounds[2:, ~here.is_overlapped] = inf
    hardness = np.where(here.is_overlapped, np.exp(state[_SOFTNESS]), 1.0)
    joint, weights = _softened_minimum(bounds, hardness)
    crowding = here.is_crowded * np.exp(state[_CROWDING])

    def slopes() -> Rates:
        # Sides alone
        of_loader = np.zeros_like(state)
        of_loader[_ITEMS] = 1.0
        of_loader[_PER_BATCH] = np.where(
            here.has_workers, -_share(state[_PER_BATCH] - here.log_batch), 0.0
        )
        of_loader[_MOST_WORKERS] = _share(
            model.workers_softness * (here.log_processes - state[_MOST_WORKERS])
        )
        of_copy = np.zeros_like(state)
        of_launch = np.zeros_like(state)
        of_take = np.zeros_like(state)
        of_copy[_COPIES] = here.is_copied
        of_launch[_LAUNCHING] = here.is_launched
        of_take[_TAKING] = here.is_taken

        # The host: each task by its share of the time
        of_sides = zip(shares, (of_launch, of_take, of_loader, of_copy), strict=True)
        of_host = sum((share * slope for share, slope in of_sides), np.zeros_like(state))
        of_host[_SLOWER] = -shares[0]

        # A run: each bound by its weight
        of_cores = here.busy * np.exp(-kernels) / cpu_s * of_kernels
        bounding = zip(weights, (of_loader, of_training, of_cores, of_host), strict=True)
        of_run = sum((weight * slope for weight, slope in bounding), np.zeros_like(state))
        known = np.where(np.isfinite(bounds), bounds, 0.0)  # infinite bounds have no weight
        of_run[_SOFTNESS] = np.where(here.is_overlapped, (weights * known).sum(axis=0) - joint, 0.0)
        of_run[_SHORTFALL] = 1.0
        of_run[_CROWDING] = -crowding
        of_device = of_which[0] * of_kernels + of_which[1] * of_launch
        return Rates(of_loader, of_device, of_run, of_copy, of_launch, of_take, of_host)

    run = joint + state[_SHORTFALL] - crowding
    return Rates(loader, device, run, copy, launch, take, host), slopes


def joint_rate(loader: float, device: float, *, is_overlapped: bool) -> float:
    """Return the joint throughput of a loader and a device, before any run shows their interference.

    Args:
        loader: Throughput of the loader alone, in samples/s.
        device: Throughput of the device alone, in samples/s.
        is_overlapped: They run side by side; otherwise their times add up.
    """
    return 1.0 / joint_s(1.0 / loader, 1.0 / device, is_overlapped=is_overlapped)


def joint_s(loader_s: float, training_s: float, *, is_overlapped: bool) -> float:
    """Return the joint seconds per sample, as `joint_rate` does for throughput.

    Args:
        loader_s: Seconds per sample of the loader; 0 if it takes no time.
        training_s: Seconds per sample of training; 0 if it takes no time.
        is_overlapped: They run side by side; otherwise their times add up.
    """
    short_s, long_s = sorted((loader_s, training_s))
    if long_s <= 0:
        return 0.0
    softness = POLICY.throughput.softness if is_overlapped else 1.0  # with 1 both times add up
    return float(long_s * (1.0 + (short_s / long_s) ** softness) ** (1.0 / softness))


def _loader(state: Floats, here: Circumstances, softness: float) -> Floats:
    """Return the loader's log throughput: items in parallel, less the cost of handing over batches."""
    # Softened minimum of the present and the useful processes
    counts = np.stack([here.log_processes, state[_MOST_WORKERS]])
    processes, _ = _softened_minimum(counts, softness)
    cost = np.where(here.has_workers, np.logaddexp(0.0, state[_PER_BATCH] - here.log_batch), 0.0)
    return np.asarray(state[_ITEMS] + here.log_ranks + processes - cost, dtype=np.float64)


def _device(state: Floats, here: Circumstances, *more: int) -> tuple[Floats, Floats]:
    """Return the log throughput on batches in the device's memory, and its derivatives.

    Args:
        state: Costs, (costs, configs).
        here: Properties of the configurations.
        more: Rows of further costs per step.
    """
    of_step = [_PER_STEP, *more]
    per_batch = np.stack(
        [state[_PER_MICRO_BATCH], *(state[row] - here.log_micro_batches for row in of_step)]
    )
    times = np.stack([np.zeros_like(here.log_ranks), *(per_batch - here.log_batch)])
    rate, shares = _softened_minimum(-times, 1.0)
    slopes = np.zeros_like(state)
    slopes[_SAMPLES] = 1.0
    slopes[[_PER_MICRO_BATCH, *of_step]] = -shares[1:]
    return state[_SAMPLES] + here.log_ranks + rate, slopes


def _training(
    state: Floats, here: Circumstances, device: Floats, of_device: Floats, copy: Floats
) -> tuple[Floats, Floats]:
    """Return the device's log throughput in a run, with exchange and exposed copies, and its derivatives."""
    is_group = here.log_ranks > 0
    if is_group.any():
        exchanging, of_exchanging = _device(state, here, _EXCHANGE)
        device = np.where(is_group, exchanging, device)
        of_device = np.where(is_group, of_exchanging, of_device)
    exposed = -np.logaddexp(0.0, state[_HIDDEN])  # the logarithm of a share
    rate, (computing, copying) = _softened_minimum(np.stack([device, copy - exposed]), 1.0)
    slopes = computing * of_device
    slopes[_COPIES] = copying
    slopes[_HIDDEN] = copying * _share(state[_HIDDEN])
    return rate, slopes


def _softened_minimum(log_rates: Floats, hardness: Floats | float) -> tuple[Floats, Floats]:
    """Return the softened minimum of some rates, and its slopes by each.

    With a hardness of 1 their times add up, and the slopes are the shares of the time.
    """
    least = -np.logaddexp.reduce(-hardness * log_rates, axis=0) / hardness
    known = np.where(np.isfinite(least), least, 0.0)  # of infinite rates none has a slope
    return least, np.exp(hardness * (known - log_rates))


def _share(logit: Floats) -> Floats:
    """Return the logistic function."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -logit)), dtype=np.float64)
