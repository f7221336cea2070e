"""The English of a diagnosis: headline, evidence and remarks; advice.py has that of its advice.

Evidence has the code of its bottleneck with `_evidence` behind it, and is a sentence without its full stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from autotune.records.diagnosis import Bottleneck
from autotune.report.wording.template import Wording
from autotune.report.wording.units import show

__all__ = ["BOTTLENECKS", "DIAGNOSIS", "say_computing"]

_Figures: TypeAlias = Mapping[str, Any]

BOTTLENECKS: dict[Bottleneck, str] = {
    "data_cpu": "data-bound by CPU work",
    "data_io": "data-bound by waiting for I/O",
    "data_tail": "data-bound by a slow tail of items",
    "restart": "bound by restarts of the loader: epochs are too short",
    "copy": "copy-bound",
    "compute": "compute-bound",
    "launch": "launch-bound: the operations are too small",
    "synchronise": "launch-bound: the host waits for the device before it launches more",
    "memory": "memory-bound: its bandwidth is used up",
    "threads": "CPU oversubscription: more threads than cores",
}
"""Each bottleneck of one job."""
_TODAY = "today's settings"
_NOT_MEASURED = "Other settings were not measured."


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _healthy(f: _Figures) -> str:
    head = f"Healthy: the device computes {show(f['share'], 'share')} of the time"
    gain = f["least_gain"]
    return (
        f"{head}. {_NOT_MEASURED}" if gain is None else f"{head}, and nothing measured here gives {100 * gain:.0f} %."
    )


def _bottleneck(f: _Figures) -> str:
    head = f"{_capitalised(BOTTLENECKS[f['bottleneck']])} ({show(f['share'], 'share')} of the time)"
    if "second" not in f:
        return f"{head}."
    return f"{head}, but also {BOTTLENECKS[f['second']]} ({show(f['second_share'], 'share')})."


_HEADLINE: dict[str, Wording] = {
    "healthy": _healthy,
    "bottleneck": _bottleneck,
    "time_not_attributed": (
        "{share:share} of the time is not spent waiting for data; what the rest is spent on was not measured."
    ),
    "best_setting": "{settings:settings} should give {gain:gain}.",
    "no_setting_helps": lambda f: f"No setting that was measured helps by more than {100 * f['least_gain']:.0f} %.",
    "others_not_measured": _NOT_MEASURED,
}


def _waiting(f: _Figures) -> str:
    return f"{show(f['waiting_fraction'], 'share')} of the time is spent waiting for data"


def _item(f: _Figures) -> str:
    return f"an item takes {show(f['item_s'], 'seconds')}, {show(f['cpu_fraction'], 'share')} of it CPU time"


def _data_cpu(f: _Figures) -> str:
    if "item_s" not in f:
        return f"{_waiting(f)}; what an item costs was not measured"
    return f"{_waiting(f)}: {_item(f)}; collating a batch takes {show(f['collate_s'], 'seconds')}"


def _data_io(f: _Figures) -> str:
    read = f["disk_bytes_per_item"]
    return f"{_waiting(f)}: {_item(f)}" + (f", and reads {show(read, 'bytes')} from the disk" if read else "")


def _threads(f: _Figures) -> str:
    parts = []
    if "waiting_fraction" in f:
        wanted = f["loader_processes"] * f["cores_per_item"]
        parts.append(
            f"{_waiting(f)}: an item keeps {f['cores_per_item']:.1f} cores busy for {show(f['item_s'], 'seconds')}, "
            "in the threads of a library (OpenCV, NumPy) or in processes that it starts; "
            f"{f['loader_processes']} loader processes at once would keep {wanted:.1f} busy, but there are {f['cores']}"
        )
    if "threads" in f:
        parts.append(
            f"{f['threads']} threads and {f['num_workers']} loader workers share {f['cores']} cores: computing is "
            f"{f['slowdown']:.1f} times slower in the loop than on the device alone "
            f"({show(f['device_samples_per_s'], 'rate')})"
        )
    return "; ".join(parts)


def _restart(f: _Figures) -> str:
    said = f"restarting the loader takes {show(f['share'], 'share')} of the time"
    if f["epoch_s"] is None:
        return said
    return f"{said}: {show(f['share'] * f['epoch_s'], 'seconds')} in each epoch of {show(f['epoch_s'], 'seconds')}"


def _launch(f: _Figures) -> str:
    if "operators" not in f:
        return f"{show(f['share'], 'share')} of the time passes between operations"
    return (
        f"a batch takes {f['operators']:,} operators of {show(f['operator_s'], 'seconds')} each, and "
        f"{show(f['fixed_fraction'], 'share')} of its time does not depend on the batch size"
    )


def say_computing(f: _Figures) -> str:
    """How much of the time the device computes, and how close it is to its peak."""
    said = f"the device computes {show(f['share'], 'share')} of the time"
    if not f["is_measured"]:
        said = f"{show(f['share'], 'share')} of the time is not spent waiting for data; the rest was not measured"
    if f["peak_fraction"] is None:
        return said
    return f"{said}, at {show(f['peak_fraction'], 'share')} of the rate of a large matrix product in the same precision"


def _memory(f: _Figures) -> str:
    if "dram_fraction" in f:
        return f"{show(f['dram_fraction'], 'share')} of the memory bandwidth is used while the device is busy (GPM)"
    return (
        f"a batch moves {show(f['moved_bytes'], 'bytes')} in {show(f['batch_s'], 'seconds')}; a large copy would take "
        f"{show(f['copy_s'], 'seconds')}"
    )


_EVIDENCE: dict[str, Wording] = {
    "data_cpu_evidence": _data_cpu,
    "data_io_evidence": _data_io,
    "data_tail_evidence": lambda f: (
        f"{_waiting(f)}: {show(f['slow_tail_fraction'], 'share')} of the loading time goes into items over 8 times the "
        f"median of {show(f['item_median_s'], 'seconds')}, up to {show(f['item_slowest_s'], 'seconds')}"
    ),
    "threads_evidence": _threads,
    "restart_evidence": _restart,
    "copy_evidence": "{share:share} of the time copies batches to the device while nothing computes",
    "synchronise_evidence": (
        "{share:share} of the time the device is idle because the host waited for it before launching more "
        "(loss.item(), a copy that blocks)"
    ),
    "launch_evidence": _launch,
    "compute_evidence": say_computing,
    "memory_evidence": _memory,
}


_REMARKS: dict[str, Wording] = {
    "breakdown_not_measured": (
        "Where the time goes was not measured: all time that is not spent waiting for data counts as computing."
    ),
    "search_would_refuse": "A search would refuse these settings: {fault}.",
    "side_not_measured": lambda f: (
        f"The {f['side']} alone was not measured with {show(f['settings'], 'settings') or _TODAY}: {f['reason']}."
    ),
    "others_failed": "Other settings were not measured: {reason}.",
    "no_time_for_others": (
        "Other settings were not measured: {left_s:.0f} s are left of the {most_s:.0f} s that a diagnosis may take, "
        "and a trial takes {startup_s:.0f} s to start."
    ),
    "no_effect_on_diagnosis": lambda f: (
        f"No effect on a diagnosis, which searches nothing and keeps no run folder: {', '.join(f['names'])}."
    ),
}

DIAGNOSIS: dict[str, Wording] = {**_HEADLINE, **_EVIDENCE, **_REMARKS}
"""The sentences of a diagnosis by code, without its advice."""
