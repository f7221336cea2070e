"""A package that torch loads by itself may open a device first: forks can't then, and trials start otherwise.

The package is a real one, found by its entry point; it marks the forks as torch's own code would where there is CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import notes_of
from autotune.launch.local import LocalLauncher
from tests.launch.conftest import GENEROUS_S, Rig, rig_over

PLUGIN = """
import os

def load():
    import torch
    os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
"""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What became of a look at a workload over each launcher."""

    spoilt: Rig
    """On a device that forks can't open."""
    on_cpu: Rig
    note: str


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looked]:
    """One for all rules: to start servers and interpreters takes seconds. torch loads a package that opens a device."""
    folder = tmp_path_factory.mktemp("spoilt")
    packages = folder / "packages"
    info = packages / "greedy_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "greedy_backend.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ngreedy = greedy_backend:load\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(packages)
        patch.chdir(folder)
        launchers = [LocalLauncher(folder / f"{name}.log", device=name) for name in ("cuda", "cpu")]
        spoilt, on_cpu = (
            rig_over(one, folder / name)
            for one, name in zip(launchers, ("spoilt", "cpu"), strict=True)
        )
        runner = spoilt.runner(model="forking_and_looking")
        report = runner.probe(TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S)
        assert report.result.outcome == "ok", report.result.reason
    yield Looked(spoilt=spoilt, on_cpu=on_cpu, note=(folder / "note").read_text())
    for one in launchers:
        one.close()


@pytest.mark.slow
def test_forks_that_can_not_open_the_device_are_not_used_and_that_is_said_once(
    looked: Looked,
) -> None:
    (note,) = notes_of(looked.spoilt.launcher)
    assert (note.code, note.figures) == ("forks_cannot_open_device", {"devices": "cuda"})
    assert looked.spoilt.server_pid is None, "the server is of no use"
    assert not looked.spoilt.left_over()


@pytest.mark.slow
def test_a_rank_that_was_forked_so_all_the_same_says_why_it_can_not_run(looked: Looked) -> None:
    assert "cuda" in looked.note
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in looked.note


@pytest.mark.slow
def test_trials_on_the_processor_are_forked_all_the_same(looked: Looked) -> None:
    looked.on_cpu.assert_next_trial_works()
    assert notes_of(looked.on_cpu.launcher) == ()
    assert looked.on_cpu.server_pid is not None


def test_forks_that_can_open_every_device_are_used(rig: Rig) -> None:
    rig.assert_next_trial_works()
    assert notes_of(rig.launcher) == ()
    assert rig.server_pid is not None
