"""What each end of a worker means, told by the exception alone."""

from __future__ import annotations

import signal

import pytest
import torch

from autotune.protocol.messages import RankReport
from autotune.worker import place
from autotune.worker.build import WorkloadFault
from autotune.worker.device import DeviceError
from autotune.worker.place import failure_report
from autotune.worker.window import Diverged

KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def ended_by(error: BaseException) -> RankReport:
    with pytest.raises(type(error)) as raised:
        raise error
    return failure_report(raised.value)


class Unheard(BaseException):
    """Derived from nothing that a trial expects."""


@pytest.mark.parametrize(
    ("error", "outcome", "quoted"),
    [
        (WorkloadFault("a list"), "invalid", "a list"),
        (DeviceError("no device"), "invalid", "no device"),
        (Diverged("nan"), "diverged", "nan"),
        (MemoryError(), "host_oom", "MemoryError"),
        (torch.OutOfMemoryError("CUDA: 2 GiB\nmore"), "oom", "CUDA: 2 GiB"),
        (RuntimeError("CUDA error: out of memory"), "oom", "CUDA error: out of memory"),
        (RuntimeError("not enough memory: 3 GiB"), "host_oom", "not enough memory: 3 GiB"),
        (RuntimeError("unable to open shared memory object"), "host_oom", "/dev/shm"),
        (OSError(24, "Too many open files"), "host_oom", "ulimit -n"),
        (RuntimeError(KILLED), "host_oom", KILLED),
        (ValueError("first\nsecond"), "crashed", "ValueError: first"),
        (SystemExit(3), "crashed", "SystemExit: 3"),
        (Unheard("odd"), "crashed", "Unheard: odd"),
        (KeyError(), "crashed", "KeyError"),
    ],
)
def test_an_exception_becomes_an_outcome_with_a_reason(
    error: BaseException, outcome: str, quoted: str
) -> None:
    result = ended_by(error).result
    assert result.outcome == outcome
    assert quoted in result.reason
    assert "\n" not in result.reason
    assert (result.failure is not None) == (outcome == "crashed")


def test_out_of_memory_is_seen_behind_another_exception() -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert ended_by(outer).result.outcome == "oom"


def test_by_how_much_memory_was_missing_nobody_knows() -> None:
    result = ended_by(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    ).result
    assert (result.violation, result.measurement, result.failure) == (None, None, None)


def test_a_kernels_failure_has_a_place_only_where_each_launch_waits_for_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")
    for name in ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"):
        monkeypatch.delenv(name, raising=False)
    late = ended_by(error).result
    assert (late.outcome, late.reason) == ("crashed", f"RuntimeError: {str(error).splitlines()[0]}")
    assert late.failure is not None
    assert late.failure.is_asynchronous
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    at_once = ended_by(error).result.failure
    assert at_once is not None
    assert not at_once.is_asynchronous


def test_exceptions_that_name_each_other_come_to_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert ended_by(one).result.outcome == "crashed"


def test_a_crash_is_told_by_the_users_place_and_without_our_frames() -> None:
    failure = ended_by(ValueError("broken")).result.failure
    assert failure is not None
    assert failure.signature.startswith("ValueError at test_place.py:")
    assert "autotune/worker/place.py" not in failure.traceback
    assert failure.traceback.endswith("ValueError: broken")


def test_a_fault_of_the_workload_is_marked_as_one() -> None:
    assert ended_by(WorkloadFault("no loss")).is_workload_fault
    assert not ended_by(ValueError("no loss")).is_workload_fault


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;owned\x07 \x9b1m", r"\x1b]0;owned\x07 \x9b1m"),
        ("a file \udcff", r"a file \udcff"),
        ("abc \u202edcb", r"abc \u202edcb"),
    ],
)
def test_what_steers_a_terminal_or_is_no_character_is_told_as_an_escape(
    message: str, told: str
) -> None:
    for error, kind in (
        (ValueError(message), "ValueError: "),
        (RuntimeError(f"CUDA error: out of memory {message}"), ""),
    ):
        report = ended_by(error)
        assert report.result.reason.endswith(told)
        assert report.result.reason.startswith(kind)
        assert RankReport.model_validate_json(report.model_dump_json()) == report
        assert report.result.failure is None or told in report.result.failure.traceback


def test_a_message_of_megabytes_does_not_make_the_record_large() -> None:
    for error in (ValueError("x" * 2**22), RuntimeError("not enough memory: " + "x" * 2**22)):
        report = ended_by(error)
        assert len(report.model_dump_json()) < 2**17
    failure = ended_by(ValueError("x" * 2**22)).result.failure
    assert failure is not None
    assert failure.traceback.startswith("Traceback")
    assert failure.traceback.endswith("x")
    assert failure.signature.startswith("ValueError at test_place.py:")


def test_the_end_of_a_loader_worker_while_a_failure_is_told_is_told_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's handler of SIGCHLD raises in the main thread, wherever that is."""

    def raise_killed(_number: int, _frame: object) -> None:
        raise RuntimeError(KILLED)

    def ends_meanwhile(_error: BaseException) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return False

    monkeypatch.setattr(place, "is_kernel_failure", ends_meanwhile)
    before = signal.signal(signal.SIGUSR1, raise_killed)
    try:
        result = ended_by(ConnectionResetError("reset by peer")).result
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (result.outcome, KILLED in result.reason) == ("host_oom", True)
