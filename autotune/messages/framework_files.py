"""Messages on another framework's own file that a baseline was read from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.messages import message

__all__ = ["FileReason", "ddp_without_ranks", "keys_not_used", "not_read", "not_read_over", "taken_by_default"]

FileReason = Literal["other_optimizer", "no_fused_optimizer", "no_binding"]


@message
def not_read(path: str, name: str, reason: str) -> str:
    return f"{path}: not read: {name}: {reason}"


@message
def keys_not_used(path: str, names: Sequence[str]) -> str:
    return f"{path}: autotune has no setting for {', '.join(names)}"


@message
def taken_by_default(path: str, title: str, values: Sequence[str]) -> str:
    return f"{path}: missing, so taken from the defaults of {title}: {', '.join(values)}"


@message
def ddp_without_ranks(path: str, names: Sequence[str]) -> str:
    return (
        f"{path}: not read: {', '.join(names)}: needs baseline.strategy: ddp and baseline.world_size, which this file "
        "does not have"
    )


@message
def not_read_over(
    name: str,
    reason: FileReason,
    own: str | None,
    trained: str,
) -> str:
    why = {
        "other_optimizer": f"there it is of {own}, and trials train with {trained}",
        "no_fused_optimizer": f"torch can't fuse {trained} for these parameters on this device",
        "no_binding": "processes can't be bound to a NUMA node here, or it would change nothing",
    }[reason]
    return f"{name} of the framework's file is left out of the baseline: {why}."
