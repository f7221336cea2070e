"""Where trials run: on this machine, or on the machines of a Ray cluster; and how a trial's ranks lie on its hosts.

Comes in from the YAML border, the command line or a Python call; goes to the launcher and to the space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from autotune.frozen import FrozenModel

__all__ = ["Executor", "ExecutorKind", "places"]

ExecutorKind = Literal["local", "ray"]

_ADDRESS = re.compile(r"auto|(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def _check_address(address: str) -> str:
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"] or 1) not in range(1, 2**16):
        rule = 'must be auto, or host and port of the cluster, such as "10.0.0.1:6379"'
        raise ValueError(f"{rule}, but got {short_repr(address)}")
    return address


class Executor(FrozenModel):
    """Who runs trials. A plain text is taken as the kind: `executor: ray`."""

    kind: ExecutorKind = "local"
    """local: this machine; ray: the machines of a Ray cluster."""
    address: Annotated[str, Field(strict=True), AfterValidator(_check_address)] | None = None
    """Of the Ray cluster, such as "10.0.0.1:6379"; None: the one that Ray finds by itself."""
    ranks: Literal["pack", "spread"] = "pack"
    """How the ranks of a trial lie on the cluster's machines: on as few as have room for them, or on as many as there
    are."""

    @model_validator(mode="before")
    @classmethod
    def _take_text_as_kind(cls, value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, Mapping | Executor):
            return value
        raise ValueError(f"must be local, ray, or a mapping of kind, address and ranks, but got {short_repr(value)}")

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_dump(exclude={"kind"}, exclude_defaults=True)
        idle = [f"{name}={value!r}" for name, value in given.items()]
        if self.kind == "local" and idle:
            raise ValueError(
                "address and ranks say how to use a Ray cluster, and have no effect on this machine alone, but got "
                f"kind='local' with {' and '.join(idle)}; set kind: ray, or leave them out"
            )
        return self


def places(ranks: int, *, hosts: int, per_host: int, spread: bool) -> tuple[int, ...]:
    """How many ranks of a trial lie on each host that it uses, as even as possible, the larger numbers first.

    Args:
        ranks: of the trial.
        hosts: that there are.
        per_host: ranks that a host has room for.
        spread: use as many hosts as possible, not as few.

    Raises:
        ValueError: they do not fit.
    """
    if min(ranks, hosts, per_host) < 1 or ranks > hosts * per_host:
        raise ValueError(
            "a trial's ranks, one or more, must fit on its hosts, but got "
            f"(ranks={ranks}, hosts={hosts}, per_host={per_host})"
        )
    used = min(ranks, hosts) if spread else -(-ranks // per_host)
    share, more = divmod(ranks, used)
    return (*[share + 1] * more, *[share] * (used - more))
