"""Write a diagnosis' advice: one function for each kind.

Each takes figures and returns what to do and the basis of the expected gain, both without a full
stop. The function's name is the kind of advice; its argument `settings` holds what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Literal, NamedTuple, ParamSpec, assert_never

from autotune.messages import message
from autotune.messages.diagnosis import describe_computing, describe_recurring
from autotune.messages.units import (
    MODES,
    format_bytes,
    format_count,
    format_fraction,
    format_mean_count,
    format_rate,
    format_short_time,
    format_throughput,
    format_times,
    show,
    show_interval,
)
from autotune.note import Note
from autotune.settings_table import BY_NAME

_P = ParamSpec("_P")


class AdviceText(NamedTuple):
    """A piece of advice in words."""

    note: Note
    """The advice; its code is the kind."""
    basis: str
    """Measured figures behind the expected gain."""


def _advice(write: Callable[_P, tuple[str, str]]) -> Callable[_P, AdviceText]:
    """Turn a function that returns advice and its basis into one that returns an AdviceText."""

    @message
    @wraps(write)
    def text(*args: _P.args, **kwargs: _P.kwargs) -> str:
        return write(*args, **kwargs)[0]

    @wraps(write)
    def advise(*args: _P.args, **kwargs: _P.kwargs) -> AdviceText:
        return AdviceText(text(*args, **kwargs), write(*args, **kwargs)[1])

    return advise


def limited_by_loader(
    advice: AdviceText, loader_samples_per_s: float, is_loader_first: bool
) -> AdviceText:
    """Add the loader's ceiling to advice on the device, and whether to fix the loader first."""
    figures = {"loader_samples_per_s": loader_samples_per_s, "is_loader_first": is_loader_first}
    note = advice.note.model_copy(update={"figures": advice.note.figures | figures})
    first = ", so speed that up first" if is_loader_first else ""
    return AdviceText(
        note,
        f"{advice.basis}; the loader alone reaches {format_throughput(loader_samples_per_s)}{first}",
    )


def _set(settings: Mapping[str, object]) -> str:
    return f"Set {show(settings, 'settings')}"


def _cautions(settings: Iterable[str]) -> str:
    """Return what to check after changing these settings; "" if nothing."""
    return "; ".join(filter(None, (BY_NAME[name].caution for name in settings)))


# Work that recurs besides the steps: checkpoints, validation, logging, collections. Reports show the
# place of advice; how often it recurs stands in the basis.


@_advice
def save_less_often(
    what: str,
    place: str,
    period: str,
    each_s: float,
    each_bytes: int,
    is_asynchronous: bool,
    steps: int | None = None,
) -> tuple[str, str]:
    text = f"Save {_rarer(steps)}"
    basis = describe_recurring(what, place, period, each_s, each_bytes)
    if not is_asynchronous:
        text += ", or in the background: torch.distributed.checkpoint.async_save"
        basis += "; a thread that writes a copy in host memory does as well"
    return text, basis


@_advice
def validate_less(
    what: str, place: str, period: str, each_s: float, steps: int | None = None
) -> tuple[str, str]:
    recurring = describe_recurring(f"a pass over {what}", place, period, each_s)
    return (
        f"Validate {_rarer(steps)}, or on fewer batches"
    ), f"{recurring}; larger batches and torch.inference_mode() make each pass quicker"


@_advice
def log_less_often(
    what: str,
    place: str,
    period: str,
    each_s: float,
    has_histograms: bool,
    steps: int | None = None,
) -> tuple[str, str]:
    text = f"Log {_rarer(steps)}"
    if has_histograms:
        text += ", and leave out histograms of parameters and gradients"
    else:
        text += ", and without flushing"
    return text, describe_recurring(what, place, period, each_s)


@_advice
def freeze_objects(what: str, period: str, each_s: float) -> tuple[str, str]:
    return (
        "Call gc.freeze() once model and data are built, so that garbage collections skip them"
    ), (
        f"{describe_recurring(what, '', period, each_s)}; gc.disable() with a gc.collect() every "
        "thousand steps does as well"
    )


@_advice
def collect_less_often(
    what: str, place: str, period: str, each_s: float, steps: int | None = None
) -> tuple[str, str]:
    return (
        f"Call {what} {_rarer(steps)}: Python frees most objects without it"
    ), describe_recurring(what, place, period, each_s)


@_advice
def keep_cache(what: str, place: str, period: str, each_s: float) -> tuple[str, str]:
    recurring = describe_recurring(what, place, period, each_s)
    return (
        f"Remove {what}: torch uses freed memory again by itself"
    ), f"{recurring}; asking the driver for memory is slow"


def _rarer(steps: int | None) -> str:
    """Return how often something should happen: "every 100 steps"; "less often" if epochs set it."""
    return "less often" if steps is None else f"every {steps:,} steps"


# The loader


@_advice
def set(  # noqa: A001 - the kind of advice
    settings: Mapping[str, object],
    loader_samples_per_s: float | None = None,
    device_samples_per_s: float | None = None,
) -> tuple[str, str]:
    sides = {"loader": loader_samples_per_s, "device": device_samples_per_s}
    reached = [
        f"the {side} alone reaches {format_throughput(rate)}"
        for side, rate in sides.items()
        if rate is not None
    ]
    cautions = _cautions(settings)
    return _set(settings) + (f" ({cautions})" if cautions else ""), ", ".join(reached)


@_advice
def add_workers(
    settings: Mapping[str, object],
    num_workers: int,
    item_cpu_s: float,
    cores: int,
    cores_samples_per_s: float,
) -> tuple[str, str]:
    workers = f"with {format_count(num_workers, 'worker')}" if num_workers else "without workers"
    return _set(settings), (
        f"computed, not measured, from the throughput {workers}; an item takes "
        f"{format_short_time(item_cpu_s)} of CPU time, so {cores} cores allow "
        f"{format_throughput(cores_samples_per_s)}"
    )


@_advice
def make_items_cheaper(
    needed_s: float, item_cpu_s: float, cores_needed: int, cores: int, is_device_estimated: bool
) -> tuple[str, str]:
    item = format_short_time(item_cpu_s)
    more = f"{cores_needed} cores instead of {cores}"
    if needed_s > 0:
        text = (
            f"To make the device the limit, spend at most {format_short_time(needed_s)} of CPU "
            f"time on an item instead of {item} (cheaper decoding, preprocessing once and offline, "
            f"memory-mapped arrays instead of text or compressed files), or use {more}"
        )
    else:
        text = (
            f"To make the device the limit, use {more}, or remove an item's CPU work of {item} "
            f"(decode and preprocess once and offline): computing alone keeps the {cores} cores "
            "here busy"
        )
    return text, f"an item's CPU time, {cores} cores and {_device_ceiling(is_device_estimated)}"


def _device_ceiling(is_estimated: bool) -> str:
    estimate = ", not measured but estimated from the waits for data"
    return f"the device's ceiling{estimate if is_estimated else ''}"


@_advice
def shorten_waits(
    needed_s: float,
    item_s: float,
    workers: int,
    workers_needed: int | None,
    is_device_estimated: bool,
) -> tuple[str, str]:
    side_by_side = f" with {workers} workers" if workers > 1 else ""
    more = f", or use about {workers_needed} workers" if workers_needed else ""
    text = (
        "To make the device the limit, let an item take at most "
        f"{format_short_time(needed_s)}{side_by_side} instead of {format_short_time(item_s)} "
        f"(whole shards, larger sequential reads, local or faster storage){more}"
    )
    return text, f"an item's wall time and {_device_ceiling(is_device_estimated)}"


@_advice
def shard_stream(workers_needed: int, num_workers: int = 1) -> tuple[str, str]:
    divide = "Divide the stream among the workers with torch.utils.data.get_worker_info()"
    if num_workers > 1:
        return (
            f"{divide}: each of the {num_workers} workers now delivers all of it. Until then "
            "num_workers=1 loses nothing, and more workers repeat more"
        ), (
            "batches that the workers delivered in turn were equal; divided, a second of training "
            f"sees {num_workers} times as many different samples"
        )
    return (
        f"{divide}: without that each worker reads all of it; about {workers_needed} workers make "
        "the device the limit"
    ), "an item's wall time and CPU time, the cores here, and the device's ceiling"


@_advice
def add_shards(
    stream_shards: int, num_workers: int, gain_low: float, gain_high: float
) -> tuple[str, str]:
    return (
        f"Split the stream's data into at least {num_workers} shards: with {stream_shards}, only as "
        f"many of the {num_workers} workers deliver samples"
    ), "the loader's throughput for each shard"


@_advice
def draw_faster(
    sampler: str,
    sampler_s: float,
    sampler_start_s: float,
    batch_s: float,
    num_workers: int,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    even = ", even with workers" if num_workers else ""
    return (
        f"Draw indices faster than {sampler or 'the sampler'} does: for many batches at once with "
        "NumPy or torch, with weights and orders computed once, without sorting a whole epoch"
    ), (
        f"drawing takes {format_short_time(sampler_s)} for each batch and "
        f"{format_short_time(sampler_start_s)} at each start of an epoch, in the training "
        f"process{even}, where a batch takes {format_short_time(batch_s)}; at most, if drawing cost "
        "nothing"
    )


@_advice
def speed_up_collate(
    function: str,
    place: str,
    collate_s: float,
    plain_s: float | None,
    items_s: float,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    where = f" ({place})" if place else ""
    text = (
        f"Speed up the collate function {function}{where}: fill tensors by slices, torch.stack or "
        "pad_sequence in place of loops over single values"
    )
    basis = (
        f"it takes {format_short_time(collate_s)} for each batch, its items "
        f"{format_short_time(items_s)}, and work on single items can move into the dataset"
    )
    if plain_s is None:
        return text, f"{basis}; at most, if collating cost nothing"
    return text, (
        f"{basis}; default_collate with pad_sequence takes {format_short_time(plain_s)} for the "
        "same items, if the function does no more"
    )


@_advice
def fetch_batches(
    item_s: float,
    samples: int,
    collate_s: float,
    fetch_s: float,
    is_measured: bool,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    text = (
        "Give the dataset a __getitems__ that takes a list of indices, and a collate_fn that "
        "returns its result; or use sampler=BatchSampler(...) with batch_size=None"
    )
    now = format_short_time(item_s * samples + collate_s)
    work = (
        f"the items are in memory, and calls for each of {samples:,} items with "
        f"{format_short_time(collate_s)} of collating them are most of the work"
    )
    if is_measured:
        return text, (
            f"{work}; dataset[list of indices] gives the same values in "
            f"{format_short_time(fetch_s)} instead of {now} for a batch, timed here"
        )
    return text, (
        f"{work}; at most, if a batch costs a copy of its bytes ({format_short_time(fetch_s)} "
        f"instead of {now})"
    )


@_advice
def read_parts(
    item_bytes: float,
    read_bytes: float,
    peak_bytes: float,
    items: int | None,
    has_room: bool,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    times = format_mean_count(max(peak_bytes, read_bytes) / max(item_bytes, 1.0))
    room = ""
    if has_room and items is not None:
        room = f", or keep all {items:,} items in RAM ({format_bytes(items * item_bytes)})"
    return (
        'Read only the part of a file that an item needs (np.load with mmap_mode="r", chunks of one '
        f"item), or read neighbours together{room}"
    ), (
        f"for an item of {format_bytes(item_bytes)} it reads {format_bytes(read_bytes)} and holds "
        f"{format_bytes(peak_bytes)} in memory ({times} times), so that more workers than cores do "
        "not help; at most, if an item cost its own share"
    )


@_advice
def open_in_each_worker(
    handles: Sequence[str],
    num_workers: int,
    speedup: float,
    cores: int,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    held = ", ".join(handles)
    return (
        f"Open files in each worker, at the first item or in worker_init_fn, and share no lock: "
        f"the dataset holds {held}, and the workers wait for each other"
    ), f"{num_workers} workers are {speedup:.1f} times as fast as one, with {cores} cores"


@_advice
def fix_slowest_items(
    item_slowest_s: float,
    item_median_s: float,
    slow_tail_fraction: float,
    loader_samples_per_s: float,
) -> tuple[str, str]:
    return (
        (
            f"Make the slowest items faster: they take up to {format_short_time(item_slowest_s)}, "
            f"the median {format_short_time(item_median_s)}; without them the loader would reach "
            f"{format_throughput(loader_samples_per_s)}"
        ),
        (
            f"{format_fraction(slow_tail_fraction)} of the loading time goes into items over 8 "
            "times the median"
        ),
    )


@_advice
def deliver_out_of_order(
    settings: Mapping[str, object], num_workers: int, item_s: float, loader_samples_per_s: float
) -> tuple[str, str]:
    return (
        f"{_set(settings)}: batches that are ready then do not wait behind a slow one "
        f"({_cautions(settings)})"
    ), (
        f"computed, not measured: {num_workers} workers that never wait for each other reach "
        f"{format_throughput(loader_samples_per_s)} with items of {format_short_time(item_s)} on average"
    )


@_advice
def one_thread_per_worker(
    settings: Mapping[str, object],
    item_cpu_s: float,
    allowed_samples_per_s: float,
    cores: int,
    loader_samples_per_s: float | None,
) -> tuple[str, str]:
    if settings:
        text = f"{_set(settings)}: each loader worker then has one thread for OpenCV, BLAS and OpenMP too"
    else:
        text = (
            "Load with one thread: cv2.setNumThreads(0) for OpenCV, "
            "threadpoolctl.threadpool_limits(1) for NumPy, or OMP_NUM_THREADS=1 in the environment"
        )
    item = (
        f"an item's CPU time of {format_short_time(item_cpu_s)} allows "
        f"{format_throughput(allowed_samples_per_s)} on {cores} cores"
    )
    if loader_samples_per_s is None:
        return text, f"{item}, and the device's ceiling"
    return text, f"{item}, and the loader alone reaches {format_throughput(loader_samples_per_s)}"


@_advice
def keep_workers(
    settings: Mapping[str, object],
    restart_s: float,
    epoch_s: float,
    gain_low: float,
    gain_high: float,
    has_set_epoch: bool,
) -> tuple[str, str]:
    text = f"{_set(settings)}: workers start once, not in each epoch"
    if has_set_epoch:
        text += "; workers then miss the dataset's set_epoch"
    return text, (
        f"{format_short_time(restart_s)} of each epoch of {format_short_time(epoch_s)} pass before "
        "its first batch"
    )


@_advice
def pickle_less(
    method: str, workers: int, pickle_s: float, pickled_bytes: int, is_each_epoch: bool
) -> tuple[str, str]:
    often = "in each epoch" if is_each_epoch else "before the first batch"
    return (
        "Let the dataset pickle as a file name (a memory-mapped array that each worker opens "
        "itself), or start workers by fork if no other thread and no CUDA call came before"
    ), (
        f"{method} pickles {format_bytes(pickled_bytes)} for each of {format_count(workers, 'worker')} "
        f"{often}, {format_short_time(pickle_s)} each; reading it in the worker comes on top"
    )


@_advice
def prepare_workers_less(workers: int, prepare_s: float) -> tuple[str, str]:
    return (
        "Prepare once in the training process, before the workers start, what each worker "
        "imports or reads before its first batch"
    ), (
        f"{format_short_time(prepare_s)} pass from the start of "
        f"{format_count(workers, 'worker')} to the first batch"
    )


@_advice
def release_cores(cores: int, start_cores: int, pinned_by: str) -> tuple[str, str]:
    if "=" in pinned_by:
        text = (
            f"Unset {pinned_by.partition('=')[0]}, or call os.sched_setaffinity(0, cores) with all "
            f"{start_cores} cores in worker_init_fn"
        )
    else:
        where = f" at {pinned_by}" if pinned_by else ", or after the import that narrows it,"
        text = (
            f"Remove the binding to {format_count(cores, 'core')}{where} or call "
            f"os.sched_setaffinity(0, cores) with all {start_cores} cores after it, and in "
            "worker_init_fn"
        )
    return text, f"{cores} of {start_cores} cores may be used while the script trains"


@_advice
def pass_slurm_grant(cores: int, granted_cores: int, grant_source: str) -> tuple[str, str]:
    return (
        f"Start the step with srun --cpus-per-task={granted_cores} (since SLURM 22.05 srun does not "
        "take it from sbatch; or set SRUN_CPUS_PER_TASK)"
    ), f"{grant_source} is {granted_cores}, but the process may use {format_count(cores, 'core')}"


@_advice
def ask_for_cores(
    limit: Literal["quota", "slurm", "affinity"], cores: float, wanted_cores: int
) -> tuple[str, str]:
    how = {
        "quota": f"Raise the container's CPU limit to {wanted_cores} cores (docker --cpus, Kubernetes limits)",
        "slurm": f"Ask SLURM for --cpus-per-task={wanted_cores}",
        "affinity": f"Start the job on {wanted_cores} cores (taskset, cpuset, the launcher's binding)",
    }
    return how[limit], f"an item's CPU time and the device's ceiling need more than {cores:g} cores"


@_advice
def store_index_compactly(
    further_bytes: float, workers: int, fewer_workers: int
) -> tuple[str, str]:
    text = (
        "Keep the dataset's index in NumPy arrays, in bytes or in a memory map instead of lists "
        "and dicts of Python objects"
    )
    if fewer_workers < workers:
        text += f"; until then use {format_count(fewer_workers, 'worker')}"
    return text, (
        f"{format_count(workers, 'worker')} would copy up to {format_bytes(further_bytes)} more of "
        "the training process's memory"
    )


@_advice
def detach_kept_tensors(variable: str, nodes_per_step: float) -> tuple[str, str]:
    kept = f"`{variable}`" if variable else "a variable"
    return (
        f"Add loss.item() or loss.detach() to {kept}, not the loss itself: the graph of each step "
        "is then released"
    ), f"{nodes_per_step:.3g} nodes of autograd graphs more with each step"


@_advice
def validate_with_less_memory(training_bytes: int, validation_bytes: int) -> tuple[str, str]:
    return (
        "Validate in torch.inference_mode() with a smaller batch, and reduce outputs batch by "
        "batch instead of collecting them"
    ), (
        f"peak memory of {format_bytes(validation_bytes)} in validation, "
        f"{format_bytes(training_bytes)} in training"
    )


@_advice
def cache_items(
    items: int, item_bytes: float, free_bytes: int, collate_s: float
) -> tuple[str, str]:
    return (
        f"Keep the items in RAM if they are the same in every epoch: {items:,} items of "
        f"{format_bytes(item_bytes)} take {format_bytes(items * item_bytes)}, and "
        f"{format_bytes(free_bytes)} are free"
    ), f"a batch then costs its collating ({format_short_time(collate_s)}) and the device's time"


def read_faster(
    kind: Literal["text", "image_draft", "image_copy", "parquet"],
    sizes: Mapping[str, int],
    now_s: float,
    better_s: float,
    calls_per_item: float,
    item_fraction: float,
    loader_samples_per_s: float,
) -> AdviceText:
    """Advise a better format of the files: text, images or Parquet, with the sizes of their data.

    Without `_advice`, since the kind of advice depends on the format, and the figures on the sizes.
    """
    better = format_short_time(better_s)
    now = format_short_time(now_s)
    faster = f"one of yours takes {better} instead of {now}"
    match kind:
        case "text":
            code = "save_as_arrays"
            text = (
                "Save once as arrays (np.save) what np.loadtxt or np.genfromtxt reads, and read it "
                f'with np.load(path, mmap_mode="r"): {faster}'
            )
        case "image_draft":
            code = "decode_smaller"
            draft = f"({2 * sizes['to_width']}, {2 * sizes['to_height']})"
            text = (
                f"Decode images smaller: img.draft(None, {draft}) right after Image.open, since "
                f"they are resized from {sizes['width']} x {sizes['height']} to "
                f"{sizes['to_width']} x {sizes['to_height']}: {faster}, with slightly different "
                "pixels"
            )
        case "image_copy":
            code = "store_smaller"
            text = (
                "Store copies of the images in the size used in training "
                f"({sizes['to_width']} x {sizes['to_height']} instead of {sizes['width']} x "
                f"{sizes['height']}): {faster}"
            )
        case "parquet":
            code = "read_row_groups"
            text = (
                "Read Parquet by whole row groups or batches, and take items from them "
                "(ParquetFile.iter_batches, a shuffled list of row groups, or the table kept by "
                f"each worker): each item now reads {sizes['rows']:,} rows of {sizes['columns']} "
                f"columns in {now}; its share of them takes {better}"
            )
        case _:
            assert_never(kind)
    figures = {
        **sizes,
        "now_s": now_s,
        "better_s": better_s,
        "calls_per_item": calls_per_item,
        "item_fraction": item_fraction,
        "loader_samples_per_s": loader_samples_per_s,
    }
    calls = f"{format_mean_count(calls_per_item)} such {'call' if calls_per_item == 1 else 'calls'}"
    return AdviceText(
        Note(code=code, figures=figures, text=text),
        (
            f"both timed here on your own data; an item makes {calls}, "
            f"{format_fraction(item_fraction)} of its time, and the loader alone would reach "
            f"{format_throughput(loader_samples_per_s)}"
        ),
    )


@_advice
def lengthen_epochs(share: float, epoch_samples: int, wanted_samples: int) -> tuple[str, str]:
    return (
        f"Make epochs longer: {wanted_samples:,} samples instead of {epoch_samples:,} (a sampler "
        "that passes over the data several times), with a single restart"
    ), f"restarts take {format_fraction(share)} of the time"


# Copies


@_advice
def pin_memory(
    settings: Mapping[str, object],
    pageable_samples_per_s: float | None = None,
    pinned_samples_per_s: float | None = None,
    share: float | None = None,
    copy_s: float | None = None,
    pinned_copy_s: float | None = None,
) -> tuple[str, str]:
    text = f"{_set(settings)}: copies from page-locked memory are faster and do not block the host"
    if pageable_samples_per_s is not None and pinned_samples_per_s is not None:
        pinned = format_throughput(pinned_samples_per_s)
        basis = (
            f"copies alone reach {pinned} from it instead of {format_rate(pageable_samples_per_s)}"
        )
    elif copy_s is not None and pinned_copy_s is not None:
        pinned = format_short_time(pinned_copy_s)
        basis = f"copying a batch takes {pinned} from it instead of {format_short_time(copy_s)}"
    else:
        basis = "an upper limit, since copies from page-locked memory were not measured"
    if share is not None:
        basis += f"; copies that nothing hides take {format_fraction(share)} of the time"
    return text, basis


@_advice
def convert_batches_in_collate(share: float) -> tuple[str, str]:
    return (
        "Convert batches to the memory format of training (channels_last) in collate_fn, so that "
        "nothing is converted later"
    ), _all_saved("moving batches", share)


@_advice
def copy_narrower_types(share: float, item_bytes: float | None) -> tuple[str, str]:
    return (
        f"Copy fewer bytes{_item_size(item_bytes)}: narrower types, smaller items; create on the "
        "device what can be created there"
    ), f"at best half of the bytes are left; copies take {format_fraction(share)} of the time"


@_advice
def copy_uint8(
    share: float, item_bytes: float | None, float32_fraction: float | None
) -> tuple[str, str]:
    if float32_fraction is None:
        known = "an upper limit, if all bytes are float32"
    else:
        known = f"{format_fraction(float32_fraction)} of the bytes are float32"
    return (
        (
            f"Copy fewer bytes{_item_size(item_bytes)}: uint8 images instead of float32, converted "
            "and normalised on the device"
        ),
        (
            f"uint8 has a quarter of float32's bytes, and copies take {format_fraction(share)} of "
            f"the time; {known}"
        ),
    )


def _item_size(item_bytes: float | None) -> str:
    return "" if item_bytes is None else f" (an item has {format_bytes(item_bytes)})"


def _all_saved(work: str, share: float) -> str:
    return f"at best, all of the {format_fraction(share)} of the time for {work} is saved"


# The host and the device


@_advice
def fuse_operations(share: float, operators: int | None, has_cuda_graphs: bool) -> tuple[str, str]:
    which = "many small operations"
    if operators is not None:
        which = f"the {operators:,} operators of a batch"
    graphs = ", CUDA graphs" if has_cuda_graphs else ""
    return (
        f"Replace {which} with fewer and larger ones: torch.compile{graphs}, batched instead of "
        "looped tensor code, a fused optimizer"
    ), _all_saved("small operations", share)


@_advice
def hand_over_less(
    share: float, take_s: float, batch_s: float, batch_tensors: int | None, is_pinned: bool
) -> tuple[str, str]:
    call = 'torch.multiprocessing.set_sharing_strategy("file_system") at the start of the script'
    remedy = f"Call {call}"
    if batch_tensors is not None and batch_tensors > 1:
        remedy = (
            f"Collate its {batch_tensors} tensors into one, in collate_fn or in a dataset whose "
            f"__getitems__ makes whole batches, or call {call}"
        )
    if not is_pinned:
        remedy += ", or set pin_memory=True, whose thread fetches batches meanwhile"
    text = (
        f"Send each batch in fewer pieces: fetching a prefetched one takes "
        f"{format_short_time(take_s)} of the {format_short_time(batch_s)} of a batch. {remedy}"
    )
    return text, _all_saved("fetching batches", share)


@_advice
def shorten_line(
    fraction: float, place: str, function: str, code: str, calls: str, is_in_model: bool
) -> tuple[str, str]:
    action = "work on whole tensors in place of loops in Python"
    if not is_in_model:
        action += ", or do it less often"
    called = f" ({calls})" if calls else ""
    line = f"`{code}`{called}" if code else "it"
    return (
        f"Make {function} ({place}) cheaper: {action}"
    ), f"{line} takes {format_fraction(fraction)} of the training thread's time, by its stacks"


@_advice
def shorten_own_code(share: float, outside_s: float | None) -> tuple[str, str]:
    taking = "" if outside_s is None else f", {format_short_time(outside_s)} of each step"
    return (
        "Find what the script does besides training (python -m cProfile, py-spy), and do it less "
        "often if training does not need it in each step"
    ), (
        f"{_all_saved('that code', share)}{taking}; it may be logging, metrics in Python, locks, "
        "sleeps, or calls to a service"
    )


@_advice
def avoid_synchronisation(share: float, is_pinned: bool) -> tuple[str, str]:
    return (
        "Let the host run ahead of the device: read the loss every N steps instead of after each "
        "(.item(), .cpu(), print), and copy without blocking "
        f"({'non_blocking=True' if is_pinned else 'pin_memory=True'})"
    ), _all_saved("waits of the host", share)


@_advice
def move_fewer_bytes(share: float, is_dtype_known: bool) -> tuple[str, str]:
    dtype = "" if is_dtype_known else ", use a narrower precision"
    return (
        f"Move fewer bytes: fuse element-wise operations (torch.compile), work in place{dtype}"
    ), f"at best half of the bytes are left; moving them takes {format_fraction(share)} of the time"


@_advice
def make_step_cheaper(
    share: float, peak_fraction: float | None, most_gain: float | None
) -> tuple[str, str]:
    text = "Make a step cheaper: fused operations (torch.compile), fewer operations per sample, or a faster device"
    basis = describe_computing(share, peak_fraction)
    if most_gain is None:
        return text, f"{basis}; the speed of a large matrix product was not measured"
    most = show(most_gain, "gain")
    return f"{text}; at the speed of a large matrix product this device gives at most {most}", basis


@_advice
def batch_like_lengths(
    pool_batches: int,
    padding: float,
    bucket_padding: float,
    items: int,
    timed: int,
    device_time: float,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    return (
        f"Batch sequences of similar lengths (a batch sampler that sorts pools of {pool_batches} "
        "batches by length, and shuffles pools and batches): padding falls from "
        f"{format_fraction(padding)} of the tokens to {format_fraction(bucket_padding)}"
    ), _lengths_basis(items, timed, device_time)


@_advice
def pack_sequences(
    row_tokens: int,
    samples_per_row: float,
    padding: float,
    packed_padding: float,
    items: int,
    timed: int,
    device_time: float,
    gain_low: float,
    gain_high: float,
) -> tuple[str, str]:
    return (
        f"Pack sequences into rows of {row_tokens:,} tokens, about "
        f"{format_mean_count(samples_per_row)} to a row, and use fewer rows a batch; keep "
        "positions and attention within each sequence (position_ids that restart, a block-diagonal "
        f"mask or attention by cumulative lengths): padding falls from {format_fraction(padding)} "
        f"of the tokens to {format_fraction(packed_padding)}"
    ), (
        f"{_lengths_basis(items, timed, device_time)} for a sample, whether or not attention covers "
        "whole rows"
    )


def _lengths_basis(items: int, timed: int, device_time: float) -> str:
    if not timed:
        return (
            f"computed from the lengths of {items:,} items, not timed: if a step's time goes with its "
            f"tokens, the device needs {format_fraction(device_time)} of its present time"
        )
    return (
        f"computed from the lengths of {items:,} items and timed batches of {timed} lengths: the device "
        f"needs {format_fraction(device_time)} of its present time"
    )


@_advice
def checkpoint_activations(
    block: str,
    blocks: int,
    samples: int,
    kept_bytes: int,
    inside_bytes: int,
    micro_batch_size: int,
    own_batch: int,
    least_saved_bytes: int,
    most_saved_bytes: int,
    forward_fraction: float | None,
    left_bytes: int | None = None,
    limit_bytes: int | None = None,
    gain_low: float | None = None,
    gain_high: float | None = None,
) -> tuple[str, str]:
    saved = f"{format_bytes(least_saved_bytes)} to {format_bytes(most_saved_bytes)}"
    if left_bytes is not None and limit_bytes is not None:
        effect = (
            f"your batch then takes about {format_bytes(left_bytes)}, if its peak is within these "
            f"blocks; the limit is {format_bytes(limit_bytes)}"
        )
    elif micro_batch_size == own_batch:
        effect = f"your batch, which has no room now, then keeps {saved} less for its backward pass"
    else:
        effect = (
            f"a batch of {micro_batch_size:,} samples then fits the memory, instead of "
            f"{own_batch:,} ({_cautions(['micro_batch_size'])})"
        )
    basis = (
        f"a batch of {samples:,} samples keeps {format_bytes(kept_bytes)} for its backward pass, "
        f"{format_bytes(inside_bytes)} of it in these blocks; with {micro_batch_size:,} samples "
        f"{saved} of it are saved"
    )
    if forward_fraction is not None:
        basis += f"; recomputing the blocks takes {format_fraction(forward_fraction)} of a step"
    return (
        f"Checkpoint the {blocks} blocks of class {block} (torch.utils.checkpoint): {effect}",
        basis,
    )


# Several devices

_FOLLOW = "scale the learning rate with the global batch"


@_advice
def accumulate_without_sync(
    backwards_per_step: float, exposed_s: float, exchange_fraction: float
) -> tuple[str, str]:
    return (
        "Exchange gradients only in the last of the "
        f"{format_mean_count(backwards_per_step)} backward passes of a step: put the others into "
        "model.no_sync()"
    ), (
        f"each exchange holds a backward pass up for {format_short_time(exposed_s)}; all take "
        f"{format_fraction(exchange_fraction)} of the time"
    )


@_advice
def no_search_for_unused() -> tuple[str, str]:
    return (
        "Set find_unused_parameters=False in DistributedDataParallel"
    ), "it walks the graph in each step, and every parameter had a gradient"


@_advice
def try_ddp() -> tuple[str, str]:
    text = "Let the search try strategy ddp: one process for each device, which exchange only gradients"
    return text, "no trial has measured it"


@_advice
def more_samples_per_exchange(
    settings: Mapping[str, object],
    factor: int,
    exposed_s: float,
    step_s: float,
    limit_fraction: float,
) -> tuple[str, str]:
    return f"{_set(settings)}: {factor} times the samples for each exchange ({_FOLLOW})", (
        f"an exchange adds {format_short_time(exposed_s)} to a step of "
        f"{format_short_time(step_s)}, and peak memory is {format_fraction(limit_fraction)} of the "
        "limit"
    )


@_advice
def compress_gradients(
    settings: Mapping[str, object], exchange_s: float, exposed_s: float
) -> tuple[str, str]:
    return f"{_set(settings)}: half the bytes to exchange ({_cautions(settings)})", (
        f"the exchange alone takes {format_short_time(exchange_s)}, {format_short_time(exposed_s)} "
        "of it not hidden; an upper limit, since compressing takes time too"
    )


@_advice
def more_workers(
    settings: Mapping[str, object],
    ranks: int,
    loader_processes: int,
    cores: int,
    loader_samples_per_s: float,
) -> tuple[str, str]:
    each = " for each rank" if ranks > 1 else ""
    return f"{_set(settings)}{each}", _loaders_reach(loader_processes, cores, loader_samples_per_s)


@_advice
def more_cores_for_loaders(
    loader_processes: int, cores: int, loader_samples_per_s: float
) -> tuple[str, str]:
    basis = _loaders_reach(loader_processes, cores, loader_samples_per_s)
    return "Use more cores: loading and training share the cores here", basis


@_advice
def more_cores_or_cheaper_items(
    cores_needed: int,
    loader_processes: int,
    cores: int,
    loader_samples_per_s: float,
    device_samples_per_s: float,
) -> tuple[str, str]:
    reached = _loaders_reach(loader_processes, cores, loader_samples_per_s)
    text = f"Use about {cores_needed} cores instead of {cores}, or make an item cheaper"
    return text, f"{reached}, the devices {format_throughput(device_samples_per_s)}"


def _loaders_reach(loader_processes: int, cores: int, loader_samples_per_s: float) -> str:
    processes = "process" if loader_processes == 1 else "processes"
    return f"{loader_processes} loader {processes} on {cores} cores reach {format_throughput(loader_samples_per_s)}"


@_advice
def find_slow_rank(ranks: Sequence[int]) -> tuple[str, str]:
    names = ", ".join(map(str, ranks))
    return (
        f"Find what slows down rank {names}: in every step the others wait for it",
        "the throughput of the other ranks",
    )


@_advice
def batch_of_single_device(
    settings: Mapping[str, object], limit_fraction: float
) -> tuple[str, str]:
    basis = f"the throughput of one device; it took {format_fraction(limit_fraction)} of the memory limit"
    return f"{_set(settings)} on each rank, as on one device ({_FOLLOW})", basis


@_advice
def settings_of_single_device(settings: Mapping[str, object]) -> tuple[str, str]:
    return f"{_set(settings)}, as in the best trial on one device", "the throughput of one device"


@_advice
def more_cores_for_ranks(cores: int) -> tuple[str, str]:
    return "Use more cores: on a CPU, ranks share its cores", f"{cores} cores here"


# Modes that slow steps down


@_advice
def switch_off_mode(
    mode: str,
    place: str,
    ratio: float | None,
    low: float | None,
    high: float | None,
    gain_low: float | None,
    gain_high: float | None,
) -> tuple[str, str]:
    where = f" ({place})" if place else ""
    return f"{_SWITCHED_OFF[mode]}{where}", _switched(mode, ratio, low, high)


_SWITCHED_OFF = {
    "anomaly": (
        "Switch off anomaly detection, which is for debugging: remove "
        "torch.autograd.set_detect_anomaly(True) or detect_anomaly()"
    ),
    "deterministic": (
        "Switch off deterministic algorithms if you can do without equal results in each run: "
        "torch.use_deterministic_algorithms(False), torch.backends.cudnn.deterministic = False"
    ),
    "tracer": (
        "Train without the debugger, coverage or profiler of Python that runs (sys.settrace or "
        "sys.setprofile), or profile some steps only"
    ),
    "profiler": (
        "Stop torch's profiler after some steps: give it a schedule, "
        "torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1), or remove it"
    ),
    "denormals": (
        "Call torch.set_flush_denormal(True) before the first operation, so that values below "
        "1.2e-38 count as zero; threads take it over when they start"
    ),
}
"""Action against each mode."""
_DOCUMENTED = {
    "anomaly": "PyTorch's documentation: it slows a program down, and is for debugging only",
    "deterministic": "PyTorch's documentation: deterministic operations are often slower",
    "tracer": "Python calls a function at each call or line",
    "profiler": (
        "it records each operation, and keeps all events in memory; PyTorch's documentation "
        "advises a schedule for long jobs"
    ),
    "denormals": "each operation on such a value may take 150 cycles or more",
}
"""Cost of each mode where it was not measured."""


def _switched(mode: str, ratio: float | None, low: float | None, high: float | None) -> str:
    """Return the measured ratio of steps with its interval; else what is documented."""
    if ratio is None or low is None or high is None:
        return f"not measured; {_DOCUMENTED[mode]}"
    return (
        f"with {MODES[mode]} a step takes {format_times(ratio)} times as long "
        f"({show_interval(low, high, 'times')})"
    )


@_advice
def unset_variable(name: str, value: str) -> tuple[str, str]:
    return f"Train without {name}={value}", f"not measured; {_VARIABLES[name]}"


_BLOCKING_WAITS = "PyTorch's documentation: blocking waits add overhead"
_LAUNCHES = "the host waits for each kernel; it is for debugging"
_VERBOSE = "the library prints a line for each call"
_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": _LAUNCHES,
    "HIP_LAUNCH_BLOCKING": _LAUNCHES,
    "AMD_SERIALIZE_KERNEL": _LAUNCHES,
    "AMD_SERIALIZE_COPY": "the host waits for each copy; it is for debugging",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "each tensor is allocated by the driver, and freeing it waits for the device"
    ),
    "CUBLAS_WORKSPACE_CONFIG": "NVIDIA's documentation: this value may limit performance",
    "TORCH_DISTRIBUTED_DEBUG": (
        "PyTorch's documentation: DETAIL may impact performance, use it only for debugging"
    ),
    "NCCL_DEBUG": "NCCL prints a line for each call",
    "TORCH_NCCL_BLOCKING_WAIT": _BLOCKING_WAITS,
    "NCCL_BLOCKING_WAIT": _BLOCKING_WAITS,
    "PYTHONDEVMODE": (
        "Python's documentation: it adds checks that are too expensive to be enabled by default"
    ),
    "PYTHONMALLOC": "Python checks each block of memory that it allocates and frees",
    "MALLOC_PERTURB_": "each byte that is allocated or freed is written once more",
    "ONEDNN_VERBOSE": _VERBOSE,
    "DNNL_VERBOSE": _VERBOSE,
    "MKL_VERBOSE": _VERBOSE,
}
"""Cost of each environment variable of `worker/modes`."""


@_advice
def stop_benchmarking(settings: Mapping[str, object]) -> tuple[str, str]:
    action = "torch.backends.cudnn.benchmark = False, or pad batches to a few shapes"
    return (
        f"{_set(settings)}: {action}" if settings else f"Set {action}",
        (
            "not measured; batches have different shapes, and for each new one cuDNN times its "
            "algorithms again"
        ),
    )
