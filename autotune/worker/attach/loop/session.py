"""One script under one job: finds its training loop, then measures in it, reports, and ends the process hard.

Comes in: a job whose workload is a command, and torch's doings (hooks). The first optimizer step after a loader's batch
shows which loader trains; from the loader's next batch on, measuring has the lead (conductor). A script that trains
without a DataLoader is driven by the forward passes of its largest module. Once the job is done the report is written
and the process ends: nothing of the script's own end (atexit, checkpoints, `except`) happens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from autotune.protocol import jobs
from autotune.protocol.reports import RankReport
from autotune.settings.workload import LoaderSite
from autotune.worker.attach.loop.beside import Beside
from autotune.worker.attach.loop.conductor import (
    Conductor,
    CountedLoader,
    HeldBatches,
    ScriptFeed,
    ScriptTrainer,
    StepFeed,
)
from autotune.worker.attach.loop.scene import Doer, Scene, is_clean_exit, no_loop, raised, rank, ranks, told, unapplied
from autotune.worker.attach.loop.sightings import Made, Sightings, is_trained
from autotune.worker.attach.seams.hooks import plain_next, release_module_calls
from autotune.worker.attach.seams.overrides import Overrides
from autotune.worker.failure.outcome import outcome_of
from autotune.worker.measure.batch import tensors_of
from autotune.worker.measure.batch_sizes import CountedBatch
from autotune.worker.measure.feed import FeedEnded
from autotune.worker.setup.build import WorkloadFault
from autotune.worker.setup.device import open_device
from autotune.worker.trial import Place

__all__ = ["Session"]

_STEPS_WITHOUT_LOADER = 3
"""Optimizer steps without a batch of a DataLoader after which a script counts as one that has none: our convention."""
_STEPS_BEYOND_BATCHES = 64
"""Steps since the last batch, beyond as many as it took batches, from which on it trains on what it has kept: ours."""


class Session:
    """The watcher of a process; see hooks.Watcher.

    Args:
        job: What is to be done; None: nothing is measured, the script runs to its end with the overrides.
        overrides: What the script is to have.
        place: Where the report goes.
        do: Does the job in a scene, and hands on its report.
    """

    def __init__(self, job: jobs.WorkloadJob | None, overrides: Overrides, place: Place, do: Doer) -> None:
        self.job, self.overrides, self.place, self._do = job, overrides, place, do
        self.sightings = Sightings()
        self.conductor: Conductor | None = None
        self.feed: ScriptFeed | StepFeed | None = None
        self.trainer: ScriptTrainer | None = None
        self._before_step_acts: Callable[[torch.optim.Optimizer], None] | None = None
        """What a job does right before each optimizer step."""
        self._is_passive = job is None or os.environ.get("RANK", "0") != "0"
        """Nothing is measured in this process: there is no job, or another rank does it."""
        self._counted: dict[int, CountedLoader] = {}
        self._last: dict[int, tuple[DataLoader[Any], int]] = {}
        """By thread: the loader that it has last taken a batch of, and the optimizer steps before that."""
        self._trains: DataLoader[Any] | None = None
        """The training loader, once it is known."""
        self._begun = 0.0
        """When the last iterator of a counted loader was begun."""
        self._drives_by_forward = False
        self._was_backward = True
        """Gradients were computed since the last forward pass that counted."""

    # Loaders

    def loader_arguments(self, site: LoaderSite, arguments: dict[str, Any]) -> None:
        """See hooks.Watcher."""
        self.overrides.loader(site, arguments)

    def loader_made(self, site: LoaderSite, loader: DataLoader[Any]) -> None:
        """See hooks.Watcher."""
        dataset = None if self._is_passive else loader.dataset
        made = Made(site, ref(loader), dataset, takes_batch_size=loader.batch_size is not None)
        made.is_between_epochs = isinstance(self.feed, ScriptFeed) and self.feed.is_between_epochs
        self.sightings.made.append(made)

    def before_iter(self, loader: DataLoader[Any]) -> object | None:
        """See hooks.Watcher."""
        if self._is_passive or self._is_measuring:
            return None
        for made in self.sightings.made:
            made.was_iterated |= made.loader() is loader
        feed = self.feed
        if feed is not None:
            if not isinstance(feed, ScriptFeed):
                return None
            if loader is not feed.loader and not (
                feed.is_between_epochs and self.sightings.is_anew(loader, feed.loader)
            ):
                feed.beside.begin()
                return None
            if feed.is_own and self.conductor is not None:
                return HeldBatches(self.conductor)
        counted = self._counted.get(id(loader))
        if counted is None and (feed is not None or self._is_counted(loader)):
            counted = self._counted[id(loader)] = CountedLoader(loader)
        if isinstance(feed, ScriptFeed) and counted is not None and loader is not feed.loader:
            self._counted.pop(id(feed.loader), None)
            feed.follow(counted)
        if counted is not None:
            counted.begin_epoch()
            self._begun = perf_counter()
        return None

    def after_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """See hooks.Watcher."""
        if self._is_passive or self._is_measuring:
            return
        iterator.autotune_loader = loader
        counted = self._counted.get(id(loader))
        if counted is None:
            return
        if not counted.has_begun:
            counted.start_s = perf_counter() - self._begun
        if isinstance(self.feed, ScriptFeed) and loader is self.feed.loader:
            self.feed.began_epoch(iterator, self._begun)

    def on_next(self, iterator: Any) -> Any:
        """See hooks.Watcher."""
        loader: DataLoader[Any] | None = getattr(iterator, "autotune_loader", None)
        if loader is None or self._is_measuring:
            return _uncounted(iterator)
        if isinstance(self.feed, ScriptFeed) and self.conductor is not None:
            if loader is self.feed.loader:
                self.feed.beside.on_training()
                return self.conductor.ask()
            return self._batch_beside(iterator, self.feed.beside)
        if loader is self._trains and self.conductor is None:
            return self._begin(loader, iterator)
        counted = self._counted.get(id(loader))
        if counted is None:
            return _uncounted(iterator)
        batch, samples = counted.fetch(iterator)
        self._last[get_ident()] = loader, self.sightings.most_steps
        self.sightings.samples.append(samples)
        return batch

    def _batch_beside(self, iterator: Any, beside: Beside) -> Any:
        """A batch of a loader that does not train."""
        try:
            batch = _uncounted(iterator)
        except StopIteration:
            beside.end()
            raise
        beside.on_batch()
        return batch

    def _is_counted(self, loader: DataLoader[Any]) -> bool:
        """Before its probe any loader may be the one that trains; then its place is known."""
        facts = None if self.job is None else self.job.script
        if facts is None:
            return True
        return any(made.loader() is loader and made.site in facts.loaders for made in self.sightings.made)

    # Steps

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See hooks.Watcher."""
        if self._before_step_acts is not None:
            self._before_step_acts(optimizer)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See hooks.Watcher."""
        if not self.sightings.steps:
            self._is_passive |= rank() != 0  # a group is open by now, where there is one
        if self.job is None:
            self._tell_unapplied()
        if self._is_passive:
            return
        self.sightings.step(optimizer)
        self._was_backward = True
        if self.trainer is not None:
            if optimizer is self.trainer.optimizer:
                self.trainer.accumulated = 0
            return
        if self._drives_by_forward:
            return
        last = self._last.get(get_ident())
        steps = self.sightings.most_steps - (0 if last is None else last[1])
        if last is not None and steps <= len(self.sightings.samples) + _STEPS_BEYOND_BATCHES:
            self._trains = last[0]
        elif steps >= _STEPS_WITHOUT_LOADER:
            self._trains = None
            self._drive_by_forward()

    def _tell_unapplied(self) -> None:
        """In a training that is run to its end: say once, at its first step, that no loader was found to change."""
        if not self.sightings.steps:
            self.sightings.steps[0] = 1
            sys.stderr.write(unapplied(self.overrides.facts, self.sightings))

    def on_loss(self, loss: Tensor) -> None:
        """See hooks.Watcher."""
        self._was_backward = True
        if self.trainer is not None and loss.numel() == 1:
            self.trainer.loss = loss.detach().reshape(())

    def on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See hooks.Watcher."""
        if self._is_passive and not self.overrides.follows_modules:
            release_module_calls()
        elif is_trained(module) if self._is_passive else self.sightings.call(module, args, kwargs):
            self.overrides.module(module)

    def ddp_arguments(self, arguments: dict[str, Any]) -> None:
        """See hooks.Watcher."""
        self.overrides.ddp(arguments)

    def ddp_made(self, model: DistributedDataParallel) -> None:
        """See hooks.Watcher."""
        self.sightings.ddp = model
        self.overrides.ddp_made(model)

    # Measuring

    @property
    def _is_measuring(self) -> bool:
        return self.conductor is not None and self.conductor.is_measuring

    def _begin(self, loader: DataLoader[Any], iterator: Any) -> Any:
        """Take the lead at a batch of the training loader."""
        feed = ScriptFeed(self._lead(), self._counted[id(loader)], iterator, ranks())
        return self._start(feed)

    def _drive_by_forward(self) -> None:
        """Take the lead at the next forward pass of the largest module."""
        module = self.sightings.main_module
        if module is None:
            return
        self._drives_by_forward = True

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled() or not self._was_backward:  # else a further view of the same batch
                return
            self._was_backward = False
            sizes = [tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.ndim]
            if self.conductor is None:
                self.sightings.samples = sizes[:1]
                self._lead()
                self._start(StepFeed((sizes[0] if sizes else 1) * ranks()))
            else:
                self.conductor.ask()

        module.register_forward_pre_hook(ask, with_kwargs=True, prepend=True)

    def _lead(self) -> Conductor:
        self.conductor = Conductor(self._measure)
        return self.conductor

    def _start(self, feed: ScriptFeed | StepFeed) -> Any:
        assert self.conductor is not None  # noqa: S101 - made by _lead
        release_module_calls()
        optimizer = self.sightings.main_optimizer
        place = next((part.device for group in optimizer.param_groups for part in group["params"]), None)
        assert self.job is not None  # noqa: S101 - a passive session never leads
        device = open_device(str(place or "cpu"), limit_bytes=self.job.process.limit_bytes)
        device.cap_memory()
        self.feed = feed
        self.trainer = ScriptTrainer(self.overrides.config, device, self.conductor, optimizer)
        return self.conductor.ask()

    def _measure(self) -> None:
        """The measuring greenlet's whole life; it never returns."""
        assert self.feed is not None and self.trainer is not None  # noqa: S101, PT018 - set by _start
        scene = Scene(
            sightings=self.sightings,
            device=self.trainer.device,
            feed=self.feed,
            trainer=self.trainer,
            before_steps=partial(setattr, self, "_before_step_acts"),
        )
        self.end(outcome_of(lambda: told(lambda: self._do(scene))))

    def end(self, report: RankReport) -> None:
        """Write the report, and end the process at once."""
        try:
            self.place.write(report)
            self.place.folder.done.touch(mode=0o600)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(0)

    def script_ended(self, error: BaseException | None = None) -> None:
        """The script has come to its end, or failed: what was measured by then counts, else that is the report."""
        if self._is_passive or self.place.report.exists():
            return
        is_elsewhere = self.conductor is not None and self.conductor.thread != get_ident()
        if error is not None and not is_clean_exit(error):
            if not is_elsewhere:
                self.end(outcome_of(lambda: raised(error)))
        elif self.conductor is not None and not is_elsewhere:
            self.conductor.end()
        elif self.conductor is not None:  # the thread that trained has come to its end
            self.end(outcome_of(lambda: told(lambda: raised(FeedEnded()))))
        elif self.sightings.made or self.sightings.steps:
            self.end(outcome_of(lambda: raised(WorkloadFault(no_loop(self.sightings)))))


def _uncounted(iterator: Any) -> Any:
    """A batch as the script has it, whether or not its loader counts."""
    batch = plain_next(iterator)
    return batch.batch if type(batch) is CountedBatch else batch
