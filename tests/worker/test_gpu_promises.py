"""Run the cases of the GPU tests without a GPU: on the CPU and on the simulated accelerator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from autotune.config.training_config import AmpDtype
from autotune.launch.local import LocalLauncher
from autotune.records.trial import TrialResult
from tests.accelerator import write_entry_point

from . import gpu_cases as cases
from . import gpu_promises as promises

pytestmark = pytest.mark.slow
MIB = 2**20


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


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16", "float16"])
def test_precision(amp_dtype: AmpDtype, on_cpu: Callable[..., TrialResult], tmp_path: Path) -> None:
    witness = cases.Witness(tmp_path / "seen")
    promises.measured(on_cpu(step=witness, strategy="ddp", amp_dtype=amp_dtype))
    promises.computes_in(witness.told(), amp_dtype)
    promises.arrived_on(witness.told(), "cpu")
    promises.met_over(witness.told(), "gloo")


def test_missing_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cases.MUST_HAVE_GPU, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no driver"):
        cases.leave_out("no driver")
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    recipe = makefile.partition("\ntest-gpu: ")[2].partition("\n\n")[0]
    assert {f"{cases.MUST_HAVE_GPU}=1", "gpu"} <= set(recipe.split())
    monkeypatch.setenv(cases.MUST_HAVE_GPU, "1")
    with pytest.raises(pytest.fail.Exception, match="no driver"):
        cases.leave_out("no driver")


def test_memory(on_sim: Callable[..., TrialResult]) -> None:
    limit_bytes = 32 * MIB
    promises.accounts_for_memory(promises.measured(on_sim(limit_bytes=limit_bytes)), limit_bytes)


class NoEngine(nn.Linear):
    """Fails as cuDNN does if no engine finds room."""

    def forward(self, inputs: Tensor) -> NoReturn:
        with suppress(torch.OutOfMemoryError):
            torch.empty(2**30, dtype=torch.uint8, device=inputs.device)
        raise RuntimeError("FIND was unable to find an engine to execute this computation")


def test_out_of_memory(on_sim: Callable[..., TrialResult]) -> None:
    promises.ran_out_of_memory(on_sim(limit_bytes=6 * MIB, micro_batch_size=4096))
    promises.ran_out_of_memory(on_sim(limit_bytes=32 * MIB, model=NoEngine(64, 2)))
    convolving = {
        "model": cases.convolution,
        "dataset": cases.images,
        "step": cases.convolve_in_full_memory,
    }
    promises.ran_out_of_memory(on_sim(limit_bytes=60 * MIB, micro_batch_size=8, **convolving))


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


def test_kernel_error_is_at_its_line(on_cpu: Callable[..., TrialResult]) -> None:
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith("  # the kernel"))
    place = f"{Path(__file__).name}:{number}"
    promises.crashed_at(on_cpu(model=FailsLater(64, 2), loss=loss_that_waits), place)
    # with launches that block, this one does not fail
    unknown = on_cpu(model=FailsOnceOnly(64, 2), loss=loss_that_waits)
    assert unknown.failure is not None
    assert unknown.failure.is_asynchronous


def test_absent_device(on_sim: Callable[..., TrialResult]) -> None:
    promises.refused_the_device(on_sim(device="sim:9"), "sim")


def test_look_for_gpus_makes_no_context() -> None:
    if torch.version.cuda is None:
        assert "built without CUDA" in cases.look_for_gpus().missing
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch
