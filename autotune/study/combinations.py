"""The combinations of a space: candidates for a model of the machine, and what a sampler has left open.

Comes in: a space, a seed, and a function that says which configurations are open. Goes out: all combinations of a small
space, a selection of a large one. "None left" is certain only where a space is small enough to be listed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from autotune.frozen import compacted
from autotune.messages.search import nothing_new_drawn, space_exhausted
from autotune.note import Note
from autotune.settings.search_space import IntRange, SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.space.domains import spread
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.proposals import Params, compose_allowed, first_guesses, params_of

__all__ = ["Candidates", "OpenCombinations", "Skip"]

Skip = Callable[[TrainingConfig], Note | None]
"""Why a configuration is not worth a run: "would_not_fit", "would_tell_nothing"; None where it is."""


@dataclass(slots=True)
class Candidates:
    """Combinations of a space and what they compose to, kept for as long as the search goes."""

    space: ResolvedSpace
    seed: int
    _common: dict[TrainingConfig, Params] = field(init=False)
    """Candidates however the search goes."""
    _around: dict[tuple[TrainingConfig, int], dict[TrainingConfig, Params]] = field(default_factory=dict)
    """Neighbours of what is among the best now, by how many settings are varied: each time it is thousands."""
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

        A neighbour has another value of one setting, further out of two; of a long range not all values count.
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
        others = {name: [value for value in self._values(name, own[name]) if value != own[name]] for name in own}
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

    def __init__(self, space: ResolvedSpace, seed: int, is_open: Callable[[TrainingConfig], bool]) -> None:
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
        tries = self._rest if self.can_list else _drawn(self._space, _seeded(self._seed), self._trials.draws)
        return any(self._open_config(params) is not None for params in tries)

    @property
    def none_left(self) -> Note:
        """What it means that `next` found none."""
        return space_exhausted() if self.can_list else nothing_new_drawn(self._trials.draws)

    def next(self, skip: Skip) -> Params | None:
        """One that is open and not skipped; else one that would tell nothing, or one that would not fit; else None."""
        kept: list[Params] = []
        first: dict[str, Params] = {}  # by the reason to skip it; "": none
        tries = self._popped() if self.can_list else _drawn(self._space, self._drawing, self._trials.draws)
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
