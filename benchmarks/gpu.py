"""The product on a real CUDA GPU, in one command of under nine minutes.

trial_start           a trial's start on CUDA, its context included
ranks                 DDP with one rank, over NCCL: each communication hook, and its rate against a single process
resnet50, gpt2, jpeg  a search each: baseline against recommended, peak memory of every configuration; of both, all
                      sources of the busy fraction side by side, where the time goes, and the ceilings; then 20 s of the
                      recommended configuration in a plain loop, against the short trial
diagnosis             what holds the JPEG workload's own settings, and what to do about it
memory_limit          a search under a limit that its larger batches exceed: what is feasible is under it by torch's own
                      peak and by NVML's view from outside
out_of_memory         a search whose choices hold an absurd batch: the study goes on
precision_guard       searches over precisions: a healthy model trains in each, one that float16 breaks is "diverged"
memory_line           a line through trials of small batches, against larger ones that are then run
stress                a search on samples of varying length: the winner on the largest of them
baselines             the plain loop on the three baselines, in the time that is left

Each part is guarded: its failure is written down with its traceback, and the next one runs. The JSON is written after
each part. Exit codes: 0; 1 a part failed or a promise was not kept; 2 there is no CUDA GPU here.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import gpu_cases
import torch
from cases import Case
from gpu_checks import PROMISES, check_diagnosis, check_guard, check_memory_line, check_stress, sides_of
from gpu_ranks import RANK_PROMISES, check_ranks, print_rank_rates
from gpu_tables import print_gpu_tables
from gpu_watch import GpuWatch
from overhead import measure_trial_start
from plain_loop import run_plain
from product_run import LaunchTimes, TimedLauncher, only, search, search_figures
from recording import Recording, describe_machine, make_parser, say, start_recording

from autotune import SearchResult
from autotune.launch.fork_server import ForkServerLauncher

_BUDGET_S = 510.0
_QUICK_BUDGET_S = 220.0
_SMOKE_BUDGET_S = 300.0
_WORKLOADS = {"resnet50": "resnet50", "gpt2": "gpt2", "jpeg": "jpeg_cnn"}
_SHORTEST_SEARCH_S = 5.0
_PART_GRACE_S = 25.0  # a part that overruns its share by more is ended, so that the others still run
_PLAIN_STARTUP_S = 12.0
_LIMIT_SLACK = 0.01  # NVML counts pages, torch its segments


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How large everything is; shares are parts of the budget."""

    is_small: bool
    device: str
    plain_s: float
    skip_s: float
    start_trials: int
    memory_limit: str
    limited_batches: tuple[int, ...]
    absurd_batches: tuple[int, ...]
    fitted_batches: tuple[int, ...]
    """Of the memory line."""
    line_limit_bytes: int
    shares: Mapping[str, float] = field(
        default_factory=lambda: {
            "trial_start": 0.05,
            "ranks": 0.10,
            "resnet50": 0.14,
            "gpt2": 0.14,
            "jpeg": 0.13,
            "diagnosis": 0.06,
            "memory_limit": 0.07,
            "out_of_memory": 0.07,
            "precision_guard": 0.10,
            "memory_line": 0.08,
            "stress": 0.06,
        }
    )


_LARGE = _Scale(
    is_small=False,
    device="cuda:0",
    plain_s=20.0,
    skip_s=3.0,
    start_trials=3,
    memory_limit="12GiB",
    limited_batches=(4, 8, 16, 64),
    absurd_batches=(8, 16, 24, 65536),
    fitted_batches=(4, 8, 16),
    line_limit_bytes=40 << 30,
)
_QUICK = replace(_LARGE, plain_s=5.0, skip_s=1.0, start_trials=1)
_SMOKE = _Scale(
    is_small=True,
    device="cpu",
    plain_s=2.0,
    skip_s=0.5,
    start_trials=2,
    memory_limit="1GiB",
    limited_batches=(2, 4, 8),
    absurd_batches=(2, 4, 8),
    fitted_batches=(64, 128, 256),
    line_limit_bytes=1 << 30,
)


class _PartTooLongError(Exception):
    """A part has overrun its share of the budget."""


def main() -> int:
    arguments = _parse()
    if not arguments.smoke_cpu and not torch.cuda.is_available():
        print(f"benchmarks/gpu.py needs a CUDA GPU, but torch {torch.__version__} sees none here.", file=sys.stderr)
        return 2
    scale = _SMOKE if arguments.smoke_cpu else _QUICK if arguments.quick else _LARGE
    ends_at = monotonic() + arguments.budget_s
    recording = start_recording("gpu", arguments, _machine(scale.device))
    budget = {name: share * arguments.budget_s for name, share in scale.shares.items()}
    parts: dict[str, Callable[[float], dict[str, Any]]] = {
        "trial_start": partial(_measure_start, scale),
        "ranks": partial(check_ranks, scale.device, is_small=scale.is_small),
        **{name: partial(_tune_and_check, name, scale) for name in _WORKLOADS},
        "diagnosis": partial(_diagnose, scale),
        "memory_limit": partial(_search_under_limit, scale),
        "out_of_memory": partial(_survive_out_of_memory, scale),
        "precision_guard": partial(check_guard, scale.device),
        "memory_line": partial(
            check_memory_line,
            _case("gpt2", scale),
            scale.device,
            batches=scale.fitted_batches,
            limit_bytes=scale.line_limit_bytes,
        ),
        "stress": partial(check_stress, scale.device, scale.memory_limit),
    }
    for name, part in parts.items():
        _run_part(recording, name, part, min(budget[name], ends_at - monotonic()))
    for name in _WORKLOADS:
        _run_part(recording, f"baseline_{name}", partial(_run_baseline, name, scale), ends_at - monotonic())
    print_gpu_tables(recording.results, list(_WORKLOADS))
    print_rank_rates(recording.results["ranks"])
    print(f"\n{recording.path}")
    return 1 if any(_is_bad(part, scale) for part in recording.results.values()) else 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", f"{_QUICK_BUDGET_S:.0f} s for everything, plain loops of 5 s")
    parser.add_argument("--budget-s", type=float, metavar="S", help=f"seconds for everything ({_BUDGET_S:.0f})")
    parser.add_argument("--smoke-cpu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.budget_s is None:
        usual = _SMOKE_BUDGET_S if arguments.smoke_cpu else _BUDGET_S
        arguments.budget_s = _QUICK_BUDGET_S if arguments.quick else usual
    return arguments


def _machine(device: str) -> dict[str, Any]:
    """The machine; a product that can't describe it must not keep the parts from running."""
    try:
        return describe_machine(device)
    except Exception:  # noqa: BLE001 - written down as a figure
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "unknown machine"
        return {"device_name": name, "torch": torch.__version__, "error": traceback.format_exc()}


def _run_part(recording: Recording, name: str, part: Callable[[float], dict[str, Any]], seconds: float) -> None:
    """Run a part in its share of the time; whatever becomes of it is written down."""
    if seconds < _SHORTEST_SEARCH_S:
        recording.add(name, {"skipped": f"no time: {max(seconds, 0):.0f} s were left"})
        return
    say(f"{name}: up to {seconds:.0f} s")
    begun = monotonic()
    try:
        with _at_most(seconds + _PART_GRACE_S):
            figures = part(seconds)
    except Exception as error:  # noqa: BLE001 - the other parts must run
        say(f"{name}: failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        figures = {"error": traceback.format_exc()}
    recording.add(name, {"wall_s": monotonic() - begun, **figures})


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise in the block after so many seconds."""

    def end(_signal: int, _frame: object) -> None:
        raise _PartTooLongError(f"the part took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _measure_start(scale: _Scale, _seconds: float) -> dict[str, Any]:
    def make(folder: Path) -> ForkServerLauncher:
        return ForkServerLauncher(folder / "server.log")

    return measure_trial_start(make, trials=scale.start_trials, device=scale.device)


def _tune_and_check(name: str, scale: _Scale, seconds: float) -> dict[str, Any]:
    """A search, then the recommended configuration in a plain loop."""
    try:
        case = _case(name, scale)
    except ImportError as error:
        say(f"{name}: skipped: {error}")
        return {"skipped": f"Pillow is not installed ({error})"}
    for_search = max(_SHORTEST_SEARCH_S, seconds - scale.plain_s - scale.skip_s - _PLAIN_STARTUP_S)
    result = search(case, space={"grad_accum_steps": 1}, timeout_s=for_search, device=scale.device)
    say(f"{name}: {len(result.trials)} trials, speed-up {result.speedup or float('nan'):.2f}; now the plain loop")
    plain = _plain(name, scale, result.best.model_dump(mode="json"), lr=result.baseline.lr)
    return {
        **_short_against_long(result, plain),
        "sides": sides_of(result),
        "plain": plain,
        "search": search_figures(result),
    }


def _short_against_long(result: SearchResult, plain: dict[str, Any]) -> dict[str, Any]:
    """Relative errors of what the product said of the recommended configuration, the plain loop being the truth."""
    chosen = result.summary.recommendation
    if chosen is None:
        return {}
    record = next(one for one in result.trials if one.number == chosen.number)
    again = [run for one in chosen.confirmations if one.number == chosen.number for run in one.runs]
    truth, trial = plain["samples_per_s"], record.measurement
    confirmed = median(run.samples_per_s for run in again) if again else None
    baseline = result.trials[0].measurement
    return {
        "baseline_samples_per_s": None if baseline is None else baseline.samples_per_s,
        "baseline_busy_fraction": None if baseline is None else baseline.busy_fraction,
        "trial_samples_per_s": None if trial is None else trial.samples_per_s,
        "trial_busy_fraction": None if trial is None else trial.busy_fraction,
        "busy_source": None if trial is None else trial.busy_source,
        "plain_samples_per_s": truth,
        "trial_relative_error": None if trial is None else trial.samples_per_s / truth - 1,
        "confirmed_relative_error": None if confirmed is None else confirmed / truth - 1,
    }


def _diagnose(scale: _Scale, seconds: float) -> dict[str, Any]:
    try:
        case = _case("jpeg", scale)
    except ImportError as error:
        return {"skipped": f"Pillow is not installed ({error})"}
    return check_diagnosis(case, scale.device, seconds)


def _search_under_limit(scale: _Scale, seconds: float) -> dict[str, Any]:
    """Feasible trials are under the limit by torch's own peak and by NVML's; the others have a fitting outcome."""
    case = _case("gpt2", scale)
    space = only(case.settings, micro_batch_size=list(scale.limited_batches))
    result, launches, watch = _watched_search(
        case,
        scale,
        space=space,
        memory_limit=scale.memory_limit,
        n_trials=len(scale.limited_batches),
        timeout_s=seconds,
        method="grid",
    )
    limit = result.summary.limit_bytes
    times = {launch.name: launch for launch in launches}
    trials = [_memory_of(record, times.get(f"trial-{record.number:03d}"), watch) for record in result.trials]
    seen = [
        peak <= limit * (1 + _LIMIT_SLACK)
        for trial in trials
        if trial["outcome"] == "ok"
        for peak in (trial["peak_bytes"], trial["reserved_bytes"], trial["nvml_peak_bytes"])
        if peak is not None
    ]
    outcomes = {trial["outcome"] for trial in trials}
    return {
        "limit_bytes": limit,
        "nvml": watch.why_blind or "seen",
        "feasible_are_under_limit": bool(seen) and all(seen),
        "limit_was_reached": bool(outcomes & {"oom", "over_memory"}),
        "other_outcomes_are_for_memory": outcomes <= {"ok", "oom", "over_memory"},
        "trials": trials,
        "search": search_figures(result),
    }


def _survive_out_of_memory(scale: _Scale, seconds: float) -> dict[str, Any]:
    """The absurd batches end in "oom"; trials or confirmations after them are well."""
    case = _case("gpt2", scale)
    space = only(case.settings, micro_batch_size=list(scale.absurd_batches))
    result, launches, watch = _watched_search(
        case, scale, space=space, memory_limit=1.0, n_trials=len(scale.absurd_batches), timeout_s=seconds, method="grid"
    )
    outcomes = [record.outcome for record in result.trials]
    first = outcomes.index("oom") if "oom" in outcomes else None
    chosen = result.summary.recommendation
    again = [run is not None for one in (chosen.confirmations if chosen else ()) for run in one.rounds]
    return {
        "outcomes": [[record.config.micro_batch_size, record.outcome] for record in result.trials],
        "was_out_of_memory": first is not None,
        "next_trial_after_it": None if first is None or first + 1 == len(outcomes) else outcomes[first + 1],
        "ok_trials_after_it": 0 if first is None else outcomes[first:].count("ok"),
        "ok_confirmations": sum(again),
        "failed_confirmations": len(again) - sum(again),
        "left_in_use_bytes": _left_in_use(watch, launches),
        "search": search_figures(result),
    }


def _run_baseline(name: str, scale: _Scale, seconds: float) -> dict[str, Any]:
    if seconds < scale.plain_s + scale.skip_s + _PLAIN_STARTUP_S:
        return {"skipped": f"no time: {seconds:.0f} s were left"}
    try:
        case = _case(name, scale)
    except ImportError as error:
        return {"skipped": f"Pillow is not installed ({error})"}
    return _plain(name, scale, case.settings, lr=case.settings["lr"])


def _case(name: str, scale: _Scale) -> Case:
    case: Case = getattr(gpu_cases, _WORKLOADS[name])(is_small=scale.is_small)
    return case


def _plain(name: str, scale: _Scale, settings: Mapping[str, Any], *, lr: float) -> dict[str, Any]:
    """The plain loop, and what NVML said of the GPU meanwhile; at the learning rate that trials train with."""
    with GpuWatch() as watch:
        figures = run_plain(
            f"gpu_cases:{_WORKLOADS[name]}",
            {**settings, "lr": lr},
            seconds=scale.plain_s,
            skip_s=scale.skip_s,
            device=scale.device,
            arguments={"is_small": scale.is_small},
        )
    start_s, end_s = figures["started_at"], figures["ended_at"]
    return {
        **figures,
        "busy_fraction": watch.busy_fraction(start_s, end_s),
        "nvml_peak_bytes": watch.peak_bytes(start_s, end_s),
    }


def _watched_search(case: Case, scale: _Scale, **options: Any) -> tuple[SearchResult, list[LaunchTimes], GpuWatch]:
    """A search with the clock around every launch, and NVML's view of all of it."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder, GpuWatch() as watch:
        launcher = TimedLauncher(ForkServerLauncher(Path(folder) / "server.log"))
        try:
            result = search(case, launcher=launcher, device=scale.device, **options)
        finally:
            launcher.close()
    return result, launcher.launches, watch


def _memory_of(record: Any, launch: LaunchTimes | None, watch: GpuWatch) -> dict[str, Any]:
    memory = None if record.measurement is None else record.measurement.memory
    return {
        "micro_batch_size": record.config.micro_batch_size,
        "outcome": record.outcome,
        "reason": record.reason,
        "peak_bytes": None if memory is None else memory.peak_bytes,
        "reserved_bytes": None if memory is None else memory.reserved_bytes,
        "outside_bytes": None if memory is None else memory.outside_bytes,
        "nvml_peak_bytes": None if launch is None else watch.peak_bytes(launch.called_s, launch.returned_s),
    }


def _left_in_use(watch: GpuWatch, launches: list[LaunchTimes]) -> int | None:
    """Device memory that was still in use after the last trial had ended, beyond what was before the first."""
    after = [one.used_bytes for one in watch.samples if launches and one.at_s > launches[-1].returned_s]
    return min(after) - watch.idle_bytes if after and watch.idle_bytes is not None else None


def _is_bad(part: dict[str, Any], scale: _Scale) -> bool:
    """It failed, or a promise was not kept; small models on a CPU reach no limit, so that nothing is promised there."""
    limits = ("feasible_are_under_limit", "limit_was_reached", "other_outcomes_are_for_memory", "was_out_of_memory")
    promises = () if scale.is_small else (*limits, *PROMISES, *RANK_PROMISES)
    return "error" in part or any(part.get(name) is False for name in promises)


if __name__ == "__main__":
    sys.exit(main())
