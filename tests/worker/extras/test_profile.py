"""Read the profiler's events (see data/traces/README.md), and divide a step by them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autotune.config.training_config import TrainingConfig
from autotune.models.statistics import window_rate
from autotune.records.breakdown import DeviceTime, device_time
from autotune.records.measurement import Block, Restart, Window
from autotune.worker import batch as reuse
from autotune.worker.device import open_device
from autotune.worker.extras.profile import (
    MARK,
    TraceEvent,
    break_down,
    device_events,
    gap_fractions,
    host_waits,
    marked_part,
    profile_steps,
    read_kineto,
    step_times,
)
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


TRACES = Path(__file__).with_name("data") / "traces"
MICROSECOND = 1000
MILLISECOND = 1000 * MICROSECOND


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a file; what an event has beyond TraceEvent's fields is left out."""
    known = {field.name for field in fields(TraceEvent)}
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [
        TraceEvent(**{name: value for name, value in line.items() if name in known})
        for line in lines
    ]


def by_hand(name: str) -> list[TraceEvent]:
    return read_trace(TRACES / f"by_hand-{name}.jsonl")


def skewed(traces: Sequence[TraceEvent], skew_ns: int) -> list[TraceEvent]:
    """The same with the devices' clocks ahead of the host's."""
    return [
        replace(event, start_ns=event.start_ns + skew_ns, end_ns=event.end_ns + skew_ns)
        if event.is_on_device
        else event
        for event in traces
    ]


def without_ids(traces: Sequence[TraceEvent]) -> list[TraceEvent]:
    return [replace(event, correlation_id=0, linked_id=0) for event in traces]


def worked(traces: Sequence[TraceEvent], device_index: int = 0) -> DeviceTime:
    """What a device did in the marked part."""
    inside, _ = marked_part(traces)
    return device_time(device_events(inside, device_index), host_waits(inside))


ALL = sorted(TRACES.glob("*.jsonl*"))
ON_DEVICE = [path for path in ALL if any(event.is_on_device for event in read_trace(path))]


EACH_ON_DEVICE = pytest.mark.parametrize("path", ON_DEVICE, ids=lambda path: path.name)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_a_trace_has_our_mark_and_gaps_that_are_a_share(path: Path) -> None:
    inside, span_s = marked_part(read_trace(path))
    assert span_s > 0
    assert 0 <= gap_fractions(inside, span_s).fraction < 1


@EACH_ON_DEVICE
def test_what_a_device_did_adds_up_and_lies_in_the_marked_span(path: Path) -> None:
    traces = read_trace(path)
    inside, span_s = marked_part(traces)
    time = worked(traces)
    assert 0 < time.busy_s <= span_s
    assert time.compute_s + time.copy_s + time.communication_s == pytest.approx(time.busy_s)
    assert 0 <= time.after_waits_s <= span_s - time.busy_s
    last_ns = max(end for _, end in host_waits(inside))
    assert last_ns >= max(event.end_ns for event in device_events(inside, 0))


@EACH_ON_DEVICE
def test_the_launch_of_nearly_all_that_a_device_did_is_known(path: Path) -> None:
    traces = read_trace(path)
    hour_ahead = skewed(traces, 3600 * 1000 * MILLISECOND)
    inside, _ = marked_part(traces)
    blind, _ = marked_part(without_ids(hour_ahead))
    assert device_events(inside, 0)
    assert not device_events(blind, 0), "without ids, a clock an hour ahead leaves nothing"
    known, _ = marked_part(hour_ahead)
    assert len(device_events(known, 0)) >= 0.99 * len(device_events(inside, 0))


@EACH_ON_DEVICE
@pytest.mark.parametrize(
    "skew_ns", [-5 * MILLISECOND, -30 * MICROSECOND, 30 * MICROSECOND, 5 * MILLISECOND]
)
def test_a_device_whose_clock_differs_has_done_the_same(path: Path, skew_ns: int) -> None:
    traces = read_trace(path)
    true, told = worked(traces), worked(skewed(traces, skew_ns))
    assert replace(told, after_waits_s=0) == replace(true, after_waits_s=0)


@pytest.mark.parametrize(
    "skew_ns", [0, -5 * MILLISECOND, -30 * MICROSECOND, 30 * MICROSECOND, 5 * MILLISECOND]
)
def test_a_gap_after_a_wait_of_the_host_is_told_whatever_the_clocks_and_the_last_wait_has_none(
    skew_ns: int,
) -> None:
    traces = skewed(by_hand("host_waits"), skew_ns)
    inside, _ = marked_part(traces)
    assert len(host_waits(inside)) == 3, (
        "streams, devices and events; launches and operators are none"
    )
    assert worked(traces).after_waits_s == pytest.approx(80e-6)
    assert worked(traces).busy_s == pytest.approx(310e-6)


@pytest.mark.parametrize("skew_ns", [0, -150 * MICROSECOND, 150 * MICROSECOND])
def test_a_kernel_of_the_step_before_is_none_of_ours_and_one_at_the_edge_is(skew_ns: int) -> None:
    traces = skewed(by_hand("overlapping_streams"), skew_ns)
    inside, _ = marked_part(traces)
    assert len(device_events(inside, 0)) == 6
    names = [event.name for event in inside]
    assert "void at::native::vectorized_elementwise_kernel<4>" not in names


def test_clocks_that_agree_are_left_alone() -> None:
    traces = by_hand("host_waits")
    inside, _ = marked_part(traces)
    assert {event.start_ns for event in inside if event.is_on_device} == {
        event.start_ns for event in traces if event.is_on_device
    }


def test_a_call_of_the_runtime_is_not_taken_for_the_operator_of_the_same_number() -> None:
    call = TraceEvent(
        name="cudaLaunchKernel",
        activity="cuda_runtime",
        start_ns=1100,
        end_ns=1110,
        is_on_device=False,
        is_annotation=False,
        correlation_id=7,
    )
    mark = replace(call, name=MARK, activity="", start_ns=1000, end_ns=2000, correlation_id=0)
    early = replace(call, name="aten::mul", activity="cpu_op", start_ns=100, end_ns=200)
    kernel = replace(call, name="gemm", activity="kernel", start_ns=1200, is_on_device=True)
    assert kernel in marked_part([mark, early, call, kernel])[0], (
        "launched by the call 7, not within the operator 7"
    )
    within = replace(kernel, correlation_id=8, linked_id=7)
    assert within not in marked_part([mark, early, call, within])[0], (
        "launched within the operator 7, by a call unseen"
    )


def kineto_event(entry: TraceEvent, *, has_activity: bool) -> Mock:
    """Return an event as torch gives it; 2.11 lacks its activity type."""
    kinds: Any = torch.autograd.DeviceType  # type: ignore[attr-defined] # torch does not list it
    answers: dict[str, Any] = {
        "name": entry.name,
        "start_ns": entry.start_ns,
        "duration_ns": entry.end_ns - entry.start_ns,
        "device_type": kinds.CUDA if entry.is_on_device else kinds.CPU,
        "device_index": entry.device_index,
        "scope": 7 if entry.is_annotation and not entry.is_on_device else 0,
        "is_user_annotation": entry.is_annotation,
        "correlation_id": entry.correlation_id,
        "linked_correlation_id": entry.linked_id,
    }
    if has_activity:
        answers["activity_type"] = entry.activity
    event = Mock(spec=list(answers))
    event.configure_mock(**{f"{name}.return_value": value for name, value in answers.items()})
    return event


ANY_TORCH = pytest.mark.parametrize("has_activity", [False, True])


def kineto(name: str, has_activity: bool = True) -> list[TraceEvent]:
    return read_kineto(kineto_event(entry, has_activity=has_activity) for entry in by_hand(name))


def test_what_torch_tells_today_is_read_whole() -> None:
    assert kineto("overlapping_streams") == by_hand("overlapping_streams")


@ANY_TORCH
def test_overlapping_streams_count_once_and_marks_and_other_devices_not_at_all(
    has_activity: bool,
) -> None:
    traces = kineto("overlapping_streams", has_activity)
    assert marked_part(traces)[1] == pytest.approx(1000e-6)
    time = worked(traces)
    assert time.busy_s == pytest.approx(600e-6)
    assert time.compute_s == pytest.approx(360e-6), "the memset among it"
    assert time.copy_s == pytest.approx(50e-6)
    assert time.communication_s == pytest.approx(190e-6)
    assert worked(traces, 1).busy_s == pytest.approx(800e-6), "another device is told by its index"


@ANY_TORCH
def test_a_gap_after_a_wait_is_told_by_every_torch(has_activity: bool) -> None:
    time = worked(kineto("host_waits", has_activity))
    assert time.after_waits_s == pytest.approx(80e-6)
    assert time.busy_s == pytest.approx(310e-6)


def test_gaps_on_the_cpu_lie_outside_operators_wrappers_and_marks_left_out() -> None:
    inside, span_s = marked_part(by_hand("cpu_operators"))
    assert gap_fractions(inside, span_s).fraction == pytest.approx(0.5)


def test_without_our_mark_nothing_is_read() -> None:
    traces = [event for event in by_hand("cpu_operators") if event.name != MARK]
    assert marked_part(traces) == ([], 0.0)
    assert gap_fractions([], 0.0) == (0, 0)
