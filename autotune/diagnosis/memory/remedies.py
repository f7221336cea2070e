"""All advice on memory for one job. Pure.

Comes in: an Evidence and its findings. Goes out: advice without settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.diagnosis.memory.allocation import expandable_segments, share_gpu
from autotune.diagnosis.memory.checkpointing import checkpoint_activations
from autotune.diagnosis.memory.sharding import shard_parameters
from autotune.records.diagnosis import Advice, Evidence, Finding

__all__ = ["list_memory_remedies"]


def list_memory_remedies(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """What makes room, or uses the room that is there; there is at least one finding."""
    yield from checkpoint_activations(evidence)
    yield from expandable_segments(evidence)
    yield from shard_parameters(evidence)
    yield from share_gpu(evidence, findings)
