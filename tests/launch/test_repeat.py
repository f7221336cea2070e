"""Jobs that are run again; over real processes in test_curves.py and test_kernel_failures.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.launch.runner import go_on
from autotune.messages.trials import curves_cut, curves_ended, operators_not_counted
from autotune.note import Note
from autotune.protocol.messages import CurvesJob, RankReport
from autotune.records.result import Curves
from autotune.records.trial import TrialResult
from tests.factories import make_process


def dying(known: Curves | None) -> Curves:
    """All points are known, and the process does not outlive what comes after them."""
    return known or Curves(is_cut=True)


def getting_on(known: Curves | None) -> Curves:
    return Curves(is_cut=True, notes=(*(known.notes if known else ()), Note(code="one_more")))


def processes(measure: Callable[[Curves | None], Curves | None]) -> list[str]:
    """The logs' names of the processes that curves took."""
    names: list[str] = []

    def run(job: CurvesJob, suffix: str) -> RankReport:
        names.append(f"curves{suffix}")
        return RankReport(result=TrialResult(outcome="ok", wall_s=1.0), curves=measure(job.known))

    job = CurvesJob(process=make_process(Path()), payload=Path(), config=TrainingConfig())
    assert go_on(job, run).result.wall_s == len(names)
    return names


def test_a_process_that_adds_nothing_is_the_last() -> None:
    assert processes(dying) == ["curves", "curves-2"]
    assert processes(getting_on) == ["curves", "curves-2", "curves-3"]


def test_a_process_that_does_not_come_to_measuring_leaves_what_is_known() -> None:
    assert processes(lambda known: None if known else Curves(is_cut=True)) == ["curves", "curves-2"]
    assert processes(lambda _: None) == ["curves"]
    assert processes(lambda _: Curves()) == ["curves"]


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("reason", ["it hung", ""])
def test_why_the_last_process_ended_stands_with_curves_that_are_cut(
    reason: str, is_cut: bool
) -> None:
    cut, other = curves_cut(), operators_not_counted("no time was left")
    curves = Curves(is_cut=is_cut, notes=(cut, other) if is_cut else (other,))
    report = RankReport(
        result=TrialResult(outcome="timeout", reason=reason, wall_s=9.0), curves=curves
    )
    job = CurvesJob(process=make_process(Path()), payload=Path(), config=TrainingConfig())
    found = go_on(job, lambda _job, _name: report).curves
    assert found is not None
    assert {*found.notes} == {
        other,
        *([curves_ended(reason=reason)] if is_cut and reason else [cut] if is_cut else []),
    }
