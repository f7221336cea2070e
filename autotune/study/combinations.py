"""The combinations of a space that are still open, in random order: what is tried where a sampler finds nothing new.

Comes in: a space, and a function that says which configurations are open. Goes out: values for one trial. A space with
more combinations than can be listed is drawn from instead, so that "none left" is certain in a small space alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from autotune.note import Note, note
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace, compose
from autotune.study.proposals import Params

__all__ = ["MOST_LISTED", "OpenCombinations", "Skip"]

Skip = Callable[[TrainingConfig], Note | None]
"""Why a configuration is not worth a run: "would_not_fit", "would_tell_nothing"; None where it is."""

MOST_LISTED = 20_000
"""Combinations up to which a space is listed, and method grid allowed: our own convention, a second of listing."""
_DRAWS = 500
"""Combinations looked through for one trial where a space is drawn from, or all are skipped: our own convention."""


class OpenCombinations:
    """A space's combinations in an order that the seed decides; those that are not open any more are dropped."""

    def __init__(self, space: ResolvedSpace, seed: int, is_open: Callable[[TrainingConfig], bool]) -> None:
        self._space = space
        self._seed = seed
        self._is_open = is_open
        self._drawing = random.Random(seed)  # noqa: S311 - a seeded choice, no secret
        self._rest: list[Params] | None = None

    @property
    def can_list(self) -> bool:
        """Whether the space is small enough to be listed."""
        return self._space.size <= MOST_LISTED

    @property
    def has_open(self) -> bool:
        """Whether one is open; in a space that can't be listed, whether one of so many draws is. Changes nothing."""
        tries = self._listed() if self.can_list else self._drawn(random.Random(self._seed))  # noqa: S311 - as above
        return any(self._open_config(params) is not None for params in tries)

    @property
    def none_left(self) -> Note:
        """What it means that `next` found none."""
        return note("space_exhausted") if self.can_list else note("nothing_new_drawn", draws=_DRAWS)

    def next(self, skip: Skip) -> Params | None:
        """One that is open and not skipped; else one that would tell nothing, or one that would not fit; else None."""
        kept: list[Params] = []
        skipped: dict[str, Params] = {}
        tries = self._popped() if self.can_list else self._drawn(self._drawing)
        found = None
        for params in tries:
            config = self._open_config(params)
            if config is None:
                continue
            kept.append(params)
            reason = skip(config)
            if reason is None:
                found = params
                break
            skipped.setdefault(reason.code, params)
            if len(kept) == _DRAWS:
                break
        if self.can_list:
            self._listed().extend(reversed(kept))
        return found or skipped.get("would_tell_nothing") or skipped.get("would_not_fit")

    def _listed(self) -> list[Params]:
        """Those not dropped yet, the next one last; built when first asked for."""
        if self._rest is None:
            self._rest = list(self._space.combinations())
            random.Random(self._seed).shuffle(self._rest)  # noqa: S311 - as above
        return self._rest

    def _popped(self) -> Iterator[Params]:
        rest = self._listed()
        while rest:
            yield rest.pop()

    def _drawn(self, drawing: random.Random) -> Iterator[Params]:
        values = {name: list(domain) for name, domain in self._space.parameters.items()}
        for _ in range(_DRAWS):
            yield {name: drawing.choice(choices) for name, choices in values.items()}

    def _open_config(self, params: Params) -> TrainingConfig | None:
        config = compose(params, self._space)
        return config if isinstance(config, TrainingConfig) and self._is_open(config) else None
