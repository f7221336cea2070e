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
from autotune.worker.script import overrides
from autotune.worker.script.overrides import Begun, bind_script, can_bind_script
from tests.worker.script.scripts import LOADER, LOOP, SHORT, STEP, ScriptRig

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs Linux and two cores")
CPU = torch.device("cpu")


def test_which_processes_can_be_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    begun = Begun()
    assert can_bind_script(begun, 1, CPU)
    assert not can_bind_script(begun, 2, CPU)
    assert can_bind_script(Begun(begun.cores, is_numbered=True), 2, CPU)
    assert not can_bind_script(Begun(frozenset({min(begun.cores)}), is_numbered=True), 1, CPU), (
        "it has other cores now"
    )
    assert not can_bind_script(begun, 1, torch.device("mps"))
    assert can_bind_script(begun, 1, torch.device("cuda:0")) == (torch.version.hip is None)


def test_launcher_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = allowed_cores()
    bind_script("exclusive", 2, CPU)
    assert allowed_cores() == before


def test_bound_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def work(pipe: Any) -> None:
        os.sched_setaffinity(0, {min(allowed_cores())})
        can = can_bind_script(Begun(), 2, CPU)
        bind_script("exclusive", 2, CPU)  # of its one core there is no second part
        pipe.send((can, len(allowed_cores())))

    reading, writing = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=work, args=(writing,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert reading.recv() == (False, 1)


def test_address_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, uuid in (("0000:3b:00.0", "GPU-1"), ("0000:af:00.0", "GPU-12")):
        (tmp_path / address).mkdir()
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n"
        (tmp_path / address / "information").write_text(text)
    known = ["GPU-12", "GPU-1", "MIG-7"]
    monkeypatch.setattr(overrides, "visible_gpu", lambda at: SimpleNamespace(uuid=known[at]))
    found = [overrides._address_of(index, tmp_path) for index in range(3)]
    assert found == ["0000:af:00.0", "0000:3b:00.0", None]


@pytest.mark.slow
def test_script_is_bound_to_its_node(rig: ScriptRig) -> None:
    printed = "\nimport json, os\nprint('SEEN', json.dumps(sorted(os.sched_getaffinity(0))), flush=True)\n"
    rig.run(printed + LOADER + STEP, numa_binding="node")
    nodes = allowed_nodes(allowed_cores())
    own = cores_of_rank("node", 0, [frozenset({next(iter(nodes))})], nodes)
    assert rig.printed() == sorted(own)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's place is known")
def test_unknown_place_of_a_gpu_is_invalid(rig: ScriptRig) -> None:
    found = rig.probe(rig.write(LOOP))
    script = found.script.model_copy(update={"device": "cuda:0"})
    config = found.observed.model_copy(update={"numa_binding": "exclusive"})
    runner = rig.runner(found.words, script)
    result = runner.run(config, name="trial", deadline_s=60.0, window=SHORT)
    assert result.outcome == "invalid"
    assert "numa_binding" in result.reason
