"""Advice on a format is given with its gain, and following it brings that; where the device is the limit it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset

from autotune.api import diagnose as diagnosing
from autotune.api.diagnose import DiagnosisResult, MeasuringTime, diagnose_plan
from autotune.launch.local.fork_server import ForkServerLauncher
from autotune.settings.plan import Plan
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from tests.worker.after_window.format_datasets import (
    ArraysAndMore,
    Drafted,
    Files,
    Photos,
    Texts,
    TextsAndMore,
    write_photos,
    write_texts,
)

pytestmark = pytest.mark.quiet

_WITHIN = 2.0
"""What is reached lies within this factor of what was promised: windows of half a second, on shared cores."""


class Small(nn.Module):
    """A step that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Tensor([0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)[:, :4].float() * self.weight


class Large(nn.Module):
    """A step that costs far more than the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1500, 1500)

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.flatten(1)[:, :1].float().expand(-1, 1500)
        for _ in range(60):
            wide = self.inner(wide).tanh()
        return wide


def mean_output(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).mean()
    return loss


Diagnose = Callable[[Callable[[], nn.Module], Dataset[Any]], DiagnosisResult]


@pytest.fixture
def diagnosis(fork_server: ForkServerLauncher, monkeypatch: pytest.MonkeyPatch) -> Diagnose:
    """A short diagnosis, in which no other settings are measured."""
    monkeypatch.setattr(diagnosing, "list_variations", lambda _: [])

    def run(model: Callable[[], nn.Module], dataset: Dataset[Any]) -> DiagnosisResult:
        workload = Workload(model=model, dataset=dataset, step=mean_output)
        baseline = TrainingConfig(micro_batch_size=16, intra_op_threads=1)
        plan = Plan(name="formats", workload=workload, baseline=baseline, device="cpu")
        brief = MeasuringTime(window_s=0.5, stretch_s=0.1)
        return diagnose_plan(plan, progress=False, launcher=fork_server, measuring=brief)

    return run


@pytest.mark.parametrize(
    ("kind", "today", "followed", "write"),
    [
        ("save_as_arrays", TextsAndMore, ArraysAndMore, write_texts),
        ("decode_smaller", Photos, Drafted, lambda folder: (write_photos(folder),) * 2),
    ],
)
def test_following_the_advice_brings_what_it_has_promised(
    kind: str,
    today: type[Files],
    followed: type[Files],
    write: Callable[[Path], tuple[list[Path], list[Path]]],
    tmp_path: Path,
    diagnosis: Diagnose,
) -> None:
    files, better = write(tmp_path)
    before = diagnosis(Small, today(files))
    advice = {piece.kind: piece for piece in before.advice}[kind]
    after = diagnosis(Small, followed(better))
    reached = after.diagnosis.evidence.measurement.samples_per_s / before.diagnosis.evidence.measurement.samples_per_s
    assert advice.expected_gain is not None
    assert 1 / _WITHIN < reached / (1 + advice.expected_gain) < _WITHIN
    assert kind not in {piece.kind for piece in after.advice}
    assert "instead of" in advice.text


def test_where_the_device_is_the_limit_no_format_is_advised(tmp_path: Path, diagnosis: Diagnose) -> None:
    found = diagnosis(Large, Texts(write_texts(tmp_path)[0]))
    costs = found.diagnosis.evidence.measurement.loader_costs
    assert costs is not None
    assert [cost.kind for cost in costs.formats] == ["text"]
    assert "save_as_arrays" not in {piece.kind for piece in found.advice}
