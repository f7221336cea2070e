"""A script that breaks under a setting loses that setting, not the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.errors import RepeatedFailureError
from autotune.messages.search import setting_left_out
from autotune.note import Note
from autotune.records.trial import Failure, TrialRecord, TrialResult
from autotune.testing import FakeLauncher, fake_facts
from tests.factories import make_script
from tests.factories.searches import make_search

SIZES = (32, 64, 128)
FAILURE = Failure(signature="ValueError at train.py:3", traceback="ValueError: sixteen alone")


def learned(
    tmp_path: Path,
    *changes: dict[str, Any],
    script: bool = True,
    succeeded: dict[str, Any] | None = None,
) -> list[Note]:
    """What is learned of trials that fail in configurations which differ from the baseline."""
    found = make_script() if script else None
    baseline = TrainingConfig(micro_batch_size=16)
    launcher = FakeLauncher(facts=replace_script(found))
    search = make_search(
        tmp_path,
        launcher,
        n_trials=1,
        baseline=baseline,
        micro_batch_size=[16, *SIZES],
        num_workers=[0, 1, 2, 4],
    )
    search.run()
    if succeeded is not None:
        (own,) = search.study.records
        config = own.config.model_copy(update=succeeded)
        other = own.model_copy(update={"number": 99, "config": config})
        search.study.keep(other)
    told: list[Note] = []
    for number, change in enumerate(changes, 1):
        config = TrainingConfig.model_validate(baseline.model_dump() | change)
        result = TrialResult(outcome="crashed", reason="ValueError: sixteen alone", failure=FAILURE)
        told += search.failures.learn(
            TrialRecord(number=number, config=config, results=(result,)), search.study
        )
    return told


def replace_script(script: Any) -> Any:
    """The fake launcher's facts, of a script."""
    return fake_facts().model_copy(update={"script": script})


def left_out(setting: str, values: list[str]) -> Note:
    """The note of it."""
    return setting_left_out(
        setting=setting, values=values, failures=3, reason="ValueError: sixteen alone"
    )


def test_a_script_that_fails_with_every_larger_batch_loses_these_batches(tmp_path: Path) -> None:
    failed = ({"micro_batch_size": size} for size in SIZES)
    assert learned(tmp_path, *failed) == [left_out("micro_batch_size", ["128", "32", "64"])]


def test_what_all_failures_change_is_to_blame_whatever_else_they_change(tmp_path: Path) -> None:
    failed = (
        {"micro_batch_size": size, "num_workers": count}
        for size, count in zip(SIZES, (0, 1, 2), strict=True)
    )
    assert learned(tmp_path, *failed) == [left_out("micro_batch_size", ["128", "32", "64"])]


def test_a_failure_of_what_was_left_out_is_no_news(tmp_path: Path) -> None:
    failed = [{"micro_batch_size": size} for size in (*SIZES, *SIZES)]
    assert len(learned(tmp_path, *failed)) == 1


def test_values_that_have_succeeded_are_not_to_blame(tmp_path: Path) -> None:
    failed = [
        {"micro_batch_size": size, "num_workers": count}
        for size, count in zip(SIZES, (2, 4, 2), strict=True)
    ]
    told = learned(tmp_path, *failed, succeeded={"micro_batch_size": 64})
    assert told == [left_out("num_workers", ["2", "4"])]


def test_a_loader_setting_in_which_all_differ_is_left_out_too(tmp_path: Path) -> None:
    failed = [{"pin_memory": True, "micro_batch_size": size} for size in (16, 32, 64)]
    assert learned(tmp_path, *failed) == [left_out("pin_memory", ["True"])]


def test_failures_in_which_nothing_is_changed_throughout_end_the_search(tmp_path: Path) -> None:
    failed = ({"micro_batch_size": 32}, {"num_workers": 1}, {"pin_memory": True})
    with pytest.raises(RepeatedFailureError, match="3 configurations"):
        learned(tmp_path, *failed)


def test_a_workload_that_fails_in_several_batches_is_broken(tmp_path: Path) -> None:
    failed = ({"micro_batch_size": size} for size in SIZES)
    with pytest.raises(RepeatedFailureError):
        learned(tmp_path, *failed, script=False)
