"""Parts of benchmarks/gpu.py that search: the starved loop, a CNN on JPEGs, GPT-2 small, and a search left to itself.

What a search recommends is held against the ceilings that its own runs have measured, and against a plain loop.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

from autotune import Measurement, SearchResult
from autotune.apply.cores import usable_cores
from autotune.launch.launcher import Launcher
from autotune.policy import WindowRules
from autotune.protocol.messages import Extras
from autotune.records.ceilings import Headroom, headroom_of
from autotune.records.measurement import WAIT_SOURCE, best_common_source, disagreement
from autotune.report.figures import headroom_in, make_columns
from benchmarks.cases.cpu import Case
from benchmarks.measures.gpu_scale import PLAIN_STARTUP_S, Scale, Task, case_of, one_server, plain
from benchmarks.measures.part_guard import Figures
from benchmarks.measures.recording import say
from benchmarks.yardsticks.product_run import (
    measurement_figures,
    only,
    open_trials,
    search,
    search_figures,
)

__all__ = [
    "search_by_default",
    "search_gpt2",
    "search_jpeg",
    "search_launch_bound",
    "search_starved",
    "sides_of",
]

_SHORTEST_SEARCH_S = 5.0
_LEAST_SEARCH_S = (
    30.0  # a look, a baseline, some trials and what decides: below, a miss says nothing
)
_OF_LOWER = 0.95
_HAND_PICKED = {
    "micro_batch_size": 16,
    "num_workers": 4,
    "pin_memory": True,
    "amp_dtype": "bfloat16",
    "lr": 3e-4,
}
_OVER_HAND_PICKED = 1.2
_IDLE_UP_TO, _BUSY_FROM = 0.2, 0.9
_SIZED_IDLE = 0.15  # what the sized model is busy for without workers, by design: below _IDLE_UP_TO for certain
_MODEL_SHARE = 0.7
"""Of the loader's best rate: what the sized model is made to train at, low enough to be the lower side for certain."""
_SIZED_BATCH = 256
_FEW_LAYERS, _MANY_LAYERS, _MOST_LAYERS = 2, 16, 100
_LAUNCHED_BATCHES = (256, 512, 1024, 2048)
_COMPILES_FROM_S = (
    150.0  # of a part: below, a compilation of GPT-2 leaves no time for anything else
)
_DEFAULT_WITHIN_S = 300.0
_BOTH_CEILINGS = Extras(loader_ceiling=True, device_ceiling=True)
_STANDING_S = 10.0  # of the run that shows where the recommendation stands
_NEEDS_PILLOW = "Pillow is not installed"


def search_starved(task: Task) -> Figures:
    """The linear layer to its loader's ceiling; then the same loader under a model that is the lower side."""
    scale = task.scale
    with one_server() as launcher:
        timeout_s = max(_SHORTEST_SEARCH_S, 0.25 * task.seconds)
        case = case_of("starved", scale)
        first = search(case, timeout_s=timeout_s, device=scale.device, launcher=launcher)
        reached = _reaches_ceiling(case, first, scale, launcher, searched_s=timeout_s)
        task.keep({"linear": _found(first), **reached})
        sizing = _sized_layers(scale, launcher)
        task.keep({"sizing": sizing})
        say(f"starved: {sizing['layers']} layers make the model the lower side")
        case = case_of("starved", scale, layers=sizing["layers"])
        own = {**case.settings, "micro_batch_size": _SIZED_BATCH}
        timeout_s = max(_SHORTEST_SEARCH_S, task.left_s - _plains_s(scale, 2))
        second = search(
            replace(case, settings=own),
            space=only(own, num_workers=_worker_counts(scale), pin_memory=[False, True]),
            timeout_s=timeout_s,
            device=scale.device,
            launcher=launcher,
        )
    busy = _busy_on_both_sides(second)
    why = None if timeout_s >= _LEAST_SEARCH_S else f"the second search had {timeout_s:.0f} s"
    why = (
        sizing["why_impossible"]
        or why
        or ("no source told of both sides" if _rose(busy) is None else None)
    )
    figures: Figures = {
        "sized": _found(second),
        "busy": busy,
        "why_not_judged": reached["why_not_judged"] or why,
        "promises": {
            **reached["promises"],
            "busy_from_under_20_to_over_90_percent": _rose(busy) if why is None else None,
        },
        "plain": {},
    }
    task.keep(figures)
    for name, settings in {"baseline": own, "recommended": _as_tried(second)}.items():
        if task.left_s >= _plains_s(scale, 1):
            figures["plain"][name] = plain("starved", scale, settings, layers=sizing["layers"])
    return figures


def search_launch_bound(task: Task) -> Figures:
    """Narrow layers that the host can't launch fast enough, with batch and compilation open: it is said, and cured."""
    scale, case = task.scale, case_of("launch_bound", task.scale)
    own = {**case.settings, "num_workers": _worker_counts(scale)[-1], "pin_memory": True}
    own["micro_batch_size"] = _LAUNCHED_BATCHES[0]
    with one_server() as launcher:
        timeout_s = _search_s(task, plains=1)
        result = search(
            replace(case, settings=own),
            space=only(
                own,
                micro_batch_size=list(_LAUNCHED_BATCHES[: 2 if scale.is_small else None]),
                compile=[False] if scale.is_small else [False, True],
            ),
            timeout_s=timeout_s,
            device=scale.device,
            launcher=launcher,
        )
    why = None if timeout_s >= _LEAST_SEARCH_S else f"the search had {timeout_s:.0f} s"
    figures = make_columns(result.summary)[0].figures
    headroom = None if figures is None else headroom_in(figures)
    limit = None if headroom is None else headroom.limit
    task.keep(
        {"search": _found(result), **_launch_verdict(_busy_on_both_sides(result), limit, why)}
    )
    if task.left_s < _plains_s(scale, 1):
        return {"plain": {}}
    return {"plain": {"recommended": plain("launch_bound", scale, _as_tried(result))}}


def _launch_verdict(busy: Figures, limit: str | None, why_not_judged: str | None) -> Figures:
    """Judge whether a search has named the host as the baseline's bottleneck, and its winner keeps the device busy."""
    before, after = busy.get("baseline"), busy.get("recommended")
    why = why_not_judged
    if before is None or after is None:
        why = why or "no source told of both sides"
    elif before > _BUSY_FROM:
        why = (
            why
            or f"the baseline was busy for {before:.0%}: here its device holds the loop, not launching"
        )
    return {
        "busy": busy,
        "limit": limit,
        "why_not_judged": why,
        "promises": {
            "is_called_host_bound": None if why else limit == "host",
            "busy_over_90_percent": None if why or after is None else after > _BUSY_FROM,
        },
    }


def search_jpeg(task: Task) -> Figures:
    """A CNN on JPEGs to 95 % of the lowest ceiling; then the plain loop."""
    try:
        case = case_of("jpeg", task.scale)
    except ImportError as error:
        return {"skipped": f"{_NEEDS_PILLOW} ({error})"}
    with one_server() as launcher:
        timeout_s = max(_SHORTEST_SEARCH_S, _search_s(task, plains=1) - _STANDING_S)
        result = search(case, timeout_s=timeout_s, device=task.scale.device, launcher=launcher)
        task.keep({"search": _found(result)})
        task.keep(_reaches_ceiling(case, result, task.scale, launcher, searched_s=timeout_s))
    return {"plain": plain("jpeg", task.scale, _as_tried(result))}


def search_gpt2(task: Task) -> Figures:
    """GPT-2 small against a plain loop in bfloat16 whose batch somebody has picked."""
    scale, case = task.scale, case_of("gpt2", task.scale)
    compiles = task.seconds >= _COMPILES_FROM_S and not scale.is_small
    with one_server() as launcher:
        result = search(
            case,
            space={"compile": [False, True]} if compiles else {},
            timeout_s=_search_s(task, plains=2),
            device=scale.device,
            launcher=launcher,
        )
    was_tried = any(
        one.config.compile and one.outcome not in {"timeout", "pruned"} for one in result.trials
    )
    task.keep({"search": _found(result), "compile_was_tried": was_tried})
    hand = {**_HAND_PICKED, "micro_batch_size": 4} if scale.is_small else _HAND_PICKED
    plains = {"hand_picked": plain("gpt2", scale, hand)}
    task.keep({"plain": plains})
    plains["recommended"] = plain("gpt2", scale, _as_tried(result))
    ratio = plains["recommended"]["samples_per_s"] / plains["hand_picked"]["samples_per_s"]
    return {
        "plain": plains,
        "over_hand_picked": ratio,
        "why_not_judged": None
        if was_tried
        else f"torch.compile was not tried in {task.seconds:.0f} s",
        "promises": {
            "at_least_1.2_times_hand_picked": ratio >= _OVER_HAND_PICKED if was_tried else None
        },
    }


def search_by_default(task: Task) -> Figures:
    """A search of which nothing is given, ended where the part's time is over; judged late only after five minutes."""
    begun = monotonic()
    try:
        with _ended_after(task.seconds):
            result = search(case_of("starved", task.scale), device=task.scale.device)
    except _LateError:
        seconds = monotonic() - begun
        was_late = seconds > _DEFAULT_WITHIN_S
        return {
            "seconds": seconds,
            "why_not_judged": None if was_late else f"it had not ended after {seconds:.0f} s",
            "promises": {"ends_within_5_minutes": False if was_late else None},
        }
    seconds = monotonic() - begun
    return {
        "seconds": seconds,
        "promised_s": result.summary.promised_s,
        "search": _found(result),
        "promises": {"ends_within_5_minutes": seconds <= _DEFAULT_WITHIN_S},
    }


def sides_of(result: SearchResult) -> Figures:
    """Baseline and recommendation: every busy source, fullness, where the time goes, and the ceilings."""
    chosen = result.summary.recommendation
    numbers = {"baseline": 0, "recommended": None if chosen is None else chosen.number}
    return {
        name: _side(_best_seen(result, number))
        for name, number in numbers.items()
        if number is not None
    }


class _LateError(BaseException):
    """A search's time is over; no Exception, so that nothing on its way takes it for a failed trial."""


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise _LateError in here once so many seconds have passed; a part has the process's only alarm."""

    def end(*_: object) -> None:
        raise _LateError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _plains_s(scale: Scale, count: int) -> float:
    return count * (PLAIN_STARTUP_S + scale.skip_s + scale.plain_s)


def _search_s(task: Task, *, plains: int) -> float:
    return max(_SHORTEST_SEARCH_S, task.left_s - _plains_s(task.scale, plains))


def _as_tried(result: SearchResult) -> dict[str, Any]:
    """The recommended settings at the learning rate that trials train with."""
    return {**result.best.model_dump(mode="json"), "lr": result.baseline.lr}


def _found(result: SearchResult) -> Figures:
    return {"sides": sides_of(result), **search_figures(result)}


def _runs_of(result: SearchResult, number: int | None) -> list[Measurement]:
    """Return the measurements of a trial's runs, in order."""
    return [run for one in result.trials if one.number == number for run in one.runs]


def _best_seen(result: SearchResult, number: int | None) -> Measurement | None:
    """The first run that says where the time goes, else the first."""
    runs = _runs_of(result, number)
    return next((run for run in runs if run.breakdown is not None), runs[0] if runs else None)


def _reaches_ceiling(
    case: Case, result: SearchResult, scale: Scale, launcher: Launcher, *, searched_s: float
) -> Figures:
    """Where the recommendation stands in a run of its own, which measures its rate and both ceilings in one process."""
    with open_trials(
        case, device=scale.device, window=WindowRules(), extras=_BOTH_CEILINGS, launcher=launcher
    ) as run_trial:
        seen = run_trial(_as_tried(result)).measurement
    standing = None if seen is None else _standing_of(seen)
    why = f"the search had {searched_s:.0f} s" if searched_s < _LEAST_SEARCH_S else None
    if standing is None:
        why = "the run of the recommendation told no ceilings"
    return {
        "standing": None if standing is None else standing.model_dump(mode="json"),
        "why_not_judged": why,
        "promises": {
            "reaches_95_percent_of_lower_ceiling": standing.share_of_lower >= _OF_LOWER
            if why is None and standing is not None
            else None
        },
    }


def _standing_of(seen: Measurement) -> Headroom | None:
    if seen.loader_ceiling is None or seen.device_ceiling is None:
        return None
    return headroom_of(
        seen.samples_per_s, loader_ceiling=seen.loader_ceiling, device_ceiling=seen.device_ceiling
    )


def _worker_counts(scale: Scale) -> list[int]:
    """None, powers of two, and as many as there are cores."""
    most = 2 if scale.is_small else max(usable_cores(), 1)
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _sized_layers(scale: Scale, launcher: Launcher) -> Figures:
    """How many layers make the device the lower side with all workers, and next to idle without any.

    Two sizes of the model tell what a layer takes, one trial without workers and one with as many as there are cores
    what the loader gives. A workerless loop is busy for device / (device + loader) of its time: that bounds the model.
    """
    workers, sizes = (
        (0, _worker_counts(scale)[-1]),
        (1, 2) if scale.is_small else (_FEW_LAYERS, _MANY_LAYERS),
    )
    device_s, loader_s = [], []
    for layers, count in zip(sizes, workers, strict=True):
        case = case_of("starved", scale, layers=layers)
        rules = WindowRules(max_s=0.5)
        with open_trials(
            case, device=scale.device, window=rules, extras=_BOTH_CEILINGS, launcher=launcher
        ) as run:
            seen = run(
                {**case.settings, "num_workers": count, "micro_batch_size": _SIZED_BATCH}
            ).measurement
        if seen is None or seen.loader_ceiling is None or seen.device_ceiling is None:
            raise RuntimeError(
                f"a model of {layers} layers and its loader must be measured, but were not: {seen}"
            )
        device_s.append(_SIZED_BATCH / seen.device_ceiling)
        loader_s.append(_SIZED_BATCH / seen.loader_ceiling)
    layer_s = max((device_s[1] - device_s[0]) / (sizes[1] - sizes[0]), 1e-9)
    most_s = _SIZED_IDLE / (1 - _SIZED_IDLE) * loader_s[0]
    wanted_s = min(loader_s[1] / _MODEL_SHARE, most_s)
    layers = min(
        max(round(sizes[0] + (wanted_s - device_s[0]) / layer_s), 1),
        3 if scale.is_small else _MOST_LAYERS,
    )
    expected_s = device_s[0] + (layers - sizes[0]) * layer_s
    return {
        "layers": layers,
        "of_layers": sizes,
        "workers": workers,
        "device_batch_s": device_s,
        "loader_batch_s": loader_s,
        "wanted_s": wanted_s,
        "expected_s": expected_s,
        "why_impossible": _why_no_size(expected_s, loader_s),
    }


def _why_no_size(model_s: float, loader_s: Sequence[float]) -> str | None:
    """Why a model of so many seconds a batch can't be both idle without workers and the lower side with all of them."""
    alone, together = loader_s
    if _BUSY_FROM * model_s > together and model_s / (model_s + alone) < _IDLE_UP_TO:
        return None
    return (
        f"a batch takes the loader {alone * 1e3:.1f} ms without workers, {together * 1e3:.1f} ms with all, the sized "
        f"model {model_s * 1e3:.1f} ms: no way from under 20 % to over 90 %"
    )


def _busy_on_both_sides(result: SearchResult) -> Figures:
    """The busy fraction of baseline and recommendation by each source that told of both, and the best of these."""
    told = {name: side.get("busy", {}) for name, side in sides_of(result).items()}
    if len(told) < 2:
        return {"source": None}
    direct = [[source for source in busy if source != WAIT_SOURCE] for busy in told.values()]
    source = best_common_source(direct) or WAIT_SOURCE
    return {
        "source": source,
        **{name: busy.get(source) for name, busy in told.items()},
        "by_source": told,
    }


def _rose(busy: Figures) -> bool | None:
    before, after = busy.get("baseline"), busy.get("recommended")
    if before is None or after is None:
        return None
    return bool(before < _IDLE_UP_TO and after > _BUSY_FROM)


def _side(measurement: Measurement | None) -> Figures:
    if measurement is None:
        return {}
    standing = _standing_of(measurement)
    parts = {} if measurement.breakdown is None else measurement.breakdown.shares()
    rivals = disagreement(measurement.busy_readings)
    return {
        "samples_per_s": measurement.samples_per_s,
        "host_ceiling": measurement_figures(measurement).get("host_ceiling"),
        "busy": {one.source: one.fraction for one in measurement.busy_readings},
        "one_minus_data_wait": 1 - (measurement.data_wait_fraction or 0.0),
        "disagreement": None if rivals is None else rivals[1].fraction - rivals[0].fraction,
        "fullness": None
        if measurement.fullness is None
        else measurement.fullness.model_dump(mode="json"),
        "breakdown": {name: share.fraction for name, share in parts.items()},
        "standing": None if standing is None else standing.model_dump(mode="json"),
        "joules_per_sample": measurement.joules_per_sample,
        "conditions": None
        if measurement.conditions is None
        else measurement.conditions.model_dump(mode="json"),
        "notes": [note.model_dump() for note in measurement.notes],
    }
