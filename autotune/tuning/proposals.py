"""Derive values to propose: candidates for a model, open combinations, first guesses, variants of the best.

Comes in: a space, a seed, and the configurations that were tried. Goes out: values of the space's
parameters (`Params`), each of which breaks no rule of the space.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from math import inf

from autotune.config.plan import Domain, IntRange, SettingValue
from autotune.config.training_config import TrainingConfig
from autotune.frozen import compacted
from autotune.messages.search import nothing_new_drawn, space_exhausted
from autotune.models.memory import is_too_big, memory_kind, memory_within
from autotune.note import Note
from autotune.records.trial import TrialRecord
from autotune.settings_table import BY_NAME, SETTINGS
from autotune.space import constraints as rules
from autotune.space.ranges import spread, whole_numbers
from autotune.space.space import ResolvedSpace, compose, setting_of, with_batch_setting

# The combinations of a space: all of a small one, a selection of a large one.


Skip = Callable[[TrainingConfig], Note | None]
"""Returns why a configuration is not worth a run ("would_not_fit", "would_add_nothing"), or None."""


@dataclass(slots=True)
class Candidates:
    """Combinations of a space with their configurations, kept during a search."""

    space: ResolvedSpace
    seed: int
    _common: dict[TrainingConfig, Params] = field(init=False)
    """Candidates at any time."""
    _around: dict[tuple[TrainingConfig, int], dict[TrainingConfig, Params]] = field(
        default_factory=dict
    )
    """Variants of each of the best now, by the number of settings that they vary; kept, since they
    are thousands."""
    _spreads: dict[str, list[int]] = field(default_factory=dict)
    """Some values of each long range, by the setting's name."""

    def __post_init__(self) -> None:
        """Take all combinations of a small space; of a large one the first guesses, and a random sample."""
        if self.space.size <= self.space.policy.trials.all_candidates_up_to:
            self._common = self._composed(self.space.combinations())
            return
        drawn = _drawn(self.space, _seeded(self.seed), self.space.policy.trials.random_candidates)
        self._common = self._composed((*first_guesses(self.space), *drawn))

    def near(self, best: Sequence[TrainingConfig]) -> list[tuple[Params, TrainingConfig]]:
        """Return the candidates that break no rule, in a large space with variants of the best.

        A variant has another value of one setting, or of two settings if it is of the first of the
        best. Of a long range, only some values are tried.

        Args:
            best: The best configurations so far, the very best first.
        """
        found = dict(self._common)
        if self.space.size > self.space.policy.trials.all_candidates_up_to:
            known = self._around
            self._around = {}  # forget the variants of what is no longer among the best
            for rank, config in enumerate(best):
                most = 2 if rank == 0 else 1
                around = known.get((config, most))
                if around is None:
                    around = self._composed(self._varied(config, most))
                self._around[config, most] = around
                for variant, params in around.items():
                    found.setdefault(variant, params)
        return [(params, config) for config, params in found.items()]

    def _varied(self, config: TrainingConfig, most: int) -> Iterator[Params]:
        first = {name: next(iter(domain)) for name, domain in self.space.parameters.items()}
        own = {**first, **params_of(config, self.space)}
        others = {
            name: [value for value in self._values(name, own[name]) if value != own[name]]
            for name in own
        }
        for count in range(1, most + 1):
            for names in combinations(others, count):
                for values in product(*(others[name] for name in names)):
                    yield {**own, **dict(zip(names, values, strict=True))}

    def _values(self, name: str, own: SettingValue) -> Iterable[SettingValue]:
        """Return the values of a setting; of a long range some of each size, and those next to its own."""
        domain = self.space.parameters[name]
        trials = self.space.policy.trials
        if not isinstance(domain, IntRange) or not isinstance(own, int):
            return domain
        if len(domain) <= trials.all_values_up_to:
            return domain
        if name not in self._spreads:
            self._spreads[name] = spread(list(domain), trials.spread_values)
        nearest = range(max(domain.low, own - 2), min(domain.high, own + 2) + 1)
        return sorted({*self._spreads[name], *nearest})

    def _composed(self, candidates: Iterable[Params]) -> dict[TrainingConfig, Params]:
        """Compose candidates, without those that break a rule; keep the first of those that compose alike."""
        found: dict[TrainingConfig, Params] = {}
        for params in candidates:
            config = compose_allowed(params, self.space)
            if config is not None:
                found.setdefault(compacted(config), params)
        return found


class OpenCombinations:
    """Combinations of a space in an order given by the seed; those that are no longer open are dropped.

    Only in a space that is small enough to be listed is it certain that none is left.
    """

    def __init__(
        self, space: ResolvedSpace, seed: int, is_open: Callable[[TrainingConfig], bool]
    ) -> None:
        self._space = space
        self._trials = space.policy.trials
        self._seed = seed
        self._is_open = is_open
        self._drawing = _seeded(seed)

    @property
    def can_list(self) -> bool:
        """Return True if the space is small enough to be listed."""
        return self._space.size <= self._trials.most_listed

    @property
    def has_open(self) -> bool:
        """Return True if a combination is open; in a space that can't be listed, try draws. Changes nothing."""
        tries: Iterable[Params] = (
            self._rest if self.can_list else self._drawn_by(_seeded(self._seed))
        )
        return any(self._open_config(params) is not None for params in tries)

    @property
    def none_left(self) -> Note:
        """The note that `next` found no combination."""
        return space_exhausted() if self.can_list else nothing_new_drawn(self._trials.draws)

    def next(self, skip: Skip) -> Params | None:
        """Return an open combination that `skip` accepts; else an uninformative one, else one that may not fit."""
        kept: list[Params] = []
        first: dict[str, Params] = {}  # by the reason to skip it; "" for none
        tries = self._popped() if self.can_list else self._drawn_by(self._drawing)
        for params in tries:
            config = self._open_config(params)
            if config is None:
                continue
            kept.append(params)
            reason = skip(config)
            first.setdefault("" if reason is None else reason.code, params)
            if reason is None or len(kept) == self._trials.draws:
                break
        if self.can_list:
            self._rest.extend(reversed(kept))
        return first.get("") or first.get("would_add_nothing") or first.get("would_not_fit")

    @cached_property
    def _rest(self) -> list[Params]:
        """The combinations that were not dropped yet, the next one last; listed at the first use."""
        rest = list(self._space.combinations())
        _seeded(self._seed).shuffle(rest)
        return rest

    def _popped(self) -> Iterator[Params]:
        while self._rest:
            yield self._rest.pop()

    def _drawn_by(self, chance: random.Random) -> Iterator[Params]:
        return _drawn(self._space, chance, self._trials.draws)

    def _open_config(self, params: Params) -> TrainingConfig | None:
        config = compose_allowed(params, self._space)
        return config if config is not None and self._is_open(config) else None


def _seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a seeded choice, no secret


def _drawn(space: ResolvedSpace, chance: random.Random, count: int) -> Iterator[Params]:
    values = {name: list(domain) for name, domain in space.parameters.items()}
    for _ in range(count):
        yield {name: chance.choice(choices) for name, choices in values.items()}


# First guesses, explanations of failures, and variants of the best trial. Pure.


Params = dict[str, SettingValue]
"""Values of a space's parameters, by name."""

# Settings that may explain a failure by themselves: torch runs different code for each value.
_ALONE = [setting for setting in SETTINGS if setting.needs is None and not setting.is_of_ddp]
_SWITCHES = [setting.name for setting in _ALONE if setting.explains == "often"]
# Settings that need one of these, such as the mode of torch.compile. If one is not neutral in all
# failures, it explains them before the setting that it needs.
_MODES = [setting for setting in SETTINGS if setting.needs is not None and setting.is_of_kernels]
# tried where none of these explains a failure
_LESSER_SWITCHES = [setting.name for setting in _ALONE if setting.explains == "rarely"]
_DDP_SWITCHES = [
    setting for setting in SETTINGS if setting.is_of_ddp and setting.explains is not None
]


def params_of(config: TrainingConfig, space: ResolvedSpace) -> Params:
    """Return a configuration's values of the searched settings.

    Leave out a setting that the configuration leaves to torch while the space does not, and those
    of DistributedDataParallel under another strategy, where they have no effect.
    """
    found: Params = {}
    for name, domain in space.parameters.items():
        setting = BY_NAME[name]
        if setting.is_of_ddp and not config.is_ddp:
            continue
        value = setting_of(config, name)
        if value is None and setting.torch_value is not None:
            value = setting.torch_value(config) or None
        if value is None and None not in domain:
            continue
        if isinstance(domain, IntRange) and isinstance(value, float):
            value = int(value)  # a range holds whole numbers, while a size may be a fraction
        found[name] = value
    return found


def compose_allowed(
    params: Mapping[str, SettingValue], space: ResolvedSpace
) -> TrainingConfig | None:
    """Compose values to a configuration; return None if they break a rule."""
    config = compose(params, space)
    return config if isinstance(config, TrainingConfig) else None


def first_guesses(space: ResolvedSpace) -> list[Params]:
    """Return the configurations that an expert would try first, each based on the one before it.

    First a loader with a worker for each core, then also the largest batch. Then, with that loader
    and batch: all devices (one device, if the baseline has several), with the cores divided among
    them; one thread for training, which on a CPU competes with the workers; all cheap gains of the
    device; and many workers, for data that waits for I/O.
    """
    start = params_of(space.baseline, space)
    own = compose_allowed(_nearest_params(start, space), space) or space.baseline
    cores = _cores_of_a_rank(space, own.process_count)
    guessed = [setting for setting in SETTINGS if setting.guess is not None]

    loader: Params = {
        "num_workers": cores,
        "prefetch_factor": space.policy.ranges.guessed_prefetch,
        **{setting.name: setting.guess for setting in guessed if setting.is_of_loader},
    }
    batch: Params = {space.batch_setting: max(whole_numbers(space.domains[space.batch_setting]))}
    quiet: Params = {"intra_op_threads": 1}
    fastest_first = ("bfloat16", "float16", "tf32", "float32")
    device: Params = {
        "amp_dtype": next(dtype for dtype in fastest_first if dtype in space.domains["amp_dtype"]),
        **{setting.name: setting.guess for setting in guessed if setting.is_of_kernels},
    }
    many: Params = {"num_workers": space.policy.ranges.many_workers_per_core * cores}
    additions = [{}, *_other_ranks(space, own), quiet, device, many]
    wishes = [loader, *({**loader, **batch, **more} for more in additions)]

    guesses = list[Params]()
    for wish in wishes:
        searched = {name: value for name, value in wish.items() if name in space.parameters}
        wanted = {**start, **searched}
        guess = _with_allowed_batch(_nearest_params(wanted, space), space)
        if guess not in guesses:
            guesses.append(guess)
    return guesses


Explanation = tuple[str, frozenset[SettingValue]]
"""A setting with its values that explain failures."""


def explaining_setting(
    failed: Sequence[TrainingConfig], succeeded: Iterable[TrainingConfig]
) -> Explanation | None:
    """Return the one switch whose values occur in all failures and in no success, with these values.

    Only switches of the step explain a failure: if a model can't run in half precision, the rest of
    the space may still work. A setting of DistributedDataParallel other than torch's default, the
    same in all failures, explains them before the strategy does; a mode of torch.compile other than
    its default does so before compilation.

    Returns:
        The setting's name and its values. None if no switch explains the failures, or several do.
    """
    good = list(succeeded)

    def values_of(name: str) -> frozenset[SettingValue]:
        """Return a setting's values in the failures; none if one of them occurs in a success."""
        bad = frozenset(setting_of(config, name) for config in failed)
        if not bad.isdisjoint({setting_of(config, name) for config in good}):
            return frozenset()
        return bad

    explaining = {name: values for name in _SWITCHES if (values := values_of(name))}
    for mode in _MODES:
        modes = values_of(mode.name)
        if modes and modes.isdisjoint({mode.neutral}):
            explaining.pop(str(mode.needs), None)
            explaining[mode.name] = modes
    if not explaining:
        explaining = {name: values for name in _LESSER_SWITCHES if (values := values_of(name))}

    of_ddp = {}
    for switch in _DDP_SWITCHES:
        values = values_of(switch.name)
        if len(values) == 1 and values.isdisjoint({None, switch.neutral}):
            of_ddp[switch.name] = values
    if len(of_ddp) == 1:
        explaining.pop("strategy", None)
        explaining |= of_ddp
    return next(iter(explaining.items())) if len(explaining) == 1 else None


def nearest(domain: Domain, value: SettingValue) -> SettingValue:
    """Return the value of a domain that is closest to the one wanted; its first value if none compares."""
    if value in domain:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return next(iter(domain))
    numbers = whole_numbers(domain)
    if not numbers:
        return next(iter(domain))
    return min(numbers, key=lambda number: abs(number - value))


def same_batch_variant(best: TrialRecord, space: ResolvedSpace) -> Params | None:
    """Return the best trial's settings at the baseline's global batch, in equal shares for its ranks.

    Return None if they are at that batch already, or can't be.
    """
    if best.config.global_batch_ratio(space.baseline) == 1:
        return None
    params = params_of(best.config, space)
    own = space.baseline.grad_accum_steps
    share, rest = divmod(space.wanted_batch, best.config.world_size)
    listed = {own, *whole_numbers(space.domains["grad_accum_steps"])}
    even = (steps for steps in listed if rest == 0 and share % steps == 0)
    for steps in sorted(even, key=lambda steps: (abs(steps - own), steps)):
        split: Params = {space.batch_setting: share // steps, "grad_accum_steps": steps}
        variant = {**params, **{name: value for name, value in split.items() if name in params}}
        config = compose_allowed(variant, space)
        if config is not None and config.global_batch_ratio(space.baseline) == 1:
            return variant
    return None


def largest_batch_variant(
    best: TrialRecord, space: ResolvedSpace, records: Sequence[TrialRecord]
) -> Params | None:
    """Return the best trial's settings at the largest micro batch that is sure to fit.

    If the global batch would exceed its cap, gradients are accumulated over fewer batches.

    Args:
        best: The best trial so far.
        space: The space that is searched.
        records: The trials so far; batches as large as one that was too big are not tried again.

    Returns:
        The values. None if that batch was run in this precision and on as many ranks, or if fewer
        than two batches were.
    """
    setting = space.batch_setting
    own = [record for record in records if memory_kind(record.config) == memory_kind(best.config)]
    was_run = {
        setting_of(record.config, setting) for record in own if record.measurement is not None
    }
    if len(was_run) < 2 or setting not in space.parameters:
        return None
    memory = memory_within(space, records)
    too_big = min(
        (getattr(record.config, setting) for record in own if is_too_big(record)), default=inf
    )
    batches = sorted(size for size in whole_numbers(space.domains[setting]) if size < too_big)
    if not batches:
        return None
    resized = [with_batch_setting(best.config, batch, space) for batch in batches]
    chances = memory.chance_to_fit(resized, space.limit_bytes)
    fewest = min(whole_numbers(space.domains["grad_accum_steps"]))
    for batch, chance in zip(reversed(batches), reversed(chances), strict=True):
        if chance < space.policy.trials.sure_to_fit:
            continue
        if batch in was_run:
            return None
        params = params_of(best.config, space) | {setting: batch}
        steps = dict[str, list[SettingValue]]()
        if "grad_accum_steps" in params:
            steps["grad_accum_steps"] = [params["grad_accum_steps"], fewest]
        variant = first_allowed(params, space, steps)
        if variant is not None:
            return variant
    return None


def _cores_of_a_rank(space: ResolvedSpace, ranks: int) -> int:
    return max(1, space.environment.cores // rules.ranks_on_host(ranks, space.environment))


def _other_ranks(space: ResolvedSpace, own: TrainingConfig) -> Iterator[Params]:
    """Yield values for all devices under DDP, with gradients as bucket views; or for one, if `own` has several."""
    most = max(space.group_sizes, default=1)
    if own.is_group and "single" in space.domains["strategy"]:
        yield {**rules.SINGLE, "num_workers": space.environment.cores}
    elif most > own.world_size:
        yield {
            **{one.name: one.guess or one.neutral for one in SETTINGS if one.is_of_ddp},
            "strategy": "ddp",
            "world_size": most,
            "num_workers": _cores_of_a_rank(space, most),
        }


def first_allowed(
    params: Params, space: ResolvedSpace, options: Mapping[str, Sequence[SettingValue]]
) -> Params | None:
    """Return the values with the first combination of options that breaks no rule; None if each breaks one.

    Args:
        params: The values of all settings.
        space: The space that is searched.
        options: Values to try, by setting; those of the last setting are varied first.
    """
    for values in product(*options.values()):
        changed = {**params, **dict(zip(options, values, strict=True))}
        if compose_allowed(changed, space) is not None:
            return changed
    return None


def _nearest_params(wanted: Params, space: ResolvedSpace) -> Params:
    return {name: nearest(space.domains[name], value) for name, value in wanted.items()}


def _with_allowed_batch(guess: Params, space: ResolvedSpace) -> Params:
    """Return the guess with the largest micro batch, up to its own, that breaks no rule; else the guess itself."""
    own = guess.get(space.batch_setting)
    if not isinstance(own, int):
        return guess
    sizes = sorted(
        (size for size in whole_numbers(space.domains[space.batch_setting]) if size <= own),
        reverse=True,
    )
    return first_allowed(guess, space, {space.batch_setting: sizes}) or guess
