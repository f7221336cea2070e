"""Write a diagnosis: its headline, the evidence of each bottleneck (without a full stop), and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from autotune.messages import message
from autotune.messages.units import (
    MODES,
    format_bytes,
    format_count,
    format_duration,
    format_fraction,
    format_mean_count,
    format_short_time,
    format_throughput,
    format_times,
    show,
    show_gain_interval,
    show_interval,
)
from autotune.note import Note

BOTTLENECKS = {
    "data_cpu": "data-bound by CPU work",
    "data_io": "data-bound by waiting for I/O",
    "data_tail": "data-bound by a slow tail of items",
    "restart": "bound by restarts of the loader",
    "copy": "copy-bound",
    "compute": "compute-bound",
    "launch": "launch-bound",
    "script": "bound by the script's own code between operations",
    "synchronise": "bound by host-device synchronisation",
    "memory": "bound by memory bandwidth",
    "threads": "bound by CPU oversubscription",
    "checkpoint": "bound by checkpoints",
    "validation": "bound by validation",
    "logging": "bound by logging",
    "collection": "bound by garbage collection",
    "startup": "bound by its start",
    "debugging": "slowed down by a debugging mode",
    "denormals": "slowed down by subnormal values",
    "cores": "bound by cores that it may not use",
    "communication": "communication-bound",
    "repeats": "repeated samples, of a stream that is not shared out",
    "unknown": "not known",
}
"""Name of each bottleneck of a single job."""
RUN_PART_NAMES = {
    "startup": "start-up",
    "waiting": "waiting for data",
    "restart": "epoch restarts",
    "copy": "copying to the device",
    "compute": "computing on the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer",
    "synchronise": "waiting for the device",
    "checkpoint": "checkpoints",
    "validation": "validation",
    "logging": "logging",
    "collection": "garbage collection",
    "other": "other Python of the script",
}
"""Name of each part of an hour of training."""
_WITH_ARTICLE = frozenset({"forward", "backward", "optimizer"})
_OCCURRENCES = {
    "checkpoint": "checkpoint",
    "validation": "validation",
    "collection": "garbage collection",
}
"""One occurrence of each part that most trainings have and a short observation may miss."""


# Headline


@message
def healthy(share: float, least_gain: float | None) -> str:
    computes = f"Healthy: the device computes {format_fraction(share)} of the time"
    if least_gain is None:
        return f"{computes}. Other settings were not measured."
    return f"{computes}, and no measured setting gains {_percent(least_gain)}."


@message
def bottleneck(
    bottleneck: str, share: float, second: str | None = None, second_share: float | None = None
) -> str:
    name = BOTTLENECKS[bottleneck]
    first = f"{name[0].upper()}{name[1:]} ({format_fraction(share)} of the time)"
    if second is None or second_share is None:
        return f"{first}."
    return f"{first}, but also {BOTTLENECKS[second]} ({format_fraction(second_share)})."


@message
def largest_share(part: str, share: float, period: str = "", place: str = "") -> str:
    """Write the first sentence of a script's diagnosis: the largest share that can be won."""
    article = "the " if part in _WITH_ARTICLE else ""
    text = (
        f"{format_fraction(share)} of an hour of training goes into {article}{RUN_PART_NAMES[part]}"
    )
    details = ", ".join(filter(None, [period, place]))
    return f"{text} ({details})." if details else f"{text}."


@message
def remedy_expected(
    remedy: str, gain: float | None, low: float | None = None, high: float | None = None
) -> str:
    """Write the second one: its remedy, a sentence without a full stop, and its expected gain.

    Args:
        remedy: The remedy.
        gain: Its gain; None if unknown.
        low: Lower end of the gain's 95 % interval; None if the interval is unknown.
        high: Upper end; None if it is infinite.
    """
    if gain is None:
        return f"{remedy}."
    text = f"{remedy}: {show(gain, 'gain')} expected"
    if low is None:
        return f"{text}."
    return f"{text} ({show_gain_interval(low, high)})."


@message
def time_not_attributed(share: float) -> str:
    return f"{format_fraction(share)} of the time is not spent waiting for data; its breakdown was not measured."


@message
def time_unknown() -> str:
    return "The bottleneck is unknown: the script has no DataLoader, so autotune cannot measure its waits for data."


@message
def so_far(parts: Mapping[str, float]) -> str:
    shares = ", ".join(
        f"{RUN_PART_NAMES.get(part, part)} {format_fraction(share)}"
        for part, share in parts.items()
    )
    return f"An hour of this training goes into: {shares}"


@message
def best_setting(settings: Mapping[str, object], gain: float) -> str:
    return f"{_set(settings)}: {show(gain, 'gain')} expected."


@message
def computed_setting(settings: Mapping[str, object], gain: float) -> str:
    return f"{_set(settings)}: about {show(gain, 'gain')} expected (computed from an item's cost, not measured)."


@message
def may_help(settings: Mapping[str, object], others_cores: float, cores: int) -> str:
    return (
        f"{show(settings, 'settings')} may help, but other programs used {others_cores:.1f} of the "
        f"{cores} cores during the measurement: measure again."
    )


@message
def no_setting_helps(least_gain: float) -> str:
    return f"No measured setting gains more than {_percent(least_gain)}."


@message
def others_not_measured() -> str:
    return "Other settings were not measured."


def _set(settings: Mapping[str, object]) -> str:
    return f"Set {show(settings, 'settings')}"


def _percent(gain: float) -> str:
    return f"{100 * gain:.0f} %"


# An hour of training


@message
def not_observed(parts: Sequence[str], observed_s: float) -> str:
    names = [_OCCURRENCES[part] for part in parts]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"No {listed} within the {show(observed_s, 'duration')} observed."


@message
def not_excluded(cause: str, reason: Note | str) -> str:
    return f"{CHECKS[cause]} ({reason})"


@message
def several_ranks() -> str:
    return "the script has several ranks"


CHECKS = {
    "lines": "slow lines",
    "growth": "memory growth",
    "modes": "debugging modes, subnormal values",
}
"""Causes that a check may not reach; all of them fit in a line of 80 columns."""


# Evidence


@message
def debugging_evidence(mode: str, ratio: float, low: float, high: float, place: str) -> str:
    where = f" ({place})" if place else ""
    return f"{MODES[mode]}{where} is on: {_longer(ratio, low, high)}"


@message
def mode_left_on(mode: str, place: str) -> str:
    return f"{MODES[mode]} is on ({place})" if place else f"{MODES[mode]} is on"


@message
def variable_left_on(name: str, value: str) -> str:
    return f"the environment has {name}={value}"


@message
def cost_not_measured(evidence: str) -> str:
    """Write the first sentence on a mode that nothing could switch off for a comparison."""
    return f"{evidence[0].upper()}{evidence[1:]}; its cost was not measured."


@message
def denormals_evidence(
    share: float, ratio: float, low: float, high: float, is_at_one_thread: bool
) -> str:
    threads = ", both with one thread" if is_at_one_thread else ""
    return (
        f"{format_fraction(share)} of the values of a step are subnormal: "
        f"{_longer(ratio, low, high)} as with such values flushed to zero{threads}"
    )


def _longer(ratio: float, low: float, high: float) -> str:
    interval = show_interval(low, high, "times")
    return f"a step takes {format_times(ratio)} times as long ({interval})"


@message
def unneeded_exchanges_evidence(backwards_per_step: float, exposed_s: float) -> str:
    return (
        f"a step has {format_mean_count(backwards_per_step)} backward passes, and each of them "
        f"exchanges gradients, which holds it up for {format_short_time(exposed_s)}"
    )


@message
def exchange_evidence(exposed_s: float) -> str:
    return f"exchanging gradients holds each step up for {format_short_time(exposed_s)}"


@message
def own_gaps_evidence(share: float) -> str:
    return (
        f"{format_fraction(share)} of the time passes between operators, most of it in gaps longer "
        "than any launch"
    )


@message
def own_code_evidence(share: float) -> str:
    return f"{format_fraction(share)} of the time is the script's own code outside of loader, model and optimizer"


@message
def part_evidence(share: float, period: str, place: str) -> str:
    return f"{format_fraction(share)} of the time, {period} at {place}"


@message
def data_cpu_evidence(
    item_s: float | None = None,
    cpu_fraction: float | None = None,
    collate_s: float | None = None,
    collate_function: str | None = None,
    sampler_s: float | None = None,
) -> str:
    if item_s is None or cpu_fraction is None or collate_s is None:
        return "training waits for data; the cost of an item was not measured"
    text = f"{_item(item_s, cpu_fraction)}; collating a batch takes {format_short_time(collate_s)}"
    if collate_function is not None:
        text += f", in {collate_function}"
    if sampler_s is not None:
        text += f"; drawing its indices takes {format_short_time(sampler_s)}"
    return text


@message
def repeats_evidence(num_workers: int) -> str:
    return (
        f"each of the {num_workers} loader workers delivers all of the stream, so that training sees "
        f"each sample {num_workers} times in a pass over the data"
    )


@message
def data_io_evidence(item_s: float, cpu_fraction: float, disk_bytes_per_item: float | None) -> str:
    text = _item(item_s, cpu_fraction)
    if disk_bytes_per_item:
        text += f", and reads {format_bytes(disk_bytes_per_item)} from disk"
    return text


@message
def data_tail_evidence(
    slow_tail_fraction: float, item_median_s: float, item_slowest_s: float
) -> str:
    return (
        f"{format_fraction(slow_tail_fraction)} of the loading time goes into items over 8 times "
        f"the median of {format_short_time(item_median_s)}, up to "
        f"{format_short_time(item_slowest_s)}"
    )


@message
def loader_threads_evidence(
    item_s: float, cores_per_item: float, loader_processes: int, cores: int
) -> str:
    return (
        f"an item keeps {cores_per_item:.1f} cores busy for {format_short_time(item_s)}, in "
        f"threads of a library (OpenCV, NumPy) or in processes that it starts; {loader_processes} "
        f"loader processes would need {loader_processes * cores_per_item:.1f} cores, but there are "
        f"{cores}"
    )


@message
def threads_evidence(
    threads: int, num_workers: int, cores: int, slowdown: float, device_samples_per_s: float
) -> str:
    return (
        f"{threads} threads and {num_workers} loader workers share {cores} cores: computing is "
        f"{slowdown:.1f} times slower in the loop than alone ({format_throughput(device_samples_per_s)})"
    )


@message
def restart_evidence(share: float, epoch_s: float | None) -> str:
    text = f"restarting the loader takes {format_fraction(share)} of the time"
    if epoch_s is not None:
        restart_s = format_short_time(share * epoch_s)
        text += f": {restart_s} in each epoch of {format_short_time(epoch_s)}"
    return text


@message
def copy_evidence(
    share: float,
    is_pinned: bool | None = None,
    exposed_fraction: float | None = None,
    pageable_samples_per_s: float | None = None,
    pinned_samples_per_s: float | None = None,
) -> str:
    copies = f"{format_fraction(share)} of the time, batches are copied to the device while nothing computes"
    if is_pinned is None or exposed_fraction is None:
        return copies
    reached = []
    if pageable_samples_per_s is not None:
        yours = "" if is_pinned else " (yours)"
        reached.append(f"{format_throughput(pageable_samples_per_s)} from pageable memory{yours}")
    if pinned_samples_per_s is not None:
        yours = " (yours)" if is_pinned else ""
        reached.append(f"{format_throughput(pinned_samples_per_s)} from pinned memory{yours}")
    alone = f"{format_fraction(exposed_fraction)} of what copying alone takes"
    return f"{copies}: {alone}, which reaches {', '.join(reached)}"


@message
def synchronise_evidence(share: float) -> str:
    return (
        f"{format_fraction(share)} of the time the device is idle because the host waited for it "
        "before launching more (loss.item(), a blocking copy)"
    )


@message
def recurring_evidence(
    share: float,
    what: str,
    place: str,
    period: str,
    each_s: float,
    each_bytes: int = 0,
) -> str:
    each = describe_recurring(what, place, period, each_s, each_bytes)
    return f"{format_fraction(share)} of the run: {each}"


def describe_recurring(
    what: str, place: str, period: str, each_s: float, each_bytes: int = 0
) -> str:
    """Return what recurs: "torch.save at train.py:41, every 5 steps, takes 57.1 ms and writes 32.0 MiB"."""
    text = f"{what} at {place}" if place else what
    if period:
        text += f", {period},"
    text += f" takes {format_short_time(each_s)}"
    if each_bytes:
        text += f" and writes {format_bytes(each_bytes)}"
    return text


@message
def tracker_not_timed(what: str, calls_per_step: float) -> str:
    return (
        f"{what} is called {calls_per_step:.2g} times a step; autotune keeps this tracker silent, so "
        "its time is not known and is in no share."
    )


@message
def written_elsewhere(files: int, first: str) -> str:
    many = f"{first} and {files - 1} other files are" if files > 1 else f"{first} is"
    return (
        f"{many} written to another file system here, since the folder has no room or can't be "
        "written: saving may take longer in training."
    )


@message
def operators_evidence(operators: int, operator_s: float, fixed_fraction: float) -> str:
    return (
        f"a batch takes {operators:,} operators of {format_short_time(operator_s)} each, and "
        f"{format_fraction(fixed_fraction)} of its time does not depend on the batch size"
    )


@message
def launch_evidence(
    share: float,
    launch_s: float | None = None,
    take_s: float | None = None,
    batch_s: float | None = None,
) -> str:
    needs = []
    if launch_s is not None:
        needs.append(f"{format_short_time(launch_s)} to launch a batch's work")
    if take_s is not None:
        needs.append(f"{format_short_time(take_s)} to fetch it from the loader")
    if not needs or batch_s is None:
        return f"{format_fraction(share)} of the time passes between operations"
    return (
        f"the device waits {format_fraction(share)} of the time for the host, which needs "
        f"{' and '.join(needs)}; a batch takes {format_short_time(batch_s)}"
    )


@message
def script_evidence(share: float, outside_s: float, operators: int) -> str:
    return (
        f"{format_short_time(outside_s)} of each step, {format_fraction(share)} of the time, is "
        f"spent neither in torch's {operators:,} operators nor in the loader: far more than "
        "launching them takes"
    )


@message
def compute_evidence(share: float, is_measured: bool, peak_fraction: float | None) -> str:
    if is_measured:
        return describe_computing(share, peak_fraction)
    return f"{format_fraction(share)} of the time is not spent waiting for data; the rest was not measured"


def describe_computing(share: float, peak_fraction: float | None) -> str:
    computing = f"the device computes {format_fraction(share)} of the time"
    if peak_fraction is None:
        return computing
    peak = f"{format_fraction(peak_fraction)} of the speed of a large matrix product"
    return f"{computing}, at {peak} in the same precision"


@message
def memory_evidence(
    dram_fraction: float | None = None,
    moved_bytes: float | None = None,
    batch_s: float | None = None,
    copy_s: float | None = None,
) -> str:
    if dram_fraction is not None:
        return f"{format_fraction(dram_fraction)} of the memory bandwidth is used while the device is busy (GPM)"
    return (
        f"a batch moves {show(moved_bytes, 'bytes')} in {show(batch_s, 'seconds')}; a large copy "
        f"would take {show(copy_s, 'seconds')}"
    )


@message
def unknown_evidence() -> str:
    return (
        "the script makes its batches itself, and autotune cannot separate that from its other work"
    )


def _item(item_s: float, cpu_fraction: float) -> str:
    return (
        f"an item takes {format_short_time(item_s)}, {format_fraction(cpu_fraction)} of it CPU time"
    )


# Notes


@message
def breakdown_not_measured() -> str:
    return "The time breakdown was not measured: all time not spent waiting for data counts as computing."


@message
def search_would_refuse(fault: Note | str) -> str:
    return f"A search would refuse these settings: {fault}."


@message
def side_not_measured(side: str, settings: Mapping[str, object], reason: Note | str) -> str:
    return f"The {side} alone was not measured with {show(settings, 'settings') or 'your settings'}: {reason}."


@message
def no_time_for_points(counts: Mapping[str, int]) -> str:
    sides = (
        f"the {side} alone with {count} {'setting' if count == 1 else 'settings'}"
        for side, count in counts.items()
    )
    return f"No time was left to measure {', '.join(sides)}."


@message
def others_failed(reason: Note | str) -> str:
    return f"Other settings were not measured: {reason}."


@message
def no_time_for_others(left_s: float, most_s: float, startup_s: float) -> str:
    return (
        f"Other settings were not measured: {left_s:.0f} s of the {most_s:.0f} s for a diagnosis "
        f"are left, and a trial takes {startup_s:.0f} s to start."
    )


@message
def no_effect_on_diagnosis(names: Sequence[str]) -> str:
    return f"Ignored by a diagnosis, which searches nothing and keeps no run folder: {', '.join(names)}."


# Evidence of the bottlenecks of several devices


class UnevenRank(TypedDict):
    """A rank slower than the others."""

    rank: int
    device: str
    side: str
    fraction: float


@message
def communication_evidence(
    bytes_exchanged: int, exposed_s: float, exposed_fraction: float, hidden_fraction: float
) -> str:
    return (
        f"exchanging {format_bytes(bytes_exchanged)} of gradients adds "
        f"{format_short_time(exposed_s)} to a step ({format_fraction(exposed_fraction)} of it); "
        f"{format_fraction(hidden_fraction)} of the exchange is hidden behind the backward pass"
    )


@message
def data_parallel_evidence(world_size: int, reached_fraction: float) -> str:
    return (
        f"with batches on the devices, {world_size} devices under DataParallel reach "
        f"{format_fraction(reached_fraction)} of {world_size} times one device: each step copies "
        "the model to all of them and gathers their outputs"
    )


@message
def loader_evidence(
    ranks: int,
    is_overlapped: bool,
    loader_samples_per_s: float,
    device_samples_per_s: float | None,
) -> str:
    text = f"the loaders of the {ranks} ranks together reach"
    if ranks == 1:
        text = "the loader alone reaches"
    text += f" {format_throughput(loader_samples_per_s)}"
    if device_samples_per_s is not None:
        text += f", the devices {format_throughput(device_samples_per_s)}"
    if not is_overlapped:
        text += "; without workers, loading and training alternate"
    return text


@message
def uneven_rank_evidence(ranks: Sequence[UnevenRank]) -> str:
    return "; ".join(
        f"rank {one['rank']} ({one['device']}): its {one['side']} alone reaches "
        f"{format_fraction(one['fraction'])} of the others'"
        for one in ranks
    )


@message
def small_batch_evidence(
    micro_batch_size: int, single_batch_size: int, reached_fraction: float
) -> str:
    return (
        f"with batches of {micro_batch_size}, {_slower(reached_fraction)} with {single_batch_size}"
    )


@message
def settings_evidence(settings: Mapping[str, object], reached_fraction: float) -> str:
    return f"{_slower(reached_fraction)} with {show(settings, 'settings')}"


@message
def shared_machine_evidence(ranks: int, cores: int | None, reached_fraction: float) -> str:
    if cores is None:
        return f"{_slower(reached_fraction)} in the same settings: the ranks share the host"
    return f"{ranks} ranks share {cores} cores: {_slower(reached_fraction)}"


def _slower(reached_fraction: float) -> str:
    return f"alone, a rank's device reaches {format_fraction(reached_fraction)} of the throughput of a single device"


# Memory that is still to come


@message
def memory_copied_by_workers(
    workers: int,
    bytes_per_sample: float,
    copied_bytes: float,
    further_bytes: float,
    left_bytes: float | None,
    by: Literal["epoch", "end"],
    is_beyond_limit: bool,
    full_after_s: float | None,
) -> str:
    until = "by the end of the epoch" if by == "epoch" else "as training goes on"
    each = "the worker" if workers == 1 else f"each of {workers} workers"
    text = (
        f"Host memory grows with the samples read: {each} copies the pages of the dataset's Python "
        f"objects as it reads them, {format_bytes(copied_bytes)} while it was watched, now "
        f"{format_bytes(bytes_per_sample)} a sample; up to {format_bytes(further_bytes)} more {until}"
    )
    if is_beyond_limit and left_bytes is not None:
        text += f". Only {format_bytes(left_bytes)} are left"
        if full_after_s is not None:
            text += f": memory is full after {format_duration(full_after_s)}"
    elif left_bytes is not None:
        text += f"; {format_bytes(left_bytes)} are left"
    return f"{text}."


@message
def graphs_kept(
    variable: str,
    place: str,
    nodes_per_step: float,
    bytes_per_step: float,
    is_on_device: bool,
    is_beyond_limit: bool,
    full_after_s: float | None,
) -> str:
    holder = "The script" if not variable else f"`{variable}`"
    if place:
        holder += f" ({place})"
    text = (
        f"{holder} keeps the autograd graph of every step: {nodes_per_step:.3g} nodes more a step"
    )
    if bytes_per_step > 0:
        memory = "device memory" if is_on_device else "host memory"
        text += f"; {memory} grows by {format_bytes(bytes_per_step)} a step"
    if is_beyond_limit and full_after_s is not None:
        text += f", and is full after {format_duration(full_after_s)}"
    return f"{text}."


@message
def validation_takes_more_memory(
    training_bytes: int, validation_bytes: int, is_on_device: bool, is_beyond_limit: bool
) -> str:
    memory = "device memory" if is_on_device else "memory of the process"
    text = (
        f"Validation takes more {memory} than training: a peak of {format_bytes(validation_bytes)} "
        f"against {format_bytes(training_bytes)}"
    )
    if is_beyond_limit:
        text += ", above the memory limit"
    return f"{text}."


@message
def worker_start_evidence(
    restart_s: float,
    epoch_s: float | None,
    method: str,
    workers: int,
    start_s: float,
    prepare_s: float,
    pickle_s: float | None,
    pickled_bytes: int | None,
) -> str:
    begins = "the first batch comes after"
    if epoch_s is not None:
        begins = f"each epoch of {format_short_time(epoch_s)} begins with"
    text = f"{begins} {format_short_time(restart_s)}: {format_count(workers, 'worker')} start"
    text += "s" if workers == 1 else " one after the other"
    text += f" in {format_short_time(start_s)} ({method})"
    if pickle_s is not None and pickled_bytes is not None:
        text += (
            f", the dataset is pickled in {format_short_time(pickle_s)} into "
            f"{format_bytes(pickled_bytes)} for each"
        )
    if prepare_s > 0:
        text += (
            f"; {format_short_time(prepare_s)} pass until the first batch (imports, "
            "worker_init_fn, what the dataset reads first)"
        )
    return text


# Cores that can't be used


@message
def process_cores_evidence(cores: int, start_cores: int, pinned_by: str) -> str:
    text = f"after its start the script was bound to {cores} of the {start_cores} cores that it could use"
    return f"{text} ({pinned_by})" if pinned_by else text


@message
def worker_cores_evidence(cores: int, start_cores: int, num_workers: int, pinned_by: str) -> str:
    text = (
        f"{format_count(num_workers, 'loader worker')} may use {format_count(cores, 'core')} of "
        f"{start_cores}: workers inherit the cores of the thread that starts them"
    )
    return f"{text} ({pinned_by})" if pinned_by else text


@message
def granted_cores_evidence(cores: int, granted_cores: int, grant_source: str) -> str:
    return (
        f"the process may use {format_count(cores, 'core')}, but SLURM granted {granted_cores} "
        f"({grant_source})"
    )


@message
def machine_cores_evidence(
    cores: float,
    machine_cores: int,
    limit: Literal["quota", "slurm", "affinity"],
    grant_source: str,
) -> str:
    by = {
        "quota": "by the control group's CPU quota",
        "slurm": f"by SLURM's grant ({grant_source})",
        "affinity": "by the affinity that it was started with",
    }
    return f"the job may use {cores:g} of the machine's {machine_cores} cores, {by[limit]}"
