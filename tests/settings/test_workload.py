"""What a workload is made of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from autotune.settings.workload import PARTS, Ref, Workload, WorkloadFacts
from tests.factories import make_facts


def test_parts_are_everything_but_the_loaders_switches() -> None:
    assert set(PARTS) == {field.name for field in fields(Workload)} - {"shuffle", "drop_last"}


def test_trials_shuffle_and_drop_the_last_batch_unless_told_otherwise() -> None:
    workload = Workload(model=object(), dataset=object())
    assert workload.shuffle
    assert workload.drop_last


def test_a_workload_and_a_reference_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Ref(target="pkg:fn").target = "other"  # type: ignore[misc] # the rule under test
    with pytest.raises(FrozenInstanceError):
        Workload(model=1, dataset=2).model = 3  # type: ignore[misc] # the rule under test


def test_facts_survive_json() -> None:
    facts = make_facts(optimizer={"name": "AdamW", "betas": (0.9, 0.999), "eps": 1e-8})
    assert WorkloadFacts.model_validate_json(facts.model_dump_json()) == facts
