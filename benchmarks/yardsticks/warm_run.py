"""Windows of several configurations in one process, one after another, each measured as a trial's.

The workload is built once; loaders, optimizers and precision are each configuration's own.
`run_warm` starts it; as a script it takes its job as JSON and prints its figures as the last line.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from autotune import TrainingConfig
from autotune.protocol.jobs import CurvesJob, ProcessSetup, WindowRules
from autotune.settings.applied.float32_precision import tf32_products
from autotune.worker.jobs.bench import WorkloadBench
from autotune.worker.measure.loop import Run
from autotune.worker.measure.step import torch_threads
from autotune.worker.setup.build import seed_all
from autotune.worker.setup.device import open_device
from autotune.worker.trial import Start, measure
from benchmarks import ROOT
from benchmarks.cases.surfaces import GRIDS
from benchmarks.yardsticks.workload import workload_of

__all__ = ["run_warm"]

_LATEST_S = 600.0


def run_warm(surface: str, configs: Sequence[TrainingConfig], window: WindowRules) -> list[dict[str, Any]]:
    """Rate, peak memory and seconds of each configuration, in their order, all in one fresh process.

    Raises:
        RuntimeError: the process failed; the message holds the end of its output.
    """
    job = {
        "surface": surface,
        "configs": [config.model_dump(mode="json") for config in configs],
        "window": window.model_dump(mode="json"),
    }
    command = [sys.executable, "-m", "benchmarks.yardsticks.warm_run", json.dumps(job)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LATEST_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the warm process ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    figures: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _main() -> None:
    job = json.loads(sys.argv[1])
    configs = [TrainingConfig.model_validate(config) for config in job["configs"]]
    with TemporaryDirectory() as scratch:
        figures = _measured(job["surface"], configs, WindowRules.model_validate(job["window"]), Path(scratch))
    print(json.dumps(figures))


def _measured(
    surface: str, configs: Sequence[TrainingConfig], window: WindowRules, scratch: Path
) -> list[dict[str, Any]]:
    grid = GRIDS[surface]
    own = TrainingConfig.model_validate({**grid.baseline, "compile": configs[0].compile})
    process = ProcessSetup(
        device="cpu", seed=0, deadline_s=_LATEST_S, sys_path=(), working_directory=scratch, python_path=None
    )
    seed_all(process.seed)
    device = open_device("cpu")
    bench = WorkloadBench(
        workload_of(grid.case()), CurvesJob(process=process, payload=scratch, config=own), device, scratch
    )
    is_prepared, found = False, list[dict[str, Any]]()
    for config in configs:
        begun = perf_counter()
        feed = bench.feed(config)
        first = feed.start()
        if not is_prepared:
            bench.prepare(first.batch)
            is_prepared = True
        if config.compile:
            torch.compiler.reset()  # else a second batch size would be compiled for any
        tf32 = tf32_products() if config.amp_dtype == "tf32" else nullcontext()
        with torch_threads(config.intra_op_threads), tf32:
            run = Run(feed, bench.trainer(config), feed.queue_capacity, begun + _LATEST_S)
            run.longest_s = feed.start_s + feed.first_wait_s
            start = Start(started=begun, built_from=begun, ends_at=begun + _LATEST_S, before={})
            measurement = measure(run, window, first, start, lambda _: None)
        feed.stop()
        del run, feed, first
        bench.after_point(is_failed=False)
        gc.collect()
        device.give_back()
        found.append(
            {
                "samples_per_s": measurement.samples_per_s,
                "peak_memory_bytes": measurement.peak_memory_bytes,
                "took_s": perf_counter() - begun,
            }
        )
    return found


if __name__ == "__main__":
    _main()
