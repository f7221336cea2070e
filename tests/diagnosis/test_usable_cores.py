"""Cores that a script can't use are a fault only if something narrowed them, or if loading needs more."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.usable_cores import cores_finding, cores_remedies
from autotune.records.result import Evidence
from autotune.records.watched_run import Modes
from tests.factories import make_evidence
from tests.factories.measurements import make_loader_costs
from tests.factories.watched_runs import make_watched

ALL: dict[str, Any] = {
    "process_cores": 8,
    "thread_cores": 8,
    "worker_cores": 8,
    "machine_cores": 8,
    "start_cores": 8,
}
LOADER_BOUND: dict[str, Any] = {
    "loader_ceiling": 1000.0,
    "device_ceiling": 10_000.0,
    "data_wait_fraction": 0.9,
    "loader_costs": make_loader_costs(1e-3),
}


def evidence_of(modes: dict[str, Any], **measured: Any) -> Evidence:
    """Return a job with four workers on a GPU, watched with these modes."""
    found = make_evidence(1000.0, config=TrainingConfig(num_workers=4), **measured)
    return found.model_copy(update={"watched": make_watched(modes=Modes(**ALL | modes))})


def found_in(modes: dict[str, Any], **measured: Any) -> tuple[str, float | None]:
    """Return the kind of the remedy and its gain; "" without one."""
    evidence = evidence_of(modes, **measured)
    advice = [*cores_remedies(evidence)]
    assert (cores_finding(evidence) is None) == (not advice)
    return (advice[0].kind, advice[0].expected_gain) if advice else ("", None)


def test_free_process() -> None:
    assert found_in({}, **LOADER_BOUND) == ("", None)


def test_script_that_binds_itself_and_its_workers() -> None:
    bound = {"process_cores": 1, "thread_cores": 1, "worker_cores": 1, "pinned_by": "train.py:3"}
    kind, gain = found_in(bound, **LOADER_BOUND)
    assert kind == "release_cores"
    # four workers instead of one at a time
    assert gain == pytest.approx(3.0, rel=0.3)
    finding = cores_finding(evidence_of(bound, **LOADER_BOUND))
    assert finding is not None
    assert finding.figures["pinned_by"] == "train.py:3"
    assert 0.6 < finding.share < 0.8


def test_no_gain_where_loading_does_not_lack_cores() -> None:
    bound = {"process_cores": 1, "thread_cores": 1, "worker_cores": 1}
    assert found_in(bound, data_wait_fraction=0.01) == ("release_cores", None)


def test_threads_bound_one_by_one_are_no_fault() -> None:
    assert found_in({"process_cores": 1, "thread_cores": 8}, **LOADER_BOUND) == ("", None)


def test_workers_inherit_the_core_of_a_bound_thread() -> None:
    bound = {
        "process_cores": 1,
        "thread_cores": 8,
        "worker_cores": 1,
        "pinned_by": "OMP_PROC_BIND=true",
    }
    finding = cores_finding(evidence_of(bound, **LOADER_BOUND))
    assert finding is not None
    assert finding.figures["num_workers"] == 4
    assert found_in(bound, **LOADER_BOUND)[0] == "release_cores"


def test_slurms_grant_that_the_step_did_not_get() -> None:
    bound = {
        "process_cores": 1,
        "thread_cores": 1,
        "worker_cores": 1,
        "start_cores": 1,
        "machine_cores": 64,
        "granted_cores": 16,
        "grant_source": "SLURM_CPUS_PER_TASK",
    }
    assert found_in(bound)[0] == "pass_slurm_grant"


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        ({"quota_cores": 1.5}, "quota"),
        ({"granted_cores": 2, "grant_source": "SLURM_CPUS_PER_TASK"}, "slurm"),
        (
            {"process_cores": 2, "thread_cores": 2, "worker_cores": 2, "start_cores": 2},
            "affinity",
        ),
    ],
)
def test_limits_matter_only_where_loading_needs_more(limit: dict[str, Any], named: str) -> None:
    (advice,) = cores_remedies(evidence_of(limit, **LOADER_BOUND))
    assert advice.kind == "ask_for_cores"
    assert advice.figures["limit"] == named
    assert advice.figures["wanted_cores"] == 8
    assert found_in(limit, data_wait_fraction=0.01) == ("", None)


@pytest.mark.parametrize("evidence", [make_evidence(), evidence_of({"process_cores": None})])
def test_unknown_cores_are_no_fault(evidence: Evidence) -> None:
    assert cores_finding(evidence) is None
    assert [*cores_remedies(evidence)] == []
