"""The tables of benchmarks/gpu.py, from the results that it writes down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recording import print_table

__all__ = ["print_gpu_tables"]

_GIB = 2**30
_MEMORY_KEYS = ("peak_bytes", "reserved_bytes", "nvml_peak_bytes")


def print_gpu_tables(results: Mapping[str, dict[str, Any]], workloads: Sequence[str]) -> None:
    """Print a table for each part that has figures, and a line for each that has none."""
    start = results["trial_start"].get("medians")
    if start:
        keys = ("overhead_s", "tell_and_ask_s", "launch_to_first_batch_s", "build_s", "report_to_return_s")
        head = ["overhead", "tell+ask", "1st batch", "build", "after end"]
        print_table("Start of a trial, medians in seconds.", head, [[f"{start[key]:.3f}" for key in keys]])
    rows = [_workload_row(name, results[name]) for name in workloads if "search" in results[name]]
    head = ["workload", "baseline/s", "found/s", "speed-up", "busy", "plain/s", "err", "conf. err"]
    print_table("Searches; err and conf. err: trial and confirmation over the plain loop, less 1.", head, rows)
    limited = results["memory_limit"]
    if "trials" in limited:
        rows = [
            [str(one["micro_batch_size"]), one["outcome"], *(_gib(one[key]) for key in _MEMORY_KEYS)]
            for one in limited["trials"]
        ]
        head = ["micro_batch_size", "outcome", "peak GiB", "reserved", "by NVML"]
        print_table(f"Under a limit of {_gib(limited['limit_bytes'])} GiB.", head, rows)
    if "outcomes" in (survived := results["out_of_memory"]):
        rows = [[str(size), outcome] for size, outcome in survived["outcomes"]]
        print_table("With absurd batches.", ["micro_batch_size", "outcome"], rows)
    for name, part in results.items():
        if "skipped" in part or "error" in part:
            print(f"{name}: {part.get('skipped') or part['error'].splitlines()[-1]}")


def _workload_row(name: str, part: dict[str, Any]) -> list[str]:
    return [
        name,
        _number(part.get("baseline_samples_per_s"), ",.0f"),
        _number(part.get("trial_samples_per_s"), ",.0f"),
        _number(part["search"]["speedup"], ".2f"),
        _number(part.get("trial_busy_fraction"), ".0%"),
        _number(part.get("plain_samples_per_s"), ",.0f"),
        _number(part.get("trial_relative_error"), "+.1%"),
        _number(part.get("confirmed_relative_error"), "+.1%"),
    ]


def _gib(value: int | None) -> str:
    return _number(None if value is None else value / _GIB, ".2f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
