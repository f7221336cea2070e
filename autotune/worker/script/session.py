"""One script under one job: find its training loop, measure in it, report, and end the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread, get_ident
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from autotune.apply.loader import argument_of
from autotune.config.command import filled, placeholders_in, python_start
from autotune.config.plan import LoaderSite, Workload
from autotune.config.training_config import LOADER_SETTINGS, NEUTRAL_WITHOUT_WORKERS
from autotune.messages.space import other_training, outside_training, seen_on_rank_0, training_moved
from autotune.note import Note
from autotune.protocol import messages
from autotune.protocol.attach import is_own_python, unwatch_children
from autotune.protocol.messages import NO_EXTRAS, REPORT_UNWRITTEN, RankReport
from autotune.records.measurement import WAIT_SOURCE, Measurement
from autotune.records.result import Curves
from autotune.records.trial import TrialResult, sample_scan_s
from autotune.worker.batch import tensors_of, unwrapped
from autotune.worker.build import WorkloadFault, is_stream
from autotune.worker.conditions import conditions_before
from autotune.worker.device import open_device
from autotune.worker.environment import describe
from autotune.worker.extras.extra_steps import measure_after_window
from autotune.worker.failures import HangDump
from autotune.worker.feed import Feed, FeedEnded, LoopMoved
from autotune.worker.jobs.curves import trace_curves
from autotune.worker.jobs.probe import is_sharded, warm_page_cache
from autotune.worker.jobs.stress import largest_batch, stress_figures
from autotune.worker.outcome import outcome_of
from autotune.worker.place import Place, Start
from autotune.worker.preload import changed_variables, installed_modules
from autotune.worker.script.bench import (
    Doer,
    Scene,
    ScriptBench,
    compare_to_float32,
    is_clean_exit,
    loader_like,
    no_loop,
    raised,
    rank,
    ranks,
    told,
)
from autotune.worker.script.feeds import (
    STEPS_BEYOND_BATCHES,
    Conductor,
    HeldBatches,
    Loaders,
    ScriptFeed,
    ScriptTrainer,
    StepFeed,
    uncounted,
)
from autotune.worker.script.hooks import plain_next, release_module_calls, torchs_own
from autotune.worker.script.overrides import Overrides
from autotune.worker.script.sightings import Beside, Made, Sightings, device_of, is_trained
from autotune.worker.trial import (
    after_block_of,
    ended_when_stuck,
    gpus_used,
    longest_after_s,
    measure,
    of_rank,
)
from autotune.worker.window import Run

# Reports under `autotune apply` which loader has the settings, and which settings are not in force.
#
# Comes in: the overrides, the loaders that the script has made, its optimizer steps. Goes out:
# lines on standard error. A training whose own loader is not the one that was searched is stopped
# before its first step: the larger batch or the learning rate that its user has chosen may belong
# to settings that it would not have.


_LOOKED_AT_STEP = 11
"""Before this optimizer step it is looked at what is in force: a script sets its own in its first
steps, if at all."""
_OF_LOADERS = {*LOADER_SETTINGS, "micro_batch_size"}


class Applied:
    """Looks at a training that is run to its end.

    Args:
        overrides: What it is to have.
        sightings: What was seen of it so far.
    """

    def __init__(self, overrides: Overrides, sightings: Sightings) -> None:
        self._overrides = overrides
        self._sightings = sightings
        self._steps = 0
        self._has_told = False

    @property
    def has_looked(self) -> bool:
        """No loader that is made from now on is looked at."""
        return self._steps >= _LOOKED_AT_STEP

    def before_step(self) -> None:
        """An optimizer is about to step.

        Raises:
            SystemExit: before the first step on data, where the loader that trains is not the one
                that was searched.
        """
        if self.has_looked:
            return
        self._steps += 1
        # An optimizer may step before there is any data, to set itself up.
        has_data = self.has_looked or any(made.was_iterated for made in self._sightings.made)
        if has_data and not self._has_told:
            self._has_told = True
            # It is this process that trains: a linear probe that it starts later on is none of it.
            unwatch_children()
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
            loader = searched[-1].loader()
            names = [name for name, _ in self._wanted(searched[-1])]
            settings = ", ".join(
                f"{name}={getattr(loader, name)}" for name in names if hasattr(loader, name)
            )
            if settings:
                _write(
                    f"the DataLoader that is made in {_place(searched[-1].site)}, has {settings}"
                )
        elif trained:
            _write(
                f"stopped before the first step: the settings belong to a DataLoader like that of "
                f"{known}, but this "
                f"training uses another one, made in {_place(trained[-1].site)}; search again with "
                f"this script, or "
                "start it without autotune"
            )
            raise SystemExit(2)
        else:
            _write(
                f"the loader's settings could not be put in: the script uses no DataLoader, as "
                f"that of {known} was; "
                "search again with this script"
            )

    def _wanted(self, made: Made) -> Iterator[tuple[str, object]]:
        """The attributes that a loader is to have, and their values."""
        overrides = self._overrides
        if "micro_batch_size" in overrides.changed and made.takes_batch_size:
            yield "batch_size", overrides.config.loader_batch_size
        for name, value in overrides.config.loader_settings.items():
            if name in overrides.changed and (
                overrides.config.num_workers or name not in NEUTRAL_WITHOUT_WORKERS
            ):
                yield name, value

    def _not_in_force(self) -> Iterator[str]:
        """Yield a sentence for each setting whose value is not the recommended one."""
        for made in self._sightings.made:
            loader = made.loader()
            if loader is None or not (made.is_searched and made.was_iterated):
                continue
            for name, value in self._wanted(made):
                own = (
                    argument_of(loader, name)
                    if name in LOADER_SETTINGS
                    else getattr(loader, name, None)
                )
                if own != value:
                    yield f"not in force: {name}={value}; the DataLoader that is made in {_place(made.site)}, has {own}"
        changed = self._overrides.changed
        config = self._overrides.config
        if "intra_op_threads" in changed and torch.get_num_threads() != config.intra_op_threads:
            yield f"not in force: intra_op_threads={config.intra_op_threads}; it has {torch.get_num_threads()}"


def _place(site: LoaderSite) -> str:
    which = f", as number {site.nth + 1}" if site.nth else ""
    return f"{Path(site.file).name}, line {site.line}{which}"


def _write(line: str) -> None:
    if rank() == 0:
        sys.stderr.write(f"autotune: {line}\n")


# What each kind of job does inside a script, once its training loop is found: the counterparts of
# jobs/ and trial.py.
#
# Comes in: a Scene, in which measuring has the lead. Goes out: the job's report.


_OBSERVED_STEPS = 8
"""Optimizer steps that a probe watches: our convention; the batches between them give the
accumulation."""
_OBSERVED_S = (1.0, 20.0)
"""Seconds that it watches at least, and after which two steps are enough: our convention."""
_LONGEST_ITEM_S = 5.0
_FIRST_WAITS = 4.0
"""Seconds, or first waits that were seen, in which a stream must give two first items once more:
our convention."""
_WORTH_TELLING_S = 0.1
"""Seconds of a window spent on other than training from which it is said: our convention."""


def doer_of(job: messages.WorkloadJob, place: Place, dump: HangDump, start: Start) -> Doer:
    """What does a job in a scene; to be asked right before the script's first line."""
    match job:
        case messages.TrialJob():
            return partial(_measure_trial, job, place, dump, start)
        case messages.ProbeJob():
            return partial(_probe, job, start, frozenset(sys.modules), dict(os.environ))
        case messages.CurvesJob():
            return partial(_trace, job, place, start)
        case messages.PrecisionJob():
            return partial(_compare, job, start)
        case messages.StressJob():
            return partial(_train_on_largest, job, start)


def _done(**found: object) -> RankReport:
    return RankReport.model_validate({"result": TrialResult(outcome="ok"), **found})


def _measure_trial(
    job: messages.TrialJob, place: Place, dump: HangDump, start: Start, scene: Scene
) -> RankReport:
    feed = scene.feed
    trainer = scene.trainer
    while True:
        with suppress(LoopMoved), ExitStack() as at_end:
            first = feed.take()
            run = Run(feed, trainer, feed.queue_capacity, start.ends_at)
            run.longest_s = feed.start_s + feed.first_wait_s
            measurement = measure(
                run, job.window, first, start, after_block_of(job, place, dump, run, at_end)
            )
            if not feed.is_moving:
                break
    measurement = _with_remarks(
        measurement if feed.knows_waits else _without_waits(measurement), scene
    )
    dump.before_deadline()
    extras = job.extras if isinstance(feed, ScriptFeed) else NO_EXTRAS
    if (
        ranks() > 1
    ):  # the other ranks go on: steps beyond an epoch's end would meet what they do there
        extras = extras.model_copy(
            update={"device_ceiling": False, "copy_ceiling": False, "breakdown": False}
        )
    if extras != NO_EXTRAS:
        assert isinstance(feed, ScriptFeed)  # noqa: S101 - else there are none
        feed.take_over()
        with ended_when_stuck(longest_after_s(measurement, job.config), place.report):
            measurement = measure_after_window(
                run,
                trainer,
                extras,
                measurement,
                lambda known: place.keep(of_rank(known, place, scene.device)),
                scratch=place.folder.path,
            )
    return of_rank(measurement, place, scene.device)


def _without_waits(measurement: Measurement) -> Measurement:
    """Remove the waits for data, which were not observed, and the busy fraction that is derived from them."""
    readings = tuple(
        reading for reading in measurement.busy_readings if reading.source != WAIT_SOURCE
    )
    first = readings[0] if readings else None
    return measurement.model_copy(
        update={
            "data_wait_fraction": None,
            "busy_readings": readings,
            "busy_fraction": None if first is None else first.fraction,
            "busy_source": None if first is None else first.source,
        }
    )


def _with_remarks(measurement: Measurement, scene: Scene) -> Measurement:
    """What a script does beside training, and what its memory figure leaves out."""
    feed = scene.feed
    ranks = scene.trainer.config.process_count
    trained_s = feed.beside.trained_s if isinstance(feed, ScriptFeed) else 0.0
    remarks = measurement.remarks
    if feed.outside_s - trained_s >= _WORTH_TELLING_S:
        remarks = (
            *remarks,
            outside_training(seconds=feed.outside_s - trained_s, epochs=feed.epochs),
        )
    if isinstance(feed, ScriptFeed):
        remarks = (*remarks, *_of_other_loaders(feed, scene.sightings))
    if (
        ranks > 1 and not scene.device.has_own_memory
    ):  # the other ranks' trees are as large as this one's
        memory = measurement.memory.model_copy(
            update={"peak_bytes": measurement.memory.peak_bytes * ranks}
        )
        measurement = measurement.model_copy(
            update={"memory": memory, "peak_memory_bytes": memory.peak_bytes}
        )
    if ranks > 1:
        remarks = (*remarks, seen_on_rank_0(ranks))
    return measurement.model_copy(update={"remarks": remarks})


def _of_other_loaders(feed: ScriptFeed, seen: Sightings) -> Iterator[Note]:
    """Yield notes on other training loaders than the one that the probe has found."""
    beside = feed.beside
    site = seen.site_of(feed.loader)
    if beside.trained_s >= _WORTH_TELLING_S and beside.site is not None:
        waiting = min(1.0, beside.waited_s / beside.trained_s)
        yield other_training(
            place=_place_of(beside.site), seconds=beside.trained_s, waiting=waiting
        )
    if feed.has_moved and site is not None:
        yield training_moved(place=_place_of(site), batch_size=site.batch_size)


def _place_of(site: LoaderSite) -> str:
    return f"{Path(site.file).name}, line {site.line}"


def _probe(
    job: messages.ProbeJob,
    start: Start,
    modules: frozenset[str],
    variables: Mapping[str, str],
    scene: Scene,
) -> RankReport:
    """Watch some steps of a script that began with these modules and variables."""
    seen = scene.sightings
    feed = scene.feed
    loader = scene.loader
    begun = perf_counter()
    least = _OBSERVED_S
    steps = span = 0
    if loader is not None:
        seen.samples.clear()
    while True:
        try:
            delivery = feed.take()
        except LoopMoved:
            loader = scene.loader
            steps = 0
            span = 0
            seen.samples.clear()
            seen.spans.clear()
            continue
        seen.samples.append(delivery.samples // ranks())
        seen.shapes.see(delivery.batch)
        seen.batches += 1
        before = dict(seen.steps)
        scene.trainer.train(delivery.batch)
        made = max(
            (count - before.get(optimizer, 0) for optimizer, count in seen.steps.items()), default=0
        )
        steps = steps + made
        span = span + 1
        if made:
            seen.spans.append(
                max(1, round(span / made))
            )  # a script may ask for several batches, then train on all
            span = 0
        spent_s = perf_counter() - begun
        is_enough = (steps >= _OBSERVED_STEPS and spent_s >= least[0]) or (
            steps >= 2 and spent_s >= least[1]
        )
        if is_enough and not feed.is_moving:
            break
        if perf_counter() > start.ends_at:
            raise WorkloadFault(
                f"a script must make some optimizer steps within its deadline of "
                f"{job.process.deadline_s:.0f} s, but "
                f"made {steps}; give it shorter steps, or a longer budget.timeout_s"
            )
    placeholders = placeholders_in(job.command or ())
    observed = seen.observed(job.config, loader, ranks(), placeholders)
    script = seen.facts(observed, loader, placeholders)
    is_parted = True
    if loader is not None and isinstance(feed, ScriptFeed):
        feed.take_over()
        with suppress(FeedEnded):  # a stream that can be read once only
            warm_page_cache(feed)
        feed.stop()
        if is_stream(loader.dataset):
            is_parted = (
                loader.worker_init_fn is not None
                or loader.num_workers > 1
                or _is_sharded(loader.dataset, feed)
            )
    has_python_start = python_start(filled(job.command or (), job.config)) is not None
    own = {
        "modules": installed_modules(modules),
        "is_in_process": job.command is not None
        and is_own_python(job.command[0])
        and has_python_start,
    }
    script = script.model_copy(update=own)
    return _done(
        facts=seen.workload_facts(observed, loader, script, is_sharded=is_parted),
        variables=changed_variables(variables),
        environment=describe(scene.device, job_blocks=job.process.blocks_launches),
        conditions=conditions_before(gpus_used(scene.device), start.before),
    )


def _is_sharded(dataset: Any, feed: ScriptFeed) -> bool:
    """Return whether workers share a stream out; where its iterator raises, they count as doing so.

    The stream is iterated twice more for that, and a live one may have no item to give: after
    several times its first wait it counts as not shared out, which keeps its samples from being
    trained on once a worker. The thread is left to the end of the process, after the probe.
    """
    found = list[bool]()

    def ask() -> None:
        try:
            found.append(is_sharded(dataset))
        except Exception:  # noqa: BLE001 - the user's own iterator
            found.append(True)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(max(_LONGEST_ITEM_S, _FIRST_WAITS * feed.first_wait_s))
    return any(found)


def _trace(job: messages.CurvesJob, place: Place, start: Start, scene: Scene) -> RankReport:
    if not isinstance(scene.feed, ScriptFeed):
        raise WorkloadFault("the sides of a script can't be measured alone without a DataLoader")
    _refuse_ranks("the sides of a script can't be measured alone")
    scene.feed.take_over()
    scene.feed.stop()

    def keep(known: Curves) -> None:
        place.keep(_done(curves=known))

    return _done(
        curves=trace_curves(ScriptBench(scene), job, scene.device, start.ends_at, keep=keep)
    )


def _compare(job: messages.PrecisionJob, start: Start, scene: Scene) -> RankReport:
    if not isinstance(scene.feed, ScriptFeed):
        raise WorkloadFault(
            "a precision can be compared to float32 only where the script has a DataLoader"
        )
    return _done(guard=compare_to_float32(scene, job, start.ends_at))


def _refuse_ranks(what: str) -> None:
    if ranks() > 1:
        raise WorkloadFault(
            f"{what} in several ranks, of which each goes its own way there; measure one rank"
        )


def _train_on_largest(job: messages.StressJob, start: Start, scene: Scene) -> RankReport:
    feed = scene.feed
    loader = scene.loader
    if loader is None or not isinstance(feed, ScriptFeed):
        raise WorkloadFault("without a DataLoader nobody knows a script's largest samples")
    _refuse_ranks("a script's largest samples can't be trained on")
    feed.take_over()
    feed.stop()
    own = loader_like(loader, job.config)
    batches = unwrapped(loader).batch_sampler
    now = perf_counter()
    drawn = Workload(
        batch_sampler=None if batches is None or type(batches) is BatchSampler else batches
    )
    scan_until = now + sample_scan_s(start.ends_at - now)
    largest = largest_batch(drawn, own, job.config.micro_batch_size, scan_until)
    fresh = Feed(own)
    first = fresh.start().batch
    return _done(stress=stress_figures(scene.trainer, largest, first, fresh, job, start.ends_at))


# One script under one job: finds its training loop, then measures in it, reports, and ends the
# process hard.
#
# Comes in: a job whose workload is a command, and torch's doings (hooks). The first optimizer step
# after a loader's batch shows which loader trains; from the loader's next batch on, measuring has
# the lead (conductor). A script that trains without a DataLoader is driven by the forward passes of
# its largest module. Once the job is done the report is written and the process ends: nothing of
# the script's own end (atexit, checkpoints, `except`) happens.


_STEPS_TO_MOVE = 2
"""Optimizer steps on another loader's batches from which on the script may have gone on to train on
that: ours."""
_LONGEST_TURN_S = 10.0
"""Seconds of training on another loader from which on that one is measured, wherever it is made:
our convention."""


def _may_be_followed(feed: ScriptFeed) -> bool:
    """Return whether the script may make its training loader again now: its epoch is over, or was left early.

    Lightning asks for no more batches than an epoch has, and holds on to the iterator until it has
    made the next one.
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
        job: What is to be done; None: nothing is measured, the script runs to its end with the
            overrides.
        overrides: What the script is to have.
        place: Where the report goes.
        do: Does the job in a scene, and hands on its report.
    """

    def __init__(
        self, job: messages.WorkloadJob | None, overrides: Overrides, place: Place, do: Doer
    ) -> None:
        self.job = job
        self.overrides = overrides
        self.place = place
        self._do = do
        self.sightings = Sightings()
        self.conductor: Conductor | None = None
        self.feed: ScriptFeed | StepFeed | None = None
        self.trainer: ScriptTrainer | None = None
        self._before_step_acts: Callable[[torch.optim.Optimizer], None] | None = None
        """What a job does right before each optimizer step."""
        self._applied = Applied(overrides, self.sightings) if job is None else None
        self._is_passive = job is None or os.environ.get("RANK", "0") != "0"
        """Nothing is measured in this process: there is no job, or another rank does it."""
        script = None if job is None else job.script
        is_shallow = isinstance(job, messages.TrialJob)
        self._loaders = Loaders(self.sightings, script, is_shallow=is_shallow)
        self._drives_by_forward = self._drives_by_step = False
        self._unasked = 0
        self._asked_at = 0.0
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
        if (
            self._is_passive
            or self._is_measuring
            or self._is_another_thread
            or not torch.is_grad_enabled()
        ):
            return nullcontext()
        is_followed = (
            self.feed.loader is loader
            if self.feed is not None
            else self._loaders.is_counted(loader)
        )
        return self._loaders.depth.applied(loader) if is_followed else nullcontext()

    def after_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """See hooks.Watcher."""
        if self._is_passive or self._is_measuring:
            return
        self._has_wrapper, iterator = torchs_own(iterator) is not iterator, torchs_own(iterator)
        with suppress(
            AttributeError
        ):  # a subclass's may be a generator, which nothing can be noted on
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
        has_given_up = (
            isinstance(self.feed, ScriptFeed) and self.feed.is_dry
        )  # forward passes have the lead by now
        if loader is None or self._is_measuring or has_given_up:
            # Measuring itself asks for the batches of loaders that it has made, and counts them.
            is_own = (
                self._is_measuring
                and self.conductor is not None
                and self.conductor.thread == get_ident()
            )
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
        self,
        loader: DataLoader[Any],
        iterator: Any,
        feed: ScriptFeed,
        conductor: Conductor,
        *,
        is_beside: bool,
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
            self._unasked = 0
            self._asked_at = perf_counter()
            return conductor.ask()
        return (
            uncounted(iterator)
            if self._is_another_thread
            else self._batch_beside(loader, iterator, feed.beside)
        )

    def _has_moved_to(self, loader: DataLoader[Any], feed: ScriptFeed) -> bool:
        """Return whether the script goes on to train on another loader, and has done with the one that is measured.

        A second loader, on which it trains in turns, gives the first one its turn again soon. Where
        that takes longer than is waited for, the second one is measured, and the first one's turns
        are left out.
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
            # What it has begun to iterate gets its whole queue with the next batch.
            self._loaders.depth.end()

    def _look_for_asking(self) -> None:
        """Go on by steps where the script trains and asks for no more batches: it has kept them (itertools.cycle)."""
        feed = self.feed
        conductor = self.conductor
        if (
            not isinstance(feed, ScriptFeed)
            or feed.is_dry
            or conductor is None
            or conductor.thread != get_ident()
        ):
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
        trains = (
            is_trained(module) if self._is_passive else self.sightings.call(module, args, kwargs)
        )
        if trains and (
            module.training or not self._has_stepped
        ):  # else an evaluation, or a copy that is exported
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
        counted = self._loaders.counted[id(loader)]
        depth = self._loaders.depth
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
            if (
                not torch.is_grad_enabled() or not self._was_backward
            ):  # else a further view of the same batch
                return
            self._was_backward = False
            sizes = [tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.ndim]
            if self.conductor is None:
                self.sightings.samples = sizes[:1]
                self._lead()
                self._start(
                    StepFeed((sizes[0] if sizes else 1) * ranks(), is_timed=self._is_on_cpu())
                )
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
        # A linear probe that it starts at an epoch's end is not what is measured.
        unwatch_children()
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
