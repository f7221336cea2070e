"""The product on a real CUDA GPU: what it claims there, proven in one command of under nine minutes.

Parts come in order of weight; `--list` names them and what each proves. Each runs in a process of its own under a time
limit: one that crashes, hangs or takes too long is written down and ended, and the next one runs. The JSON is written
after each part. What it promises stands under "promises": true, false, or null where it could not be judged, with the
figures beside it.

    gpu.py                     every part that the file does not hold yet, or that failed or was skipped
    gpu.py --only gpt2,nccl    these alone, measured anew; the other parts of the file stay
    gpu.py --fresh             all parts, whatever is there
    gpu.py --list              the parts
    gpu.py --summary           what there is

A part named alone gets more time than in a whole run. Exit codes: 0; 1 a part failed or a promise was not kept; 2 there
is no CUDA GPU here, or a part's name is wrong.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import gpu_checks
import gpu_memory
import gpu_rates
import gpu_searches
import gpu_windows
import torch
from gpu_nvml_log import describe_gpu
from gpu_ranks import check_ranks
from gpu_scale import LARGE, QUICK, SMOKE, Scale, Task
from gpu_tables import print_gpu_tables
from gpu_traces import record
from gpu_watch import cuda_uuid
from part_guard import Figures, Keep, run_guarded
from recording import Recording, describe_machine, git_revision, make_parser, read_results, say, start_recording

__all__ = ["PARTS", "Part", "run_parts", "wanted_parts"]

_BUDGET_S = 510.0
_QUICK_BUDGET_S = 220.0
_SMOKE_BUDGET_S = 240.0
_GRACE_S, _SMOKE_GRACE_S = 20.0, 120.0  # beyond its time, before a part is ended
_SHORTEST_S = 5.0
_NO_GPU, _FAILED = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that is to be proven."""

    run: Callable[[Task], Figures]
    seconds: float
    """Of a whole run."""
    most_s: float
    """When there is time."""
    proves: str


def _part(run: Callable[[Task], Figures], seconds: float, proves: str, most_s: float | None = None) -> Part:
    return Part(run=run, seconds=seconds, most_s=1.5 * seconds if most_s is None else most_s, proves=proves)


PARTS: Mapping[str, Part] = {
    "machine": _part(lambda _: describe_gpu(), 5, "what NVML tells of the device: driver, clocks, persistence, MIG"),
    "trial": _part(gpu_rates.run_with_everything, 20, "a trial with every extra ends well, and no figure is missing"),
    "starved": _part(
        gpu_searches.search_starved,
        80,
        "a loop that waits for data gets to 95 % of its loader's ceiling; under a heavier model from under 20 % to "
        "over 90 % busy",
        150,
    ),
    "jpeg": _part(gpu_searches.search_jpeg, 50, "a CNN on JPEGs gets to 95 % of the lower ceiling", 150),
    "gpt2": _part(gpu_searches.search_gpt2, 60, "GPT-2 small: 1.2 times bfloat16 with a batch picked by hand", 300),
    "default_search": _part(gpu_searches.search_by_default, 45, "a search left to itself ends in 5 minutes", 330),
    "fidelity": _part(gpu_rates.compare_to_plain, 50, "a trial's rate is that of 20 s plain loops, within 2 %", 500),
    "block_edges": _part(gpu_windows.compare_blocks, 30, "blocks of 0.2 s tell what blocks of 1.0 s tell", 120),
    "memory_limit": _part(gpu_memory.run_under_limit, 25, "the limit holds, by torch's peak and by NVML's"),
    "out_of_memory": _part(gpu_memory.survive_out_of_memory, 20, "a search goes on after out of memory"),
    "memory_line": _part(gpu_memory.fit_line, 20, "larger batches take what a line through small ones says"),
    "precision_guard": _part(gpu_checks.check_guard, 20, "float16 that breaks a model is refused, the rest passes"),
    "nccl": _part(check_ranks, 20, "DDP and its hooks run over NCCL, with one rank", 60),
    "stress": _part(gpu_memory.stress_winner, 15, "the winner stays under the limit on the largest samples"),
    "diagnosis": _part(gpu_checks.check_diagnosis, 15, "a diagnosis reads the kernels' times and names the loader"),
    "conditions": _part(gpu_windows.watch_conditions, 15, "clocks and energy of a window are NVML's own"),
    "trace": _part(record, 15, "nothing: traces and NVML's answers, kept for tests"),
    "trial_start": _part(gpu_rates.measure_start, 10, "nothing: how long a trial's start takes"),
    "baselines": _part(gpu_rates.measure_baselines, 10, "nothing: plain loops of the baselines", 80),
}
"""In order of weight."""


def main() -> int:
    arguments = _parse()
    if arguments.list:
        for name, part in PARTS.items():
            print(f"{name:16}{part.seconds:4.0f} s  {part.proves}")
        return 0
    scale = SMOKE if arguments.smoke_cpu else QUICK if arguments.quick else LARGE
    if not arguments.smoke_cpu and not arguments.summary and (why := _why_no_gpu()) is not None:
        print(f"benchmarks/gpu.py needs a CUDA GPU, but {why}.", file=sys.stderr)
        return _NO_GPU
    recording = start_recording("gpu", arguments, _machine(scale.device))
    recording.results |= read_results(recording.path, fresh=arguments.fresh)
    if not arguments.summary:
        names = wanted_parts(recording.results, arguments.only)
        say(f"{len(names)} parts: {', '.join(names) or 'nothing is missing; --fresh or --only measures anew'}")
        run_parts({name: PARTS[name] for name in names}, recording, scale, arguments.budget_s)
    print_gpu_tables(recording.results)
    print(f"\n{recording.path}")
    return _FAILED if any(_is_bad(part, scale) for part in recording.results.values()) else 0


def wanted_parts(results: Mapping[str, Mapping[str, Any]], only: Sequence[str]) -> list[str]:
    """The parts to run, in order: those that are named, else those without figures."""
    if only:
        return [name for name in PARTS if name in only]
    return [name for name in PARTS if name not in results or {"error", "skipped"} & results[name].keys()]


def run_parts(parts: Mapping[str, Part], recording: Recording, scale: Scale, budget_s: float) -> None:
    """Run parts one after the other, each in its share of the time that is left; write each down."""
    ends_at = monotonic() + budget_s
    for index, (name, part) in enumerate(parts.items()):
        left_s = ends_at - monotonic()
        share = part.seconds / sum(one.seconds for one in list(parts.values())[index:])
        seconds = min(share * left_s, part.most_s)
        if seconds < min(_SHORTEST_S, part.seconds / 2):
            recording.add(name, {"skipped": f"no time: {max(left_s, 0):.0f} s were left"})
            continue
        say(f"{name}: up to {seconds:.0f} s")
        begun = monotonic()
        limit_s = seconds + (_SMOKE_GRACE_S if scale.is_small else _GRACE_S)
        figures = run_guarded(_work(part, scale, seconds, recording.path.with_suffix("")), limit_s=limit_s)
        if "error" in figures:
            say(f"{name}: failed: {figures['error'].splitlines()[-1]}")
        stamps = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "revision": git_revision()}
        recording.add(name, {**stamps, "given_s": seconds, "wall_s": monotonic() - begun, **figures})


def _work(part: Part, scale: Scale, seconds: float, folder: Path) -> Callable[[Keep], Figures]:
    return lambda keep: part.run(Task(scale=scale, seconds=seconds, folder=folder, keep=keep))


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", f"{_QUICK_BUDGET_S:.0f} s for everything, short plain loops")
    parser.add_argument("--budget-s", type=float, metavar="S", help=f"seconds for everything ({_BUDGET_S:.0f})")
    parser.add_argument("--only", type=_names, default=[], metavar="NAME[,NAME]", help="these parts alone, anew")
    parser.add_argument("--fresh", action="store_true", help="forget what there is")
    parser.add_argument("--list", action="store_true", help="name the parts and what each proves")
    parser.add_argument("--summary", action="store_true", help="run nothing, print what there is")
    parser.add_argument("--smoke-cpu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.budget_s is None:
        usual = _SMOKE_BUDGET_S if arguments.smoke_cpu else _BUDGET_S
        arguments.budget_s = _QUICK_BUDGET_S if arguments.quick else usual
    return arguments


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"parts are {', '.join(PARTS)}, but got {', '.join(unknown)}")
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
    """The machine; a product that can't describe it must not keep the parts from running."""
    try:
        return describe_machine(device)
    except Exception:  # noqa: BLE001 - written down as a figure
        return {"device_name": "unknown machine", "error": traceback.format_exc()}


def _is_bad(part: Mapping[str, Any], scale: Scale) -> bool:
    """It failed, or a promise was not kept; what is promised of a GPU is not promised of a CPU."""
    return "error" in part or (not scale.is_small and False in part.get("promises", {}).values())


if __name__ == "__main__":
    sys.exit(main())
