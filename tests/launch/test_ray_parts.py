"""What trials on a Ray cluster are put together from, without a cluster."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import ray
from filelock import FileLock
from pydantic import ValidationError
from ray.exceptions import RayActorError

from autotune.launch import ray_cluster, ray_host
from autotune.launch.launcher import Exit, Launch
from autotune.launch.ray_cluster import HostLostError, OneHost, most_of_a_kind
from autotune.launch.ray_host import Host, HostAnswer, HostTask, trial_environment
from autotune.launch.ray_launcher import RunningTrial, _collect, merged_exit
from autotune.policy import POLICY
from autotune.protocol.disk import TrialFolder
from autotune.protocol.messages import DescribeJob, GroupPart, ProcessSetup
from autotune.records.measurement import Block
from tests.factories import make_environment

PARTS = [GroupPart(host=0, first_rank=0, ranks=2), GroupPart(host=1, first_rank=2, ranks=2)]


def test_the_kind_with_most_devices_is_taken() -> None:
    one_large, small = make_environment(device_count=8), make_environment(device_name="L4")
    assert most_of_a_kind([small, small, one_large]) == one_large
    assert most_of_a_kind([small] * 9 + [one_large]) == small


def test_accelerators_come_before_processors() -> None:
    lone, processors = make_environment(), make_environment(device="cpu", device_kind="cpu")
    assert most_of_a_kind([processors] * 5 + [lone]) == lone
    assert most_of_a_kind([processors]) == processors
    assert most_of_a_kind([]) is None


def test_trials_see_the_callers_environment_but_for_what_is_the_hosts_own() -> None:
    here = {
        "PATH": "/host",
        "CUDA_VISIBLE_DEVICES": "3",
        "RAY_JOB_ID": "1",
        "OMP_NUM_THREADS": "1",
        "HOST_ONLY": "yes",
    }
    callers = {
        "PATH": "/caller",
        "TOKEN": "secret",
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_PROCID": "0",
        "TMPDIR": "/x",
    }
    assert trial_environment(here, callers) == {
        "PATH": "/caller",
        "TOKEN": "secret",
        "HOST_ONLY": "yes",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert trial_environment(here, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4", (
        "what the caller set, not Ray"
    )


def test_a_disk_error_is_not_taken_for_a_missing_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**_: object) -> None:
        raise PermissionError("no session folder")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_connect", lambda _: None)
    with pytest.raises(PermissionError, match="no session folder"), ExitStack() as undo:
        ray_cluster.join("127.0.0.1:6379", undo)


def test_a_groups_first_end_is_that_of_the_host_that_ended_first() -> None:
    exits = [
        Exit(
            code=None, codes=(None, -11), first=1, first_s=10.0, ended_for="straggling", wall_s=15.0
        ),
        Exit(code=1, codes=(1, 1), first=0, first_s=10.3, wall_s=10.4),
    ]
    merged = merged_exit(exits, PARTS)
    assert (merged.first, merged.first_s, merged.codes, merged.code) == (
        1,
        10.0,
        (None, -11, 1, 1),
        None,
    )
    assert (merged.ended_for, merged.wall_s) == ("straggling", 15.0)


def test_what_did_not_follow_the_others_end_was_not_cancelled_by_the_search() -> None:
    exits = [
        Exit(code=None, codes=(None, None), ended_for="cancelled", wall_s=9.0),
        Exit(code=0, codes=(0, 0), first=0, first_s=4.0, wall_s=4.1),
    ]
    assert merged_exit(exits, PARTS, "straggling").ended_for == "straggling"
    assert merged_exit(exits, PARTS, "cancelled").ended_for == "cancelled"
    assert merged_exit(exits, PARTS, "straggling").first == 2


def test_a_standstill_that_one_host_has_seen_is_the_groups() -> None:
    exits = [
        Exit(code=0, codes=(0, 0), first=0, first_s=4.1, ended_for="straggling", wall_s=9.0),
        Exit(code=None, codes=(None, None), ended_for="standstill", wall_s=4.0),
    ]
    assert merged_exit(exits, PARTS).ended_for == "standstill"


def test_memory_is_told_before_time() -> None:
    exits = [
        Exit(code=None, codes=(None, None), ended_for="deadline", wall_s=9.0),
        Exit(
            code=None,
            codes=(None, None),
            ended_for="memory",
            memory_bytes=7,
            was_oom_killed=True,
            wall_s=8.0,
        ),
    ]
    merged = merged_exit(exits, PARTS)
    assert (merged.ended_for, merged.memory_bytes, merged.was_oom_killed, merged.first) == (
        "memory",
        7,
        True,
        None,
    )


def test_a_free_port_lies_below_those_that_linux_hands_out() -> None:
    assert 20_000 <= Host.free_port(Host.__new__(Host)) < 32_000


def test_what_killed_hosts_have_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    """The living one may be on another host that shares the folder, where its process is not seen."""
    names = ["autotune-host-dead", "autotune-host-living", "autotune-host-mine", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    for name in names[:2]:
        (tmp_path / name / ray_host._ALIVE).touch()
    with FileLock(tmp_path / "autotune-host-living" / ray_host._ALIVE):
        ray_host._remove_left_behind()
    assert sorted(path.name for path in tmp_path.iterdir()) == names[1:]


def test_a_report_that_is_far_too_large_does_not_travel_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_host, "_FILE_BYTES", 10)
    (tmp_path / "report.json").write_bytes(b"x" * 100)
    assert ray_host._read(tmp_path / "report.json") == b"x" * 10
    assert ray_host._read(tmp_path / "missing") is None


def test_a_job_with_a_field_that_is_not_known_here_is_refused_not_run_without_it(
    tmp_path: Path,
) -> None:
    host = Host.__new__(Host)
    host._turn = Lock()
    process = ProcessSetup(
        device="cpu",
        seed=0,
        deadline_s=1.0,
        sys_path=(),
        working_directory=tmp_path,
        python_path=None,
    )
    task = HostTask(
        ticket="t",
        job=DescribeJob(process=process),
        part=PARTS[0],
        ram_ceiling_bytes=None,
        ending=POLICY.ending,
    )
    assert HostTask.model_validate_json(task.model_dump_json()) == task
    sent = task.model_dump_json().replace('"seed":0', '"seed":0,"of_a_later_version":1')
    with pytest.raises(ValidationError, match="of_a_later_version"):
        host.run(sent)


def test_what_a_host_answers_arrives_as_it_was() -> None:
    exit_ = Exit(
        code=None, codes=(None, -9), first=1, first_s=0.5, ended_for="straggling", wall_s=1.5
    )
    answer = HostAnswer(
        exit=exit_, files={"report.json": b"{}", "stack-1.txt": b"\xff\0"}, log=b"caf\xe9\n"
    )
    assert HostAnswer.model_validate_json(answer.model_dump_json()) == answer


def test_of_a_hosts_answer_only_its_own_ranks_files_are_written(tmp_path: Path) -> None:
    names = ["report.json", "report-2.json", "stack-2.txt", "../outside", "job.json"]
    answer = HostAnswer(
        exit=Exit(code=0, codes=(0, 0), wall_s=1.0),
        files=dict.fromkeys(names, b"told"),
        log=b"printed\n",
    )
    folder = tmp_path / "trial"
    folder.mkdir()
    launch = Launch(folder=TrialFolder(folder), log=tmp_path / "log", deadline_s=1.0, ranks=2)
    second = OneHost(node="n", name="second", address="", actor=None, bundle={})
    _collect(launch, [(second, PARTS[1])], [answer], None)
    assert sorted(path.name for path in folder.iterdir()) == ["report-2.json", "stack-2.txt"]
    assert (tmp_path / "log").read_bytes() == b"[second, ranks 2 to 3]\nprinted\n"
    assert not (tmp_path / "outside").exists()


# The blocks of a trial under way


def block(number: int) -> Block:
    return Block(samples=number, batches=1, seconds=0.5, data_wait_s=0.0)


def test_a_host_sends_blocks_that_are_not_known_yet() -> None:
    host = Host.__new__(Host)  # without its fork server
    host._blocks = {"mine": [block(1), block(2)]}
    sent = [
        [Block.model_validate_json(one).samples for one in host.blocks("mine", n)] for n in range(3)
    ]
    assert sent == [[1, 2], [2], []]
    assert host.blocks("another", 0) == []


@dataclass(slots=True)
class Wire:
    """Takes the place of Ray: requests for blocks, each with its answer once that has come."""

    sent: list[Block] = field(default_factory=list)
    has_come: bool = True
    asked: list[tuple[str, int]] = field(default_factory=list)
    is_lost: bool = False

    @property
    def host(self) -> OneHost:
        """A host whose actor answers through this."""
        return OneHost(node="n", name="a host", address="", actor=self, bundle={})

    @property
    def blocks(self) -> Wire:
        """The actor's method."""
        return self

    def remote(self, ticket: str, known: int) -> tuple[str, int]:
        """Ask for blocks; the reference to the answer."""
        self.asked.append((ticket, known))
        return self.asked[-1]

    def wait(self, references: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        """As ray.wait, which must not wait here."""
        assert timeout == 0
        return (references, []) if self.has_come else ([], references)

    def get(self, reference: tuple[str, int]) -> list[str]:
        """As ray.get."""
        if self.is_lost:
            raise RayActorError
        return [one.model_dump_json() for one in self.sent[reference[1] :]]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(ray, "wait", wire.wait)
    monkeypatch.setattr(ray, "get", wire.get)
    return wire


@pytest.fixture
def running(tmp_path: Path) -> RunningTrial:
    """A trial whose blocks are asked for."""
    return RunningTrial(Launch(folder=TrialFolder(tmp_path), log=tmp_path / "log", deadline_s=1.0))


def test_one_request_for_blocks_is_under_way_at_a_time(wire: Wire, running: RunningTrial) -> None:
    wire.sent = [block(1)]
    wire.has_come = False
    for _ in range(3):
        running.fetch_blocks(wire.host)
    assert (wire.asked, running.launch.blocks) == ([(running.ticket, 0)], [])
    wire.has_come = True
    for number in (2, 3):
        running.fetch_blocks(wire.host)
        wire.sent.append(block(number))
    running.fetch_blocks(wire.host)
    assert wire.asked[1] == (running.ticket, 1)
    assert running.launch.blocks == wire.sent


def test_a_host_that_is_lost_while_it_is_asked_for_blocks_is_a_lost_host(
    wire: Wire, running: RunningTrial
) -> None:
    running.fetch_blocks(wire.host)
    wire.is_lost = True
    with pytest.raises(HostLostError) as lost:
        running.fetch_blocks(wire.host)
    assert lost.value.was_running
