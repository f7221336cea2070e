"""What is tried of the settings that only loader workers have, by what the probe has seen of the items. Pure.

Comes in: the facts, the machine, the numbers of workers that are tried. Goes out: values beside the baseline's own.
"""

from __future__ import annotations

from math import ceil

from autotune.policy import DefaultRanges
from autotune.settings.environment import Environment
from autotune.settings.workload import WorkloadFacts

__all__ = ["gains_out_of_order", "worker_threads_tried"]


def gains_out_of_order(facts: WorkloadFacts, ranges: DefaultRanges) -> bool:
    """Whether batches in the order in which workers finish them may come faster, and may be tried.

    Not where the user's code asks for determinism: runs of one seed are not alike bit for bit then.
    """
    return (facts.slow_tail_fraction or 0.0) >= ranges.slow_tail_fraction and not facts.is_deterministic


def worker_threads_tried(facts: WorkloadFacts, environment: Environment, ranges: DefaultRanges) -> list[int]:
    """Threads of each worker that are worth trying, ascending: one, and twice as many as long as they find cores.

    As many as an item keeps busy, and as two workers have cores for.
    """
    busy, cores = facts.cores_per_item or 0.0, environment.cores
    if busy < ranges.cores_per_item or cores < 2 or facts.is_tf_data:
        return []
    most = min(ceil(busy), cores // 2)
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
