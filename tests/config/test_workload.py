"""What a workload is made of."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.config.plan import PARTS, Ref, Workload, WorkloadFacts
from tests.factories import make_facts


def test_parts() -> None:
    assert set(PARTS) == {field.name for field in fields(Workload)} - {
        "shuffle",
        "drop_last",
        "command",
    }


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Ref(target="pkg:fn").target = "other"  # type: ignore[misc] # the rule under test
    with pytest.raises(FrozenInstanceError):
        Workload(model=1, dataset=2).model = 3  # type: ignore[misc] # the rule under test


@pytest.mark.parametrize(
    "command", ["python train.py --lr {lr}", ["python", "train.py", "--lr", "{lr}"]]
)
def test_command_words(command: Any) -> None:
    workload = Workload(command=command)
    assert workload.command == ("python", "train.py", "--lr", "{lr}")
    assert replace(workload, command=workload.command) == workload


@pytest.mark.parametrize(
    "beside",
    [{"model": object}, {"loss": len}, {"shuffle": False}, {"drop_last": False}, {"sampler": list}],
)
def test_command_excludes_parts(beside: dict[str, Any]) -> None:
    (name,) = beside
    with pytest.raises(ValidationError, match=rf"workload\.command.* {name};"):
        Workload(command=("python", "train.py"), **beside)


def test_facts_round_trip() -> None:
    facts = make_facts(optimizer={"name": "AdamW", "betas": (0.9, 0.999), "eps": 1e-8})
    assert WorkloadFacts.model_validate_json(facts.model_dump_json()) == facts
