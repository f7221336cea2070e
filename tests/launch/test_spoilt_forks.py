"""A package that torch loads by itself may open a device first: forks can't then, and trials start otherwise.

The package is a real one, found by its entry point; it marks the forks as torch's own code would where there is CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.core.training_config import TrainingConfig
from autotune.launch.fork_server import ForkServerLauncher
from launch.conftest import GENEROUS_S, Rig, rig_over

PLUGIN = """
import os

def load():
    import torch
    os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


@pytest.fixture
def spoilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig over a fork server whose torch has loaded a package that opens the device."""
    packages = tmp_path / "packages"
    info = packages / "greedy_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "greedy_backend.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ngreedy = greedy_backend:load\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(tmp_path)
    launcher = ForkServerLauncher(tmp_path / "server.log")
    yield rig_over(launcher, tmp_path / "trials")
    launcher.close()


def test_forks_that_can_not_open_the_device_are_not_used_and_that_is_said_once(spoilt: Rig) -> None:
    runner = spoilt.runner()
    logs = []
    for name in ("first", "second"):
        runner.guard(TrainingConfig(micro_batch_size=4), name=name, deadline_s=GENEROUS_S)
        logs.append((spoilt.folder / f"{name}.log").read_text())
    (note,) = spoilt.launcher.notes
    assert note.startswith("Each trial starts an interpreter of its own, which takes some seconds: ")
    assert "can't open cuda here" in note
    assert [note in log for log in logs] == [True, False]
    assert spoilt.server_pid is None, "the server is of no use"
    spoilt.assert_next_trial_works()


def test_a_rank_that_was_forked_so_all_the_same_says_why_it_can_not_run(spoilt: Rig) -> None:
    report = spoilt.runner(model="forking_and_looking").probe(TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S)
    assert report.result.outcome == "ok", report.result.reason
    said = Path("note").read_text()
    assert said.startswith("a trial must be the first to open its device, but cuda had been opened before")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


def test_forks_that_can_open_every_device_are_used(rig: Rig) -> None:
    rig.assert_next_trial_works()
    assert rig.launcher.notes == ()
    assert rig.server_pid is not None
