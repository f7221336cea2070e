"""The tables of benchmarks/gpu.py, from the results that it writes down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recording import print_table

from autotune.core.busy import WAIT_SOURCE

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
    for name in workloads:
        _print_sides(name, results[name].get("sides", {}))
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
    _print_checks(results)
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


def _print_sides(name: str, sides: Mapping[str, Any]) -> None:
    """What the device did, by every source, and how far the ceilings are."""
    told = {side: figures for side, figures in sides.items() if figures}
    if not told:
        return
    sources = sorted({source for figures in told.values() for source in figures["busy"]})
    rows = [[source, *(_number(one["busy"].get(source), ".0%") for one in told.values())] for source in sources]
    if WAIT_SOURCE not in sources:
        rows.append([WAIT_SOURCE, *(_number(one["one_minus_data_wait"], ".0%") for one in told.values())])
    for group in ("fullness", "breakdown"):
        parts = sorted({part for one in told.values() for part in one[group] or {}})
        rows += [
            [f"{group}: {part}", *(_number((one[group] or {}).get(part), ".0%") for one in told.values())]
            for part in parts
        ]
    for key in ("share_of_device", "share_of_lower", "room"):
        rows.append([key, *(_number((one["standing"] or {}).get(key), ".0%") for one in told.values())])
    print_table(f"{name}: busy by every source, where the time goes, ceilings.", ["", *told], rows)


def _print_checks(results: Mapping[str, dict[str, Any]]) -> None:
    guard = results["precision_guard"]
    rows = [
        [
            model,
            one["precision"],
            one["outcome"],
            _number(one["gradient_cosine"], ".4f"),
            _number(one["loss_deviation"], ".2%"),
        ]
        for model in ("healthy", "broken")
        for one in guard.get(model, {}).get("trials", ())
    ]
    if rows:
        print_table("Precision guard.", ["model", "precision", "outcome", "cosine", "losses differ"], rows)
    line = results["memory_line"]
    rows = [
        [
            str(one["micro_batch_size"]),
            _gib(one["predicted_bytes"]),
            _gib(one["error_bytes"]),
            _gib(one["seen_bytes"]),
            _number(one["relative_error"], "+.1%"),
        ]
        for one in line.get("predictions", ())
    ]
    if rows:
        batches = ", ".join(str(batch) for batch, _ in line["fitted"])
        head = ["micro_batch_size", "predicted GiB", "+-", "seen", "error"]
        print_table(f"Memory line through batches of {batches}.", head, rows)
    if stress := results["stress"].get("stress"):
        row = [f"{stress['largest_item_bytes'] / stress['median_item_bytes']:.1f} times the median"]
        row += [_gib(results["stress"]["trial_peak_bytes"]), _gib(stress["memory"]["peak_bytes"])]
        print_table("Stress run.", ["largest sample", "trial's peak GiB", "stress run's"], [row])


def _gib(value: float | None) -> str:
    return _number(None if value is None else value / _GIB, ".2f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
