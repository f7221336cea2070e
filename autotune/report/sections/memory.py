"""Memory: the fitted lines, of which settings they are and for how many loader workers, and the stress run.

Comes in: a RunSummary. Goes out: MemoryLines for the plots, notes, and Sections without markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.analysis.memory.growth import kinds_not_excluded
from autotune.analysis.memory.lines import MemoryLine, memory_kind, memory_lines
from autotune.messages.units import NO_VALUE, format_bytes_beside, format_count, show
from autotune.records.memory import MemoryLimits
from autotune.records.run_summary import RunSummary
from autotune.records.stress_check import Load, load_of
from autotune.records.trial import runs_of
from autotune.report.blocks import Bullets, Section, Table, tabulate
from autotune.report.wording.names import name_group
from autotune.settings.training_config import TrainingConfig

__all__ = ["describe_group", "lines_of_group", "list_memory_lines", "memory_table", "say_memory_line", "stress_section"]

_REMARK = (
    "Lines fitted to the trials' peak memory; the error is half of the 95 % prediction interval. The last column is "
    "the largest batch that is sure to fit the limit; only batches that were run are recommended."
)


def list_memory_lines(summary: RunSummary) -> tuple[MemoryLine, ...]:
    """Every kind's line, as it holds with the recommended settings otherwise, their loader workers among them."""
    only_ram = summary.environment.has_only_ram
    return memory_lines(summary.trials, _settings(summary), summary.limit_bytes, limit_is_ram=only_ram)


def lines_of_group(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[MemoryLine, ...]:
    """The lines of all precisions on the devices that the recommended settings run on."""
    own = _group(_settings(summary))
    return tuple(line for line in lines if _group(line.config) == own)


def say_memory_line(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[str, ...]:
    """The line of the recommended settings' kind, in a sentence; () where there is none."""
    kind = memory_kind(_settings(summary))
    return tuple(
        f"Memory of {_name(line, lines)}: {_base(line)} + {show(line.bytes_per_sample, 'bytes')} a sample, "
        f"± {show(line.error_bytes, 'bytes')}."
        for line in lines
        if memory_kind(line.config) == kind
    )


def describe_group(own: Sequence[MemoryLine], lines: Sequence[MemoryLine]) -> str:
    """Whose lines `own` are, where there are others, and for how many workers; "" or with a space before."""
    has_others = 0 < len(own) < len(lines)
    whose = f" They are for {name_group(*_group(own[0].config))} only." if has_others else ""
    return whose + "".join(f" {remark}" for remark in _workers(own))


def memory_table(summary: RunSummary, lines: Sequence[MemoryLine]) -> tuple[Table, Bullets]:
    """Each line in a row, and what is to know of them."""
    remarks = (_REMARK, *_workers(lines)) if lines else ()
    remarks += tuple(_say_not_excluded(summary))
    table = tabulate(_row(line, lines, summary.limit_bytes) for line in lines)
    return table, Bullets(sentences=remarks, is_remark=True)


def _say_not_excluded(summary: RunSummary) -> Iterator[str]:
    """Yield which memory may grow to the limit within a day, as far as the short windows show."""
    chosen = summary.recommendation
    runs = runs_of(summary.trials, 0 if chosen is None else chosen.number)
    if kinds := kinds_not_excluded(runs, MemoryLimits.on(summary.environment, summary.limit_bytes)):
        memory = " or ".join("the device's memory" if kind == "device" else "host memory" for kind in kinds)
        yield f"The windows were too short to exclude that {memory} grows to the limit within a day of training."


def stress_section(summary: RunSummary) -> Section:
    """The recommended configuration on the largest samples."""
    steps = Bullets(sentences=tuple(_say_stress(summary)))
    return Section(title="Stress run: do the largest samples fit?", blocks=(steps,), is_brief=True)


def _say_stress(summary: RunSummary) -> Iterator[str]:
    found = summary.recommendation
    if found is None or found.stress is None:
        return
    stress, load = found.stress, load_of(found.stress, found.config, summary.environment, summary.facts)
    count, took = format_count(stress.steps, "step"), show(stress.seconds, "duration")
    batches = "" if stress.remark else ", ordinary batches and the largest samples in turns"
    yield f"The recommended settings trained for {count} ({took}){f' {load.where}' * bool(load.where)}{batches}."
    if stress.remark:
        yield str(stress.remark)
    limit = summary.limit_bytes
    own, whole = format_bytes_beside(load.own_bytes, limit), format_bytes_beside(load.peak_bytes, limit)
    kept = f"{'within' if load.peak_bytes <= limit else 'above'} the limit of {show(limit, 'bytes')}"
    group = f", that is up to {whole} for {_bearer(load)}" if load.is_more else ""
    yield f"Peak memory: {own}{group}, {kept} ({stress.memory.source})."
    largest, median = show(stress.largest_item_bytes, "bytes"), show(stress.median_item_bytes, "bytes")
    sizes = f"all have {largest}" if largest == median else f"the largest has {largest}, the median {median}"
    yield f"Sizes of {format_count(stress.items_seen, 'item')} were read: {sizes}."


def _bearer(load: Load) -> str:
    """Whose memory counts together: "2 ranks with 64.0 MiB of gradient buckets each"."""
    who, each = ("a rank", "") if load.ranks == 1 else (f"{load.ranks} ranks", " each")
    return f"{who} with {show(load.bucket_bytes, 'bytes')} of gradient buckets{each}" if load.bucket_bytes else who


def _row(line: MemoryLine, lines: Sequence[MemoryLine], limit_bytes: int) -> dict[str, str]:
    farthest = 4 * line.batches[-1]
    largest = line.largest_batch(limit_bytes, farthest + 1)
    return {
        "precision": _name(line, lines),
        "trials": str(len(line.batches)),
        "at batch 0": _base(line),
        "a sample": show(line.bytes_per_sample, "bytes"),
        "± error": show(line.error_bytes, "bytes"),
        "batch at the limit": f"over {farthest:,}" if largest > farthest else f"{largest:,}" if largest else NO_VALUE,
    }


def _name(line: MemoryLine, lines: Sequence[MemoryLine]) -> str:
    """Its precision, and its devices where the lines are of several groups: "float32, ddp × 2"."""  # noqa: RUF002 - a times sign
    has_others = len({_group(other.config) for other in lines}) > 1
    return f"{line.config.amp_dtype}, {name_group(*_group(line.config))}" if has_others else line.config.amp_dtype


def _base(line: MemoryLine) -> str:
    """What a batch comes on top of: "199 MiB", or "141 MiB + 58.0 MiB for 2 loader workers"."""
    workers = line.workers_bytes
    alone = show(line.intercept_bytes - workers, "bytes")
    whose = format_count(line.config.num_workers, "loader worker")
    return f"{alone} + {show(workers, 'bytes')} for {whose}" if workers else alone


def _workers(lines: Sequence[MemoryLine]) -> tuple[str, ...]:
    """For how many loader workers lines hold, where that makes a difference."""
    counts = [line.config.num_workers for line in lines if line.workers_bytes]
    return (f"The lines hold for {format_count(counts[0], 'loader worker')}.",) if counts else ()


def _settings(summary: RunSummary) -> TrainingConfig:
    return summary.baseline if summary.recommendation is None else summary.recommendation.config


def _group(config: TrainingConfig) -> tuple[str, int]:
    return config.strategy, config.world_size
