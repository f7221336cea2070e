"""Advise on settings and on remedies beyond settings, by expected gain.

Takes an Evidence and its findings; returns Advice. `list_variations` proposes the settings that a
diagnosis measures for it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, exp, inf
from typing import Literal, NamedTuple, cast

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.hot_lines import costly_code
from autotune.messages import advice as messages
from autotune.messages.advice import AdviceText
from autotune.models.forecast import (
    PINNING_KINDS,
    Pair,
    advisable_points,
    apply_changes,
    copy_ceilings,
    cores_ceiling,
    device_ceiling,
    device_cores,
    expected_rates,
    join_rates,
    loader_ceiling,
    loader_cpu_s,
    loader_processes,
    rate_without,
    with_collating,
    workers_run_too_many_threads,
)
from autotune.models.memory import MemoryModel, Peak
from autotune.models.observations import (
    AMONG_WORKERS,
    by_promise,
    is_device_out_of_reach,
    is_loader_out_of_reach,
    side_observation,
)
from autotune.models.statistics import NORMAL_95
from autotune.models.throughput_law import joint_rate
from autotune.policy import POLICY
from autotune.records.breakdown import LoaderCauses, LoaderCosts
from autotune.records.ceilings import SIDES, Ceiling, CeilingBook
from autotune.records.measurement import (
    Activations,
    Ceilings,
    Interval,
    Measurement,
    SwitchGain,
    SwitchName,
)
from autotune.records.result import (
    Advice,
    Bottleneck,
    CurvePoint,
    Evidence,
    Finding,
    changed_settings,
    is_single,
)
from autotune.records.watched_run import Modes
from autotune.settings_table import BATCH_SETTINGS
from autotune.space import constraints as rules
from autotune.space.ranges import most_workers, whole_numbers
from autotune.space.scaling import with_batch
from autotune.space.space import ResolvedSpace

LEAST_GAIN = 0.03
"""Expected gain below which nothing is advised, the accuracy of ceilings. Source: our convention."""


def advise(
    words: AdviceText,
    present: float,
    expected: float | None,
    *,
    is_fault: bool = False,
    against: Bottleneck | None = None,
) -> Advice:
    """Return advice with its expected gain, and the interval if the words have it.

    Args:
        words: The advice and its basis.
        present: Present throughput in samples per second.
        expected: Expected throughput in samples per second; None if it can't be estimated.
        is_fault: It removes a fault, under which all settings were measured.
        against: The bottleneck that it is against, if only one.
    """
    figures = dict(words.note.figures)
    settings = cast("dict[str, object]", figures.pop("settings", {}))
    low = cast("float | None", figures.get("gain_low"))
    high = cast("float | None", figures.get("gain_high"))
    gain = None if expected is None else expected / present - 1.0
    interval = None
    if gain is not None and low is not None and high is not None:
        interval = Interval(value=gain, low=low, high=high)
    return Advice(
        kind=words.note.code,
        figures=figures,
        settings=settings,
        expected_samples_per_s=expected,
        expected_gain=gain,
        gain_interval=interval,
        text=words.note.text,
        basis=words.basis,
        is_fault=is_fault,
        against=against,
        place=str(figures.get("place") or ""),
    )


def advise_saving(
    words: AdviceText,
    saved: Interval | float | None,
    against: Bottleneck,
    *,
    place: str = "",
) -> Advice:
    """Return advice that removes a fault and saves this share of the whole run's time.

    Args:
        words: The advice and its basis.
        saved: Share of the time, in 0..1, with its interval if known; None if it can't be
            estimated.
        against: The bottleneck that it is against.
        place: File and line that it is about.
    """
    ends = saved if isinstance(saved, Interval) else None
    share = saved.value if isinstance(saved, Interval) else saved
    interval = None
    if ends is not None:
        interval = Interval(
            value=gain_of(ends.value), low=gain_of(ends.low), high=gain_of(ends.high)
        )
    return advise(words, 1.0, None).model_copy(
        update={
            "expected_gain": None if share is None else gain_of(share),
            "gain_interval": interval,
            "is_fault": True,
            "against": against,
            "place": place,
        }
    )


_MOST_SAVED = 0.99
"""Largest share of the time that advice may claim to save. Source: our convention."""


def gain_of(saved: float) -> float:
    """Return the gain of throughput if this share of the time is saved."""
    return 1.0 / (1.0 - min(max(saved, 0.0), _MOST_SAVED)) - 1.0


def worth_giving(advice: Iterable[Advice]) -> list[Advice]:
    """Return the advice that gains at least 3 %, largest gain first, then advice without a figure."""
    known = [(piece, piece.expected_gain) for piece in advice]
    worth = [(piece, gain) for piece, gain in known if gain is not None and gain >= LEAST_GAIN]
    by_gain = sorted(worth, key=lambda pair: pair[1], reverse=True)
    return [piece for piece, _ in by_gain] + [piece for piece, gain in known if gain is None]


def loader_bounds(evidence: Evidence, loader: float) -> tuple[float, float]:
    """Return the 95 % interval of the loader's throughput during a run.

    It includes the error of the measurement: a loader that pauses may have a wide interval.

    Args:
        evidence: The run, its settings and machine.
        loader: Throughput of the loader alone, in samples per second.
    """
    ceilings = evidence.measurement.ceilings
    return _bounds(evidence, "loader", loader, None if ceilings is None else ceilings.loader)


def _device_bounds(evidence: Evidence, device: float) -> tuple[float, float]:
    """Return the 95 % interval of the device's throughput during a run, as `loader_bounds` does."""
    ceilings = evidence.measurement.ceilings
    return _bounds(evidence, "device", device, None if ceilings is None else ceilings.device)


def _bounds(
    evidence: Evidence, side: Literal["loader", "device"], rate: float, ceiling: Ceiling | None
) -> tuple[float, float]:
    if rate == inf:
        return inf, inf
    own_sd = 0.0 if ceiling is None else ceiling.relative_sd or 0.0
    kind = evidence.environment.device_kind
    observed = side_observation(side, evidence.config, rate, kind, own_sd)
    off = NORMAL_95 * observed.relative_sd
    return rate * max(1e-9, 1 - off), rate * (1 + off)


# Configurations to measure on one side alone: each differs from the baseline in one respect.

_LARGER = (2.0, 4.0)
_WAITING_FRACTION = 0.5
"""Share of an item's time in waits from which more workers than cores come first. Source: our
convention, as for the verdict."""
_SMALLER = (0.5,)
"""Multiples of the current batch: with it, enough points for a line. Source: our convention."""


def list_variations(space: ResolvedSpace, run: Measurement) -> list[TrainingConfig]:
    """Return configurations whose loader or device is worth measuring alone.

    A side that can't be the bottleneck has none. Time may run out, so the most informative ones
    come first on each side. Workers persist from epoch to epoch. torch.compile is left out, which
    takes too long here, and cudnn_benchmark, which needs a process of its own.

    Args:
        space: The space; its baseline are the current settings.
        run: The measurement of the baseline.
    """
    own = space.baseline
    machine = (space.facts, space.environment)
    book = CeilingBook()
    ceilings = run.ceilings or Ceilings()
    for side in SIDES:
        book.keep(side, own, getattr(ceilings, side))
    changes: list[Mapping[str, object]] = []
    if not is_loader_out_of_reach(space, book):
        changes += (
            {"persistent_workers": True, **loader} for loader in _loader_changes(space, run)
        )
    if not is_device_out_of_reach(space, book, by_cores=_loader_by_cores(space, run.loader_costs)):
        changes += _device_changes(space)
    changed = [{**own.model_dump(), **change} for change in changes]
    if True not in list(space.domains["persistent_workers"]):  # such as a script that sets epochs
        changed = [{**settings, "persistent_workers": False} for settings in changed]
    configs = [
        TrainingConfig.model_validate(rules.normalised(settings, *machine)) for settings in changed
    ]
    others = [config for config in dict.fromkeys(configs) if config != own]
    return [
        config
        for config in others
        if rules.obstacle(config, *machine, drop_last=space.drop_last) is None
    ]


def _loader_by_cores(space: ResolvedSpace, costs: LoaderCosts | None) -> float:
    """Return the samples/s at which items keep all cores busy; infinite if unknown.

    On a CPU, computing takes cores from the loader, which makes it slower still.
    """
    if costs is None:
        return inf
    sample_s = costs.item_cpu_s + costs.collate_s / space.baseline.micro_batch_size
    return space.environment.cores / sample_s if sample_s > 0 else inf


def _loader_changes(space: ResolvedSpace, run: Measurement) -> Iterator[Mapping[str, object]]:
    own = space.baseline
    cores = space.environment.cores
    sharing = rules.ranks_on_host(own.process_count, space.environment)
    most = max(1, most_workers(space.facts, space.environment, space.policy.ranges) // sharing)
    counts = {
        0,
        *(2**power for power in range(most.bit_length())),
        *({cores // sharing} & {*range(1, most + 1)}),
    }
    counts -= {own.num_workers} if _may_do_with_one(own, run) else {own.num_workers, 0, 1}
    likely = cores // sharing
    costs = run.loader_costs
    if costs is not None and costs.waiting_fraction > _WAITING_FRACTION:
        likely = most  # waits overlap, whatever the cores
    by_workers = by_promise(counts, max(1, likely))
    yield from ({"num_workers": count} for count in by_workers if count > 1)
    if own.num_workers > 1 and len({*space.domains["in_order"]}) > 1:
        yield from ({"in_order": value} for value in space.domains["in_order"])
    if own.has_workers:
        threads = sorted(whole_numbers(space.domains["worker_threads"]))
        yield from ({"worker_threads": count} for count in threads[:1])
        if run.breakdown is None or run.breakdown.restart_fraction >= LEAST_GAIN:
            yield {}  # workers that persist
    yield from ({"num_workers": count} for count in by_workers if count <= 1)


def _may_do_with_one(own: TrainingConfig, run: Measurement) -> bool:
    """Return False if one process makes items more slowly than the run: fewer workers can't help."""
    costs = run.loader_costs
    if costs is None or own.num_workers < 2:
        return True
    sample_s = costs.item_s + costs.collate_s / own.micro_batch_size
    return run.samples_per_s / own.process_count * sample_s <= POLICY.trials.ample


def _device_changes(space: ResolvedSpace) -> Iterator[Mapping[str, object]]:
    own = space.baseline
    environment = space.environment
    yield from (_with_factor(own, factor) for factor in _LARGER)
    # of a script only precisions that can be set from outside, never float16
    reached = space.domains["amp_dtype"]
    yield from ({"amp_dtype": dtype} for dtype in environment.native_amp_dtypes if dtype in reached)
    if environment.device_kind == "cpu":
        yield from ({"intra_op_threads": count} for count in (1, environment.cores))
    if space.facts.has_4d_input:
        yield {"channels_last": True}
    yield from ({"fused": value} for value in space.domains["fused"])
    yield from (_with_factor(own, factor) for factor in _SMALLER)


def _with_factor(own: TrainingConfig, factor: float) -> Mapping[str, object]:
    return with_batch(own, max(1, int(own.micro_batch_size * factor))).model_dump()


# Checkpointing the repeated blocks of a model: the memory saved, the batch that then fits, and its
# throughput.

_FACTORS = (2, 4, 8)
"""Multiples of the current batch, up to the default of `max_batch_scale`. Source: our convention."""


class _Times(NamedTuple):
    """Expected throughput over the present one, with its 95 % interval."""

    expected: float
    low: float
    high: float


def _times(evidence: Evidence, device_time: float, interval: tuple[float, float]) -> _Times:
    """Return the expected throughput if the device needs this share of its time, and the loader stays.

    Args:
        evidence: The run.
        device_time: Time of a sample on the device over the present one.
        interval: Its 95 % interval; added is the error between a loader alone and in a run.
    """
    loader = loader_ceiling(evidence)
    device = device_ceiling(evidence)
    present = join_rates(evidence, loader, device)
    least, most = interval
    slowest, fastest = loader_bounds(evidence, loader)
    return _Times(
        expected=join_rates(evidence, loader, device / device_time) / present,
        low=join_rates(evidence, slowest, device / most) / present,
        high=join_rates(evidence, fastest, device / least) / present,
    )


def checkpoint_activations(evidence: Evidence) -> Iterator[Advice]:
    """Advise to checkpoint blocks, which saves memory but repeats their forward pass.

    It is advised in three cases: a larger batch that fits only then is faster nevertheless; the
    current batch fits only then; or the current batch thrashes, where only the memory saved is
    known, since its peak is limited by what it was allowed. Nothing is known per sample of a batch
    by token budget.

    Source: pytorch.org, torch.utils.checkpoint; Chen et al. 2016, "Training Deep Nets with
    Sublinear Memory Cost".
    """
    run = evidence.measurement
    found = run.activations
    batch = evidence.config.micro_batch_size
    if found is None or found.least_saved_bytes(batch) <= 0 or evidence.config.max_tokens:
        return
    if run.memory.is_thrashing:
        yield advise(_words(evidence, found, batch), run.samples_per_s, None)
    elif run.peak_memory_bytes > evidence.limit_bytes:
        if _fits_then(evidence, found, evidence.config):
            left_bytes = run.peak_memory_bytes - round(found.least_saved_bytes(batch))
            words = _words(evidence, found, batch, left_bytes=left_bytes)
            yield advise(words, run.samples_per_s, None)
    elif (best := _best_checkpointed(evidence, found)) is not None:
        size, times = best
        words = _words(evidence, found, size, gains=(times.low - 1, times.high - 1))
        yield advise(words, run.samples_per_s, times.expected * run.samples_per_s)


def _best_checkpointed(evidence: Evidence, found: Activations) -> tuple[int, _Times] | None:
    """Return the best batch that fits only with checkpointing, if it gains 3 % over those without."""
    own = evidence.config
    memory = _memory(evidence)
    length = evidence.facts.dataset_length
    reached = 1.0
    only_then = []
    for factor in _FACTORS:
        config = with_batch(own, factor * own.micro_batch_size)
        size = config.micro_batch_size
        forecasts = _forecast(evidence, found, factor)
        if forecasts is None or (length is not None and size > length):
            continue
        plain, checkpointed = forecasts
        if _is_sure_to_fit(memory, config, evidence.limit_bytes):
            reached = max(reached, plain)
        elif _fits_then(evidence, found, config):
            only_then.append((size, checkpointed))
    # by the lower bound: the larger a batch, the less certain its forecast
    best = max(only_then, key=lambda one: one[1].low, default=None)
    if best is None or best[1].expected < (1 + LEAST_GAIN) * reached or best[1].low <= 1:
        return None
    return best


def _is_sure_to_fit(memory: MemoryModel, config: TrainingConfig, limit_bytes: int) -> bool:
    return bool(memory.chance_to_fit([config], limit_bytes)[0] >= POLICY.trials.sure_to_fit)


def _fits_then(evidence: Evidence, found: Activations, config: TrainingConfig) -> bool:
    """Return whether a batch is sure to fit with checkpointed blocks.

    Memory kept for the backward pass is known; the rest is forecast from the peaks without it.
    """
    size = config.micro_batch_size
    left = found.bytes_per_sample * size - found.least_saved_bytes(size)
    room = round(evidence.limit_bytes - left)
    return room > 0 and _is_sure_to_fit(_memory(evidence, found.bytes_per_sample), config, room)


def _memory(evidence: Evidence, less_per_sample: float = 0.0) -> MemoryModel:
    """Fit peak memory to the run and to the points of the device that differ only in the batch.

    Args:
        evidence: The run and the curves.
        less_per_sample: Bytes to subtract from each peak, for each sample.
    """
    in_ram = evidence.environment.has_only_ram
    peaks = [Peak(evidence.config, evidence.measurement.peak_memory_bytes)]
    for point in evidence.curves.device:
        if point.peak_memory_bytes is not None and point.changes.keys() <= BATCH_SETTINGS:
            config = apply_changes(evidence, point).without_workers()
            peaks.append(Peak(config, point.peak_memory_bytes, "alone" if in_ram else "trial"))
    rest = [
        one._replace(
            peak_bytes=max(1, round(one.peak_bytes - less_per_sample * one.config.micro_batch_size))
        )
        for one in peaks
    ]
    return MemoryModel(observed=rest, has_workers_in_ram=in_ram)


def _forecast(evidence: Evidence, found: Activations, factor: int) -> tuple[float, _Times] | None:
    """Forecast a larger batch, plain and checkpointed, from the times of a step on a whole and on half a batch.

    A step on B times the samples takes c + a B times the current step, where c + a = 1 and
    c + a / 2 is the measured ratio. Each sample repeats the blocks' forward pass: at most as much
    as now, which is expected, and at least the same share of the step. None if the errors are
    unknown.

    Args:
        evidence: The run.
        found: Memory and times of its blocks.
        factor: Samples of the larger batch over those of the current one.
    """
    half = found.half_step
    forward = found.forward
    if half is None or forward is None or half.sd is None or forward.sd is None:
        return None

    def device_time(ratio: float) -> float:
        """Return a sample's device time over the current one, by the time of half a batch."""
        ratio = min(1.0, max(0.5, ratio))
        return (2 * ratio - 1) / factor + 2 - 2 * ratio

    expected = device_time(half.value)
    slow = device_time(half.value - NORMAL_95 * half.sd)
    fast = device_time(half.value + NORMAL_95 * half.sd)
    most = forward.value + NORMAL_95 * forward.sd
    least = max(0.0, forward.value - NORMAL_95 * forward.sd)
    plain = _times(evidence, expected, (expected, expected))
    interval = (fast * (1 + least), slow + most)
    return plain.expected, _times(evidence, expected + forward.value, interval)


def _words(
    evidence: Evidence,
    found: Activations,
    batch: int,
    *,
    left_bytes: int | None = None,
    gains: tuple[float, float] | None = None,
) -> AdviceText:
    """Word the advice: memory kept, memory saved with this batch, and the cost of recomputing."""
    return messages.checkpoint_activations(
        block=found.block or "",
        blocks=found.blocks,
        samples=found.whole.samples,
        kept_bytes=found.whole.total_bytes,
        inside_bytes=found.whole.inside_bytes,
        micro_batch_size=batch,
        own_batch=evidence.config.micro_batch_size,
        least_saved_bytes=round(found.least_saved_bytes(batch)),
        most_saved_bytes=round(found.most_saved_bytes(batch)),
        forward_fraction=None if found.forward is None else found.forward.value,
        left_bytes=left_bytes,
        limit_bytes=None if left_bytes is None else evidence.limit_bytes,
        gain_low=None if gains is None else gains[0],
        gain_high=None if gains is None else gains[1],
    )


# Modes that slow steps down: debugging, subnormal values, garbage collection.


def modes_of(evidence: Evidence) -> Modes:
    """Return the modes seen while the script ran freely, else those seen after the window."""
    if evidence.watched is not None:
        return evidence.watched.modes
    return evidence.measurement.modes or Modes()


def undo_modes(evidence: Evidence) -> Iterator[Advice]:
    """Advise to switch off the modes that slow steps down, by steps with and without each.

    A mode that was compared without a difference is not mentioned. Modes that nothing can switch
    from outside, such as environment variables, are advised without a figure.
    """
    run = evidence.measurement
    modes = modes_of(evidence)
    for switch in run.switches:
        if not is_slower(switch):
            continue
        ratio = switch.ratio
        times = _times(evidence, 1 / ratio.value, (1 / ratio.high, 1 / ratio.low))
        words = messages.switch_off_mode(
            mode=switch.name,
            place=modes.places.get(switch.name, ""),
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            gain_low=times.low - 1,
            gain_high=times.high - 1,
        )
        against: Bottleneck = "denormals" if switch.name == "denormals" else "debugging"
        expected = times.expected * run.samples_per_s
        yield advise(words, run.samples_per_s, expected, is_fault=True, against=against)

    # Modes that were not compared.
    compared = {switch.name for switch in run.switches}
    states: dict[SwitchName, bool] = {
        "anomaly": modes.is_anomaly_detected,
        "tracer": modes.is_traced and not modes.is_profiled,
        "profiler": modes.is_profiled,
    }
    for name, is_on in states.items():
        if is_on and name not in compared:
            words = messages.switch_off_mode(
                mode=name,
                place=modes.places.get(name, ""),
                ratio=None,
                low=None,
                high=None,
                gain_low=None,
                gain_high=None,
            )
            yield advise(words, run.samples_per_s, None, is_fault=True, against="debugging")
    for variable, value in modes.variables.items():
        words = messages.unset_variable(name=variable, value=value)
        yield advise(words, run.samples_per_s, None, is_fault=True, against="debugging")
    is_benchmarking = modes.is_cudnn_benchmark or evidence.config.cudnn_benchmark
    has_cudnn = evidence.environment.device_kind == "cuda"
    if has_cudnn and is_benchmarking and evidence.facts.has_fixed_shapes is False:
        settings = {"cudnn_benchmark": False} if evidence.config.cudnn_benchmark else {}
        words = messages.stop_benchmarking(settings=settings)
        yield advise(words, run.samples_per_s, None, is_fault=True, against="debugging")


def is_slower(switch: SwitchGain) -> bool:
    """Return whether steps are slower with a mode than without it, by 3 % and beyond chance."""
    return switch.ratio.low > 1 and switch.ratio.value >= 1 + LEAST_GAIN


# Batches without padding: advice with the interval of its gain.

_LEAST_PADDING = 0.10
"""Least share of the device's time for padding that is advised on without timed batches. Source: our
convention, as for findings."""
_LEAST_LEFT = 0.01
"""Least share of a sample's time in the loader that remains. Source: our convention."""


def remove_padding(evidence: Evidence) -> Iterator[Advice]:
    """Advise to batch sequences of similar lengths, and to pack them if that gains 3 % more.

    Only the device gains: the loader's throughput is assumed to stay. Of a script no batches of
    other lengths can be timed: its time is assumed to go with its padded tokens. The expected
    throughput follows from the law that joins both sides; its interval from the error of the device's time,
    and from that between a loader alone and the same loader in a run.

    Source: for rows, Krell et al. 2021 (arXiv:2107.02027), and transformers'
    DataCollatorWithFlattening.
    """
    lengths = evidence.measurement.lengths
    present = evidence.measurement.samples_per_s
    if lengths is None:
        return
    buckets = lengths.buckets
    packed = lengths.packed
    padding = buckets.random_padding if lengths.padding is None else lengths.padding
    reached = 1.0
    device_time = buckets.device_time
    interval = buckets.device_time_ci
    if device_time is None or interval is None:
        device_time = min(1.0, (1 - padding) / max(1 - buckets.bucket_padding, _LEAST_LEFT))
        # Half of a step may not depend on lengths; attention goes with their square.
        interval = (device_time**2, (1 + device_time) / 2)
    is_timed = buckets.device_time is not None
    is_estimated = evidence.facts.script is not None and device_time <= 1 - _LEAST_PADDING
    if is_timed or is_estimated:
        times = _times(evidence, device_time, interval)
        if times.low > 1:
            reached = times.expected
            words = messages.batch_like_lengths(
                pool_batches=buckets.pool_batches,
                padding=padding,
                bucket_padding=buckets.bucket_padding,
                items=lengths.items,
                timed=len(lengths.steps),
                device_time=device_time,
                gain_low=times.low - 1,
                gain_high=times.high - 1,
            )
            yield advise(words, present, present * times.expected, is_fault=True)
    if packed is not None:
        times = _times(evidence, packed.device_time, packed.device_time_ci)
        if times.low > 1 and times.expected >= (1 + LEAST_GAIN) * reached:
            words = messages.pack_sequences(
                row_tokens=packed.row_tokens,
                samples_per_row=packed.samples_per_row,
                padding=padding,
                packed_padding=packed.padding,
                items=lengths.items,
                timed=len(lengths.steps),
                device_time=packed.device_time,
                gain_low=times.low - 1,
                gain_high=times.high - 1,
            )
            yield advise(words, present, present * times.expected, is_fault=True)


def loader_without(evidence: Evidence, costs: LoaderCosts, item_fraction: float) -> float:
    """Return the loader's samples/s without a share of its items' time.

    Collating and the transfer of a batch from its worker stay.

    Args:
        evidence: The run.
        costs: Costs of its loader.
        item_fraction: Share of an item's time that is saved, in 0..1.
    """
    return _loader_saving(evidence, costs, costs.item_s * item_fraction)


def _loader_saving(evidence: Evidence, costs: LoaderCosts, saved_s: float) -> float:
    """Return the loader's samples/s if making a sample takes some seconds less.

    The transfer of a batch from its worker stays. Shares of times measured together are used,
    since the load of other processes lengthens all of them.

    Args:
        evidence: The run.
        costs: Costs of its loader.
        saved_s: Seconds saved of a sample's item, collating and, without workers, drawing.
    """
    making_s = max(_making_s(evidence, costs), 1e-9)
    transfer_s = _transfer_of_sample_s(evidence, costs)
    left_s = max(making_s - saved_s, _LEAST_LEFT * making_s)
    return loader_ceiling(evidence) * (making_s + transfer_s) / (left_s + transfer_s)


def _making_s(evidence: Evidence, costs: LoaderCosts) -> float:
    """Return the seconds in which a loader process makes a sample, without its transfer.

    Without workers that process also draws the indices.
    """
    drawing_s = 0.0
    if costs.causes is not None and not evidence.config.num_workers:
        drawing_s = (costs.causes.sampler_s or 0.0) / evidence.config.micro_batch_size
    return with_collating(evidence, costs, costs.item_s) + drawing_s


# Faults inside the loader: advice with the interval of its gain, for loaders that training waits for.

_LEAST_PART = 0.10
"""Least share of a loader's time for a part of it to be a fault. Source: our convention."""
_WHOLE_FILE_FACTOR = 8.0
"""Memory that an item holds over its own bytes from which it counts as a part of something larger:
twice what converting uint8 to float32 makes of an item's bytes. Source: our convention."""
_FILE_FACTOR = 2.0
"""Bytes that such an item reads over its own bytes: temporary arrays of a computation read nothing.
Source: our convention."""
_PARALLEL = 1.3
"""Speedup by two or more workers below which they wait for each other. Source: our convention."""
_WORKERS_ONLY = frozenset({"num_workers", "persistent_workers", "prefetch_factor"})


def list_loader_faults(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Yield advice on faults inside the loader, if training waits for it."""
    found = {finding.bottleneck for finding in findings}
    costs = evidence.measurement.loader_costs
    if "repeats" in found:
        yield from _against("repeats", [_shard_repeated(evidence)])
    if costs is None or costs.causes is None or not found & {*_FOR_LOADER, "restart"}:
        return
    if loader_ceiling(evidence) == inf:
        return
    for check in (_sampler, _collate, _single_items, _whole_files, _locks, _few_shards):
        advice = check(evidence, costs, costs.causes)
        of_loader = [one.bottleneck for one in findings if one.bottleneck in _FOR_LOADER]
        yield from _against(of_loader[0] if of_loader else "restart", advice)


def _shard_repeated(evidence: Evidence) -> Advice:
    """Advise to share out a stream of which each worker delivers all: the gain is in different samples."""
    workers = evidence.config.num_workers
    words = messages.shard_stream(workers_needed=workers, num_workers=workers)
    piece = advise(words, evidence.measurement.samples_per_s, None, is_fault=True)
    return piece.model_copy(update={"expected_gain": workers - 1.0})


def _with_loader(evidence: Evidence, loader: float) -> _Times:
    """Return the expected throughput with a loader of this throughput, over the present one."""
    device = device_ceiling(evidence)
    present = join_rates(evidence, loader_ceiling(evidence), device)
    slowest, fastest = loader_bounds(evidence, loader)
    device_low, device_high = _device_bounds(evidence, device)
    return _Times(
        expected=join_rates(evidence, loader, device) / present,
        low=join_rates(evidence, slowest, device_low) / present,
        high=join_rates(evidence, fastest, device_high) / present,
    )


def _fault(
    evidence: Evidence, loader: float, write: Callable[[float, float], AdviceText]
) -> Iterator[Advice]:
    """Yield advice with the gain of a loader of this throughput, if it gains 3 %.

    Args:
        evidence: The run.
        loader: The loader's samples/s without the fault.
        write: Function that words the advice with the ends of the gain's interval.
    """
    times = _with_loader(evidence, loader)
    if times.expected < 1 + LEAST_GAIN:
        return
    present = evidence.measurement.samples_per_s
    words = write(times.low - 1, times.high - 1)
    yield advise(words, present, present * times.expected, is_fault=True)


def _sampler(evidence: Evidence, costs: LoaderCosts, causes: LoaderCauses) -> Iterator[Advice]:
    """Advise a cheaper sampler: the training process draws indices, whatever the workers do."""
    config = evidence.config
    drawing_s = causes.sampler_s or 0.0
    starting_s = causes.sampler_start_s or 0.0
    epoch = evidence.measurement.window.epoch_samples or evidence.facts.dataset_length
    sample_s = drawing_s / config.micro_batch_size
    sample_s += starting_s / epoch if epoch else 0.0
    now_s = 1.0 / loader_ceiling(evidence)
    if sample_s < _LEAST_PART * now_s:
        return
    if config.num_workers:
        # Workers make samples meanwhile, and are the limit then.
        workers_s = with_collating(evidence, costs, costs.item_s) / loader_processes(config)
        loader = 1.0 / max(now_s - sample_s, workers_s, _LEAST_LEFT * now_s)
    else:
        loader = 1.0 / max(now_s - sample_s, _LEAST_LEFT * now_s)
    yield from _fault(
        evidence,
        loader,
        lambda low, high: messages.draw_faster(
            sampler=causes.sampler,
            sampler_s=drawing_s,
            sampler_start_s=starting_s,
            batch_s=config.group_batch_size / evidence.measurement.samples_per_s,
            num_workers=config.num_workers,
            gain_low=low,
            gain_high=high,
        ),
    )


def _collate(evidence: Evidence, costs: LoaderCosts, causes: LoaderCauses) -> Iterator[Advice]:
    """Advise a faster collate function, if it is the user's and a plain one takes half the time at most."""
    samples = evidence.config.micro_batch_size
    own = causes.collate
    if own is None or costs.collate_s < _LEAST_PART * _making_s(evidence, costs) * samples:
        return
    saved_s = costs.collate_s - (own.plain_s or 0.0)
    if saved_s < costs.collate_s / 2:
        return
    yield from _fault(
        evidence,
        _loader_saving(evidence, costs, saved_s / samples),
        lambda low, high: messages.speed_up_collate(
            function=own.function,
            place=own.place,
            collate_s=costs.collate_s,
            plain_s=own.plain_s,
            items_s=costs.item_s * samples,
            gain_low=low,
            gain_high=high,
        ),
    )


def _single_items(evidence: Evidence, costs: LoaderCosts, causes: LoaderCauses) -> Iterator[Advice]:
    """Advise to take whole batches from a dataset in memory; without a measurement, with an upper limit.

    Source: pytorch.org, torch.utils.data, "Loading Batched and Non-Batched Data", and
    torch/utils/data/_utils/fetch.py (`__getitems__`).
    """
    samples = evidence.config.micro_batch_size
    if not causes.is_in_memory or causes.makes_batches or samples == 1:
        return
    is_measured = causes.batch_fetch_s is not None
    fetch_s = causes.batch_fetch_s or causes.copy_s
    if fetch_s is None:
        return
    now_s = costs.item_s * samples + costs.collate_s
    # The user's collate function may do more than put items together, so it stays.
    left_s = fetch_s + (costs.collate_s if causes.collate is not None else 0.0)
    yield from _fault(
        evidence,
        _loader_saving(evidence, costs, max(0.0, now_s - left_s) / samples),
        lambda low, high: messages.fetch_batches(
            item_s=costs.item_s,
            samples=samples,
            collate_s=costs.collate_s,
            fetch_s=fetch_s,
            is_measured=is_measured,
            gain_low=low,
            gain_high=high,
        ),
    )


def _whole_files(evidence: Evidence, costs: LoaderCosts, causes: LoaderCauses) -> Iterator[Advice]:
    """Advise to read only a part of a file, if an item reads and unpacks much more than it returns.

    Images that are decoded whole have advice of their own.
    """
    item_bytes = costs.item_bytes
    read_bytes = causes.read_bytes_per_item or 0.0
    peak_bytes = causes.peak_bytes_per_item or 0.0
    is_image = any(cost.kind.startswith("image") for cost in costs.formats)
    if is_image or item_bytes <= 0 or read_bytes < _FILE_FACTOR * item_bytes:
        return
    used = item_bytes / max(read_bytes, peak_bytes)
    if used * _WHOLE_FILE_FACTOR > 1:
        return
    length = evidence.facts.dataset_length
    free = evidence.free_ram_bytes
    has_room = length is not None and free is not None and length * item_bytes <= free
    yield from _fault(
        evidence,
        loader_without(evidence, costs, 1.0 - used),
        lambda low, high: messages.read_parts(
            item_bytes=item_bytes,
            read_bytes=read_bytes,
            peak_bytes=peak_bytes,
            items=length,
            has_room=has_room,
            gain_low=low,
            gain_high=high,
        ),
    )


def _locks(evidence: Evidence, costs: LoaderCosts, causes: LoaderCauses) -> Iterator[Advice]:
    """Advise a handle for each worker, if workers share a lock or a file and are no faster than one.

    On a machine whose cores other programs use, workers may be no faster without any lock, unless
    their items mostly wait.
    """
    load = evidence.measurement.host_load
    is_short_of_cores = load is not None and load.is_loaded
    is_short_of_cores &= costs.waiting_fraction <= _WAITING_FRACTION
    cores = evidence.environment.cores
    # One process on a free core
    alone = 1.0 / max(_making_s(evidence, costs) - costs.item_delayed_s, 1e-9)
    rates = dict[int, float]()
    if evidence.config.num_workers:
        rates[evidence.config.num_workers] = loader_ceiling(evidence)
    busy_cores = 0.0
    for point in advisable_points(evidence, "loader"):
        if point.ceiling is None or not set(point.changes) <= _WORKERS_ONLY:
            continue
        workers = apply_changes(evidence, point).num_workers
        rates[workers] = max(rates.get(workers, 0.0), point.ceiling.samples_per_s)
        if 2 <= workers <= cores:
            cpu_s = point.cpu_s_per_sample or 0.0
            busy_cores = max(busy_cores, cpu_s * point.ceiling.samples_per_s)
    single = rates.get(1, alone)
    several = {workers: rate for workers, rate in rates.items() if 2 <= workers <= cores}
    if not causes.shared_handles or not several or is_short_of_cores:
        return
    workers = max(several)
    speedup = max(several.values()) / single
    if speedup >= _PARALLEL or busy_cores >= _PARALLEL:
        return
    yield from _fault(
        evidence,
        single * workers,
        lambda low, high: messages.open_in_each_worker(
            handles=causes.shared_handles,
            num_workers=workers,
            speedup=speedup,
            cores=cores,
            gain_low=low,
            gain_high=high,
        ),
    )


def _transfer_of_sample_s(evidence: Evidence, costs: LoaderCosts) -> float:
    return (costs.transfer_s or 0.0) / evidence.config.micro_batch_size


def _few_shards(evidence: Evidence, costs: LoaderCosts, causes: LoaderCauses) -> Iterator[Advice]:
    """Advise more shards for a stream with fewer of them than workers, within the cores.

    Source: huggingface.co, datasets, "Stream", `IterableDataset.num_shards`: a worker without a
    shard stops.
    """
    shards = causes.stream_shards
    workers = evidence.config.num_workers
    watched = evidence.watched
    if shards is None and watched is not None and watched.active_workers:
        shards = watched.active_workers
    if shards is None or shards >= workers:
        return
    present = loader_ceiling(evidence)
    making_s = _making_s(evidence, costs) + _transfer_of_sample_s(evidence, costs)
    allowed = min(present * workers / shards, workers / making_s, cores_ceiling(evidence))
    yield from _fault(
        evidence,
        max(present, allowed),
        lambda low, high: messages.add_shards(
            stream_shards=shards, num_workers=workers, gain_low=low, gain_high=high
        ),
    )


# Remedies beyond settings: a table from bottleneck to advice, each with its expected throughput.

_LEAST_TAKING = 0.10
"""Least share of a batch's time for fetching that is worth changing, as for findings. Source: our
convention."""
_LONGER_EPOCHS = 20
"""Factor for longer epochs: restarts then cost a twentieth. Source: our convention."""
_BYTES_LEFT = 0.5
"""Share of bytes left at best by fused operations or narrower types, such as bfloat16 instead of
float32. Source: our convention."""
_UINT8_SAVES = 0.75
"""Share of float32's bytes that uint8 saves: one byte instead of four."""


def list_remedies(
    evidence: Evidence, findings: Sequence[Finding], *, best_samples_per_s: float
) -> Iterator[Advice]:
    """Yield remedies for each finding that settings alone don't remove; for computing only if first."""
    costs = evidence.measurement.loader_costs
    is_data_bound = best_samples_per_s < POLICY.trials.near_ceiling * device_ceiling(evidence)
    for finding in findings:
        code = finding.bottleneck
        if code in _FOR_LOADER:
            if is_data_bound and costs is not None:
                yield from _against(code, _FOR_LOADER[code](evidence, costs))
        elif code in _FOR_THE_REST and (code != "compute" or finding is findings[0]):
            yield from _against(code, _FOR_THE_REST[code](evidence, finding))
    yield from _against("compute", remove_padding(evidence))
    yield from _fewer_syncs(evidence)


def _against(bottleneck: Bottleneck, advice: Iterable[Advice]) -> Iterator[Advice]:
    """Yield advice that is against a bottleneck."""
    for piece in advice:
        yield piece.model_copy(update={"against": bottleneck})


def exchange_fraction(evidence: Evidence) -> float:
    """Return the share of a watched run in which exchanges of gradients hold the step up."""
    watched = evidence.watched
    if watched is None or watched.exchange is None or not watched.watched_s:
        return 0.0
    exposed_s = watched.exchange.exposed_s or 0.0
    return min(1.0, watched.exchange.synchronised * exposed_s / watched.watched_s)


def _fewer_syncs(evidence: Evidence) -> Iterator[Advice]:
    """Advise to exchange gradients once a step, and not to look for unused parameters in vain.

    Source: pytorch.org, DistributedDataParallel: no_sync, find_unused_parameters.
    """
    watched = evidence.watched
    if watched is None or watched.exchange is None or not watched.steps:
        return
    exchange = watched.exchange
    surplus = 1.0 - watched.steps / max(exchange.synchronised, 1)
    if exchange.exposed_s and surplus >= _LEAST_SURPLUS:
        share = exchange_fraction(evidence)
        words = messages.accumulate_without_sync(
            backwards_per_step=exchange.synchronised // watched.steps,
            exposed_s=exchange.exposed_s,
            exchange_fraction=share,
        )
        # Computing that hides an exchange shares its cores, or its memory bandwidth, with it.
        least = surplus * share
        most = min(_MOST_SAVED, least * (exchange.exchange_s or 0.0) / exchange.exposed_s)
        saved = Interval(value=(least + most) / 2, low=least, high=most)
        yield advise_saving(words, saved, "communication")
    if exchange.searches_unused and not exchange.has_unused:
        yield advise_saving(messages.no_search_for_unused(), None, "communication")


_LEAST_SURPLUS = 0.3
"""Share of exchanges that no optimizer step needs from which they are a fault: half is the least
that accumulation over two passes has. Source: our convention."""


def _cpu_work(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise cheaper items or more cores, unless the cores suffice."""
    needed_s = _needed_item_s(evidence)
    item_s = loader_cpu_s(evidence)
    cores = evidence.environment.cores
    cores_needed = ceil(device_ceiling(evidence) * item_s + device_cores(evidence))
    if (cores_needed > cores or needed_s < item_s) and not _is_in_memory(costs):
        words = messages.make_items_cheaper(
            needed_s=needed_s,
            item_cpu_s=item_s,
            cores_needed=cores_needed,
            cores=cores,
            is_device_estimated=evidence.measurement.device_ceiling is None,
        )
        yield _expecting(evidence, words, device_ceiling(evidence))
    yield from _formats(evidence, costs)
    yield from _shard_stream(evidence, costs)
    yield from _cache_items(evidence, costs)


def _is_in_memory(costs: LoaderCosts) -> bool:
    """Return whether items are in memory already: there is nothing to decode or to cache."""
    return costs.causes is not None and costs.causes.is_in_memory


def _waiting(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise shorter waits, or more workers to wait in parallel, unless the workers suffice."""
    wanted = device_ceiling(evidence)
    tried = [apply_changes(evidence, point) for point in advisable_points(evidence, "loader")]
    workers = max(config.loading_processes for config in (evidence.config, *tried))
    workers_needed = ceil(wanted * costs.item_s)
    if workers / wanted < costs.item_s:
        more = workers_needed if workers_needed > workers and evidence.facts.is_sharded else None
        words = messages.shorten_waits(
            needed_s=workers / wanted,
            item_s=costs.item_s,
            workers=workers,
            workers_needed=more,
            is_device_estimated=evidence.measurement.device_ceiling is None,
        )
        yield _expecting(evidence, words, wanted)
        yield from _shard_stream(evidence, costs)
    yield from _formats(evidence, costs)
    yield from _cache_items(evidence, costs)


def _shard_stream(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise to shard a stream that every worker reads whole.

    Source: pytorch.org, torch.utils.data.IterableDataset.
    """
    workers = ceil(device_ceiling(evidence) * with_collating(evidence, costs, costs.item_s))
    share = min(1.0, _needed_item_s(evidence) / max(loader_cpu_s(evidence), 1e-9))
    is_repeated = evidence.config.num_workers > 1  # a fault, with advice of its own
    if not evidence.facts.is_sharded and not is_repeated and workers >= 2 and share > 0:
        words = messages.shard_stream(workers_needed=workers)
        yield _expecting(evidence, words, device_ceiling(evidence) * share)


def _slow_tail(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise to speed up the slowest items."""
    sample_s = with_collating(evidence, costs, costs.item_s * (1.0 - costs.slow_tail_fraction))
    loader = max(evidence.config.loading_processes / max(sample_s, 1e-9), loader_ceiling(evidence))
    expected = join_rates(evidence, loader, device_ceiling(evidence))
    words = messages.fix_slowest_items(
        item_slowest_s=costs.item_slowest_s,
        item_median_s=costs.item_median_s,
        slow_tail_fraction=costs.slow_tail_fraction,
        loader_samples_per_s=loader,
    )
    yield _expecting(evidence, words, expected)
    yield from _cache_items(evidence, costs)


def _worker_threads(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise one thread for each worker, at the throughput that an item's CPU time then allows.

    If one thread was measured, it is among the settings instead. No gain is given if it is no more
    than the present throughput: threads that spin while they wait for each other add to the CPU
    time. Source: pytorch.org, torch.utils.data: in workers, torch limits only its own threads.
    """
    if not workers_run_too_many_threads(evidence):
        return
    cores = evidence.environment.cores
    loaders = loader_processes(evidence.config)
    present = loader_ceiling(evidence)
    device = device_ceiling(evidence)
    allowed = min(loaders, cores) / loader_cpu_s(evidence)
    expected = min(
        cores_ceiling(evidence),
        join_rates(evidence, max(allowed, present), device),
    )
    is_gain_known = allowed * POLICY.trials.near_ceiling > present
    words = messages.one_thread_per_worker(
        settings={"worker_threads": 1} if evidence.config.has_workers else {},
        item_cpu_s=costs.item_cpu_s,
        allowed_samples_per_s=allowed,
        cores=cores,
        loader_samples_per_s=None if is_gain_known else present,
    )
    if not any("worker_threads" in point.changes for point in advisable_points(evidence, "loader")):
        gained = expected if is_gain_known else None
        yield advise(words, evidence.measurement.samples_per_s, gained, is_fault=True)
    yield from _cpu_work(evidence, costs)


def _formats(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise file formats that were measured to be read faster here."""
    if loader_ceiling(evidence) == inf:
        return
    for cost in costs.formats:
        loader = loader_without(evidence, costs, cost.saved_fraction)
        words = messages.read_faster(
            kind=cost.kind,
            sizes=cost.figures,
            now_s=cost.now_s,
            better_s=cost.better_s,
            calls_per_item=cost.calls_per_item,
            item_fraction=cost.item_fraction,
            loader_samples_per_s=loader,
        )
        yield _expecting(
            evidence,
            words,
            join_rates(evidence, loader, device_ceiling(evidence)),
        )


def _cache_items(evidence: Evidence, costs: LoaderCosts) -> Iterator[Advice]:
    """Advise to keep items in RAM, so that only collating is left."""
    length = evidence.facts.dataset_length
    free = evidence.free_ram_bytes
    if (
        length is None
        or free is None
        or evidence.facts.is_iterable
        or _is_in_memory(costs)
        or length * costs.item_bytes > free
    ):
        return
    collating = inf
    drawing_s = 0.0 if costs.causes is None else costs.causes.sampler_s or 0.0
    if costs.collate_s + drawing_s > 0:
        collating = evidence.config.micro_batch_size / (costs.collate_s + drawing_s)
    device = device_ceiling(evidence)
    is_overlapped = evidence.environment.device_kind != "cpu"
    expected = joint_rate(collating, device, is_overlapped=is_overlapped)
    words = messages.cache_items(
        items=length, item_bytes=costs.item_bytes, free_bytes=free, collate_s=costs.collate_s
    )
    yield _expecting(evidence, words, expected)


def _small_operations(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    roofline = evidence.curves.roofline
    has_graphs = evidence.environment.device_kind in {"cuda", "rocm"}
    operators = None if roofline is None else roofline.operators
    words = messages.fuse_operations(
        share=finding.share, operators=operators, has_cuda_graphs=has_graphs
    )
    yield _saving(evidence, words, finding.share)
    yield from _hand_over(evidence, finding)


def _hand_over(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise batches of fewer tensors, if fetching a prefetched one takes much of a step.

    Each tensor in shared memory comes with a file descriptor, received over a socket of its own.
    Sources: torch/multiprocessing/reductions.py, rebuild_storage_fd; pytorch.org,
    torch.multiprocessing, "Sharing strategies".
    """
    take_s = finding.figures.get("take_s")
    batch_s = finding.figures.get("batch_s")
    if (
        not isinstance(take_s, float)
        or not isinstance(batch_s, float)
        or take_s < _LEAST_TAKING * batch_s
    ):
        return
    costs = evidence.measurement.loader_costs
    words = messages.hand_over_less(
        share=take_s / batch_s,
        take_s=take_s,
        batch_s=batch_s,
        batch_tensors=None if costs is None else costs.batch_tensors,
        is_pinned=evidence.config.pin_memory,
    )
    yield _saving(evidence, words, min(finding.share, take_s / batch_s))


def _own_code(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise to shorten code between operators: a line of the model's if stacks show one.

    A line of the script's other code is advised on by its share of the run; see `parts`.
    """
    stacks = None if evidence.watched is None else evidence.watched.stacks
    is_on_cpu = evidence.environment.device_kind == "cpu"
    own = None if stacks is None else costly_code(stacks, waits=is_on_cpu)
    if own is not None and is_on_cpu:
        return
    line = own
    if line is None and stacks is not None:
        # A validation that was sampled is no forward pass of training.
        recurring = evidence.watched.recurring if evidence.watched is not None else ()
        passes = {kind.place for kind in recurring if kind.part == "validation"}
        line = costly_code(stacks, "forward", known=passes, saving=passes)
    if line is None:
        outside_s = cast("float | None", finding.figures.get("outside_s"))
        words = messages.shorten_own_code(share=finding.share, outside_s=outside_s)
        yield _saving(evidence, words, finding.share)
        return
    words = messages.shorten_line(
        fraction=line.fraction,
        place=line.place,
        function=line.function,
        code=line.code,
        calls=line.calls,
        is_in_model=own is None,
    )
    yield advise_saving(words, min(finding.share, line.fraction), "script", place=line.place)


def _host_waits(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise fewer synchronizations, which at best removes all gaps after them.

    Source: pytorch.org, "Performance Tuning Guide", "Avoid unnecessary CPU-GPU synchronization".
    """
    words = messages.avoid_synchronisation(
        share=finding.share, is_pinned=evidence.config.pin_memory
    )
    yield _saving(evidence, words, finding.share)


def _bandwidth(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    is_dtype_known = any(
        "amp_dtype" in point.changes for point in advisable_points(evidence, "device")
    )
    words = messages.move_fewer_bytes(share=finding.share, is_dtype_known=is_dtype_known)
    yield _saving(evidence, words, (1 - _BYTES_LEFT) * finding.share)


def _copies(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise to copy fewer bytes; on a CPU, moving a batch only converts its memory format."""
    costs = evidence.measurement.loader_costs
    share = finding.share
    float32, item_bytes = (
        (None, None) if costs is None else (costs.float32_fraction, costs.item_bytes)
    )
    if evidence.environment.device_kind == "cpu":
        yield _saving(evidence, messages.convert_batches_in_collate(share=share), share)
    elif float32 is not None and float32 < 0.5:
        words = messages.copy_narrower_types(share=share, item_bytes=item_bytes)
        yield _saving(evidence, words, (1 - _BYTES_LEFT) * share)
    else:
        words = messages.copy_uint8(share=share, item_bytes=item_bytes, float32_fraction=float32)
        yield _saving(evidence, words, _UINT8_SAVES * (1.0 if float32 is None else float32) * share)


def _computing(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    """Advise a cheaper step, with the gain at the speed of a large matrix product as the limit.

    There is no expected gain, since steps with small and element-wise operations don't reach that
    speed. Source: Williams et al. 2009.
    """
    if evidence.measurement.breakdown is None:  # it may not compute at all
        return
    roofline = evidence.curves.roofline
    present = evidence.measurement.samples_per_s
    most = None
    if roofline is not None and roofline.flops > 0:
        # throughput is that of all devices together
        group_batch = evidence.config.group_batch_size
        product_s = roofline.flops / roofline.peak_flops_per_s / group_batch
        most = max(0.0, 1.0 / max(1.0 - finding.share + present * product_s, 1e-3) - 1.0)
    peak = cast("float | None", finding.figures.get("peak_fraction"))
    words = messages.make_step_cheaper(share=finding.share, peak_fraction=peak, most_gain=most)
    yield _expecting(evidence, words, None)


def _short_epochs(evidence: Evidence, finding: Finding) -> Iterator[Advice]:
    length = evidence.measurement.window.epoch_samples
    if evidence.config.persistent_workers and length is not None:
        expected = evidence.measurement.samples_per_s / (
            1.0 - finding.share * (1 - 1 / _LONGER_EPOCHS)
        )
        words = messages.lengthen_epochs(
            share=finding.share, epoch_samples=length, wanted_samples=length * _LONGER_EPOCHS
        )
        yield _expecting(evidence, words, expected)


_FOR_LOADER: dict[Bottleneck, Callable[[Evidence, LoaderCosts], Iterator[Advice]]] = {
    "data_cpu": _cpu_work,
    "data_io": _waiting,
    "data_tail": _slow_tail,
    "threads": _worker_threads,
}
_FOR_THE_REST: dict[Bottleneck, Callable[[Evidence, Finding], Iterator[Advice]]] = {
    "launch": _small_operations,
    "script": _own_code,
    "synchronise": _host_waits,
    "memory": _bandwidth,
    "copy": _copies,
    "restart": _short_epochs,
    "compute": _computing,
}


def _needed_item_s(evidence: Evidence) -> float:
    """Return the CPU seconds that a sample may take for the device to be the limit; 0 if no core is left."""
    free_cores = evidence.environment.cores - device_cores(evidence)
    return max(0.0, free_cores / device_ceiling(evidence))


def _expecting(evidence: Evidence, words: AdviceText, expected: float | None) -> Advice:
    return advise(words, evidence.measurement.samples_per_s, expected)


def _saving(evidence: Evidence, words: AdviceText, saved: float) -> Advice:
    """Return advice that saves this share of the time; no figure if the loader must be fixed first."""
    expected = rate_without(evidence, saved)
    loader = loader_ceiling(evidence)
    if expected < loader:
        return _expecting(evidence, words, expected)
    is_loader_first = evidence.measurement.samples_per_s >= POLICY.trials.near_ceiling * loader
    limited = messages.limited_by_loader(
        words, loader_samples_per_s=loader, is_loader_first=is_loader_first
    )
    return _expecting(evidence, limited, None if is_loader_first else expected)


# Settings whose ceilings were measured, combined and ranked.

COMPUTED = frozenset({"add_workers", "deliver_out_of_order"})
"""Kinds of advice on settings whose gain is computed from an item's cost, not measured."""
_SAME_WITHIN = 0.02
"""Relative difference below which expected throughputs count as equal: a window's 95 % interval.
Source: our convention."""


class _Rated(NamedTuple):
    """A pair of settings with its expected throughput."""

    pair: Pair
    config: TrainingConfig
    rate: float
    """Expected throughput in samples per second."""
    at_least: float
    """Throughput that remains if the pair's ceilings are too high by their 95 % error."""


def rank_advice(evidence: Evidence, findings: Sequence[Finding]) -> tuple[Advice, ...]:
    """Return advice on settings by expected gain, then remedies; gains below 3 % are left out."""
    settings = _advise_settings(evidence, findings)
    measured = [piece for piece in settings if piece.kind not in COMPUTED]
    best = max(map(_rate, measured), default=evidence.measurement.samples_per_s)
    remedies = [
        *undo_modes(evidence),
        *list_loader_faults(evidence, findings),
        *list_remedies(evidence, findings, best_samples_per_s=best),
        *checkpoint_activations(evidence),
    ]
    return (*settings, *worth_giving(remedies))


def _advise_settings(evidence: Evidence, findings: Sequence[Finding]) -> list[Advice]:
    """Return advice on each side's settings, and on both together if that gains 3 % more."""
    loaders: list[Pair] = [(point, None) for point in advisable_points(evidence, "loader")]
    devices: list[Pair] = [(None, point) for point in advisable_points(evidence, "device")]
    both = [(loader, device) for loader, _ in loaders for _, device in devices]
    rated = _beyond_error(evidence, [*devices, *loaders, *both])
    chosen = [
        _best([one for one in rated if one.pair[1] is None], "workers"),
        *_best_of_each_setting(rated),
        *filter(_is_among_workers, rated),
    ]
    singles: list[Advice] = []
    for one in filter(None, chosen):
        piece = _advice(evidence, one)
        if all(piece.settings != known.settings for known in singles):
            singles.append(piece)
    computed = (
        *_pin_memory(evidence, findings),
        *_more_workers(evidence, findings),
        *_out_of_order(evidence, findings),
    )
    worth = worth_giving([*singles, *computed])
    most = max(map(_rate, worth), default=0.0)
    together = _best(rated, "changes")
    if together is not None and together.rate >= (1 + LEAST_GAIN) * most:
        worth.append(_advice(evidence, together))
    return worth_giving(worth)


def _beyond_error(evidence: Evidence, pairs: Sequence[Pair]) -> list[_Rated]:
    """Rate pairs, without those whose gain is within the error of their own ceilings.

    A loader that pauses, or whose workers deliver in bursts, may have a useless ceiling: on an
    H200, 32 workers were 5.7 % above 16, with a relative error of 2.2.
    """
    found = list[_Rated]()
    for pair, rate in zip(pairs, expected_rates(evidence, pairs), strict=True):
        at_least = rate * _share_beyond_error(evidence, pair)
        if at_least > evidence.measurement.samples_per_s:
            config = apply_changes(evidence, *pair)
            found.append(_Rated(pair, config, rate, at_least))
    return found


def _share_beyond_error(evidence: Evidence, pair: Pair) -> float:
    """Return the share of a pair's throughput that remains if its ceilings are too high by their error.

    An error of the faster side hardly counts; an unchanged side adds none.
    """
    measured = [loader_ceiling(evidence), device_ceiling(evidence)]
    lower = list(measured)
    for side, point in enumerate(pair):
        if point is not None and point.ceiling is not None:
            measured[side] = point.ceiling.samples_per_s
            lower[side] = measured[side] * exp(-NORMAL_95 * (point.ceiling.relative_sd or 0.0))
    return join_rates(evidence, *lower) / join_rates(evidence, *measured)


def _best(rated: Sequence[_Rated], cheapest: Literal["workers", "changes"]) -> _Rated | None:
    """Return the pair with the fewest workers, or changed settings, that no other is known to beat."""
    if not rated:
        return None

    def cost_of(one: _Rated) -> tuple[int, int]:
        workers = one.config.num_workers
        changes = sum(len(point.changes) for point in one.pair if point is not None)
        return (workers, changes) if cheapest == "workers" else (changes, workers)

    least = max(min(one.at_least, (1 - _SAME_WITHIN) * one.rate) for one in rated)
    return min((one for one in rated if one.rate >= least), key=cost_of)


def _is_among_workers(one: _Rated) -> bool:
    """Return whether a pair changes only the order of batches, or only the threads of workers."""
    loader, device = one.pair
    if loader is None or device is not None or "num_workers" in loader.changes:
        return False
    return len({*loader.changes} & {*AMONG_WORKERS}) == 1


def _best_of_each_setting(rated: Sequence[_Rated]) -> Iterable[_Rated]:
    """Return the best value of each device setting by itself."""
    best = dict[str, _Rated]()
    for one in rated:
        loader, device = one.pair
        if loader is None and device is not None and is_single(device.changes):
            name = next(iter(device.changes))
            best[name] = max(best.get(name, one), one, key=lambda known: known.rate)
    return best.values()


def _advice(evidence: Evidence, one: _Rated) -> Advice:
    changed = changed_settings(one.config, evidence.config)
    loader, device = (
        None if point is None or point.ceiling is None else point.ceiling.samples_per_s
        for point in one.pair
    )
    words = messages.set(
        settings={name: after for name, (_, after) in changed.items()},
        loader_samples_per_s=loader,
        device_samples_per_s=device,
    )
    return _expecting(evidence, words, one.rate)


def _pin_memory(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Advise pinned memory, from which copies are faster and leave the host free.

    The gain follows from the ceilings of both copies, by the model of a search; if these were not
    measured and copies take a tenth of the time, from the cost of copying a batch. Source:
    pytorch.org, "Use pinned memory buffers" (CUDA semantics).
    """
    if evidence.config.pin_memory or evidence.environment.device_kind not in PINNING_KINDS:
        return
    present = evidence.measurement.samples_per_s
    settings = {"pin_memory": True}
    known = copy_ceilings(evidence)
    if known.keys() == {False, True}:
        pageable, faster = known[False], known[True]
        if faster > pageable:
            (expected,) = expected_rates(
                evidence, [(CurvePoint(changes=settings, ceiling=None), None)]
            )
            loader = loader_ceiling(evidence)
            most = min(loader, device_ceiling(evidence), faster)
            words = messages.pin_memory(
                settings=settings, pageable_samples_per_s=pageable, pinned_samples_per_s=faster
            )
            # at most as if all of it were hidden
            yield advise(words, present, min(expected, max(present, most)))
        return
    copy = next((finding for finding in findings if finding.bottleneck == "copy"), None)
    if copy is None:
        return
    costs = evidence.measurement.loader_costs
    copy_s, pinned_copy_s = (None, None) if costs is None else (costs.copy_s, costs.pinned_copy_s)
    saved = 1.0  # all of it at most, where not measured
    if copy_s and pinned_copy_s is not None:
        saved = max(0.0, 1.0 - pinned_copy_s / copy_s)
    words = messages.pin_memory(
        settings=settings, share=copy.share, copy_s=copy_s, pinned_copy_s=pinned_copy_s
    )
    yield advise(words, present, rate_without(evidence, saved * copy.share))


def _more_workers(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Advise more workers for a loader bound by CPU work, if none were measured with more.

    Workers add up until the cores run out: the throughput is that of the model of a search, at most
    what all cores or the device allow. Items that mostly wait are left out: only a measurement
    shows how far their waits overlap.
    """
    costs = evidence.measurement.loader_costs
    own = evidence.config
    environment = evidence.environment
    is_bound = any(finding.bottleneck == "data_cpu" for finding in findings)
    if costs is None or not is_bound or _has_tried_more_workers(evidence):
        return
    most = min(most_workers(evidence.facts, environment), rules.cores_within(own, environment))
    most //= rules.ranks_on_host(own.process_count, environment)
    counts = {*(2**power for power in range(most.bit_length())), most}
    points = [
        CurvePoint(changes={"num_workers": count}, ceiling=None)
        for count in sorted(counts - {*range(own.num_workers + 1)})
    ]
    pairs: list[Pair] = [(point, None) for point in points if _has_room(evidence, costs, point)]
    if not pairs:
        return
    by_cores = cores_ceiling(evidence)
    device = device_ceiling(evidence)
    rates = [min(rate, by_cores, device) for rate in expected_rates(evidence, pairs)]
    # the fewest workers, as counts increase
    enough, rate = next(
        (point, rate)
        for (point, _), rate in zip(pairs, rates, strict=True)
        if point is not None and rate >= (1 - _SAME_WITHIN) * max(rates)
    )
    words = messages.add_workers(
        settings=enough.changes,
        item_cpu_s=loader_cpu_s(evidence),
        num_workers=own.num_workers,
        cores=environment.cores,
        cores_samples_per_s=by_cores,
    )
    yield _expecting(evidence, words, rate)


def _out_of_order(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Advice]:
    """Advise batches out of order for a slow tail of items, if that was not measured.

    Workers that deliver in order wait for the slowest one; out of order, each adds its own mean
    throughput. Source: pytorch.org, torch.utils.data.DataLoader, `in_order`.
    """
    costs = evidence.measurement.loader_costs
    own = evidence.config
    has_tail = any(finding.bottleneck == "data_tail" for finding in findings)
    point = CurvePoint(changes={"in_order": False}, ceiling=None)
    is_known = any("in_order" in known.changes for known in evidence.curves.loader)
    if costs is None or not has_tail or own.num_workers < 2 or not own.in_order or is_known:
        return
    config = apply_changes(evidence, point)
    if config.in_order or rules.obstacle(
        config, evidence.facts, evidence.environment, drop_last=evidence.drop_last
    ):
        return
    sample_s = with_collating(evidence, costs, costs.item_s)
    loader = min(loader_processes(own) / sample_s, cores_ceiling(evidence))
    words = messages.deliver_out_of_order(
        settings=point.changes,
        num_workers=own.num_workers,
        item_s=costs.item_s,
        loader_samples_per_s=loader,
    )
    present = evidence.measurement.samples_per_s
    times = _with_loader(evidence, max(loader, loader_ceiling(evidence)))
    yield advise(words, present, present * times.expected)


def _has_tried_more_workers(evidence: Evidence) -> bool:
    """Return whether a loader with more workers was measured, or failed other than for lack of time."""
    own = evidence.config.num_workers
    return any(
        apply_changes(evidence, point).num_workers > own
        for point in evidence.curves.loader
        if not point.is_left_out
    )


def _has_room(evidence: Evidence, costs: LoaderCosts, point: CurvePoint) -> bool:
    """Return whether the prefetched batches of all ranks' workers fit into the free RAM, with room."""
    if evidence.free_ram_bytes is None:
        return True
    config = apply_changes(evidence, point)
    batches = loader_processes(config) * config.batches_per_worker
    queue_bytes = batches * config.micro_batch_size * costs.item_bytes
    return queue_bytes <= POLICY.trials.queue_share * evidence.free_ram_bytes


def _rate(advice: Advice) -> float:
    return advice.expected_samples_per_s or 0.0
