"""Checkpointing a model's repeated blocks: what it saves, the batch that fits then, and the rate that follows. Pure.

Comes in: an Evidence with what the model keeps for its backward pass. Goes out: at most one piece of advice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.analysis.forecast import expectation
from autotune.analysis.memory.model import MemoryModel, Peak
from autotune.analysis.statistics import NORMAL_95
from autotune.diagnosis.gains import LEAST_GAIN, advise, loader_bounds
from autotune.messages import advice as messages
from autotune.messages.advice import AdviceText
from autotune.policy import POLICY
from autotune.records.diagnosis import Advice, Evidence
from autotune.records.memory import Activations
from autotune.settings.training_config import TrainingConfig
from autotune.space.token_budget import with_batch

__all__ = ["checkpoint_activations"]

_FACTORS = (2, 4, 8)
"""Times today's batch: our own convention, as far as a search goes by default (`max_batch_scale`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """What a batch should reach, in samples per second."""

    config: TrainingConfig
    plain: float
    """As the model is, whether that fits or not."""
    expected: float
    """With its blocks checkpointed."""
    low: float
    high: float
    """Its 95 % interval."""


def checkpoint_activations(evidence: Evidence) -> Iterator[Advice]:
    """Blocks that are computed once more in the backward pass make room, at the price of their forward pass.

    Advised where a batch that does not fit today, and would then, is faster even so; where today's own batch does not
    fit, and would then; and where it has no room, with what it would keep less: its peak is that of what it was
    allowed. Of a batch by token budget nothing is known per sample.

    Source: pytorch.org, torch.utils.checkpoint; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    found, run = evidence.measurement.activations, evidence.measurement
    if found is None or found.least_saved_bytes(evidence.config.micro_batch_size) <= 0 or evidence.config.max_tokens:
        return
    if run.peak_memory_bytes > evidence.limit_bytes or run.memory.is_thrashing:
        batch = evidence.config.micro_batch_size
        left_bytes = run.peak_memory_bytes - round(found.least_saved_bytes(batch))
        if run.memory.is_thrashing:
            yield advise(_words(evidence, found, batch), run.samples_per_s, None)
        elif _fits_then(evidence, found, evidence.config):
            yield advise(_words(evidence, found, batch, left_bytes=left_bytes), run.samples_per_s, None)
        return
    best = _best(evidence, found)
    if best is not None:
        gains = best.low / run.samples_per_s - 1, best.high / run.samples_per_s - 1
        words = _words(evidence, found, best.config.micro_batch_size, gains=gains)
        yield advise(words, run.samples_per_s, best.expected)


def _best(evidence: Evidence, found: Activations) -> _Forecast | None:
    """The best batch that fits only so, where it gains 3 % over the best that fits as the model is."""
    own, memory = evidence.config, _memory(evidence)
    sizes = [factor * own.micro_batch_size for factor in _FACTORS]
    length = evidence.facts.dataset_length
    larger = [with_batch(own, size) for size in sizes if length is None or size <= length]
    fits = [memory.chance_to_fit([config], evidence.limit_bytes)[0] >= POLICY.trials.sure_to_fit for config in larger]
    forecasts = [
        (_forecast(evidence, found, config), is_within) for config, is_within in zip(larger, fits, strict=True)
    ]
    present = evidence.measurement.samples_per_s
    reached = max([present, *(one.plain for one, is_within in forecasts if one is not None and is_within)])
    only_so = [
        one
        for one, is_within in forecasts
        if one is not None and not is_within and _fits_then(evidence, found, one.config)
    ]
    best = max(only_so, key=lambda one: one.low, default=None)  # the farther off a batch, the less is known of it
    is_worth = best is not None and best.expected >= (1 + LEAST_GAIN) * reached and best.low > present
    return best if is_worth else None


def _fits_then(evidence: Evidence, found: Activations, config: TrainingConfig) -> bool:
    """Whether a batch is sure to fit with its blocks checkpointed.

    What is kept for the backward pass is known; what else grows with the batch is forecast from the peaks without it.
    """
    size = config.micro_batch_size
    left = found.bytes_per_sample * size - found.least_saved_bytes(size)
    room = round(evidence.limit_bytes - left)
    return room > 0 and bool(
        _memory(evidence, found.bytes_per_sample).chance_to_fit([config], room)[0] >= POLICY.trials.sure_to_fit
    )


def _memory(evidence: Evidence, less_per_sample: float = 0.0) -> MemoryModel:
    """What today's run and the device's points say of peak memory, less so many bytes a sample.

    Of the points those alone that differ from today in the batch.
    """
    in_ram = evidence.environment.has_only_ram
    peaks = [Peak(evidence.config, evidence.measurement.peak_memory_bytes)]
    for point in evidence.curves.device:
        if point.peak_memory_bytes is not None and {*point.changes} <= {"micro_batch_size"}:
            config = expectation.apply_changes(evidence, point).model_copy(update={"num_workers": 0})
            peaks.append(Peak(config, point.peak_memory_bytes, "alone" if in_ram else "trial"))
    rest = [one._replace(peak_bytes=_without(one, less_per_sample)) for one in peaks]
    return MemoryModel(observed=rest, has_workers_in_ram=in_ram)


def _without(peak: Peak, less_per_sample: float) -> int:
    return max(1, round(peak.peak_bytes - less_per_sample * peak.config.micro_batch_size))


def _forecast(evidence: Evidence, found: Activations, config: TrainingConfig) -> _Forecast | None:
    """By the times of steps on the whole batch and on half of it: what does not grow is shared by more samples.

    A step on B times the samples takes c + a B of today's, with c + a = 1 and c + a / 2 the measured ratio q. For each
    sample the blocks' forward pass comes once more: as much as today at the most, which is expected, and at the least
    as large a share of the step. The loader's rate is taken to stay; for the interval it is as far off as a loader
    alone is from the same loader in a run. None where no scatter is known.
    """
    half, forward = found.half_step, found.forward
    if half is None or forward is None or half.sd is None or forward.sd is None:
        return None
    growth = config.micro_batch_size / evidence.config.micro_batch_size
    loader, device = expectation.loader_ceiling(evidence), expectation.device_ceiling(evidence)
    today = expectation.join_rates(evidence, loader, device)
    slowest, fastest = loader_bounds(evidence, loader)

    def device_time(deviations: float) -> float:
        """Of a sample over today's, as the model is; `deviations` of what was measured to the better side."""
        ratio = min(1.0, max(0.5, half.value + deviations * (half.sd or 0.0)))
        return (2 * ratio - 1) / growth + 2 - 2 * ratio

    def rate(device_time: float, loader: float) -> float:
        times = expectation.join_rates(evidence, loader, device / device_time) / today
        return times * evidence.measurement.samples_per_s

    most, least = forward.value + NORMAL_95 * forward.sd, max(0.0, forward.value - NORMAL_95 * forward.sd)
    slow, fast = device_time(-NORMAL_95), device_time(NORMAL_95)
    return _Forecast(
        config=config,
        plain=rate(device_time(0.0), loader),
        expected=rate(device_time(0.0) + forward.value, loader),
        low=rate(slow + most, slowest),
        high=rate(fast * (1 + least), fastest),
    )


def _words(
    evidence: Evidence,
    found: Activations,
    batch: int,
    *,
    left_bytes: int | None = None,
    gains: tuple[float, float] | None = None,
) -> AdviceText:
    """Return what is kept, what is saved of it with such a batch, and what recomputing it takes."""
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
