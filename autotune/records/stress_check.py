"""The stress run: the winner trained for longer on the largest samples that the dataset has shown. Pure.

It runs in one process. A Load is its peak for all ranks whose memory counts together, to be compared with the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.frozen import FrozenModel
from autotune.note import Note
from autotune.records.measurement import MemorySample
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts
from autotune.space.constraints import ranks_on_host

__all__ = ["Load", "StressFigures", "load_of", "sample_scan_s"]

_LOOK_S = 4.0  # our convention
_LOOK_SHARE = 0.2  # of the time left: our convention
_WHERE = {"ddp": "in one process", "dp": "on one device"}


class StressFigures(FrozenModel):
    """What a stress run has measured."""

    steps: int
    """Optimizer steps, ordinary batches and batches of the largest samples in turns."""
    seconds: float
    """Wall time of the steps."""
    items_seen: int
    """Items of the dataset whose size was measured."""
    median_item_bytes: float
    """Bytes of an item's tensors, in the median of those seen."""
    largest_item_bytes: int
    """Equal to the median where all items have one size."""
    largest_batch_bytes: int = 0
    """Tensors of the batch of the largest samples, as it was trained on."""
    remark: Note | None = None
    """Why no batch of the largest samples was trained on; None where one was."""
    memory: MemorySample
    """Of the one process that it ran in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A stress run's peak where its settings train on several ranks."""

    own_bytes: int
    """Peak of the one process that ran."""
    bucket_bytes: int = 0
    """DistributedDataParallel's buckets of a rank, which that process has not."""
    where: str = ""
    """How that process differs from what its settings say: "in one process", "on one device"; "" where it does not."""
    ranks: int = 1
    """Those whose memory counts together: on the CPU all of a host."""

    @property
    def least_bytes(self) -> int:
        """What a rank takes by itself, to be compared with the limit."""
        return self.own_bytes + self.bucket_bytes

    @property
    def peak_bytes(self) -> int:
        """What all may take together; less where they share memory."""
        return self.ranks * self.least_bytes

    @property
    def is_more(self) -> bool:
        """Whether that is more than what the process took."""
        return self.peak_bytes > self.own_bytes


def sample_scan_s(left_s: float) -> float:
    """Seconds for measuring samples' sizes before the stress run, of so many until its deadline."""
    return min(_LOOK_S, _LOOK_SHARE * max(0.0, left_s))


def load_of(figures: StressFigures, config: TrainingConfig, environment: Environment, facts: WorkloadFacts) -> Load:
    """A stress run's peak for all ranks of the settings whose memory counts together.

    It errs upwards: what ranks share (libraries, a mapped dataset) is counted for each. With gradient_as_bucket_view
    the gradients lie in the buckets and take no more.
    Source: torch.nn.parallel.DistributedDataParallel, on gradient_as_bucket_view: the memory that it saves equals the
    total size of the gradients.
    """
    has_buckets = config.strategy == "ddp" and not (config.ddp or DdpConfig()).gradient_as_bucket_view
    return Load(
        own_bytes=figures.memory.peak_bytes,
        bucket_bytes=facts.gradient_bytes if has_buckets else 0,
        where=_WHERE.get(config.strategy, ""),
        ranks=ranks_on_host(config.process_count, environment) if environment.has_only_ram else 1,
    )
