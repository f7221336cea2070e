"""The sentences of launch's and ray's notes: how trials are started, hosts that are not used."""

from __future__ import annotations

from autotune.report.wording.template import Wording

__all__ = ["LAUNCH"]

_NOT_USED = "{host} is not used: {reason}."

LAUNCH: dict[str, Wording] = {
    "forks_cannot_open_device": (
        "Each trial starts an interpreter of its own, which takes some seconds: a package that torch loads by itself "
        "has opened {devices}, which a fork can't open after that. Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where you don't "
        "need that package."
    ),
    "host_of_other_kind": _NOT_USED,
    "host_with_other_version": _NOT_USED,
    "host_without_autotune": _NOT_USED,
    "host_without_trials": _NOT_USED,
}
"""By code. The reasons of hosts are texts of errors that came from there."""
