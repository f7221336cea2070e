"""Only modes that slow a user's steps down are observed, with the user's own lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import profiler

from autotune.messages.advice import _VARIABLES as DOCUMENTED
from autotune.records.watched_run import Modes
from autotune.worker import modes
from autotune.worker.modes import (
    _VARIABLES,
    join_modes,
    observe_modes,
    remember_places,
    slow_variables,
)


@pytest.mark.parametrize(
    ("name", "value", "device", "has_group", "is_slow"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "cuda", False, True),
        ("CUDA_LAUNCH_BLOCKING", "0", "cuda", False, False),
        ("CUDA_LAUNCH_BLOCKING", "1", "cpu", False, False),
        ("AMD_SERIALIZE_KERNEL", "3", "rocm", False, True),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuda", False, False),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", "cuda", False, True),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "cpu", True, True),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "cpu", False, False),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", "cpu", True, False),
        ("NCCL_DEBUG", "INFO", "cuda", True, False),
        ("NCCL_DEBUG", "TRACE", "cuda", True, True),
        ("PYTHONMALLOC", "pymalloc", "cpu", False, False),
        ("PYTHONMALLOC", "pymalloc_debug", "cpu", False, True),
        ("ONEDNN_VERBOSE", "error", "cpu", False, False),
        ("ONEDNN_VERBOSE", "1", "cpu", False, True),
        ("TORCH_CPP_LOG_LEVEL", "INFO", "cuda", True, False),
    ],
)
def test_variable_counts_only_where_it_slows_steps(
    name: str, value: str, device: str, has_group: bool, is_slow: bool
) -> None:
    found = slow_variables({name: value}, device, has_group=has_group)
    assert found == ({name: value} if is_slow else {})


def test_own_variables_do_not_count() -> None:
    variables = {"CUDA_LAUNCH_BLOCKING": "1"}
    own = ["CUDA_LAUNCH_BLOCKING"]
    assert slow_variables(variables, "cuda", has_group=False, own_variables=own) == {}


def test_every_variable_has_its_words() -> None:
    assert [variable.name for variable in _VARIABLES] == list(DOCUMENTED)


def test_modes_of_this_moment() -> None:
    former = sys.getprofile()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert observe_modes("cpu").is_anomaly_detected
    assert not observe_modes("cpu").is_anomaly_detected
    with profiler.profile():
        assert observe_modes("cpu").is_profiled
    assert not observe_modes("cpu").is_profiled
    sys.setprofile(lambda *_: None)
    try:
        assert observe_modes("cpu").is_traced
    finally:
        sys.setprofile(former)
    assert not observe_modes("cpu").is_deterministic


def test_mode_of_a_few_moments_does_not_count() -> None:
    on, off = Modes(is_profiled=True, is_traced=True), Modes(is_traced=True)
    assert join_modes([on, off, off]) == Modes(is_traced=True)
    assert join_modes([on, off]).is_profiled
    assert join_modes([]) == Modes()


@pytest.fixture
def _places() -> Iterator[None]:
    owners = (
        (torch, "set_anomaly_enabled"),
        (torch, "use_deterministic_algorithms"),
        (profiler.profile, "start"),
    )
    former = [getattr(owner, name) for owner, name in owners]
    modes._PLACES.clear()
    yield
    modes._PLACES.clear()
    for (owner, name), value in zip(owners, former, strict=True):
        setattr(owner, name, value)


@pytest.mark.usefixtures("_places")
def test_first_line_that_switches_a_mode_on_is_remembered() -> None:
    lines = iter([("/home/me/train.py", 7), ("/home/me/train.py", 30), ("/home/me/seeds.py", 3)])
    remember_places(lambda: next(lines))
    torch.autograd.set_detect_anomaly(False)
    for _ in range(2):
        with torch.autograd.set_detect_anomaly(True):
            pass
    with profiler.profile():
        pass
    found = observe_modes("cpu").places
    assert found == {"anomaly": "train.py:7", "profiler": "train.py:30"}


@pytest.mark.usefixtures("_places")
def test_unknown_line_is_no_place() -> None:
    remember_places(lambda: ("unknown", 0))
    with torch.autograd.set_detect_anomaly(True):
        pass
    assert observe_modes("cpu").places == {}
