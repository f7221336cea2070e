"""From a window and a few profiled steps to shares of a step; what the profiler records is read in test_trace.py."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config.training_config import TrainingConfig
from autotune.models.statistics import window_rate
from autotune.records.measurement import Block, Restart, Window
from autotune.worker import batch as reuse
from autotune.worker.device import open_device
from autotune.worker.extras.profile import MARK, break_down, marked_part, profile_steps, step_times
from autotune.worker.step import Step, Trainer, make_trainer
from tests.factories import make_window


def window(*, whole_epochs: bool, restarts: tuple[Restart, ...] = (), **changes: Any) -> Window:
    """Ten blocks of ten batches of eight in a second each, half of it waits."""
    block = Block(samples=80, batches=10, seconds=1.0, data_wait_s=0.5)
    fields: dict[str, Any] = {"blocks": (block,) * 10, "epoch_samples": 160} | changes
    return make_window(whole_epochs=whole_epochs, restarts=restarts, **fields)


def test_restarts_beside_the_blocks_are_added_in_proportion_as_in_the_rate() -> None:
    seen = window(whole_epochs=False, restarts=(Restart(seconds=1.1, samples=8),))
    times = step_times(seen, seen.restarts)
    assert times.step_s == pytest.approx(0.1)
    assert times.data_wait_s == pytest.approx(0.05)
    assert times.restart_s == pytest.approx(0.05), (
        "a second beyond its batch, over an epoch of twenty"
    )
    assert 8 / (times.step_s + times.restart_s) == pytest.approx(window_rate(seen).value)


def test_restarts_inside_the_blocks_are_taken_out_of_the_step() -> None:
    inside = [Restart(seconds=0.48, samples=8)] * 5
    times = step_times(window(whole_epochs=True), inside)
    steady_s = (10 - 5 * 0.48) / 95
    assert times.restart_s == pytest.approx((5 * 0.48 - 5 * steady_s) / 100)
    assert times.step_s + times.restart_s == pytest.approx(0.1)
    assert times.data_wait_s + times.restart_s == pytest.approx(0.05)


def test_epochs_of_one_batch_count_their_waits_as_restarts() -> None:
    times = step_times(window(whole_epochs=True), [Restart(seconds=0.1, samples=8)] * 100)
    assert times.restart_s == pytest.approx(0.05)
    assert times.data_wait_s == pytest.approx(0)


def test_what_lay_ready_at_the_first_edge_would_have_been_waited_for() -> None:
    seen = window(whole_epochs=False, epoch_samples=None, queue_at_start=20)
    times = step_times(seen, ())
    assert times.step_s == pytest.approx(0.125)
    assert times.data_wait_s == pytest.approx(0.05 + 0.025)


def trainer_of(**settings: Any) -> Trainer:
    model = nn.Linear(4, 2)
    step = Step(lambda model, batch: model(batch[0]).sum(), "made up")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return make_trainer(
        model, optimizer, step, TrainingConfig(micro_batch_size=8, **settings), open_device("cpu")
    )


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_profiled_step_on_the_cpu_adds_up_and_ends_with_an_optimizer_step(
    accumulation: int,
) -> None:
    trainer, batch = trainer_of(grad_accum_steps=accumulation), (torch.randn(8, 4),)
    told, busy = break_down(
        trainer, host=[batch], held=[batch], window=window(whole_epochs=False), restarts=()
    )
    assert trainer.accumulated == 0
    assert busy is None
    assert told.data_wait.fraction == pytest.approx(0.5)
    assert told.compute.fraction > 0
    assert told.idle.fraction > 0, "Python runs between the operators"
    assert "extra steps" in told.compute.source


def test_a_batch_that_the_step_changes_is_whole_each_time_and_copied_beside_the_mark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Any] = []

    def step(model: nn.Module, batch: Any) -> Any:
        events.append(float(batch[0].mul_(2.0).sum()))
        return model(batch[0]).sum()

    def cloned(batch: Any) -> Any:
        events.append("clone")
        return deepcopy(batch)

    monkeypatch.setattr(reuse, "copied", cloned)
    trainer, batch = trainer_of(), (torch.ones(8, 4),)
    trainer.step = Step(step, "changes its batch")
    told, _ = break_down(
        trainer, host=[batch], held=[batch], window=window(whole_epochs=False), restarts=()
    )
    assert events == ["clone", 64.0, *["clone"] * 5, *[64.0] * 5]
    assert told.compute.fraction > 0


def test_a_profile_holds_the_marked_steps_and_those_before() -> None:
    batch = (torch.randn(8, 4),)
    traces = profile_steps(trainer_of(), [batch], 3)
    steps = [event for event in traces if event.name == "aten::linear"]
    inside, span_s = marked_part(traces)
    assert len(steps) == 4
    assert len([event for event in inside if event.name == "aten::linear"]) == 3
    mark = next(event for event in traces if event.name == MARK)
    assert span_s == pytest.approx((mark.end_ns - mark.start_ns) * 1e-9)
    assert len({event.correlation_id for event in traces}) == len(traces), (
        "each operator and mark has a number of its own"
    )


@pytest.mark.parametrize(
    ("kind", "cuda", "own", "set_to"),
    [
        ("cuda", "12.6", None, "1"),  # CUPTI goes
        ("cuda", "13.0", None, "1"),  # in newer versions too
        ("cuda", "12.4", None, None),  # it would crash next to CUDA graphs
        ("cuda", "13.0", "0", "0"),  # the user's own value stays
        ("cpu", "13.0", None, None),  # no CUPTI is used
        ("rocm", None, None, None),  # no CUPTI is there
    ],
)
def test_cupti_is_detached_after_a_profile_where_it_can_be(
    kind: Any,
    cuda: str | None,
    own: str | None,
    set_to: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", own or "")  # so that it is put back
    if own is None:
        monkeypatch.delenv("TEARDOWN_CUPTI")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    trainer = trainer_of()
    trainer.device = replace(
        trainer.device, kind=kind
    )  # profiled as a device, though it is the CPU
    profile_steps(trainer, [(torch.randn(8, 4),)], 1)
    assert os.environ.get("TEARDOWN_CUPTI") == set_to
