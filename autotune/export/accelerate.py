"""Export to and read from accelerate's configuration file (`accelerate launch --config_file`).

The file has processes, precision and compilation, and accelerate refuses unknown names; comments
hold the lines for the script. Source:
accelerate/commands/config/config_args.py and utils/dataclasses.py, 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.export.table import (
    Code,
    Differing,
    Export,
    Reading,
    Table,
    Unread,
    Wanted,
    as_call,
    as_comment,
    as_yaml,
    carried,
    dropped,
    file_value,
    is_off,
    loader_call,
    loader_note,
    optimizer_note,
    reading,
)

ACCELERATE = Table(
    target="accelerate",
    title="accelerate's file",
    precisions={
        "float32": {"mixed_precision": "no"},
        "bfloat16": {"mixed_precision": "bf16"},
        "float16": {"mixed_precision": "fp16"},
    },
    ddp_reason="Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({name}={value!r})]) in your script",
    unread={
        "fsdp_config": "FSDP does not run in trials",
        "deepspeed_config": "DeepSpeed does not run in trials; --from deepspeed reads its own file",
        "megatron_lm_config": "Megatron-LM does not run in trials",
        "parallelism_config": "only data parallelism runs in trials",
        "fp8_config": "there is no FP8 here",
        "use_cpu": "device: cpu says it",
    },
    is_silent_on=frozenset(
        {
            "compute_environment",
            "debug",
            "downcast_bf16",
            "gpu_ids",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "num_machines",
            "rdzv_backend",
            "same_network",
        }
    ),
)
_HOOKS = {"fp16": "FP16", "bf16": "BF16", "powersgd": "POWER_SGD"}
_GROUPS = {
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_HPU",
    "MULTI_MUSA",
}
"""accelerate's names of DistributedDataParallel on each device. Source: DistributedType in its
utils/dataclasses.py."""
_OF_DEVICES = {
    "cpu": "MULTI_CPU",
    "xpu": "MULTI_XPU",
    "npu": "MULTI_NPU",
    "mlu": "MULTI_MLU",
    "hpu": "MULTI_HPU",
}
_MANY_ON_CPU = (
    "accelerate launch starts a single process on a CPU, unless mpirun_config has a hostfile; "
    "start {0} by "
    "ACCELERATE_USE_CPU=true torchrun --nproc-per-node {0}, with ACCELERATE_MIXED_PRECISION for "
    "the precision"
)
_COMPILED = {"dynamo_backend": "INDUCTOR"}


def to_accelerate(found: Wanted) -> Export:
    """Return the configuration file, with the lines for the script as comments."""
    is_group = found.processes > 1
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _OF_DEVICES.get(found.device or "", "MULTI_GPU") if is_group else "NO",
        "num_machines": 1,
        "num_processes": found.processes,
        **carried(found, ACCELERATE),
        "use_cpu": found.device == "cpu",
    }
    if _binds(found):
        settings["enable_cpu_affinity"] = True
    if found["compile"]:
        mode = {"dynamo_mode": found["compile_mode"]} if "compile_mode" in found.changed else {}
        settings["dynamo_config"] = {**_COMPILED, **mode}
    text = as_yaml(settings) + as_comment(
        ["", "The rest stands in your script:", "", *_lines(found)]
    )
    on_cpu = {}
    if is_group and found.device == "cpu":
        on_cpu["world_size"] = _MANY_ON_CPU.format(found.processes)
    but = ["world_size", "compile", "compile_mode"]
    if _binds(found):
        but.append("numa_binding")
    lost = dropped(found, ACCELERATE, also=on_cpu, but=but)
    return Export(
        target="accelerate",
        text=text,
        settings=settings,
        dropped=lost,
        defaults=(*_defaults(found),),
    )


def from_accelerate(given: Mapping[str, Any]) -> Reading:
    """Read a configuration file: processes, precision and compilation."""
    plain = dict(given)
    is_bound = file_value(plain.pop("enable_cpu_affinity", False), "flag") is True
    kind = plain.pop("distributed_type", None)
    count = plain.pop("num_processes", None)
    kind = "NO" if is_off(kind) else str(kind)  # `no` without quotes is a flag to YAML 1.1
    dynamo = plain.pop("dynamo_config", None) or {}
    found = reading(
        {**plain, "mixed_precision": _precision(plain)} if "mixed_precision" in plain else plain,
        ACCELERATE,
    )
    baseline = dict(found.baseline)
    origins = dict(found.origins)
    unread = list(found.unread)
    if kind in _GROUPS and count is not None:
        baseline |= {"world_size": count, "strategy": "ddp"}
        origins |= {"world_size": "num_processes", "strategy": "distributed_type"}
    elif kind not in {*_GROUPS, "NO"}:
        unread.append(
            Unread(
                "distributed_type",
                f"{kind!r} does not run in trials; they take DistributedDataParallel",
            )
        )
    if is_bound:
        baseline["numa_binding"] = "node"
        origins["numa_binding"] = "enable_cpu_affinity"
    if isinstance(dynamo, Mapping) and not is_off(dynamo.get("dynamo_backend")):
        baseline["compile"] = True
        origins["compile"] = "dynamo_config"
        mode = str(dynamo.get("dynamo_mode") or "default").lower()
        if mode != "default":
            baseline["compile_mode"] = mode
            origins["compile_mode"] = "dynamo_config"
        unread += [
            Unread(f"dynamo_config.{name}", "trials compile as torch does by itself")
            for name in _odd(dynamo)
        ]
    return Reading(baseline=baseline, origins=origins, unread=tuple(unread), others=found.others)


def _binds(found: Wanted) -> bool:
    """Return True if it can bind processes as in trials: next to a GPU, by NVML (utils/environment.py)."""
    return bool(found["numa_binding"] == "node") and found.device in {None, "cuda"}


def ddp_handler(found: Wanted) -> dict[str, Any]:
    """Return the arguments of accelerate's DistributedDataParallelKwargs that differ from its defaults."""
    arguments = found.ddp
    hook = found["ddp.comm_hook"]
    if hook is not None:
        arguments["comm_hook"] = Code(f"DDPCommunicationHookType.{_HOOKS[hook]}")
    return arguments


def _lines(found: Wanted) -> Iterator[str]:
    if found["worker_threads"] is not None:
        yield "import autotune"
        yield ""
    arguments: dict[str, Any] = {}
    if found["grad_accum_steps"] > 1:
        arguments["gradient_accumulation_steps"] = found["grad_accum_steps"]
    loading = {"non_blocking": True} if found["pin_memory"] else {}
    if found.has_budget and found.processes > 1:
        loading["even_batches"] = False  # by itself it is not made for batches of many sizes
    if loading:
        arguments["dataloader_config"] = Code(as_call("DataLoaderConfiguration", loading))
    if found.is_ddp and (handler := ddp_handler(found)):
        arguments["kwargs_handlers"] = [Code(as_call("DistributedDataParallelKwargs", handler))]
    yield f"accelerator = {as_call('Accelerator', arguments)}"
    yield f"{loader_note(found['max_tokens'])}:"
    call = loader_call(found.loader, found["num_workers"], found["worker_threads"])
    yield "    " + call.replace("\n", "\n    ")
    if found["channels_last"]:
        yield "model = model.to(memory_format=torch.channels_last)"
    if found["amp_dtype"] == "tf32":
        yield 'torch.set_float32_matmul_precision("high")'
    if found["cudnn_benchmark"]:
        yield "torch.backends.cudnn.benchmark = True"
    yield f"your optimizer takes {optimizer_note(found['lr'], is_fused=found['fused'])}"


def _defaults(found: Wanted) -> Iterator[Differing]:
    if _binds(found):
        yield Differing("enable_cpu_affinity", "needs nvidia-ml-py, and NVIDIA GPUs")
    if found["pin_memory"]:
        yield Differing(
            "DataLoaderConfiguration.non_blocking",
            "false: copies from pinned memory block; in trials they did not",
        )
    if found.processes > 1:
        reason = "true: samples are repeated where ranks don't come out even"
        if found.has_budget:
            reason += "; it is not made for batches of many sizes, as of a token budget"
        yield Differing("DataLoaderConfiguration.even_batches", reason)
        if found["intra_op_threads"] is None:
            yield Differing(
                "num_cpu_threads_per_process",
                "1 on GPUs (OMP_NUM_THREADS); in trials the ranks shared all cores",
            )


def _precision(given: Mapping[str, Any]) -> object:
    value = given["mixed_precision"]
    return "no" if is_off(value) else value


def _odd(dynamo: Mapping[str, Any]) -> list[str]:
    """Return the names of compiler settings, other than the mode, that differ from torch's defaults."""
    return [
        str(name)
        for name, value in dynamo.items()
        if value
        and name != "dynamo_mode"
        and str(value).lower() != {"dynamo_backend": "inductor"}.get(str(name))
        and file_value(value, "flag") is not False
    ]
