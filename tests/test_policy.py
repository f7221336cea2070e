"""Pass the policy of a plan to what runs, and touch no other plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.api.search import run_plan
from autotune.config.plan import Workload
from autotune.files.plan_file import parse_plan
from autotune.policy import POLICY, WindowRules
from autotune.protocol.messages import TrialJob
from autotune.testing import FakeLauncher


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
