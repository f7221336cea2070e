"""The product on a real CUDA GPU: what it claims there, proven in a few calls of under nine minutes each.

Parts come in order of weight; `--list` names them, what each proves and how it stands. Each runs in a process of its
own under a time limit: one that crashes, hangs or takes too long is written down and ended, and the next one runs. A
call runs the parts that fill its time best by what their verdicts need; the others are "skipped", and the next call
goes on with them. The JSON is written after each part. What it promises stands under "promises": true, false, or null
where it could not be judged, with the figures beside it.

    gpu.py                     what the file does not hold yet, then what failed, then what could not be judged
    gpu.py --only gpt2,nccl    these alone, measured anew; the other parts of the file stay
    gpu.py --fresh             all parts, whatever is there
    gpu.py --list              the parts, the seconds that each needs, and how it stands
    gpu.py --summary           what there is

Exit codes: 0; 1 a part failed or a promise was not kept; 2 there is no CUDA GPU here, or a part's name is wrong.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from operator import itemgetter
from time import monotonic
from typing import Any

import pynvml
import torch

from benchmarks.measures import (
    gpu_checks,
    gpu_launch,
    gpu_memory,
    gpu_rates,
    gpu_searches,
    gpu_settings,
    gpu_shared,
    gpu_windows,
)
from benchmarks.measures.gpu_nvml_log import describe_gpu
from benchmarks.measures.gpu_ranks import check_ranks
from benchmarks.measures.gpu_scale import LARGE, QUICK, SMOKE, Scale, Task
from benchmarks.measures.gpu_traces import record
from benchmarks.measures.gpu_watch import cuda_uuid, nvml_handle
from benchmarks.measures.part_guard import Figures, Keep, run_guarded
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    git_revision,
    make_parser,
    read_results,
    say,
    start_recording,
)
from benchmarks.tables.gpu import print_gpu_tables

__all__ = ["PARTS", "Part", "parts_that_fit", "run_parts", "wanted_parts"]

_BUDGET_S = 495.0  # with the last part's overrun and what precedes the first one below nine minutes
_QUICK_BUDGET_S = 220.0
_SMOKE_BUDGET_S = 240.0
_GRACE_S, _SMOKE_GRACE_S = 20.0, 120.0  # beyond its time, before a part is ended
_WORTH_S = 5.0  # more than a part has had, to run what could not be judged again
_NO_GPU, _FAILED = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that is to be proven."""

    run: Callable[[Task], Figures]
    needs_s: float
    """The least with which its promises can be judged: its fork server takes up to 8 s, a look at a workload up to 5 s,
    a trial up to 6 s."""
    most_s: float
    """What it is given when there is time."""
    proves: str


def _part(run: Callable[[Task], Figures], needs_s: float, most_s: float, proves: str) -> Part:
    return Part(run=run, needs_s=needs_s, most_s=most_s, proves=proves)


PARTS: Mapping[str, Part] = {
    "machine": _part(
        lambda _: describe_gpu(),
        5,
        35,
        "what NVML tells of the device: driver, clocks, persistence, MIG",
    ),
    "trial": _part(
        gpu_rates.run_with_everything,
        30,
        50,
        "a trial with every extra ends well, and no figure is missing",
    ),
    "starved": _part(
        gpu_searches.search_starved,
        170,
        190,
        "a loop that waits for data gets to 95 % of its loader's ceiling; under a heavier model from under 20 % to "
        "over 90 % busy",
    ),
    "launch_bound": _part(
        gpu_searches.search_launch_bound,
        120,
        160,
        "a loop that launching holds up is called so, and gets over 90 % busy by batch or compilation",
    ),
    "jpeg": _part(
        gpu_searches.search_jpeg, 90, 110, "a CNN on JPEGs gets to 95 % of the lowest ceiling"
    ),
    "gpt2": _part(
        gpu_searches.search_gpt2,
        180,
        200,
        "GPT-2 small: 1.2 times bfloat16 with a batch picked by hand",
    ),
    "default_search": _part(
        gpu_searches.search_by_default,
        150,
        320,
        "a search left to itself, of the cheapest workload, ends in 5 minutes",
    ),
    "settings": _part(
        gpu_settings.try_settings,
        120,
        190,
        "compile, CUDA graphs, cudnn_benchmark, channels_last and fused: each trains as eager does, and is not slower",
    ),
    "fidelity": _part(
        gpu_rates.compare_to_plain,
        120,
        290,
        "trials have the throughput of plain loops: bias at most 0.5 % where the device holds the loop, 2 % where the "
        "host does",
    ),
    "block_edges": _part(
        gpu_windows.compare_blocks, 120, 140, "blocks of 0.2 s tell what blocks of 1.0 s tell"
    ),
    "launch": _part(
        gpu_launch.measure_launching, 60, 130, "nothing: what slows launching in a loop, by regimes"
    ),
    "shared_process": _part(
        gpu_shared.compare_shared_process,
        120,
        140,
        "trials that share a process tell what trials of their own tell",
    ),
    "slow_build": _part(
        gpu_shared.search_slow_build,
        150,
        170,
        "trials of a job that is slow to build share a process; its search ends as promised",
    ),
    "memory_limit": _part(
        gpu_memory.run_under_limit, 45, 60, "the limit holds, by torch's peak and by NVML's"
    ),
    "out_of_memory": _part(
        gpu_memory.survive_out_of_memory, 70, 90, "a search goes on after out of memory"
    ),
    "memory_line": _part(
        gpu_memory.fit_line, 60, 75, "larger batches take what a line through small ones says"
    ),
    "precision_guard": _part(
        gpu_checks.check_guard, 90, 100, "float16 that breaks a model is refused, the rest passes"
    ),
    "nccl": _part(check_ranks, 75, 90, "DDP and its hooks run over NCCL, with one rank"),
    "stress": _part(
        gpu_memory.stress_winner,
        85,
        95,
        "the largest samples are trained on, and stay under the limit",
    ),
    "diagnosis": _part(
        gpu_checks.check_diagnosis,
        90,
        100,
        "a diagnosis reads the kernels' times, names the loader",
    ),
    "conditions": _part(
        gpu_windows.watch_conditions, 30, 40, "clocks and energy of a window are NVML's own"
    ),
    "trace": _part(record, 40, 50, "nothing: traces and NVML's answers, kept for tests"),
    "trial_start": _part(
        gpu_rates.measure_start, 30, 40, "nothing: how long a trial's start takes"
    ),
    "baselines": _part(
        gpu_rates.measure_baselines, 60, 70, "nothing: plain loops of the baselines"
    ),
}
"""In order of weight."""


def main() -> int:
    begun, arguments = monotonic(), _parse()
    scale = SMOKE if arguments.smoke_cpu else QUICK if arguments.quick else LARGE
    why = None if arguments.smoke_cpu or arguments.summary else _why_no_gpu()
    if why is not None and not arguments.list:
        print(f"benchmarks/gpu.py needs a CUDA GPU, but {why}.", file=sys.stderr)
        return _NO_GPU
    if arguments.list:
        _list({} if why is not None else _recording(arguments, scale).results)
        return 0
    recording = _recording(arguments, scale)
    if not arguments.summary:
        parts = wanted_parts(recording.results, arguments.only, scale.time_share)
        say(
            f"{len(parts)} parts: {', '.join(parts) or 'nothing is missing; --fresh or --only measures anew'}"
        )
        run_parts(
            parts, recording, scale, arguments.budget_s - (monotonic() - begun), arguments.regimes
        )
    print_gpu_tables(recording.results)
    print(f"\n{recording.path}")
    return _FAILED if any(_is_bad(part, scale) for part in recording.results.values()) else 0


def wanted_parts(
    results: Mapping[str, Mapping[str, Any]], only: Sequence[str], time_share: float = 1.0
) -> dict[str, Part]:
    """The parts to run, in order: those named; else those without figures, then what failed, then what was not judged.

    What could not be judged is wanted again only where it can be given more time than it had.
    """
    parts = {
        name: replace(part, needs_s=time_share * part.needs_s, most_s=time_share * part.most_s)
        for name, part in PARTS.items()
    }
    if only:
        return {name: part for name, part in parts.items() if name in only}
    left = {
        name: part
        for name, part in parts.items()
        if "skipped" in results.get(name, {"skipped": ""})
    }
    failed = {name: part for name, part in parts.items() if "error" in results.get(name, {})}
    again = {
        name: replace(part, needs_s=results[name]["given_s"] + _WORTH_S)
        for name, part in parts.items()
        if results.get(name, {}).get("why_not_judged")
        and results[name]["given_s"] + _WORTH_S <= part.most_s
    }
    return {
        **left,
        **{name: part for name, part in {**failed, **again}.items() if name not in left},
    }


def parts_that_fit(parts: Mapping[str, Part], left_s: float) -> list[str]:
    """Choose the parts that use the time best: the most needed seconds, those of earlier parts counting for more.

    A second of the first of n parts counts n, of the last one 1, so that what is left over is filled and a part gives
    way only to a fuller use of the time. Returns names in the order of `parts`.
    """
    fullest: list[tuple[float, tuple[str, ...]]] = [(0.0, ())] * (
        int(max(left_s, 0.0)) + 1
    )  # by seconds of time
    for place, (name, part) in enumerate(parts.items()):
        needs_s = ceil(part.needs_s)
        worth = (len(parts) - place) * needs_s
        for seconds in range(len(fullest) - 1, needs_s - 1, -1):
            before, names = fullest[seconds - needs_s]
            fullest[seconds] = max(
                fullest[seconds], (before + worth, (*names, name)), key=itemgetter(0)
            )
    return list(fullest[-1][1])


def run_parts(
    parts: Mapping[str, Part],
    recording: Recording,
    scale: Scale,
    budget_s: float,
    regimes: Sequence[str] = (),
) -> None:
    """Run the parts that fit, and write each down; one that is skipped keeps its figures.

    What fits is chosen again after each part, which seldom takes just what it needs.
    """
    ends_at, left = monotonic() + budget_s, dict(parts)
    while chosen := parts_that_fit(left, ends_at - monotonic()):
        part = left.pop(chosen[0])
        kept_for_others_s = sum(left[name].needs_s for name in chosen[1:])
        seconds = min(part.most_s, ends_at - monotonic() - kept_for_others_s)
        _run_part(chosen[0], part, recording, scale, seconds, regimes)
    left_s = max(ends_at - monotonic(), 0.0)
    for name, part in left.items():
        why = f"needs {part.needs_s:.0f} s, {left_s:.0f} s are left"
        say(f"{name}: skipped: {why}")
        if "skipped" in recording.results.get(name, {"skipped": ""}):
            recording.add(name, {"skipped": f"{why}; the next call goes on with it"})


def _run_part(
    name: str,
    part: Part,
    recording: Recording,
    scale: Scale,
    seconds: float,
    regimes: Sequence[str],
) -> None:
    say(f"{name}: up to {seconds:.0f} s")
    begun, folder = monotonic(), recording.path.with_suffix("")
    kept = folder / f"{name}.kept.json"
    limit_s = seconds + (_SMOKE_GRACE_S if scale.is_small else _GRACE_S)

    def work(keep: Keep) -> Figures:
        return part.run(
            Task(scale=scale, seconds=seconds, folder=folder, keep=keep, regimes=regimes)
        )

    figures = run_guarded(work, limit_s=limit_s, kept=kept)
    if "error" in figures:
        say(f"{name}: failed: {figures['error'].splitlines()[-1]}")
    stamps = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "revision": git_revision()}
    recording.add(name, {**stamps, "given_s": seconds, "wall_s": monotonic() - begun, **figures})
    kept.unlink(missing_ok=True)  # it is in the file


def _recording(arguments: argparse.Namespace, scale: Scale) -> Recording:
    recording = start_recording("gpu", arguments, _machine(scale.device))
    recording.results |= read_results(recording.path, fresh=arguments.fresh)
    return recording


def _list(results: Mapping[str, Mapping[str, Any]]) -> None:
    for name, part in PARTS.items():
        print(f"{name:16}{part.needs_s:4.0f} s  {_state(results.get(name)):12}{part.proves}")


def _state(part: Mapping[str, Any] | None) -> str:
    """How a part stands, in two words at the most."""
    if part is None:
        return "never run"
    if (ended := next((one for one in ("error", "skipped") if one in part), None)) is not None:
        return {"error": "failed", "skipped": "skipped"}[ended]
    told = set(part.get("promises", {}).values())
    return (
        "broken"
        if False in told
        else "not judged"
        if None in told
        else "kept"
        if told
        else "recorded"
    )


def _parse() -> argparse.Namespace:
    parser = make_parser(
        __doc__ or "",
        f"{_QUICK_BUDGET_S:.0f} s a call, three tenths of each part's time, short plain loops",
    )
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help=f"seconds of a call ({_BUDGET_S:.0f})"
    )
    parser.add_argument(
        "--only", type=_names, default=[], metavar="NAME[,NAME]", help="these parts alone, anew"
    )
    parser.add_argument(
        "--regimes",
        type=_regimes,
        default=[],
        metavar="NAME[,NAME]",
        help="of the part `launch`, these alone",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what there is")
    parser.add_argument(
        "--list", action="store_true", help="name the parts, what each proves, and how it stands"
    )
    parser.add_argument("--summary", action="store_true", help="run nothing, print what there is")
    parser.add_argument("--smoke-cpu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.budget_s is None:
        usual = _SMOKE_BUDGET_S if arguments.smoke_cpu else _BUDGET_S
        arguments.budget_s = _QUICK_BUDGET_S if arguments.quick else usual
    return arguments


def _names(text: str) -> list[str]:
    return _known(text, list(PARTS), "parts")


def _regimes(text: str) -> list[str]:
    return _known(text, [regime.name for regime in gpu_launch.REGIMES], "regimes")


def _known(text: str, known: Sequence[str], what: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{what} are {', '.join(known)}, but got {', '.join(unknown)}"
        )
    return names


def _why_no_gpu() -> str | None:
    """Why there is no CUDA GPU; torch is not asked: parts are forked from here, and CUDA does not outlive a fork."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        cuda_uuid()
    except OSError as error:
        return str(error)
    return None


def _machine(device: str) -> dict[str, Any]:
    """The machine; a product that can't describe it must not keep the parts from running, nor change their file."""
    try:
        return describe_machine(device)
    except Exception:  # noqa: BLE001 - written down as a figure
        return {"device_name": _nvml_name(), "error": traceback.format_exc()}


def _nvml_name() -> str:
    """The device's name by NVML, which is torch's as well; of an instance of MIG that of its GPU."""
    try:
        name: str = pynvml.nvmlDeviceGetName(nvml_handle(cuda_uuid()))
    except (pynvml.NVMLError, OSError) as error:
        return f"unknown machine, {error}"
    pynvml.nvmlShutdown()
    return name


def _is_bad(part: Mapping[str, Any], scale: Scale) -> bool:
    """It failed, or a promise was not kept; what is promised of a GPU is not promised of a CPU."""
    return "error" in part or (not scale.is_small and False in part.get("promises", {}).values())


if __name__ == "__main__":
    sys.exit(main())
