"""A restart's gain is that of the whole run; a first start matters by itself only if it is long."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.plan import WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.worker_starts import (
    restart_finding,
    restart_of,
    slow_start,
    start_remedies,
)
from autotune.messages.space import setting_unreached
from autotune.records.result import Evidence
from autotune.records.watched_run import WorkerStart
from tests.factories import make_evidence, make_facts, make_script
from tests.factories.watched_runs import make_start, make_watched

SPAWN: dict[str, Any] = {
    "method": "spawn",
    "start_s": 4.5,
    "pickle_s": 1.0,
    "pickled_bytes": 41 * 2**20,
}


BY_EPOCH = make_facts(
    script=make_script(
        unreached=(
            setting_unreached(
                setting="persistent_workers", reason="data_by_epoch", has_placeholder=False
            ),
        )
    )
)
"""A script that changes its dataset each epoch, so that its workers cannot stay."""


def evidence_of(
    *starts: WorkerStart,
    persistent: bool = False,
    facts: WorkloadFacts | None = None,
    **watched: Any,
) -> Evidence:
    """Return a job with epochs of 5 s after their restart, in batches of 0.1 s."""
    found = make_evidence(
        facts=facts,
        config=TrainingConfig(num_workers=2, persistent_workers=persistent, micro_batch_size=10),
        loader_costs=None,
    )
    run = make_watched(worker_starts=starts, **watched)
    return found.model_copy(update={"watched": run})


def test_gain_is_of_an_epoch_with_its_restart() -> None:
    evidence = evidence_of(make_start(5.0))
    finding = restart_finding(evidence)
    assert finding is not None
    assert finding.share == pytest.approx(0.5)
    first = next(start_remedies(evidence))
    assert first.kind == "keep_workers"
    assert first.settings == {"persistent_workers": True}
    assert first.expected_gain == pytest.approx(1.0)


def test_first_start_counts_only_without_others() -> None:
    found = restart_of(evidence_of(make_start(9.0), make_start(2.0), make_start(3.0)))
    assert found is not None
    assert found.restart_s == pytest.approx(2.5)


def test_seconds_of_restarts_are_no_part_of_a_batch() -> None:
    found = restart_of(
        evidence_of(make_start(5.0), watched_s=15.0, parts_s={"forward": 10.0, "restart": 5.0})
    )
    assert found is not None
    assert found.epoch_s == pytest.approx(10.0)


def test_interval_narrows_with_starts() -> None:
    few = next(start_remedies(evidence_of(make_start(2.0))))
    many = next(start_remedies(evidence_of(make_start(9.0), *[make_start(2.0)] * 5)))
    assert few.figures["gain_low"] < few.expected_gain < few.figures["gain_high"]  # type: ignore[operator]
    assert many.figures["gain_low"] == pytest.approx(many.figures["gain_high"])


def test_spawned_workers_also_pickle_less() -> None:
    found = [*start_remedies(evidence_of(make_start(5.0, **SPAWN), facts=BY_EPOCH))]
    assert [one.kind for one in found] == ["keep_workers", "pickle_less"]
    # two workers, a second each, of an epoch of 10 s
    assert found[1].expected_gain == pytest.approx(0.25)


def test_workers_that_stay_save_what_shorter_starts_would() -> None:
    kept, less = start_remedies(evidence_of(make_start(5.0, **SPAWN)))
    assert kept.expected_gain == pytest.approx(1.0)
    assert less.expected_gain is None


def test_workers_that_prepare_long() -> None:
    found = [*start_remedies(evidence_of(make_start(2.0)))]
    assert [one.kind for one in found] == ["keep_workers", "prepare_workers_less"]
    assert found[1].figures["prepare_s"] == pytest.approx(1.95)


def test_long_epochs_hardly_gain() -> None:
    first = next(start_remedies(evidence_of(make_start(2.0), epoch_batches=100_000)))
    assert first.expected_gain is not None
    assert first.expected_gain < 0.001


@pytest.mark.parametrize(
    "evidence",
    [
        evidence_of(),
        evidence_of(make_start(2.0), persistent=True),
        evidence_of(make_start(2.0), epoch_batches=None),
        evidence_of(make_start(2.0), batches=0),
        make_evidence(),
    ],
)
def test_no_restart(evidence: Evidence) -> None:
    assert restart_finding(evidence) is None
    assert [*start_remedies(evidence)] == []
    assert slow_start(evidence) is None


def test_long_first_start_of_workers_that_stay() -> None:
    evidence = evidence_of(make_start(150.0, **SPAWN), persistent=True)
    note = slow_start(evidence)
    assert note is not None
    assert note.figures["pickled_bytes"] == 41 * 2**20
    found = [*start_remedies(evidence)]
    assert [one.kind for one in found] == ["pickle_less", "prepare_workers_less"]
    assert {one.expected_gain for one in found} == {None}
