"""A search whose trials somebody stops: the report says which, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autotune.launch.launcher import Exit, Launch
from autotune.messages.trials import rerun_after_signal, window_stopped
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import RankReport
from autotune.testing import FakeLauncher
from tests.factories.searches import fake_search

STOPPED = window_stopped()


@dataclass(slots=True)
class StoppingLauncher(FakeLauncher):
    """Its windows are stopped in some trials."""

    stopped: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    def launch(self, launch: Launch) -> Exit:
        self.names.append(launch.log.stem)
        exit_ = FakeLauncher.launch(self, launch)
        report = read_model(launch.folder.report, RankReport)
        if launch.log.stem in self.stopped and report.result.measurement is not None:
            measurement = report.result.measurement.model_copy(update={"notes": (STOPPED,)})
            write_model(launch.folder.report, report.with_result(measurement=measurement))
        return exit_


def test_stopped_window_is_measured_again(
    tmp_path: Path,
) -> None:
    launcher = StoppingLauncher(stopped={"trial-000", "trial-002", "trial-002-rerun"})
    result = fake_search(tmp_path, n_trials=4, launcher=launcher)
    assert [name for name in launcher.names if name.endswith("-rerun")] == [
        "trial-000-rerun",
        "trial-002-rerun",
    ]
    told = [known.figures for known in result.summary.notes if known.code == "trial_disturbed"]
    anew = rerun_after_signal(why="stopped")
    assert [(figures["number"], figures["note"]["code"]) for figures in told] == [  # type: ignore[index,call-overload]
        (0, anew.code),
        (2, STOPPED.code),
        (2, anew.code),
    ]
    assert STOPPED.text in result.report().replace("\\", "")
