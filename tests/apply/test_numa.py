"""Bind ranks to cores: on made-up machines, and real processes with all that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, floor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.apply import cores
from autotune.apply.cores import (
    Addresses,
    CoresError,
    addresses_of_ranks,
    allowed_cores,
    allowed_nodes,
    bind_rank,
    bind_to,
    can_bind,
    cores_of_rank,
    is_bound_by_launcher,
    node_of_pci,
)
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="Linux alone binds processes to cores"
)
two_cores = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores")
TWO_SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
"""Two nodes of four physical cores with two threads each, numbered as on most servers."""
FIRST, SECOND = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})


@pytest.fixture
def sys_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fill a folder in place of /sys: (nodes' lists, siblings by core, nodes by PCI address)."""
    monkeypatch.setattr(cores, "_SYS", tmp_path)

    def make(
        nodes: Mapping[int, str],
        siblings: Mapping[int, str] | None = None,
        pci: Mapping[str, int] | None = None,
    ) -> None:
        files = {f"devices/system/node/node{node}/cpulist": own for node, own in nodes.items()}
        for core, others in (siblings or {}).items():
            files[f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = others
        files |= {
            f"bus/pci/devices/{address}/numa_node": str(node)
            for address, node in (pci or {}).items()
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    return make


@pytest.fixture
def two_sockets(sys_of: Callable[..., None]) -> None:
    """The machine of TWO_SOCKETS, with a GPU on each node and one of which nothing is told."""
    siblings = {core: f"{core % 8},{core % 8 + 8}" for core in range(16)}
    pci = {"0000:3b:00.0": 0, "0000:5e:00.0": 0, "0000:af:00.0": 1, "0000:d8:00.0": -1}
    sys_of(TWO_SOCKETS, siblings, pci)


def pairs(*cores: int) -> list[frozenset[int]]:
    return [frozenset({core, core + 8}) for core in cores]


@pytest.mark.usefixtures("two_sockets")
def test_allowed_nodes() -> None:
    assert allowed_nodes(FIRST | SECOND) == {
        0: pairs(0, 1, 2, 3),
        1: pairs(4, 5, 6, 7),
    }
    assert allowed_nodes(frozenset({1, 9, 12})) == {0: pairs(1), 1: [frozenset({12})]}


def test_allowed_nodes_of_odd_machines(sys_of: Callable[..., None]) -> None:
    single = {0: [frozenset({0}), frozenset({1})]}
    assert allowed_nodes(frozenset({0, 1})) == single  # a kernel without nodes
    sys_of({0: "0-1", 7: ""})  # a node of memory alone
    assert allowed_nodes(frozenset({0, 1})) == single
    # a core that no node lists
    assert allowed_nodes(frozenset({0, 5})) == {0: [frozenset({0}), frozenset({5})]}


@pytest.mark.usefixtures("two_sockets")
def test_node_of_pci() -> None:
    nodes = allowed_nodes(FIRST | SECOND)
    addresses = ("0000:af:00.0", "0000:d8:00.0", "0000:00:00.0", None)
    found = [node_of_pci(address, nodes) for address in addresses]
    assert found == [1, None, None, None]
    only = allowed_nodes(SECOND)
    assert node_of_pci("0000:d8:00.0", only) == 1
    # a node without an allowed core
    assert node_of_pci("0000:3b:00.0", only) == 0


@pytest.mark.usefixtures("two_sockets")
def test_cores_of_rank() -> None:
    nodes = allowed_nodes(FIRST | SECOND)
    ranks = [frozenset({0}), frozenset({0}), frozenset({1})]
    shared = [cores_of_rank("node", rank, ranks, nodes) for rank in range(3)]
    assert shared == [FIRST, FIRST, SECOND]
    assert cores_of_rank("node", 0, [frozenset({0, 1})], nodes) == FIRST | SECOND


@pytest.mark.usefixtures("two_sockets")
def test_node_without_allowed_cores() -> None:
    nodes = allowed_nodes(frozenset({0, 8, 4}))
    with pytest.raises(CoresError, match="node 3"):
        cores_of_rank("node", 0, [frozenset({3})], nodes)


CORES = st.lists(st.integers(1, 4), min_size=1, max_size=24)
"""Threads of each physical core of a node."""


@given(CORES, st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_exclusive_shares(threads: Sequence[int], places: Sequence[int]) -> None:
    numbers = iter(range(1000))
    nodes = {
        node: [frozenset(next(numbers) for _ in range(count)) for count in threads]
        for node in range(3)
    }
    ranks = [frozenset({place}) for place in places]
    for node, all_cores in nodes.items():
        there = [rank for rank, place in enumerate(places) if place == node]
        if len(there) > len(all_cores):
            with pytest.raises(CoresError):
                cores_of_rank("exclusive", there[0], ranks, nodes)
            continue
        shares = [cores_of_rank("exclusive", rank, ranks, nodes) for rank in there]
        taken = frozenset().union(*shares)
        assert sum(map(len, shares)) == len(taken)
        assert taken == (frozenset().union(*all_cores) if there else frozenset())
        whole = [[core for core in all_cores if core <= share] for share in shares]
        assert [frozenset().union(*own) for own in whole] == shares
        each = len(all_cores) / max(1, len(there))
        assert {len(own) for own in whole} <= {floor(each), ceil(each)}


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *buses: int) -> None:
    """CUDA devices that lie on these PCI buses, as torch tells it."""
    own = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in buses]
    module = SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: len(own),
        get_device_properties=lambda device: own[device.index],
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


def test_addresses_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, 0x3B, 0x5E, 0xAF)
    first, second, third = ([f"0000:{bus}:00.0"] for bus in ("3b", "5e", "af"))
    assert addresses_of_ranks(torch.device("cuda:2"), 1, 2) == [second, third]
    assert addresses_of_ranks(torch.device("cuda"), 0, 2) == [first, second]
    assert addresses_of_ranks(torch.device("cuda:1"), 0, 1, 2) == [[*second, *third]]
    assert addresses_of_ranks(torch.device("cuda:0"), 1, 3) == [[None], first, second]
    assert addresses_of_ranks(torch.device("cpu"), 1, 2) == [(), ()]


def test_device_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda _: None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert addresses_of_ranks(torch.device("xpu:0"), 0, 1) == [[None]]


def in_child(work: Callable[[], Any]) -> Any:
    """What some work returns in a process of its own; no operation of torch may run in it."""
    context = get_context("fork")
    reading, writing = context.Pipe(duplex=False)

    def run() -> None:
        writing.send(work())

    child = context.Process(target=run)
    child.start()
    assert reading.poll(60)
    result = reading.recv()
    child.join()
    return result


def own_sys(sys_of: Callable[..., None], pci: Mapping[str, int]) -> list[int]:
    """Play a node for each of this process's cores, and return these."""
    own = sorted(allowed_cores())
    sys_of({node: str(core) for node, core in enumerate(own)}, None, pci)
    return own


@two_cores
def test_cpu_ranks_are_spread_over_nodes(sys_of: Callable[..., None]) -> None:
    own = own_sys(sys_of, {})

    def bound(rank: int, ranks: int) -> tuple[int, set[int]]:
        return bind_rank("node", rank, [()] * ranks), set(os.sched_getaffinity(0))

    spread = [in_child(partial(bound, rank, len(own))) for rank in range(len(own))]
    assert spread == [(1, {core}) for core in own]
    assert in_child(lambda: bound(0, 1))[1] == {own[0]}


@two_cores
def test_rank_is_bound_next_to_its_gpu(sys_of: Callable[..., None]) -> None:
    near, far, unknown = "0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0"
    own = own_sys(sys_of, {near: 1, far: 0, unknown: -1})

    def bound(rank: int, binding: str, devices: Sequence[Addresses]) -> set[int]:
        bind_rank(binding, rank, devices)
        return set(os.sched_getaffinity(0))

    both = [[near], [far]]
    found = [in_child(partial(bound, rank, "exclusive", both)) for rank in (0, 1)]
    assert found == [{own[1]}, {own[0]}]
    assert in_child(lambda: bound(0, "node", [[near], [None]])) == {own[1]}
    with pytest.raises(CoresError, match="CUDA_VISIBLE_DEVICES"):
        bound(0, "exclusive", [[near], [None]])
    with pytest.raises(CoresError, match="CUDA_VISIBLE_DEVICES"):
        bound(0, "node", [[unknown]])


@two_cores
def test_old_and_new_threads_are_bound() -> None:
    core = min(allowed_cores())

    def work() -> list[set[int]]:
        waits = threading.Event()
        threads = [threading.Thread(target=waits.wait) for _ in range(2)]
        threads[0].start()
        bind_to(frozenset({core}))
        threads[1].start()
        found = [
            set(os.sched_getaffinity(int(thread.name)))
            for thread in Path("/proc/self/task").iterdir()
        ]
        waits.set()
        return found

    found = in_child(work)
    assert len(found) >= 3
    assert all(cores == {core} for cores in found)


@two_cores
def test_threads_follow_the_cores(sys_of: Callable[..., None]) -> None:
    def threads(ranks: int, *, is_alone: bool = False) -> Any:
        return in_child(lambda: bind_rank("node", 0, [()] * ranks, is_alone=is_alone))

    cores = len(allowed_cores())
    assert threads(1, is_alone=True) == torch.get_num_threads()
    assert threads(2) == max(1, cores // 2)
    assert threads(1) == cores  # one rank of several hosts
    own_sys(sys_of, {})
    assert threads(1, is_alone=True) == max(1, torch.get_num_threads() // cores)


def test_refused_binding_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = allowed_cores()
    absent = max(before) + 999

    def bound_in_part() -> frozenset[int]:
        with pytest.raises(CoresError):
            bind_to(frozenset({min(before), absent}))
        return allowed_cores()

    with pytest.raises(CoresError):
        bind_to(frozenset({absent}))
    assert in_child(bound_in_part) == before
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    with pytest.raises(CoresError, match="OMP_PROC_BIND=close"):
        bind_rank("node", 0, [()])
    assert allowed_cores() == before
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    monkeypatch.setenv("KMP_AFFINITY", "disabled")
    assert in_child(lambda: bind_rank("node", 0, [()])) >= 1


def test_can_bind() -> None:
    found = {kind: can_bind(torch.device(kind)) for kind in ("cpu", "cuda:0", "mps", "xpu")}
    assert found == {"cpu": True, "cuda:0": True, "mps": False, "xpu": False}


def test_system_without_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert allowed_cores() == frozenset()
    with pytest.raises(ConfigError, match="Linux"):
        bind_rank("node", 0, [()])
    assert not can_bind(torch.device("cpu"))
    with pytest.warns(UserWarning, match="numa_binding.*Linux"):
        TrainingConfig(numa_binding="node").prepare(torch.nn.Linear(1, 1), "cpu")


@two_cores
def test_is_bound_by_launcher() -> None:
    def work() -> bool:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return is_bound_by_launcher()

    assert in_child(work)
    assert not in_child(is_bound_by_launcher)


PREPARES = """
import json, os, sys
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, get_worker_info
from autotune.config.training_config import TrainingConfig

class Cores:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        assert get_worker_info() is not None
        return sorted(os.sched_getaffinity(0))

rank, folder, launched, settings = int(os.environ["RANK"]), sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if launched:
    os.sched_setaffinity(0, {int(launched)})
torch.randn(300, 300) @ torch.randn(300, 300)
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
config = TrainingConfig(strategy="ddp", world_size=2, num_workers=1, **settings)
loader = DataLoader(Cores(), batch_size=None, num_workers=1, collate_fn=list)
config.prepare(nn.Linear(2, 2), "cpu")
each = sorted({tuple(sorted(os.sched_getaffinity(int(name)))) for name in os.listdir("/proc/self/task")})
print(json.dumps({"threads": torch.get_num_threads(), "each": each, "worker": next(iter(loader))}))
sys.stdout.flush()
os._exit(0)
"""


def prepared_by_two(
    folder: Path, launched: Sequence[str] = ("", ""), **settings: Any
) -> list[dict[str, Any]]:
    """What two ranks of a loop of the user's own are like after `prepare`."""

    places = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARES, str(folder), core, json.dumps(settings)],
            env={**os.environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, core in enumerate(launched)
    ]
    return [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]


@pytest.mark.slow
@two_cores
@pytest.mark.timeout(180)
def test_prepare_binds_ranks_threads_and_workers(tmp_path: Path) -> None:
    nodes = allowed_nodes(allowed_cores())
    ranks = [
        frozenset(nodes) if len(nodes) == 1 else frozenset({[*nodes][rank * len(nodes) // 2]})
        for rank in (0, 1)
    ]
    for rank, found in enumerate(prepared_by_two(tmp_path, numa_binding="exclusive")):
        cores = sorted(cores_of_rank("exclusive", rank, ranks, nodes))
        assert (found["each"], found["worker"]) == ([cores], cores)
        assert found["threads"] == len(cores)


@pytest.mark.slow
@two_cores
@pytest.mark.timeout(180)
def test_prepare_leaves_a_launchers_cores_and_set_threads(tmp_path: Path) -> None:
    cores = sorted(allowed_cores())[:2]
    given = [str(core) for core in reversed(cores)]
    found = prepared_by_two(tmp_path, given, numa_binding="exclusive", intra_op_threads=3)
    assert [one["worker"] for one in found] == [[cores[1]], [cores[0]]]
    assert [one["threads"] for one in found] == [3, 3]
