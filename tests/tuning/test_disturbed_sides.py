"""Sides that other processes slowed: noticed, measured again, once, and believed then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import Exit, Launch
from autotune.protocol.messages import CurvesJob, read_job
from autotune.testing import FakeLauncher, FakeTrial
from autotune.tuning.loop import Search
from tests.factories.searches import make_search
from tests.tuning.guided import LIMIT, SMALL, curves_of, slow_device

FEW: dict[str, Any] = {**SMALL, "amp_dtype": "float32", "num_workers": [0, 2, 4]}


@dataclass(slots=True)
class DisturbedLauncher(FakeLauncher):
    """Other processes slow the device to a sixteenth while it is measured alone for the first time, or each time."""

    is_lasting: bool = False

    def launch(self, launch: Launch) -> Exit:
        """Answer curves with a slowed device."""
        is_look = isinstance(read_job(launch.folder.job), CurvesJob)
        if not is_look or (not self.is_lasting and any(job.kind == "curves" for job in self.jobs)):
            return FakeLauncher.launch(self, launch)
        usual = self.cost

        def slowed(config: TrainingConfig) -> FakeTrial:
            trial = usual(config)
            assert trial.device_ceiling is not None
            return replace(trial, device_ceiling=trial.device_ceiling / 16)

        self.cost = slowed
        exit_ = FakeLauncher.launch(self, launch)
        self.cost = usual
        return exit_


def searched(folder: Path, *, is_lasting: bool = False) -> Search:
    launcher = DisturbedLauncher(slow_device, is_lasting=is_lasting)
    search = make_search(folder, launcher, n_trials=8, limit_bytes=LIMIT, **FEW)
    search.run()
    return search


def test_device_that_a_trial_exceeds_is_measured_again(tmp_path: Path) -> None:
    search = searched(tmp_path)
    first, again = curves_of(search)
    assert len(again.variations) < len(first.variations)
    baseline = search.space.baseline
    assert baseline not in again.variations, "its own trial contradicts it, a third needs no time"
    for config in (*again.variations, baseline):
        ceiling = search.ceilings.ceiling_of("device", config)
        assert ceiling is not None
        assert ceiling.samples_per_s == slow_device(config).device_ceiling
    for run in [run for record in search.study.records for run in record.runs]:
        assert run.device_ceiling is None or run.samples_per_s_ci[0] <= 1.05 * run.device_ceiling


def test_where_others_stay_a_side_is_not_measured_a_third_time(tmp_path: Path) -> None:
    search = searched(tmp_path, is_lasting=True)
    assert len(curves_of(search)) == 2
