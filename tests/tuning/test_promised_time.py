"""What a search is said to take before its first trial, and what of it is left while it goes on."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NoReturn

import pytest

import autotune
from autotune.messages.units import format_duration
from autotune.records.result import Progress
from autotune.report.progress import make_progress
from autotune.testing import FakeLauncher
from autotune.tuning.loop import Search
from tests.factories.searches import make_search


class Shown(Exception):  # noqa: N818 - it is no error
    """Ends a search at what it shows first."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress


def before_the_first_trial(search: Search) -> Progress:
    """What is shown first by a search whose probe took two seconds."""

    def show(progress: Progress) -> NoReturn:
        raise Shown(progress)

    search.time.probe_s, search.show = 2.0, show
    with pytest.raises(Shown) as caught:
        search.run()
    return caught.value.progress


def promised_s(folder: Path, n_trials: int | None, timeout_s: float | None = None) -> float:
    search = make_search(folder, FakeLauncher(), n_trials=n_trials, timeout_s=timeout_s)
    told = before_the_first_trial(search).remaining_s
    assert told is not None
    assert search.promised_s == told
    return told


def test_a_baseline_alone_is_neither_looked_at_nor_compared(tmp_path: Path) -> None:
    alone, two = (promised_s(tmp_path, count) for count in (1, 2))
    assert alone < 10
    look_s, trial_s = 8.0, 2.0 + 2.5
    assert two == pytest.approx(alone + look_s + 1.1 * trial_s + 4 * trial_s), "four runs decide"


@pytest.mark.parametrize(
    ("n_trials", "timeout_s", "told_s"), [(None, 20.0, 20.0), (30, 20.0, 20.0), (1, 60.0, 6.0)]
)
def test_a_time_out_bounds_what_is_told_and_is_not_told_where_less_suffices(
    tmp_path: Path, n_trials: int | None, timeout_s: float, told_s: float
) -> None:
    assert promised_s(tmp_path, n_trials, timeout_s) == told_s


@pytest.mark.parametrize(
    ("n_trials", "line"),
    [(None, " 40 trials, "), (1, " 6.0 s.")],
)
def test_the_line_before_the_search_tells_trials_and_time(
    tmp_path: Path, n_trials: int | None, line: str
) -> None:
    search = make_search(tmp_path, FakeLauncher(), n_trials=n_trials)
    first, stderr = before_the_first_trial(search), StringIO()
    with redirect_stderr(stderr), make_progress(True) as show:
        show(first)
    assert line in stderr.getvalue()


def test_each_trial_takes_its_time_off_what_is_left(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher(), n_trials=4)
    search.proposer.has_model = False  # every trial runs to its end
    shown: list[Progress] = []
    search.show = shown.append
    search.run()
    *_, before, last = (
        one.remaining_s for one in shown if one.last is not None and not one.last.repeats
    )
    assert before is not None
    assert last is not None
    trial_s = search.study.records[-1].result.wall_s
    assert before - last == pytest.approx(1.1 * trial_s, rel=0.2)


def test_the_result_holds_what_was_told_before_it(tmp_path: Path) -> None:
    stderr = StringIO()
    with redirect_stderr(stderr):
        result = autotune.search(
            object, list, launcher=FakeLauncher(), n_trials=3, run_dir=tmp_path / "run"
        )
    told = result.summary.promised_s
    assert told is not None
    assert f" {format_duration(told)}." in stderr.getvalue()
