"""FSDP2 is advised where the model's state takes most of the memory, with the bytes that each rank saves."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.advice import rank_advice
from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.diagnosis.memory.sharding import state_bytes
from autotune.diagnosis.scaling import compare_strategies
from autotune.records.diagnosis import Advice, Evidence
from autotune.records.measurement import MemorySample
from autotune.records.memory import ModelState
from autotune.records.trial import Score, TrialRecord, TrialResult
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import OptimizerFacts, WorkloadFacts
from tests.factories import CPU, FOUR_DEVICES, GPU, make_evidence, make_facts, make_measurement

GIB = 2**30
DDP = TrainingConfig(strategy="ddp", world_size=4)


def facts(billions: float = 2.5, optimizer: str = "AdamW", **changes: Any) -> WorkloadFacts:
    """A model of so many times 2**30 numbers."""
    count = round(billions * GIB)
    values = {"parameter_count": count, "trainable_parameter_count": count, "gradient_bytes": 4 * count}
    return make_facts(**values | changes, optimizer=OptimizerFacts(name=optimizer))


def evidence(limit_gib: float = 64.0, peak_gib: float = 50.0, **changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "config": DDP,
        "environment": FOUR_DEVICES,
        "facts": facts(),
        "peak_memory_bytes": round(peak_gib * GIB),
    }
    return make_evidence(1000.0, **values | changes).model_copy(update={"limit_bytes": round(limit_gib * GIB)})


def advised(found: Evidence) -> Advice | None:
    advice = rank_advice(found, find_bottlenecks(found))
    return next((piece for piece in advice if piece.kind == "shard_parameters"), None)


def test_each_rank_saves_all_but_its_part() -> None:
    advice = advised(evidence())
    assert advice is not None
    assert advice.expected_gain is None
    assert advice.figures["ranks"] == 4
    assert advice.figures["saved_fraction"] == pytest.approx(0.75)
    assert advice.figures["least_saved_bytes"] == 0.75 * 40 * GIB, "AdamW: sixteen bytes a number"
    assert advice.figures["most_saved_bytes"] == 0.75 * 50 * GIB, "with amsgrad"
    assert (advice.figures["is_measured"], advice.figures["is_today"]) == (False, True)


def test_what_was_measured_is_exact_but_for_rows() -> None:
    state = ModelState(parameter_bytes=10 * GIB, gradient_bytes=10 * GIB, optimizer_bytes=20 * GIB, row_bytes=GIB // 64)
    advice = advised(evidence(model_state=state))
    assert advice is not None
    assert advice.figures["is_measured"]
    assert advice.figures["state_bytes"] == 40 * GIB
    assert advice.figures["most_saved_bytes"] == 30 * GIB
    assert advice.figures["least_saved_bytes"] == 30 * GIB - 4 * GIB // 64


@pytest.mark.parametrize(
    ("optimizer", "least", "most"),
    [("SGD", 2, 3), ("AdamW", 4, 5), ("Adagrad", 3, 3), ("RMSprop", 3, 5), ("SomebodyElses", 2, 4)],
)
def test_the_state_is_by_the_optimizers_name_where_it_was_not_measured(optimizer: str, least: int, most: int) -> None:
    found = state_bytes(make_measurement(), facts(1.0, optimizer))
    assert (found.least, found.most) == (least * 4 * GIB, most * 4 * GIB)


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    known: dict[str, Any] = {"trainable_parameter_count": GIB // 4, "gradient_bytes": GIB}
    found = state_bytes(make_measurement(), facts(1.0, **known, parameter_bytes=4 * GIB))
    assert (found.least, found.most) == (7 * GIB, 8 * GIB)
    found = state_bytes(make_measurement(), facts(1.0, **known))
    assert (found.least, found.most) == (4 * GIB, 8 * GIB), "of what width the frozen ones are is not known"


def test_a_narrow_frozen_base_is_not_taken_for_as_wide_as_its_adapters() -> None:
    adapters = GIB // 100
    known = facts(7.0, trainable_parameter_count=adapters, gradient_bytes=4 * adapters, parameter_bytes=14 * GIB)
    assert state_bytes(make_measurement(), known).least == 14 * GIB + 3 * 4 * adapters


def test_parameters_of_two_bytes_take_half() -> None:
    assert state_bytes(make_measurement(), facts(1.0, gradient_bytes=2 * GIB)).least == 4 * 2 * GIB


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": facts(1.9)},
        {"config": TrainingConfig(), "environment": GPU},
        {"config": TrainingConfig(), "environment": CPU},
        {"facts": facts(0.3), "peak_gib": 70.0},
    ],
    ids=["less than half of the limit", "one device", "a processor alone", "over the limit for another reason"],
)
def test_a_state_that_leaves_room_stays_whole(changes: dict[str, Any]) -> None:
    assert advised(evidence(**changes)) is None


def test_a_job_on_one_of_several_devices_could_divide_it() -> None:
    advice = advised(evidence(config=TrainingConfig()))
    assert advice is not None
    assert (advice.figures["ranks"], advice.figures["is_today"]) == (4, False)


@pytest.mark.parametrize(
    "measured",
    [{"peak_gib": 70.0}, {"memory": MemorySample(peak_bytes=60 * GIB, source="max reserved", alloc_retries=5)}],
)
def test_over_the_limit_a_smaller_state_counts(measured: dict[str, Any]) -> None:
    assert advised(evidence(facts=facts(0.5))) is None
    assert advised(evidence(facts=facts(0.5), **measured)) is not None


def test_on_a_processor_the_ranks_share_what_is_limited() -> None:
    two: dict[str, Any] = {"config": TrainingConfig(strategy="ddp", world_size=2), "environment": CPU}
    assert advised(evidence(facts=facts(0.9), **two)) is None
    advice = advised(evidence(facts=facts(1.1), **two))
    assert advice is not None
    assert advice.figures["limit_fraction"] == pytest.approx(2 * 16 * 1.1 / 64)


def group(limit_share: float, known: WorkloadFacts | None, strategy: str = "ddp") -> list[str]:
    """The advice on a search whose fastest group has this share of the limit in use."""
    score = Score(value=1.0, feasible=True, violation=limit_share - 1)
    config = TrainingConfig.model_validate({"strategy": strategy, "world_size": 2})
    result = TrialResult(outcome="ok", measurement=make_measurement(gib=50.0))
    found = compare_strategies([TrialRecord(number=0, config=config, result=result, score=score)], GPU, facts=known)
    assert found is not None
    return [piece.kind for piece in found.advice]


def test_the_fastest_group_of_a_search_is_advised_by_its_own_limit() -> None:
    assert "shard_parameters" in group(0.9, facts())
    assert "shard_parameters" not in group(0.9, facts(1.5))
    assert "shard_parameters" not in group(0.5, facts()), "a limit of 100 GiB"
    assert "shard_parameters" not in group(0.9, None)
    assert "shard_parameters" not in group(0.9, facts(), "dp")
