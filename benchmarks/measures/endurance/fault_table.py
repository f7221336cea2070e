"""The faults of trials: where in the user's code each strikes, and what must be told of it.

fault_workload.py holds what each does, under the same name; fault_verdict.py, what a phase makes of an outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.records.trial import Outcome

__all__ = ["FAULTS", "PHASES", "Fault", "Hook", "Needs", "is_reached"]

Hook = Literal["model", "dataset", "worker", "collate", "step", "loss"]
"""The user's code in which it strikes; "worker": an item that is made in a loader worker."""
Needs = Literal["mounts", "cgroup", ""]
"""What the machine must allow: file systems of our own, or a memory cgroup."""

PHASES = ("probe", "baseline", "trial", "guard", "look", "repeat", "stress", "diagnose", "others")
"""Of a search, then of a diagnosis: its baseline, and other settings each alone."""
_WITHOUT_WORKERS = {"guard", "probe"}
"""Phases that load without workers."""
_WITHOUT_OBJECTION = {"probe", "guard", "stress"}
"""Phases that train for other ends: a single step, against the same in float32, on the same samples again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What the user's code does, and how a trial of it must end."""

    hook: Hook = "step"
    outcome: Outcome = "crashed"
    """"ok": harmless, which changes nothing in any phase."""
    says: str = ""
    """A regular expression that the reason must hold: the culprit."""
    frame: str = ""
    """Function of the user's module that the traceback, or the stack in the log of what hangs, must name."""
    needs: Needs = ""
    passes: tuple[str, ...] = ()
    """Phases that go on: whether a step's memory suffices is for the baseline to find out, not for the probe; the guard
    tries a smaller batch, and opens no file once it steps."""
    knows_limit: bool = False
    """It shows only where the memory limit is known: not in the probe."""
    deadlines: int = 1
    """How many times as long as others it may take: a gigabyte through a pipe takes seconds."""


_LATE = r"did not end within"

FAULTS: Mapping[str, Fault] = {
    "segfault": Fault(says="SIGSEGV"),
    "os_exit": Fault(says="exit code 3"),
    "exit_zero": Fault(says="exit code 0"),
    "sys_exit": Fault(says="SystemExit: 4", frame="_sys_exit"),
    "exec": Fault(says="exit code 0"),
    "killed": Fault(says="SIGKILL"),
    "keyboard_interrupt": Fault(says="KeyboardInterrupt", frame="_keyboard_interrupt"),
    "killed_worker": Fault(hook="worker", outcome="host_oom", says="loader worker was killed"),
    "segfault_worker": Fault(
        hook="worker", says=r"[Ww]orker.*(Segmentation fault|exited unexpectedly)"
    ),
    "exit_worker": Fault(hook="worker", says=r"[Ww]orker.*exited unexpectedly"),
    "recursion": Fault(says="RecursionError", frame="_recursion"),
    "own_warning": Fault(says="DeprecationWarning: old", frame="_own_warning"),
    "escapes": Fault(says="ValueError: owned", frame="_escapes"),
    "surrogate": Fault(says="ValueError: a file named", frame="_surrogate"),
    "long_message": Fault(says="ValueError: a tensor of", frame="_long_message"),
    "not_a_number": Fault(hook="loss", outcome="diverged", says="loss became nan|is not finite"),
    "exec_endless": Fault(outcome="timeout", says=_LATE),
    "hang_build": Fault(hook="model", outcome="timeout", says=_LATE, frame="_hang"),
    "hang_item": Fault(hook="worker", outcome="timeout", says=_LATE),
    "hang_step": Fault(outcome="timeout", says=_LATE, frame="_hang"),
    "hang_deaf": Fault(outcome="timeout", says=_LATE, frame="_hang"),
    "hang_collate": Fault(hook="collate", outcome="timeout", says=_LATE),
    "stopped_worker": Fault(hook="worker", outcome="timeout", says=_LATE),
    "stopped_rank": Fault(outcome="timeout", says=_LATE),
    "deadlocked_worker": Fault(hook="dataset", outcome="timeout", says=_LATE),
    "ram_by_rlimit": Fault(outcome="host_oom", says="machine ran out of memory", passes=("probe",)),
    "ram_by_cgroup": Fault(outcome="host_oom", says="out-of-memory killer", needs="cgroup"),
    "ram_growing": Fault(outcome="host_oom", says="must stay within", knows_limit=True),
    "huge_tensor": Fault(outcome="host_oom", says="machine ran out of memory", passes=("probe",)),
    "device_full": Fault(outcome="oom", says="device ran out of memory", passes=("probe", "guard")),
    "full_shm": Fault(hook="dataset", outcome="host_oom", says="/dev/shm", needs="mounts"),
    "full_disk": Fault(says="No space left|disk is full", needs="mounts"),
    "used_descriptors": Fault(outcome="host_oom", says="open files", passes=("guard",)),
    "daemon": Fault(outcome="ok"),
    "fork_bomb": Fault(outcome="ok"),
    "hang_at_exit": Fault(hook="dataset", outcome="ok"),
    "closed_output": Fault(outcome="ok"),
    "flood": Fault(outcome="ok", deadlines=4),
    "binary_output": Fault(outcome="ok"),
    "escapes_printed": Fault(outcome="ok"),
    "signal_handlers": Fault(outcome="ok"),
    "cwd": Fault(outcome="ok"),
    "umask": Fault(outcome="ok"),
    "strict_warnings": Fault(hook="model", outcome="ok"),
}
"""By name, those that end a trial first."""


def is_reached(fault: Fault, phase: str) -> bool:
    """Whether a phase runs the user's code in which the fault strikes, and can show it."""
    if fault.knows_limit and phase == "probe":
        return False
    if fault.hook == "loss" and phase in _WITHOUT_OBJECTION:
        return False
    needs_workers = (
        fault.hook == "worker"
        or fault is FAULTS["full_shm"]
        or fault is FAULTS["deadlocked_worker"]
    )
    return not (needs_workers and phase in _WITHOUT_WORKERS)
