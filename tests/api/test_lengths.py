"""Lengths vary: searches and diagnoses of sequences by real processes, their batches made by a user's batch sampler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import autotune
from autotune.api import diagnose as diagnosing
from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.config.plan import Plan, Workload
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, WorkloadError
from autotune.launch.local import LocalLauncher
from tests.factories.lengths import (
    ByBudget,
    ByLength,
    Sequences,
    Tagger,
    rows_with_mask,
    tagging_step,
)
from tests.hurried import Hurried

LENGTHS = [(4, 8, 16, 32, 64)[number % 5] for number in range(2000)]
ONE_SETTING = {
    "num_workers": 0,
    "amp_dtype": "float32",
    "intra_op_threads": 1,
    "grad_accum_steps": 1,
}
"""All but the batch fixed."""


def dear_batches(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A step that takes as long for few samples as for many."""
    time.sleep(0.005)
    return tagging_step(model, batch)


def search(folder: Path, **arguments: Any) -> autotune.SearchResult:
    known: dict[str, Any] = {
        "step": dear_batches,
        "collate_fn": rows_with_mask,
        "loader": {"batch_sampler": ByBudget},
        "baseline": {"max_tokens": 128, "intra_op_threads": 1},
        "space": ONE_SETTING,
        "device": "cpu",
        "run_dir": folder / "run",
        "progress": False,
    }
    return autotune.search(Tagger(), Sequences(LENGTHS), **(known | arguments))


@pytest.mark.quiet
def test_a_larger_token_budget_is_recommended_where_it_is_faster(
    tmp_path: Path, fork_server: LocalLauncher
) -> None:
    result = search(tmp_path, n_trials=3, timeout_s=24, launcher=fork_server)
    best, baseline = result.best, result.baseline
    assert (best.max_tokens or 0) > (baseline.max_tokens or 0) == 128
    assert best.micro_batch_size > baseline.micro_batch_size < 32
    assert best.lr == pytest.approx(baseline.lr * (best.max_tokens or 0) / 128), (
        "SGD's rate follows the tokens"
    )
    assert autotune.load(tmp_path / "run" / "recommended.yaml") == best
    resumed = search(tmp_path, n_trials=3, timeout_s=6, launcher=fork_server)
    assert [trial.config for trial in resumed.trials] == [trial.config for trial in result.trials]


@pytest.fixture
def brief(fork_server: LocalLauncher) -> dict[str, Any]:
    """Two trials in short windows, without a look at both sides alone before the second.

    The baseline is the faster one: nobody challenges it, so that nothing runs again.
    """
    return {"launcher": Hurried(fork_server), "method": "random", "n_trials": 2}


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"baseline": {}}, WorkloadError, "baseline.max_tokens is not given"),
        (
            {"loader": {"batch_sampler": ByLength}},
            WorkloadError,
            "baseline.max_tokens needs a batch sampler",
        ),
        (
            {"space": {"micro_batch_size": [8, 16]}},
            ConfigError,
            "space.micro_batch_size must be left out",
        ),
        (
            {"loader": {"batch_sampler": ByLength}, "baseline": {}, "space": {"max_tokens": [64]}},
            ConfigError,
            "space.max_tokens needs a batch sampler",
        ),
    ],
)
def test_a_budget_without_its_sampler_is_refused_before_any_trial(
    arguments: dict[str, Any],
    error: type[Exception],
    sentence: str,
    tmp_path: Path,
    fork_server: LocalLauncher,
) -> None:
    with pytest.raises(error, match=sentence):
        search(tmp_path, n_trials=2, launcher=fork_server, **arguments)


class Layers(nn.Module):
    """A few wide layers over each token: the device is the bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Embedding(50, 128), *(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 50)
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        outputs: Tensor = self.inner(input_ids)
        return outputs


def diagnose(lengths: list[int], **how: Any) -> autotune.DiagnosisResult:
    plan = Plan(
        name="lengths",
        workload=Workload(
            model=Layers(), dataset=Sequences(lengths), step=tagging_step, collate_fn=rows_with_mask
        ),
        baseline=TrainingConfig(micro_batch_size=16, intra_op_threads=1, num_workers=0),
        device="cpu",
    )
    return diagnose_plan(plan, progress=False, **how)


@pytest.mark.quiet
def test_a_diagnosis_tells_rates_in_tokens_and_what_like_lengths_would_win(
    fork_server: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosing, "list_variations", lambda *_: [])
    found = diagnose(
        [(16, 16, 16, 16, 16, 16, 16, 400)[number % 8] for number in range(2000)],
        launcher=fork_server,
    )
    run = found.diagnosis.evidence.measurement
    assert run.tokens is not None
    assert run.lengths is not None
    assert run.tokens_per_s == pytest.approx(run.samples_per_s * run.tokens.per_sample)
    assert (run.tokens.shortest, run.tokens.longest) in {(16, 400), (400, 400)}
    assert run.lengths.padding == pytest.approx(run.lengths.buckets.random_padding, abs=0.1)
    assert run.lengths.buckets.bucket_padding < 0.1
    assert run.lengths.packed is not None
    assert run.lengths.packed.padding < 0.1
    (advice,) = [piece for piece in found.advice if piece.kind == "batch_like_lengths"]
    assert advice.expected_gain is not None
    assert advice.expected_gain > 1
    report = found.report()
    assert "tokens/s" in report
    assert advice.text in report.replace("\\", "")


@pytest.mark.slow
def test_of_equal_lengths_nothing_is_said(
    fork_server: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosing, "list_variations", lambda *_: [])
    brief = MeasuringTime(window_s=0.4, stretch_s=0.1)
    found = diagnose([32] * 1000, launcher=fork_server, measuring=brief)
    run = found.diagnosis.evidence.measurement
    assert run.tokens is not None, "they have a name"
    assert run.tokens.padding == 0
    assert run.lengths is None
    assert all(piece.kind != "batch_like_lengths" for piece in found.advice)


@pytest.mark.slow
def test_buckets_of_lengths_are_searched_by_their_batch_size(
    tmp_path: Path, brief: dict[str, Any]
) -> None:
    result = search(
        tmp_path,
        loader={"batch_sampler": ByLength},
        baseline={"micro_batch_size": 32, "intra_op_threads": 1},
        space=ONE_SETTING | {"micro_batch_size": [8, 32]},
        **brief,
    )
    sizes = {
        trial.config.micro_batch_size: {
            block.samples / block.batches for block in trial.measurement.blocks
        }
        for trial in result.trials
        if trial.measurement is not None
    }
    assert sizes == {8: {8.0}, 32: {32.0}}
