"""What each kind of job does inside a script, once its training loop is found: the counterparts of jobs/ and trial.py.

Comes in: a Scene, in which measuring has the lead. Goes out: the job's report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

from torch.utils.data import BatchSampler

from autotune.messages.workload import other_training, outside_training, seen_on_rank_0, training_moved
from autotune.note import Note
from autotune.protocol import jobs
from autotune.protocol.attach import is_own_python
from autotune.protocol.jobs import NO_EXTRAS
from autotune.protocol.reports import RankReport
from autotune.records.diagnosis import Curves
from autotune.records.measurement import Measurement
from autotune.records.stress_check import sample_scan_s
from autotune.records.trial import TrialResult
from autotune.records.utilization import WAIT_SOURCE
from autotune.settings.command import filled, placeholders_in, python_start
from autotune.settings.workload import LoaderSite, Workload
from autotune.worker.after_window.extra_steps import measure_after_window
from autotune.worker.attach.loop.bench import ScriptBench, loader_like
from autotune.worker.attach.loop.feeds import ScriptFeed
from autotune.worker.attach.loop.guard import compare_to_float32
from autotune.worker.attach.loop.scene import Doer, Scene, ranks
from autotune.worker.attach.loop.sightings import Sightings
from autotune.worker.failure.hang_dump import HangDump
from autotune.worker.jobs.curves import trace_curves
from autotune.worker.jobs.largest_batch import largest_batch
from autotune.worker.jobs.probe import is_sharded, warm_page_cache
from autotune.worker.jobs.stress import stress_figures
from autotune.worker.measure.batch_sizes import unwrapped
from autotune.worker.measure.conditions import conditions_before
from autotune.worker.measure.feed import Feed, FeedEnded, LoopMoved
from autotune.worker.measure.loop import Run
from autotune.worker.place import Place, Start
from autotune.worker.preload import changed_variables, installed_modules
from autotune.worker.setup.build import WorkloadFault, is_stream
from autotune.worker.setup.environment import describe
from autotune.worker.trial import after_block_of, ended_when_stuck, gpus_used, longest_after_s, measure, of_rank

__all__ = ["doer_of"]

_OBSERVED_STEPS = 8
"""Optimizer steps that a probe watches: our convention; the batches between them give the accumulation."""
_OBSERVED_S = (1.0, 20.0)
"""Seconds that it watches at least, and after which two steps are enough: our convention."""
_LONGEST_ITEM_S, _FIRST_WAITS = 5.0, 4.0
"""Seconds, or first waits that were seen, in which a stream must give two first items once more: our convention."""
_WORTH_TELLING_S = 0.1
"""Seconds of a window spent on other than training from which it is said: our convention."""


def doer_of(job: jobs.WorkloadJob, place: Place, dump: HangDump, start: Start) -> Doer:
    """What does a job in a scene; to be asked right before the script's first line."""
    match job:
        case jobs.TrialJob():
            return partial(_measure_trial, job, place, dump, start)
        case jobs.ProbeJob():
            return partial(_probe, job, start, frozenset(sys.modules), dict(os.environ))
        case jobs.CurvesJob():
            return partial(_trace, job, place, start)
        case jobs.PrecisionJob():
            return partial(_compare, job, start)
        case jobs.StressJob():
            return partial(_train_on_largest, job, start)


def _done(**found: object) -> RankReport:
    return RankReport.model_validate({"result": TrialResult(outcome="ok"), **found})


def _measure_trial(job: jobs.TrialJob, place: Place, dump: HangDump, start: Start, scene: Scene) -> RankReport:
    feed, trainer = scene.feed, scene.trainer
    while True:
        with suppress(LoopMoved), ExitStack() as at_end:
            first = feed.take()
            run = Run(feed, trainer, feed.queue_capacity, start.ends_at)
            run.longest_s = feed.start_s + feed.first_wait_s
            measurement = measure(run, job.window, first, start, after_block_of(job, place, dump, run, at_end))
            if not feed.is_moving:
                break
    measurement = _with_remarks(measurement if feed.knows_waits else _without_waits(measurement), scene)
    dump.before_deadline()
    extras = job.extras if isinstance(feed, ScriptFeed) else NO_EXTRAS
    if ranks() > 1:  # the other ranks go on: steps beyond an epoch's end would meet what they do there
        extras = extras.model_copy(update={"device_ceiling": False, "copy_ceiling": False, "breakdown": False})
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
    readings = tuple(reading for reading in measurement.busy_readings if reading.source != WAIT_SOURCE)
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
    feed, ranks = scene.feed, scene.trainer.config.process_count
    trained_s = feed.beside.trained_s if isinstance(feed, ScriptFeed) else 0.0
    remarks = measurement.remarks
    if feed.outside_s - trained_s >= _WORTH_TELLING_S:
        remarks = (*remarks, outside_training(seconds=feed.outside_s - trained_s, epochs=feed.epochs))
    if isinstance(feed, ScriptFeed):
        remarks = (*remarks, *_of_other_loaders(feed, scene.sightings))
    if ranks > 1 and not scene.device.has_own_memory:  # the other ranks' trees are as large as this one's
        memory = measurement.memory.model_copy(update={"peak_bytes": measurement.memory.peak_bytes * ranks})
        measurement = measurement.model_copy(update={"memory": memory, "peak_memory_bytes": memory.peak_bytes})
    if ranks > 1:
        remarks = (*remarks, seen_on_rank_0(ranks))
    return measurement.model_copy(update={"remarks": remarks})


def _of_other_loaders(feed: ScriptFeed, seen: Sightings) -> Iterator[Note]:
    """Yield notes on other training loaders than the one that the probe has found."""
    beside, site = feed.beside, seen.site_of(feed.loader)
    if beside.trained_s >= _WORTH_TELLING_S and beside.site is not None:
        waiting = min(1.0, beside.waited_s / beside.trained_s)
        yield other_training(place=_place_of(beside.site), seconds=beside.trained_s, waiting=waiting)
    if feed.has_moved and site is not None:
        yield training_moved(place=_place_of(site), batch_size=site.batch_size)


def _place_of(site: LoaderSite) -> str:
    return f"{Path(site.file).name}, line {site.line}"


def _probe(
    job: jobs.ProbeJob,
    start: Start,
    modules: frozenset[str],
    variables: Mapping[str, str],
    scene: Scene,
) -> RankReport:
    """Watch some steps of a script that began with these modules and variables."""
    seen, feed, loader = scene.sightings, scene.feed, scene.loader
    begun, least = perf_counter(), _OBSERVED_S
    steps = span = 0
    if loader is not None:
        seen.samples.clear()
    while True:
        try:
            delivery = feed.take()
        except LoopMoved:
            loader, steps, span = scene.loader, 0, 0
            seen.samples.clear()
            seen.spans.clear()
            continue
        seen.samples.append(delivery.samples // ranks())
        seen.shapes.see(delivery.batch)
        seen.batches += 1
        before = dict(seen.steps)
        scene.trainer.train(delivery.batch)
        made = max((count - before.get(optimizer, 0) for optimizer, count in seen.steps.items()), default=0)
        steps, span = steps + made, span + 1
        if made:
            seen.spans.append(max(1, round(span / made)))  # a script may ask for several batches, then train on all
            span = 0
        spent_s = perf_counter() - begun
        is_enough = (steps >= _OBSERVED_STEPS and spent_s >= least[0]) or (steps >= 2 and spent_s >= least[1])
        if is_enough and not feed.is_moving:
            break
        if perf_counter() > start.ends_at:
            raise WorkloadFault(
                f"a script must make some optimizer steps within its deadline of {job.process.deadline_s:.0f} s, but "
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
            is_parted = loader.worker_init_fn is not None or loader.num_workers > 1 or _is_sharded(loader.dataset, feed)
    has_python_start = python_start(filled(job.command or (), job.config)) is not None
    own = {
        "modules": installed_modules(modules),
        "is_in_process": job.command is not None and is_own_python(job.command[0]) and has_python_start,
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

    The stream is iterated twice more for that, and a live one may have no item to give: after several times its first
    wait it counts as not shared out, which keeps its samples from being trained on once a worker. The thread is left to
    the end of the process, after the probe.
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


def _trace(job: jobs.CurvesJob, place: Place, start: Start, scene: Scene) -> RankReport:
    if not isinstance(scene.feed, ScriptFeed):
        raise WorkloadFault("the sides of a script can't be measured alone without a DataLoader")
    _refuse_ranks("the sides of a script can't be measured alone")
    scene.feed.take_over()
    scene.feed.stop()

    def keep(known: Curves) -> None:
        place.keep(_done(curves=known))

    return _done(curves=trace_curves(ScriptBench(scene), job, scene.device, start.ends_at, keep=keep))


def _compare(job: jobs.PrecisionJob, start: Start, scene: Scene) -> RankReport:
    if not isinstance(scene.feed, ScriptFeed):
        raise WorkloadFault("a precision can be compared to float32 only where the script has a DataLoader")
    return _done(guard=compare_to_float32(scene, job, start.ends_at))


def _refuse_ranks(what: str) -> None:
    if ranks() > 1:
        raise WorkloadFault(f"{what} in several ranks, of which each goes its own way there; measure one rank")


def _train_on_largest(job: jobs.StressJob, start: Start, scene: Scene) -> RankReport:
    feed, loader = scene.feed, scene.loader
    if loader is None or not isinstance(feed, ScriptFeed):
        raise WorkloadFault("without a DataLoader nobody knows a script's largest samples")
    _refuse_ranks("a script's largest samples can't be trained on")
    feed.take_over()
    feed.stop()
    own, batches, now = loader_like(loader, job.config), unwrapped(loader).batch_sampler, perf_counter()
    drawn = Workload(batch_sampler=None if batches is None or type(batches) is BatchSampler else batches)
    scan_until = now + sample_scan_s(start.ends_at - now)
    largest = largest_batch(drawn, own, job.config.micro_batch_size, scan_until)
    fresh = Feed(own)
    first = fresh.start().batch
    return _done(stress=stress_figures(scene.trainer, largest, first, fresh, job, start.ends_at))
