"""What one look at the machine has a search say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from autotune.api.setup import runner_for, temporary_folder
from autotune.config.plan import Objective, OptimizerFacts, Plan, ReadOver, Workload
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, WorkloadError
from autotune.launch.launcher import Exit, Launch
from autotune.launch.runner import TrialRunner
from autotune.messages import space as messages
from autotune.messages.trials import others_on_device
from autotune.protocol.disk import write_model
from autotune.protocol.messages import RankReport
from autotune.records.measurement import DeviceConditions
from autotune.records.trial import Failure, TrialResult
from autotune.space.space import ResolvedSpace
from autotune.testing import FakeLauncher, fake_environment, fake_facts
from autotune.tuning.probe import probe_workload


def probed(launcher: FakeLauncher, **plan: Any) -> tuple[TrialRunner, ResolvedSpace]:
    """The runner and the space of a plan."""
    given = {"workload": Workload(model=object, dataset=list), **plan}
    whole = Plan(name="case", **{"baseline": TrainingConfig(micro_batch_size=64), **given})
    with temporary_folder() as folder:
        return probe_workload(whole, runner_for(whole, folder, launcher))


@pytest.mark.parametrize(("held_bytes", "busy_fraction"), [(0, 0.0), (20 * 2**30, 0.9)])
def test_others_on_the_device_are_noted(held_bytes: int, busy_fraction: float) -> None:
    conditions = DeviceConditions(
        others_memory_bytes=held_bytes, others_busy_fraction=busy_fraction
    )
    _, space = probed(FakeLauncher(conditions=conditions))
    note = others_on_device(held_bytes=held_bytes, busy_fraction=busy_fraction)
    assert space.notes == ((note,) if held_bytes else ())


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (OptimizerFacts(name="AdamW", can_fuse=True), None),
        (OptimizerFacts(name="AdamW"), "no_fused_optimizer"),
        (OptimizerFacts(name="NAdam"), "other_optimizer"),
        (OptimizerFacts(name="SGD", can_fuse=True), "other_optimizer"),
    ],
)
def test_fused_default_of_a_framework_file(optimizer: OptimizerFacts, reason: str | None) -> None:
    baseline = TrainingConfig(micro_batch_size=64, fused=True)
    launcher = FakeLauncher(facts=fake_facts().model_copy(update={"optimizer": optimizer}))
    files = {"fused": ReadOver("optim", "AdamW")}
    _, space = probed(launcher, baseline=baseline, read_over=files)
    assert space.baseline.fused is (reason is None)
    noted = [one.figures["reason"] for one in space.notes if one.code == "not_read_over"]
    assert noted == ([] if reason is None else [reason])
    if not optimizer.can_fuse:
        with pytest.raises(ConfigError, match="fused"):
            probed(launcher, baseline=baseline)


@pytest.mark.parametrize("nodes", [(-1, -1), (0, 1)])
def test_binding_of_a_framework_file(nodes: tuple[int, ...]) -> None:
    sockets = {"numa_nodes": 2, "node_cores": (2, 2), "device_nodes": nodes}
    launcher = FakeLauncher(environment=fake_environment(device_count=2).model_copy(update=sockets))
    baseline = TrainingConfig(micro_batch_size=64, numa_binding="node")
    files = {"numa_binding": ReadOver("enable_cpu_affinity")}
    _, space = probed(launcher, baseline=baseline, read_over=files)
    is_possible = -1 not in nodes
    assert space.baseline.numa_binding == ("node" if is_possible else None)
    assert ("not_read_over" in {one.code for one in space.notes}) is not is_possible


@pytest.mark.parametrize(
    ("limit", "reserve", "gibs"),
    [(0.5, "2GiB", (8, 2)), ("3GiB", 0.25, (3, 4)), ("4GiB", "4GiB", (4, 4))],
)
def test_reserve_lies_below_the_limit(
    limit: float | str, reserve: float | str, gibs: tuple[int, int]
) -> None:
    objective = Objective.model_validate({"memory_limit": limit, "reserve": reserve})
    whole, kept = (2**30 * gib for gib in gibs)
    if kept >= whole:
        with pytest.raises(ConfigError, match=f"reserve .*memory_limit.* {kept:,} of {whole:,}"):
            probed(FakeLauncher(), objective=objective)
        return
    ready, space = probed(FakeLauncher(), objective=objective)
    assert ready.limits is not None
    assert ready.limits.limit_bytes == space.limit_bytes == whole - kept
    assert space.notes == (messages.reserve(kept, whole - kept),)


@dataclass(slots=True)
class EndingLauncher(FakeLauncher):
    """Its scripts write something and end; their log is what tells why."""

    log: str = ""
    failure: Failure | None = None

    def launch(self, launch: Launch) -> Exit:
        launch.log.write_text(self.log)
        result = TrialResult(outcome="invalid", reason="it ended", failure=self.failure)
        write_model(launch.folder.report, RankReport(result=result))
        return Exit(wall_s=1.0, code=0)


@pytest.mark.parametrize(
    ("log", "failure", "shown"),
    [
        ("no such data\n", None, ["It has written last:", "  no such data"]),
        (
            "usage: a\n\nTraceback (most recent call last):\n  File\nSystemExit: 2\n",
            Failure(signature="SystemExit at a.py:1", traceback="File"),
            ["It has written last:", "  usage: a"],
        ),
        ("usage: a\n", Failure(signature="ValueError at a.py:1", traceback="File a"), ["File a"]),
        (
            'compiling\nTimeout (0:00:29)!\nThread 0x01 (most recent call first):\n  File "a.py", line 3 in f\n',
            None,
            ["It has written last:", "  compiling"],
        ),
        ("", None, []),
    ],
)
def test_of_a_script_that_ends_too_early_what_it_has_written_last_is_shown(
    log: str, failure: Failure | None, shown: list[str]
) -> None:
    command = Workload(command=("python", "a.py"))
    with pytest.raises(WorkloadError) as raised:
        probed(EndingLauncher(log=log, failure=failure), workload=command)
    assert str(raised.value).splitlines()[2:] == shown
