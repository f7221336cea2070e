"""Each promise of gpu_promises.py holds on what it should, and fails on what breaks it: shown without a GPU.

What is handed to them comes from real trials wherever a device without a GPU can tell it: on the processor, on the
simulated accelerator, from the stub of NVML. Only what none of them has is written by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import autotune
from autotune.config.training_config import AmpDtype
from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.records.breakdown import DeviceTime, breakdown_on_device
from autotune.records.measurement import (
    GPM_SOURCE,
    NVML_SOURCE,
    PROFILER_SOURCE,
    WAIT_SOURCE,
    BusyReading,
    Measurement,
)
from autotune.records.result import Diagnosis
from autotune.records.trial import TrialResult
from autotune.testing import FakeLauncher
from autotune.worker.conditions import BusyProbe, ConditionsProbe
from autotune.worker.nvml import gpu_with_uuid
from tests.accelerator import write_entry_point
from tests.nvml_stub import NvmlStub

from . import gpu_cases as cases
from . import gpu_promises as promises

pytestmark = pytest.mark.slow
MIB = 2**20
broken = pytest.raises(AssertionError)
"""A promise that is not kept."""


@pytest.fixture(scope="module")
def on_cpu(
    fork_server: LocalLauncher, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TrialResult]:
    """Runs a trial on the processor."""

    def run(**given: Any) -> TrialResult:
        usual: dict[str, Any] = {"device": "cpu", "max_s": 0.2, "intra_op_threads": 1}
        return cases.run(fork_server, tmp_path_factory.mktemp("trial"), **(usual | given))

    return run


@pytest.fixture(scope="module")
def good(on_cpu: Callable[..., TrialResult]) -> TrialResult:
    """A trial that went well, with all that can be measured of it."""
    return on_cpu(extras=cases.EVERYTHING)


@pytest.fixture(scope="module")
def crash(on_cpu: Callable[..., TrialResult]) -> TrialResult:
    return on_cpu(model=cases.LooksUp, dataset=cases.rows_beyond_the_table)


@pytest.fixture(scope="module")
def on_sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TrialResult]]:
    """Runs a trial on the simulated accelerator, which has 64 MiB, 4 of them in use already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "path", [*map(str, write_entry_point(tmp_path_factory.mktemp("sim"))), *sys.path]
        )
        launcher = LocalLauncher(tmp_path_factory.mktemp("server") / "server.log")

    def run(**given: Any) -> TrialResult:
        usual: dict[str, Any] = {"device": "sim:0", "max_s": 0.2}
        return cases.run(launcher, tmp_path_factory.mktemp("trial"), **(usual | given))

    yield run
    launcher.close()


def told(result: TrialResult, **changes: Any) -> Measurement:
    """What a trial has measured, as if parts of it had been otherwise."""
    assert result.measurement is not None
    return result.measurement.model_copy(update=changes)


def test_a_trial_that_failed_or_learned_nothing_breaks_the_promise_to_train(
    good: TrialResult, crash: TrialResult
) -> None:
    assert promises.measured(good).samples_per_s > 0
    for bad in (crash, good.model_copy(update={"measurement": told(good, loss=float("nan"))})):
        with broken:
            promises.measured(bad)


@pytest.fixture(scope="module")
def seen(
    on_cpu: Callable[..., TrialResult], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, cases.Seen]:
    """What steps on the processor saw of themselves in each precision; TF32's rounding as a GPU has it."""
    found = {}
    for amp_dtype in ("float32", "bfloat16", "float16"):
        witness = cases.Witness(tmp_path_factory.mktemp("seen") / "seen")
        promises.measured(on_cpu(step=witness, amp_dtype=amp_dtype))
        found[amp_dtype] = witness.told()
    return found | {"tf32": replace(found["float32"], rounding=4e-4)}


@pytest.mark.parametrize("amp_dtype", ["float32", "tf32", "bfloat16", "float16"])
def test_a_step_that_computed_in_another_precision_breaks_the_promise(
    amp_dtype: AmpDtype, seen: dict[str, cases.Seen]
) -> None:
    promises.computes_in(seen[amp_dtype], amp_dtype)
    for other in seen.keys() - {amp_dtype}:
        with broken:
            promises.computes_in(seen[other], amp_dtype)


def test_products_that_are_rounded_more_coarsely_than_tf32_break_the_promise(
    seen: dict[str, cases.Seen],
) -> None:
    with broken:
        promises.computes_in(replace(seen["tf32"], rounding=1e-2), "tf32")


def test_a_batch_that_stayed_behind_breaks_the_promise(seen: dict[str, cases.Seen]) -> None:
    promises.arrived_on(seen["float32"], "cpu")
    with broken:
        promises.arrived_on(seen["float32"], "cuda")


def test_ranks_that_met_otherwise_break_the_promise(
    on_cpu: Callable[..., TrialResult], seen: dict[str, cases.Seen], tmp_path: Path
) -> None:
    witness = cases.Witness(tmp_path / "seen")
    promises.measured(on_cpu(step=witness, strategy="ddp"))
    promises.met_over(witness.told(), "gloo")
    with broken:
        promises.met_over(witness.told(), "nccl")
    with broken:
        promises.met_over(seen["float32"], "gloo")


def test_a_group_without_devices_of_its_own_or_an_exchange_breaks_the_promise(
    on_cpu: Callable[..., TrialResult],
) -> None:
    result = on_cpu(strategy="ddp", world_size=2, micro_batch_size=16, extras=cases.EVERYTHING)
    run = promises.measured(result)
    with broken:
        promises.exchanged(run, 2)  # both ranks are on one processor
    ranks = tuple(one.model_copy(update={"device": f"cuda:{one.rank}"}) for one in run.ranks)
    promises.exchanged(told(result, ranks=ranks), 2)
    with broken:
        promises.exchanged(told(result, ranks=ranks), 3)
    with broken:
        promises.exchanged(told(result, ranks=ranks, communication=None), 2)
    assert run.communication is not None
    silent = run.communication.model_copy(update={"bytes_exchanged": 0})
    with broken:
        promises.exchanged(told(result, ranks=ranks, communication=silent), 2)


_WINDOW_S = 0.15
"""Longer than GPM takes between two samples, and long enough for a power that a GPU may have."""
_AT_WORK: dict[str, object] = {
    "sm_clock": 1980,
    "max_sm_clock": 1980,
    "memory_clock": 2619,
    "temperature": 48,
    "energy_mj": 9_000_000,
    "gpm": 1,
    "gpm.1": 95.0,
}
"""What a GPU answers at a window's first edge."""
_AFTERWARDS: dict[str, object] = {"sm_clock": 1905, "temperature": 55, "energy_mj": 9_060_000}
"""What has changed at its last: 60 J are 400 W."""


def read_by_nvml(stub: NvmlStub, run: Measurement, **answers: object) -> Measurement:
    """A window's record with what a GPU's driver would have told of it, read as a trial reads it."""
    stub.play(**(_AT_WORK | answers))
    gpu = gpu_with_uuid("GPU-0")
    assert gpu is not None
    probes = BusyProbe([gpu]), ConditionsProbe([gpu], {}, has_cuda=True)
    for probe in probes:
        probe.start()
    sleep(_WINDOW_S)
    stub.play(**(_AFTERWARDS | answers))
    busy, conditions = probes[0].stop(run.data_wait_fraction or 0.0), probes[1].stop()
    changes = {
        "busy_fraction": busy.reading.fraction,
        "busy_source": busy.reading.source,
        "busy_readings": busy.readings,
        "conditions": conditions,
    }
    return run.model_copy(update=changes)


def sampled(run: Measurement, source: str, fraction: float) -> Measurement:
    reading = BusyReading(source=source, fraction=fraction)
    waits = BusyReading(source=WAIT_SOURCE, fraction=1 - (run.data_wait_fraction or 0.0))
    changes = {"busy_fraction": fraction, "busy_source": source, "busy_readings": (reading, waits)}
    return run.model_copy(update=changes)


def test_a_busy_loop_that_reads_as_idle_and_a_starved_one_that_reads_as_busy_break_the_promise(
    nvml: NvmlStub, good: TrialResult
) -> None:
    run = told(good)
    for percent, kept, other in (
        (95.0, promises.was_busy, promises.was_starved),
        (5.0, promises.was_starved, promises.was_busy),
    ):
        found = read_by_nvml(nvml, run, **{"gpm.1": percent})
        assert found.busy_source == GPM_SOURCE
        kept(found)
        with broken:
            other(found)
    between = read_by_nvml(nvml, run, **{"gpm.1": 60.0})
    for promise in (promises.was_busy, promises.was_starved):
        with broken:
            promise(between)


def test_a_driver_that_tells_nothing_breaks_the_promise_of_a_busy_fraction(
    nvml: NvmlStub, good: TrialResult
) -> None:
    with broken:
        promises.is_told_by_the_device(read_by_nvml(nvml, told(good), gpm=0))


def test_a_busy_fraction_of_the_loops_waits_alone_breaks_the_promise(
    on_cpu: Callable[..., TrialResult], good: TrialResult
) -> None:
    """On the processor they are all that there is: they read 1 where launches hold a GPU up."""
    starved = promises.measured(on_cpu(dataset=cases.SleepingRows, micro_batch_size=8))
    assert starved.busy_fraction is not None
    assert starved.busy_fraction < 0.3
    for promise, run in (
        (promises.was_starved, starved),
        (promises.was_busy, sampled(told(good), WAIT_SOURCE, 1.0)),
    ):
        with broken:
            promise(run)


def test_a_busy_fraction_that_none_of_its_sources_told_breaks_the_promise(
    good: TrialResult,
) -> None:
    run = sampled(told(good), NVML_SOURCE, 0.9)
    promises.is_told_by_the_device(run)
    with broken:
        promises.is_told_by_the_device(run.model_copy(update={"busy_fraction": 0.5}))
    with broken:
        promises.is_told_by_the_device(
            run.model_copy(update={"busy_fraction": None, "busy_source": None})
        )


@pytest.mark.parametrize(
    "refused", ["sm_clock", "max_sm_clock", "memory_clock", "temperature", "energy_mj"]
)
def test_each_condition_that_is_not_known_breaks_the_promise(
    refused: str, nvml: NvmlStub, good: TrialResult
) -> None:
    promises.saw_conditions(read_by_nvml(nvml, told(good)))
    with broken:
        promises.saw_conditions(read_by_nvml(nvml, told(good), **{refused: None}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"sm_clock": 2500},
        {"sm_clock": 0},
        {"temperature": 328},  # kelvin
        {"energy_mj": 9_000_000},  # a counter that stands still
    ],
)
def test_conditions_that_no_gpu_has_break_the_promise(
    wrong: dict[str, object], nvml: NvmlStub, good: TrialResult
) -> None:
    with broken:
        promises.saw_conditions(read_by_nvml(nvml, told(good), **wrong))


def test_energy_in_another_unit_breaks_the_promise(nvml: NvmlStub, good: TrialResult) -> None:
    run = read_by_nvml(nvml, told(good))
    assert run.conditions is not None
    assert run.conditions.power_w is not None
    in_mw = run.conditions.model_copy(update={"power_w": run.conditions.power_w * 1000})
    with broken:
        promises.saw_conditions(run.model_copy(update={"conditions": in_mw}))
    with broken:
        promises.saw_conditions(run.model_copy(update={"conditions": None}))


def profiled(run: Measurement, *, compute_s: float, copy_s: float) -> Measurement:
    """As if a profiler had seen this of a device in ten steps of a second each."""
    busy_s = compute_s + copy_s
    device = DeviceTime(busy_s=busy_s, compute_s=compute_s, copy_s=copy_s, communication_s=0.0)
    parts = breakdown_on_device(
        device, profiled_steps=10, step_s=1.0, data_wait_s=0.0, restart_s=0.0
    )
    reading = BusyReading(source=PROFILER_SOURCE, fraction=busy_s / 10)
    return run.model_copy(update={"breakdown": parts, "busy_readings": (reading,)})


def test_a_breakdown_without_kernels_or_copies_breaks_the_promise(good: TrialResult) -> None:
    run = told(good)
    promises.broke_its_time_down(profiled(run, compute_s=6.0, copy_s=1.0))
    for compute_s, copy_s in ((0.0, 1.0), (6.0, 0.0)):
        with broken:
            promises.broke_its_time_down(profiled(run, compute_s=compute_s, copy_s=copy_s))
    with broken:
        promises.broke_its_time_down(told(good, breakdown=None))
    with broken:
        promises.broke_its_time_down(run)  # of a processor, which has no copies


def judged(found: Diagnosis, run: Measurement) -> Diagnosis:
    """A diagnosis as if its run had measured otherwise."""
    evidence = found.evidence.model_copy(update={"measurement": run})
    findings = find_bottlenecks(evidence)
    advice = rank_advice(evidence, findings)
    changes = {
        "evidence": evidence,
        "findings": findings,
        "verdict": findings[0].bottleneck,
        "advice": advice,
    }
    return found.model_copy(update=changes)


@pytest.fixture(scope="module")
def look() -> Callable[..., Diagnosis]:
    """A diagnosis of a made-up GPU whose profiler saw this in ten steps of a second each."""
    found = autotune.diagnose(
        object, list, progress=False, launcher=FakeLauncher(noise=0.0)
    ).diagnosis
    costs = found.evidence.measurement.loader_costs
    assert costs is not None
    costs = costs.model_copy(update={"copy_s": 0.7, "pinned_copy_s": 0.3})
    run = found.evidence.measurement.model_copy(update={"loader_costs": costs})
    return lambda **seen: judged(found, profiled(run, **seen))


def test_another_verdict_breaks_the_promises_of_copies_and_launches(
    look: Callable[..., Diagnosis],
) -> None:
    copying, launching = look(compute_s=1.0, copy_s=7.0), look(compute_s=2.0, copy_s=0.5)
    promises.is_copy_bound(copying)
    promises.is_launch_bound(launching)
    with broken:
        promises.is_copy_bound(launching)
    with broken:
        promises.is_launch_bound(copying)
    with broken:
        promises.is_launch_bound(look(compute_s=9.0, copy_s=0.1))


def test_copies_that_nothing_is_advised_against_break_the_promise(
    look: Callable[..., Diagnosis],
) -> None:
    with broken:
        promises.is_copy_bound(look(compute_s=1.0, copy_s=7.0).model_copy(update={"advice": ()}))


@pytest.mark.parametrize(
    ("switch", "amp_dtype", "hides"),
    [
        ("NVIDIA_TF32_OVERRIDE=1", "float32", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1", "float32", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0", "float32", False),
        ("NVIDIA_TF32_OVERRIDE=0", "float32", False),
        ("NVIDIA_TF32_OVERRIDE=0", "tf32", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1", "tf32", False),
        ("NVIDIA_TF32_OVERRIDE=1", "bfloat16", False),
    ],
)
def test_a_precision_that_a_container_switches_is_left_out_by_the_variables_name(
    switch: str, amp_dtype: AmpDtype, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    assert cases.switch_of(amp_dtype) == ""
    name, _, value = switch.partition("=")
    monkeypatch.setenv(name, value)
    assert cases.switch_of(amp_dtype) == (name if hides else "")


def test_a_gpu_that_was_to_be_there_and_is_not_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cases.MUST_HAVE_GPU, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no driver"):
        cases.leave_out("no driver")
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    recipe = makefile.partition("\ntest-gpu: ")[2].partition("\n\n")[0]
    assert {f"{cases.MUST_HAVE_GPU}=1", "gpu"} <= set(recipe.split())
    monkeypatch.setenv(cases.MUST_HAVE_GPU, "1")
    with pytest.raises(pytest.fail.Exception, match="no driver"):
        cases.leave_out("no driver")


def test_memory_that_does_not_add_up_or_passes_the_limit_breaks_the_promise(
    on_sim: Callable[..., TrialResult],
) -> None:
    limit_bytes = 32 * MIB
    result = on_sim(limit_bytes=limit_bytes)
    run = promises.measured(result)
    promises.accounts_for_memory(run, limit_bytes)
    with broken:
        promises.accounts_for_memory(run, run.peak_memory_bytes - 1)
    assert run.memory.reserved_bytes is not None
    wrong = (
        {"outside_bytes": 0},
        {"reserved_bytes": run.memory.reserved_bytes - 1},
        {"allocated_bytes": run.memory.reserved_bytes + 1},
        {"allocated_bytes": None},
        {"alloc_retries": 1},
        {"peak_bytes": run.peak_memory_bytes + 1},
    )
    for changes in wrong:
        with broken:
            promises.accounts_for_memory(
                told(result, memory=run.memory.model_copy(update=changes)), run.peak_memory_bytes
            )


def test_memory_of_the_host_breaks_the_promise_of_a_devices(good: TrialResult) -> None:
    with broken:
        promises.accounts_for_memory(told(good), 2**50)


class HostFull(nn.Linear):
    """Its host runs out of memory."""

    def forward(self, _: Tensor) -> NoReturn:
        raise MemoryError


def test_a_batch_that_does_not_fit_and_is_told_otherwise_breaks_the_promise(
    on_sim: Callable[..., TrialResult],
    on_cpu: Callable[..., TrialResult],
    good: TrialResult,
    crash: TrialResult,
) -> None:
    promises.ran_out_of_memory(on_sim(limit_bytes=6 * MIB, micro_batch_size=4096))
    promises.measured(on_sim(limit_bytes=16 * MIB))
    host = on_cpu(model=HostFull(64, 2))
    assert host.outcome == "host_oom"
    for bad in (good, crash, host):
        with broken:
            promises.ran_out_of_memory(bad)


class NoEngine(nn.Linear):
    """Says what cuDNN does where no engine found room, whether or not one was full."""

    fills = True

    def forward(self, inputs: Tensor) -> NoReturn:
        if self.fills:
            with suppress(torch.OutOfMemoryError):
                torch.empty(2**30, dtype=torch.uint8, device=inputs.device)
        raise RuntimeError("FIND was unable to find an engine to execute this computation")


class NoEngineAtAll(NoEngine):
    fills = False


def test_a_full_memory_that_is_told_as_a_crash_breaks_the_promise(
    on_sim: Callable[..., TrialResult],
    on_cpu: Callable[..., TrialResult],
    good: TrialResult,
    crash: TrialResult,
) -> None:
    convolving = {
        "model": cases.convolution,
        "dataset": cases.images,
        "step": cases.convolve_in_full_memory,
    }
    full = on_sim(limit_bytes=60 * MIB, micro_batch_size=8, **convolving)
    assert full.outcome == "oom", full.reason
    for kept in (good, full, on_sim(limit_bytes=32 * MIB, model=NoEngine(64, 2))):
        promises.fits_or_ran_out_of_memory(kept)
    for bad in (crash, on_cpu(model=NoEngineAtAll(64, 2))):
        with broken:
            promises.fits_or_ran_out_of_memory(bad)


class FailsLater(nn.Linear):
    """A kernel of its forward pass fails: noticed by the loss, unless launches wait for their kernels."""

    def forward(self, inputs: Tensor) -> Tensor:
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            raise RuntimeError(_ASSERTED)  # the kernel
        return super().forward(inputs)


class FailsOnceOnly(nn.Linear):
    """As above; where launches wait, nothing fails."""


def loss_that_waits(outputs: Tensor, targets: Tensor) -> Tensor:
    if os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
        raise RuntimeError(_ASSERTED)
    return outputs.square().mean()


_ASSERTED = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
)


def test_a_kernels_error_told_at_the_wrong_place_breaks_the_promise(
    on_cpu: Callable[..., TrialResult], good: TrialResult, crash: TrialResult
) -> None:
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith("  # the kernel"))
    place = f"{Path(__file__).name}:{number}"
    promises.crashed_at(on_cpu(model=FailsLater(64, 2), loss=loss_that_waits), place)
    without_a_place = on_cpu(model=FailsOnceOnly(64, 2), loss=loss_that_waits)
    assert without_a_place.outcome == "crashed"
    for bad in (without_a_place, good, crash):
        with broken:
            promises.crashed_at(bad, place)


def test_the_lookup_is_where_it_says(crash: TrialResult) -> None:
    """On the processor an index beyond the table is told at once."""
    assert crash.failure is not None
    assert crash.failure.signature == f"IndexError at {cases.place_of_the_lookup()}"


def test_a_device_that_is_refused_without_the_remedy_breaks_the_promise(
    on_sim: Callable[..., TrialResult],
    on_cpu: Callable[..., TrialResult],
    good: TrialResult,
    crash: TrialResult,
) -> None:
    promises.refused_the_device(on_sim(device="sim:9"), "sim")
    unseen = on_cpu(device="cuda:99")
    assert unseen.outcome == "invalid"
    for bad in (unseen, good, crash):
        with broken:
            promises.refused_the_device(bad, "cuda")


def test_an_environment_of_another_device_breaks_the_promise(
    fork_server: LocalLauncher, tmp_path: Path
) -> None:
    runner = TrialRunner(
        launcher=fork_server,
        payload=tmp_path,
        scratch=tmp_path,
        logs=tmp_path,
        device="cpu",
        seed=0,
    )
    environment = runner.describe(deadline_s=60).environment
    assert environment is not None
    with broken:
        promises.describes_a_gpu(environment, environment.device_name)
    with broken:
        promises.describes_a_gpu(None, "NVIDIA H100")
    gpu = {
        "device": "cuda:0",
        "device_kind": "cuda",
        "device_name": "NVIDIA H100",
        "driver": "580.1",
        "cuda": "13.0",
    }
    promises.describes_a_gpu(environment.model_copy(update=gpu), "NVIDIA H100")
    with broken:
        promises.describes_a_gpu(
            environment.model_copy(update=gpu | {"driver": None}), "NVIDIA H100"
        )


def test_why_no_gpu_can_be_tested_is_known_without_a_context() -> None:
    if torch.version.cuda is None:
        assert "built without CUDA" in cases.look_for_gpus().missing
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch
