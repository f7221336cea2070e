"""What a person should know of a space before it is searched: what has no effect, and why a range is narrow.

Takes a Basis and the domains made of it; hands on sentences. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.settings.search_space import DDP_PREFIX, Choices, Domain
from autotune.settings.training_config import TrainingConfig
from autotune.space import constraints as rules
from autotune.space.default_ranges import Basis
from autotune.space.domains import group_sizes

__all__ = ["space_notes"]


def space_notes(basis: Basis, domains: Mapping[str, Domain]) -> tuple[str, ...]:
    """A sentence each, in the order in which a person looks at the settings."""
    return (
        *basis.environment.remarks,
        *_without_effect(basis),
        *_emulated(basis),
        *_unsharded(basis),
        *_ranks(basis, domains),
        *_hosts(basis, domains),
    )


def _without_effect(basis: Basis) -> Iterator[str]:
    effects = rules.without_effect(basis.baseline, basis.facts, basis.environment)
    for setting, reason in effects.items():
        yield f"The baseline's {setting} has no effect here: {reason}."
    for setting in ("amp_dtype", "channels_last", "pin_memory"):
        for value in basis.given.get(setting, ()):
            config = TrainingConfig().model_copy(update={setting: value})
            found = rules.without_effect(config, basis.facts, basis.environment).get(setting)
            if found is not None:
                yield f"{setting}={value} has no effect here: {found}."


def _emulated(basis: Basis) -> Iterator[str]:
    """Precisions that the device does not compute itself; TF32 elsewhere than on NVIDIA's is said to have no effect."""
    known = {"tf32", *basis.environment.native_amp_dtypes}
    listed = basis.given.get("amp_dtype", Choices(values=(basis.baseline.amp_dtype,)))
    emulated = [str(one) for one in listed if one not in known]
    if emulated:
        yield f"{basis.environment.device_name} does not compute {', '.join(emulated)} natively: tried as given."


def _unsharded(basis: Basis) -> Iterator[str]:
    if basis.facts.is_sharded:
        return
    repeated = "each further worker would repeat the data: shard it by torch.utils.data.get_worker_info()"
    if "num_workers" in basis.given:
        yield f"The iterable dataset is not sharded; {repeated}. The choices given were kept."
    else:
        most = max(1, basis.baseline.num_workers)
        yield f"The iterable dataset is not sharded, so num_workers stayed within {most}; {repeated}."


def _ranks(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[str]:
    """What is said of several devices: those left alone, and listed settings of DDP that don't do what they seem to."""
    environment, given = basis.environment, basis.given
    listed = [name for name in given if name.startswith(DDP_PREFIX)]
    if listed and not group_sizes(domains):
        yield f"{', '.join(listed)} had no effect: no strategy 'ddp' with several ranks lies in the space."
        return
    is_named = 1 < rules.most_ranks(environment) < environment.device_count
    if is_named and not given.keys() & {"world_size", "strategy"} and environment.device_kind != "cpu":
        yield f"{environment.device} was named, so trials stayed on it; list world_size to have further devices tried."
    if environment.device_names and max(group_sizes(domains), default=1) > 1:
        yield (
            f"The devices are not alike ({', '.join(environment.device_names)}): a group of them trains at the slowest "
            "one's pace, and fits only what the smallest one holds."
        )
    lookups = given.get(f"{DDP_PREFIX}find_unused_parameters")
    if lookups is not None and True not in lookups and basis.facts.has_unused_parameters:
        yield (
            "One step has left parameters without a gradient: without ddp.find_unused_parameters=True only a static "
            "graph runs under strategy 'ddp'. The choices given were kept."
        )
    yield from _listed_hooks(basis, domains)


def _hosts(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[str]:
    """What is said of several hosts: a layout that changes nothing, and devices that no group reaches by default."""
    environment, sizes = basis.environment, group_sizes(domains)
    has_groups = bool(sizes) or basis.baseline.process_count > 1
    if environment.is_spread and (environment.hosts == 1 or not has_groups):
        why = "there is one host" if environment.hosts == 1 else "no trial has several ranks"
        yield f"executor.ranks=spread had no effect: {why}."
    most, there_are = max(sizes, default=1), rules.most_ranks(environment)
    is_device = environment.device_kind != "cpu" and environment.hosts > 1
    if is_device and sizes and most < there_are and "world_size" not in basis.given:
        yield (
            f"world_size stayed within {most} of the {there_are} devices of {environment.hosts} hosts: with more, a "
            "rank would have no sample of the largest global batch that is tried; list world_size to have more tried."
        )


def _listed_hooks(basis: Basis, domains: Mapping[str, Domain]) -> Iterator[str]:
    """Compression that the user has listed, and does not run today: nobody but he can judge it."""
    today = None if basis.baseline.ddp is None else basis.baseline.ddp.comm_hook
    hooks = [one for one in basis.given.get(f"{DDP_PREFIX}comm_hook", ()) if one not in {None, today}]
    if hooks:
        yield (
            f"ddp.comm_hook {', '.join(map(str, hooks))} changes the gradients on their way, which the precision guard "
            "does not compare: compare the validation metric once."
        )
    unscaled = [str(one) for one in domains["amp_dtype"] if one != "float16"]
    if "fp16" in hooks and unscaled:
        yield (
            "ddp.comm_hook fp16 makes gradients above 65,504 infinite before they are averaged, and those below 6e-8 "
            f"zero; in {', '.join(unscaled)} no GradScaler makes up for that."
        )
