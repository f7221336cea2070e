"""A failure is put down to what it shares with nothing that ran."""

from __future__ import annotations

import pytest

from autotune.analysis.failures import chance_to_run, has_failed
from autotune.records.measurement import Block
from autotune.records.trial import Outcome, TrialRecord, TrialResult
from autotune.settings.training_config import TrainingConfig

OWN = TrainingConfig()
FAILED = TrainingConfig(micro_batch_size=256, num_workers=8)


def chances(*configs: TrainingConfig, failed: list[TrainingConfig], ran: list[TrainingConfig]) -> list[float]:
    return [float(chance) for chance in chance_to_run(configs, failed, ran)]


def test_without_a_failure_everything_should_run() -> None:
    assert chances(OWN, FAILED, failed=[], ran=[OWN]) == [1.0, 1.0]


def test_the_more_of_its_new_values_are_shared_with_a_failure_the_less_likely_it_runs() -> None:
    half = [TrainingConfig(micro_batch_size=256), TrainingConfig(num_workers=8)]
    found = chances(OWN, *half, FAILED, failed=[FAILED], ran=[OWN])
    assert found == pytest.approx([1.0, 0.505, 0.505, 0.01])


def test_what_differs_in_nothing_suspect_is_as_unlikely_as_the_failure() -> None:
    sibling = FAILED.model_copy(update={"pin_memory": True})
    assert chances(sibling, failed=[FAILED], ran=[OWN]) == pytest.approx([0.01])


def test_a_value_that_has_run_is_no_suspect() -> None:
    ran = [OWN, TrainingConfig(num_workers=8)]
    found = chances(TrainingConfig(num_workers=8, pin_memory=True), FAILED, failed=[FAILED], ran=ran)
    assert found == pytest.approx([1.0, 0.01])


def test_where_every_value_has_run_nothing_is_held_against_others() -> None:
    ran = [OWN, TrainingConfig(num_workers=8), TrainingConfig(micro_batch_size=256)]
    assert chances(OWN, TrainingConfig(num_workers=8, pin_memory=True), failed=[FAILED], ran=ran) == [1.0, 1.0]


def test_failures_add_up() -> None:
    other = TrainingConfig(micro_batch_size=256, num_workers=4)
    (once,) = chances(TrainingConfig(micro_batch_size=256), failed=[FAILED], ran=[OWN])
    (twice,) = chances(TrainingConfig(micro_batch_size=256), failed=[FAILED, other], ran=[OWN])
    assert twice == pytest.approx(once**2)


@pytest.mark.parametrize(
    ("outcome", "is_failure"),
    [("crashed", True), ("invalid", True), ("timeout", True), ("diverged", True), ("oom", False), ("host_oom", False)],
)
def test_what_showed_nothing_has_failed_unless_memory_was_missing(outcome: Outcome, is_failure: bool) -> None:
    assert has_failed(TrialRecord(number=1, config=OWN, result=TrialResult(outcome=outcome))) == is_failure


def test_a_trial_that_was_stopped_early_has_not_failed() -> None:
    block = Block(samples=8, batches=1, seconds=1.0, data_wait_s=0.0)
    for blocks in ((), (block,)):
        result = TrialResult(outcome="pruned", blocks=blocks)
        assert not has_failed(TrialRecord(number=1, config=OWN, result=result))
