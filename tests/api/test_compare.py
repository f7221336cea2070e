"""`autotune compare` of two run folders, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autotune.cli import cli
from autotune.files.run_folder import RunFolder
from autotune.records.result import RunSummary
from autotune.report.comparison import Comparison
from tests.factories import FAST, make_measurement, make_summary, make_trial, make_trials, run_again


def folder(path: Path, summary: RunSummary) -> str:
    found = RunFolder(path)
    found.path.mkdir()
    found.write_summary(summary)
    return str(path)


def slower() -> RunSummary:
    own, _, *others = make_trials()
    fast = run_again(
        make_trial(1, FAST, measurement=make_measurement(9000.0, gib=9.4)), 8910.0, 9090.0
    )
    return make_summary(trials=(own, fast, *others))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *arguments], prog_name="autotune")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    return folder(tmp_path / "a", make_summary()), folder(tmp_path / "b", slower())


def test_compare_exit_code(
    folders: tuple[str, str],
) -> None:
    first, second = folders
    assert [call(*folders).exit_code, call(*folders, "--exit-code").exit_code] == [0, 4]
    assert [
        call(first, first, "--exit-code").exit_code,
        call(second, second, "--exit-code").exit_code,
    ] == [0, 0]
    assert "0.73" in call(*folders).stdout


def test_the_document_can_be_read_back(folders: tuple[str, str]) -> None:
    result = call(*folders, "--json", "--exit-code")
    assert result.exit_code == 4
    found = Comparison.model_validate(json.loads(result.stdout))
    assert found.names == folders
    assert found.is_beyond_noise


def test_a_folder_without_a_finished_search_is_an_error(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    result = call(folders[0], str(tmp_path / "none"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(tmp_path / "none") in result.stderr
