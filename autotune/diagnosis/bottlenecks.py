"""Attribute the time of training to bottlenecks, and turn an Evidence into a Diagnosis. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isinf
from typing import Any

import numpy as np

from autotune.diagnosis.advice import (
    COMPUTED,
    LEAST_GAIN,
    exchange_fraction,
    is_slower,
    modes_of,
    rank_advice,
)
from autotune.diagnosis.hot_lines import (
    hottest_collate_line,
    hottest_forward_line,
    hottest_item_line,
    hottest_sampler_line,
    hottest_script_line,
    hottest_wait,
)
from autotune.diagnosis.memory_use import memory_remedies, memory_warnings, warning_for
from autotune.diagnosis.parts import (
    findings_of_parts,
    notes_on_parts,
    remedies_of_code,
    remedies_of_parts,
)
from autotune.diagnosis.run_shares import (
    APART,
    known_in_loop,
    loop_fraction,
    run_shares,
    share_of,
    whole_run_gain,
)
from autotune.diagnosis.usable_cores import cores_finding, cores_remedies
from autotune.diagnosis.worker_starts import restart_finding, slow_start, start_remedies
from autotune.messages import diagnosis as messages
from autotune.models.forecast import (
    advisable_points,
    apply_changes,
    copy_ceilings,
    device_ceiling,
    loader_ceiling,
    loader_processes,
    runs_too_many_threads,
    threads_of,
    workers_run_too_many_threads,
)
from autotune.models.memory import growth_notes
from autotune.models.observations import points_by_side
from autotune.models.statistics import memory_fault
from autotune.note import Note
from autotune.records.breakdown import LoaderCosts, Share, TimeBreakdown
from autotune.records.ceilings import CeilingBook, Headroom, headroom_of
from autotune.records.measurement import (
    Interval,
    MemoryLimits,
    keep_ceilings,
    note_on_load,
)
from autotune.records.result import Advice, Bottleneck, Diagnosis, Evidence, Finding
from autotune.records.stacks import Stacks
from autotune.records.watched_run import RunShare, WatchedRun
from autotune.settings_table import BATCH_SETTINGS
from autotune.tuning.outcomes import busy_while_host_bound, is_host_bound
from autotune.tuning.probe import with_settled_ceilings
from autotune.version import __version__

# Findings: the wall time attributed to bottlenecks, the largest share first.

WAITING_CPU_FRACTION = 0.5
"""Share of an item's time on a core below which it mostly waits. Source: our convention."""
_LEAST_SHARE = 0.10
"""Share of the wall time below which a finding is noise: the least difference between two sources
of the busy fraction. Source: our convention."""
_TAIL_FRACTION = 0.4
"""Share of the loading time in items over 8 times the median from which on the tail is the
bottleneck. Source: our convention."""
_LONGEST_PAUSE_S = 0.1
"""Seconds for which a busy machine may stop a thread: a few time slices of its scheduler. Source: our
convention."""
_SMALL_OPERATOR_S = 30e-6
"""Mean seconds of an operator below which its call costs as much as its work: 3 times the 5 to 10
us that PyTorch takes on the host for an eager operator with autograd. Source: pytorch.org, "CUDA
graphs" and "PyTorch profiler"; the factor is our convention."""
_LONGEST_GAP_S = 100e-6
"""Mean seconds between two operators above which it is no launch: ten times PyTorch's time for an
operator on the host (see above). Source: our convention."""
_BANDWIDTH_FRACTION = 0.5
"""Share of the measured copy bandwidth from which on a step is bound by it. Source: Williams et al.
2009; half of the roof is our convention."""
_SLOWED_BY = 1.5
"""Factor by which computing is slower in the loop than alone from which on the CPU counts as
oversubscribed. Source: our convention."""
_DEVICE_WORK = frozenset[Bottleneck]({"compute", "memory"})
_FEWEST_BATCHES = 3
"""Points for a line of time over batch size; with two, any noise would be a fixed cost."""


def find_bottlenecks(evidence: Evidence) -> tuple[Finding, ...]:
    """Return the findings of at least a tenth of the wall time, largest first; at least one.

    If the device waits for its host, the host comes before the device's own work, which then delays
    nothing.
    """
    parts = breakdown_of(evidence)
    if evidence.measurement.data_wait_fraction is None and evidence.measurement.breakdown is None:
        return (_finding("unknown", 1.0, messages.unknown_evidence()),)
    compute = parts.compute.fraction
    idle = parts.idle.fraction
    waits = parts.synchronise.fraction
    threads = _threads(evidence, compute + idle)
    modes = _modes(evidence, compute + idle)
    faults = [*filter(None, [threads]), *modes]
    left = max(0.0, 1 - sum(fault.share for fault in faults) / max(compute + idle, 1e-9))
    between = _between_operators(evidence, compute * left, idle * left)
    found = [
        _data(evidence, parts),
        _restart(evidence, parts),
        _copy(evidence, parts.device_copy.fraction),
        _finding("synchronise", waits, messages.synchronise_evidence(share=waits)),
        between,
        _device_work(evidence, max(0.0, (compute + idle) * left - between.share)),
        *faults,
    ]
    merged = _merged(found)
    merged = [_with_lines(finding, evidence) for finding in merged]
    heavy = [finding for finding in merged if finding.share >= _LEAST_SHARE]
    is_waiting = is_host_bound(evidence.measurement)

    def order(finding: Finding) -> tuple[float, bool]:
        is_behind = is_waiting and finding.bottleneck in _DEVICE_WORK
        return -(min(finding.share, between.share) if is_behind else finding.share), is_behind

    ranked = sorted(heavy or [max(merged, key=lambda finding: finding.share)], key=order)
    # Time for repeated samples passes in the other parts, and is lost whatever these are.
    return (*_repeats(evidence), *ranked)


def _repeats(evidence: Evidence) -> Iterator[Finding]:
    """Yield the finding that each loader worker delivers a whole stream, if the probe saw that."""
    facts = evidence.facts
    workers = evidence.config.num_workers
    if facts.is_iterable and not facts.is_sharded and workers > 1:
        repeated = messages.repeats_evidence(num_workers=workers)
        yield _finding("repeats", 1 - 1 / workers, repeated)


def _finding(bottleneck: Bottleneck, share: float, evidence: Note) -> Finding:
    return Finding(
        bottleneck=bottleneck, share=share, figures=evidence.figures, evidence=evidence.text
    )


_LINES: Mapping[Bottleneck, Sequence[Callable[[Stacks], Note | None]]] = {
    "data_cpu": (hottest_item_line, hottest_collate_line, hottest_sampler_line),
    "data_io": (hottest_item_line,),
    "data_tail": (hottest_item_line,),
    "launch": (hottest_forward_line, hottest_script_line),
    "script": (hottest_script_line, hottest_forward_line),
    "synchronise": (hottest_wait,),
}
"""Lines of the user's code that show a bottleneck, if stacks were sampled."""


def _with_lines(finding: Finding, evidence: Evidence) -> Finding:
    """Add the lines of the user's code that take the time of a finding."""
    stacks = None if evidence.watched is None else evidence.watched.stacks
    if stacks is None:
        return finding
    notes = [note for name in _LINES.get(finding.bottleneck, ()) if (note := name(stacks))]
    if not notes:
        return finding
    return Finding(
        bottleneck=finding.bottleneck,
        share=finding.share,
        figures=finding.figures | {note.code: note.figures for note in notes},
        evidence="; ".join([finding.evidence, *(note.text for note in notes)]),
    )


def _merged(found: Sequence[Finding]) -> list[Finding]:
    """Merge findings of the same bottleneck: workers and computing may both oversubscribe the CPU.

    The smaller share's evidence counts only where it would be a finding by itself.
    """
    merged: dict[Bottleneck, Finding] = {}
    for finding in sorted(found, key=lambda finding: -finding.share):
        first = merged.get(finding.bottleneck)
        if first is None:
            merged[finding.bottleneck] = finding
            continue
        share = first.share + finding.share
        figures = first.figures
        evidence = first.evidence
        if finding.share >= _LEAST_SHARE:
            figures = figures | finding.figures
            evidence += f"; {finding.evidence}"
        merged[finding.bottleneck] = Finding(
            bottleneck=finding.bottleneck, share=share, figures=figures, evidence=evidence
        )
    return list(merged.values())


def breakdown_of(evidence: Evidence) -> TimeBreakdown:
    """Return the time breakdown; if not measured, the window's waits for data against all else.

    All else then counts as computing, with "not measured" as its source.
    """
    run = evidence.measurement
    nothing = Share(fraction=0.0, source="not measured")
    if run.breakdown is not None:
        return run.breakdown
    waiting = min(1.0, max(0.0, run.data_wait_fraction or 0.0))
    script = evidence.facts.script
    clock = "clock around the loader, in the window"
    if script is not None and not script.loaders:
        clock = "clock between a step and the next forward pass"
    wait = Share(fraction=waiting, source=clock)
    rest = Share(fraction=1.0 - waiting, source=nothing.source)
    return TimeBreakdown(
        data_wait=wait, compute=rest, device_copy=nothing, synchronise=nothing, idle=nothing
    )


def fixed_step_share(evidence: Evidence) -> float:
    """Return the share of a step that does not grow with the batch: a / (a + k * batch).

    The line is a least-squares fit to the device's curve with equal relative errors; 0 if fewer
    than three batches were measured.
    """
    own = evidence.config.micro_batch_size
    ceilings = {own: device_ceiling(evidence)} | {
        apply_changes(evidence, point).micro_batch_size: point.ceiling.samples_per_s
        for point in evidence.curves.device
        if point.ceiling and point.changes.keys() <= BATCH_SETTINGS
    }
    if len(ceilings) < _FEWEST_BATCHES:
        return 0.0
    batches, rates = np.array([*ceilings.items()], dtype=np.float64).T
    # times have equal relative errors
    slope, fixed = np.polyfit(batches, batches / rates, 1, w=rates / batches)
    whole = fixed + slope * own
    return float(np.clip(fixed / whole, 0.0, 1.0)) if whole > 0 else 0.0


def _data(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share = max(0.0, parts.data_wait.fraction - parts.restart_fraction)
    costs = evidence.measurement.loader_costs
    if costs is None:
        return _finding("data_cpu", share, messages.data_cpu_evidence())
    # Items that are cheaper than collating them are no cause, whatever they wait for.
    is_collating = costs.collate_s > costs.item_s * evidence.config.micro_batch_size
    if is_collating:
        return _finding("data_cpu", share, _cpu_evidence(evidence, costs))
    if workers_run_too_many_threads(evidence):
        threads = messages.loader_threads_evidence(
            item_s=costs.item_s,
            cores_per_item=costs.computing_cores,
            loader_processes=loader_processes(evidence.config),
            cores=evidence.environment.cores,
        )
        # Threads that wait for a core make some items slow.
        return _finding("threads", share, threads)
    if costs.tail_fraction >= _TAIL_FRACTION and not _is_pause(costs):
        tail = messages.data_tail_evidence(
            slow_tail_fraction=costs.slow_tail_fraction,
            item_median_s=costs.item_median_s,
            item_slowest_s=costs.item_slowest_s,
        )
        return _finding("data_tail", share, tail)
    if costs.waiting_fraction > 1 - WAITING_CPU_FRACTION:
        waits = messages.data_io_evidence(
            item_s=costs.item_s,
            cpu_fraction=costs.cpu_fraction,
            disk_bytes_per_item=costs.disk_bytes_per_item,
        )
        return _finding("data_io", share, waits)
    return _finding("data_cpu", share, _cpu_evidence(evidence, costs))


def _is_pause(costs: LoaderCosts) -> bool:
    """Return whether slow items are pauses of the machine: items in memory, of which none is that slow."""
    is_in_memory = costs.causes is not None and costs.causes.is_in_memory
    return is_in_memory and costs.item_slowest_s < _LONGEST_PAUSE_S


def _cpu_evidence(evidence: Evidence, costs: LoaderCosts) -> Note:
    """Return the CPU work of a loader, with a sampler and a collate function that are much of it."""
    named: dict[str, Any] = {}
    causes = costs.causes
    if causes is not None:
        items_s = costs.item_s * evidence.config.micro_batch_size
        whole_s = items_s + costs.collate_s + (causes.sampler_s or 0.0)
        if causes.collate is not None and costs.collate_s >= _LEAST_SHARE * whole_s:
            place = f" ({causes.collate.place})" if causes.collate.place else ""
            named["collate_function"] = f"{causes.collate.function}{place}"
        if causes.sampler_s is not None and causes.sampler_s >= _LEAST_SHARE * whole_s:
            named["sampler_s"] = causes.sampler_s
    return messages.data_cpu_evidence(
        item_s=costs.item_s,
        cpu_fraction=min(1.0, costs.cpu_fraction),
        collate_s=costs.collate_s,
        **named,
    )


def _restart(evidence: Evidence, parts: TimeBreakdown) -> Finding:
    share = parts.restart_fraction
    samples = evidence.measurement.window.epoch_samples
    epoch_s = None if samples is None else samples / evidence.measurement.samples_per_s
    return _finding("restart", share, messages.restart_evidence(share=share, epoch_s=epoch_s))


def _copy(evidence: Evidence, share: float) -> Finding:
    """Return exposed copies, with the ceilings of copying alone if measured."""
    known = copy_ceilings(evidence)
    is_pinned = evidence.config.pin_memory
    if is_pinned not in known:
        return _finding("copy", share, messages.copy_evidence(share=share))
    copies = messages.copy_evidence(
        share=share,
        is_pinned=is_pinned,
        pageable_samples_per_s=known.get(False),
        pinned_samples_per_s=known.get(True),
        exposed_fraction=min(1.0, share * known[is_pinned] / evidence.measurement.samples_per_s),
    )
    return _finding("copy", share, copies)


def _threads(evidence: Evidence, work: float) -> Finding | None:
    """Return CPU oversubscription: computing in the loop is slower than alone; None if it is not."""
    if work <= 0 or not runs_too_many_threads(evidence):
        return None
    rates = [
        point.ceiling.samples_per_s
        for point in advisable_points(evidence, "device")
        if point.ceiling is not None and set(point.changes) == {"intra_op_threads"}
    ]
    alone = max([device_ceiling(evidence), *rates])
    slowdown = alone / (evidence.measurement.samples_per_s / work)
    if slowdown < _SLOWED_BY:
        return None
    threads = messages.threads_evidence(
        threads=threads_of(evidence),
        num_workers=evidence.config.num_workers,
        cores=evidence.environment.cores,
        slowdown=slowdown,
        device_samples_per_s=alone,
    )
    return _finding("threads", work * (1 - 1 / slowdown), threads)


def _modes(evidence: Evidence, work: float) -> list[Finding]:
    """Return the modes that make steps longer, by steps with and without each.

    Two modes may share their time: together they take no more than all of the work.

    Args:
        evidence: The run.
        work: Share of the wall time in steps.
    """
    places = modes_of(evidence).places
    found = []
    for switch in sorted(evidence.measurement.switches, key=lambda one: -one.ratio.value):
        if not is_slower(switch):
            continue
        ratio = switch.ratio
        share = work * (1 - 1 / ratio.value)
        work -= share
        if switch.name == "denormals":
            values = messages.denormals_evidence(
                share=switch.share or 0.0,
                ratio=ratio.value,
                low=ratio.low,
                high=ratio.high,
                is_at_one_thread=switch.is_at_one_thread,
            )
            found.append(_finding("denormals", share, values))
        else:
            mode = messages.debugging_evidence(
                mode=switch.name,
                ratio=ratio.value,
                low=ratio.low,
                high=ratio.high,
                place=places.get(switch.name, ""),
            )
            found.append(_finding("debugging", share, mode))
    return found


def _between_operators(evidence: Evidence, compute: float, idle: float) -> Finding:
    """Return gaps in which the device waits for the next operation; on a CPU, small operators too.

    Gaps far longer than any launch are the script's own code. Fetching a prefetched batch is work
    of the host, as launching is.
    """
    run = evidence.measurement
    loop_batch_s = evidence.config.group_batch_size / run.samples_per_s
    operators = 0 if evidence.curves.roofline is None else evidence.curves.roofline.operators
    if operators:
        outside_s = idle * loop_batch_s - (run.window.take_s or 0.0)
        if outside_s / operators > _LONGEST_GAP_S:
            own = messages.script_evidence(share=idle, outside_s=outside_s, operators=operators)
            return _finding("script", idle, own)
        operator_s = _batch_s(evidence) / operators
        if evidence.environment.device_kind == "cpu" and operator_s < _SMALL_OPERATOR_S:
            fixed = fixed_step_share(evidence)
            small = messages.operators_evidence(
                operators=operators, operator_s=operator_s, fixed_fraction=fixed
            )
            return _finding("launch", idle + compute * fixed, small)
    long_gaps = None if run.breakdown is None else run.breakdown.long_gap_fraction
    if not operators and long_gaps is not None and long_gaps >= idle / 2 > 0:
        own = messages.own_gaps_evidence(share=idle)
        return _finding("script", idle, own)
    alone = None if run.ceilings is None else run.ceilings.device
    gaps = messages.launch_evidence(
        share=idle,
        launch_s=None if alone is None else alone.host_s,
        take_s=run.window.take_s,
        batch_s=loop_batch_s,
    )
    return _finding("launch", idle, gaps)


def _device_work(evidence: Evidence, share: float) -> Finding:
    """Return the rest: the device works, limited by memory bandwidth or by arithmetic."""
    memory = _memory_evidence(evidence)
    if memory is not None:
        return _finding("memory", share, memory)
    roofline = evidence.curves.roofline
    peak = None
    if roofline is not None and roofline.flops > 0:
        batches_per_s = device_ceiling(evidence) / evidence.config.group_batch_size
        peak = roofline.flops * batches_per_s / roofline.peak_flops_per_s
    is_measured = evidence.measurement.breakdown is not None
    computing = messages.compute_evidence(share=share, is_measured=is_measured, peak_fraction=peak)
    return _finding("compute", share, computing)


def _memory_evidence(evidence: Evidence) -> Note | None:
    """Return the evidence that memory bandwidth limits the device; None if it does not."""
    run = evidence.measurement
    roofline = evidence.curves.roofline
    fullness = run.fullness
    if fullness is not None and fullness.dram_fraction is not None:
        dram = fullness.dram_fraction / max(run.busy_fraction or 1.0, 0.01)
        is_full = dram >= _BANDWIDTH_FRACTION and dram > (fullness.tensor_fraction or 0.0)
        return messages.memory_evidence(dram_fraction=min(1.0, dram)) if is_full else None
    if roofline is None:
        return None
    batch_s = _batch_s(evidence)
    moving_s = roofline.moved_bytes / roofline.peak_bytes_per_s
    if (
        moving_s < _BANDWIDTH_FRACTION * batch_s
        or moving_s <= roofline.flops / roofline.peak_flops_per_s
    ):
        return None
    return messages.memory_evidence(
        moved_bytes=roofline.moved_bytes, batch_s=batch_s, copy_s=moving_s
    )


def _batch_s(evidence: Evidence) -> float:
    """Return the seconds of one micro batch on the device alone."""
    return evidence.config.micro_batch_size / device_ceiling(evidence)


# The diagnosis: findings, advice, headline and notes.

HEALTHY_GAIN = 0.05
"""Expected gain from which on a setting is worth changing: the usual run-to-run variation on a
shared CPU. Source: our convention."""


def judge(
    name: str, evidence: Evidence, notes: Iterable[Note] = (), *, wall_s: float = 0.0
) -> Diagnosis:
    """Judge an evidence: why training is slow, and what to do about it.

    Args:
        name: Name of the job.
        evidence: Measurement, curves, machine and workload.
        notes: Notes to put before those on the evidence.
        wall_s: Seconds that the diagnosis took.
    """
    evidence = _with_credible_ceilings(evidence)
    shares = run_shares(
        evidence.watched, evidence.measurement.breakdown, evidence.environment.device_kind
    )
    of_step = _without_known_parts(evidence, shares)
    in_loop = find_bottlenecks(of_step)
    is_on_cpu = evidence.environment.device_kind == "cpu"
    given = (
        *rank_advice(of_step, in_loop),
        *remedies_of_parts(evidence.watched, shares),
        *(remedies_of_code(evidence.watched, shares) if is_on_cpu else ()),
        *start_remedies(evidence),
        *cores_remedies(evidence),
        *memory_remedies(evidence),
    )
    advice = _ranked(given, evidence, shares)
    findings = _of_run(evidence, in_loop, shares, advice)
    headline = make_headline(evidence, findings, advice, shares)
    return Diagnosis(
        name=name,
        verdict=findings[0].bottleneck,
        headline=" ".join(note.text for note in headline),
        headline_notes=headline,
        is_healthy=is_healthy(evidence, findings, advice),
        headroom=current_headroom(evidence),
        shares=shares,
        findings=findings,
        advice=advice,
        evidence=evidence,
        not_excluded=tuple(_not_excluded(evidence)),
        notes=(*notes, *notes_on_parts(evidence.watched), *_notes(evidence)),
        wall_s=wall_s,
        autotune_version=__version__,
    )


def first_verdict(watched: WatchedRun | None, device_kind: str) -> tuple[Note, ...]:
    """Return where the time goes, as far as a watch alone shows it, and a remedy; empty without one.

    Of an accelerator's steps the host's clock shows little: only what recurs is named then.
    """
    shares = run_shares(watched, None, "cpu")
    if device_kind != "cpu":
        shares = tuple(share for share in shares if share.part in APART)
    largest = sorted(shares, key=lambda share: -share.fraction)[:_FIRST_PARTS]
    if not largest:
        return ()
    parts = {f"{one.part}": one.fraction for one in largest if one.fraction >= _LEAST_SHARE}
    known = [*remedies_of_parts(watched, shares)]
    if device_kind == "cpu":
        known += remedies_of_code(watched, shares)
    best = max(known, key=_saved, default=None)
    if best is None or (best.expected_gain or 0.0) < _FAULT_FROM:
        return (messages.so_far(parts=parts),)
    remedy = messages.remedy_expected(remedy=best.text, gain=best.expected_gain)
    return messages.so_far(parts=parts), remedy


_FIRST_PARTS = 3
"""Parts of the first verdict. Source: our convention."""


def _without_known_parts(evidence: Evidence, shares: Sequence[RunShare]) -> Evidence:
    """Return the evidence of a step without checkpoints, logging and collections inside it.

    The breakdown counts them as gaps between operators, as it does all code of the script. Restarts
    are those of the run, which knows the length of its epochs.
    """
    breakdown = evidence.measurement.breakdown
    if evidence.watched is None or breakdown is None or not shares:
        return evidence
    known = known_in_loop(evidence.watched, shares)
    loop = loop_fraction(shares)
    waiting = breakdown.data_wait.fraction - breakdown.restart_fraction
    fractions = {
        "data_wait": waiting,
        "device_copy": breakdown.device_copy.fraction,
        "compute": breakdown.compute.fraction,
        "synchronise": breakdown.synchronise.fraction,
        "idle": max(0.0, breakdown.idle.fraction - known / max(known + loop, 1e-9)),
    }
    total = sum(fractions.values())
    if total <= 0:
        return evidence
    parts = {
        name: Share(fraction=min(1.0, fraction / total), source=getattr(breakdown, name).source)
        for name, fraction in fractions.items()
    }
    long_gaps = breakdown.long_gap_fraction
    if long_gaps is not None:
        long_gaps = min(parts["idle"].fraction, long_gaps / total)
    cleaned = TimeBreakdown(**parts, restart_fraction=0.0, long_gap_fraction=long_gaps)
    run = evidence.measurement.model_copy(update={"breakdown": cleaned})
    return evidence.model_copy(update={"measurement": run})


_FAULT_FROM = 0.10
"""Gain of the run from which removing a fault comes before changing settings. Source: our
convention; see `_LEAST_SHARE`."""
_FAULT_OF_BEST = 0.5
"""Time that removing a fault must save, as a share of what the best settings save at the same
batch, to come before them. Source: our convention."""


def _ranked(
    advice: Sequence[Advice], evidence: Evidence, shares: Sequence[RunShare]
) -> tuple[Advice, ...]:
    """Return advice with gains of the whole run, faults that are worth it first.

    Settings were measured under the faults: a step ten times as slow with anomaly detection shows
    little of what a larger batch gains without it. A small fault does not come before settings that
    save more, except for a larger batch, which changes the training. Faults whose gain is unknown
    come next: memory that grows, a mode that nothing can switch from outside.
    """
    of_run = [*advice]
    if evidence.watched is not None:  # else the loop is the whole run
        of_run = [_gaining(piece, shares) for piece in advice]
    batch = evidence.config.micro_batch_size
    same_batch = [
        _saved(piece)
        for piece in of_run
        if piece.settings and piece.settings.get("micro_batch_size", batch) == batch
    ]
    least = _FAULT_OF_BEST * max(same_batch, default=0.0)

    def order(piece: Advice) -> tuple[int, bool, float]:
        gain = piece.expected_gain
        if piece.is_fault and leads(piece, least):
            return (1, False, 0.0) if gain is None else (0, False, -gain)
        return 2 if piece.settings else 3, gain is None, -(gain or 0.0)

    return tuple(sorted(of_run, key=order))


_UNSIZED_FAULTS = frozenset(
    {"switch_off_mode", "unset_variable", "store_index_compactly", "detach_kept_tensors",
     "validate_with_less_memory"}
)  # fmt: skip
"""Kinds of faults that lead although their gain is unknown: modes that slow each step, and memory
that runs out."""
_MILD_VARIABLES = frozenset(
    {"CUBLAS_WORKSPACE_CONFIG", "MKL_VERBOSE", "DNNL_VERBOSE", "ONEDNN_VERBOSE"}
)
"""Environment variables whose cost depends on the job. Source: their documentation gives none."""


def leads(piece: Advice, least: float = 0.0) -> bool:
    """Return whether removing a fault comes before changing settings.

    Args:
        piece: Advice on the whole run.
        least: Share of the run's time that it must save.
    """
    gain = piece.expected_gain
    if not piece.is_fault:
        return False
    if gain is None:
        return piece.kind in _UNSIZED_FAULTS and piece.figures.get("name") not in _MILD_VARIABLES
    is_sure = piece.gain_interval is None or piece.gain_interval.low > 0
    return gain >= _FAULT_FROM and _saved(piece) >= least and is_sure


def _saved(piece: Advice) -> float:
    """Return the share of the run's time that advice saves."""
    gain = piece.expected_gain or 0.0
    return 1.0 - 1.0 / (1.0 + gain)


def _gaining(piece: Advice, shares: Sequence[RunShare]) -> Advice:
    """Return advice on the loop with its gain of the whole run; other advice has that already."""
    if piece.expected_samples_per_s is None or piece.expected_gain is None:
        return piece
    interval = piece.gain_interval
    if interval is not None:
        interval = Interval(
            value=whole_run_gain(shares, interval.value),
            low=whole_run_gain(shares, interval.low),
            high=whole_run_gain(shares, interval.high),
        )
    return piece.model_copy(
        update={
            "expected_gain": whole_run_gain(shares, piece.expected_gain),
            "gain_interval": interval,
        }
    )


def find_in_run(evidence: Evidence, shares: Sequence[RunShare]) -> Iterator[Finding]:
    """Yield the bottlenecks of a run outside its steps."""
    if evidence.watched is None:
        return
    mode = _unmeasured_mode(evidence)
    if mode is not None:
        yield mode
    cores = cores_finding(evidence)
    if cores is not None:
        yield cores
    yield from _exchange(evidence.watched, exchange_fraction(evidence))
    own = share_of(shares, "other")
    # On an accelerator the breakdown shows what of it the device waits for.
    if own >= _LEAST_SHARE and evidence.environment.device_kind == "cpu":
        yield _with_lines(_finding("script", own, messages.own_code_evidence(share=own)), evidence)
    for share in shares:
        bottleneck = _OF_PART.get(share.part)
        restart = restart_finding(evidence) if bottleneck == "restart" else None
        if restart is not None:
            yield restart.model_copy(update={"share": share.fraction})
        elif bottleneck is not None:
            words = messages.part_evidence(
                share=share.fraction, period=share.period, place=share.place
            )
            yield _finding(bottleneck, share.fraction, words)
    yield from findings_of_parts(evidence.watched, shares)


def _unmeasured_mode(evidence: Evidence) -> Finding | None:
    """Return a debugging mode that is on and was not compared, with a share of 0; None without one."""
    modes = modes_of(evidence)
    compared = {switch.name for switch in evidence.measurement.switches}
    if modes.is_profiled and "profiler" not in compared:
        place = modes.places.get("profiler", "")
        return _finding("debugging", 0.0, messages.mode_left_on(mode="profiler", place=place))
    for variable, value in modes.variables.items():
        return _finding("debugging", 0.0, messages.variable_left_on(name=variable, value=value))
    return None


def _exchange(watched: WatchedRun, share: float) -> Iterator[Finding]:
    """Yield the exchange of gradients between ranks, with passes that no step needs."""
    exchange = watched.exchange
    if exchange is None or exchange.exposed_s is None or not watched.steps:
        return
    per_step = exchange.synchronised // watched.steps  # the last step is not complete
    words = messages.exchange_evidence(exposed_s=per_step * exchange.exposed_s)
    if per_step > 1:
        words = messages.unneeded_exchanges_evidence(
            backwards_per_step=per_step, exposed_s=exchange.exposed_s
        )
    yield _finding("communication", share, words)


_OF_PART: dict[str, Bottleneck] = {
    "startup": "startup",
    "restart": "restart",
}


_OF_STEP: tuple[Bottleneck, ...] = ("compute", "memory", "launch")
"""Bottlenecks of model and optimizer; on a CPU a profiler counts the script's own tensors with them."""
_OF_DATA: tuple[Bottleneck, ...] = ("data_cpu", "data_io", "data_tail")


def _of_run(
    evidence: Evidence,
    in_loop: Sequence[Finding],
    shares: Sequence[RunShare],
    advice: Sequence[Advice],
) -> tuple[Finding, ...]:
    """Return the bottlenecks of the whole run: that of the first advice first, then by share."""
    loop = loop_fraction(shares)
    of_run = [*find_in_run(evidence, shares)]
    named = {finding.bottleneck for finding in of_run}
    most = dict.fromkeys(_OF_STEP, loop - share_of(shares, "other"))
    if evidence.environment.device_kind == "cpu" and evidence.watched is not None:
        waiting = share_of(shares, "waiting")
        most |= dict.fromkeys(_OF_DATA, waiting) if waiting else {}
    found = [
        *(
            finding.model_copy(
                update={"share": min(loop * finding.share, most.get(finding.bottleneck, 1.0))}
            )
            for finding in in_loop
            if finding.bottleneck not in named
        ),
        *of_run,
    ]
    first = advice[0].against if advice and leads(advice[0]) else None
    heavy = [one for one in found if one.share >= _LEAST_SHARE or one.bottleneck == first]
    heavy = heavy or found[:1]
    return tuple(
        sorted(heavy, key=lambda finding: (finding.bottleneck != first, -finding.share))
        if len(shares) and evidence.watched is not None
        else heavy
    )


def is_healthy(evidence: Evidence, findings: Sequence[Finding], advice: Sequence[Advice]) -> bool:
    """Return whether computing is the only finding, with a breakdown, and no advice gains 5 %."""
    gains = [piece.expected_gain or 0.0 for piece in advice]
    is_computing = [finding.bottleneck for finding in findings] == ["compute"]
    return (
        evidence.measurement.breakdown is not None
        and is_computing
        and not any(leads(piece) for piece in advice)
        and max(gains, default=0.0) < HEALTHY_GAIN
    )


def current_headroom(evidence: Evidence) -> Headroom:
    """Return the headroom of the current settings."""
    run = evidence.measurement
    return headroom_of(
        run.samples_per_s,
        loader_ceiling=loader_ceiling(evidence),
        device_ceiling=device_ceiling(evidence),
        copy_ceiling=copy_ceilings(evidence).get(evidence.config.pin_memory),
        host_ceiling=run.host_ceiling,
        host_bound_busy=busy_while_host_bound(run),
    )


def make_headline(
    evidence: Evidence,
    findings: Sequence[Finding],
    advice: Sequence[Advice],
    shares: Sequence[RunShare] = (),
) -> tuple[Note, ...]:
    """Return the headline: the bottleneck, then the remedy that should help most."""
    first = findings[0]
    points = (*evidence.curves.loader, *evidence.curves.device)
    has_others = any(point.changes and point.ceiling is not None for point in points)
    if is_healthy(evidence, findings, advice):
        least_gain = HEALTHY_GAIN if has_others else None
        return (messages.healthy(share=first.share, least_gain=least_gain),)
    if first.bottleneck == "unknown":
        return (messages.time_unknown(),)
    head = _first_sentence(evidence, findings, shares)
    if advice and leads(advice[0]):
        warning = warning_for(evidence, advice[0].kind)
        return warning or head, _remedy_of(evidence, advice[0])
    for piece in advice:
        if piece.settings and piece.expected_gain is not None:
            return head, _headline_of(evidence, piece, piece.expected_gain)
    if has_others:
        return head, messages.no_setting_helps(least_gain=LEAST_GAIN)
    return head, messages.others_not_measured()


def _first_sentence(
    evidence: Evidence, findings: Sequence[Finding], shares: Sequence[RunShare]
) -> Note:
    """Return the bottleneck in a sentence: of a part of the run, with its period and place."""
    first = findings[0]
    if first.bottleneck == "debugging" and not first.share:
        return messages.cost_not_measured(evidence=first.evidence)
    part = next((share for share in shares if share.part == first.bottleneck), None)
    if part is not None and evidence.watched is not None:
        return messages.largest_share(
            part=part.part, share=part.fraction, period=part.period, place=part.place
        )
    is_divided = evidence.measurement.breakdown is not None or evidence.watched is not None
    if first.bottleneck == "compute" and not is_divided:
        return messages.time_not_attributed(share=first.share)
    if first.bottleneck == "compute" and len(findings) > 1:
        return messages.bottleneck(
            bottleneck=first.bottleneck,
            share=first.share,
            second=findings[1].bottleneck,
            second_share=findings[1].share,
        )
    return messages.bottleneck(bottleneck=first.bottleneck, share=first.share)


def _remedy_of(evidence: Evidence, piece: Advice) -> Note:
    """Return the remedy of a fault; without its gain if other programs disturbed the measurement."""
    load = evidence.measurement.host_load
    if load is not None and load.is_loaded:
        return messages.remedy_expected(remedy=piece.text, gain=None)
    interval = piece.gain_interval
    high = None if interval is None or isinf(interval.high) else interval.high
    return messages.remedy_expected(
        remedy=piece.text,
        gain=piece.expected_gain,
        low=None if interval is None else interval.low,
        high=high,
    )


def _headline_of(evidence: Evidence, best: Advice, gain: float) -> Note:
    """Return the setting that should help most; its gain may be an effect of other programs."""
    load = evidence.measurement.host_load
    if load is not None and load.is_loaded:
        return messages.may_help(
            settings=best.settings, others_cores=load.others_cores, cores=load.cores
        )
    write = messages.computed_setting if best.kind in COMPUTED else messages.best_setting
    return write(settings=best.settings, gain=gain)


def _with_credible_ceilings(evidence: Evidence) -> Evidence:
    """Drop ceilings that the run exceeds, and join those measured both in the run and in curves."""
    config = evidence.config
    run = evidence.measurement
    book = CeilingBook()
    keep_ceilings(book, config, run)
    for side, points in points_by_side(evidence.curves):
        for point in points:
            if not point.changes:
                book.keep(side, config, point.ceiling)
    return evidence.model_copy(update={"measurement": with_settled_ceilings(run, config, book)})


def _not_excluded(evidence: Evidence) -> Iterator[Note]:
    """Yield the causes that could not be checked."""
    watched = evidence.watched
    if watched is None:
        return
    if watched.stacks is None:
        yield messages.not_excluded(cause="lines", reason=watched.stacks_missing)
    if watched.memory.missing and evidence.config.has_workers:
        yield messages.not_excluded(cause="growth", reason=watched.memory.missing)
    if evidence.config.process_count > 1:
        yield messages.not_excluded(cause="modes", reason=messages.several_ranks())


def _notes(evidence: Evidence) -> Iterator[Note]:
    """Yield notes on the evidence."""
    if evidence.measurement.breakdown is None:
        yield messages.breakdown_not_measured()
    fault = memory_fault(evidence.measurement, evidence.limit_bytes)
    if fault is not None:
        yield messages.search_would_refuse(fault=fault)
    load = note_on_load(evidence.measurement.host_load)
    if load is not None:
        yield load
    limits = MemoryLimits.on(evidence.environment, evidence.limit_bytes)
    yield from memory_warnings(evidence)
    start = slow_start(evidence)
    if start is not None:
        yield start
    yield from growth_notes([evidence.measurement], limits, "baseline")
    yield from evidence.measurement.notes
    yield from evidence.curves.notes
    left_out = Counter[str]()
    for side, points in points_by_side(evidence.curves):
        left_out[side] = sum(point.is_left_out for point in points)
        for point in points:
            if point.ceiling is None and not point.is_left_out:
                yield messages.side_not_measured(
                    side=side, settings=point.changes, reason=point.reason
                )
    if counts := dict(+left_out):
        yield messages.no_time_for_points(counts=counts)
