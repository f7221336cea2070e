"""The cost model that ships with the fake launcher: what a made-up trial of a configuration measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

from autotune.records.ranks import Communication
from autotune.records.trial import Failure, Outcome
from autotune.settings.ddp_config import TORCH_BUCKET_CAP_MB, DdpConfig
from autotune.settings.training_config import TrainingConfig

__all__ = ["CostModel", "FakeTrial", "analytic_cost"]

# A made-up model and interconnect, of the order of ResNet-18's gradients over PCIe 4.0 x16:
_GRADIENT_BYTES = 64 * 2**20
_LINK_BYTES_PER_S = 20 * 2**30
_BACKWARD_SHARE = 2 / 3  # of a batch's time: a backward pass computes twice what a forward pass does


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTrial:
    """The figures of a made-up trial of a configuration; of a group, those of all its ranks together."""

    samples_per_s: float = 0.0
    peak_memory_bytes: int = 0
    """Of each rank."""
    busy_fraction: float = 1.0
    outcome: Outcome = "ok"
    reason: str = ""
    failure: Failure | None = None
    startup_s: float = 0.1
    hangs: bool = False
    """It never ends: the deadline does."""
    loader_ceiling: float | None = None
    """Rate of the loader alone; None: twice the rate in a trial, and unknown in curves."""
    device_ceiling: float | None = None
    """Rate of the device alone; None: the rate over the busy fraction; in curves unknown where that is 1."""
    copy_ceiling: float | None = None
    """Rate of copying batches to the device alone; None: no copy is known."""
    host_ceiling: float | None = None
    """Rate of the host that launches; a device that is less than wholly busy waits for it, or for data where the loader
    is slower. None: it is no side of its own, and devices wait for data alone."""
    passes_guard: bool = True
    """Whether it passes the precision guard; otherwise its last loss is `broken_loss`."""
    broken_loss: float = inf
    stress_peak_bytes: int | None = None
    """Peak memory of a stress run; None: that of the trial."""
    alloc_retries: int | None = None
    """Times that the allocator found no room, in the window and in a stress run; None: not counted."""
    communication: Communication | None = None
    """What exchanging gradients takes; None: not measured."""
    loader_cpu_s: float | None = None
    """CPU seconds that the loader alone takes for a sample; None: not counted."""
    device_cpu_s: float | None = None
    """The same of the device alone."""
    own_cores: float | None = None
    """Cores that a trial keeps busy; None: not counted."""
    others_cores: float = 0.0
    """Cores that other processes keep busy meanwhile."""


CostModel = Callable[[TrainingConfig], FakeTrial]


def analytic_cost(config: TrainingConfig) -> FakeTrial:
    """A plain machine: the slower of loader and device, memory linear in the micro batch.

    An item takes 1 ms to load, by up to eight workers of a process side by side, and sixteen of all ranks together; a
    batch takes the device 2 ms and 20 us a sample, half of that in a 16-bit precision. A sample needs 4 MiB of memory
    beside 512 MiB.

    Ranks exchange 64 MiB of gradients a step over a ring of 20 GiB/s, bucket by bucket: all but the last bucket may
    hide behind the backward pass, two thirds of a batch's time. DataParallel copies the model to each device anew for
    each batch, 1 ms a device.
    """
    processes, devices, micro = config.process_count, config.world_size, config.micro_batch_size
    loader = processes * 1000.0 * min(max(1, config.num_workers), 8, 16 / processes)
    speed = 2.0 if config.amp_dtype in {"bfloat16", "float16"} else 1.0
    step_s = 0.002 + 20e-6 * micro / speed + (devices * 1e-3 if config.strategy == "dp" else 0.0)
    exchange = _communication(config, step_s) if processes > 1 else None
    exposed_s = 0.0 if exchange is None else exchange.exposed_s / config.grad_accum_steps
    device, group = devices * (micro / step_s), devices * (micro / (step_s + exposed_s))
    rate = min(loader, group) if config.num_workers else 1 / (1 / loader + 1 / group)
    return FakeTrial(
        samples_per_s=rate,
        peak_memory_bytes=512 * 2**20 + micro * 4 * 2**20 + _bucket_bytes(config),
        busy_fraction=rate / device,
        loader_ceiling=loader,
        device_ceiling=device,
        communication=exchange,
    )


def _communication(config: TrainingConfig, batch_s: float) -> Communication:
    """A ring all-reduce of the gradients, after the last of a step's batches."""
    ddp, ranks = config.ddp or DdpConfig(), config.world_size
    buckets = ceil(_GRADIENT_BYTES / 2**20 / (ddp.bucket_cap_mb or TORCH_BUCKET_CAP_MB))
    sent_bytes = _GRADIENT_BYTES if ddp.comm_hook is None else _GRADIENT_BYTES // 2
    exchange_s = buckets * 100e-6 + 2 * (ranks - 1) / ranks * sent_bytes / _LINK_BYTES_PER_S
    hidden_s = min(_BACKWARD_SHARE * batch_s, exchange_s * (1 - 1 / buckets))
    alone_s = batch_s * config.grad_accum_steps
    return Communication(
        step_s=alone_s + exchange_s - hidden_s,
        step_alone_s=alone_s,
        exchange_s=exchange_s,
        bytes_exchanged=sent_bytes,
    )


def _bucket_bytes(config: TrainingConfig) -> int:
    """Memory of a rank's buckets, which gradients may be views of."""
    has_buckets = config.process_count > 1 and not (config.ddp or DdpConfig()).gradient_as_bucket_view
    return _GRADIENT_BYTES if has_buckets else 0
