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
from contextlib import AbstractContextManager, nullcontext, suppress
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
from autotune.protocol.attach import unwatch_children
from autotune.protocol.reports import REPORT_UNWRITTEN, RankReport
from autotune.settings.workload import LoaderSite
from autotune.worker.attach.loop.applied import Applied
from autotune.worker.attach.loop.beside import Beside
from autotune.worker.attach.loop.conductor import Conductor, HeldBatches, ScriptTrainer
from autotune.worker.attach.loop.feeds import ScriptFeed, StepFeed
from autotune.worker.attach.loop.loaders import STEPS_BEYOND_BATCHES, Loaders, uncounted
from autotune.worker.attach.loop.scene import Doer, Scene, is_clean_exit, no_loop, raised, rank, ranks, told
from autotune.worker.attach.loop.sightings import Made, Sightings, device_of, is_trained
from autotune.worker.attach.seams.hooks import plain_next, release_module_calls, torchs_own
from autotune.worker.attach.seams.overrides import Overrides
from autotune.worker.failure.outcome import outcome_of
from autotune.worker.measure.batch import tensors_of
from autotune.worker.measure.feed import FeedEnded
from autotune.worker.place import Place
from autotune.worker.setup.build import WorkloadFault
from autotune.worker.setup.device import open_device

__all__ = ["Session"]

_STEPS_TO_MOVE = 2
"""Optimizer steps on another loader's batches from which on the script may have gone on to train on that: ours."""
_LONGEST_TURN_S = 10.0
"""Seconds of training on another loader from which on that one is measured, wherever it is made: our convention."""


def _may_be_followed(feed: ScriptFeed) -> bool:
    """Return whether the script may make its training loader again now: its epoch is over, or was left early.

    Lightning asks for no more batches than an epoch has, and holds on to the iterator until it has made the next one.
    """
    return feed.is_between_epochs or feed.was_left or feed.is_at_end()


def _held_weakly(dataset: object) -> Callable[[], object]:
    """Return a weak reference to a dataset, or a strong one to a list, which has no weak references."""
    try:
        return ref(dataset)
    except TypeError:
        return lambda: dataset


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
        self._applied = Applied(overrides, self.sightings) if job is None else None
        self._is_passive = job is None or os.environ.get("RANK", "0") != "0"
        """Nothing is measured in this process: there is no job, or another rank does it."""
        script, is_shallow = None if job is None else job.script, isinstance(job, jobs.TrialJob)
        self._loaders = Loaders(self.sightings, script, is_shallow=is_shallow)
        self._drives_by_forward = self._drives_by_step = False
        self._unasked, self._asked_at = 0, 0.0
        """Optimizer steps since the training loader was asked for a batch, and when it was."""
        self._has_wrapper = False
        """Torch's iterator is inside of another, which does something to each batch."""
        self._is_searched = True
        """The loader that is about to be made is one of those that are searched."""
        self._is_in_step = False
        """Another loader has given a batch since the training loader did, while gradients were on."""
        self._has_stepped = False
        self._was_backward = True
        """Gradients were computed since the last forward pass that counted."""

    # Loaders

    def loader_arguments(self, site: LoaderSite, arguments: dict[str, Any]) -> None:
        """See hooks.Watcher."""
        self._is_searched = self.overrides.loader(site, arguments)

    def loader_made(self, site: LoaderSite, loader: DataLoader[Any]) -> None:
        """See hooks.Watcher."""
        if self._applied is not None and self._applied.has_looked:
            return
        dataset = (lambda: None) if self._is_passive else _held_weakly(loader.dataset)
        made = Made(site, ref(loader), dataset, takes_batch_size=loader.batch_size is not None)
        made.is_searched = self._is_searched
        made.is_between_epochs = isinstance(self.feed, ScriptFeed) and _may_be_followed(self.feed)
        self.sightings.made.append(made)

    def before_iter(self, loader: DataLoader[Any]) -> object | None:
        """See hooks.Watcher."""
        if not self._is_measuring:
            self.sightings.iterated(loader)
        return None if self._is_passive or self._is_measuring else self._before_iter(loader)

    def _before_iter(self, loader: DataLoader[Any]) -> object | None:
        feed = self.feed
        if self._is_another_thread:
            return None
        if self._loaders.is_evaluated(loader):
            if isinstance(feed, ScriptFeed):
                feed.beside.begin()
            return None
        if feed is not None:
            if not isinstance(feed, ScriptFeed):
                return None
            if loader is not feed.loader and not (
                _may_be_followed(feed) and self.sightings.is_anew(loader, feed.loader)
            ):
                feed.beside.begin()
                return None
            if feed.is_own and self.conductor is not None and not self._has_wrapper:
                return HeldBatches(self.conductor)
        counted = self._loaders.begin(loader, is_sure=feed is not None)
        if isinstance(feed, ScriptFeed) and counted is not None and loader is not feed.loader:
            self._loaders.forget(feed.loader)
            feed.follow(counted)
        return None

    def making_iterator(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        """See hooks.Watcher: the loader that is measured, or may be, has a short queue at first."""
        if self._is_passive or self._is_measuring or self._is_another_thread or not torch.is_grad_enabled():
            return nullcontext()
        is_followed = self.feed.loader is loader if self.feed is not None else self._loaders.is_counted(loader)
        return self._loaders.depth.applied(loader) if is_followed else nullcontext()

    def after_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """See hooks.Watcher."""
        if self._is_passive or self._is_measuring:
            return
        self._has_wrapper, iterator = torchs_own(iterator) is not iterator, torchs_own(iterator)
        with suppress(AttributeError):  # a subclass's may be a generator, which nothing can be noted on
            iterator.autotune_loader = loader
            iterator.autotune_is_evaluation = self._loaders.is_evaluated(loader)
        if getattr(iterator, "autotune_is_evaluation", False):
            return
        begun = self._loaders.began(loader)
        if isinstance(self.feed, ScriptFeed) and loader is self.feed.loader:
            self.feed.began_epoch(iterator, begun)

    def on_next(self, iterator: Any) -> Any:
        """See hooks.Watcher."""
        loader: DataLoader[Any] | None = getattr(iterator, "autotune_loader", None)
        has_given_up = isinstance(self.feed, ScriptFeed) and self.feed.is_dry  # forward passes have the lead by now
        if loader is None or self._is_measuring or has_given_up:
            # Measuring itself asks for the batches of loaders that it has made, and counts them.
            is_own = self._is_measuring and self.conductor is not None and self.conductor.thread == get_ident()
            return plain_next(iterator) if is_own else uncounted(iterator)
        if isinstance(self.feed, ScriptFeed) and self.conductor is not None:
            is_beside = iterator.autotune_is_evaluation or self._is_another_thread
            return self._next_of(loader, iterator, self.feed, self.conductor, is_beside=is_beside)
        if iterator.autotune_is_evaluation:
            return uncounted(iterator)
        if loader is self._loaders.training and self.conductor is None:
            return self._begin(loader, iterator)
        return self._loaders.next(loader, iterator)

    def _next_of(
        self, loader: DataLoader[Any], iterator: Any, feed: ScriptFeed, conductor: Conductor, *, is_beside: bool
    ) -> Any:
        """A batch while measuring has the lead: of the training loader, or of another one."""
        if not is_beside and loader is not feed.loader and self._has_moved_to(loader, feed):
            feed.move(self._loaders.moved(feed.loader, loader))
            feed.began_epoch(iterator, perf_counter())
        if loader is feed.loader and not is_beside:
            self.sightings.batches_beside += self._is_in_step
            self._is_in_step = False
            feed.beside.on_training()
            feed.ask_of(iterator)
            self._unasked, self._asked_at = 0, perf_counter()
            return conductor.ask()
        return uncounted(iterator) if self._is_another_thread else self._batch_beside(loader, iterator, feed.beside)

    def _has_moved_to(self, loader: DataLoader[Any], feed: ScriptFeed) -> bool:
        """Return whether the script goes on to train on another loader, and has done with the one that is measured.

        A second loader, on which it trains in turns, gives the first one its turn again soon. Where that takes longer
        than is waited for, the second one is measured, and the first one's turns are left out.
        """
        if feed.is_own or feed.beside.steps < _STEPS_TO_MOVE:
            return False
        is_remade = _may_be_followed(feed) and self.sightings.is_remade(loader, feed.loader)
        return is_remade or (not feed.has_moved and feed.beside.turn_s > _LONGEST_TURN_S)

    def _batch_beside(self, loader: DataLoader[Any], iterator: Any, beside: Beside) -> Any:
        """A batch of another loader than the one that is measured."""
        self._unasked = 0  # what is stepped on now is not what the script has kept
        self._is_in_step = torch.is_grad_enabled()
        if beside.steps == 1:
            beside.site = self.sightings.site_of(loader) or beside.site
        asked = perf_counter()
        try:
            batch = uncounted(iterator)
        except StopIteration:
            beside.end()
            raise
        beside.on_batch(perf_counter() - asked)
        return batch

    # Steps

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See hooks.Watcher."""
        self.overrides.before_step()
        self._has_stepped = True
        if self._applied is not None:
            self._applied.before_step()
        if self._before_step_acts is not None:
            self._before_step_acts(optimizer)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See hooks.Watcher."""
        if not self._is_passive and not self.sightings.steps:
            self._look_for_group()
        if self._is_passive:
            return
        self.sightings.step(optimizer)
        self._was_backward = True
        if isinstance(self.feed, StepFeed):
            self.feed.has_trained()
        elif self.feed is not None and not self._is_another_thread:
            self.feed.beside.on_step()
        if self.trainer is not None:
            if optimizer is self.trainer.optimizer:
                self.trainer.accumulated = 0
            if self._drives_by_step and self.conductor is not None:
                self.conductor.ask()
            else:
                self._look_for_asking()
            return
        if self._drives_by_forward or self._drives_by_step:
            return
        if self._loaders.has_none_after_step():
            self._drive_by_forward()

    def _look_for_group(self) -> None:
        """Leave measuring to rank 0 where a group is open by the first step, and the script's loader as it is."""
        self._is_passive = rank() != 0
        if self._is_passive:
            self._loaders.depth.end()  # what it has begun to iterate gets its whole queue with the next batch

    def _look_for_asking(self) -> None:
        """Go on by steps where the script trains and asks for no more batches: it has kept them (itertools.cycle)."""
        feed, conductor = self.feed, self.conductor
        if not isinstance(feed, ScriptFeed) or feed.is_dry or conductor is None or conductor.thread != get_ident():
            return
        self._unasked += 1
        if self._unasked > feed.batches + STEPS_BEYOND_BATCHES:
            feed.is_dry = True
            feed.beside.add(perf_counter() - self._asked_at)
            self._drive_by_forward()

    def on_loss(self, loss: Tensor) -> None:
        """See hooks.Watcher."""
        self._was_backward = True
        if isinstance(self.feed, StepFeed):
            self.feed.computes()
        if self.trainer is not None and loss.numel() == 1:
            self.trainer.loss = loss.detach().reshape(())

    def after_backward(self) -> None:
        """See hooks.Watcher."""
        if isinstance(self.feed, StepFeed):
            self.feed.has_trained()

    def on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See hooks.Watcher."""
        if self._is_passive and not self.overrides.follows_modules:
            release_module_calls()
            return
        trains = is_trained(module) if self._is_passive else self.sightings.call(module, args, kwargs)
        if trains and (module.training or not self._has_stepped):  # else an evaluation, or a copy that is exported
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
    def _is_another_thread(self) -> bool:
        """An evaluation beside the training, say: what it does takes no time of the training's thread."""
        return self.conductor is not None and self.conductor.thread != get_ident()

    @property
    def _is_measuring(self) -> bool:
        return self.conductor is not None and self.conductor.is_measuring

    def _begin(self, loader: DataLoader[Any], iterator: Any) -> Any:
        """Take the lead at a batch of the training loader."""
        counted, depth = self._loaders.counted[id(loader)], self._loaders.depth
        feed = ScriptFeed(self._lead(), counted, iterator, depth, ranks())
        return self._start(feed)

    def _drive_by_forward(self) -> None:
        """Take the lead at the next forward pass of the largest module."""
        self._loaders.depth.end()  # no loader is followed, or none any more
        module = self.sightings.main_module
        if module is None:
            self._drives_by_step = True
            if self.conductor is None:
                self._lead()
                self._start(StepFeed(ranks()))
            return
        self._drives_by_forward = True

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled() and isinstance(self.feed, StepFeed):
                self.feed.computes()
            if not torch.is_grad_enabled() or not self._was_backward:  # else a further view of the same batch
                return
            self._was_backward = False
            sizes = [tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.ndim]
            if self.conductor is None:
                self.sightings.samples = sizes[:1]
                self._lead()
                self._start(StepFeed((sizes[0] if sizes else 1) * ranks(), is_timed=self._is_on_cpu()))
            else:
                self.conductor.ask()

        module.register_forward_pre_hook(ask, with_kwargs=True, prepend=True)
        for other in self.sightings.outermost:
            if other is not module:
                other.register_forward_pre_hook(self._computes)

    def _computes(self, *_: object) -> None:
        """A module other than the largest is called."""
        if isinstance(self.feed, StepFeed):
            self.feed.computes()

    def _is_on_cpu(self) -> bool:
        return device_of(self.sightings.main_optimizer).type == "cpu"

    def _lead(self) -> Conductor:
        self.conductor = Conductor(self._measure)
        return self.conductor

    def _start(self, feed: ScriptFeed | StepFeed) -> Any:
        assert self.conductor is not None  # noqa: S101 - made by _lead
        release_module_calls()
        unwatch_children()  # a linear probe that it starts at an epoch's end is not what is measured
        optimizer = self.sightings.main_optimizer
        assert self.job is not None  # noqa: S101 - a passive session never leads
        device = open_device(str(device_of(optimizer)), limit_bytes=self.job.process.limit_bytes)
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
        code = REPORT_UNWRITTEN
        try:
            self.place.write(report)
            self.place.folder.done.touch(mode=0o600)
            code = 0
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(code)

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
