"""Configurations that a model of the machine is asked about: all of a small space, a telling part of a large one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from autotune.settings.search_space import IntRange, SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.space.domains import spread
from autotune.space.resolved_space import ResolvedSpace, compose
from autotune.study.proposals import first_guesses, params_of

__all__ = ["Candidates", "Params"]

Params = dict[str, SettingValue]

_ALL_UP_TO = 4096
_RANDOM = 1500
_ALL_VALUES_UP_TO = 40
_SPREAD_VALUES = 24  # of a longer range, beside the nearest ones on each side
_NEAREST = 2


@dataclass(slots=True)
class Candidates:
    """Combinations of a space and what they compose to, kept for as long as the search goes."""

    space: ResolvedSpace
    seed: int
    _common: dict[TrainingConfig, Params] = field(init=False)
    """Candidates however the search goes."""
    _around: dict[tuple[TrainingConfig, int], dict[TrainingConfig, Params]] = field(default_factory=dict)
    """Neighbours of what was among the best, by how many settings are varied."""
    _spreads: dict[str, list[int]] = field(default_factory=dict)
    """Of each long range, by its name."""

    def __post_init__(self) -> None:
        """Take all of a small space; of a large one what an expert would try, and a random part."""
        if self.space.size <= _ALL_UP_TO:
            self._common = self._composed(self.space.combinations())
            return
        chance = random.Random(self.seed)  # noqa: S311 - a seeded choice, no secret
        domains = {name: list(domain) for name, domain in self.space.parameters.items()}
        drawn = ({name: chance.choice(values) for name, values in domains.items()} for _ in range(_RANDOM))
        self._common = self._composed((*first_guesses(self.space), *drawn))

    def near(self, best: Sequence[TrainingConfig]) -> list[tuple[Params, TrainingConfig]]:
        """Candidates that break no rule; of a large space also the best ones' neighbours, the first one's further out.

        A neighbour has another value of one setting, further out of two; of a long range not all values count.
        """
        found = dict(self._common)
        if self.space.size > _ALL_UP_TO:
            for place, config in enumerate(best):
                for neighbour, params in self._neighbours(config, 2 if place == 0 else 1).items():
                    found.setdefault(neighbour, params)
        return [(params, config) for config, params in found.items()]

    def _neighbours(self, config: TrainingConfig, most: int) -> dict[TrainingConfig, Params]:
        if (config, most) not in self._around:
            own = {**{name: next(iter(domain)) for name, domain in self.space.parameters.items()}}
            own |= params_of(config, self.space)
            self._around[config, most] = self._composed(self._varied(own, most))
        return self._around[config, most]

    def _varied(self, own: Params, most: int) -> Iterator[Params]:
        names = list(self.space.parameters)
        for count in range(1, most + 1):
            for chosen in combinations(names, count):
                yield from self._with_others(own, chosen)

    def _with_others(self, own: Params, names: Iterable[str]) -> Iterator[Params]:
        name, *others = names
        for value in self._values(name, own[name]):
            if value != own[name]:
                changed = {**own, name: value}
                yield from self._with_others(changed, others) if others else (changed,)

    def _values(self, name: str, own: SettingValue) -> Iterable[SettingValue]:
        """The values of a setting; of a long range some of all sizes, and those next to its own."""
        domain = self.space.parameters[name]
        if not isinstance(domain, IntRange) or len(domain) <= _ALL_VALUES_UP_TO or not isinstance(own, int):
            return domain
        if name not in self._spreads:
            self._spreads[name] = spread(list(domain), _SPREAD_VALUES)
        nearest = range(max(domain.low, own - _NEAREST), min(domain.high, own + _NEAREST) + 1)
        return sorted({*self._spreads[name], *nearest})

    def _composed(self, candidates: Iterable[Params]) -> dict[TrainingConfig, Params]:
        """What candidates compose to, without those that break a rule; of several that compose alike the first."""
        found: dict[TrainingConfig, Params] = {}
        for params in candidates:
            config = compose(params, self.space)
            if isinstance(config, TrainingConfig):
                found.setdefault(config, params)
        return found
