"""Steps with and without a mode are compared, and everything is put back."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.config.training_config import TrainingConfig
from autotune.records.measurement import SwitchName
from autotune.worker import modes
from autotune.worker.device import open_device
from autotune.worker.extras import what_if
from autotune.worker.extras.what_if import SwitchReport, measure_switches
from autotune.worker.step import Step, Trainer, make_trainer

BATCH = torch.ones(8, 4)
SECONDS = 0.02


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "_OBSERVED_S", 0.0)
    monkeypatch.setattr(what_if, "_LONGEST_S", 60.0)
    monkeypatch.setattr(what_if, "_MOST_ROUNDS", what_if._ROUNDS)


def trainer_of(work: Callable[[], object] = lambda: None, **settings: Any) -> Trainer:
    """A trainer whose step does some further work."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        work()
        outputs: Tensor = model(batch).sum()
        return outputs

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = TrainingConfig(micro_batch_size=8, **settings)
    return make_trainer(model, optimizer, Step(loss, "given"), config, open_device("cpu"))


def switched(trainer: Trainer, ends_at: float = inf) -> SwitchReport:
    return measure_switches(trainer, trainer.optimizer, [BATCH], seconds=SECONDS, ends_at=ends_at)


def names(report: SwitchReport) -> list[SwitchName]:
    return [gain.name for gain in report.gains]


def test_nothing_is_compared_where_no_mode_is_on() -> None:
    trainer = trainer_of(grad_accum_steps=2)
    report = switched(trainer)
    assert report.gains == ()
    assert report.notes == ()
    assert not report.modes.is_anomaly_detected
    assert trainer.accumulated == 0, "only whole optimizer steps are made"


@pytest.mark.parametrize("is_each_step", [False, True])
def test_anomaly_detection_is_off_in_half_of_the_steps(is_each_step: bool) -> None:
    seen = []

    def work() -> None:
        with torch.autograd.detect_anomaly() if is_each_step else nullcontext():
            seen.append(torch.is_anomaly_enabled())

    with (
        pytest.warns(UserWarning, match="Anomaly") if is_each_step else nullcontext(),
        torch.autograd.set_detect_anomaly(not is_each_step, check_nan=False),
    ):
        report = switched(trainer_of(work))
        assert torch.is_anomaly_enabled() is not is_each_step
        assert not torch.is_anomaly_check_nan_enabled()
    (gain,) = report.gains
    assert gain.name == "anomaly"
    assert gain.rounds == what_if._ROUNDS
    assert report.modes.is_anomaly_detected
    assert seen.count(False) == gain.rounds * (gain.steps + 1)


def test_deterministic_algorithms_are_put_back() -> None:
    seen = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        report = switched(
            trainer_of(lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
        )
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert names(report) == ["deterministic"]
    assert {*seen} == {False, True}


@contextmanager
def _profiled() -> Iterator[None]:
    own = cProfile.Profile()
    own.enable()
    try:
        yield
    finally:
        own.disable()


@contextmanager
def _traced() -> Iterator[None]:
    former = sys.getprofile()
    sys.setprofile(lambda *_: None)
    try:
        yield
    finally:
        sys.setprofile(former)


@pytest.mark.parametrize("running", [_profiled, _traced])
def test_profilers_of_python_are_suspended(running: Callable[[], Any]) -> None:
    seen = []
    with running():
        own = sys.getprofile()
        report = switched(trainer_of(lambda: seen.append(modes.is_traced())))
        assert sys.getprofile() is own
    assert names(report) == ["tracer"]
    assert {*seen} == {False, True}


def test_subnormal_values_are_flushed_in_half_of_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(what_if, "_can_flush", lambda: True)
    half = torch.tensor(torch.finfo(torch.float32).smallest_normal)
    seen = []
    threads = torch.get_num_threads()
    report = switched(trainer_of(lambda: seen.append(float((half.expand(4096) * 0.5).max()))))
    (gain,) = report.gains
    assert gain.name == "denormals"
    assert gain.share is not None
    assert 0 < gain.share <= 1
    assert gain.is_at_one_thread == (threads > 1)
    assert torch.get_num_threads() == threads
    assert float(half * 0.5) > 0, "no longer flushed"
    assert 0.0 in seen


def test_subnormal_values_of_narrow_types_do_not_count() -> None:
    small = torch.full((4096,), 1e-7, dtype=torch.float16)
    assert switched(trainer_of(lambda: small * 0.5)).gains == ()


def test_failed_switch_leaves_a_note() -> None:
    def work() -> None:
        if not torch.is_anomaly_enabled():
            raise KeyError("no anomaly")

    with torch.autograd.set_detect_anomaly(True), _traced():
        report = switched(trainer_of(work))
        assert torch.is_anomaly_enabled()
    assert [note.code for note in report.notes] == ["switch_failed"]
    assert names(report) == ["tracer"], "the others are compared"


def test_long_steps_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "_LONGEST_S", 0.0)
    with _traced():
        report = switched(trainer_of(lambda: None))
    assert report.gains == ()
    assert [note.code for note in report.notes] == ["steps_too_long_to_switch"]


def test_nothing_is_compared_close_to_the_deadline() -> None:
    with _traced():
        assert switched(trainer_of(lambda: None), ends_at=-inf).gains == ()
