"""What benchmarks/gpu.py records of a device, raw, for tests to read afterwards: traces of steps, and NVML's answers.

A trace is a gzipped file of JSON lines, a TraceEvent each, and may be put into tests/worker/data/traces as it is: named
after what ran, the device and the version of torch. NVML's answers are kept likewise (gpu_nvml_log.py).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function, supported_activities
from torch.utils.data import DataLoader

from autotune.worker.extras.profile import MARK, read_kineto
from benchmarks.cases import gpu_checks as gpu_check_cases
from benchmarks.cases.cpu import Case
from benchmarks.measures.gpu_nvml_log import answers_while_training
from benchmarks.measures.gpu_scale import Scale, Task, case_of
from benchmarks.measures.part_guard import Figures
from benchmarks.yardsticks.plain_loop import Stepper

__all__ = ["record"]

_STEPS, _FEW_STEPS = 3, 2
_MOST_BYTES = 1 << 20  # of a file, so that it can lie beside the tests


def record(task: Task) -> Figures:
    """Traces of steps with pageable copies, with pinned ones and with a wait in each, and NVML's answers meanwhile."""
    scale = task.scale
    gpt2, mlp = case_of("gpt2", scale), gpu_check_cases.healthy()
    pinned = {**mlp.settings, "pin_memory": True}
    traced = {
        "gpt2": (gpt2, {**gpt2.settings, "amp_dtype": "bfloat16"}, _FEW_STEPS),
        "mlp": (mlp, pinned, _STEPS),
        "mlp_with_item": (replace(mlp, step=_waiting_step), pinned, _STEPS),
    }
    files: dict[str, Figures] = {}
    for what, (case, settings, steps) in traced.items():
        files[what] = _trace(case, settings, scale, _file(task, what), steps)
        task.keep({"files": files})
    files["nvml"] = _nvml(scale, _file(task, "nvml"))
    promises = {
        "device_events_were_recorded": all(files[what]["device_events"] > 0 for what in traced),
        "nvml_answered": files["nvml"]["answers"] > 0,
        "files_are_small": max(one["bytes"] for one in files.values()) <= _MOST_BYTES,
    }
    return {"files": files, "promises": promises}


def _file(task: Task, what: str) -> Path:
    device, version = task.folder.name.removeprefix("gpu-"), torch.__version__.partition("+")[0]
    return task.folder / f"{what}-{device}-torch{version}.jsonl.gz"


def _waiting_step(model: nn.Module, batch: Any) -> Tensor:
    """A step as it is often written: it looks at the loss each time."""
    inputs, labels = batch
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.item()
    return loss


def _trace(
    case: Case, settings: Mapping[str, Any], scale: Scale, path: Path, steps: int
) -> Figures:
    """Record some steps on batches that the host holds: their copies belong to them."""
    device = torch.device(scale.device)
    stepper = Stepper(case, settings, device)
    loader: DataLoader[Any] = DataLoader(
        case.dataset,
        batch_size=int(settings["micro_batch_size"]),
        collate_fn=case.collate_fn,
        pin_memory=bool(settings.get("pin_memory")) and device.type == "cuda",
    )
    batches = list(islice(loader, 2 * steps))
    for batch in batches:
        stepper.train(
            batch, is_last=True, share=1.0
        )  # first allocations, and kernels that are loaded when first used
    known: Callable[[], set[Any]] = supported_activities
    wanted = known() if device.type != "cpu" else {torch.profiler.ProfilerActivity.CPU}
    with profile(
        activities=sorted(wanted, key=str), acc_events=True
    ) as profiler:  # one cycle; else torch 2.11 warns
        stepper.train(batches[0], is_last=True, share=1.0)
        _synchronise(device)  # the device has nothing to do at both ends of the mark
        with record_function(MARK):
            for batch in batches[steps:]:
                stepper.train(batch, is_last=True, share=1.0)
            _synchronise(device)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    lines = [asdict(event) for event in read_kineto(profiler.profiler.kineto_results.events())]
    written = _write(path, lines)
    device_events = sum(bool(line["is_on_device"]) for line in lines)
    return {**written, "steps": steps, "settings": dict(settings), "device_events": device_events}


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _nvml(scale: Scale, path: Path) -> Figures:
    try:
        lines = answers_while_training(scale)
    except (pynvml.NVMLError, OSError) as error:
        return {"bytes": 0, "lines": 0, "answers": 0, "why_blind": str(error)}
    return {**_write(path, lines), "answers": sum("answer" in line for line in lines)}


def _write(path: Path, lines: Sequence[Figures]) -> Figures:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    return {"file": path.name, "lines": len(lines), "bytes": path.stat().st_size}
