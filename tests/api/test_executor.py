"""From the executor that was asked for to the launcher that is opened, and to the hosts that a search knows of."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autotune
from autotune.api import search as searching
from autotune.api.commands import check_plan, environment
from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.api.setup import opened_launcher, temporary_folder
from autotune.config.plan import Executor, Plan, Workload
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, StudyMismatchError
from autotune.files.run_folder import read_summary
from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from autotune.messages.trials import host_not_used
from autotune.testing import FakeLauncher, fake_environment
from autotune.tuning.loop import Search
from tests.factories.searches import NARROW, fake_search

PLAN = Plan(
    name="case", workload=Workload(model=object, dataset=list), executor=Executor(kind="ray")
)
PAIR = {**NARROW, "strategy": ["single", "ddp"], "world_size": [1, 2]}


def search(folder: Path, launcher: Launcher | None, **arguments: Any) -> autotune.SearchResult:
    return fake_search(folder, launcher=launcher, **{"n_trials": 3, **arguments})


class Closing(FakeLauncher):
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


class FakeRay:
    """Stands for the launcher's module: connects to a launcher that was put in."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.asked = launcher, list[tuple[Executor, str]]()

    def connect(self, executor: Executor, *, device: str) -> Launcher:
        self.asked.append((executor, device))
        return self.launcher


OnRay = Callable[[Launcher], FakeRay]


@pytest.fixture
def on_ray(monkeypatch: pytest.MonkeyPatch) -> OnRay:
    def put_in(launcher: Launcher) -> FakeRay:
        fake, module = FakeRay(launcher), ModuleType("ray_launcher")
        module.__dict__["RayLauncher"] = fake
        monkeypatch.setitem(sys.modules, "autotune.launch.ray_launcher", module)
        return fake

    return put_in


# Opening


def test_a_launcher_that_was_given_goes_before_the_executor(
    on_ray: OnRay,
) -> None:
    given, fake = Closing(), on_ray(Closing())
    with temporary_folder() as folder, opened_launcher(given, folder, PLAN) as opened:
        assert opened is given
    assert (given.closed, fake.asked) == (False, [])


def test_executor_ray_connects_with_the_plans_device_and_closes(
    on_ray: OnRay,
) -> None:
    fake = on_ray(own := Closing())
    with (
        temporary_folder() as folder,
        opened_launcher(None, folder, replace(PLAN, device="cuda")) as opened,
    ):
        assert (opened, own.closed) == (own, False)
    assert (fake.asked, own.closed) == ([(PLAN.executor, "cuda")], True)


@pytest.mark.parametrize(("build_s", "shares"), [(0.9, False), (1.0, True)])
def test_trials_share_a_process_where_building_takes_a_second(build_s: float, shares: bool) -> None:
    with (
        temporary_folder() as folder,
        opened_launcher(None, folder, replace(PLAN, executor=Executor())) as opened,
    ):
        assert isinstance(opened, LocalLauncher)
        assert opened.is_sharing
        assert (build_s >= opened._shared_from_s) is shares


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray_launcher", "ray_cluster", "ray_host"):
        monkeypatch.delitem(sys.modules, f"autotune.launch.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install 'autotune-torch") as caught:
        autotune.diagnose(object, list, executor="ray", progress=False)
    assert caught.value.exit_code == 2


def test_another_module_that_is_missing_is_not_taken_for_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "autotune.launch.ray_launcher", None)
    with (
        pytest.raises(ImportError, match=r"autotune\.launch\.ray_launcher"),
        temporary_folder() as folder,
    ):
        opened_launcher(None, folder, PLAN).__enter__()


@pytest.mark.slow
def test_the_environment_is_this_machines_whatever_the_cluster(
    on_ray: OnRay,
) -> None:
    fake = on_ray(FakeLauncher())
    assert environment().hosts == 1
    assert fake.asked == []


# Arguments of the Python call


@pytest.mark.parametrize(
    "executor",
    [
        {"kind": "ray", "address": "a:1", "ranks": "spread"},
        Executor(kind="ray", address="a:1", ranks="spread"),
    ],
)
def test_an_executor_may_be_a_mapping_or_an_executor(
    tmp_path: Path, on_ray: OnRay, executor: Any
) -> None:
    fake = on_ray(FakeLauncher())
    search(tmp_path, None, executor=executor)
    autotune.diagnose(object, list, executor=executor, progress=False)
    assert fake.asked == 2 * [(Executor(kind="ray", address="a:1", ranks="spread"), "auto")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"executor": "rai"}, "executor: "),
        ({"executor": {"kind": "ray", "hosts": 2}}, "executor.hosts: unknown key"),
        ({"executor": {"address": "a:1"}}, "executor: "),
        ({"executor": "ray", "device": "cuda:1"}, "device: "),
    ],
)
@pytest.mark.parametrize("function", [autotune.search, autotune.diagnose])
def test_a_wrong_executor_is_told_before_anything_starts(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    told: str,
    on_ray: OnRay,
) -> None:
    fake = on_ray(FakeLauncher())
    with pytest.raises(ConfigError, match="^" + told.replace("?", r"\?")):
        function(object, list, progress=False, **arguments)
    assert fake.asked == []


@pytest.mark.parametrize("function", [autotune.search, autotune.diagnose])
def test_the_executor_comes_after_the_contracts_arguments(function: Callable[..., Any]) -> None:
    names = list(inspect.signature(function).parameters)
    assert inspect.signature(function).parameters["executor"].default == "local"
    assert set(names[names.index("executor") + 1 :]) <= {"method", "warm_start"}
    assert "executor" in (autotune.search.__doc__ or "")


# What a search knows of hosts


def test_the_probe_tells_the_space_of_the_hosts(tmp_path: Path) -> None:
    result = search(tmp_path, FakeLauncher(slots=3), executor={"kind": "ray", "ranks": "spread"})
    here = result.summary.environment
    assert (here.hosts, here.is_spread) == (3, True)
    assert {trial.config.world_size for trial in result.trials} <= {1, 2, 3}
    assert here.fingerprint == fake_environment().fingerprint
    assert read_summary(result.run_dir).environment == here


def test_a_baseline_over_hosts_is_refused_by_name_where_there_are_too_few(tmp_path: Path) -> None:
    baseline = TrainingConfig(strategy="ddp", world_size=4)
    with pytest.raises(ConfigError, match=r"baseline: world_size.*3 hosts"):
        search(tmp_path, FakeLauncher(slots=3), baseline=baseline)
    assert search(tmp_path, FakeLauncher(slots=4), baseline=baseline).trials[0].outcome == "ok"


@pytest.mark.slow
def test_hosts_that_are_not_used_are_said_once_in_every_answer(tmp_path: Path) -> None:
    said = host_not_used(host="node-3", reason="it has another kind of device")
    launcher = FakeLauncher(slots=2, notes=(said,))
    assert search(tmp_path, launcher).summary.notes.count(said) == 1
    assert check_plan(PLAN, launcher=launcher).space.notes.count(said) == 1
    assert (
        autotune.diagnose(object, list, launcher=launcher, progress=False).diagnosis.notes.count(
            said
        )
        == 1
    )


GONE = host_not_used(host="node-2", reason="it is gone")


class Losing(FakeLauncher):
    """Loses a host while it runs."""

    def launch(self, launch: Any) -> Any:
        self.notes = (GONE,) if self.launched else ()
        return super().launch(launch)


@pytest.mark.slow
def test_hosts_that_are_not_used_any_more_are_said_too(tmp_path: Path) -> None:
    assert GONE in search(tmp_path, Losing(slots=2)).summary.notes


def test_as_many_trials_as_there_are_hosts_may_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def make(**parts: Any) -> Any:
        seen.append(parts["time"].slots())
        return Search(**parts)

    monkeypatch.setattr(searching, "Search", make)
    for slots in (1, 3):
        search(tmp_path / str(slots), FakeLauncher(slots=slots))
    assert seen == [1, 3]


def test_what_other_jobs_leave_free_is_not_asked_of_this_machine(
    on_ray: OnRay,
) -> None:
    on_ray(FakeLauncher())
    local = diagnose_plan(
        replace(PLAN, executor=Executor()),
        progress=False,
        launcher=FakeLauncher(),
        measuring=MeasuringTime(),
    )
    ray = diagnose_plan(PLAN, progress=False)
    assert local.diagnosis.evidence.free_ram_bytes is not None
    assert ray.diagnosis.evidence.free_ram_bytes is None


# Going on


@pytest.mark.slow
def test_a_study_goes_on_with_other_hosts_where_its_ranks_were_listed(tmp_path: Path) -> None:
    search(tmp_path, FakeLauncher(slots=4), space=PAIR, n_trials=2)
    assert len(search(tmp_path, FakeLauncher(slots=2), space=PAIR).trials) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("space", "ranks", "there"),
    [
        ({}, "pack", r"ranks: 1, 2, 4 .* 4 hosts .* 1, 2, 3 .* 3 hosts"),
        (PAIR, "spread", r"ranks: 1, 2 .* 4 hosts .* 1, 2 .* 3 hosts"),
    ],
)
def test_a_study_whose_ranks_follow_from_the_hosts_is_not_mixed_with_others(
    tmp_path: Path, space: dict[str, Any], ranks: str, there: str
) -> None:
    executor = {"kind": "ray", "ranks": ranks}
    search(tmp_path, FakeLauncher(slots=4), space=space, n_trials=2, executor=executor)
    with pytest.raises(StudyMismatchError, match=there):
        search(tmp_path, FakeLauncher(slots=3), space=space, executor=executor)
