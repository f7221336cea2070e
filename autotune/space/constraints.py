"""Check if a combination of settings can run and has an effect on this machine, for this workload.

Each rule returns a reason or None, which raising, skipping and reporting share. Settings that
contradict each other anywhere are refused by config/training_config. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf
from typing import get_args

from autotune.config.environment import DeviceKind, Environment
from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import (
    TORCH_BUCKET_CAP_MB,
    TORCH_FIRST_BUCKET_MB,
    DdpConfig,
    NumaBinding,
    TrainingConfig,
)
from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS, Setting

# NUMA binding on a described machine; apply/cores.py binds the processes.


_KINDS: frozenset[DeviceKind] = frozenset({"cpu", "cuda", "rocm"})
"""Kinds of device whose place torch reports."""
_WITHOUT_AFFINITY = ("macOS", "Darwin", "Windows")
"""Beginnings of platform.platform() on systems that can't bind processes to cores."""


def can_bind(environment: Environment) -> bool:
    """Return True if processes can be bound to the cores next to their device."""
    return environment.device_kind in _KINDS and not environment.platform.startswith(
        _WITHOUT_AFFINITY
    )


def effective_binding(binding: object, ranks: int, environment: Environment) -> NumaBinding | None:
    """Return the binding that has the same effect for this number of ranks on a host.

    "exclusive" equals "node" if no two ranks share a node. None if every rank keeps all cores.
    """
    if binding is None or not can_bind(environment):
        return None
    if binding == "exclusive" and max(_ranks_by_node(ranks, environment)) > 1:
        return "exclusive"
    return "node" if environment.numa_nodes > 1 else None


def refused_binding(
    binding: NumaBinding | None, ranks: int, environment: Environment, devices: int | None = None
) -> str | None:
    """Return why this number of ranks on a host can't be bound so, or None.

    Args:
        binding: Value of numa_binding.
        ranks: Processes on the host.
        environment: The machine.
        devices: Devices of all these processes; None: one each.
    """
    found = effective_binding(binding, ranks, environment)
    if found is None:
        return None
    places = devices or ranks
    if any(_node_of(place, places, environment) < 0 for place in range(places)):
        return (
            f"numa_binding {binding!r} needs the NUMA node of each device and a core there, but "
            f"the machine does not "
            f"tell one for every device from {environment.device} on; leave numa_binding out"
        )
    if found != "exclusive":
        return None
    by_node = zip(_ranks_by_node(ranks, environment), _node_cores(environment), strict=True)
    for taken, cores in by_node:
        if taken > cores:
            return (
                "numa_binding 'exclusive' needs a physical core for each rank of a NUMA node, but "
                f"{taken} ranks would share {cores}; set numa_binding: node, or fewer ranks"
            )
    return None


def has_binding(binding: NumaBinding | None, ranks: int, environment: Environment) -> bool:
    """Return True if a binding is possible for this number of ranks on a host, and has an effect."""
    is_possible = refused_binding(binding, ranks, environment) is None
    return is_possible and effective_binding(binding, ranks, environment) is not None


def bindings_tried(rank_counts: Iterable[int], environment: Environment) -> list[NumaBinding]:
    """Return the bindings to try by default, for these numbers of ranks on a host.

    Within a single node, only ranks on the CPU are bound: they keep all cores busy, and move each
    other from core to core. Source: our convention.
    """
    counts = list(rank_counts)
    if environment.numa_nodes == 1 and environment.device_kind != "cpu":
        return []
    tried: list[NumaBinding] = []
    for binding in get_args(NumaBinding):
        for count in counts:
            is_itself = effective_binding(binding, count, environment) == binding
            if is_itself and refused_binding(binding, count, environment) is None:
                tried.append(binding)
                break
    return tried


def cores_left(
    binding: NumaBinding | None, ranks: int, environment: Environment, devices: int | None = None
) -> int:
    """Return the cores that all ranks of a host together may use; `devices` as in refused_binding."""
    if effective_binding(binding, ranks, environment) is None:
        return environment.cores
    by_node = _node_cores(environment)
    used = zip(by_node, _ranks_by_node(devices or ranks, environment), strict=True)
    share = sum(cores for cores, taken in used if taken) / sum(by_node)
    return min(environment.cores, max(1, ceil(share * max(environment.cores, sum(by_node)))))


def _ranks_by_node(ranks: int, environment: Environment) -> list[int]:
    """Return the number of ranks on each node of a host."""
    places = [_node_of(rank, ranks, environment) for rank in range(ranks)]
    return [places.count(node) for node in range(environment.numa_nodes)]


def _node_of(rank: int, ranks: int, environment: Environment) -> int:
    """Return the index of a rank's node; -1 if the machine does not report it.

    Devices whose nodes were not read are assumed to be spread evenly over the nodes.
    """
    nodes = environment.numa_nodes
    if environment.device_kind == "cpu":
        return rank * nodes // ranks
    first = int(environment.device.partition(":")[2] or 0) if environment.hosts == 1 else 0
    if environment.device_nodes:
        return environment.device_nodes[min(first + rank, len(environment.device_nodes) - 1)]
    return min(nodes - 1, (first + rank) * nodes // environment.device_count)


def _node_cores(environment: Environment) -> tuple[int, ...]:
    """Return the physical cores of each node, or equal parts of all cores if they are not known."""
    even = max(1, environment.cores // environment.numa_nodes)
    known = environment.node_cores
    return known if len(known) == environment.numa_nodes else (even,) * environment.numa_nodes


# Rules between settings, machine and workload


GROUP_BACKENDS: dict[DeviceKind, str] = {
    "cuda": "nccl",
    "rocm": "nccl",
    "xpu": "xccl",
    "cpu": "gloo",
}
"""Backend by which ranks exchange gradients, for each kind of device that has one."""
DATA_PARALLEL_KINDS: frozenset[DeviceKind] = frozenset({"cuda", "rocm"})
"""Kinds of device that nn.DataParallel supports."""
SINGLE = {"strategy": "single", "world_size": 1, "ddp": None}
"""Settings of one process on one device."""
HOOK_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
"""Precision of the exchanged gradients, for each communication hook that rounds them."""
_BF16_BACKENDS = frozenset({"nccl", "xccl"})


def obstacle(
    config: TrainingConfig, facts: WorkloadFacts, environment: Environment, *, drop_last: bool
) -> str | None:
    """Return why a configuration can't run with this workload on this machine, or None."""
    return (
        _beyond_the_data(config, facts, drop_last=drop_last)
        or _beyond_the_optimizer(config, facts, environment)
        or _beyond_the_machine(config, environment)
        or _beyond_the_group(config, facts, environment)
        or refused_binding(config.numa_binding, *_bound(config, environment))
    )


def most_ranks(environment: Environment) -> int:
    """Return the most ranks that fit on all hosts together."""
    return environment.hosts * ranks_of_host(environment)


def ranks_of_host(environment: Environment) -> int:
    """Return the most ranks on a host: its devices (from the named one on), or its cores on the CPU."""
    if environment.device_kind == "cpu":
        return environment.cores
    index = int(environment.device.partition(":")[2] or 0) if environment.hosts == 1 else 0
    return max(1, environment.device_count - index)


def ranks_on_host(ranks: int, environment: Environment) -> int:
    """Return the most ranks of a group on one host; a group that is too large is treated as if it fit."""
    return ceil(ranks / _hosts_taken(ranks, environment))


def hosts_of(config: TrainingConfig, environment: Environment) -> int:
    """Return the number of hosts that a trial uses; all of them if its group is too large."""
    return _hosts_taken(config.process_count, environment)


def cores_within(config: TrainingConfig, environment: Environment) -> int:
    """Return the cores of a host that a trial's processes may use: all, unless they are bound."""
    return cores_left(config.numa_binding, *_bound(config, environment))


def _bound(config: TrainingConfig, environment: Environment) -> tuple[int, Environment, int]:
    """Return the processes on a host, the machine, and the number of their devices."""
    here = ranks_on_host(config.process_count, environment)
    return here, environment, here * config.devices_per_process


def _processes_on_host(strategy: object, world_size: object, environment: Environment) -> int:
    """Return the processes of a trial that share a host; a single one under "dp"."""
    return ranks_on_host(int(str(world_size)) if strategy == "ddp" else 1, environment)


def _hosts_taken(ranks: int, environment: Environment) -> int:
    """Return the hosts used as by config.plan.places: as few as possible, or as many."""
    wanted = ranks if environment.is_spread else ceil(ranks / ranks_of_host(environment))
    return min(environment.hosts, wanted)


def hook_obstacle(hook: str | None, environment: Environment) -> str | None:
    """Return why this machine can't use a communication hook, or None.

    Source: DistributedDataParallel._check_comm_hook, torch 2.13: the bf16 hook needs NCCL 2.10 or
    XCCL.
    """
    if hook != "bf16" or GROUP_BACKENDS.get(environment.device_kind) in _BF16_BACKENDS:
        return None
    return (
        "ddp.comm_hook 'bf16' needs NCCL or XCCL, but the device is "
        f"{environment.device}; set comm_hook: fp16, or leave it out"
    )


def coarse_exchange(config: TrainingConfig, baseline: TrainingConfig) -> str | None:
    """Return why a hook would round gradients more than their computation does, or None.

    The precision check compares a single process with float32, so it does not see the exchange. A
    hook that the user has not listed is therefore allowed only in the precision of the computation,
    or if the baseline has it. The fp16 hook rounds before it divides by the number of ranks:
    gradients above 65,504 become infinite. In float16 the GradScaler skips such steps and halves
    its scale; in other precisions nothing corrects them. Source: torch/distributed/algorithms/
    ddp_comm_hooks/default_hooks.py (_compress_hook), torch 2.13.
    """
    hook = config.ddp_settings.comm_hook
    own = baseline.ddp_settings.comm_hook
    if hook is None or hook == own or HOOK_DTYPES.get(hook) == config.amp_dtype:
        return None
    return (
        "gradients must not be rounded more on their way than where they are computed, but got "
        f"ddp.comm_hook={hook} and amp_dtype={config.amp_dtype}; list ddp.comm_hook in the space "
        f"to have it tried"
    )


def without_effect(
    config: TrainingConfig, facts: WorkloadFacts, environment: Environment
) -> dict[str, str]:
    """Return the settings that have no effect here, each with the code of the reason."""
    values = config.by_name
    found = {}
    for name, value in values.items():
        reason = _idle(BY_NAME[name], value, facts, environment)
        if reason is not None:
            found[name] = reason
    if values["ddp.find_unused_parameters"] and values["ddp.static_graph"]:
        found["ddp.find_unused_parameters"] = "static_graph"
    if config.numa_binding is not None:
        here, machine, _ = _bound(config, environment)
        if not can_bind(machine):
            found["numa_binding"] = "no_affinity"
        elif effective_binding(config.numa_binding, here, machine) is None:
            found["numa_binding"] = "one_numa_node"
    return {name: found[name] for name in BY_NAME if name in found}


def normalised(
    settings: dict[str, object], facts: WorkloadFacts, environment: Environment
) -> dict[str, object]:
    """Return settings with everything that has no effect set to its neutral value, so that equals are equal.

    `ddp` may be a DdpConfig or its mapping; the result is a mapping, or None where it equals
    torch's defaults.
    """
    result = {**settings, **_normalised_ranks(settings, facts, environment)}
    here = _processes_on_host(result.get("strategy"), result.get("world_size", 1), environment)
    result["numa_binding"] = effective_binding(result.get("numa_binding"), here, environment)
    for setting in SETTINGS:
        name = setting.name
        is_needless = setting.needs is not None and not result.get(
            setting.needs, BY_NAME[setting.needs].neutral
        )
        if name in result and (
            is_needless or _idle(setting, result[name], facts, environment) is not None
        ):
            result[name] = setting.neutral
    return result


def _idle(
    setting: Setting, value: object, facts: WorkloadFacts, environment: Environment
) -> str | None:
    """Return the code of the reason why a value has no effect here; None where it has one, or is neutral."""
    if value == setting.neutral:
        return None
    return next(
        (reason for reason, holds in setting.idle.items() if holds(value, facts, environment)), None
    )


def same_behaviour_key(
    config: TrainingConfig, facts: WorkloadFacts, environment: Environment
) -> str:
    """Return a text that is equal for configurations that behave the same, so one measurement answers for both."""
    settings = normalised(config.model_dump(exclude={"lr"}), facts, environment)
    settings |= {
        one.name: one.torch_value(config) for one in SETTINGS if one.torch_value is not None
    }
    if settings["strategy"] == "ddp":
        settings["ddp"] = _ddp_behaviour(DdpConfig.model_validate(settings["ddp"] or {}), facts)
    return repr(sorted(settings.items()))


def _beyond_the_data(
    config: TrainingConfig, facts: WorkloadFacts, *, drop_last: bool
) -> str | None:
    size = config.micro_batch_size
    ranks = config.world_size
    length = facts.dataset_length
    if length is not None and drop_last and size * ranks > length:
        whose = "a batch"
        on = ""
        if ranks > 1:
            whose = "a batch of every rank"
            on = f" on {ranks} ranks"
        return f"{whose} must fit into the dataset of {length} samples, but got micro_batch_size={size}{on}"
    fixed = facts.fixed_batch_size
    if fixed is not None and config.loader_batch_size != fixed:
        over = f" over {ranks} devices" if config.loader_batch_size != size else ""
        return (
            f"the batch sampler yields batches of {fixed}, but got micro_batch_size={size}{over}; "
            "pass batch_sampler as a callable (dataset, batch_size) to have it tuned"
        )
    return None


def _beyond_the_optimizer(
    config: TrainingConfig, facts: WorkloadFacts, environment: Environment
) -> str | None:
    if _idle(BY_NAME["fused"], config.fused, facts, environment) is None:
        return None
    return (
        "fused needs an optimizer of torch's that has a fused implementation (SGD, Adam, AdamW, "
        "Adagrad), and dense "
        f"gradients of real numbers, but got {facts.optimizer.name}, which can't have it here; "
        f"leave fused out"
    )


def _beyond_the_machine(config: TrainingConfig, environment: Environment) -> str | None:
    kind = environment.device_kind
    if config.is_dp and kind not in DATA_PARALLEL_KINDS:
        return (
            "strategy 'dp' splits each batch over CUDA or ROCm devices, but the device is "
            f"{environment.device}; set strategy: ddp or single"
        )
    if config.is_ddp and kind not in GROUP_BACKENDS:
        return (
            "strategy 'ddp' exchanges gradients by NCCL, XCCL or gloo, but torch has none of them "
            "for "
            f"{environment.device}; set strategy: single"
        )
    is_spanning = environment.hosts > 1 and not config.is_dp
    most = most_ranks(environment) if is_spanning else ranks_of_host(environment)
    if config.world_size <= most:
        return None
    room = f"{most}, {_describe_room(most, environment, is_spanning=is_spanning)}"
    return f"world_size must be at most {room}, but got world_size={config.world_size}; set a smaller one"


def _describe_room(most: int, environment: Environment, *, is_spanning: bool) -> str:
    """Return what limits the number of ranks, in words; under strategy 'dp' they can't span hosts."""
    where = f"of all {environment.hosts} hosts" if is_spanning else "here"
    if environment.device_kind == "cpu":
        return f"the cores {where} (a rank needs one)"
    if is_spanning:
        return f"the devices {where}"
    if environment.hosts > 1:
        return "the devices of a host, on which strategy 'dp' stays"
    if most == environment.device_count:
        return "the devices here"
    return f"the devices from {environment.device} on"


def _beyond_the_group(
    config: TrainingConfig, facts: WorkloadFacts, environment: Environment
) -> str | None:
    if not config.is_ddp:
        return None
    ddp = config.ddp_settings
    if facts.has_unused_parameters and not (ddp.find_unused_parameters or ddp.static_graph):
        return (
            "DistributedDataParallel must search for parameters without a gradient (one step has "
            "left some out), but "
            "got ddp.find_unused_parameters=False; set ddp.find_unused_parameters: true"
        )
    return hook_obstacle(ddp.comm_hook, environment)


def _normalised_ranks(
    settings: dict[str, object], facts: WorkloadFacts, environment: Environment
) -> dict[str, object]:
    """Return the settings of ranks to change: one rank is strategy single, and only ddp has DDP's settings."""
    strategy = settings.get("strategy", "single")
    if strategy == "single" or settings.get("world_size", 1) == 1:
        return {**SINGLE}
    if strategy != "ddp":
        return {"ddp": None}
    return {"ddp": _normalised_ddp(settings.get("ddp"), facts, environment)}


def _normalised_ddp(
    ddp: object, facts: WorkloadFacts, environment: Environment
) -> dict[str, object] | None:
    """Set what has no effect to its neutral value.

    With a static graph torch finds unused parameters by itself
    (DistributedDataParallel._set_static_graph warns).
    """
    values = (DdpConfig() if ddp is None else DdpConfig.model_validate(ddp)).model_dump()
    if values["static_graph"]:
        values["find_unused_parameters"] = False
    for name, value in values.items():
        setting = BY_NAME[f"{DDP_PREFIX}{name}"]
        if _idle(setting, value, facts, environment) is not None:
            values[name] = setting.neutral
    config = DdpConfig.model_validate(values)
    return None if config == DdpConfig() else config.model_dump()


def _ddp_behaviour(ddp: DdpConfig, facts: WorkloadFacts) -> dict[str, object]:
    """Return DDP's settings with the real sizes of buckets, at most that of all gradients."""
    cap = ddp.bucket_cap_mb or TORCH_BUCKET_CAP_MB
    torch_first = TORCH_FIRST_BUCKET_MB if ddp.bucket_cap_mb is None else cap
    first = ddp.first_bucket_mb or torch_first
    most = facts.gradient_bytes / 2**20 or inf
    return {
        **ddp.model_dump(),
        "bucket_cap_mb": min(cap, most),
        "first_bucket_mb": min(first, most),
    }
