"""Checkpoints, validation, logging and collections: what is worth changing, and its gain of the run."""

from __future__ import annotations

import pytest

from autotune.diagnosis.parts import findings_of_parts, notes_on_parts, remedies_of_parts
from autotune.diagnosis.run_shares import run_shares
from autotune.records.result import Advice
from autotune.records.watched_run import Recurring, RunPart, Startup, WatchedRun

STARTUP = Startup(before_loader_s=0.0, first_batch_s=0.0, first_step_s=0.0)


def recurring(
    part: RunPart, what: str, *, every: int, each_s: float, steps: int = 100, **more: object
) -> Recurring:
    at_steps = tuple(range(every, steps + 1, every))
    return Recurring.model_validate(
        {
            "part": part,
            "what": what,
            "place": "train.py:41",
            "at_steps": at_steps,
            "seconds": (each_s,) * len(at_steps),
            "count": len(at_steps),
            "total_s": each_s * len(at_steps),
            **more,
        }
    )


def run(*kinds: Recurring, step_s: float = 0.01, steps: int = 100) -> WatchedRun:
    parts_s: dict[RunPart, float] = {"forward": steps * step_s}
    for kind in kinds:
        parts_s[kind.part] = parts_s.get(kind.part, 0.0) + kind.total_s
    return WatchedRun(
        startup=STARTUP,
        steps=steps,
        watched_s=sum(parts_s.values()),
        parts_s=parts_s,
        recurring=kinds,
    )


def remedies(watched: WatchedRun) -> list[Advice]:
    return list(remedies_of_parts(watched, run_shares(watched, None, "cpu")))


def test_frequent_checkpoints_are_a_fault_with_the_gain_of_the_run() -> None:
    save = recurring("checkpoint", "torch.save", every=5, each_s=0.05, written_bytes=20 << 20)
    (piece,) = remedies(run(save))
    assert piece.kind == "save_less_often"
    assert piece.is_fault
    assert piece.against == "checkpoint"
    assert piece.place == "train.py:41"
    assert piece.expected_samples_per_s is None
    # Half of the run saves; a tenth of that leaves 55 % of the time.
    assert piece.expected_gain == pytest.approx(1 / 0.55 - 1)
    assert piece.gain_interval is not None
    assert piece.gain_interval.value == piece.expected_gain
    assert piece.gain_interval.low <= piece.gain_interval.value <= piece.gain_interval.high
    assert piece.figures["steps"] == 50
    assert piece.figures["each_bytes"] == 1 << 20


def test_what_always_comes_together_is_one_checkpoint() -> None:
    save = recurring("checkpoint", "torch.save", every=5, each_s=0.05)
    sync = recurring("checkpoint", "os.fsync", every=5, each_s=0.02, place="train.py:43")
    (piece,) = remedies(run(save, sync))
    assert piece.figures["what"] == "torch.save"
    assert piece.figures["each_s"] == pytest.approx(0.07)


def test_work_that_takes_little_is_left_alone() -> None:
    save = recurring("checkpoint", "torch.save", every=50, each_s=0.005)
    assert not remedies(run(save))
    watched = run(save)
    (finding,) = findings_of_parts(watched, run_shares(watched, None, "cpu"))
    assert finding.bottleneck == "checkpoint"
    assert finding.share < 0.02


def test_no_recurring_work_has_no_remedy() -> None:
    assert not remedies(run())


@pytest.mark.parametrize(
    ("part", "what", "kind"),
    [
        ("checkpoint", "torch.distributed.checkpoint.async_save", "save_less_often"),
        ("validation", "TensorDataset", "validate_less"),
        ("logging", "print", "log_less_often"),
        ("collection", "gc.collect", "collect_less_often"),
        ("collection", "torch.cuda.empty_cache", "keep_cache"),
        ("collection", "garbage collection, generation 2", "freeze_objects"),
    ],
)
def test_each_kind_of_work_has_its_remedy(part: RunPart, what: str, kind: str) -> None:
    (piece,) = remedies(run(recurring(part, what, every=20, each_s=0.1)))
    assert piece.kind == kind
    assert piece.against == part


def test_work_of_every_step_has_a_remedy_too() -> None:
    (piece,) = remedies(
        run(recurring("logging", "SummaryWriter.add_histogram", every=1, each_s=0.01))
    )
    assert piece.figures["has_histograms"] is True
    assert piece.figures["period"] == "every step"
    assert piece.figures["steps"] == 10


def test_work_seen_once_has_no_period_to_advise() -> None:
    save = recurring("checkpoint", "torch.save", every=60, each_s=0.8)
    (piece,) = remedies(run(save))
    assert piece.figures["steps"] is None
    assert piece.gain_interval is not None
    assert piece.gain_interval.low < piece.gain_interval.high


def test_muted_trackers_and_cheaper_writes_are_named() -> None:
    muted = recurring(
        "logging", "comet_ml.BaseExperiment.log_metric", every=1, each_s=0.0, is_muted=True
    )
    watched = run(muted).model_copy(update={"written_elsewhere": ("/data/last.pt",)})
    notes = list(notes_on_parts(watched))
    assert [note.code for note in notes] == ["tracker_not_timed", "written_elsewhere"]
    assert notes[0].figures["calls_per_step"] == 1
