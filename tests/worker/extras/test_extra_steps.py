"""What follows a window adds to its measurement, and never changes or loses it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from threading import Barrier, Event, active_count
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.trials import (
    curves_cut,
    extra_failed,
    no_time_for_extras,
    trial_ended_before_extras,
)
from autotune.policy import WindowRules
from autotune.protocol.disk import TrialFolder, read_model
from autotune.protocol.messages import NO_EXTRAS, Extras, RankReport
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import Ceilings, Measurement
from autotune.records.result import Curves
from autotune.records.trial import TrialResult
from autotune.worker.build import build_model
from autotune.worker.device import Device, open_device
from autotune.worker.extras import extra_steps as after
from autotune.worker.extras import item_costs
from autotune.worker.extras.extra_steps import _bucket_bytes, _exchange_s, measure_after_window
from autotune.worker.feed import Feed
from autotune.worker.group import Group
from autotune.worker.loader import build_loader
from autotune.worker.place import Place, Start
from autotune.worker.step import Step, Trainer, make_trainer, open_trainer
from autotune.worker.trial import ended_when_stuck, longest_after_s, measure
from autotune.worker.window import Run
from tests.factories import make_loader_costs, make_measurement, make_window

RULES = WindowRules(max_s=0.1, precision=10.0, block_s=0.01, warm_up_min_s=0.0)
ALL = Extras(
    loader_ceiling=True, device_ceiling=True, breakdown=True, activations=True, stretch_s=0.02
)
WINDOW = (
    "samples_per_s",
    "samples_per_s_ci",
    "busy_fraction",
    "busy_source",
    "peak_memory_bytes",
    "window",
    "loss",
)
FIELDS = {"loader_ceiling", "device_ceiling", "breakdown", "loader_costs", "activations"}
EVERYTHING = ["loader_rate", "device_rate", "time_breakdown", "item_costs", "activations"]


@pytest.fixture(autouse=True)
def _few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_costs, "_TRANSFER_S", 0.01)
    monkeypatch.setattr(item_costs, "_LEAST_S", 0.0)


class Scene:
    """A trial in this process, its window just over."""

    def __init__(self, **settings: Any) -> None:
        config = TrainingConfig(**({"micro_batch_size": 8} | settings))
        data = TensorDataset(torch.randn(512, 4), torch.randint(0, 2, (512,)))
        workload, device = Workload(model=nn.Linear(4, 2), dataset=data), open_device("cpu")
        feed = Feed(build_loader(workload, data, config, Path("/nowhere")))
        first = feed.start()
        model = build_model(workload, config, device)
        self.trainer = open_trainer(workload, model, first.batch, config, device)
        self.run = Run(feed, self.trainer, feed.queue_capacity, perf_counter() + 60)
        start = Start(started=0.0, built_from=0.0, ends_at=inf, before={})
        self.measured = measure(self.run, RULES, first, start, lambda _: None)
        self.kept: list[Measurement] = []

    def after(self, extras: Extras = ALL) -> Measurement:
        return measure_after_window(
            self.run, extras, self.measured, self.kept.append, Path("/nowhere")
        )


def measured_fields(found: Measurement) -> set[str]:
    return {name for name in FIELDS if getattr(found, name) is not None}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_all_extras_are_added_and_the_window_stays(num_workers: int) -> None:
    scene = Scene(num_workers=num_workers)
    found = scene.after()
    assert found.notes == ()
    assert measured_fields(found) == FIELDS
    assert found.ceilings is not None
    assert found.ceilings.loader is not None
    assert found.ceilings.device is not None
    assert found.loader_ceiling == found.ceilings.loader.samples_per_s
    assert found.device_ceiling == found.ceilings.device.samples_per_s
    assert found.loader_costs is not None
    assert (found.loader_costs.transfer_s is not None) == (num_workers > 0)
    assert found.activations is not None
    assert found.activations.whole.samples == 8
    for name in WINDOW:
        assert getattr(found, name) == getattr(scene.measured, name)
    assert Measurement.model_validate_json(found.model_dump_json()) == found


def test_the_window_is_kept_before_anything_else_and_each_figure_as_it_comes() -> None:
    scene = Scene()
    found = scene.after()
    assert scene.kept[0].model_copy(update={"notes": (), "after_s": 0.0}) == scene.measured
    assert scene.kept[0].notes == (trial_ended_before_extras(stages=EVERYTHING),)
    last = {"notes": (), "activations": found.activations, "after_s": found.after_s}
    assert scene.kept[-1].model_copy(update=last) == found
    spent = [0.0, *(known.after_s for known in scene.kept), found.after_s]
    assert spent == sorted(set(spent)), "what has come of the time so far stands in each"
    assert scene.kept[-1].notes == (trial_ended_before_extras(stages=EVERYTHING[-1:]),)


def test_nothing_is_done_where_nothing_is_asked_for() -> None:
    scene = Scene()
    assert scene.after(NO_EXTRAS) is scene.measured
    assert not scene.kept
    assert scene.run.feed.take().batch is not None, "the loader still runs"


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("loader_ceiling", {"loader_ceiling"}),
        ("device_ceiling", {"device_ceiling"}),
        ("breakdown", {"breakdown", "loader_costs"}),
        ("activations", {"activations"}),
    ],
)
def test_only_what_is_asked_for_is_measured(asked: str, given: set[str]) -> None:
    extras = Extras.model_validate({asked: True, "stretch_s": 0.01})
    assert measured_fields(Scene().after(extras)) == given


def test_copies_are_measured_where_the_device_has_memory_that_pinning_is_for() -> None:
    scene = Scene()
    scene.trainer.device = replace(scene.trainer.device, kind="xpu")
    found = scene.after(Extras(copy_ceiling=True, stretch_s=0.01))
    assert found.notes == ()
    assert found.ceilings is not None
    assert found.ceilings.copy is not None
    assert found.copy_ceiling == found.ceilings.copy.samples_per_s > 0
    assert (found.loader_ceiling, found.device_ceiling) == (None, None)


def test_on_a_cpu_nothing_is_copied_and_nothing_is_said_of_it() -> None:
    scene = Scene()
    assert scene.after(Extras(copy_ceiling=True, stretch_s=0.01)) is scene.measured
    assert scene.after(ALL.model_copy(update={"copy_ceiling": True})).copy_ceiling is None


def test_nothing_begins_near_the_deadline() -> None:
    scene = Scene()
    scene.run.ends_at = 0.0
    found = scene.after()
    assert found.loader_ceiling is None
    assert found.notes == (no_time_for_extras(stages=EVERYTHING),)


@pytest.mark.parametrize(
    ("stage", "field", "what", "error"),
    [
        ("loader_alone", "loader_ceiling", "loader_rate", ValueError("at last\nbroken")),
        ("device_alone", "device_ceiling", "device_rate", torch.OutOfMemoryError("at last")),
        ("break_down", "breakdown", "time_breakdown", MemoryError()),
        ("measure_items", "loader_costs", "item_costs", SystemExit("at last")),
        ("measure_activations", "activations", "activations", RuntimeError("at last")),
    ],
)
def test_a_stage_that_fails_leaves_a_remark_and_the_others_their_figures(
    stage: str, field: str, what: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after, stage, Mock(side_effect=error))
    scene = Scene()
    found = scene.after()
    reason = "no message" if isinstance(error, MemoryError) else "at last"
    assert found.notes == (extra_failed(stage=what, cause=f"{type(error).__name__}: {reason}"),)
    assert FIELDS - measured_fields(found) == {field}
    assert found.window == scene.measured.window


def test_a_compiled_model_is_not_looked_into() -> None:
    scene = Scene()
    scene.trainer.config = scene.trainer.config.model_copy(update={"compile": True})
    found = scene.after(Extras(activations=True, stretch_s=0.01))
    assert (found.activations, found.notes) == (None, ())


@pytest.mark.parametrize(("kind", "copies"), [("cpu", False), ("mps", False), ("cuda", True)])
def test_items_are_measured_for_the_ranks_and_the_device(
    kind: Any, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, waited = Scene(), Mock()
    measure_items = Mock(return_value=make_loader_costs())
    with_batch_rates = Mock()
    monkeypatch.setattr(after, "measure_items", measure_items)
    monkeypatch.setattr(after, "with_batch_rates", with_batch_rates)
    monkeypatch.setattr(torch.cpu, "synchronize", waited)
    scene.run.group = Group(local_size=3)
    scene.trainer.device = Device(torch.device("cpu"), kind)
    rate = Ceiling(samples_per_s=80.0, samples=80, seconds=1.0, batches=10)
    measured = scene.measured.model_copy(update={"ceilings": Ceilings(loader=rate)})
    after._measure_items(after._After(scene.run, ALL, measured, Path("/nowhere")))
    assert with_batch_rates.call_args.args[-1] == 3
    to_device = measure_items.call_args.kwargs["to_device"]
    assert (to_device is not None) == copies
    if copies:
        to_device([torch.zeros(2)])
        waited.assert_called_once_with(torch.device("cpu"))


def test_a_loader_that_fails_after_the_window_leaves_its_items_cost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = Scene()
    monkeypatch.setattr(TensorDataset, "__getitem__", Mock(side_effect=OSError("disk gone")))
    found = scene.after()
    stages = [note.figures["stage"] for note in found.notes]
    assert stages == [EVERYTHING[0], "batches", *EVERYTHING[1:]]
    assert found.notes[0].figures["cause"] == "OSError: disk gone"
    assert found.samples_per_s == scene.measured.samples_per_s
    assert "OSError: disk gone" in capfd.readouterr().err, "the log has the traceback"


def test_what_hangs_after_the_window_ends_the_process_with_its_stack_in_the_log_and_its_time_in_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ended, place = Event(), Place(TrialFolder(tmp_path), 0, 0)
    exit_now = Mock(side_effect=lambda _: ended.set())
    monkeypatch.setattr(os, "_exit", exit_now)
    measured = Scene().measured
    place.keep(RankReport(result=TrialResult(outcome="ok", measurement=measured)))
    begun = perf_counter()
    with ended_when_stuck(0.2, place.report):
        assert ended.wait(30)
    spent_s = perf_counter() - begun
    exit_now.assert_called_once_with(0)
    assert "test_extra_steps.py" in capfd.readouterr().err
    kept = read_model(place.report, RankReport).result.measurement
    assert kept is not None
    assert 0.2 <= kept.after_s <= spent_s
    assert kept.model_copy(update={"after_s": 0.0}) == measured


@pytest.mark.parametrize("written", [None, b"{}"])
def test_what_hangs_ends_the_process_whatever_became_of_the_report(
    written: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended, folder = Event(), TrialFolder(tmp_path)
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    if written is not None:
        folder.report.write_bytes(written)
    with ended_when_stuck(0.0, folder.report):
        assert ended.wait(30)


def test_curves_that_were_kept_are_a_report_of_their_own(tmp_path: Path) -> None:
    place = Place(TrialFolder(tmp_path), 0, 0)
    known = Curves(threads=3, notes=(curves_cut(),))
    place.keep(RankReport(result=TrialResult(outcome="ok"), curves=known))
    report = read_model(place.report, RankReport)
    assert (report.result.outcome, report.curves) == ("ok", known)


def test_long_steps_are_given_longer_before_they_are_taken_to_hang() -> None:
    config = TrainingConfig(grad_accum_steps=2)  # of batches of 0.1 s
    measured = make_measurement(window=make_window())
    assert longest_after_s(measured, config) == pytest.approx(60 + 70 * 2 * 0.1)


def test_what_ends_in_time_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "_exit", exit_now := Mock())
    before = active_count()
    with ended_when_stuck(60.0, TrialFolder(tmp_path).report):
        pass
    while active_count() > before:
        pass
    assert not exit_now.called


# The buckets in which gradients travel, as DDP joins them; measuring them is seen in
# tests/launch/test_groups.py.

MIB = 2**20


@pytest.mark.parametrize(
    ("ddp", "expected_mib"),
    [
        (None, [4, 28, 8]),  # torch's own: a small first one
        (DdpConfig(bucket_cap_mb=8), [8] * 5),  # a size that was given holds for the first too
        (DdpConfig(comm_hook="fp16"), [2, 14, 4]),  # halved on their way
        (DdpConfig(first_bucket_mb=20, bucket_cap_mb=8), [20, 8, 8, 4]),  # a first one of its own
    ],
)
def test_gradients_fill_buckets_from_the_last_layer_on(
    ddp: DdpConfig | None, expected_mib: list[int]
) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(10)])
    assert _bucket_bytes(trainer_of(model, ddp)) == [size * MIB for size in expected_mib]


def trainer_of(model: nn.Module, ddp: DdpConfig | None = None) -> Trainer:
    config = TrainingConfig(strategy="ddp", world_size=2, ddp=ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_trainer(
        model, optimizer, Step(lambda *_: torch.zeros(()), "none"), config, open_device("cpu")
    )


@dataclass(frozen=True)
class Meeting(Group):
    """One of two ranks that are threads."""

    told: dict[int, float] = field(default_factory=dict)
    """Answers of the ranks; both share one dictionary, for one question."""
    both: Barrier = field(default_factory=lambda: Barrier(2))

    def most(self, value: float) -> float:
        """Wait for the other's answer; the larger one."""
        self.told[self.rank] = value
        self.both.wait(timeout=60)
        return max(self.told.values())


def test_a_rank_without_memory_for_the_gradients_leaves_no_other_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = list[torch.Tensor]()
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, **_: begun.append(tensor))
    trainer, sizes = trainer_of(nn.Linear(1, 1)), {0: [4], 1: [4, 2**60]}
    first = Meeting(0, 2)
    groups = [first, Meeting(1, 2, told=first.told, both=first.both)]

    def exchange(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            _exchange_s(sizes[rank], trainer, groups[rank], 0.1)
        return str(raised.value.__cause__)

    with ThreadPoolExecutor(2) as ranks:
        ample, short = ranks.map(exchange, range(2))
    assert not begun
    assert "allocate memory" in short
    assert ample == "None"
