"""The fitted lines of memory as a report tells them: of which settings they are, and for how many loader workers.

Comes in: a RunSummary. Goes out: MemoryLines that hold for the recommended settings, their names, and a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.analysis.memory_line import MemoryKind, MemoryLine, memory_kind, memory_lines
from autotune.records.run_summary import RunSummary
from autotune.report.formatting import format_bytes, format_count, name_group
from autotune.settings.training_config import TrainingConfig

__all__ = [
    "format_base",
    "lines_of_group",
    "list_memory_lines",
    "name_line",
    "say_group",
    "say_memory_line",
    "say_workers",
]


def list_memory_lines(summary: RunSummary) -> tuple[MemoryLine, ...]:
    """Every kind's line; where the limit is on RAM, as it holds with the recommended settings' loader workers."""
    workers = _settings(summary).num_workers if summary.environment.has_only_ram else None
    return memory_lines(summary.trials, num_workers=workers)


def lines_of_group(summary: RunSummary) -> tuple[MemoryLine, ...]:
    """The lines of all precisions on the devices that the recommended settings run on."""
    own = _group(memory_kind(_settings(summary)))
    return tuple(line for line in list_memory_lines(summary) if _group(line.kind) == own)


def name_line(line: MemoryLine, lines: Sequence[MemoryLine]) -> str:
    """Its precision, and its devices where the lines are of several groups: "float32, ddp × 2"."""  # noqa: RUF002 - a times sign
    has_others = len({_group(one.kind) for one in lines}) > 1
    return ", ".join((line.kind.amp_dtype, *([name_group(*_group(line.kind))] if has_others else ())))


def format_base(line: MemoryLine) -> str:
    """What a batch comes on top of: "199 MiB", or "141 MiB + 29.0 MiB a worker"."""
    alone = format_bytes(round(line.intercept_bytes - line.num_workers * line.bytes_per_worker))
    return f"{alone} + {format_bytes(round(line.bytes_per_worker))} a worker" if line.bytes_per_worker else alone


def say_memory_line(summary: RunSummary) -> tuple[str, ...]:
    """The line of the recommended settings' kind."""
    lines, kind = list_memory_lines(summary), memory_kind(_settings(summary))
    line = next((line for line in lines if line.kind == kind), None)
    if line is None:
        return ()
    slope, error = format_bytes(round(line.bytes_per_sample)), format_bytes(round(line.error_bytes))
    return (f"Memory line of {name_line(line, lines)}: {format_base(line)} + {slope} a sample, ± {error}.",)


def say_group(summary: RunSummary) -> str:
    """Whose `lines_of_group` are, where there are others, and for how many workers; "" or with a space before."""
    own = lines_of_group(summary)
    has_others = 0 < len(own) < len(list_memory_lines(summary))
    whose = f"They are of {name_group(*_group(own[0].kind))} alone." if has_others else ""
    return "".join(f" {one}" for one in (whose, say_workers(own)) if one)


def say_workers(lines: Sequence[MemoryLine]) -> str:
    """For how many loader workers lines hold; "" where that makes no difference."""
    telling = [line.num_workers for line in lines if line.bytes_per_worker]
    return f"The lines hold for {format_count(telling[0], 'loader worker')}." if telling else ""


def _settings(summary: RunSummary) -> TrainingConfig:
    return summary.baseline if summary.recommendation is None else summary.recommendation.config


def _group(kind: MemoryKind) -> tuple[str, int]:
    return kind.strategy, kind.world_size
