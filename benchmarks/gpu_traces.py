"""What benchmarks/gpu.py records of a device, raw, for tests to read afterwards: traces of steps, and NVML's answers.

A trace is a gzipped file of JSON lines, one an event of kineto, named as autotune.worker.profile.TraceEvent names its
fields, with kineto's correlation ids beside them. NVML's answers are kept likewise (gpu_nvml_log.py).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import gpu_check_cases
import pynvml
import torch
from cases import Case
from gpu_nvml_log import answers_while_training
from gpu_scale import Scale, Task, case_of
from part_guard import Figures
from plain_loop import Stepper
from torch.profiler import profile, record_function, supported_activities
from torch.utils.data import DataLoader

from autotune.worker.profile import read_kineto

__all__ = ["MARK", "record"]

MARK = "autotune: profiled steps"
"""As in the product: the recorded steps lie inside, what starts the profiler before."""
_STEPS, _FEW_STEPS = 3, 2
_MOST_BYTES = 1 << 20  # of a file, so that it can lie beside the tests


def record(task: Task) -> Figures:
    """Traces of some steps of two workloads, and what NVML answers while a third one trains."""
    scale = task.scale
    gpt2 = case_of("gpt2", scale)
    settings = {**gpt2.settings, "amp_dtype": "bfloat16"}
    files = {"gpt2": _trace(gpt2, settings, scale, task.folder / "trace-gpt2", _FEW_STEPS)}
    task.keep({"files": files})
    mlp = gpu_check_cases.healthy()
    files["mlp"] = _trace(mlp, {**mlp.settings, "pin_memory": True}, scale, task.folder / "trace-mlp", _STEPS)
    task.keep({"files": files})
    files["nvml"] = _nvml(scale, task.folder / "nvml")
    sizes = {name: one["bytes"] for name, one in files.items()}
    promises = {
        "device_events_were_recorded": all(files[name]["device_events"] > 0 for name in ("gpt2", "mlp")),
        "nvml_answered": files["nvml"]["answers"] > 0,
        "files_are_small": max(sizes.values()) <= _MOST_BYTES,
    }
    return {"files": files, "promises": promises}


def _trace(case: Case, settings: Mapping[str, Any], scale: Scale, name: Path, steps: int) -> Figures:
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
        stepper.train(batch, is_last=True, share=1.0)  # first allocations, and kernels that are loaded when first used
    known: Callable[[], set[Any]] = supported_activities
    wanted = known() if device.type != "cpu" else {torch.profiler.ProfilerActivity.CPU}
    with profile(activities=sorted(wanted, key=str)) as profiler:
        stepper.train(batches[0], is_last=True, share=1.0)
        with record_function(MARK):
            for batch in batches[steps:]:
                stepper.train(batch, is_last=True, share=1.0)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = list(profiler.profiler.kineto_results.events())
    lines = [
        {**asdict(event), "correlation": raw.correlation_id(), "linked_correlation": raw.linked_correlation_id()}
        for event, raw in zip(read_kineto(events), events, strict=True)
    ]
    written = _write(name.with_suffix(".jsonl.gz"), lines)
    device_events = sum(bool(line["is_on_device"]) for line in lines)
    return {**written, "steps": steps, "settings": dict(settings), "device_events": device_events}


def _nvml(scale: Scale, name: Path) -> Figures:
    try:
        lines = answers_while_training(scale)
    except (pynvml.NVMLError, OSError) as error:
        return {"bytes": 0, "lines": 0, "answers": 0, "why_blind": str(error)}
    return {**_write(name.with_suffix(".jsonl.gz"), lines), "answers": sum("answer" in line for line in lines)}


def _write(path: Path, lines: Sequence[Figures]) -> Figures:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    return {"file": path.name, "lines": len(lines), "bytes": path.stat().st_size}
