"""The configurations that a diagnosis measures beside today's, one side alone each. Pure.

Comes in: a ResolvedSpace and today's run. Goes out: configurations that differ from its baseline in one respect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from autotune.analysis.forecast.acquisition import AMPLE
from autotune.analysis.forecast.observations import by_promise, is_device_out_of_reach, is_loader_out_of_reach
from autotune.diagnosis.gains import LEAST_GAIN
from autotune.records.breakdown import LoaderCosts
from autotune.records.ceilings import SIDES, CeilingBook
from autotune.records.measurement import Ceilings, Measurement
from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules
from autotune.space.default_ranges import most_workers
from autotune.space.domains import whole_numbers
from autotune.space.resolved_space import ResolvedSpace
from autotune.space.token_budget import with_batch

__all__ = ["list_variations"]

_LARGER, _SMALLER = (2.0, 4.0), (0.5,)
"""Times today's batch: our own convention, with today's own enough for a line of times over batches."""


def list_variations(space: ResolvedSpace, run: Measurement) -> list[TrainingConfig]:
    """Configurations whose loader or device is worth measuring alone: none of a side that can't be the bottleneck.

    Time may run out before the last one, so those that decide most come first on each side. Workers persist from epoch
    to epoch wherever there are any. torch.compile is left out: it takes too long here; cudnn_benchmark too, which only
    a process of its own shows.
    """
    own, machine, book = space.baseline, (space.facts, space.environment), CeilingBook()
    ceilings = run.ceilings or Ceilings()
    for side in SIDES:
        book.keep(side, own, getattr(ceilings, side))
    changes: list[Mapping[str, object]] = []
    if not is_loader_out_of_reach(space, book):
        changes += _loader_changes(space, run)
    if not is_device_out_of_reach(space, book, by_cores=_loader_by_cores(space, run.loader_costs)):
        changes += _device_changes(space)
    changed = [{**own.model_dump(), **change} for change in changes]
    configs = [TrainingConfig.model_validate(rules.normalised(settings, *machine)) for settings in changed]
    others = [config for config in dict.fromkeys(configs) if config != own]
    return [config for config in others if rules.obstacle(config, *machine, drop_last=space.drop_last) is None]


def _loader_by_cores(space: ResolvedSpace, costs: LoaderCosts | None) -> float:
    """Return the rate at which items keep all cores busy, in samples per second; infinite where that is not known.

    On a CPU computing takes cores from the loader, which makes it slower still.
    """
    sample_s = 0.0 if costs is None else costs.item_cpu_s + costs.collate_s / space.baseline.micro_batch_size
    return space.environment.cores / sample_s if sample_s > 0 else inf


def _loader_changes(space: ResolvedSpace, run: Measurement) -> Iterator[Mapping[str, object]]:
    own, cores = space.baseline, space.environment.cores
    sharing = rules.ranks_on_host(own.process_count, space.environment)
    most = max(1, most_workers(space.facts, space.environment, space.policy.ranges) // sharing)
    counts = {0, *(2**power for power in range(most.bit_length())), *({cores // sharing} & {*range(1, most + 1)})}
    counts -= {own.num_workers} if _may_do_with_one(own, run) else {own.num_workers, 0, 1}
    by_workers: list[Mapping[str, object]] = [
        {"num_workers": count, "persistent_workers": count > 0}
        for count in by_promise(counts, max(1, cores // sharing))
    ]
    yield from (change for change in by_workers if change["num_workers"] not in {0, 1})
    if own.num_workers > 1 and len({*space.domains["in_order"]}) > 1:
        yield from ({"in_order": value, "persistent_workers": True} for value in space.domains["in_order"])
    if own.num_workers > 0:
        threads = sorted(whole_numbers(space.domains["worker_threads"]))
        yield from ({"worker_threads": count, "persistent_workers": True} for count in threads[:1])
    if own.num_workers > 0 and (run.breakdown is None or run.breakdown.restart_fraction >= LEAST_GAIN):
        yield {"persistent_workers": True}
    yield from (change for change in by_workers if change["num_workers"] in {0, 1})


def _may_do_with_one(own: TrainingConfig, run: Measurement) -> bool:
    """Return False where one process makes items more slowly than today's run: neither one worker nor none helps."""
    costs = run.loader_costs
    if costs is None or own.num_workers < 2:
        return True
    sample_s = costs.item_s + costs.collate_s / own.micro_batch_size
    return run.samples_per_s / own.process_count * sample_s <= AMPLE


def _device_changes(space: ResolvedSpace) -> Iterator[Mapping[str, object]]:
    own, environment = space.baseline, space.environment
    yield from (with_batch(own, max(1, int(own.micro_batch_size * factor))).model_dump() for factor in _LARGER)
    reached = space.domains["amp_dtype"]  # of a script only what can be set from outside, float16 never
    yield from ({"amp_dtype": dtype} for dtype in environment.native_amp_dtypes if dtype in reached)
    if environment.device_kind == "cpu":
        yield from ({"intra_op_threads": count} for count in (1, environment.cores))
    if space.facts.has_4d_input:
        yield {"channels_last": True}
    yield from ({"fused": value} for value in space.domains["fused"])
    yield from (with_batch(own, max(1, int(own.micro_batch_size * factor))).model_dump() for factor in _SMALLER)
