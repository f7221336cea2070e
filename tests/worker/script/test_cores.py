"""A script's process is bound before its first line; a launcher's own is not. Of torchrun's ranks: test_start.py."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.apply.cores import allowed_cores, allowed_nodes, cores_of_rank
from autotune.launch.local import LocalLauncher
from autotune.worker.script import overrides
from autotune.worker.script.overrides import Begun, as_begun, bind_script, can_bind_script
from tests.worker.script.scripts import HEAD, LOOP, SHORT, STEP, Script, ScriptRig

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs Linux and two cores")
CPU = torch.device("cpu")


def test_ranks_that_no_launcher_has_numbered_and_processes_that_bind_themselves_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    begun = as_begun()
    assert can_bind_script(begun, 1, CPU)
    assert not can_bind_script(begun, 2, CPU)
    assert can_bind_script(Begun(begun.cores, is_numbered=True), 2, CPU)
    assert not can_bind_script(Begun(frozenset({min(begun.cores)}), is_numbered=True), 1, CPU), (
        "it has other cores now"
    )
    assert not can_bind_script(begun, 1, torch.device("mps"))
    assert can_bind_script(begun, 1, torch.device("cuda:0")) == (torch.version.hip is None)


def test_a_launcher_is_not_bound_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = allowed_cores()
    bind_script("exclusive", 2, CPU)
    assert allowed_cores() == before


def test_what_a_launcher_has_bound_is_not_bound_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def work(pipe: Any) -> None:
        os.sched_setaffinity(0, {min(allowed_cores())})
        can = can_bind_script(as_begun(), 2, CPU)
        bind_script("exclusive", 2, CPU)  # of its one core there is no second part
        pipe.send((can, len(allowed_cores())))

    reading, writing = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=work, args=(writing,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert reading.recv() == (False, 1)


def test_a_gpus_place_is_what_nvidias_driver_tells_of_its_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, uuid in (("0000:3b:00.0", "GPU-1"), ("0000:af:00.0", "GPU-12")):
        (tmp_path / address).mkdir()
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        (tmp_path / address / "information").write_text(text)
    known: dict[int, Any] = {
        0: SimpleNamespace(uuid="GPU-12"),
        1: SimpleNamespace(uuid="GPU-1"),
        2: None,
    }
    known[3] = SimpleNamespace(uuid="MIG-7")
    monkeypatch.setattr(overrides, "visible_gpu", known.get)
    found = [overrides._address_of(index, tmp_path) for index in range(4)]
    assert found == ["0000:af:00.0", "0000:3b:00.0", None, None]


@pytest.mark.slow
def test_a_script_is_bound_to_its_node_and_says_where_it_can_not_be(
    rig: ScriptRig, probed: Script
) -> None:
    printed = "\nimport json, os\nprint('SEEN', json.dumps(sorted(os.sched_getaffinity(0))), flush=True)\n"
    words = rig.write(HEAD + printed + "loader = DataLoader(data, batch_size=16)\n" + STEP)
    rig.measured(words, probed, numa_binding="node")
    nodes = allowed_nodes(allowed_cores())
    assert rig.printed() == sorted(
        cores_of_rank("node", 0, [frozenset({next(iter(nodes))})], nodes)
    )
    lost = probed.script.model_copy(update={"device": "cuda:0"})
    result = rig.runner(words, lost).run(
        probed.observed.model_copy(update={"numa_binding": "exclusive"}),
        name="trial",
        deadline_s=60.0,
        window=SHORT,
    )
    if not torch.cuda.is_available():
        assert result.outcome == "invalid"
        assert "numa_binding" in result.reason


@pytest.fixture
def rig(fork_server: LocalLauncher, tmp_path: Path) -> ScriptRig:
    """A rig over the fork server."""
    return ScriptRig(launcher=fork_server, folder=tmp_path)


@pytest.fixture
def probed(rig: ScriptRig) -> Script:
    """A plain loop, probed."""
    return rig.probe(rig.write(LOOP))
