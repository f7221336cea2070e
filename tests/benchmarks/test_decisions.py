"""The bench of decisions: its machine strays as far as it says, a large gain is found, shares count what they name."""

from __future__ import annotations

import random
from math import log
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest

from autotune import TrainingConfig
from autotune.api.setup import runner_for
from autotune.config.plan import Plan, Workload
from autotune.files.run_folder import open_run_folder
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from benchmarks.decisions import SITUATIONS, Task, decide, summarise
from benchmarks.replay.simulated import Noise, SimulatedMachine, _Wander

SHORT = WindowRules(max_s=2.0)


def rates(folder: Path, noise: Noise, *, runs: int, rules: WindowRules) -> list[float]:
    """Of runs of one configuration, long after one another."""
    plan = Plan(name="machine", workload=Workload(model=None, dataset=None), device="cpu")
    machine = SimulatedMachine(lambda _: 1000.0, noise, seed=1)
    seen = []
    with open_run_folder(folder, fresh=False) as run_folder:
        runner = runner_for(plan, run_folder, machine)
        for number in range(runs):
            result = runner.run(
                TrainingConfig(), name=f"{number}", window=rules, extras=NO_EXTRAS, deadline_s=60.0
            )
            assert result.measurement is not None
            seen.append(result.measurement.samples_per_s)
            machine.now_s += 10_000.0
    return seen


def test_runs_stray_by_the_spread_that_is_asked_for(tmp_path: Path) -> None:
    seen = rates(tmp_path, Noise(between_runs=0.1, block=0.01), runs=150, rules=SHORT)
    assert pstdev(map(log, seen)) == pytest.approx(0.1, rel=0.2)


def test_a_machine_that_never_strays_gives_its_truth(tmp_path: Path) -> None:
    assert rates(
        tmp_path, Noise(between_runs=0.0, block=0.0), runs=2, rules=SHORT
    ) == pytest.approx([1000.0, 1000.0])


@pytest.mark.parametrize(
    ("noise", "slow"),
    [
        (Noise(between_runs=0.0, block=0.0, slow_first=2), (0, 1)),
        (Noise(between_runs=0.0, block=0.0, slow_share=1.0), (0, 1, 2, 3)),
    ],
)
def test_disturbed_runs_have_half_the_rate(
    tmp_path: Path, noise: Noise, slow: tuple[int, ...]
) -> None:
    seen = rates(tmp_path, noise, runs=4, rules=SHORT)
    assert seen == pytest.approx([500.0 if run in slow else 1000.0 for run in range(4)])


def test_what_wanders_keeps_its_spread_and_forgets_in_its_time() -> None:
    wander = _Wander(2.0, 10.0, random.Random(0))
    values = [wander.at(step * 1.0) for step in range(20_000)]
    assert pstdev(values) == pytest.approx(2.0, rel=0.1)
    after_ten = sum(a * b for a, b in zip(values, values[10:], strict=False)) / sum(
        a * a for a in values
    )
    assert after_ten == pytest.approx(0.37, abs=0.08)


def test_a_large_gain_on_an_idle_machine_is_found_and_the_same_seed_decides_alike() -> None:
    task = Task(situation=SITUATIONS[0], spread=0.001, gain=0.5, seed=0)
    one = decide(task)
    assert (one["verdict"], one["truth"]) == ("faster", 1.5)
    assert one == decide(task)


def test_shares_count_what_is_false_found_and_covered() -> None:
    repeated = [[1.2, 1.15, 1.25, 1.1], [1.1, 1.0, 1.2, 1.0], [1.0, 0.9, 1.1, 1.0]]
    parts: dict[str, Any] = {"best": 1.1, "whole_s": 10.0, "falsely_proven": 0, "repeated": []}
    ended: list[dict[str, Any]] = [
        {"verdict": "faster", "claim": [1.2, 1.15, 1.25], "truth": 1.1, **parts},
        {"verdict": "faster", "claim": [1.1, 1.0, 1.2], "truth": 1.0, **parts, "falsely_proven": 1},
        {"verdict": "already_best", "claim": None, "truth": 1.0, **parts},
        {"verdict": "unconfirmed", "claim": None, "truth": 1.0, **parts, "repeated": repeated},
    ]
    found = summarise(ended, 0.1)
    assert (found["said_faster"][0], found["false_faster"][0], found["found"][0]) == (
        0.5,
        0.25,
        0.25,
    )
    assert (found["claims_covered"][0], found["not_decided"][0]) == (0.5, 0.25)
    assert found["repeated_covered"][0] == pytest.approx(2 / 3)
    assert found["falsely_proven"][0] == 0.25
    assert found["bias_of_said_faster"] == pytest.approx(0.1)
    assert found["said_faster"][1:] == pytest.approx(
        [0.150, 0.850], abs=1e-3
    )  # Wilson, two of four
