"""What is tried of the settings that only loader workers have, by what the probe has seen of the items. Pure.

Comes in: the facts, the machine, the numbers of workers that are tried. Goes out: values beside the baseline's own.
"""

from __future__ import annotations

from math import ceil

from autotune.settings.environment import Environment
from autotune.settings.workload import WorkloadFacts

__all__ = ["LEAST_CORES_PER_ITEM", "LEAST_TAIL_FRACTION", "gains_out_of_order", "worker_threads_tried"]

LEAST_TAIL_FRACTION = 0.2
"""Of the items' time in slow ones, from which on other orders are tried. In order, a batch with a slow item can hold up
all other workers while it is made; out of order none. So at best this share, times the workers, is the gain, as a
factor: below a fifth it takes more than five workers to gain anything. Of all the loading time 0.4 makes the tail the
verdict (diagnosis/bottlenecks); what pays is tried from half of that on."""
LEAST_CORES_PER_ITEM = 1.2
"""Cores that an item keeps busy, from which on it runs in threads that torch does not limit: our own convention, above
what an item's own thread and the system's work for it reach."""


def gains_out_of_order(facts: WorkloadFacts) -> bool:
    """Whether batches in the order in which workers finish them may come faster, and may be tried.

    Not where the user's code asks for determinism: runs of one seed are not alike bit for bit then.
    """
    return (facts.slow_tail_fraction or 0.0) >= LEAST_TAIL_FRACTION and not facts.is_deterministic


def worker_threads_tried(facts: WorkloadFacts, environment: Environment) -> list[int]:
    """Threads of each worker that are worth trying, ascending: one, and twice as many as long as they find cores.

    As many as an item keeps busy, and as two workers have cores for.
    """
    busy, cores = facts.cores_per_item or 0.0, environment.cores
    if busy < LEAST_CORES_PER_ITEM or cores < 2 or facts.is_tf_data:
        return []
    most = min(ceil(busy), cores // 2)
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
