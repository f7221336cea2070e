"""A part of benchmarks/gpu.py: DDP with a single rank, so that NCCL runs on real CUDA; each hook, and its rate.

A search never proposes a group of one rank, which is a single process: these trials come from a TrialRunner directly.
What they say of DDP is what its buckets, hooks and calls of NCCL cost a step; nothing crosses a wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from benchmarks.cases.ranks import wide
from benchmarks.measures.gpu_scale import TRIAL_S, Task
from benchmarks.measures.part_guard import Figures
from benchmarks.measures.recording import print_table, say
from benchmarks.yardsticks.product_run import TimedLauncher, open_trials

__all__ = ["check_ranks", "print_rank_rates"]

_ROUNDS = 3  # at the most: as many as there is time for
_WINDOW = WindowRules(max_s=1.0)
_WIDTH, _SMALL_WIDTH = 2048, 64
_GROUP_OF_ONE = {"strategy": "ddp", "world_size": 1}
_SINGLE = "single"


def check_ranks(task: Task) -> Figures:
    """A single process and DDP's variants with one rank, in turns; what has run, over which backend, and its rate."""
    device = task.scale.device
    variants, found = _variants(device), dict[str, list[dict[str, Any]]]()
    for name, run in _trials(
        variants, device, task.seconds, _SMALL_WIDTH if task.scale.is_small else _WIDTH
    ):
        say(f"ranks: {name}: {run['outcome']}, {run['samples_per_s'] or 0:,.0f} samples/s")
        found.setdefault(name, []).append(run)
        task.keep({"variants": found})
    backend = f"DistributedDataParallel/{'gloo' if device == 'cpu' else 'nccl'}"
    if not found:
        return {"skipped": f"{task.seconds:.0f} s are too short for a trial"}
    left_out = [name for name in variants if name not in found]
    ran = [
        run
        for name, runs in found.items()
        if name != _SINGLE
        for run in runs
        if run["outcome"] == "ok"
    ]
    has_failed = any(run["outcome"] != "ok" for runs in found.values() for run in runs)
    return {
        "promises": {
            "is_over_nccl": all(run["noted"] == [backend] for run in ran) if ran else None,
            "every_variant_ran": False if has_failed else None if left_out else True,
        },
        "why_not_judged": f"no time for {', '.join(left_out)}" if left_out else None,
        "left_out": left_out,
        "over_single": _over_single(found),
        "variants": found,
    }


def print_rank_rates(part: Mapping[str, Any]) -> None:
    """Print a line for each variant that was run."""
    rows = [
        [
            name,
            ", ".join(dict.fromkeys(run["outcome"] for run in runs)),
            ", ".join(dict.fromkeys(noted for run in runs for noted in run["noted"])),
            "-"
            if part.get("over_single", {}).get(name) is None
            else f"{part['over_single'][name]:.3f}",
        ]
        for name, runs in part.get("variants", {}).items()
    ]
    if rows:
        head = ["variant", "outcome", "model", "rate"]
        print_table("One rank: what ran, and its rate over that of a single process.", head, rows)


def _variants(device: str) -> dict[str, dict[str, Any]]:
    """Settings by name; the bf16 hook needs NCCL."""
    hooks = ("fp16", "powersgd") if device == "cpu" else ("fp16", "bf16", "powersgd")
    views = {"gradient_as_bucket_view": True}
    return {
        _SINGLE: {},
        "ddp": _GROUP_OF_ONE,
        **{f"ddp, {hook}": {**_GROUP_OF_ONE, "ddp": {"comm_hook": hook}} for hook in hooks},
        "ddp, bucket views": {**_GROUP_OF_ONE, "ddp": views},
        "ddp, static graph": {**_GROUP_OF_ONE, "ddp": {**views, "static_graph": True}},
    }


def _trials(
    variants: Mapping[str, Mapping[str, Any]], device: str, seconds: float, width: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every variant once, then again, as long as there is time for the longest trial so far."""
    ends_at, longest_s = monotonic() + seconds, TRIAL_S
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        notes = Path(folder) / "notes"
        launcher = TimedLauncher(LocalLauncher(Path(folder) / "server.log"), notes)
        case = wide(notes, width=width)
        try:
            with open_trials(
                case, device=device, window=_WINDOW, extras=NO_EXTRAS, launcher=launcher
            ) as run_trial:
                for _, name in product(range(_ROUNDS), variants):
                    if monotonic() + longest_s > ends_at:
                        return
                    result = run_trial({**case.settings, **variants[name]})
                    rate = None if result.measurement is None else result.measurement.samples_per_s
                    noted = sorted(launcher.launches[-1].noted)
                    longest_s = max(longest_s, result.wall_s)
                    yield (
                        name,
                        {
                            "outcome": result.outcome,
                            "reason": result.reason,
                            "samples_per_s": rate,
                            "noted": noted,
                        },
                    )
        finally:
            launcher.close()


def _over_single(found: Mapping[str, list[dict[str, Any]]]) -> dict[str, float | None]:
    """Median rates over that of a single process; None where either has none."""
    rates = {
        name: median(rate for run in runs if (rate := run["samples_per_s"]) is not None)
        for name, runs in found.items()
        if any(run["samples_per_s"] is not None for run in runs)
    }
    single = rates.get(_SINGLE)
    return {name: rates[name] / single if single and name in rates else None for name in found}
