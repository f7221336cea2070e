"""Which cores a rank is bound to, by made-up machines; real processes stay on theirs, with all that they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.apply import prepare
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
def sys_of(tmp_path: Path) -> Callable[..., Path]:
    """(nodes' lists, siblings by core, nodes by PCI address): a folder in place of /sys."""

    def make(
        nodes: Mapping[int, str],
        siblings: Mapping[int, str] | None = None,
        pci: Mapping[str, int] | None = None,
    ) -> Path:
        files = {f"devices/system/node/node{node}/cpulist": cores for node, cores in nodes.items()}
        for core, cores in (siblings or {}).items():
            files[f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = cores
        files |= {
            f"bus/pci/devices/{address}/numa_node": str(node)
            for address, node in (pci or {}).items()
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        return tmp_path

    return make


@pytest.fixture
def two_sockets(sys_of: Callable[..., Path]) -> Path:
    """The machine of TWO_SOCKETS, with a GPU on each node and one of which nothing is told."""
    siblings = {core: f"{core % 8},{core % 8 + 8}" for core in range(16)}
    pci = {"0000:3b:00.0": 0, "0000:5e:00.0": 0, "0000:af:00.0": 1, "0000:d8:00.0": -1}
    return sys_of(TWO_SOCKETS, siblings, pci)


def pairs(*cores: int) -> list[frozenset[int]]:
    return [frozenset({core, core + 8}) for core in cores]


def test_cores_are_those_that_are_allowed_by_node_and_by_physical_core(two_sockets: Path) -> None:
    assert allowed_nodes(FIRST | SECOND, two_sockets) == {
        0: pairs(0, 1, 2, 3),
        1: pairs(4, 5, 6, 7),
    }
    assert allowed_nodes(frozenset({1, 9, 2, 12}), two_sockets) == {
        0: [frozenset({1, 9}), frozenset({2})],
        1: [frozenset({12})],
    }
    assert allowed_nodes(frozenset({4, 5}), two_sockets) == {1: [frozenset({4}), frozenset({5})]}


def test_nodes_of_memory_alone_are_none_and_a_kernel_without_nodes_has_one(
    sys_of: Callable[..., Path],
) -> None:
    machine = sys_of({0: "0-1", 7: ""})
    single = {0: [frozenset({0}), frozenset({1})]}
    assert allowed_nodes(frozenset({0, 1}), machine) == single
    assert allowed_nodes(frozenset({0, 1}), machine / "nothing") == single


def test_cores_that_no_node_lists_are_not_lost(sys_of: Callable[..., Path]) -> None:
    assert allowed_nodes(frozenset({0, 5}), sys_of({0: "0-1"})) == {
        0: [frozenset({0}), frozenset({5})]
    }


def test_a_device_is_on_the_node_that_the_kernel_tells(two_sockets: Path) -> None:
    nodes = allowed_nodes(FIRST | SECOND, two_sockets)
    assert node_of_pci("0000:af:00.0", nodes, two_sockets) == 1
    assert node_of_pci("0000:d8:00.0", nodes, two_sockets) is None
    assert node_of_pci("0000:00:00.0", nodes, two_sockets) is None
    only = allowed_nodes(SECOND, two_sockets)
    assert node_of_pci("0000:d8:00.0", only, two_sockets) == 1, "there is no other"
    assert node_of_pci("0000:3b:00.0", only, two_sockets) == 0, "a node without an allowed core"


def test_a_rank_has_all_of_its_node_or_whole_cores_of_its_own(two_sockets: Path) -> None:
    nodes = allowed_nodes(FIRST | SECOND, two_sockets)
    ranks = [frozenset({0}), frozenset({0}), frozenset({1})]
    assert [cores_of_rank("node", rank, ranks, nodes) for rank in range(3)] == [
        FIRST,
        FIRST,
        SECOND,
    ]
    own = [cores_of_rank("exclusive", rank, ranks, nodes) for rank in range(3)]
    assert own == [frozenset({0, 1, 8, 9}), frozenset({2, 3, 10, 11}), SECOND]


def test_a_process_with_devices_on_two_nodes_has_the_cores_of_both(two_sockets: Path) -> None:
    nodes = allowed_nodes(FIRST | SECOND, two_sockets)
    assert cores_of_rank("node", 0, [frozenset({0, 1})], nodes) == FIRST | SECOND


def test_fewer_cores_than_ranks_and_a_node_without_cores_are_told(two_sockets: Path) -> None:
    nodes = allowed_nodes(frozenset({0, 8, 4}), two_sockets)
    on_one = [frozenset({0})] * 2
    with pytest.raises(CoresError, match=r"2 .* 1;"):
        cores_of_rank("exclusive", 1, on_one, nodes)
    assert cores_of_rank("node", 1, on_one, nodes) == {0, 8}
    with pytest.raises(CoresError, match="node 3"):
        cores_of_rank("node", 0, [frozenset({3})], nodes)


CORES = st.lists(st.integers(1, 4), min_size=1, max_size=24)
"""Threads of each physical core of a node."""


@given(CORES, st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_shares_are_disjoint_whole_cores_of_nearly_equal_size(
    threads: Sequence[int], places: Sequence[int]
) -> None:
    numbers = iter(range(1000))
    nodes = {
        node: [frozenset(next(numbers) for _ in range(count)) for count in threads]
        for node in range(3)
    }
    ranks = [frozenset({place}) for place in places]
    for node, cores in nodes.items():
        there = [rank for rank, place in enumerate(places) if place == node]
        if len(there) > len(cores):
            with pytest.raises(CoresError):
                cores_of_rank("exclusive", there[0], ranks, nodes)
            continue
        shares = [cores_of_rank("exclusive", rank, ranks, nodes) for rank in there]
        assert sum(map(len, shares)) == len(frozenset().union(*shares))
        assert frozenset().union(*shares) == (frozenset().union(*cores) if there else frozenset())
        whole = [[core for core in cores if core <= share] for share in shares]
        assert [frozenset().union(*own) for own in whole] == shares
        assert {len(own) for own in whole} <= {
            len(cores) // max(1, len(there)),
            -(-len(cores) // max(1, len(there))),
        }


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *buses: int) -> None:
    """CUDA devices that lie on these PCI buses, as torch tells it."""
    own = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in buses]
    module = SimpleNamespace(
        current_device=lambda: 0,
        device_count=lambda: len(own),
        get_device_properties=lambda device: own[device.index],
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


def test_ranks_take_the_devices_in_order_from_that_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpus(monkeypatch, 0x3B, 0x5E, 0xAF)
    second, none = torch.device("cuda:2"), [None]
    assert addresses_of_ranks(second, 1, 2) == [["0000:5e:00.0"], ["0000:af:00.0"]]
    assert addresses_of_ranks(torch.device("cuda"), 0, 2) == [["0000:3b:00.0"], ["0000:5e:00.0"]]
    assert addresses_of_ranks(torch.device("cuda:1"), 0, 1, 2) == [["0000:5e:00.0", "0000:af:00.0"]]
    assert addresses_of_ranks(torch.device("cuda:0"), 1, 3) == [
        none,
        ["0000:3b:00.0"],
        ["0000:5e:00.0"],
    ]
    assert addresses_of_ranks(torch.device("cpu"), 1, 2) == [(), ()]


def test_a_device_that_does_not_tell_its_place_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        device_count=lambda: 1, get_device_properties=lambda _: SimpleNamespace(name="x")
    )
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


def own_sys(sys_of: Callable[..., Path], pci: Mapping[str, int]) -> tuple[Path, list[int]]:
    """Two nodes of which each has one of this process's cores."""
    cores = sorted(allowed_cores())
    return sys_of({node: str(core) for node, core in enumerate(cores)}, None, pci), cores


@two_cores
def test_ranks_on_a_cpu_are_spread_over_its_nodes(sys_of: Callable[..., Path]) -> None:
    root, cores = own_sys(sys_of, {})

    def bound(rank: int, ranks: int) -> tuple[int, set[int]]:
        return bind_rank("node", rank, [()] * ranks, root=root), set(os.sched_getaffinity(0))

    spread = [in_child(partial(bound, rank, len(cores))) for rank in range(len(cores))]
    assert spread == [(1, {core}) for core in cores]
    assert in_child(lambda: bound(0, 1))[1] == {cores[0]}


@two_cores
def test_a_rank_is_bound_beside_its_gpu(sys_of: Callable[..., Path]) -> None:
    root, cores = own_sys(sys_of, {"0000:3b:00.0": 1, "0000:5e:00.0": 0, "0000:af:00.0": -1})
    devices = [["0000:3b:00.0"], ["0000:5e:00.0"]]

    def bound(rank: int, binding: str = "exclusive", places: Sequence[Any] = devices) -> set[int]:
        bind_rank(binding, rank, places, root=root)
        return set(os.sched_getaffinity(0))

    assert [in_child(partial(bound, rank)) for rank in (0, 1)] == [{cores[1]}, {cores[0]}]
    assert in_child(lambda: bound(0, "node", [["0000:3b:00.0"], [None]])) == {cores[1]}, (
        "others need not be seen"
    )
    untold: list[tuple[str, list[Addresses]]] = [
        ("exclusive", [["0000:3b:00.0"], [None]]),
        ("node", [["0000:af:00.0"]]),
    ]
    for binding, places in untold:
        with pytest.raises(CoresError, match="CUDA_VISIBLE_DEVICES"):
            bind_rank(binding, 0, places, root=root)


@two_cores
def test_threads_that_are_there_and_those_to_come_are_bound_too() -> None:
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
def test_threads_follow_the_cores(sys_of: Callable[..., Path]) -> None:
    root, cores = own_sys(sys_of, {})
    whole = in_child(
        lambda: (
            bind_rank("node", 0, [()], is_alone=True, root=root / "nothing"),
            len(os.sched_getaffinity(0)),
        )
    )
    assert whole == (torch.get_num_threads(), len(cores))
    alone = in_child(lambda: bind_rank("node", 0, [()], is_alone=True, root=root))
    assert alone == max(1, torch.get_num_threads() // len(cores))
    together = in_child(lambda: bind_rank("node", 0, [()] * 2, root=root / "nothing"))
    assert together == max(1, len(cores) // 2)
    on_a_host_of_several = in_child(lambda: bind_rank("node", 0, [()], root=root / "nothing"))
    assert on_a_host_of_several == len(cores)


def test_a_process_that_the_kernel_or_openmp_keeps_from_it_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = allowed_cores()
    with pytest.raises(CoresError, match="numa_binding"):
        bind_to(frozenset({max(before) + 999}))
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    with pytest.raises(CoresError, match="OMP_PROC_BIND=close"):
        bind_rank("node", 0, [()])
    assert allowed_cores() == before
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    monkeypatch.setenv("KMP_AFFINITY", "disabled")
    assert in_child(lambda: bind_rank("node", 0, [()])) >= 1


def test_a_thread_that_the_kernel_narrows_only_in_part_is_put_back() -> None:
    before = allowed_cores()

    def work() -> frozenset[int]:
        with pytest.raises(CoresError, match="numa_binding"):
            bind_to(frozenset({min(before), max(before) + 999}))
        return allowed_cores()

    assert in_child(work) == before


def test_a_binding_without_effect_is_only_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_bind(torch.device("cpu"))
    assert can_bind(torch.device("cuda:0"))
    assert not [kind for kind in ("mps", "xpu") if can_bind(torch.device(kind))]
    config, before = TrainingConfig(numa_binding="node"), allowed_cores()
    monkeypatch.setattr(prepare, "can_bind", lambda _: False)
    with pytest.warns(UserWarning, match="numa_binding"):
        config.prepare(torch.nn.Linear(1, 1), "cpu")
    assert allowed_cores() == before


def test_where_nothing_binds_processes_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert allowed_cores() == frozenset()
    with pytest.raises(ConfigError, match="Linux"):
        bind_rank("node", 0, [()])
    assert not can_bind(torch.device("cpu"))
    with pytest.warns(UserWarning, match="numa_binding.*Linux"):
        TrainingConfig(numa_binding="node").prepare(torch.nn.Linear(1, 1), "cpu")


@two_cores
def test_what_a_launcher_has_bound_is_seen() -> None:
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
from autotune.settings.training_config import TrainingConfig

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
def test_prepare_binds_ranks_their_threads_and_their_workers_as_trials_do(tmp_path: Path) -> None:
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
