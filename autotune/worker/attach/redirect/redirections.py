"""What a trial has redirected so far: a map from logical paths to physical ones, and what it has made itself.

Comes in: the records of the journal, in their order. Goes out: where a logical path is, whether the trial has made it.
"""

from __future__ import annotations

from autotune.protocol.made_files import Made
from autotune.worker.attach.redirect.journal import Record

__all__ = ["Redirections"]


class Redirections:
    """The state to which a journal leads; read without a lock, each read being one step of a dict."""

    def __init__(self) -> None:
        self._map: dict[str, str | None] = {}
        self._made = Made()

    def __bool__(self) -> bool:
        return bool(self._map)

    def __contains__(self, logical: str) -> bool:
        return logical in self._map

    def physical(self, logical: str) -> str | None:
        """Return where a logical path is or would be; None where it or a folder above was removed."""
        head, redirected = logical, self._map
        while head and head not in redirected:
            head = head[: head.rfind("/")]
        if not head:
            return logical
        to = redirected[head]
        return None if to is None else f"{to}{logical[len(head) :]}"

    def is_made(self, physical: str) -> bool:
        """Return whether the trial has made it, or a folder above it."""
        while physical and physical not in self._made:
            physical = physical[: physical.rfind("/")]
        return bool(physical)

    def inside(self, folder: str) -> dict[str, bool]:
        """Return the names in a folder that are redirected, and whether they are to be seen."""
        placed = ((key.rpartition("/"), value) for key, value in list(self._map.items()))
        return {name: value is not None for (above, _, name), value in placed if above == folder}

    def apply(self, records: list[Record]) -> None:
        """Learn what was redirected, in the order in which it was."""
        for kind, first, *rest in records:
            path = str(first)
            if kind == "map":
                self._map[path] = None if rest[0] is None else str(rest[0])
            elif kind == "unmap":
                self._map.pop(path, None)
            elif kind == "unmap_below":
                for key in self._below(path):
                    del self._map[key]
            elif kind == "renamed":
                for key in self._below(path):
                    self._map[f"{rest[0]}{key[len(path) :]}"] = self._map.pop(key)
            else:
                self._made.learn(str(kind), path, rest)
                if kind == "moved":
                    self._follow(path, str(rest[0]))

    def _below(self, path: str) -> list[str]:
        return [key for key in list(self._map) if key.startswith(f"{path}/")]

    def _follow(self, source: str, to: str) -> None:
        for key, value in list(self._map.items()):
            if value is not None and f"{value}/".startswith(f"{source}/"):
                self._map[key] = f"{to}{value[len(source) :]}"
