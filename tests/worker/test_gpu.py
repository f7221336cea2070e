"""What only a CUDA device can show, the most important first: `make test-gpu`.

Each test runs trials in processes of their own, as a study does, and hands what they tell to a promise of
gpu_promises.py; test_gpu_promises.py runs what it can of the cases without a GPU. No test may make a CUDA context in
this process: what it forks would inherit it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from autotune.api import diagnose as diagnosing
from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.config.plan import Plan, Workload
from autotune.config.training_config import AmpDtype, TrainingConfig
from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.records.measurement import Measurement
from autotune.records.result import Diagnosis
from autotune.records.trial import PrecisionFigures, TrialResult
from tests.launch.conftest import sharing

from . import gpu_cases as cases
from . import gpu_promises as promises

pytestmark = pytest.mark.gpu

_OTHERS_BUSY = 0.1
"""Share of time from which on other processes' kernels hide that a loop of ours starves."""


@pytest.fixture(scope="module", autouse=True)
def gpus() -> cases.Gpus:
    """What there is to test on."""
    found = cases.look_for_gpus()
    if found.missing:
        cases.leave_out(found.missing)
    return found


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLauncher]:
    """One server for all."""
    launcher = LocalLauncher(tmp_path_factory.mktemp("server") / "server.log")
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def busy_run(
    launcher: LocalLauncher, gpus: cases.Gpus, tmp_path_factory: pytest.TempPathFactory
) -> Measurement:
    """A loop that the device holds, with all that can be measured of it."""
    result = cases.run(
        launcher,
        tmp_path_factory.mktemp("busy"),
        limit_bytes=limit_of(gpus, gib=6),
        model=cases.Heavy,
        dataset=cases.Indices,
        collate_fn=cases.ReadyBatches(64),
        micro_batch_size=1024,
        max_s=2.5,
        extras=cases.EVERYTHING,
    )
    return promises.measured(result)


def limit_of(gpus: cases.Gpus, *, gib: float) -> int:
    """A limit that leaves so much to torch beside what is in use already, and 1 GiB for kernels that load later."""
    return gpus.used_bytes + round((gib + 1) * cases.GIB)


def test_busy_loop(busy_run: Measurement) -> None:
    promises.was_busy(busy_run)


def test_starved_loop(launcher: LocalLauncher, gpus: cases.Gpus, tmp_path: Path) -> None:
    if gpus.busy_fraction > _OTHERS_BUSY:
        pytest.skip(
            f"other processes keep the device busy for {gpus.busy_fraction:.0%} of the time"
        )
    run = promises.measured(
        cases.run(launcher, tmp_path, dataset=cases.SleepingRows, micro_batch_size=8, max_s=2.5)
    )
    promises.was_starved(run)


def test_peak_memory(busy_run: Measurement, gpus: cases.Gpus) -> None:
    promises.accounts_for_memory(busy_run, limit_of(gpus, gib=6))


def test_out_of_memory(launcher: LocalLauncher, gpus: cases.Gpus, tmp_path: Path) -> None:
    limit_bytes = limit_of(gpus, gib=3)
    for micro_batch_size, promise in ((1024, promises.ran_out_of_memory), (64, promises.measured)):
        result = cases.run(
            launcher,
            tmp_path,
            limit_bytes=limit_bytes,
            model=cases.Wide,
            micro_batch_size=micro_batch_size,
        )
        promise(result)
    if gpus.free_bytes > 24 * cases.GIB:
        promises.measured(cases.run(launcher, tmp_path, model=cases.Wide, micro_batch_size=1024))


@pytest.mark.parametrize("amp_dtype", get_args(AmpDtype))
def test_precision(amp_dtype: AmpDtype, launcher: LocalLauncher, tmp_path: Path) -> None:
    switch = cases.switch_of(amp_dtype)
    if switch:
        pytest.skip(f"{switch} is set here: {amp_dtype} is not what torch makes of it")
    witness = cases.Witness(tmp_path / "seen")
    promises.measured(cases.run(launcher, tmp_path, step=witness, amp_dtype=amp_dtype))
    promises.computes_in(witness.told(), amp_dtype)


def test_profiler(busy_run: Measurement) -> None:
    promises.broke_its_time_down(busy_run)


def test_conditions(busy_run: Measurement) -> None:
    promises.saw_conditions(busy_run)


def test_kernel_error(launcher: LocalLauncher, tmp_path: Path) -> None:
    broken = cases.run(launcher, tmp_path, model=cases.LooksUp, dataset=cases.rows_beyond_the_table)
    promises.crashed_at(broken, cases.place_of_the_lookup())
    promises.measured(cases.run(launcher, tmp_path))


def test_convolution_in_full_memory(
    launcher: LocalLauncher, gpus: cases.Gpus, tmp_path: Path
) -> None:
    result = cases.run(
        launcher,
        tmp_path,
        limit_bytes=limit_of(gpus, gib=1),
        model=cases.convolution,
        dataset=cases.images,
        step=cases.convolve_in_full_memory,
        micro_batch_size=8,
    )
    promises.fits_or_ran_out_of_memory(result)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pinned_batches(num_workers: int, launcher: LocalLauncher, tmp_path: Path) -> None:
    witness = cases.Witness(tmp_path / "seen")
    promises.measured(
        cases.run(launcher, tmp_path, step=witness, num_workers=num_workers, pin_memory=True)
    )
    promises.arrived_on(witness.told(), "cuda")


def diagnosed(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch, batch: int, **workload: object
) -> Diagnosis:
    """A look at one configuration alone: other settings take their time, and workers gigabytes of shared memory."""
    monkeypatch.setattr(diagnosing, "list_variations", lambda *_: [])
    given = Workload(dataset=cases.Indices(), **workload)  # type: ignore[arg-type] # as the caller means it
    plan = Plan(
        name="case",
        workload=given,
        baseline=TrainingConfig(micro_batch_size=batch),
        device="cuda:0",
    )
    return diagnose_plan(
        plan,
        progress=False,
        launcher=launcher,
        measuring=MeasuringTime(window_s=1.0, stretch_s=0.3),
    ).diagnosis


def test_copy_bound(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    model, collate = cases.FirstNumbers, cases.ReadyBatches(3 * 2**18)  # 192 MiB a batch of 64
    promises.is_copy_bound(diagnosed(launcher, monkeypatch, 64, model=model, collate_fn=collate))


def test_launch_bound(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    collate = cases.ReadyBatches(64)
    promises.is_launch_bound(
        diagnosed(launcher, monkeypatch, 16, model=cases.TinyKernels, collate_fn=collate)
    )


def test_nccl(launcher: LocalLauncher, tmp_path: Path) -> None:
    witness = cases.Witness(tmp_path / "seen")
    promises.measured(cases.run(launcher, tmp_path, step=witness, strategy="ddp"))
    promises.met_over(witness.told(), "nccl")


def test_absent_device(launcher: LocalLauncher, tmp_path: Path) -> None:
    promises.refused_the_device(cases.run(launcher, tmp_path, device="cuda:99"), "cuda")


def test_environment(launcher: LocalLauncher, gpus: cases.Gpus, tmp_path: Path) -> None:
    runner = TrialRunner(
        launcher=launcher, payload=tmp_path, scratch=tmp_path, logs=tmp_path, device="auto", seed=0
    )
    promises.describes_a_gpu(runner.describe(deadline_s=60).environment, gpus.names[0])


@pytest.fixture
def warm(launcher: LocalLauncher) -> Iterator[LocalLauncher]:
    """Trials that share a process; the server below serves other tests as well."""
    with sharing(launcher):
        yield launcher


def test_precision_in_a_shared_process(warm: LocalLauncher, tmp_path: Path) -> None:
    witness = cases.Witness(tmp_path / "seen")
    precisions: list[AmpDtype] = ["float32", "tf32", "float16", "bfloat16", "tf32", "float32"]
    for number, amp_dtype in enumerate(precisions):
        witness.path.unlink(missing_ok=True)
        run = promises.measured(
            cases.run(warm, tmp_path, step=witness, amp_dtype=amp_dtype, num_workers=2)
        )
        assert run.earlier_trials == number
        if not cases.switch_of(amp_dtype):
            promises.computes_in(witness.told(), amp_dtype)


def test_peak_in_a_shared_process(warm: LocalLauncher, gpus: cases.Gpus, tmp_path: Path) -> None:
    def run(launcher: Launcher, micro_batch_size: int) -> TrialResult:
        limit_bytes = limit_of(gpus, gib=3)
        return cases.run(
            launcher,
            tmp_path,
            limit_bytes=limit_bytes,
            model=cases.Wide,
            micro_batch_size=micro_batch_size,
        )

    warm.is_sharing = False
    alone = promises.measured(run(warm, 64))
    warm.is_sharing = True
    assert promises.measured(run(warm, 128)).earlier_trials == 0
    promises.ran_out_of_memory(run(warm, 1024))
    after = promises.measured(run(warm, 64))
    assert after.earlier_trials > 0
    promises.peaks_as(after, alone)


def test_kernel_error_in_a_shared_process(warm: LocalLauncher, tmp_path: Path) -> None:
    broken = cases.run(warm, tmp_path, model=cases.LooksUp, dataset=cases.rows_beyond_the_table)
    promises.crashed_at(broken, cases.place_of_the_lookup())
    assert promises.measured(cases.run(warm, tmp_path)).earlier_trials == 0


def test_precision_checks_in_a_shared_process(warm: LocalLauncher, tmp_path: Path) -> None:
    configs = [
        TrainingConfig(micro_batch_size=64, amp_dtype=one)
        for one in ("float16", "bfloat16", "tf32")
    ]

    def guards(launcher: Launcher) -> list[PrecisionFigures | None]:
        runner = cases.runner_of(launcher, tmp_path)
        return [runner.guard(config, name="guard", deadline_s=60).guard for config in configs]

    warm.is_sharing = False
    alone = guards(warm)
    warm.is_sharing = True
    for shared, own in zip(guards(warm), alone, strict=True):
        promises.guarded_as(shared, own)


def test_compile_cache_of_a_stress_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config = TrainingConfig(micro_batch_size=64, compile=True)
    launcher = LocalLauncher(None)
    report = cases.runner_of(launcher, tmp_path).stress(
        config, name="stress", deadline_s=100, train_s=1.0
    )
    assert report.stress is not None, report.result.reason
    command = [sys.executable, "-W", "ignore", "-c", cases.TRAINS_COMPILED]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(told.splitlines()[-1]) > 0


@pytest.fixture
def two_devices(gpus: cases.Gpus) -> None:
    if len(gpus.names) < 2:
        pytest.skip("needs two CUDA devices")


@pytest.mark.usefixtures("two_devices")
def test_dataparallel_in_bfloat16(launcher: LocalLauncher, tmp_path: Path) -> None:
    witness = cases.Witness(tmp_path / "seen")
    promises.measured(
        cases.run(
            launcher, tmp_path, step=witness, strategy="dp", world_size=2, amp_dtype="bfloat16"
        )
    )
    promises.computes_in(witness.told(), "bfloat16")


@pytest.mark.usefixtures("two_devices")
def test_two_ranks(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = cases.run(launcher, tmp_path, strategy="ddp", world_size=2, extras=cases.EVERYTHING)
    promises.exchanged(promises.measured(result), 2)
