"""The configurations that a diagnosis measures beside today's, one side alone each. Pure.

Comes in: a ResolvedSpace. Goes out: configurations that differ from its baseline in one respect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules
from autotune.space.default_ranges import most_workers
from autotune.space.domains import whole_numbers
from autotune.space.resolved_space import ResolvedSpace
from autotune.space.token_budget import with_batch

__all__ = ["list_variations"]

_BATCH_FACTORS = (0.5, 2.0, 4.0)
"""Times today's batch: our own convention, with today's own enough for a line of times over batches."""


def list_variations(space: ResolvedSpace) -> list[TrainingConfig]:
    """Configurations whose loader or device is worth measuring alone.

    Workers persist from epoch to epoch wherever there are any. torch.compile is left out: it takes too long here;
    cudnn_benchmark too, which only a process of its own shows.
    """
    own, machine = space.baseline, (space.facts, space.environment)
    changed = [{**own.model_dump(), **changes} for changes in (*_loader_changes(space), *_device_changes(space))]
    configs = [TrainingConfig.model_validate(rules.normalised(settings, *machine)) for settings in changed]
    others = [config for config in dict.fromkeys(configs) if config != own]
    return [config for config in others if rules.obstacle(config, *machine, drop_last=space.drop_last) is None]


def _loader_changes(space: ResolvedSpace) -> Iterator[Mapping[str, object]]:
    sharing = rules.ranks_on_host(space.baseline.process_count, space.environment)
    most = max(1, most_workers(space.facts, space.environment) // sharing)
    yield {"persistent_workers": space.baseline.num_workers > 0}
    counts = (0, *(2**power for power in range(most.bit_length())))
    yield from ({"num_workers": count, "persistent_workers": count > 0} for count in counts)
    if space.baseline.num_workers > 1:
        yield from ({"in_order": value, "persistent_workers": True} for value in space.domains["in_order"])
    if space.baseline.num_workers > 0:
        threads = sorted(whole_numbers(space.domains["worker_threads"]))
        yield from ({"worker_threads": count, "persistent_workers": True} for count in threads[:1])


def _device_changes(space: ResolvedSpace) -> Iterator[Mapping[str, object]]:
    own, environment = space.baseline, space.environment
    for factor in _BATCH_FACTORS:
        yield with_batch(own, max(1, int(own.micro_batch_size * factor))).model_dump()
    reached = space.domains["amp_dtype"]  # of a script only what can be set from outside, float16 never
    yield from ({"amp_dtype": dtype} for dtype in environment.native_amp_dtypes if dtype in reached)
    if environment.device_kind == "cpu":
        yield from ({"intra_op_threads": count} for count in (1, environment.cores))
    if space.facts.has_4d_input:
        yield {"channels_last": True}
    yield from ({"fused": value} for value in space.domains["fused"])
