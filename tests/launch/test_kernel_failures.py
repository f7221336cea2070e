"""A device's failure that is noticed late: its trial is run once more to find the place, within the same deadline."""

from __future__ import annotations

import os

import pytest

from autotune.config.training_config import TrainingConfig
from tests.launch.conftest import GENEROUS_S, Rig
from tests.launch.test_user_faults import marked_lines

ASSERTED = "RuntimeError: CUDA error: device-side assert triggered"


@pytest.fixture(autouse=True)
def _launches_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"):
        monkeypatch.delenv(name, raising=False)


def test_a_failure_that_is_noticed_late_gets_the_place_where_it_happens(rig: Rig) -> None:
    result = rig.run(model="failing_late")
    assert result.outcome == "crashed"
    assert result.failure is not None
    assert not result.failure.is_asynchronous
    assert result.failure.signature == "RuntimeError at user_code.py:{kernel}".format(
        **marked_lines()
    )
    assert result.log == f"{rig.folder.name}/trial-blocking.log"
    assert rig.log, "what the first run has said is kept"
    assert "CUDA_LAUNCH_BLOCKING" not in os.environ
    assert rig.run(model="failing_unless_launches_wait").outcome == "crashed", (
        "the next trial's launches do not wait"
    )


@pytest.mark.slow
def test_the_look_at_the_workload_is_placed_too(rig: Rig) -> None:
    report = rig.runner(model="failing_late").probe(
        TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S
    )
    assert report.result.failure is not None
    assert report.result.failure.signature == "RuntimeError at user_code.py:{kernel}".format(
        **marked_lines()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("failing_unless_launches_wait", ""),
        ("failing_otherwise_where_launches_wait", "MemoryError"),
    ],
)
def test_a_failure_that_does_not_come_again_stays_as_it_was_and_that_is_said(
    rig: Rig, model: str, named: str
) -> None:
    result = rig.run(model=model)
    assert (result.outcome, result.measurement) == ("crashed", None)
    assert result.reason.startswith(ASSERTED)
    assert len(result.reason) > len(ASSERTED)
    assert named in result.reason
    assert result.failure is not None
    assert result.failure.is_asynchronous
    assert result.log == f"{rig.folder.name}/trial.log"
