"""Read how a script's memory grows while it trains, and what its validations take.

In: calls between steps, with steps, samples and the loader's workers. Out: `MemoryUse`. Pages that
workers copy on write are counted from smaps_rollup; a worker's resident memory does not show them,
since it held them before, shared. Kept graphs are counted from the script's variables. Nothing here
raises: what the system does not report is left out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress
from pathlib import Path
from time import perf_counter, thread_time
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune.messages import trials as messages
from autotune.records.watched_run import MemoryReading, MemoryUse
from autotune.worker.device import anonymous_bytes, pages_of
from autotune.worker.lines import is_users, shown_line

_PROC = Path("/proc")
_MOST_OF_TIME = 0.03
"""Largest share of a core that readings may take: after one, the next waits accordingly. Its wall
time would count what other processes take. Source: our convention."""
_MOST_AT_FIRST = 0.1
"""The same of the first readings: three are needed within the few seconds of a watch, and pages of
three processes of 0.5 GB took 75 ms. Source: our convention."""
_FIRST_READINGS = 4
"""Readings that count as the first ones. Source: our convention."""
_LEAST_GAP_S = 0.25
"""Least seconds between two readings. Source: our convention."""
_MOST_READINGS = 64
"""Readings that are kept; further ones replace the last. Source: our convention."""
MOST_NODES = 50_000
"""Nodes after which a count of graphs stops: about 50 ms. A model's own graph has a few thousand.
Source: our convention."""
_MOST_ITEMS = 1_000
"""Items of a container that are searched, the last ones, where a loop appends. Source: our
convention."""


class _KeptGraphs(NamedTuple):
    """Graphs that the script's variables hold after a step."""

    nodes: int = 0
    name: str = ""
    """Variable that holds most nodes."""
    place: str = ""
    """File and line at which its function runs."""
    is_cut: bool = False
    """There are more nodes than are counted."""


class GrowthWatch:
    """Reads the memory of the training process, its device and its loader workers between steps."""

    def __init__(self) -> None:
        self._readings: list[MemoryReading] = []
        self._pids: tuple[int, ...] = ()
        self._due = 0.0
        self._missing = ""
        self._kept: tuple[str, str] = ("", "")
        self._counts_graphs = True

    def read_if_due(self, *, steps: int, samples: int, workers: Iterable[int]) -> None:
        """Read all memory, unless the last reading is too recent.

        Call it in the training thread right after an optimizer's step. The readings of workers that
        have ended since are dropped: each set of workers begins with new pages.

        Args:
            steps: Optimizer steps so far.
            samples: Samples that the loader has delivered in this epoch.
            workers: Process ids of the training loader's workers; () without workers.
        """
        if perf_counter() < self._due:
            return
        cpu_begun = thread_time()
        pids = tuple(workers)
        if pids != self._pids:
            self._pids = pids
            self._readings.clear()
        pages = [pages_of(pid) for pid in pids]
        known = [page for page in pages if page is not None]
        if pids and len(known) < len(pids):
            self._missing = str(messages.worker_memory_unreadable())
            known = []
        own = anonymous_bytes("self")
        if own is None:
            self._missing = self._missing or str(messages.memory_unreported())
        reading = MemoryReading(
            steps=steps,
            samples=samples,
            process_bytes=own,
            device_bytes=_device_bytes(),
            worker_private_bytes=tuple(private for private, _ in known),
            worker_shared_bytes=tuple(shared for _, shared in known),
            graph_nodes=self._count_graphs(),
        )
        if len(self._readings) == _MOST_READINGS:
            self._readings.pop()
        self._readings.append(reading)
        cpu_s = thread_time() - cpu_begun
        is_early = len(self._readings) < _FIRST_READINGS
        share = _MOST_AT_FIRST if is_early else _MOST_OF_TIME
        self._due = perf_counter() + max(_LEAST_GAP_S, cpu_s / share)

    def report(self, peaks: PeakWatch) -> MemoryUse:
        """Return the readings, with the peaks of validations."""
        name, place = self._kept
        return MemoryUse(
            readings=tuple(self._readings),
            missing=self._missing,
            kept_graph=name,
            kept_graph_place=place,
            training_peak_bytes=peaks.training_bytes,
            validation_peak_bytes=peaks.validation_bytes,
        )

    def _count_graphs(self) -> int | None:
        """Count the nodes of kept graphs, and note who keeps them; None once there are too many."""
        if not self._counts_graphs:
            return None
        try:
            found = _kept_graphs(sys._getframe(1))  # noqa: SLF001 - the script's frames
        except Exception:  # noqa: BLE001 - objects of the user's may raise anything
            self._counts_graphs = False
            return None
        if found.is_cut:
            self._counts_graphs = False
            return None
        before = [one.graph_nodes for one in self._readings if one.graph_nodes is not None]
        if before and found.nodes > max(before):
            self._kept = (found.name, found.place)
        return found.nodes


class PeakWatch:
    """Compares the peak of memory before and after validations.

    Peaks are only read, never reset, since other measurements depend on them: a validation that
    needs less than training leaves no trace, as it should.
    """

    def __init__(self) -> None:
        self.training_bytes: int | None = None
        self.validation_bytes: int | None = None

    def before(self, steps: int) -> int | None:
        """Return the peak before a pass without gradients; None if this pass is left out.

        Args:
            steps: Optimizer steps so far; a validation before the third step is left out, since
                training has not reached its own peak yet.
        """
        return _peak_bytes() if steps >= _LEAST_STEPS else None

    def after(self, before: int | None) -> None:
        """Read the peak after that pass, also if it failed.

        Args:
            before: The peak that `before` returned.
        """
        after = None if before is None else _peak_bytes()
        if before is not None and after is not None:
            self.training_bytes = self.training_bytes or before
            self.validation_bytes = max(after, self.validation_bytes or 0)


_LEAST_STEPS = 3
"""Optimizer steps that the peak of training covers, as in a trial's window (CONTRIBUTING, "Rules of
measuring")."""


def _device_bytes() -> int | None:
    """Return the bytes of all tensors on all CUDA devices; None if CUDA is not in use."""
    with suppress(RuntimeError):  # a lost device
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
    return None


def _peak_bytes() -> int | None:
    """Return the peak of tensors on the CUDA devices, else of this process's resident memory."""
    with suppress(RuntimeError):  # a lost device
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    with suppress(OSError, ValueError, IndexError):
        for line in (_PROC / "self" / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


# Kept graphs: a loss that is kept, or added to a sum, keeps the graph of its step.
#
# Only the variables of the script's running functions are searched. To ask Python for all objects
# would change the reference count of each, and so copy the very pages that workers share.


def _kept_graphs(frame: FrameType | None) -> _KeptGraphs:
    """Return the nodes that the variables of the script's running functions hold."""
    tensors = list[Tensor]()
    not_searched = 0
    found = _KeptGraphs()
    most = 0
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            for name, value in _variables_of(frame):
                own = _graphs_in(value)
                tensors += own
                if len(own) == _MOST_ITEMS and isinstance(value, Sized):
                    not_searched += len(value) - _MOST_ITEMS
                nodes = count_nodes(own)
                if nodes > most:
                    most = nodes
                    place = shown_line(frame.f_code.co_filename, frame.f_lineno)
                    found = _KeptGraphs(name=name, place=place)
        frame = frame.f_back
    nodes = count_nodes(tensors)
    # each item of a long list that was not searched has a node of its own
    return found._replace(nodes=nodes + not_searched, is_cut=nodes >= MOST_NODES)


_SHARES_VARIABLES = frozenset({"locals", "f_locals"})
"""Names by which a function keeps the dict of its variables, which a reading would change. (`vars`
is nearly always called with an argument.)"""
_UNHELD = 3
"""Reference count of that dict if nobody else holds it: the frame's, ours, and the argument's."""


def _variables_of(frame: FrameType) -> list[tuple[str, object]]:
    """Return a frame's variables, and the attributes of its `self`; none if reading changes them.

    Before Python 3.13 a function has one dict of its variables, brought up to date at each reading
    of `f_locals`: a script's `config = locals()` is that dict.
    """
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and sys.version_info < (3, 13)
    if is_copy and not _SHARES_VARIABLES.isdisjoint(frame.f_code.co_names):
        return []
    variables = frame.f_locals
    found: list[tuple[str, object]] = list(variables.items())
    if is_copy and sys.getrefcount(variables) <= _UNHELD:
        # the frame keeps this copy, which would keep tensors alive
        variables.clear()
    attributes = getattr(dict(found).get("self"), "__dict__", None)
    if isinstance(attributes, dict):
        found += [(f"self.{name}", value) for name, value in attributes.items()]
    return found


def _graphs_in(value: object) -> list[Tensor]:
    """Return the tensors with a graph that a variable is, or that a list, tuple or dict holds last."""
    items: Sequence[object] = (value,)
    if isinstance(value, dict):
        items = [*value.values()] if len(value) <= _MOST_ITEMS else ()
    elif isinstance(value, list | tuple):
        items = value[-_MOST_ITEMS:]
    return [item for item in items if isinstance(item, Tensor) and has_graph(item)]


def has_graph(tensor: Tensor) -> bool:
    """Return whether a tensor holds an autograd graph."""
    try:
        return tensor.grad_fn is not None
    except Exception:  # noqa: BLE001 - a subclass of the user's may raise anything
        return False


def count_nodes(tensors: Iterable[Tensor]) -> int:
    """Return the nodes of the graphs that these tensors hold, each once; at most `MOST_NODES`."""
    seen = set[Any]()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return len(seen)
