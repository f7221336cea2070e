"""What `search` and `diagnose` make of their arguments: the Plan that is carried out."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.api import calls
from autotune.config.plan import Plan
from autotune.errors import ConfigError
from autotune.testing import FakeLauncher

BOTH = pytest.mark.parametrize("function", [autotune.search, autotune.diagnose])


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What would be carried out."""
    found: list[Plan] = []
    for name in ("run_plan", "diagnose_plan"):
        monkeypatch.setattr(calls, name, lambda plan, **_: found.append(plan))
    return found


@BOTH
@pytest.mark.parametrize(
    "command",
    ["python src/train.py --lr {lr}", ["python", Path("src/train.py"), "--lr", "{lr}"]],
    ids=["text", "words"],
)
def test_a_command_is_the_workload_and_names_the_plan(
    function: Callable[..., Any], command: Any, plans: list[Plan]
) -> None:
    function(command=command, baseline={"lr": 0.1}, memory_limit=0.5, progress=False)
    (plan,) = plans
    assert plan.workload.command == ("python", "src/train.py", "--lr", "{lr}")
    assert (plan.name, plan.baseline.lr, plan.objective.memory_limit) == ("train.py", 0.1, 0.5)


@BOTH
def test_the_contracts_signature_begins_with_what_trains(function: Callable[..., Any]) -> None:
    model, dataset, command, loss, *_ = signature(function).parameters.values()
    assert [part.name for part in (model, dataset, command, loss)] == [
        "model",
        "dataset",
        "command",
        "loss",
    ]
    assert [part.default for part in (model, dataset, command)] == [None] * 3
    assert [part.kind for part in (dataset, command)] == [
        Parameter.POSITIONAL_OR_KEYWORD,
        Parameter.KEYWORD_ONLY,
    ]


@BOTH
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, ["workload.model: ", "workload.dataset: "]),
        ({"model": object}, ["workload.dataset: "]),
        ({"dataset": list}, ["workload.model: "]),
        ({"command": []}, ["workload.command: "]),
        ({"command": "python '"}, ["workload.command: "]),
        ({"command": "python x.py", "model": object}, ["workload: "]),
        ({"command": "python x.py", "loss": len, "loader": {"shuffle": False}}, ["workload: "]),
        ({"command": "python x.py", "executor": "ray"}, ["executor: "]),
        ({"model": object, "dataset": list, "loader": b"bytes"}, ["loader "]),
        ({"model": object, "dataset": list, "loader": {1: 2}}, ["loader takes "]),
    ],
)
def test_a_model_with_a_dataset_or_a_command_must_be_given(
    function: Callable[..., Any], arguments: dict[str, Any], told: list[str]
) -> None:
    launcher = FakeLauncher()
    with pytest.raises(ConfigError) as caught:
        function(**arguments, launcher=launcher, progress=False)
    for problem, start in zip(caught.value.problems, told, strict=True):
        assert problem.startswith(start)
    assert launcher.jobs == []
