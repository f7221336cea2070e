"""Pass the policy of a plan to what runs, and touch no other plan."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, replace
from pathlib import Path

import pytest

from autotune.api.search import run_plan
from autotune.config.plan import Method, Workload
from autotune.files.plan_file import parse_plan
from autotune.policy import POLICY, Policy, WindowRules
from autotune.protocol.messages import TrialJob
from autotune.testing import FakeLauncher
from tests.factories.searches import make_search


def test_policy_reaches_the_jobs(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    plan = parse_plan(
        {
            "workload": Workload(model=object, dataset=list),
            "budget": {"n_trials": 1},
            "run_dir": tmp_path,
        },
        name="case",
    )
    time, window = replace(POLICY.time, baseline_deadline_s=77.0), WindowRules(warm_up_min_s=0.1)
    run_plan(
        replace(plan, policy=replace(POLICY, time=time, window=window)),
        progress=False,
        launcher=launcher,
    )
    (job,) = (job for job in launcher.jobs if isinstance(job, TrialJob))
    assert job.process.deadline_s == 77.0
    assert job.window.warm_up_min_s == 0.1
    assert parse_plan({"workload": plan.workload}, name="other").policy is POLICY


@pytest.mark.parametrize("method", ["model", "tpe"])
def test_search_reads_its_own_policy(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model falls back on the default of an argument."""
    defaults = {field.name: getattr(POLICY, field.name) for field in fields(Policy)}
    own = replace(POLICY, **{name: copy(group) for name, group in defaults.items()})
    places = {id(group): name for name, group in defaults.items()}
    read = set[str]()

    def watched(group: object, name: str) -> object:
        if id(group) in places and not name.startswith("_"):
            read.add(f"{places[id(group)]}.{name}")
        return object.__getattribute__(group, name)

    search = make_search(tmp_path / "run", FakeLauncher(), n_trials=8, method=method, policy=own)
    for group in defaults.values():
        monkeypatch.setattr(type(group), "__getattribute__", watched)
    search.run()
    assert read == set()
