"""Limit the threads of loader workers, however they start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from torch.utils.data import DataLoader, Dataset

from autotune.apply import cores
from autotune.apply.cores import VARIABLES, LimitedThreads, limited, threads_in_workers
from autotune.apply.loader import observed_settings
from autotune.config.training_config import TrainingConfig

CALLED = "TEST_WORKER_CALLED"


def own_init(worker_id: int) -> None:
    """A worker_init_fn of the user's, which sees what was set before it."""
    os.environ[CALLED] = f"{worker_id} {os.environ.get(VARIABLES[0])}"


class Threads(Dataset[dict[str, Any]]):
    """An item says what threads its process has."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        np.ones((64, 64)) @ np.ones((64, 64))
        pools = threadpoolctl.threadpool_info()
        torch.ones(200, 200) @ torch.ones(
            200, 200
        )  # waits for ever where forked threads are missing
        return {
            "torch": torch.get_num_threads(),
            "blas": {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"},
            "openmp": {pool["num_threads"] for pool in pools if pool["user_api"] == "openmp"},
            "variables": {os.environ.get(name) for name in VARIABLES},
            "called": os.environ.get(CALLED),
        }


def first(items: list[Any]) -> Any:
    return items[0]


def seen_in_worker(loader: DataLoader[Any]) -> dict[str, Any]:
    seen: dict[str, Any] = next(iter(loader))
    return seen


def loader_of(start: str | None, config: TrainingConfig, own: Any = None) -> DataLoader[Any]:
    kwargs = config.dataloader_kwargs(worker_init_fn=own) | {"batch_size": 1}
    return DataLoader(
        Threads(), collate_fn=first, multiprocessing_context=start, timeout=60, **kwargs
    )


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_every_pool_is_limited(start: str) -> None:
    torch.ones(600, 600) @ torch.ones(
        600, 600
    )  # this process has threads of GNU OpenMP, which a fork leaves behind
    seen = seen_in_worker(
        loader_of(start, TrainingConfig(num_workers=1, worker_threads=1), own_init)
    )
    assert (seen["torch"], seen["blas"], seen["openmp"]) == (1, {1}, {1})
    assert seen["variables"] == {"1"}
    # the user's own runs too, afterwards
    assert seen["called"] == "0 1"
    # all of it in the worker's own process
    assert os.environ.get(CALLED) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize(("start", "threads"), [("fork", 1), ("spawn", 2)])
def test_torch_has_more_threads_unless_forked(start: str, threads: int, is_default: bool) -> None:
    torch.ones(600, 600) @ torch.ones(600, 600)
    before = multiprocessing.get_start_method(allow_none=True)
    config = TrainingConfig(num_workers=1, worker_threads=2)
    try:
        if is_default:
            multiprocessing.set_start_method(start, force=True)
        seen = seen_in_worker(loader_of(None if is_default else start, config))
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert (seen["torch"], seen["variables"]) == (threads, {"2"})
    assert max(seen["blas"]) <= 2


def test_worker_without_the_setting() -> None:
    plain = TrainingConfig(num_workers=1)
    assert "worker_init_fn" not in plain.dataloader_kwargs()
    assert plain.dataloader_kwargs(worker_init_fn=own_init)["worker_init_fn"] is own_init
    seen = seen_in_worker(loader_of("fork", plain, own_init))
    blas = {
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    }
    assert (seen["torch"], seen["blas"]) == (1, blas)
    assert seen["called"] == f"0 {os.environ.get(VARIABLES[0])}"


def test_copied_loader_has_its_own_limit() -> None:
    given = loader_of("fork", TrainingConfig(num_workers=1), own_init)
    copied = TrainingConfig(micro_batch_size=1, num_workers=1, worker_threads=1).loader(given)
    seen = seen_in_worker(copied)
    assert (seen["blas"], seen["called"]) == ({1}, "0 1")
    assert given.worker_init_fn is own_init
    assert observed_settings(copied)["worker_threads"] == 1
    assert "worker_threads" not in observed_settings(given)


def test_new_limit_replaces_the_old_one() -> None:
    twice = limited(limited(own_init, 4), 1)
    assert twice == LimitedThreads(1, own_init)
    assert (threads_in_workers(twice), threads_in_workers(own_init)) == (1, None)
    assert limited(twice, None) is own_init
    assert limited(LimitedThreads(2), None) is None


@pytest.mark.parametrize(
    ("is_forked", "threads", "asked"),
    [
        (True, 1, [0]),
        (True, 3, [0]),
        (True, 4, []),
        (False, 1, [0]),
        (False, 6, [6]),
    ],
)
def test_opencv_threads(
    is_forked: bool, threads: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[int]()
    opencv = SimpleNamespace(setNumThreads=told.append, getNumThreads=lambda: 4)
    monkeypatch.setitem(sys.modules, "cv2", opencv)
    monkeypatch.setattr(cores, "_is_forked", lambda: is_forked)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)
    monkeypatch.setattr(
        threadpoolctl, "ThreadpoolController", lambda: SimpleNamespace(lib_controllers=())
    )
    for name in VARIABLES:
        monkeypatch.setenv(name, "before")
    cores.limit_threads(threads)
    assert told == asked
