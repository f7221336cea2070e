"""Trials whose ranks are bound to cores: they and their workers stay there, and none is measured unbound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.apply.cores import allowed_cores, allowed_nodes, cores_of_rank
from autotune.config.plan import Ref
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.protocol.messages import TrialJob
from autotune.records.trial import TrialResult
from autotune.worker.device import Device
from autotune.worker.rank import _set_threads
from tests.factories import make_process
from tests.launch.conftest import TWO_RANKS, Rig, forked_first, rig_over

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs Linux and two cores")
USER_CODE = Path(__file__).with_name("user_cores.py")


def run(rig: Rig, **settings: Any) -> TrialResult:
    parts: dict[str, Any] = {
        name: Ref(target=f"{USER_CODE}:{code}")
        for name, code in (("model", "Layer"), ("dataset", "Items"))
    }
    return rig.run(settings=settings, **parts)


def cores_of_two(binding: str) -> list[list[int]]:
    """Those that each of two ranks on this machine is to have."""
    nodes = allowed_nodes(allowed_cores())
    places = [frozenset({[*nodes][rank * len(nodes) // 2]}) for rank in (0, 1)]
    return [sorted(cores_of_rank(binding, rank, places, nodes)) for rank in (0, 1)]


def assert_stay_on_their_cores(rig: Rig, binding: str) -> None:
    """Two ranks and a loader worker of each."""
    result = run(rig, **TWO_RANKS, num_workers=1, numa_binding=binding)
    assert (result.outcome, result.reason) == ("ok", "")
    for rank, cores in enumerate(cores_of_two(binding)):
        for who in ("rank", "worker"):
            assert json.loads(rig.note(f"{who}-{rank}"))["cores"] == cores, who


@forked_first
def test_ranks_and_their_workers_stay_on_their_cores_however_they_were_started(
    any_rig: Rig,
) -> None:
    assert_stay_on_their_cores(any_rig, "exclusive")


@pytest.mark.slow
@pytest.mark.parametrize("binding", ["exclusive", "node"])
def test_what_a_bound_rank_was_forked_from_is_not_bound(rig: Rig, binding: str) -> None:
    assert_stay_on_their_cores(rig, binding)
    rig.assert_next_trial_works()
    assert run(rig).outcome == "ok"
    assert json.loads(rig.note("rank-0"))["cores"] == sorted(allowed_cores()), (
        "the next trial is not bound"
    )


@pytest.mark.slow
def test_a_bound_ranks_threads_are_as_many_as_its_cores_unless_they_are_set(rig: Rig) -> None:
    assert run(rig, **TWO_RANKS, numa_binding="exclusive").outcome == "ok"
    for rank, cores in enumerate(cores_of_two("exclusive")):
        assert json.loads(rig.note(f"rank-{rank}"))["threads"] == len(cores)
    assert run(rig, **TWO_RANKS, numa_binding="exclusive", intra_op_threads=3).outcome == "ok"
    assert json.loads(rig.note("rank-1")) == {"cores": cores_of_two("exclusive")[1], "threads": 3}


@pytest.mark.slow
def test_a_rank_that_can_not_be_bound_is_invalid_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    monkeypatch.chdir(tmp_path)
    rig = rig_over(LocalLauncher(None), tmp_path)
    result = run(rig, numa_binding="exclusive")
    assert (result.outcome, result.measurement) == ("invalid", None)
    assert "OMP_PROC_BIND=close" in result.reason


def test_a_rank_runs_unbound_where_a_binding_has_no_effect(tmp_path: Path) -> None:
    config = TrainingConfig(numa_binding="exclusive", intra_op_threads=torch.get_num_threads())
    for kind in ("mps", "xpu"):
        device = Device(torch.device(kind, 0), "mps" if kind == "mps" else "xpu")
        _set_threads(
            TrialJob(process=make_process(tmp_path), payload=tmp_path, config=config), 0, device
        )


@pytest.mark.slow
def test_a_probe_describes_the_machine_unbound(rig: Rig) -> None:
    report = rig.runner().probe(
        TrainingConfig(micro_batch_size=4, numa_binding="exclusive"), deadline_s=60.0
    )
    assert report.environment is not None
    nodes = allowed_nodes(allowed_cores())
    assert report.environment.numa_nodes == len(nodes)
    assert report.environment.node_cores == tuple(map(len, nodes.values()))
    assert report.environment.device_nodes == ()
