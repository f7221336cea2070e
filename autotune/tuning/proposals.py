"""Compose configurations from proposed values, without repeats and without what cannot run."""

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
from autotune.models.memory import is_too_big, memory_kind, memory_of_trials
from autotune.note import Note
from autotune.records.trial import TrialRecord
from autotune.settings_table import DDP_PREFIX, SETTINGS
from autotune.space import constraints as rules
from autotune.space.ranges import spread, whole_numbers
from autotune.space.space import ResolvedSpace, compose, setting_of, with_batch_setting

# The combinations of a space: candidates for a model of the machine, and what a sampler has left
# open.
#
# Comes in: a space, a seed, and a function that says which configurations are open. Goes out: all
# combinations of a small space, a selection of a large one. "None left" is certain only where a
# space is small enough to be listed.


Skip = Callable[[TrainingConfig], Note | None]
"""Why a configuration is not worth a run: "would_not_fit", "would_tell_nothing"; None where it is."""


@dataclass(slots=True)
class Candidates:
    """Combinations of a space and what they compose to, kept for as long as the search goes."""

    space: ResolvedSpace
    seed: int
    _common: dict[TrainingConfig, Params] = field(init=False)
    """Candidates however the search goes."""
    _around: dict[tuple[TrainingConfig, int], dict[TrainingConfig, Params]] = field(
        default_factory=dict
    )
    """Neighbours of what is among the best now, by how many settings are varied: each time it is
    thousands."""
    _spreads: dict[str, list[int]] = field(default_factory=dict)
    """Of each long range, by its name."""

    def __post_init__(self) -> None:
        """Take all of a small space; of a large one what an expert would try, and a random part."""
        if self.space.size <= self.space.policy.trials.all_candidates_up_to:
            self._common = self._composed(self.space.combinations())
            return
        drawn = _drawn(self.space, _seeded(self.seed), self.space.policy.trials.random_candidates)
        self._common = self._composed((*first_guesses(self.space), *drawn))

    def near(self, best: Sequence[TrainingConfig]) -> list[tuple[Params, TrainingConfig]]:
        """Candidates that break no rule; of a large space also the best ones' neighbours, the first one's further out.

        A neighbour has another value of one setting, further out of two; of a long range not all
        values count.
        """
        found = dict(self._common)
        if self.space.size > self.space.policy.trials.all_candidates_up_to:
            wanted = [(config, 2 if place == 0 else 1) for place, config in enumerate(best)]
            self._around = {key: around for key, around in self._around.items() if key in wanted}
            for config, most in wanted:
                for neighbour, params in self._neighbours(config, most).items():
                    found.setdefault(neighbour, params)
        return [(params, config) for config, params in found.items()]

    def _neighbours(self, config: TrainingConfig, most: int) -> dict[TrainingConfig, Params]:
        if (config, most) not in self._around:
            first = {name: next(iter(domain)) for name, domain in self.space.parameters.items()}
            own = {**first, **params_of(config, self.space)}
            self._around[config, most] = self._composed(self._varied(own, most))
        return self._around[config, most]

    def _varied(self, own: Params, most: int) -> Iterator[Params]:
        others = {
            name: [value for value in self._values(name, own[name]) if value != own[name]]
            for name in own
        }
        for count in range(1, most + 1):
            for names in combinations(others, count):
                for values in product(*(others[name] for name in names)):
                    yield {**own, **dict(zip(names, values, strict=True))}

    def _values(self, name: str, own: SettingValue) -> Iterable[SettingValue]:
        """The values of a setting; of a long range some of all sizes, and those next to its own."""
        domain = self.space.parameters[name]
        if not isinstance(domain, IntRange) or len(domain) <= 40 or not isinstance(own, int):
            return domain
        if name not in self._spreads:
            self._spreads[name] = spread(list(domain), 24)
        nearest = range(max(domain.low, own - 2), min(domain.high, own + 2) + 1)
        return sorted({*self._spreads[name], *nearest})

    def _composed(self, candidates: Iterable[Params]) -> dict[TrainingConfig, Params]:
        """What candidates compose to, without those that break a rule; of several that compose alike the first."""
        found: dict[TrainingConfig, Params] = {}
        for params in candidates:
            if (config := compose_allowed(params, self.space)) is not None:
                found.setdefault(compacted(config), params)
        return found


class OpenCombinations:
    """A space's combinations in an order that the seed decides; those that are not open any more are dropped."""

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
        """Whether the space is small enough to be listed."""
        return self._space.size <= self._trials.most_listed

    @property
    def has_open(self) -> bool:
        """Whether one is open; in a space that can't be listed, whether one of so many draws is. Changes nothing."""
        tries = (
            self._rest
            if self.can_list
            else _drawn(self._space, _seeded(self._seed), self._trials.draws)
        )
        return any(self._open_config(params) is not None for params in tries)

    @property
    def none_left(self) -> Note:
        """What it means that `next` found none."""
        return space_exhausted() if self.can_list else nothing_new_drawn(self._trials.draws)

    def next(self, skip: Skip) -> Params | None:
        """One that is open and not skipped; else one that would tell nothing, or one that would not fit; else None."""
        kept: list[Params] = []
        first: dict[str, Params] = {}  # by the reason to skip it; "": none
        tries = (
            self._popped()
            if self.can_list
            else _drawn(self._space, self._drawing, self._trials.draws)
        )
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
        return first.get("") or first.get("would_tell_nothing") or first.get("would_not_fit")

    @cached_property
    def _rest(self) -> list[Params]:
        """Those not dropped yet, the next one last; built when first asked for."""
        rest = list(self._space.combinations())
        _seeded(self._seed).shuffle(rest)
        return rest

    def _popped(self) -> Iterator[Params]:
        while self._rest:
            yield self._rest.pop()

    def _open_config(self, params: Params) -> TrainingConfig | None:
        config = compose_allowed(params, self._space)
        return config if config is not None and self._is_open(config) else None


def _seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a seeded choice, no secret


def _drawn(space: ResolvedSpace, chance: random.Random, count: int) -> Iterator[Params]:
    values = {name: list(domain) for name, domain in space.parameters.items()}
    for _ in range(count):
        yield {name: chance.choice(choices) for name, choices in values.items()}


# Configurations worth trying before a sampler knows anything, and what can be learned from
# failures. Pure.


Params = dict[str, SettingValue]
"""Values of a space's parameters, by name."""

# Settings that may explain a failure by themselves: of each, torch runs other code for every value.
_ALONE = [setting for setting in SETTINGS if setting.needs is None and not setting.is_of_ddp]
_SWITCHES = [setting.name for setting in _ALONE if setting.explains == "often"]
_LESSER_SWITCHES = [
    setting.name for setting in _ALONE if setting.explains == "rarely"
]  # what none of these explains
_DDP_SWITCHES = [
    setting for setting in SETTINGS if setting.is_of_ddp and setting.explains is not None
]


def params_of(config: TrainingConfig, space: ResolvedSpace) -> Params:
    """The searched settings of a configuration; where it leaves one to torch, and the space does not, left out.

    So are DistributedDataParallel's where another strategy runs: no value of theirs says anything
    of it.
    """
    values = config.by_name
    if config.num_workers > 0:
        values["prefetch_factor"] = config.batches_per_worker
    found: Params = {}
    for name, domain in space.parameters.items():
        is_idle = name.startswith(DDP_PREFIX) and config.strategy != "ddp"
        if not is_idle and (values[name] is not None or None in domain):
            found[name] = _as_listed(values[name], domain)
    return found


def compose_allowed(
    params: Mapping[str, SettingValue], space: ResolvedSpace
) -> TrainingConfig | None:
    """What values compose to; None where they break a rule."""
    config = compose(params, space)
    return config if isinstance(config, TrainingConfig) else None


def first_guesses(space: ResolvedSpace) -> list[Params]:
    """What an expert would try first, each the one before it and something more.

    A loader with a worker for each core; the same with the largest batch; that on all devices,
    where there are several, with the cores divided among them (or on one device, where the baseline
    has several); and again as the baseline is run: on a CPU one thread for training, which
    otherwise fights the workers; all of the device's cheap gains; many workers, for data that waits
    for I/O.
    """
    start = params_of(space.baseline, space)
    own = compose_allowed(_nearest_params(start, space), space) or space.baseline
    cores = _cores_of_a_rank(space, own.process_count)
    loader: Params = {
        "num_workers": cores,
        "prefetch_factor": space.policy.ranges.guessed_prefetch,
        **{
            setting.name: setting.guess
            for setting in SETTINGS
            if setting.is_of_loader and setting.guess is not None
        },
    }
    batch: Params = {space.batch_setting: max(whole_numbers(space.domains[space.batch_setting]))}
    fastest_first = ("bfloat16", "float16", "tf32", "float32")
    fastest = next(dtype for dtype in fastest_first if dtype in space.domains["amp_dtype"])
    device: Params = {
        "amp_dtype": fastest,
        **{
            setting.name: setting.guess
            for setting in SETTINGS
            if setting.is_of_kernels and setting.guess is not None
        },
    }
    many: Params = {"num_workers": space.policy.ranges.many_workers_per_core * cores}
    quiet: Params = {"intra_op_threads": 1}
    wishes = [
        loader,
        *(
            {**loader, **batch, **more}
            for more in ({}, *_other_ranks(space, own), quiet, device, many)
        ),
    ]
    guesses = []
    for wish in wishes:
        wanted = {
            **start,
            **{name: value for name, value in wish.items() if name in space.parameters},
        }
        guess = _with_allowed_batch(_nearest_params(wanted, space), space)
        if guess not in guesses:
            guesses.append(guess)
    return guesses


def explaining_setting(
    failed: Sequence[TrainingConfig], succeeded: Iterable[TrainingConfig]
) -> tuple[str, frozenset[SettingValue]] | None:
    """The switch whose values all failures have and no success has, with those values; None if not exactly one.

    Only switches of the step explain a failure: a model that can't run in half precision says
    nothing against the rest of the space. Where all failures have one setting of
    DistributedDataParallel that is not torch's own, that one explains them before the strategy
    does, and a mode of torch.compile that is not its own before compilation does.
    """
    good = list(succeeded)
    plain = _explaining(_SWITCHES, failed, good)
    modes = _values_of_failures_alone("compile_mode", failed, good)
    if modes and modes.isdisjoint({"default"}):
        plain = {name: values for name, values in plain.items() if name != "compile"} | {
            "compile_mode": modes
        }
    plain = plain or _explaining(_LESSER_SWITCHES, failed, good)
    own = {}
    for switch in _DDP_SWITCHES:
        values = _values_of_failures_alone(switch.name, failed, good)
        if len(values) == 1 and values.isdisjoint({None, switch.neutral}):
            own[switch.name] = values
    if len(own) == 1:
        plain = {name: values for name, values in plain.items() if name != "strategy"} | own
    return next(iter(plain.items())) if len(plain) == 1 else None


def _explaining(
    names: Iterable[str], failed: Sequence[TrainingConfig], succeeded: Sequence[TrainingConfig]
) -> dict[str, frozenset[SettingValue]]:
    """Of some switches those whose values no success has, with the values."""
    return {
        name: values
        for name in names
        if (values := _values_of_failures_alone(name, failed, succeeded))
    }


def _values_of_failures_alone(
    name: str, failed: Sequence[TrainingConfig], succeeded: Sequence[TrainingConfig]
) -> frozenset[SettingValue]:
    """The values that a setting has in the failures, where it has none of them in a success; else none."""
    bad = frozenset(setting_of(config, name) for config in failed)
    return (
        bad if bad.isdisjoint({setting_of(config, name) for config in succeeded}) else frozenset()
    )


def nearest(domain: Domain, value: SettingValue) -> SettingValue:
    """The value of a domain that is closest to the one wanted; its first where none compares."""
    if value in domain:
        return value
    if not isinstance(value, int) or isinstance(value, bool):
        return next(iter(domain))
    numbers = whole_numbers(domain)
    return min(numbers, key=lambda number: abs(number - value)) if numbers else next(iter(domain))


def same_batch_variant(best: TrialRecord, space: ResolvedSpace) -> Params | None:
    """The best trial's settings at the baseline's global batch, split so that each of its ranks takes an equal share.

    None where they are at it, or can't be.
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
    """The best trial's settings at the largest micro batch that is sure to fit.

    None where that batch was run already in this precision and on as many ranks, or fewer than two
    were. A batch at or above one that was too big is not tried again. Where the global batch would
    grow beyond its cap, gradients are accumulated less.
    """
    setting = space.batch_setting
    own = [record for record in records if memory_kind(record.config) == memory_kind(best.config)]
    was_run = {
        setting_of(record.config, setting) for record in own if record.measurement is not None
    }
    if len(was_run) < 2 or setting not in space.parameters:
        return None
    memory = memory_of_trials(
        (), records, space.limit_bytes, limit_is_ram=space.environment.has_only_ram
    )
    too_big = min(
        (getattr(record.config, setting) for record in own if is_too_big(record)), default=inf
    )
    batches = sorted(size for size in whole_numbers(space.domains[setting]) if size < too_big)
    resized = [with_batch_setting(best.config, batch, space) for batch in batches]
    fits = (
        memory.chance_to_fit(resized, space.limit_bytes) >= space.policy.trials.sure_to_fit
        if batches
        else ()
    )
    fewest = min(whole_numbers(space.domains["grad_accum_steps"]))
    for batch in (
        batch for batch, may in zip(reversed(batches), reversed(fits), strict=True) if may
    ):
        if batch in was_run:
            return None
        params = params_of(best.config, space) | {setting: batch}
        steps = (
            {"grad_accum_steps": [params["grad_accum_steps"], fewest]}
            if "grad_accum_steps" in params
            else {}
        )
        if (variant := first_allowed(params, space, steps)) is not None:
            return variant
    return None


def _as_listed(value: SettingValue, domain: Domain) -> SettingValue:
    """A value as its domain has it: a range holds whole numbers, where a size may be a fraction."""
    return int(value) if isinstance(domain, IntRange) and isinstance(value, float) else value


def _cores_of_a_rank(space: ResolvedSpace, ranks: int) -> int:
    return max(1, space.environment.cores // rules.ranks_on_host(ranks, space.environment))


def _other_ranks(space: ResolvedSpace, own: TrainingConfig) -> Iterator[Params]:
    """A wish for what `own` is not: all devices under DDP, as torch has it and without copying gradients; or one."""
    most = max(space.group_sizes, default=1)
    if own.world_size > 1 and "single" in space.domains["strategy"]:
        yield {"strategy": "single", "world_size": 1, "num_workers": space.environment.cores}
    elif most > own.world_size:
        yield {
            **{setting.name: setting.neutral for setting in SETTINGS if setting.is_of_ddp},
            "ddp.gradient_as_bucket_view": True,
            "strategy": "ddp",
            "world_size": most,
            "num_workers": _cores_of_a_rank(space, most),
        }


def first_allowed(
    params: Params, space: ResolvedSpace, options: Mapping[str, Sequence[SettingValue]]
) -> Params | None:
    """The values with the first combination of options for some settings that breaks no rule; None where each does.

    The last setting's options are tried first.
    """
    for values in product(*options.values()):
        changed = {**params, **dict(zip(options, values, strict=True))}
        if compose_allowed(changed, space) is not None:
            return changed
    return None


def _nearest_params(wanted: Params, space: ResolvedSpace) -> Params:
    return {name: nearest(space.domains[name], value) for name, value in wanted.items()}


def _with_allowed_batch(guess: Params, space: ResolvedSpace) -> Params:
    """The guess with the largest micro batch, up to its own, that breaks no rule; as it is where every one does."""
    own = guess.get(space.batch_setting)
    if not isinstance(own, int):
        return guess
    sizes = sorted(
        (size for size in whole_numbers(space.domains[space.batch_setting]) if size <= own),
        reverse=True,
    )
    return first_allowed(guess, space, {space.batch_setting: sizes}) or guess
