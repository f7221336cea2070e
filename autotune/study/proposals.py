"""Configurations worth trying before a sampler knows anything, and what can be learned from failures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.core import rules
from autotune.core.memory_line import is_too_big, memory_lines
from autotune.core.search_space import Domain, ResolvedSpace, SettingValue, compose, whole_numbers
from autotune.core.training_config import TrainingConfig
from autotune.core.trial import TrialRecord

__all__ = [
    "explaining_setting",
    "first_guesses",
    "largest_batch_variant",
    "nearest",
    "params_of",
    "same_batch_variant",
]

_GUESSED_PREFETCH = 4
_MANY_WORKERS_PER_CORE = 4
_SWITCHES = ("amp_dtype", "channels_last", "compile")


def params_of(config: TrainingConfig, space: ResolvedSpace) -> dict[str, SettingValue]:
    """The searched settings of a configuration; where it leaves one to torch, and the space does not, left out."""
    values = config.model_dump()
    if config.num_workers > 0 and config.prefetch_factor is None:
        values["prefetch_factor"] = rules.TORCH_PREFETCH_FACTOR
    return {name: values[name] for name in space.parameters if values[name] is not None or None in space.domains[name]}


def first_guesses(space: ResolvedSpace) -> list[dict[str, SettingValue]]:
    """What an expert would try first, each the one before it and something more.

    A loader with a worker for each core; the same with the largest batch; on a CPU one thread for training, which
    otherwise fights the workers; all of the device's cheap gains; many workers, for data that waits for I/O.
    """
    cores = space.environment.cores
    loader: dict[str, SettingValue] = {
        "num_workers": cores,
        "persistent_workers": True,
        "pin_memory": True,
        "prefetch_factor": _GUESSED_PREFETCH,
    }
    batch: dict[str, SettingValue] = {"micro_batch_size": max(whole_numbers(space.domains["micro_batch_size"]))}
    device: dict[str, SettingValue] = {"amp_dtype": _fast_dtype(space.domains["amp_dtype"]), "channels_last": True}
    many: dict[str, SettingValue] = {"num_workers": _MANY_WORKERS_PER_CORE * cores}
    quiet: dict[str, SettingValue] = {"intra_op_threads": 1}
    wishes = [loader, *({**loader, **batch, **more} for more in ({}, quiet, device, many))]
    start = params_of(space.baseline, space)
    guesses = []
    for wish in wishes:
        wanted = {**start, **{name: value for name, value in wish.items() if name in space.parameters}}
        guess = {name: nearest(space.domains[name], value) for name, value in wanted.items()}
        if guess not in guesses:
            guesses.append(guess)
    return guesses


def explaining_setting(
    failed: Sequence[TrainingConfig], succeeded: Iterable[TrainingConfig]
) -> tuple[str, frozenset[SettingValue]] | None:
    """The switch whose values all failures have and no success has, with those values; None if not exactly one.

    Only precision, layout and compilation explain a failure: a model that can't run in half precision says nothing
    against the rest of the space.
    """
    good = list(succeeded)
    found = []
    for name in _SWITCHES:
        bad_values = frozenset(getattr(config, name) for config in failed)
        if bad_values.isdisjoint({getattr(config, name) for config in good}):
            found.append((name, bad_values))
    return found[0] if len(found) == 1 else None


def nearest(domain: Domain, value: SettingValue) -> SettingValue:
    """The value of a domain that is closest to the one wanted; its first where none compares."""
    if value in domain:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return next(iter(domain))
    numbers = whole_numbers(domain)
    return min(numbers, key=lambda one: abs(one - value)) if numbers else next(iter(domain))


def same_batch_variant(best: TrialRecord, space: ResolvedSpace) -> dict[str, SettingValue] | None:
    """The best trial's settings at the baseline's global batch; None where they are at it, or can't be."""
    baseline = space.baseline
    if best.config.global_batch_size == baseline.global_batch_size:
        return None
    params = params_of(best.config, space)
    for name in ("micro_batch_size", "grad_accum_steps"):
        value = getattr(baseline, name)
        if name in params and value in space.domains[name]:
            params[name] = value
        elif getattr(best.config, name) != value:
            return None
    return params


def largest_batch_variant(
    best: TrialRecord, space: ResolvedSpace, records: Sequence[TrialRecord], limit_bytes: int
) -> dict[str, SettingValue] | None:
    """The best trial's settings at the largest micro batch that the memory line predicts to fit.

    None where that batch was run already in this precision, or no line can tell. A batch at or above one that was too
    big is not tried again. Where the global batch would grow beyond its cap, gradients are accumulated less.
    """
    dtype = best.config.amp_dtype
    own = [record for record in records if record.config.amp_dtype == dtype]
    line = next((line for line in memory_lines(own) if line.amp_dtype == dtype), None)
    if line is None or "micro_batch_size" not in space.parameters:
        return None
    was_run = {record.config.micro_batch_size for record in own if record.measurement is not None}
    too_big = min((record.config.micro_batch_size for record in own if is_too_big(record)), default=None)
    for batch in sorted(whole_numbers(space.domains["micro_batch_size"]), reverse=True):
        if (too_big is not None and batch >= too_big) or not line.fits(batch, limit_bytes):
            continue
        if batch in was_run:
            return None
        params = params_of(best.config, space) | {"micro_batch_size": batch}
        fewest = {"grad_accum_steps": min(whole_numbers(space.domains["grad_accum_steps"]))}
        for variant in (params, params | {name: fewest[name] for name in fewest if name in params}):
            if isinstance(compose(variant, space), TrainingConfig):
                return variant
    return None


def _fast_dtype(domain: Domain) -> SettingValue:
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        if dtype in domain:
            return dtype
    return next(iter(domain))
