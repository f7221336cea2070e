"""A script's throughput by its lines of progress, and what other_scripts shows of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT
from benchmarks.measures.commands import Line, read_log, run_command, write_log
from benchmarks.measures.progress import read_pace
from benchmarks.other_scripts import SCRIPTS, row

RECORDED = ROOT / "benchmarks" / "results" / "other_scripts-nvidia-h200"
PATTERN = r"Epoch (?P<epoch>\d+): (?P<batch>\d+)/"


def printed(*seconds: float, epoch: int = 0) -> list[Line]:
    """A line of progress at each of these seconds, ten batches after the one before."""
    return [
        Line(at_s, "out", f"Epoch {epoch}: {10 * place}/100") for place, at_s in enumerate(seconds)
    ]


def test_the_stretch_that_an_epoch_begins_with_does_not_count() -> None:
    pace = read_pace([*printed(0.0, 1.0, 6.0, 11.0), *printed(30.0, 32.0, 37.0, epoch=1)], PATTERN)
    assert pace is not None
    assert (pace.batches, pace.seconds, pace.begun_s, pace.ended_s) == (30, 15.0, 1.0, 37.0)
    assert pace.batches_per_s == 2.0


def test_a_pause_does_not_count_and_an_uneven_loader_does() -> None:
    pace = read_pace(printed(0.0, 5.0, 10.0, 15.0, 35.0, 40.0, 54.0), PATTERN)
    assert pace is not None
    assert (pace.batches, pace.seconds) == (40, 29.0)


def test_epochs_need_not_be_named_and_other_lines_are_passed_over() -> None:
    lines = [
        Line(float(place), "out", text)
        for place, text in enumerate(["hello", "1 of 9", "2 of 9", "3 of 9"])
    ]
    pace = read_pace(lines, r"(?P<batch>\d+) of 9")
    assert pace is not None
    assert (pace.batches, pace.seconds) == (1, 1.0)


@pytest.mark.parametrize(
    "lines", [[], printed(0.0, 1.0), [*printed(0.0, 1.0), *printed(2.0, 3.0, epoch=1)]]
)
def test_too_few_lines_show_no_pace(lines: list[Line]) -> None:
    assert read_pace(lines, PATTERN) is None


@pytest.mark.parametrize("name", ["imagenet", "mingpt"])
@pytest.mark.parametrize("what", ["plain", "apply"])
def test_the_recorded_throughput_is_what_its_log_shows(name: str, what: str) -> None:
    found = json.loads(RECORDED.with_suffix(".json").read_text())["results"][name][what]
    pace = read_pace(read_log(RECORDED / f"{name}-{what}.log"), SCRIPTS[name].progress)
    assert pace is not None
    assert found["samples_per_s"] == pytest.approx(found["batch"] * pace.batches_per_s)
    assert (found["batches"], found["over_s"]) == (pace.batches, pytest.approx(pace.seconds))


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines = [Line(0.25, "out", "  Epoch 0"), Line(1.5, "err", ""), Line(12.0, "err", "error: no")]
    write_log(tmp_path / "one.log", lines)
    assert read_log(tmp_path / "one.log") == lines


def test_a_commands_lines_are_kept_by_stream(tmp_path: Path) -> None:
    code = "import sys; print('one\\rtwo'); print('three', file=sys.stderr); sys.exit(3)"
    ran = run_command([sys.executable, "-c", code], folder=tmp_path, environment={}, within_s=60.0)
    assert (ran.code, ran.texts("out"), ran.texts("err")) == (3, ["one", "two"], ["three"])


def test_a_command_that_runs_on_is_ended(tmp_path: Path) -> None:
    assert run_command(["sleep", "600"], folder=tmp_path, environment={}, within_s=0.0).code is None


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"code": None, "samples_per_s": 2514.3}, ["mingpt plain", "None", "2,514", "", ""]),
        ({"code": None, "samples_per_s": None}, ["mingpt plain", "None", "", "", ""]),
        (
            {"code": 0, "said": [[60.0, "Launch-bound."]]},
            ["mingpt plain", "0", "", "60.0", "Launch-bound."],
        ),
        ({"error": "nothing was recommended"}, ["mingpt plain", "None", "", "", ""]),
    ],
    ids=["trained", "no progress", "answered", "not tried"],
)
def test_the_table_has_what_each_command_gave(
    found: dict[str, object], expected: list[str]
) -> None:
    assert row("mingpt", "plain", found) == expected
