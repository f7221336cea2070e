"""Curves whose process does not outlive a setting go on in another one, and each setting is tried once."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import curves_cut, process_ended_at_point
from autotune.note import Note
from autotune.protocol.messages import RankReport
from tests.launch.conftest import GENEROUS_S, Rig

ALL = [{}, {"micro_batch_size": 2}, {"micro_batch_size": 8}, {"micro_batch_size": 16}]
LOST = "RuntimeError: CUDA error: an illegal memory access was encountered"
CUT = curves_cut()


def trace(rig: Rig, model: str, *, deadline_s: float = GENEROUS_S) -> RankReport:
    own = TrainingConfig(micro_batch_size=4)
    varied = [own.model_copy(update=changes) for changes in ({"num_workers": 1}, *ALL[1:])]
    return rig.runner(model=model).curves(own, varied, deadline_s=deadline_s, stretch_s=0.01)


def seen() -> dict[str, list[int]]:
    """Sizes of batches that each process has trained on, in order, each once."""
    found: dict[str, list[int]] = {}
    for line in Path("sizes").read_text().splitlines():
        pid, size = line.split()
        sizes = found.setdefault(pid, [])
        if int(size) not in sizes:
            sizes.append(int(size))
    return found


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("losing_the_device_at_8", LOST),
        pytest.param("dying_at_8", process_ended_at_point(), marks=pytest.mark.slow),
    ],
)
def test_what_a_process_does_not_outlive_is_left_with_its_reason_and_the_rest_is_measured_in_another(
    rig: Rig, model: str, reason: Note | str
) -> None:
    report = trace(rig, model)
    assert report.result.outcome == "ok", report.result.reason
    assert report.curves is not None
    assert [point.changes for point in report.curves.loader] == [{}, {"num_workers": 1}]
    device = {
        str(point.changes): (point.ceiling is not None, point.reason)
        for point in report.curves.device
    }
    assert {key: device[key] for key in map(str, ALL)} == {
        "{}": (True, ""),
        "{'micro_batch_size': 2}": (True, ""),
        "{'micro_batch_size': 8}": (False, reason),
        "{'micro_batch_size': 16}": (True, ""),
    }
    assert (report.curves.is_cut, report.curves.notes) == (False, ())
    assert list(seen().values()) == [[4, 2, 8], [16]]
    assert not rig.left_over()


@pytest.mark.slow
def test_after_a_third_process_that_ended_early_there_is_no_other(rig: Rig) -> None:
    report = trace(rig, "losing_the_device_at_any_other_size")
    assert report.curves is not None
    points = report.curves.device
    assert [point.changes for point in points] == ALL
    assert [point.reason for point in points] == ["", LOST, LOST, LOST]
    assert (report.curves.is_cut, report.curves.notes) == (True, (CUT,))
    assert [sizes[-1] for sizes in seen().values()] == [2, 8, 16]
    assert sorted(one.name for one in rig.folder.glob("curves*.log")) == [
        "curves-2.log",
        "curves-3.log",
        "curves.log",
    ]
