"""Each promise of gpu_promises.py holds on what it should, and fails on what breaks it: shown without a GPU.

What is handed to them comes from real trials wherever a device without a GPU can tell it: on the processor, on the
simulated accelerator, from the stub of NVML. Only what none of them has is written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import autotune
from autotune.core.advice import rank_advice
from autotune.core.breakdown import breakdown_on_device
from autotune.core.busy import NVML_SOURCE, PROFILER_SOURCE, WAIT_SOURCE, BusyReading
from autotune.core.diagnosis import Diagnosis
from autotune.core.intervals import DeviceTime
from autotune.core.measurement import Measurement
from autotune.core.training_config import AmpDtype
from autotune.core.trial import TrialResult
from autotune.core.verdict import find_bottlenecks
from autotune.launch.fork_server import ForkServerLauncher
from autotune.launch.runner import TrialRunner
from autotune.testing import FakeLauncher

from . import gpu_cases as cases
from . import gpu_promises as promises

MIB = 2**20
broken = pytest.raises(AssertionError)
"""A promise that is not kept."""


@pytest.fixture(scope="module")
def on_cpu(fork_server: ForkServerLauncher, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrialResult]:
    """Runs a trial on the processor."""

    def run(**given: Any) -> TrialResult:
        given = {"device": "cpu", "max_s": 0.2, "intra_op_threads": 1} | given
        return cases.run(fork_server, tmp_path_factory.mktemp("trial"), **given)

    return run


@pytest.fixture(scope="module")
def good(on_cpu: Callable[..., TrialResult]) -> TrialResult:
    """A trial that went well, with all that can be measured of it."""
    return on_cpu(extras=cases.EVERYTHING)


@pytest.fixture(scope="module")
def crash(on_cpu: Callable[..., TrialResult]) -> TrialResult:
    return on_cpu(model=cases.LooksUp, dataset=cases.rows_beyond_the_table)


class Full(nn.Module):
    """Its host runs out of memory."""

    def forward(self, _: Tensor) -> NoReturn:
        raise MemoryError


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
def seen(on_cpu: Callable[..., TrialResult], tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Seen]:
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


def test_products_that_are_rounded_more_coarsely_than_tf32_break_the_promise(seen: dict[str, cases.Seen]) -> None:
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


def sampled(run: Measurement, source: str, fraction: float) -> Measurement:
    reading = BusyReading(source=source, fraction=fraction)
    waits = BusyReading(source=WAIT_SOURCE, fraction=1 - run.data_wait_fraction)
    changes = {"busy_fraction": fraction, "busy_source": source, "busy_readings": (reading, waits)}
    return run.model_copy(update=changes)


def test_a_busy_loop_that_reads_as_idle_and_a_starved_one_that_reads_as_busy_break_the_promise(
    good: TrialResult,
) -> None:
    run = told(good)
    promises.was_busy(sampled(run, NVML_SOURCE, 0.95))
    promises.was_starved(sampled(run, NVML_SOURCE, 0.05))
    for fraction in (0.05, 0.7):
        with broken:
            promises.was_busy(sampled(run, NVML_SOURCE, fraction))
    for fraction in (0.95, 0.4):
        with broken:
            promises.was_starved(sampled(run, NVML_SOURCE, fraction))


def test_a_busy_fraction_of_the_loops_waits_alone_breaks_the_promise(
    on_cpu: Callable[..., TrialResult], good: TrialResult
) -> None:
    """On the processor they are all that there is: they read 1 where launches hold a GPU up."""
    starved = promises.measured(on_cpu(dataset=cases.SleepingRows, micro_batch_size=8))
    assert starved.busy_fraction is not None
    assert starved.busy_fraction < 0.3
    for promise, run in ((promises.was_starved, starved), (promises.was_busy, sampled(told(good), WAIT_SOURCE, 1.0))):
        with broken:
            promise(run)


def test_a_busy_fraction_that_none_of_its_sources_told_breaks_the_promise(good: TrialResult) -> None:
    run = sampled(told(good), NVML_SOURCE, 0.9)
    promises.is_told_by_the_device(run)
    with broken:
        promises.is_told_by_the_device(run.model_copy(update={"busy_fraction": 0.5}))
    with broken:
        promises.is_told_by_the_device(run.model_copy(update={"busy_fraction": None, "busy_source": None}))


def profiled(run: Measurement, *, compute_s: float, copy_s: float) -> Measurement:
    """As if a profiler had seen this of a device in ten steps of a second each."""
    busy_s = compute_s + copy_s
    device = DeviceTime(busy_s=busy_s, compute_s=compute_s, copy_s=copy_s, communication_s=0.0)
    parts = breakdown_on_device(device, profiled_steps=10, step_s=1.0, data_wait_s=0.0, restart_s=0.0)
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
    changes = {"evidence": evidence, "findings": findings, "verdict": findings[0].bottleneck, "advice": advice}
    return found.model_copy(update=changes)


@pytest.fixture(scope="module")
def look() -> Callable[..., Diagnosis]:
    """A diagnosis of a made-up GPU whose profiler saw this in ten steps of a second each."""
    found = autotune.diagnose(object, list, progress=False, launcher=FakeLauncher(noise=0.0)).diagnosis
    costs = found.evidence.measurement.loader_costs
    assert costs is not None
    costs = costs.model_copy(update={"copy_s": 0.7, "pinned_copy_s": 0.3})
    run = found.evidence.measurement.model_copy(update={"loader_costs": costs})
    return lambda **seen: judged(found, profiled(run, **seen))


def test_another_verdict_breaks_the_promises_of_copies_and_launches(look: Callable[..., Diagnosis]) -> None:
    copying, launching = look(compute_s=1.0, copy_s=7.0), look(compute_s=2.0, copy_s=0.5)
    promises.is_copy_bound(copying)
    promises.is_launch_bound(launching)
    with broken:
        promises.is_copy_bound(launching)
    with broken:
        promises.is_launch_bound(copying)
    with broken:
        promises.is_launch_bound(look(compute_s=9.0, copy_s=0.1))


def test_copies_that_nothing_is_advised_against_break_the_promise(look: Callable[..., Diagnosis]) -> None:
    with broken:
        promises.is_copy_bound(look(compute_s=1.0, copy_s=7.0).model_copy(update={"advice": ()}))


def test_a_device_that_is_refused_without_the_remedy_breaks_the_promise(
    on_cpu: Callable[..., TrialResult], good: TrialResult, crash: TrialResult
) -> None:
    unseen = on_cpu(device="cuda:99")
    assert unseen.outcome == "invalid"
    for bad in (unseen, good, crash):
        with broken:
            promises.refused_the_device(bad, "cuda")


def test_an_environment_of_another_device_breaks_the_promise(fork_server: ForkServerLauncher, tmp_path: Path) -> None:
    runner = TrialRunner(launcher=fork_server, payload=tmp_path, scratch=tmp_path, logs=tmp_path, device="cpu", seed=0)
    environment = runner.describe(deadline_s=60).environment
    assert environment is not None
    with broken:
        promises.describes_a_gpu(environment, environment.device_name)
    with broken:
        promises.describes_a_gpu(None, "NVIDIA H100")
    gpu = {"device": "cuda:0", "device_kind": "cuda", "device_name": "NVIDIA H100", "driver": "580.1", "cuda": "13.0"}
    promises.describes_a_gpu(environment.model_copy(update=gpu), "NVIDIA H100")
    with broken:
        promises.describes_a_gpu(environment.model_copy(update=gpu | {"driver": None}), "NVIDIA H100")


def test_why_no_gpu_can_be_tested_is_known_without_a_context() -> None:
    if torch.version.cuda is None:
        assert "built without CUDA" in cases.look_for_gpus().missing
    assert not torch.cuda.is_initialized()
