"""Made-up machines and a made-up job: the truth that benchmarks/scaling.py holds its extrapolation against. Pure.

They know more than the law of scaling_model does: DDP's buckets one by one, with its small first one; a backward
pass of another share than the law assumes; ranks that wait for the slowest; loaders; and a network that may be slower
beyond a rack. They share the cost of a ring all-reduce with it, and so can't tell whether that holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.cases.scaling_model import DEFAULT_BUCKET_MIB, Exchange, Link, Setting, exchange_s

__all__ = [
    "FLAT",
    "JOB",
    "KINKED",
    "Cluster",
    "Job",
    "bucket_sizes",
    "exposed_one_by_one_s",
    "memory_bytes",
    "step_s",
]

_MIB = 2**20
_FIRST_BUCKET_MIB = (
    1.0  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES, where bucket_cap_mb is None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job: a model of 350 million parameters on one kind of GPU."""

    gradient_bytes: float
    sample_s: Mapping[str, float]
    """Seconds of a sample, forward and backward, by precision."""
    batch_s: float
    """Seconds that a micro batch takes beside its samples."""
    optimizer_s: float
    compressing_s: float
    """Seconds to halve all gradients and to widen them again."""
    backward_share: float
    """Of computing a micro batch."""
    item_s: float
    """Seconds in which one loader worker makes a sample."""
    fixed_bytes: float
    """Memory that no sample takes."""
    sample_bytes: float


JOB = Job(
    gradient_bytes=1.4e9,
    sample_s={"float32": 21e-3, "bfloat16": 6e-3},
    batch_s=12e-3,
    optimizer_s=8e-3,
    compressing_s=1.5e-3,
    backward_share=0.62,
    item_s=30e-3,
    fixed_bytes=8e9,
    sample_bytes=0.9e9,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs in nodes of eight, nodes in racks, racks beside each other."""

    node: Link
    network: Link
    """Between the nodes of a rack."""
    beyond: Link
    """Between racks."""
    node_gpus: int
    rack_gpus: int
    jitter: float
    """Relative standard deviation of a rank's computing, from step to step: all wait for the slowest."""

    def link(self, ranks: int) -> Link:
        """The slowest link of a ring of so many GPUs."""
        if ranks <= self.node_gpus:
            return self.node
        return self.network if ranks <= self.rack_gpus else self.beyond


_NETWORK = Link(bytes_per_s=25e9, latency_s=3e-6)
FLAT = Cluster(
    node=Link(bytes_per_s=150e9, latency_s=2e-6),
    network=_NETWORK,
    beyond=_NETWORK,
    node_gpus=8,
    rack_gpus=64,
    jitter=0.005,
)
"""One network for any number of racks."""
KINKED = replace(
    FLAT, beyond=Link(bytes_per_s=_NETWORK.bytes_per_s / 3, latency_s=2 * _NETWORK.latency_s)
)
"""Beyond a rack a third of the bandwidth and twice the latency."""


def step_s(setting: Setting, ranks: int, cluster: Cluster, job: Job = JOB) -> float:
    """Seconds of an optimizer step."""
    micro_s = job.batch_s + job.sample_s[setting.precision] * setting.micro
    compute_s = (
        setting.steps * micro_s
        + job.optimizer_s
        + (job.compressing_s if setting.is_halved else 0.0)
    )
    slowest_s = compute_s * (1 + cluster.jitter * _expected_maximum(ranks))
    waiting_s = exposed_one_by_one_s(
        setting, ranks, cluster.link(ranks), job, backward_s=job.backward_share * micro_s
    )
    loading_s = setting.micro * setting.steps * job.item_s / setting.workers
    return max(slowest_s + waiting_s, loading_s)


def memory_bytes(setting: Setting, job: Job = JOB) -> int:
    """Peak memory of a GPU."""
    return int(job.fixed_bytes + setting.micro * job.sample_bytes)


def exposed_one_by_one_s(
    setting: Setting, ranks: int, link: Link, job: Job, *, backward_s: float
) -> float:
    """Seconds by which the exchange outlasts the backward pass, bucket by bucket: each waits for the one before it."""
    sizes = bucket_sizes(setting, job.gradient_bytes)
    total, ready, ended_s = sum(sizes), 0.0, 0.0
    for size in sizes:
        ready += size
        sent = size / 2 if setting.is_halved else size
        own_s = exchange_s(Exchange(sent_bytes=sent, buckets=1, backward_s=0.0), ranks, link)
        ended_s = max(ended_s, backward_s * ready / total) + own_s
    return ended_s - backward_s


def bucket_sizes(setting: Setting, gradient_bytes: float) -> Sequence[float]:
    """Bytes of gradients in each of DDP's buckets, in the order in which they get ready."""
    cap = (setting.bucket_mib or DEFAULT_BUCKET_MIB) * _MIB
    first = min(_FIRST_BUCKET_MIB * _MIB if setting.bucket_mib is None else cap, gradient_bytes)
    full, rest = divmod(gradient_bytes - first, cap)
    return [first, *([cap] * int(full)), *([rest] if rest else [])]


def _expected_maximum(count: int) -> float:
    """Of so many standard normal values. Source: Blom, Statistical Estimates and Transformed Beta-Variables, 1958."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
