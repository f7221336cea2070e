"""What a rank does before its job: it tries what forks can open without a trace, and takes its share of the cores."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from autotune.apply import cores
from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import TrialJob
from autotune.worker import rank
from autotune.worker.device import open_device
from autotune.worker.rank import bad_fork_devices_of_children
from tests.factories import make_process


def test_a_look_at_what_forks_can_open_does_not_renumber_the_users_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "_bad_fork_devices", lambda: ("cuda", "xpu"))
    (before,) = multiprocessing.Process()._identity
    assert bad_fork_devices_of_children() == ("cuda", "xpu")
    assert multiprocessing.Process()._identity == (before + 1,)


def test_a_look_that_fails_says_nothing_and_ends_in_its_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "_bad_fork_devices", lambda: sys.exit("the fork ran on"))
    assert bad_fork_devices_of_children() == ()


@pytest.mark.parametrize(
    ("ranks", "own", "threads"), [(1, None, None), (2, None, 4), (3, None, 2), (2, 5, 5)]
)
def test_ranks_divide_the_cores_of_their_host(
    ranks: int,
    own: int | None,
    threads: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single process leaves torch's own choice as it is."""
    chosen = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    config = TrainingConfig(
        strategy="ddp" if ranks > 1 else "single", world_size=ranks, intra_op_threads=own
    )
    job = TrialJob(process=make_process(tmp_path), payload=tmp_path, config=config)
    rank._set_threads(job, 0, open_device("cpu"))
    assert chosen == ([] if threads is None else [threads])
