"""Reports under `autotune apply` which loader has the settings, and which settings are not in force.

Comes in: the overrides, the loaders that the script has made, its optimizer steps. Goes out: lines on standard error.
A training whose own loader is not the one that was searched is stopped before its first step: the larger batch or the
learning rate that its user has chosen may belong to settings that it would not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from autotune.protocol.attach import unwatch_children
from autotune.settings.applied.loader import argument_of
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.training_config import LOADER_SETTINGS
from autotune.settings.workload import LoaderSite
from autotune.worker.attach.loop.scene import rank
from autotune.worker.attach.loop.sightings import Made, Sightings
from autotune.worker.attach.seams.overrides import Overrides

__all__ = ["Applied"]

_LOOKED_AT_STEP = 11
"""Before this optimizer step it is looked at what is in force: a script sets its own in its first steps, if at all."""
_OF_LOADERS = {*LOADER_SETTINGS, "micro_batch_size"}


class Applied:
    """Looks at a training that is run to its end.

    Args:
        overrides: What it is to have.
        sightings: What was seen of it so far.
    """

    def __init__(self, overrides: Overrides, sightings: Sightings) -> None:
        self._overrides, self._sightings = overrides, sightings
        self._steps = 0
        self._has_told = False

    @property
    def has_looked(self) -> bool:
        """No loader that is made from now on is looked at."""
        return self._steps >= _LOOKED_AT_STEP

    def before_step(self) -> None:
        """An optimizer is about to step.

        Raises:
            SystemExit: before the first step on data, where the loader that trains is not the one that was searched.
        """
        if self.has_looked:
            return
        self._steps += 1
        # An optimizer may step before there is any data, to set itself up.
        has_data = self.has_looked or any(made.was_iterated for made in self._sightings.made)
        if has_data and not self._has_told:
            self._has_told = True
            unwatch_children()  # it is this process that trains: a linear probe that it starts later on is none of it
            if self._overrides.changed & _OF_LOADERS:
                self._name_loader()
        if self.has_looked:
            for line in dict.fromkeys(self._not_in_force()):
                _write(line)

    def _name_loader(self) -> None:
        facts = self._overrides.facts
        assert facts is not None  # noqa: S101 - else nothing is changed
        if not facts.loaders:
            return
        wanted = facts.loaders[-1]
        known = _place(wanted) + (f" ({wanted.code})" if wanted.code else "")
        trained = [made for made in self._sightings.made if made.is_trained_on]
        searched = [made for made in self._sightings.made if made.is_searched and made.was_iterated]
        if searched:
            loader, names = searched[-1].loader(), [name for name, _ in self._wanted(searched[-1])]
            settings = ", ".join(f"{name}={getattr(loader, name)}" for name in names if hasattr(loader, name))
            if settings:
                _write(f"the DataLoader that is made in {_place(searched[-1].site)}, has {settings}")
        elif trained:
            _write(
                f"stopped before the first step: the settings belong to a DataLoader like that of {known}, but this "
                f"training uses another one, made in {_place(trained[-1].site)}; search again with this script, or "
                "start it without autotune"
            )
            raise SystemExit(2)
        else:
            _write(
                f"the loader's settings could not be put in: the script uses no DataLoader, as that of {known} was; "
                "search again with this script"
            )

    def _wanted(self, made: Made) -> Iterator[tuple[str, object]]:
        """The attributes that a loader is to have, and their values."""
        overrides = self._overrides
        if "micro_batch_size" in overrides.changed and made.takes_batch_size:
            yield "batch_size", overrides.config.loader_batch_size
        for name, value in overrides.config.loader_settings.items():
            if name in overrides.changed and (overrides.config.num_workers or name not in NEUTRAL_WITHOUT_WORKERS):
                yield name, value

    def _not_in_force(self) -> Iterator[str]:
        """Yield a sentence for each setting whose value is not the recommended one."""
        for made in self._sightings.made:
            loader = made.loader()
            if loader is None or not (made.is_searched and made.was_iterated):
                continue
            for name, value in self._wanted(made):
                own = argument_of(loader, name) if name in LOADER_SETTINGS else getattr(loader, name, None)
                if own != value:
                    yield f"not in force: {name}={value}; the DataLoader that is made in {_place(made.site)}, has {own}"
        changed, config = self._overrides.changed, self._overrides.config
        if "intra_op_threads" in changed and torch.get_num_threads() != config.intra_op_threads:
            yield f"not in force: intra_op_threads={config.intra_op_threads}; it has {torch.get_num_threads()}"


def _place(site: LoaderSite) -> str:
    which = f", as number {site.nth + 1}" if site.nth else ""
    return f"{Path(site.file).name}, line {site.line}{which}"


def _write(line: str) -> None:
    if rank() == 0:
        sys.stderr.write(f"autotune: {line}\n")
