"""A run folder with one file damaged: what reads it names the file, or goes on with what is whole and says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.api.export import export_run
from autotune.errors import ConfigError, RunFolderError
from autotune.files.run_folder import RunFolder, open_run_folder, read_summary
from autotune.report.wording import say
from autotune.testing import FakeLauncher
from benchmarks.measures.endurance.damage_kinds import DAMAGES, OPENED
from tests.factories.searches import NARROW

ARGUMENTS: dict[str, Any] = {"space": NARROW, "n_trials": 3, "method": "random", "progress": False}
TRAPS = ("folder", "dangling link", "link outside", "link to itself", "endless device", "fifo", "socket")
SPOILT = ("cut to 70%", "other text", "noise", "deep", "pickle", "other version")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that nobody changes."""
    path = tmp_path_factory.mktemp("search") / "run"
    search(path)
    return path


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """A copy of the run in which a file is damaged; what lies outside of the folder must be as before."""
    outside, run_dir = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    before: dict[str, bytes] = {}

    def damage(name: str, how: str) -> Path:
        shutil.copytree(whole, run_dir)
        DAMAGES[how](run_dir / name, outside)
        before.update(seen(outside))
        return run_dir

    yield damage
    assert seen(outside) == before
    assert not (outside / OPENED).exists()


def search(run_dir: Path) -> autotune.SearchResult:
    return autotune.search(object, list, launcher=FakeLauncher(), run_dir=run_dir, **ARGUMENTS)


def seen(outside: Path) -> dict[str, bytes]:
    return {str(path.relative_to(outside)): path.read_bytes() for path in outside.rglob("*") if path.is_file()}


def notes_of(result: autotune.SearchResult) -> list[str]:
    return [say(each) for each in result.summary.notes if each.code in {"file_damaged", "trials_lost"}]


@pytest.mark.parametrize("how", TRAPS)
@pytest.mark.parametrize("name", ["summary.json", "trials.jsonl"])
def test_a_report_reads_ordinary_files_of_its_folder_alone(
    name: str, how: str, damaged: Callable[[str, str], Path]
) -> None:
    with pytest.raises(ConfigError, match=f"must hold {name} as a file that can be read, but .*{name}: is "):
        read_summary(damaged(name, how))


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("name", ["summary.json", "trials.jsonl"])
def test_a_report_names_the_file_that_is_damaged(name: str, how: str, damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=rf"must be a run folder of this version of autotune, but .*{name}") as caught:
        read_summary(damaged(name, how))
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_trials_that_a_summary_speaks_of_must_be_there(damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"trials\.jsonl lacks trial 0, which summary\.json speaks of; run the same"):
        read_summary(damaged("trials.jsonl", "emptied"))


def test_a_gigabyte_of_nothing_is_not_read(damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"summary\.json: is larger than 512 MiB"):
        read_summary(damaged("summary.json", "sparse"))


@pytest.mark.parametrize("how", TRAPS)
@pytest.mark.parametrize(
    "name",
    [
        *("study.db", "study.db-wal", "trials.jsonl", "summary.json", "curves.json", "recommended.yaml"),
        *("report.md", "report.html", "environment.json", "logs/trial-000.log", ".lock"),
    ],
)
def test_a_search_opens_no_folder_in_which_a_file_is_a_trap(
    name: str, how: str, damaged: Callable[[str, str], Path]
) -> None:
    run_dir = damaged(name, how)
    with (
        pytest.raises(RunFolderError, match=r"must be an ordinary file of the run folder's own, but it is .*; move"),
        open_run_folder(run_dir, fresh=False),
    ):
        pass


@pytest.mark.parametrize("how", ["other text", "link outside", "fifo"])
@pytest.mark.parametrize("name", ["logs", "payload", "scratch"])
def test_what_is_no_folder_is_not_written_through_and_fresh_clears_it(
    name: str, how: str, damaged: Callable[[str, str], Path]
) -> None:
    run_dir = damaged(name, how)
    with (
        pytest.raises(RunFolderError, match=f"{name} must be a folder of .* move it"),
        open_run_folder(run_dir, fresh=False),
    ):
        pass
    with open_run_folder(run_dir, fresh=True) as folder:
        assert folder.logs.is_dir()
        assert not folder.logs.is_symlink()
        assert not (run_dir / "payload").is_symlink()


@pytest.mark.parametrize("name", ["study.db", "study.db-wal", "trials.jsonl", "report.html", "logs/trial-000.log"])
def test_fresh_takes_links_away_and_leaves_what_they_lead_to(name: str, damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged(name, "link outside")
    with open_run_folder(run_dir, fresh=True):
        assert not (run_dir / name).is_symlink()


@pytest.mark.parametrize("how", ["fifo", "link outside", "folder"])
@pytest.mark.parametrize("name", ["study.db", "study.db-wal"])
def test_a_run_is_not_opened_by_a_study_that_is_a_trap(
    name: str, how: str, damaged: Callable[[str, str], Path]
) -> None:
    with pytest.raises(RunFolderError, match=f"{name} must be an ordinary file"):
        autotune.open_run(damaged(name, how))


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_study_is_told_by_both_that_need_it(how: str, damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged("study.db", how)
    for use in (autotune.open_run, search):
        with pytest.raises(RunFolderError, match=r"the study .*study\.db must be a SQLite file"):
            use(run_dir)


@pytest.mark.parametrize("how", ["emptied", "other text", "other version"])
def test_a_search_that_is_over_mends_its_trials_from_the_study_and_says_so(
    how: str, whole: Path, damaged: Callable[[str, str], Path]
) -> None:
    result = search(run_dir := damaged("trials.jsonl", how))
    (told,) = notes_of(result)
    assert told.startswith("trials.jsonl in the run folder was damaged; what it told is taken from the study")
    assert (run_dir / "trials.jsonl").read_bytes() == (whole / "trials.jsonl").read_bytes()
    assert notes_of(search(run_dir)) == []


def test_a_search_whose_summary_is_damaged_goes_on_and_says_so(damaged: Callable[[str, str], Path]) -> None:
    result = search(damaged("summary.json", "noise"))
    (told,) = notes_of(result)
    assert told.startswith("summary.json in the run folder was damaged; what it told is taken from the study, or")
    assert len(result.trials) == 3


def test_trials_that_are_lost_with_the_study_are_told(damaged: Callable[[str, str], Path]) -> None:
    run_dir = damaged("study.db", "emptied")
    (run_dir / "study.db-wal").unlink(missing_ok=True)
    lost = (run_dir / "trials.jsonl").read_bytes()
    (told,) = notes_of(search(run_dir))
    assert told.startswith("study.db in the run folder does not hold 3 of the trials that trials.jsonl tells of: they")
    assert (run_dir / "trials.lost.jsonl").read_bytes() == lost


def test_damaged_curves_are_measured_anew_and_told(damaged: Callable[[str, str], Path]) -> None:
    folder = RunFolder(damaged("curves.json", "noise"))
    found = folder.read_curves()
    assert found is not None
    assert found.code == "file_damaged"  # type: ignore[union-attr]
    folder.curves.unlink()
    assert folder.read_curves() is None


@pytest.mark.parametrize("how", ["link outside", "fifo", "endless device", "folder"])
def test_an_export_of_a_folder_takes_its_own_file_alone(how: str, damaged: Callable[[str, str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"recommended\.yaml: must be an ordinary file of the run folder's own"):
        export_run(damaged("recommended.yaml", how), "hf")


def test_an_export_says_that_a_damaged_summary_could_not_name_the_optimizer(
    damaged: Callable[[str, str], Path],
) -> None:
    with pytest.warns(UserWarning, match=r"^Exported without the name of your optimizer.*summary\.json"):
        export_run(damaged("summary.json", "noise"), "hf")
