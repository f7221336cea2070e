"""What was learned of the spread is there for the next search on the machine, and nothing breaks where it can't be."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.files.spread_cache import known_spread, remember_spread
from autotune.records.run_spread import RunSpread

LEARNED = RunSpread(sd=0.03, degrees_of_freedom=90.0, source="workload")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "autotune" / "spread"


def test_a_workload_begins_with_its_own_spread_of_limited_weight() -> None:
    remember_spread("machine", "workload", LEARNED)
    known = known_spread("machine", "workload", "cpu")
    assert (known.sd, known.source) == (0.03, "workload")
    assert known.degrees_of_freedom == 20.0


def test_another_workload_begins_with_that_of_the_machine() -> None:
    remember_spread("machine", "one", RunSpread(sd=0.01, degrees_of_freedom=9.0, source="workload"))
    remember_spread("machine", "two", RunSpread(sd=0.04, degrees_of_freedom=9.0, source="workload"))
    known = known_spread("machine", "three", "cpu")
    assert known.sd == pytest.approx(0.02)
    assert known.source == "machine"
    assert known_spread("another machine", "one", "cpu") == assumed_spread("cpu")


def test_the_latest_of_a_workload_counts() -> None:
    remember_spread("machine", "workload", LEARNED)
    remember_spread("machine", "workload", LEARNED.model_copy(update={"sd": 0.05}))
    assert known_spread("machine", "workload", "cpu").sd == 0.05


def test_a_file_that_is_cut_or_lies_counts_as_none(cache: Path) -> None:
    remember_spread("machine", "workload", LEARNED)
    (file,) = cache.iterdir()
    for text in (
        file.read_text()[:20],
        '{"version": 9}',
        '{"workloads": {"workload": {"sd": -1, "degrees_of_freedom": 1}}}',
        '{"workloads": {"workload": {"sd": 1e300, "degrees_of_freedom": 1}}}',
        '{"workloads": {"workload": {"sd": 0.1, "degrees_of_freedom": Infinity}}}',
    ):
        file.write_text(text)
        assert known_spread("machine", "workload", "cpu") == assumed_spread("cpu")


def test_only_the_user_may_read_it(cache: Path) -> None:
    remember_spread("machine", "workload", LEARNED)
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "autotune").write_text("a file stands where the folder should be")
    remember_spread("machine", "workload", LEARNED)
    assert known_spread("machine", "workload", "cpu") == assumed_spread("cpu")


def test_a_hundred_workloads_are_kept() -> None:
    for number in range(103):
        remember_spread("machine", f"workload {number}", LEARNED)
    assert known_spread("machine", "workload 0", "cpu").source == "machine"
    assert known_spread("machine", "workload 102", "cpu").source == "workload"


def of_two_kinds(host: RunSpread, device: RunSpread) -> RunSpread:
    return host.model_copy(update={"device": device})


def test_each_kind_of_runs_is_carried_by_itself() -> None:
    assumed = assumed_spread("cuda")
    assert assumed.device is not None
    host = RunSpread(sd=0.12, degrees_of_freedom=9.0, source="workload")
    steady = RunSpread(sd=0.001, degrees_of_freedom=9.0, source="workload")
    remember_spread("machine", "loader", of_two_kinds(host, assumed.device))
    remember_spread("machine", "model", of_two_kinds(assumed, steady))
    own = known_spread("machine", "loader", "cuda")
    assert own.device is not None
    assert (own.sd, own.source) == (0.12, "workload")
    assert own.device.sd == pytest.approx(0.001)
    assert own.device.source == "machine"
    new = known_spread("machine", "new", "cuda")
    assert new.device is not None
    assert [new.sd, new.device.sd] == pytest.approx([0.12, 0.001])


def test_what_an_accelerator_taught_before_kinds_were_told_apart_is_not_used() -> None:
    remember_spread("machine", "workload", LEARNED)
    assert known_spread("machine", "workload", "cuda") == assumed_spread("cuda")
