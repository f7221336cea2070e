"""The English of the advice for one job: what to do by the kind of advice, and its basis by the kind with `_basis`.

Both are sentences without their full stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from autotune.report.wording.tables.diagnosis import say_computing
from autotune.report.wording.template import Wording
from autotune.report.wording.units import show

__all__ = ["ADVICE"]

_Figures: TypeAlias = Mapping[str, Any]
_CAUTIONS = {
    "micro_batch_size": "the learning rate has to follow the batch",
    "amp_dtype": "check that the loss still falls as before",
}


def _set(f: _Figures) -> str:
    cautions = [_CAUTIONS[name] for name in f["settings"] if name in _CAUTIONS]
    return f"Set {show(f['settings'], 'settings')}" + (f" ({'; '.join(cautions)})" if cautions else "")


def _set_basis(f: _Figures) -> str:
    rates = {"loader": f.get("loader_samples_per_s"), "device": f.get("device_samples_per_s")}
    return ", ".join(
        f"the {side} alone reaches {show(rate, 'rate')} with it" for side, rate in rates.items() if rate is not None
    )


def _pin_memory_basis(f: _Figures) -> str:
    times = "at most, since copies from page-locked memory were not measured"
    if "pinned_copy_s" in f:
        pinned, pageable = show(f["pinned_copy_s"], "seconds"), show(f["copy_s"], "seconds")
        times = f"copying a batch takes {pinned} from it instead of {pageable}"
    return f"{times}; copies that nothing hides take {show(f['share'], 'share')} of the time"


def _make_items_cheaper(f: _Figures) -> str:
    more = f"{f['cores_needed']} cores instead of {f['cores']}"
    if f["needed_s"] > 0:
        return (
            f"For the device to be the limit, make an item cheaper: at most {show(f['needed_s'], 'seconds')} of "
            f"CPU time "
            f"instead of {show(f['item_cpu_s'], 'seconds')} (cheaper decoding, pre-processing once and offline, "
            f"memory-mapped arrays instead of text or compressed files), or take {more}"
        )
    return (
        f"For the device to be the limit, take {more}, or remove an item's CPU work of "
        f"{show(f['item_cpu_s'], 'seconds')} "
        f"(decode and pre-process once and offline): computing alone keeps the {f['cores']} cores here busy"
    )


def _shorten_waits(f: _Figures) -> str:
    workers = f" with {f['workers']} workers" if f["workers"] > 1 else ""
    more = f", or let about {f['workers_needed']} workers wait at the same time" if f["workers_needed"] else ""
    return (
        f"For the device to be the limit, let an item wait less: at most "
        f"{show(f['needed_s'], 'seconds')}{workers} instead "
        f"of {show(f['item_s'], 'seconds')} (shards read in one piece, larger sequential reads, local or faster "
        f"storage)"
        f"{more}"
    )


def _device_ceiling(f: _Figures) -> str:
    estimated = ", which was not measured but estimated from the waits for data" if f["is_device_estimated"] else ""
    return f"the device's ceiling{estimated}"


def _one_thread_basis(f: _Figures) -> str:
    allowed = f"{show(f['allowed_samples_per_s'], 'rate')} on {f['cores']} cores"
    basis = f"an item's CPU time of {show(f['item_cpu_s'], 'seconds')} allows {allowed}"
    today = f["loader_samples_per_s"]
    return f"{basis}, and the " + (
        "device's ceiling" if today is None else f"loader alone reaches {show(today, 'rate')} today"
    )


def _fuse_operations(f: _Figures) -> str:
    count = "many small operations" if f["operators"] is None else f"the {f['operators']:,} operators of a batch"
    graphs = ", CUDA graphs" if f["has_cuda_graphs"] else ""
    return (
        f"Replace {count} by fewer and larger ones: torch.compile{graphs}, batched instead of looped tensor code, a "
        "fused optimizer"
    )


def _avoid_synchronisation(f: _Figures) -> str:
    copies = "non_blocking=True" if f["is_pinned"] else "pin_memory=True"
    return (
        "Let the host run ahead of the device: read the loss every so many steps instead of after each (.item(), "
        f".cpu(), print), and copy without blocking ({copies})"
    )


def _item_size(f: _Figures) -> str:
    return "" if f["item_bytes"] is None else f" (an item has {show(f['item_bytes'], 'bytes')} now)"


def _copy_uint8_basis(f: _Figures) -> str:
    share = f["float32_fraction"]
    known = (
        "at most, if all of it were float32" if share is None else f"{show(share, 'share')} of the bytes are float32"
    )
    return _at_best(
        f, f"at best, a quarter is left of float32, and copies take {show(f['share'], 'share')} of the time; {known}"
    )


def _make_step_cheaper(f: _Figures) -> str:
    said = "Make a step cheaper: fused operations (torch.compile), fewer operations per sample, or a faster device"
    if f["most_gain"] is None:
        return said
    most = show(f["most_gain"], "gain")
    return f"{said}; on this device the same arithmetic at the rate of a large matrix product would give at most {most}"


def _make_step_cheaper_basis(f: _Figures) -> str:
    unknown = "; how far that is from the rate of a large matrix product was not measured"
    return say_computing(f) + (unknown if f["most_gain"] is None else "")


def _at_best(f: _Figures, basis: str) -> str:
    """With the loader's ceiling, where that limits what a faster device can give."""
    if "loader_samples_per_s" not in f:
        return basis
    first = ", which has to increase first" if f["is_loader_first"] else ""
    return f"{basis}; the loader alone reaches {show(f['loader_samples_per_s'], 'rate')}{first}"


def _gone(what: str) -> Wording:
    return lambda f: _at_best(f, f"at best, the {show(f['share'], 'share')} of the time {what} is saved")


def _half_left(what: str) -> Wording:
    return lambda f: _at_best(f, f"at best, half of the bytes are left; {what} {show(f['share'], 'share')} of the time")


ADVICE: dict[str, Wording] = {
    "set": _set,
    "set_basis": _set_basis,
    "pin_memory": "Set pin_memory=True: copies from page-locked memory are faster, and the host does not wait for them",
    "pin_memory_basis": _pin_memory_basis,
    "make_items_cheaper": _make_items_cheaper,
    "make_items_cheaper_basis": lambda f: f"an item's CPU time, {f['cores']} cores and {_device_ceiling(f)}",
    "shorten_waits": _shorten_waits,
    "shorten_waits_basis": lambda f: f"an item's wall time and {_device_ceiling(f)}",
    "shard_stream": (
        "Divide the stream among the workers by torch.utils.data.get_worker_info(): today each worker would read all "
        "of it; about {workers_needed} workers make the device the limit"
    ),
    "shard_stream_basis": "an item's wall time, its CPU time with the cores here, and the device's ceiling",
    "fix_slowest_items": (
        "Make the slowest items faster: they take up to {item_slowest_s:seconds}, while half of all items take less "
        "than {item_median_s:seconds}; without the slowest the loader would reach {loader_samples_per_s:rate}"
    ),
    "fix_slowest_items_basis": "{slow_tail_fraction:share} of the loading time goes into items over 8 times the median",
    "one_thread_per_worker": (
        "Give each loader worker one thread, in worker_init_fn: cv2.setNumThreads(0) for OpenCV, "
        "threadpoolctl.threadpool_limits(1) for NumPy, torch.set_num_threads(1) where the dataset has set more; or set "
        "OMP_NUM_THREADS=1 before the start"
    ),
    "one_thread_per_worker_basis": _one_thread_basis,
    "cache_items": lambda f: (
        f"Keep the items in RAM, if they are the same in every epoch: {f['items']:,} items of "
        f"{show(f['item_bytes'], 'bytes')} take {show(f['items'] * f['item_bytes'], 'bytes')}, and "
        f"{show(f['free_bytes'], 'bytes')} are free"
    ),
    "cache_items_basis": "a batch then costs its collating ({collate_s:seconds}) and the device's own time",
    "fuse_operations": _fuse_operations,
    "fuse_operations_basis": _gone("that small operations cost"),
    "avoid_synchronisation": _avoid_synchronisation,
    "avoid_synchronisation_basis": _gone("after the host's waits"),
    "move_fewer_bytes": lambda f: (
        "Move fewer bytes: fuse element-wise operations (torch.compile), work in place"
        + ("" if f["is_dtype_known"] else ", use a narrower precision")
    ),
    "move_fewer_bytes_basis": _half_left("moving them takes"),
    "convert_batches_in_collate": (
        "Convert batches to the memory format that training wants (channels_last) in collate_fn, so that nothing is "
        "converted later"
    ),
    "convert_batches_in_collate_basis": _gone("that moving batches takes"),
    "copy_narrower_types": lambda f: (
        f"Copy fewer bytes{_item_size(f)}: narrower types, smaller items; create on the device what it can create"
    ),
    "copy_narrower_types_basis": _half_left("copies take"),
    "copy_uint8": lambda f: (
        f"Copy fewer bytes{_item_size(f)}: uint8 images instead of float32, converted and normalised on the device"
    ),
    "copy_uint8_basis": _copy_uint8_basis,
    "make_step_cheaper": _make_step_cheaper,
    "make_step_cheaper_basis": _make_step_cheaper_basis,
    "lengthen_epochs": (
        "Make epochs longer: {wanted_samples:,} samples instead of {epoch_samples:,} (a sampler that goes over the "
        "data several times), with a single restart"
    ),
    "lengthen_epochs_basis": "restarts take {share:share} of the time now",
}
"""What to do in one job, by the kind of advice, and what its figure rests on."""
