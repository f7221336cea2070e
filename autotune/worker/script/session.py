"""Run one job inside a training script: find its training loop, measure in it, report, exit.

In: a job whose workload is a command, and the torch calls that `hooks` intercepts. Out: the job's
report on disk; then the process ends, so nothing of the script's own end (atexit handlers,
checkpoints, `except` blocks) runs. Without a job (`autotune apply`) nothing is measured and the
script runs to its end with the chosen settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Thread, get_ident
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from autotune.apply.loader import argument_of
from autotune.config.command import filled, placeholders_in, python_start
from autotune.config.plan import LoaderSite, Workload
from autotune.config.training_config import NEUTRAL_WITHOUT_WORKERS
from autotune.messages.space import other_training, outside_training, seen_on_rank_0, training_moved
from autotune.note import Note
from autotune.protocol import messages
from autotune.protocol.attach import is_own_python, unwatch_children
from autotune.protocol.messages import Extras, RankReport
from autotune.records.measurement import WAIT_SOURCE, Measurement
from autotune.records.result import Curves
from autotune.records.trial import TrialResult, sample_scan_s
from autotune.records.watched_run import RunPart
from autotune.worker.batch import batch_fingerprint, tensors_of, unwrapped
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
from autotune.worker.loader import LOADER_INPUTS
from autotune.worker.place import Place, Start, failure_report
from autotune.worker.preload import changed_variables, installed_modules
from autotune.worker.script.bench import (
    Doer,
    Scene,
    ScriptBench,
    compare_to_float32,
    is_clean_exit,
    loader_like,
    no_loop,
    rank,
    ranks,
    train_once,
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
from autotune.worker.script.seams import install_device_seams, uninstall_seams
from autotune.worker.script.sightings import Made, SideBatches, Sightings, device_of, is_trained
from autotune.worker.script.watch import Watch
from autotune.worker.script.watching import watch_on
from autotune.worker.trial import (
    after_block_of,
    ended_when_stuck,
    gpus_used,
    longest_after_s,
    measure,
    of_rank,
)
from autotune.worker.window import Run

# Check under `autotune apply` that the chosen settings are in force


_CHECKED_AT_STEP = 11
"""Optimizer step before which settings are checked: scripts set their own in the first steps.
Source: our convention."""


class Applied:
    """Report on standard error which loader has the settings, and which settings are not in force.

    A script that trains on a loader other than the searched one is stopped before its first step:
    its larger batch or learning rate may belong to settings that it would not get.

    Args:
        overrides: The settings that the script should have.
        sightings: Observations of the script so far.
    """

    def __init__(self, overrides: Overrides, sightings: Sightings) -> None:
        self._overrides = overrides
        self._sightings = sightings
        self._steps = 0
        self._has_reported = False

    @property
    def has_checked(self) -> bool:
        """True once the check has run; loaders made later are not checked."""
        return self._steps >= _CHECKED_AT_STEP

    def before_step(self) -> None:
        """Check the loader before the first step on data, and all settings at step 11.

        Raises:
            SystemExit: Before the first step on data, the training loader is not the searched one.
        """
        if self.has_checked:
            return
        self._steps += 1
        # Some scripts step the optimizer once before they read data, to allocate its state.
        has_data = self.has_checked or any(made.was_iterated for made in self._sightings.made)
        if has_data and not self._has_reported:
            self._has_reported = True
            # This process trains; a job that it starts later (a linear probe, say) does not.
            unwatch_children()
            if self._overrides.changed & LOADER_INPUTS:
                self._report_loader()
        if self.has_checked:
            for line in dict.fromkeys(self._not_in_force()):
                _write(line)

    def _report_loader(self) -> None:
        facts = self._overrides.facts
        assert facts is not None  # noqa: S101 - else nothing is changed
        if not facts.loaders:
            return
        wanted = facts.loaders[-1]
        known = _numbered_place(wanted) + (f" ({wanted.code})" if wanted.code else "")
        trained = [made for made in self._sightings.made if made.is_trained_on]
        searched = self._searched()
        if searched:
            settings = [f"{name}={own}" for name, _, own in self._settings(searched[-1])]
            if settings:
                place = _numbered_place(searched[-1].site)
                _write(f"the DataLoader that is made in {place}, has {', '.join(settings)}")
        elif trained:
            _write(
                f"stopped before the first step: the settings belong to a DataLoader like that of "
                f"{known}, but this training uses another one, made in {_numbered_place(trained[-1].site)}; "
                f"search again with this script, or start it without autotune"
            )
            raise SystemExit(2)
        else:
            _write(
                f"the loader's settings could not be put in: the script uses no DataLoader, as "
                f"that of {known} was; search again with this script"
            )

    def _searched(self) -> list[Made]:
        """Return the loaders that the settings belong to, as far as they were iterated."""
        return [made for made in self._sightings.made if made.is_searched and made.was_iterated]

    def _settings(self, made: Made) -> Iterator[tuple[str, object, object]]:
        """Yield the arguments that a loader should have, with the wanted and its own value."""
        loader = made.loader()
        if loader is None:
            return
        changed = self._overrides.changed
        config = self._overrides.config
        before = self._overrides.before
        if config.micro_batch_size != before.micro_batch_size and made.takes_batch_size:
            yield "batch_size", config.loader_batch_size, loader.batch_size
        for name, value in config.loader_settings.items():
            has_effect = config.num_workers or name not in NEUTRAL_WITHOUT_WORKERS
            if name in changed and has_effect:
                yield name, value, argument_of(loader, name)

    def _not_in_force(self) -> Iterator[str]:
        """Yield a sentence for each setting whose value is not the recommended one."""
        for made in self._searched():
            for name, value, own in self._settings(made):
                if own != value:
                    place = _numbered_place(made.site)
                    yield f"not in force: {name}={value}; the DataLoader that is made in {place}, has {own}"
        wanted = self._overrides.config.intra_op_threads
        own = torch.get_num_threads()
        if self._overrides.sets_threads and own != wanted:
            yield f"not in force: intra_op_threads={wanted}; it has {own}"


def _place(site: LoaderSite) -> str:
    return f"{Path(site.file).name}, line {site.line}"


def _numbered_place(site: LoaderSite) -> str:
    """Return the place, with the number of the loader if the line has made others before."""
    which = f", as number {site.nth + 1}" if site.nth else ""
    return f"{_place(site)}{which}"


def _write(line: str) -> None:
    if rank() == 0:
        sys.stderr.write(f"autotune: {line}\n")


# One function for each kind of job, called once the training loop is found (the counterparts of
# jobs/ and trial.py)


_OBSERVED_STEPS = 8
"""Optimizer steps that a probe observes; the batches between them give the accumulation.
Source: our convention."""
_OBSERVED_S = (1.0, 20.0)
"""Seconds that a probe observes at least, and seconds after which two steps are enough.
Source: our convention."""
_REPEATS_S = 2.0
"""Seconds to take more batches of a stream, to see whether its workers repeat them. Source: our
convention."""
_LONGEST_ITEM_S = 5.0
"""Seconds in which a stream must give its first two items again. Source: our convention."""
_FIRST_WAITS = 4.0
"""The same limit in multiples of the first wait that was measured. Source: our convention."""
_REPORTED_FROM_S = 0.1
"""Seconds of a window spent outside training from which they are reported. Source: our
convention."""


def doer_of(
    job: messages.WorkloadJob,
    place: Place,
    dump: HangDump,
    start: Start,
    watch: Watch | None = None,
) -> Doer:
    """Return the function that does a job in a scene.

    Call it right before the script's first line: for a probe it records the modules and
    environment variables that were there before.
    """
    match job:
        case messages.TrialJob():
            return partial(_measure_trial, job, place, dump, start)
        case messages.ProbeJob():
            before = _Before(frozenset(sys.modules), dict(os.environ))
            return partial(_probe, job, place, start, before, watch)
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
    # Measure the window; start again when the script moves to another training loader.
    while True:
        with suppress(LoopMoved):
            first = feed.take()
            run = Run(feed, trainer, feed.queue_capacity, start.ends_at)
            run.longest_s = feed.start_s + feed.first_wait_s
            after_block = after_block_of(job, place, dump, run)
            measurement = measure(run, job.window, first, start, after_block)
            if not feed.is_moving:
                break
    if not feed.knows_waits:
        measurement = _without_waits(measurement)
    measurement = _add_notes(measurement, scene)
    dump.before_deadline()

    # Measure the extras, in batches that autotune takes from the loader itself.
    extras = job.extras
    if not isinstance(feed, ScriptFeed):
        # The script makes its batches itself, also for steps with and without a mode.
        extras = Extras(what_if=extras.what_if, stretch_s=extras.stretch_s)
    if ranks() > 1:
        # The other ranks run on: steps past an epoch's end would meet their collectives there.
        extras = extras.model_copy(
            update=dict.fromkeys(("device_ceiling", "copy_ceiling", "breakdown", "what_if"), False)
        )
    if extras != Extras(stretch_s=extras.stretch_s):
        if isinstance(feed, ScriptFeed):
            feed.take_over()
        with ended_when_stuck(longest_after_s(measurement, job.config), place.report):
            measurement = measure_after_window(
                run,
                extras,
                measurement,
                lambda known: place.keep(of_rank(known, place, scene.device)),
                place.folder.path,
            )
    return of_rank(measurement, place, scene.device)


def _without_waits(measurement: Measurement) -> Measurement:
    """Remove the data waits, which were not observed, and the busy fraction derived from them."""
    readings = tuple(
        reading for reading in measurement.busy_readings if reading.source != WAIT_SOURCE
    )
    fraction = source = None
    if readings:
        fraction = readings[0].fraction
        source = readings[0].source
    return measurement.model_copy(
        update={
            "data_wait_fraction": None,
            "busy_readings": readings,
            "busy_fraction": fraction,
            "busy_source": source,
        }
    )


def _add_notes(measurement: Measurement, scene: Scene) -> Measurement:
    """Add notes on time outside training and on ranks, and count the host memory of all ranks."""
    feed = scene.feed
    ranks = scene.trainer.config.process_count
    trained_s = feed.side_batches.trained_s if isinstance(feed, ScriptFeed) else 0.0
    outside_s = feed.outside_s - trained_s
    notes = measurement.notes
    if outside_s >= _REPORTED_FROM_S:
        notes = (*notes, outside_training(seconds=outside_s, epochs=feed.epochs))
    if isinstance(feed, ScriptFeed):
        notes = (*notes, *_notes_on_other_loaders(feed, scene.sightings))
    if ranks > 1 and not scene.device.has_own_memory:
        # The other ranks' process trees take as much host memory as this one's.
        peak_bytes = measurement.memory.peak_bytes * ranks
        memory = measurement.memory.model_copy(
            update={
                "peak_bytes": peak_bytes,
                "to_come_bytes": measurement.memory.to_come_bytes * ranks,
            }
        )
        measurement = measurement.model_copy(
            update={"memory": memory, "peak_memory_bytes": peak_bytes}
        )
    if ranks > 1:
        notes = (*notes, seen_on_rank_0(ranks))
        # The other ranks are no children of this process, but no other programs either.
        measurement = measurement.model_copy(update={"host_load": None})
    return measurement.model_copy(update={"notes": notes})


def _notes_on_other_loaders(feed: ScriptFeed, seen: Sightings) -> Iterator[Note]:
    """Yield notes on training loaders other than the one that the probe found."""
    side_batches = feed.side_batches
    site = seen.site_of(feed.loader)
    if side_batches.trained_s >= _REPORTED_FROM_S and side_batches.site is not None:
        waiting = min(1.0, side_batches.waited_s / side_batches.trained_s)
        yield other_training(
            place=_numbered_place(side_batches.site),
            seconds=side_batches.trained_s,
            waiting=waiting,
        )
    if feed.has_moved and site is not None:
        yield training_moved(place=_place(site), batch_size=site.batch_size)


class _Before(NamedTuple):
    """The process before the script's first line."""

    modules: frozenset[str]
    """Modules imported."""
    variables: Mapping[str, str]
    """Environment variables."""


def _probe(
    job: messages.ProbeJob,
    place: Place,
    start: Start,
    before: _Before,
    watch: Watch | None,
    scene: Scene,
) -> RankReport:
    """Observe some steps of a script, and return its baseline and facts.

    Args:
        job: The probe job.
        place: The folder that the report goes to.
        start: When this process began, and when it must end.
        before: The process before the script's first line.
        watch: Clock of the script's own run; None if it is not watched.
        scene: The training loop that was found.
    """
    seen = scene.sightings
    feed = scene.feed

    def report(*, is_parted: bool = True) -> RankReport:
        """Return the baseline and the facts, as far as they are known."""
        loader = scene.loader
        command = job.command or ()
        placeholders = placeholders_in(command)
        observed = seen.observed(job.config, loader, ranks(), placeholders)
        is_in_process = python_start(filled(command, job.config)) is not None
        script = seen.facts(
            observed,
            loader,
            placeholders,
            modules=installed_modules(before.modules),
            is_in_process=is_in_process and is_own_python(command[0]),
        )
        return _done(
            facts=seen.workload_facts(observed, loader, script, is_sharded=is_parted),
            variables=changed_variables(before.variables),
            environment=describe(scene.device, job_blocks=job.process.blocks_launches),
            conditions=conditions_before(gpus_used(scene.device), start.before),
        )

    # Observe steps until there are enough, or enough time has passed; go on while they are watched.
    if watch is not None:
        watch.device_kind = scene.device.kind
        watch.has_group = ranks() > 1
        if scene.device.kind != "cpu":
            install_device_seams()
    prints = _observe(job, start, scene)
    watched = None
    if watch is not None:
        with watch.apart():
            workers = 0 if scene.loader is None else scene.loader.num_workers
            is_known = workers > 1 and len(prints) >= 2 * workers
            is_parted = not (is_known and repeats_batches(prints, workers))
            known = report(is_parted=is_parted)
        watched = watch_on(watch, job.watch_s, place, scene, known)
        if watched.has_ended:
            return watched.report
    is_parted = True
    loader = scene.loader
    if loader is not None and isinstance(feed, ScriptFeed):
        is_parted = _ends_parted(loader, feed, prints)
    found = report(is_parted=is_parted)
    return (
        found if watched is None else found.model_copy(update={"watched": watched.report.watched})
    )


def _observe(job: messages.ProbeJob, start: Start, scene: Scene) -> list[int]:
    """Let the script train until its facts are known, and return fingerprints of its batches.

    Raises:
        WorkloadFault: It makes too few steps within the deadline.
    """
    prints = list[int]()
    seen = scene.sightings
    begun = perf_counter()
    least_s, short_s = _OBSERVED_S
    steps = span = 0
    if scene.loader is not None:
        seen.samples.clear()
    while True:
        try:
            made = train_once(scene, prints)
        except LoopMoved:
            prints.clear()
            steps = span = 0
            seen.samples.clear()
            seen.spans.clear()
            continue
        steps += made
        span += 1
        if made:
            # A script may take several batches, then train on all of them.
            seen.spans.append(max(1, round(span / made)))
            span = 0
        spent_s = perf_counter() - begun
        has_enough_steps = steps >= _OBSERVED_STEPS and spent_s >= least_s
        has_enough_time = steps >= 2 and spent_s >= short_s
        if (has_enough_steps or has_enough_time) and not scene.feed.is_moving:
            return prints
        if perf_counter() > start.ends_at:
            raise WorkloadFault(
                f"a script must make some optimizer steps within its deadline of "
                f"{job.process.deadline_s:.0f} s, but "
                f"made {steps}; give it shorter steps, or a longer budget.timeout_s"
            )


def _ends_parted(loader: DataLoader[Any], feed: ScriptFeed, prints: list[int]) -> bool:
    """Read ahead into the page cache, end the workers, and return whether they share out the data.

    Args:
        loader: The script's loader.
        feed: Its feed.
        prints: Fingerprints of the batches that were observed.
    """
    dataset = loader.dataset
    workers = loader.num_workers
    feed.take_over()
    with suppress(FeedEnded):  # some streams can be read only once
        if is_stream(dataset):
            until = perf_counter() + _REPEATS_S
            while len(prints) < 2 * workers and perf_counter() < until:
                prints.append(batch_fingerprint(feed.take().batch))
        warm_page_cache(feed)
    feed.stop()
    if not is_stream(dataset):
        return True
    if workers > 1:
        return not repeats_batches(prints, workers)
    return loader.worker_init_fn is not None or _is_sharded(dataset, feed)


def repeats_batches(prints: Sequence[int], num_workers: int) -> bool:
    """Return whether all loader workers deliver the same batches.

    Batches come from the workers in turn, so that each would come `num_workers` times in a row;
    the first and the last ones may be cut off. Batches that are all equal show nothing. Random
    changes of items hide repeats, and count as none.

    Args:
        prints: Fingerprints of consecutive batches.
        num_workers: Workers of the loader, two or more.
    """
    rows = [list(row) for _, row in groupby(prints)]
    has_whole_row = any(len(row) >= min(num_workers, len(prints) - 1) for row in rows)
    return len(rows) > 1 and has_whole_row and len(rows) <= len(prints) / num_workers + 2


def _is_sharded(dataset: Any, feed: ScriptFeed) -> bool:
    """Return whether workers split a stream between them; True if its iterator raises.

    The check iterates the stream twice more, and a live stream may have no item to give. After
    several times its first wait it counts as not split, so that no sample is trained on once for
    each worker. The thread then runs until the process ends, after the probe.
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
    _stop_loader(scene, "the sides of a script can't be measured alone")

    def keep(known: Curves) -> None:
        place.keep(_done(curves=known))

    bench = ScriptBench(scene)
    return _done(curves=trace_curves(bench, job, scene.device, start.ends_at, keep=keep))


def _compare(job: messages.PrecisionJob, start: Start, scene: Scene) -> RankReport:
    feed = _feed_of(scene, "a precision can't be compared to float32")
    return _done(guard=compare_to_float32(scene, feed, job, start.ends_at))


def _train_on_largest(job: messages.StressJob, start: Start, scene: Scene) -> RankReport:
    loader = _stop_loader(scene, "a script's largest samples can't be trained on")
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


def _stop_loader(scene: Scene, fault: str) -> DataLoader[Any]:
    """Return the script's loader, whose workers are ended, for a job that makes copies of it.

    Raises:
        WorkloadFault: The script has several ranks or no DataLoader; `fault` begins the message.
    """
    feed = _feed_of(scene, fault)
    if ranks() > 1:
        raise WorkloadFault(
            f"{fault} in several ranks, of which each goes its own way there; measure one rank"
        )
    feed.stop()
    return feed.loader


def _feed_of(scene: Scene, fault: str) -> ScriptFeed:
    """Return the feed of the script's DataLoader, which is iterated here from now on."""
    if not isinstance(scene.feed, ScriptFeed):
        raise WorkloadFault(f"{fault} without a DataLoader")
    scene.feed.take_over()
    return scene.feed


# The session: from torch's calls to the job
#
# The first optimizer step after a loader's batch shows which loader trains; from that loader's next
# batch on, the measurement drives the script (see feeds.Conductor). A script that trains without a
# DataLoader is driven by the forward passes of its largest module.


_STEPS_TO_MOVE = 2
"""Optimizer steps on another loader's batches from which the script may train on that loader.
Source: our convention."""
_LONGEST_TURN_S = 10.0
"""Seconds of training on another loader from which that loader is measured. Source: our
convention."""
_ENDED_EARLY = (
    "a script must train for some seconds to be measured, but it ended before that; give it more "
    "epochs or more steps, as a real training has"
)


def _held_weakly(dataset: object) -> Callable[[], object]:
    """Return a weak reference to a dataset; a strong one to a list, which supports no weak ones."""
    try:
        return ref(dataset)
    except TypeError:
        return lambda: dataset


class Session:
    """Watch a process for its job; `hooks` calls it whenever the script uses torch.

    Args:
        job: The job; None runs the script to its end with the overrides and measures nothing.
        overrides: The settings that the script should have.
        place: The folder that the report goes to.
        do: Function that does the job in a scene, and returns its report; None without a job.
        watch: Clock of the script's own run; None if it is not watched.
    """

    def __init__(
        self,
        job: messages.WorkloadJob | None,
        overrides: Overrides,
        place: Place,
        do: Doer | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.job = job
        self.overrides = overrides
        self.place = place
        self._do = do
        self.sightings = Sightings()
        self.conductor = Conductor(self._measure)
        self.feed: ScriptFeed | StepFeed | None = None
        self.trainer: ScriptTrainer | None = None
        self._applied = Applied(overrides, self.sightings) if job is None else None
        self._is_passive = job is None or os.environ.get("RANK", "0") != "0"
        """True if this process measures nothing: there is no job, or another rank has it."""
        script = None if job is None else job.script
        is_shallow = isinstance(job, messages.TrialJob)
        self._loaders = Loaders(self.sightings, script, is_shallow=is_shallow)
        self._watch = None if self._is_passive else watch
        self._drives_by_forward = self._drives_by_step = False
        self._steps_since_asked = 0
        """Optimizer steps since the training loader was last asked for a batch."""
        self._asked_at = 0.0
        """Time of that request, by perf_counter."""
        self._has_wrapper = False
        """True if another iterator wraps torch's own and changes each batch."""
        self._is_in_step = False
        """True if another loader gave a batch with gradients on since the training loader did."""
        self._has_stepped = False
        self._was_backward = True
        """True if gradients were computed since the last forward pass that counted."""

    @property
    def observes_modes(self) -> bool:
        """True if it is to be known where the script switches debugging modes on."""
        is_compared = isinstance(self.job, messages.TrialJob) and self.job.extras.what_if
        return self._watch is not None or is_compared

    # Loaders

    def loader_made(self, site: LoaderSite, loader: DataLoader[Any], *, is_searched: bool) -> None:
        """Record a loader that was made; `is_searched` if the job's settings apply to it."""
        if self._applied is not None and self._applied.has_checked:
            return
        made = Made(
            site,
            ref(loader),
            (lambda: None) if self._is_passive else _held_weakly(loader.dataset),
            takes_batch_size=loader.batch_size is not None,
            is_between_epochs=isinstance(self.feed, ScriptFeed) and self.feed.may_be_rebuilt,
            is_searched=is_searched,
        )
        self.sightings.made.append(made)

    def before_iter(self, loader: DataLoader[Any]) -> object | None:
        """Return an iterator to use in place of the loader's own; None for its own."""
        if self._is_measuring:
            return None
        self.sightings.iterated(loader)
        if self._is_passive or self._is_another_thread:
            return None
        feed = self.feed
        if self._loaders.is_evaluated(loader):
            self._side_began(loader)
            if isinstance(feed, ScriptFeed):
                feed.side_batches.begin()
            return None
        if isinstance(feed, StepFeed):
            self._side_began(loader)
            return None
        if feed is not None:
            is_rebuilt = feed.may_be_rebuilt and self.sightings.is_rebuilt_from(loader, feed.loader)
            if loader is not feed.loader and not is_rebuilt:
                self._side_began(loader)
                feed.side_batches.begin()
                return None
            if feed.is_own and not self._has_wrapper:
                return HeldBatches(self.conductor)
        counted = self._loaders.begin(loader, is_sure=feed is not None)
        if feed is not None and counted is not None and loader is not feed.loader:
            self._loaders.forget(feed.loader)
            feed.follow(counted)
        return None

    def making_iterator(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        """Give the measured loader, or one that may become it, a short queue at first."""
        is_other_work = self._is_passive or self._is_measuring or self._is_another_thread
        if is_other_work or not torch.is_grad_enabled():
            return nullcontext()
        may_train = id(loader) in self._loaders.counted
        is_followed = may_train if self.feed is None else self.feed.loader is loader
        return self._loaders.depth.applied(loader) if is_followed else nullcontext()

    def iterating(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        """Clock the start of an iterator of the training loader, or of one that may become it."""
        if self._watch is None or self._is_measuring or self._is_side(loader):
            return nullcontext()
        return self._watch.iterating(loader)

    def _is_side(self, loader: DataLoader[Any]) -> bool:
        """Return whether a loader is known not to be the training loader, or is only evaluated."""
        if self.feed is None:
            return not torch.is_grad_enabled() and self._has_stepped
        return self.feed.loader is not loader or not torch.is_grad_enabled()

    def _side_began(self, loader: DataLoader[Any]) -> None:
        if self._watch is not None:
            self._watch.side_began(type(loader.dataset).__name__)

    def after_iter(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Record a loader's new iterator."""
        if self._is_passive or self._is_measuring:
            return
        inner = torchs_own(iterator)
        self._has_wrapper = inner is not iterator
        is_evaluation = self._loaders.is_evaluated(loader)
        # A subclass may return a generator, which takes no attributes.
        with suppress(AttributeError):
            inner.autotune_loader = loader
            inner.autotune_is_evaluation = is_evaluation
        if is_evaluation:
            return
        begun = self._loaders.began(loader)
        if isinstance(self.feed, ScriptFeed) and loader is self.feed.loader:
            self.feed.began_epoch(inner, begun)

    def on_next(self, iterator: Any) -> Any:
        """Return the batch that the script asks for."""
        loader: DataLoader[Any] | None = getattr(iterator, "autotune_loader", None)
        feed = self.feed
        # Once the feed is dry, forward passes drive the script.
        has_given_up = isinstance(feed, ScriptFeed) and feed.is_dry
        if loader is None or self._is_measuring or has_given_up:
            # The measurement takes and counts the batches of the loaders that it has made itself.
            is_own = self._is_measuring and not self._is_another_thread
            return plain_next(iterator) if is_own else uncounted(iterator)
        if isinstance(feed, ScriptFeed):
            return self._next_of(loader, iterator, feed)
        if iterator.autotune_is_evaluation:
            return self._uncounted(iterator)
        with self._fetching(loader):
            if feed is None and loader is self._loaders.training:
                counted = self._loaders.counted[id(loader)]
                depth = self._loaders.depth
                return self._start(ScriptFeed(self.conductor, counted, iterator, depth, ranks()))
            return self._loaders.next(loader, iterator)

    def _fetching(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        """Clock a request for a batch of the training loader."""
        return nullcontext() if self._watch is None else self._watch.fetching(loader)

    def _uncounted(self, iterator: Any) -> Any:
        """Return a batch of a loader that is not measured."""
        try:
            batch = uncounted(iterator)
        except StopIteration:
            if self._watch is not None:
                self._watch.side_ended()
            raise
        if self._watch is not None:
            self._watch.side_seen()
        return batch

    def _next_of(self, loader: DataLoader[Any], iterator: Any, feed: ScriptFeed) -> Any:
        """Return a batch of the training loader or of another one, while the measurement runs."""
        is_side = iterator.autotune_is_evaluation or self._is_another_thread
        if not is_side and loader is not feed.loader and self._has_moved_to(loader, feed):
            feed.move(self._loaders.moved(feed.loader, loader))
            feed.began_epoch(iterator, perf_counter())
        if loader is feed.loader and not is_side:
            self.sightings.side_batches += self._is_in_step
            self._is_in_step = False
            feed.side_batches.on_training()
            feed.ask_of(iterator)
            self._steps_since_asked = 0
            self._asked_at = perf_counter()
            with self._fetching(loader):
                return self.conductor.ask()
        if self._is_another_thread:
            return uncounted(iterator)
        return self._side_batch(loader, iterator, feed.side_batches)

    def _has_moved_to(self, loader: DataLoader[Any], feed: ScriptFeed) -> bool:
        """Return whether the script now trains on another loader than the measured one.

        A script that trains on two loaders in turn comes back to the first one soon. If that takes
        longer than the limit, the second loader is measured, and the first one's turns are left
        out.
        """
        if feed.is_own or feed.side_batches.steps < _STEPS_TO_MOVE:
            return False
        is_remade = feed.may_be_rebuilt and self.sightings.is_remade(loader, feed.loader)
        return is_remade or (not feed.has_moved and feed.side_batches.turn_s > _LONGEST_TURN_S)

    def _side_batch(self, loader: DataLoader[Any], iterator: Any, side_batches: SideBatches) -> Any:
        """Return a batch of a loader other than the measured one, and record its wait."""
        # The next steps train on this batch, not on batches that the script kept.
        self._steps_since_asked = 0
        self._is_in_step = torch.is_grad_enabled()
        if side_batches.steps == 1:
            side_batches.site = self.sightings.site_of(loader) or side_batches.site
        asked = perf_counter()
        try:
            batch = self._uncounted(iterator)
        except StopIteration:
            side_batches.end()
            raise
        side_batches.on_batch(perf_counter() - asked)
        return batch

    # Steps

    def before_step(self) -> None:
        """Act before an optimizer's step."""
        self.overrides.before_step()
        self._has_stepped = True
        if self._watch is not None:
            self._watch.enter("optimizer")
        if self._applied is not None:
            self._applied.before_step()

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Act after an optimizer's step."""
        if not self._is_passive and not self.sightings.steps:
            # If a process group is open by the first step, only rank 0 measures.
            self._is_passive = rank() != 0
            if self._is_passive:
                # A loader already being iterated gets its full queue with the next batch.
                self._loaders.depth.end()
                self._watch = None
                uninstall_seams()
        if self._is_passive:
            return
        self.sightings.step(optimizer)
        self._was_backward = True
        self._watch_step()
        if isinstance(self.feed, StepFeed):
            self.feed.has_trained()
        elif self.feed is not None and not self._is_another_thread:
            self.feed.side_batches.on_step()
        if self.trainer is not None:
            if optimizer is self.trainer.optimizer:
                self.trainer.accumulated = 0
            if self._drives_by_step:
                self.conductor.ask()
            else:
                self._check_for_kept_batches()
        elif not self._drives_by_forward and self._loaders.has_none_after_step():
            self._drive_by_forward()

    def _watch_step(self) -> None:
        if self._watch is not None:
            self._watch.leave()
            samples = 0
            workers: tuple[int, ...] = ()
            if isinstance(self.feed, ScriptFeed):
                samples = self.feed.epoch_samples
                workers = self.feed.worker_pids
                if self.feed.is_iterable and workers and not self._watch.is_epoch_cut:
                    self._watch.active_workers = self.feed.active_workers
            self._watch.stepped(self.sightings.most_steps, samples, workers)

    def _check_for_kept_batches(self) -> None:
        """Switch to counting steps if the script trains on batches it kept (itertools.cycle)."""
        feed = self.feed
        if not isinstance(feed, ScriptFeed) or feed.is_dry or self._is_another_thread:
            return
        self._steps_since_asked += 1
        if self._steps_since_asked > feed.batches + STEPS_BEYOND_BATCHES:
            feed.is_dry = True
            feed.side_batches.add(perf_counter() - self._asked_at)
            self._drive_by_forward()

    def on_loss(self, loss: Tensor) -> None:
        """Act before the backward pass of a loss."""
        self._was_backward = True
        if self._watch is not None:
            ddp = self.sightings.ddp
            is_synchronised = ddp is not None and bool(ddp.require_backward_grad_sync)
            self._watch.backward_begins(is_synchronised=is_synchronised)
        self._computes()
        if self.trainer is not None and loss.numel() == 1:
            self.trainer.loss = loss.detach().reshape(())

    def after_backward(self) -> None:
        """Act after a backward pass."""
        if isinstance(self.feed, StepFeed):
            self.feed.has_trained()

    def on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Act before the script calls a module itself, until `release_module_calls`; must not raise."""
        if self._is_passive:
            if not self.overrides.follows_modules:
                release_module_calls()
                return
            trains = is_trained(module)
        else:
            trains = self.sightings.call(module, args, kwargs)
        # In eval mode after the first step it is an evaluation, or a copy being exported.
        if trains and (module.training or not self._has_stepped):
            self.overrides.module(module)

    def calling(self, module: nn.Module) -> AbstractContextManager[None]:
        """Clock the call of an outermost module."""
        if self._watch is None:
            return nullcontext()
        trains = module.training and torch.is_grad_enabled()
        return self._watch.calling(type(module).__name__, trains=trains)

    def inside(self, part: RunPart) -> AbstractContextManager[None]:
        """Clock a part of the script's run."""
        return nullcontext() if self._watch is None else self._watch.inside(part)

    def ddp_made(self, model: DistributedDataParallel) -> None:
        """Record a model that was wrapped in DDP."""
        self.sightings.ddp = model
        self.overrides.ddp_made(model)

    # Measuring

    @property
    def _is_another_thread(self) -> bool:
        """True outside the training thread (a parallel evaluation): it costs training no time."""
        return self.conductor.thread not in {None, get_ident()}

    @property
    def _is_measuring(self) -> bool:
        return self.conductor.is_measuring

    def _drive_by_forward(self) -> None:
        """Start or continue the measurement at each forward pass of the largest module."""
        self._loaders.depth.end()  # no loader is followed any more
        module = self.sightings.main_module
        if module is None:
            self._drives_by_step = True
            if self.feed is None:
                self._start(StepFeed(ranks()))
            return
        self._drives_by_forward = True

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self._computes()
                return
            # Without a backward pass since the last one, this is another view of the same batch.
            if not self._was_backward:
                return
            self._was_backward = False
            if self.feed is not None:
                self.conductor.ask()
                return
            sizes = [tensor.shape[0] for tensor in tensors_of((args, kwargs)) if tensor.ndim]
            self.sightings.samples = sizes[:1]
            samples = sizes[0] if sizes else 1
            is_on_cpu = device_of(self.sightings.main_optimizer).type == "cpu"
            self._start(StepFeed(samples * ranks(), is_timed=is_on_cpu))

        module.register_forward_pre_hook(ask, with_kwargs=True, prepend=True)
        for other in self.sightings.outermost:
            if other is not module:
                other.register_forward_pre_hook(self._computes)

    def _computes(self, *_: object) -> None:
        """Stop the batch clock: the script computes a loss or another module, not a batch."""
        if isinstance(self.feed, StepFeed):
            self.feed.computes()

    def _start(self, feed: ScriptFeed | StepFeed) -> Any:
        """Start the measurement, and return the batch that it gives first."""
        if self._watch is None:
            release_module_calls()
        # A job that the script starts at an epoch's end (a linear probe, say) is not measured.
        unwatch_children()
        optimizer = self.sightings.main_optimizer
        assert self.job is not None  # noqa: S101 - a passive session starts no measurement
        device = open_device(str(device_of(optimizer)), limit_bytes=self.job.process.limit_bytes)
        device.cap_memory()
        self.feed = feed
        self.trainer = ScriptTrainer(self.overrides.config, device, self.conductor, optimizer)
        return self.conductor.ask()

    def _measure(self) -> None:
        """Do the job and end the process; the body of the measuring greenlet, never returns."""
        assert self.feed is not None and self.trainer is not None  # noqa: S101, PT018 - set by _start
        scene = Scene(
            sightings=self.sightings,
            device=self.trainer.device,
            feed=self.feed,
            trainer=self.trainer,
        )
        assert self._do is not None  # noqa: S101 - a session without a job measures nothing
        try:
            report = self._do(scene)
        except FeedEnded:
            report = failure_report(WorkloadFault(_ENDED_EARLY))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit among it
            report = failure_report(error)
        self.end(report)

    def end(self, report: RankReport) -> None:
        """Write the report and end the process at once, without cleanup of the script's own."""
        self.place.end_process(report)

    def script_ended(self, error: BaseException | None = None) -> None:
        """Report what was measured by the script's end; otherwise report that it ended or failed.

        Args:
            error: The exception that ended the script; None if it returned.
        """
        is_cut = self._watch is not None and self._watch.is_epoch_cut
        if is_cut and not self._is_another_thread:
            self.conductor.end()  # the facts are complete, and the script's end may be our doing
        if self._is_passive or self.place.report.exists():
            return
        seen = self.sightings
        is_elsewhere = self._is_another_thread
        if error is not None and not is_clean_exit(error):
            if not is_elsewhere:
                self.end(failure_report(error))
        elif is_elsewhere:  # the training thread has ended
            self.end(failure_report(WorkloadFault(_ENDED_EARLY)))
        elif self.conductor.thread is not None:
            self.conductor.end()
        elif seen.made or seen.steps:
            self.end(failure_report(WorkloadFault(no_loop(seen))))
