"""Let a script train while it is watched, then end its epoch early and watch what follows.

In: a scene whose facts are known, and the clock of its run. Out: the report with the WatchedRun, also
if the script ends, fails or does not come back meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Timer
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from autotune.protocol.messages import RankReport
from autotune.records.watched_run import Exchange
from autotune.worker.feed import FeedEnded, LoopMoved
from autotune.worker.place import Place
from autotune.worker.script.bench import Scene, ranks, train_once
from autotune.worker.script.feeds import ScriptFeed
from autotune.worker.script.hooks import release_module_calls
from autotune.worker.script.seams import uninstall_seams
from autotune.worker.script.stacks import Sampling
from autotune.worker.script.watch import Watch

_WATCHED_STEPS = 12
"""Optimizer steps to watch at least, if time allows. Source: our convention."""
_MOST_TIMES = 2
"""Multiples of the time asked for that slow steps may take. Source: our convention."""
_SAMPLED_S = 4.0
"""Last seconds of the watch, in which stacks are sampled. Source: our convention: 200 samples show a
share of 10 % within 4 points (95 %)."""
_EPOCH_END_S = 6.0
"""Longest time to watch the end of an epoch that was ended early: its validation, its checkpoint,
and the start of the next one. Source: our convention; the first verdict comes within 20 s of the
first step."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The end of a watch."""

    report: RankReport
    """The report with what was seen."""
    has_ended: bool
    """The script will not train any further."""


def watch_on(
    watch: Watch, seconds: float, place: Place, scene: Scene, known: RankReport
) -> Watched:
    """Let the script train on while it is watched, then end its epoch early and watch what follows.

    A script that does not come back (a validation of hours) is ended with what is known by then.

    Args:
        watch: The clock.
        seconds: Seconds to watch after the first step.
        place: The folder that the report goes to.
        scene: The training loop.
        known: The report so far, which is kept: the script may end, or fail after an epoch that was
            ended early.
    """
    feed = scene.feed
    epoch_batches = feed.epoch_batches

    def result(*, has_ended: bool) -> Watched:
        watch.exchange = _exchange(watch, scene.sightings.ddp)
        run = watch.finish(epoch_batches)
        release_module_calls()
        uninstall_seams()
        return Watched(known.model_copy(update={"watched": run}), has_ended)

    def ended_after(seconds: float) -> Timer:
        """Start a timer that ends the process with what is known by then."""

        def end() -> None:
            report = known
            try:
                report = result(has_ended=True).report
            finally:  # whatever the training thread does meanwhile
                place.end_process(report)

        timer = Timer(seconds, end)
        timer.daemon = True
        timer.start()
        return timer

    most_s = _MOST_TIMES * seconds
    late = ended_after(max(_EPOCH_END_S, most_s + _EPOCH_END_S - watch.elapsed_s))
    try:
        _watch_steps(watch, seconds, place, scene)
        # Of several ranks one alone must not leave the epoch; of an epoch of unknown length it is
        # not known how often its end comes.
        is_cut = not feed.epochs and epoch_batches is not None and ranks() == 1
        if isinstance(feed, ScriptFeed) and is_cut:
            with watch.apart():
                run = watch.so_far(epoch_batches)
                place.keep(known.model_copy(update={"watched": run}))
            late.cancel()
            late = ended_after(_EPOCH_END_S)
            watch.is_epoch_cut = True
            feed.end_epoch()
            for _ in range(2):  # the second request ends the first batch's step
                with suppress(LoopMoved):
                    train_once(scene)
    except FeedEnded:
        return result(has_ended=True)
    finally:
        late.cancel()
    return result(has_ended=False)


def _watch_steps(watch: Watch, seconds: float, place: Place, scene: Scene) -> None:
    """Watch the script's steps, and sample stacks in the last seconds.

    Raises:
        FeedEnded: The script has ended.
    """
    sampling: Sampling | None = None
    try:
        while watch.elapsed_s < seconds or (
            watch.steps < _WATCHED_STEPS and watch.elapsed_s < _MOST_TIMES * seconds
        ):
            if sampling is None and watch.elapsed_s >= seconds - _SAMPLED_S:
                with watch.apart():
                    sampling = Sampling.start(place.folder.path, _SAMPLED_S)
            with suppress(LoopMoved):
                train_once(scene)
    finally:
        if sampling is not None:
            with watch.apart():
                watch.stacks = sampling.finish()


def _exchange(watch: Watch, ddp: DistributedDataParallel | None) -> Exchange | None:
    """Return the exchange of gradients, timed by DDP itself in some of the iterations.

    Source: torch/csrc/distributed/c10d/logger.cpp: iterations 10 to 20 and every hundredth.
    """
    if ddp is None or not watch.backwards:
        return None
    found: Mapping[str, Any] = {}
    with suppress(Exception):  # torch's own private interface
        found = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call] # noqa: SLF001
    exchange_ns = found.get("avg_backward_comm_time")
    hidden_ns = found.get("avg_backward_compute_comm_overlap_time", 0)
    return Exchange(
        backwards=watch.backwards,
        synchronised=watch.synchronised,
        exposed_s=max(0, exchange_ns - hidden_ns) * 1e-9 if exchange_ns else None,
        exchange_s=exchange_ns * 1e-9 if exchange_ns else None,
        searches_unused=ddp.find_unused_parameters,
        has_unused=bool(found.get("unused_parameter_size")),
    )
