"""What benchmarks hold the product against: the plain loop does as its settings say, the watch sees torch's device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotune import TrainingConfig
from autotune.policy import WindowRules
from autotune.records.trial import TrialResult
from benchmarks import surfaces
from benchmarks.cases.cpu import Case
from benchmarks.cases.surfaces import GRIDS, Grid, grids_for
from benchmarks.measures import gpu_watch
from benchmarks.replay.replay import RecordedTrial, Surface
from benchmarks.replay.simulated import Noise, SimulatedMachine
from benchmarks.replay.surface_order import FIRST_POINTS, missing_visits, spread_order
from benchmarks.surfaces import curve_points
from benchmarks.yardsticks.plain_loop import PlainForks, Stepper, run_plain
from tests.nvml_stub import NvmlStub

CASE = Case(model=lambda: nn.Linear(4, 2), dataset=None)
CPU = torch.device("cpu")


def measured(rate: float) -> TrialResult:
    """A trial of a rate, by a machine that never strays."""
    machine = SimulatedMachine(lambda _: rate, Noise(between_runs=0.0, block=0.0), seed=0)
    return machine.run_whole(TrainingConfig(), WindowRules(max_s=0.2))


class Copies(TorchFunctionMode):
    """Notes of each Tensor.to whether it was asked not to block."""

    def __init__(self) -> None:
        self.non_blocking: list[bool] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        given = kwargs or {}
        if func is Tensor.to and "non_blocking" in given:
            self.non_blocking.append(given["non_blocking"])
        return func(*args, **given)


def test_plain_loops_are_forked_one_after_another_and_one_that_fails_leaves_the_next() -> None:
    forks = PlainForks()
    times: dict[str, Any] = {"seconds": 0.1, "skip_s": 0.0, "forks": forks}
    try:
        first = run_plain(
            "benchmarks.cases.cpu:queue_trap",
            {"micro_batch_size": 2},
            arguments={"stall_s": 0.0},
            **times,
        )
        with pytest.raises(RuntimeError, match="has no attribute 'none'"):
            run_plain("benchmarks.cases.cpu:none", {}, **times)
        with pytest.raises(RuntimeError, match="ended with -9"):
            run_plain("benchmarks.cases.cpu:queue_trap", {}, deadline_s=0.1, **times)
        again = run_plain(
            "benchmarks.cases.cpu:queue_trap",
            {"micro_batch_size": 2},
            arguments={"stall_s": 0.0},
            **times,
        )
    finally:
        forks.close()
    assert first["samples"] > 0
    assert again["samples"] > 0


@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_plain_loop_copies_as_a_trial_does_by_pin_memory(pin_memory: bool) -> None:
    stepper = Stepper(CASE, {"pin_memory": pin_memory}, CPU)
    with Copies() as copies:
        stepper.train(
            [torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)], is_last=True, share=1.0
        )
    assert copies.non_blocking == [pin_memory, pin_memory]


TF32 = """
import torch
from benchmarks.cases.cpu import Case
from benchmarks.yardsticks.plain_loop import Stepper
Stepper(Case(model=lambda: torch.nn.Linear(4, 2), dataset=None), {"amp_dtype": "tf32"}, torch.device("cpu"))
print(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
"""


def test_tf32_of_the_plain_loop_can_be_read_as_torch_compile_reads_it() -> None:
    folder = Path(gpu_watch.__file__).parents[
        2
    ]  # in a process of its own: precision is the process's
    done = subprocess.run(
        [sys.executable, "-c", TF32], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["high", "True", "True"], done.stderr


DRIVER = """
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char bytes[16]; } Uuid;
static int is_ready;
int cuInit(unsigned flags) { return (is_ready = flags == 0) ? 0 : 1; }
int cuDeviceGet(int *device, int ordinal) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!is_ready) return 3;
    if (ordinal > 1 || (visible && ordinal)) return 101;
    *device = visible ? atoi(visible) : ordinal;
    return 0;
}
int cuDeviceGetUuid_v2(Uuid *uuid, int device) {
    memset(uuid, 0x10 + device, sizeof *uuid);
    return 0;
}
"""
"""CUDA's driver with two devices, whose UUIDs are 10... and 11...; one of them where CUDA_VISIBLE_DEVICES names it."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcuda.so.1 that child processes find."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("CUDA's driver is played by a library that gcc makes")
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(library)],
        check=True,
    )
    monkeypatch.setenv(
        "LD_LIBRARY_PATH", f"{tmp_path}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
def test_the_watch_knows_which_device_cuda_counts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_watch.cuda_uuid() == "10101010-1010-1010-1010-101010101010"
    assert gpu_watch.cuda_uuid(1) == "11111111-1111-1111-1111-111111111111"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_watch.cuda_uuid() == "11111111-1111-1111-1111-111111111111"


@pytest.mark.usefixtures("driver")
def test_a_device_that_is_not_there_is_told() -> None:
    with pytest.raises(OSError, match=r"cuda:2.*cuDeviceGet.*101"):
        gpu_watch.cuda_uuid(2)


@pytest.mark.parametrize(
    "grid", [*GRIDS.values(), *grids_for("cuda").values()], ids=[*GRIDS, *grids_for("cuda")]
)
def test_the_first_points_of_a_surface_are_spread_over_its_grid(grid: Grid) -> None:
    ordered, points = spread_order(grid), grid.configs()
    assert len(ordered) == len(points)
    assert set(ordered) == set(points)
    first = ordered[:FIRST_POINTS]
    assert {points[0], points[-1]} <= set(first)
    for name in grid.domains:
        seen = {getattr(point, name) for point in first}
        assert seen == {getattr(point, name) for point in points}, name


def test_a_sitting_goes_on_where_the_last_one_ended() -> None:
    grid = grids_for("cuda")["gpt2"]
    wanted = {"points": 20, "visits": 1, "contender_visits": 1}
    every = missing_visits(grid, None, **wanted)
    visits = [(point, number) for point, number in every if number == 0]
    assert [point for point, _ in visits] == spread_order(grid)[:20]
    assert len(every) == 20 + 4, "a fifth of them once more"
    trials = tuple(
        RecordedTrial(point, visit, TrialResult(outcome="oom")) for point, visit in every[:7]
    )
    surface = Surface(header={"limit_bytes": 1}, trials=trials, curves=None, curves_s=0.0)
    assert missing_visits(grid, surface, **wanted) == every[7:]


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("visible", [None, "1"])
def test_the_watch_samples_the_device_that_cuda_counts_first(
    visible: str | None, nvml: NvmlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.play(devices=2, memory_reserved=0, energy_mj=(1000, 2000, 3000))
    for index, digit in enumerate("01"):
        nvml.play(
            **{
                f"{index}.uuid": f"GPU-{UUID(hex=f'1{digit}' * 16)}",
                f"{index}.memory_used": (index + 1) * 10**9,
            }
        )
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with gpu_watch.GpuWatch() as watch:
        while len(watch.samples) < 3:
            time.sleep(0.01)
    assert watch.why_blind is None
    assert watch.idle_bytes == (2 if visible else 1) * 10**9
    assert watch.peak_bytes(0.0, watch.samples[-1].at_s) == 0
    assert watch.power_w(0.0, watch.samples[-1].at_s) is not None
    assert nvml.references == 0, "given back"


@pytest.mark.usefixtures("driver")
def test_a_device_that_nvml_does_not_know_leaves_the_watch_blind_and_says_so(
    nvml: NvmlStub,
) -> None:
    with gpu_watch.GpuWatch() as watch:
        pass
    assert (watch.samples, watch.idle_bytes, watch.peak_bytes(0.0, 1e12)) == ([], None, None)
    assert watch.why_blind is not None
    assert nvml.references == 0


def test_a_driver_that_does_not_answer_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_watch, "_ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(gpu_watch, "_ANSWER_WITHIN_S", 0.2)
    with pytest.raises(OSError, match="does not answer"):
        gpu_watch.cuda_uuid()


def test_pinned_copies_belong_to_the_loader_in_the_curves_of_a_surface() -> None:
    grid = grids_for("cuda")["resnet50"]
    own = grid.baseline
    points = curve_points(grid)
    assert any(point.pin_memory for point in points)
    for point in points:
        if point.pin_memory:
            assert (point.amp_dtype, point.channels_last) == ("float32", False), (
                "no device setting beside it"
            )
            assert point.micro_batch_size == own["micro_batch_size"] or point.num_workers == 16


def test_a_workload_whose_libraries_are_missing_is_left_out_of_a_sitting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def case() -> Case:
        raise ImportError("no Pillow")

    grid = replace(grids_for("cuda")["jpeg"], case=case)
    arguments = Namespace(points=1, visits=1, contender_visits=1, best=None)
    surfaces._record(
        "jpeg",
        grid,
        surfaces._File(tmp_path / "jpeg"),
        {},
        arguments,
        surfaces._Sitting(ends_at=inf),
    )
    assert "no Pillow" in capsys.readouterr().err


def test_only_points_among_the_best_whose_error_is_too_large_are_visited_again() -> None:
    own, *others = grids_for("cpu")["text"].configs()[:6]
    seen = {
        config: [1000.0 + 100 * place, 1010.0 + 100 * place] * 3
        for place, config in enumerate([own, *others])
    }
    seen[others[3]] = [1400.0]
    trials = tuple(
        RecordedTrial(config, number, measured(rate))
        for config, rates in seen.items()
        for number, rate in enumerate(rates)
    )
    header = {"limit_bytes": 2**62, "baseline": own.model_dump(mode="json", exclude_defaults=True)}
    surface = Surface(header, trials, curves=None, curves_s=0.0)
    left = surfaces._not_sharp(surface, Namespace(best=3, until=0.0045))
    assert left == [others[3]], "the best of three that was seen once"
    assert surfaces._int_visits(surface)[others[3]] == 1
    assert surfaces._not_sharp(surface, Namespace(best=3, until=0.1)) == []


def test_the_held_out_workloads_are_no_more_than_what_can_be_recorded() -> None:
    held_out = {name: len(grid.configs()) for name, grid in GRIDS.items() if grid.is_held_out}
    assert list(held_out) == ["text", "ragged"]
    assert all(60 <= points <= 120 for points in held_out.values())
