"""What a workload is made of."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.config.plan import PARTS, Ref, Workload, WorkloadFacts
from tests.factories import make_facts


def test_parts_are_everything_but_the_loaders_switches_and_the_command() -> None:
    assert set(PARTS) == {field.name for field in fields(Workload)} - {
        "shuffle",
        "drop_last",
        "command",
    }


def test_trials_shuffle_and_drop_the_last_batch_unless_told_otherwise() -> None:
    workload = Workload(model=object(), dataset=object())
    assert workload.shuffle
    assert workload.drop_last


def test_a_workload_and_a_reference_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Ref(target="pkg:fn").target = "other"  # type: ignore[misc] # the rule under test
    with pytest.raises(FrozenInstanceError):
        Workload(model=1, dataset=2).model = 3  # type: ignore[misc] # the rule under test


@pytest.mark.parametrize(
    "command", ["python train.py --lr {lr}", ["python", "train.py", "--lr", "{lr}"]]
)
def test_a_command_is_kept_as_its_words(command: Any) -> None:
    workload = Workload(command=command)
    assert workload.command == ("python", "train.py", "--lr", "{lr}")
    assert replace(workload, command=workload.command) == workload


@pytest.mark.parametrize(
    "beside",
    [{"model": object}, {"loss": len}, {"shuffle": False}, {"drop_last": False}, {"sampler": list}],
)
def test_nothing_stands_beside_a_command(beside: dict[str, Any]) -> None:
    (name,) = beside
    with pytest.raises(ValidationError, match=rf"workload\.command.* {name};"):
        Workload(command=("python", "train.py"), **beside)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ([], "got none"),
        ("python -c pass", "got '-c'"),
        (["python", 3], "got 3"),
        ("python train.py {num_worker}", "{num_workers}?"),
    ],
)
def test_a_bad_command_is_refused(command: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        Workload(command=command)


def test_facts_survive_json() -> None:
    facts = make_facts(optimizer={"name": "AdamW", "betas": (0.9, 0.999), "eps": 1e-8})
    assert WorkloadFacts.model_validate_json(facts.model_dump_json()) == facts
