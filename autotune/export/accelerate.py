"""Export to and read from accelerate's configuration file (`accelerate launch --config_file`).

The file has processes, precision and compilation, and accelerate refuses unknown names; comments
hold the lines for the script. Source:
accelerate/commands/config/config_args.py and utils/dataclasses.py, 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import Any

from autotune.export.table import (
    Code,
    Defaults,
    Export,
    Reading,
    Table,
    Wanted,
    as_call,
    as_comment,
    as_yaml,
    carried,
    export,
    file_value,
    is_off,
    loader_call,
    loader_imports,
    loader_note,
    optimizer_note,
    process_lines,
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
    process_settings=("amp_dtype", "cudnn_benchmark"),
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
_OF_DEVICES = {
    "cpu": "MULTI_CPU",
    "xpu": "MULTI_XPU",
    "npu": "MULTI_NPU",
    "mlu": "MULTI_MLU",
    "hpu": "MULTI_HPU",
}
"""accelerate's names of DistributedDataParallel by device. Source: DistributedType in its
utils/dataclasses.py."""
_PLAIN = {"dynamo_backend": "inductor"}
"""The compiler's settings that trials have, in small letters."""


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
    if found.compiler is not None:
        mode = {f"dynamo_{name}": value for name, value in found.compiler.items()}
        settings["dynamo_config"] = {"dynamo_backend": "INDUCTOR", **mode}
    text = as_yaml(settings) + as_comment(
        ["", "The rest stands in your script:", "", *_lines(found)]
    )
    return export(found, ACCELERATE, text=text, settings=settings, defaults=_defaults(found))


def from_accelerate(given: Mapping[str, Any]) -> Reading:
    """Read a configuration file: processes, precision and compilation."""
    plain = dict(given)
    is_bound = file_value(plain.pop("enable_cpu_affinity", False), "flag") is True
    kind = plain.pop("distributed_type", None)
    count = plain.pop("num_processes", None)
    dynamo = plain.pop("dynamo_config", None)
    # `no` without quotes is a flag to YAML 1.1.
    kind = "NO" if is_off(kind) else str(kind)
    if "mixed_precision" in plain and is_off(plain["mixed_precision"]):
        plain["mixed_precision"] = "no"
    found = reading(plain, ACCELERATE)
    is_group = kind.startswith("MULTI_")
    if is_group and count is not None:
        found.take_ranks("num_processes", count, launcher="distributed_type")
    elif not is_group and kind != "NO":
        found.unread["distributed_type"] = (
            f"{kind!r} does not run in trials; they take DistributedDataParallel"
        )
    if is_bound:
        found.take("numa_binding", "enable_cpu_affinity", "node")
    if isinstance(dynamo, Mapping) and not is_off(dynamo.get("dynamo_backend")):
        found.take("compile", "dynamo_config", True)
        mode = str(dynamo.get("dynamo_mode") or "default").lower()
        if mode != "default":
            found.take("compile_mode", "dynamo_config", mode)
        for name, value in dynamo.items():
            is_plain = is_off(value) or not value or str(value).lower() == _PLAIN.get(str(name))
            if name != "dynamo_mode" and not is_plain:
                found.unread[f"dynamo_config.{name}"] = "trials compile as torch does by itself"
    return found


def _binds(found: Wanted) -> bool:
    """Return True if it can bind processes as in trials: next to a GPU, by NVML (utils/environment.py)."""
    return bool(found.config.numa_binding == "node") and found.device in {None, "cuda"}


def ddp_handler(found: Wanted) -> dict[str, Any]:
    """Return the arguments of accelerate's DistributedDataParallelKwargs that differ from its defaults."""
    arguments = found.ddp
    hook = found.config.ddp_settings.comm_hook
    if hook is not None:
        arguments["comm_hook"] = Code(f"DDPCommunicationHookType.{_HOOKS[hook]}")
    return arguments


def _lines(found: Wanted) -> Iterator[str]:
    for line in loader_imports(found):
        yield line
        yield ""
    arguments: dict[str, Any] = {}
    if found.config.grad_accum_steps > 1:
        arguments["gradient_accumulation_steps"] = found.config.grad_accum_steps
    loading = {"non_blocking": True} if found.config.pin_memory else {}
    if found.has_budget and found.processes > 1:
        loading["even_batches"] = False  # by itself it is not made for batches of many sizes
    if loading:
        arguments["dataloader_config"] = Code(as_call("DataLoaderConfiguration", loading))
    if handler := ddp_handler(found):
        arguments["kwargs_handlers"] = [Code(as_call("DistributedDataParallelKwargs", handler))]
    yield f"accelerator = {as_call('Accelerator', arguments)}"
    yield f"{loader_note(found)}:"
    yield indent(loader_call(found), "    ")
    if found.config.channels_last:
        yield "model = model.to(memory_format=torch.channels_last)"
    yield from process_lines(found, ACCELERATE)
    yield f"your optimizer takes {optimizer_note(found)}"


def _defaults(found: Wanted) -> Defaults:
    if _binds(found):
        yield "enable_cpu_affinity", "needs nvidia-ml-py, and NVIDIA GPUs"
    if found.config.pin_memory:
        yield (
            "DataLoaderConfiguration.non_blocking",
            "false: copies from pinned memory block; in trials they did not",
        )
    if found.processes > 1:
        reason = "true: samples are repeated where ranks don't come out even"
        if found.has_budget:
            reason += "; it is not made for batches of many sizes, as of a token budget"
        yield "DataLoaderConfiguration.even_batches", reason
        if found.config.intra_op_threads is None:
            yield (
                "num_cpu_threads_per_process",
                "1 on GPUs (OMP_NUM_THREADS); in trials the ranks shared all cores",
            )
