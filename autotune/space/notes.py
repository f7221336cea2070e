"""Notes on a space before it is searched: settings without an effect, and reasons for narrow ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.messages import space as messages
from autotune.note import Note
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.search_space import DDP_PREFIX, Choices, Domain
from autotune.settings.training_config import TrainingConfig
from autotune.settings_table import SETTINGS
from autotune.space.constraints import most_ranks, without_effect
from autotune.space.default_ranges import Basis
from autotune.space.domains import group_sizes

__all__ = ["space_notes"]


def space_notes(basis: Basis, domains: Mapping[str, Domain]) -> tuple[Note, ...]:
    """The notes, in the order of the settings in a report."""
    return (
        *basis.environment.remarks,
        *_malloc(basis),
        *_reserve(basis),
        *_larger_batch_gain(basis),
        *_without_effect(basis),
        *_binding(basis, domains),
        *_emulated(basis),
        *_unsharded(basis),
        *_tf_data(basis),
        *_out_of_order(basis, domains),
        *_ranks(basis, domains),
        *_hosts(basis, domains),
    )


def _malloc(basis: Basis) -> Iterator[Note]:
    """How trials allocate host memory, where training does not by itself or the user has chosen it."""
    environment = basis.environment
    if environment.malloc:
        yield messages.malloc(switches=environment.malloc, is_ours=environment.keeps_memory)


def _reserve(basis: Basis) -> Iterator[Note]:
    """What trials leave free below the memory limit."""
    objective, device_bytes = basis.objective, basis.environment.device_memory_bytes
    reserve_bytes = objective.reserve_bytes(device_bytes)
    if reserve_bytes:
        yield messages.reserve(reserve_bytes, trial_bytes=objective.limit_bytes(device_bytes))


def _larger_batch_gain(basis: Basis) -> Iterator[Note]:
    if basis.keeps_batch and "larger_batch_gain" in basis.objective.model_fields_set:
        yield messages.larger_batch_gain_unused()


def _without_effect(basis: Basis) -> Iterator[Note]:
    facts, environment = basis.facts, basis.environment
    for setting, reason in without_effect(basis.baseline, facts, environment).items():
        yield messages.baseline_without_effect(setting, reason, environment.device)
    for setting in sorted(one.name for one in SETTINGS if one.idle and not one.is_of_ddp):
        for value in basis.given.get(setting, ()):
            config = TrainingConfig().model_copy(update={setting: value})
            found = without_effect(config, facts, environment).get(setting)
            if found is not None:
                yield messages.value_without_effect(setting, value, reason=found, device=environment.device)


def _binding(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Listed bindings that change nothing for any number of ranks that is tried."""
    facts, environment = basis.facts, basis.environment
    sizes = group_sizes(domains)
    groups = [TrainingConfig(strategy="ddp", world_size=size) for size in sizes]
    for value in basis.given.get("numa_binding", ()):
        reasons = [
            without_effect(config.model_copy(update={"numa_binding": value}), facts, environment).get("numa_binding")
            for config in (TrainingConfig(), *groups)
        ]
        if None not in reasons:
            reason = str(reasons[0])
            yield messages.value_without_effect("numa_binding", value, reason, environment.device)


def _emulated(basis: Basis) -> Iterator[Note]:
    """Precisions that the device does not compute natively; of TF32 `without_effect` speaks."""
    known = {"tf32", *basis.environment.native_amp_dtypes}
    listed = basis.given.get("amp_dtype", Choices(values=(basis.baseline.amp_dtype,)))
    emulated = [dtype for dtype in listed if dtype not in known]
    if emulated:
        yield messages.precision_not_native(device=basis.environment.device_name, precisions=[*map(str, emulated)])


def _unsharded(basis: Basis) -> Iterator[Note]:
    if not basis.facts.is_sharded:
        is_listed = "num_workers" in basis.given
        yield messages.dataset_not_sharded(None if is_listed else max(1, basis.baseline.num_workers))


def _tf_data(basis: Basis) -> Iterator[Note]:
    if basis.facts.is_tf_data:
        yield messages.tf_data()


def _out_of_order(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """What batches out of order change, where they are tried and are not today's; why, where nobody has asked."""
    if False in domains["in_order"] and basis.baseline.in_order:
        share = None if "in_order" in basis.given else basis.facts.slow_tail_fraction
        yield messages.out_of_order_tried(share)


def _ranks(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Devices that are left unused, and listed DDP settings that do not do what they seem to."""
    environment, given = basis.environment, basis.given
    listed = [name for name in given if name.startswith(DDP_PREFIX)]
    if listed and not group_sizes(domains):
        yield messages.ddp_settings_without_ddp(listed)
        return
    is_named = 1 < most_ranks(environment) < environment.device_count
    if is_named and not given.keys() & {"world_size", "strategy"} and environment.device_kind != "cpu":
        yield messages.trials_stay_on_named_device(environment.device)
    if environment.device_names and max(group_sizes(domains), default=1) > 1:
        yield messages.unlike_devices(environment.device_names)
    searches_unused = given.get(f"{DDP_PREFIX}find_unused_parameters")
    if searches_unused is not None and True not in searches_unused and basis.facts.has_unused_parameters:
        yield messages.unused_parameters_not_searched()
    yield from _listed_hooks(basis, domains)


def _hosts(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """A layout that changes nothing, and devices that no group reaches by default."""
    environment, sizes = basis.environment, group_sizes(domains)
    has_groups = bool(sizes) or basis.baseline.process_count > 1
    if environment.is_spread and (environment.hosts == 1 or not has_groups):
        yield messages.spread_without_effect(environment.hosts)
    most, device_count = max(sizes, default=1), most_ranks(environment)
    is_device = environment.device_kind != "cpu" and environment.hosts > 1
    if is_device and sizes and most < device_count and "world_size" not in basis.given:
        yield messages.world_size_capped(most, devices=device_count, hosts=environment.hosts)


def _listed_hooks(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[Note]:
    """Compression that the user has listed and does not run today: the user alone can judge it."""
    today = (basis.baseline.ddp or DdpConfig()).comm_hook
    hooks = [hook for hook in basis.given.get(f"{DDP_PREFIX}comm_hook", ()) if hook not in {None, today}]
    if hooks:
        yield messages.hooks_change_gradients([*map(str, hooks)])
    unscaled = [dtype for dtype in domains["amp_dtype"] if dtype != "float16"]
    if "fp16" in hooks and unscaled:
        yield messages.fp16_hook_overflows([*map(str, unscaled)])
