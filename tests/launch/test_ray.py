"""Trials on a real Ray cluster: two or three local nodes, which these tests start and kill, and a head without trials.

They mostly wait, for nodes that start or are missed, so that they run beside other tests; but all in one process, since
the cluster is one, and it takes the tests in their order.

Those that are not marked slow hold three promises: a cluster that does not answer is told, a search loses nothing with
a node, and a close leaves nothing behind. Two nodes are enough for them, and start sooner.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

import psutil
import pytest
import ray
import torch
from optuna.trial import TrialState
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.utils.data import TensorDataset

from autotune import search
from autotune.config.plan import Executor, Ref
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, LauncherError
from autotune.launch import ray_cluster as ray_nodes
from autotune.launch import ray_launcher
from autotune.launch import ray_launcher as ray_hosts
from autotune.launch.launcher import Exit, Launch, Launcher, slots_of
from autotune.launch.ray_launcher import RayLauncher
from autotune.policy import WindowRules
from autotune.records.measurement import Block
from autotune.records.trial import TrialResult
from tests.launch.conftest import GENEROUS_S, SHORT, TWO_RANKS, Rig, in_user_code, in_user_ranks
from tests.launch.user_hosts import NOTES

pytestmark = pytest.mark.timeout(300)

USER_HOSTS = Path(__file__).with_name("user_hosts.py")
_NODES = 3
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@dataclass(frozen=True)
class Nodes:
    """The cluster, and the folder that trials leave notes in."""

    cluster: Any
    """A ray.cluster_utils.Cluster, which is untyped."""
    notes: Path

    def noted(self, kind: str) -> list[str]:
        return sorted(path.name.removeprefix(f"{kind}-") for path in self.notes.glob(f"{kind}-*"))

    def await_notes(self, kind: str, count: int = 1) -> list[str]:
        begun = monotonic()
        while len(noted := self.noted(kind)) < count:
            assert monotonic() - begun < GENEROUS_S, (
                f"{count} notes of {kind} must come, but there are {noted}"
            )
            sleep(0.02)
        return noted

    def kill_node_of(self, actor: int) -> None:
        """SIGKILL the node whose actor this is, all that Ray runs there; return when the actor has followed it."""
        host = psutil.Process(actor)
        raylet = next(one.pid for one in host.parents() if one.name() == "raylet")
        mine = next(one for one in self.cluster.list_all_nodes() if raylet in _pids_of(one))
        self.cluster.remove_node(mine, allow_graceful=False)
        host.wait(GENEROUS_S)

    def mend(self, count: int = _NODES) -> None:
        """Have as many nodes at least, whatever a test has left; they start side by side."""
        for _ in range(count - (len(self.cluster.list_all_nodes()) - 1)):  # the head is one of them
            self.cluster.add_node(wait=False, **NODE)
        self.cluster.wait_for_nodes()

    def note(self, kind: str) -> None:
        (self.notes / f"{kind}-").touch()

    def forget(self) -> None:
        for path in self.notes.iterdir():
            path.unlink()


def _pids_of(node: Any) -> list[int]:
    return [info.process.pid for infos in node.all_processes.values() for info in infos]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    notes = tmp_path_factory.mktemp("notes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NOTES, str(notes))
        patch.setenv(
            "RAY_enable_worker_prestart", "0"
        )  # each node would start two interpreters that nobody uses
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        spared = {
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
        }  # interpreters as well
        cluster: Any = Cluster(
            initialize_head=True, head_node_args={**NODE, "num_cpus": 0, **spared}
        )
        nodes = Nodes(cluster, notes)
        nodes.mend(2)  # enough for those that are not marked slow
        yield nodes
        cluster.shutdown()


@pytest.fixture(scope="module")
def shared(nodes: Nodes) -> Iterator[RayLauncher]:
    launcher = connect(nodes)
    yield launcher
    launcher.close()


@pytest.fixture
def rig(shared: RayLauncher, nodes: Nodes, tmp_path: Path) -> Rig:
    """On three nodes at least, whose hosts are ready."""
    nodes.forget()
    nodes.mend()
    await_slots(shared, _NODES)
    launcher: Any = shared  # whatever a Rig does with its launcher, this one does as well
    return Rig(launcher=launcher, folder=tmp_path)


@pytest.fixture
def rig_of_two(shared: RayLauncher, nodes: Nodes, tmp_path: Path) -> Rig:
    """On two nodes at least."""
    nodes.forget()
    nodes.mend(2)
    return Rig(launcher=cast("Any", shared), folder=tmp_path)


@pytest.fixture
def spread(rig: Rig, shared: RayLauncher, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """The same launcher, as if it had been made to spread a group's ranks."""
    monkeypatch.setattr(shared._pool, "_executor", Executor(kind="ray", ranks="spread"))
    return rig


@dataclass(frozen=True)
class CallingOff:
    """Ends each trial as soon as it is to end."""

    launcher: Launcher
    should_end: Callable[[], bool]
    notes: tuple[str, ...] = ()

    def launch(self, launch: Launch) -> Exit:
        return self.launcher.launch(replace(launch, should_end=self.should_end))

    def close(self) -> None:
        """The launcher is another's."""


def noise() -> TensorDataset:
    """Tensors of 24 KiB, which lie in the payload's raw bytes."""
    return TensorDataset(torch.randn(1536, 4), torch.randint(0, 2, (1536,)))


def await_slots(launcher: Launcher, count: int) -> None:
    """Wait for a node that has come: it is a host once its actor has imported torch, a minute on a busy machine."""
    begun = monotonic()
    while slots_of(launcher) != count:
        waited_s = monotonic() - begun
        assert waited_s < ray_hosts._READY_WITHIN_S, (
            f"{count} hosts must come, but there are {slots_of(launcher)}"
        )
        sleep(0.1)


def connect(nodes: Nodes, **executor: Any) -> RayLauncher:
    return RayLauncher.connect(
        Executor(kind="ray", address=nodes.cluster.address, **executor), device="cpu"
    )


def in_user_hosts(name: str) -> Ref:
    return Ref(target=f"{USER_HOSTS}:{name}")


def run_many(rig: Rig, model: str, count: int) -> list[TrialResult]:
    """So many trials at once, each in a thread, as a search has them."""
    runner = rig.runner(model=in_user_hosts(model))

    def run(number: int) -> TrialResult:
        return runner.run(
            TrainingConfig(micro_batch_size=4),
            name=f"trial-{number}",
            deadline_s=GENEROUS_S,
            window=SHORT,
        )

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def test_a_cluster_that_does_not_answer_is_told_at_once() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*nobody.getsockname())
        with pytest.raises(ConfigError, match=f"executor .*{address}"):
            RayLauncher.connect(Executor(kind="ray", address=address), device="cpu")


@pytest.mark.slow
def test_trials_run_at_once_each_on_a_host_of_its_own(rig: Rig, nodes: Nodes) -> None:
    assert slots_of(rig.launcher) == 3
    results = run_many(rig, "meeting", 4)
    assert [(one.outcome, one.reason) for one in results] == [("ok", "")] * 4
    assert len(nodes.noted("host")) == 3, "the fourth had to wait for one of three hosts"


@pytest.mark.slow
def test_one_after_the_other_run_on_the_same_host(rig: Rig, nodes: Nodes) -> None:
    nodes.note("go")
    assert {rig.run(model=in_user_hosts("waiting")).outcome for _ in range(3)} == {"ok"}
    assert len(nodes.noted("waiting")) == 1, (
        "what is compared in turns must be measured by one machine"
    )


@pytest.mark.slow
def test_a_groups_ranks_are_packed_on_one_host(rig: Rig, nodes: Nodes) -> None:
    result = rig.run(settings=TWO_RANKS, model=in_user_hosts("noting_its_place"))
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert [one.host for one in result.measurement.ranks] == [0, 0]
    assert nodes.noted("place") == ["0-0", "1-1"]


@pytest.mark.slow
def test_a_groups_ranks_are_spread_over_hosts_and_find_each_other(
    spread: Rig, nodes: Nodes
) -> None:
    result = spread.run(
        settings=TWO_RANKS | {"world_size": 3}, model=in_user_hosts("noting_its_place")
    )
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert [one.host for one in result.measurement.ranks] == [0, 1, 2]
    assert nodes.noted("place") == ["0-0", "1-0", "2-0"], "each is the first on its host"
    assert spread.log.count(b"[") == 3, "the log tells the hosts apart"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["raising_in_1", "killing_itself_in_1", "exiting_hard_in_1"])
def test_a_rank_that_fails_on_another_host_is_the_one_that_is_named(
    spread: Rig, model: str
) -> None:
    result = spread.run(settings=TWO_RANKS, model=in_user_ranks(model))
    assert result.outcome == "crashed"
    assert result.reason.startswith("rank 1: ")
    assert spread.run(settings=TWO_RANKS).outcome == "ok"


@pytest.mark.slow
def test_a_rank_that_outlives_another_hosts_end_is_ended(spread: Rig) -> None:
    result = spread.with_ending(follow_within_s=1.0).run(
        settings=TWO_RANKS, model=in_user_ranks("raising_in_0_while_1_hangs")
    )
    assert result.outcome == "crashed"
    assert result.reason.startswith("rank 0: "), "not that the other was ended"


@pytest.mark.slow
def test_what_the_cluster_has_no_room_for_is_an_invalid_trial(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts, "_BACK_WITHIN_S", 0.0)
    result = rig.run(settings=TWO_RANKS | {"world_size": 64})
    assert result.outcome == "invalid"
    assert re.search(r"64 ranks.* 3 ", result.reason)
    assert rig.run().outcome == "ok"


@pytest.mark.slow
def test_a_host_that_another_job_keeps_is_left_alone_for_others(
    rig: Rig, shared: RayLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts, "_RESERVED_SOON_S", 1.0)
    first = next(iter(shared._pool._hosts))
    sleep(1.5)  # until it is given back after the trial before

    @ray.remote
    class Keeping:  # in here, so that it travels by value
        def stay(self) -> None:
            """It is there."""

    job: Any = Keeping
    other = job.options(
        num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(first, soft=False)
    ).remote()
    ray.get(other.stay.remote())
    result = rig.run()
    assert (result.outcome, result.reason) == ("ok", "")
    assert f"node {first[:8]}".encode() not in rig.log
    ray.kill(other)


@pytest.mark.slow
def test_a_workload_comes_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "_PART_BYTES", 100)
    assert (rig.folder / "payload").exists() is False
    assert rig.run(dataset=noise()).outcome == "ok"
    assert (rig.folder / "payload" / "bytes").stat().st_size > 100


@pytest.mark.slow
def test_a_trial_ends_when_it_is_cancelled(rig: Rig, nodes: Nodes, tmp_path: Path) -> None:
    runner = rig.runner(model=in_user_hosts("waiting"))
    calling_off = replace(
        runner, launcher=CallingOff(rig.launcher, lambda: bool(nodes.noted("waiting")))
    )
    config = TrainingConfig(micro_batch_size=4)
    result = calling_off.run(config, name="trial", deadline_s=GENEROUS_S, window=SHORT)
    assert result.outcome == "pruned"
    assert rig.run().outcome == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, TWO_RANKS], ids=["one rank", "two ranks on two hosts"])
def test_a_trial_is_stopped_early_by_the_blocks_that_come_from_its_host(
    spread: Rig, settings: dict[str, Any]
) -> None:
    shown: list[tuple[Block, ...]] = []

    def should_end(blocks: tuple[Block, ...]) -> str | None:
        shown.append(blocks)
        return "it can't win" if len(blocks) >= 4 else None

    config = TrainingConfig(**({"micro_batch_size": 4} | settings))
    endless = WindowRules(max_s=600.0, precision=1e-9, block_s=0.02)
    result = spread.runner().run(
        config, name="trial", deadline_s=GENEROUS_S, window=endless, should_end=should_end
    )
    assert (result.outcome, result.reason, result.blocks) == ("pruned", "it can't win", shown[-1])
    assert {block.samples / block.batches for block in result.blocks} == {config.global_batch_size}
    assert spread.run(settings=settings).outcome == "ok"


@pytest.mark.slow
def test_a_lost_node_costs_its_trial_nothing_but_time(rig: Rig, nodes: Nodes) -> None:
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(rig.run, model=in_user_hosts("waiting"))
        nodes.kill_node_of(int(*nodes.await_notes("waiting")))
        nodes.note("go")
        assert (result.result().outcome, result.result().reason) == ("ok", "")
    assert len(nodes.noted("waiting")) == 2, "it was begun anew on another host"
    await_slots(rig.launcher, 2)


@pytest.mark.slow
def test_a_node_that_comes_is_a_host(rig: Rig, nodes: Nodes) -> None:
    await_slots(rig.launcher, _NODES)
    other = nodes.cluster.add_node(**NODE)
    await_slots(rig.launcher, _NODES + 1)
    nodes.cluster.remove_node(other)
    await_slots(rig.launcher, _NODES)


@pytest.mark.slow
def test_a_trial_that_takes_its_hosts_with_it_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_launcher, "_MOST_LOSSES", 2)  # each takes seconds
    result = rig.run(model=in_user_hosts("fatal"))
    assert result.outcome == "crashed"
    assert result.reason.startswith("2 hosts ")
    await_slots(rig.launcher, 3)
    assert rig.run().outcome == "ok"


def test_a_search_loses_no_trial_with_a_node_and_has_none_twice(
    rig_of_two: Rig, nodes: Nodes
) -> None:
    rig = rig_of_two

    def kill_under_a_trial() -> int:
        """Once two trials run side by side, the node of one of them dies in its window."""
        before = set(nodes.await_notes("trained", 2))  # of the probe and the baseline
        host = int(min(set(nodes.await_notes("trained", 4)) - before).partition("-")[0])
        nodes.kill_node_of(host)
        return host

    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_under_a_trial)
        result = search(
            in_user_hosts("training"),
            in_user_code("pairs"),
            baseline={"micro_batch_size": 4},
            space={"micro_batch_size": [4, 8], "num_workers": [0, 1, 2]},
            n_trials=5,
            timeout_s=20,
            method="tpe",  # no look before the second trial, none stopped early
            run_dir=rig.folder / "run",
            progress=False,
            launcher=rig.launcher,
        )
        assert killing.result()
    numbers = [record.number for record in result.trials]
    assert len(numbers) >= 3
    assert len({record.config.model_dump_json() for record in result.trials}) == len(numbers)
    assert {record.outcome for record in result.trials} == {"ok"}, "the lost one was measured again"
    measured = [trial for trial in result.study.trials if "autotune_record" in trial.user_attrs]
    assert [trial.number for trial in measured if trial.state.is_finished()] == numbers
    assert not [trial for trial in result.study.trials if trial.state == TrialState.RUNNING]


@pytest.mark.slow
def test_hosts_of_another_kind_are_left_alone_and_named(shared: RayLauncher, nodes: Nodes) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("a host with fewer cores is made by taking some away")
    before = slots_of(shared)
    os.sched_setaffinity(0, {min(cores)})
    try:
        other = nodes.cluster.add_node(**NODE)
    finally:
        os.sched_setaffinity(0, cores)
    while not shared.notes:
        assert slots_of(shared) == before
        sleep(0.1)
    (note,) = shared.notes
    assert note.code == "host_not_used"
    assert f"{len(cores)} cores" in str(note.figures["reason"])
    assert "1 cores" in str(note.figures["reason"])
    nodes.cluster.remove_node(other)


def test_closing_ends_what_runs_and_leaves_nothing_on_the_hosts(
    shared: RayLauncher, nodes: Nodes, tmp_path: Path
) -> None:
    nodes.forget()
    rig = Rig(launcher=cast("Any", shared), folder=tmp_path)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(rig.run, model=in_user_hosts("waiting"))
        host = psutil.Process(int(*nodes.await_notes("waiting")))
        below = host.children(recursive=True)
        shared.close()
        with pytest.raises(LauncherError):
            running.result()
    assert not ray.is_initialized()
    assert below, "its fork server and the rank"
    assert psutil.wait_procs([host, *below], GENEROUS_S)[1] == []
    assert not list(Path(tempfile.gettempdir()).glob(f"autotune-host-{host.pid}-*"))
