"""The tables of benchmarks/gpu.py, from the results that it writes down: promises first, then a table a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autotune.records.measurement import WAIT_SOURCE
from benchmarks.measures.gpu_ranks import print_rank_rates
from benchmarks.measures.recording import print_table

__all__ = ["print_gpu_tables"]

_GIB = 2**30
_MEMORY_KEYS = ("peak_bytes", "reserved_bytes", "nvml_peak_bytes")
_TOLD = {True: "kept", False: "BROKEN", None: "not judged"}
_SEARCHES = (("starved", "linear"), ("starved", "sized"), ("jpeg", "search"), ("gpt2", "search"))
"""Part, and where it keeps a search of which both sides are shown."""
Results = Mapping[str, Mapping[str, Any]]


def print_gpu_tables(results: Results) -> None:
    """Print what is there; a line for each part that has not come to its end."""
    _print_starts(results.get("trial_start", {}))
    _print_searches(results)
    for name, key in _SEARCHES:
        _print_sides(f"{name}, {key}", results.get(name, {}).get(key, {}).get("sides", {}))
    _print_fidelity(results.get("fidelity", {}))
    _print_blocks(results.get("block_edges", {}))
    _print_launch(results.get("launch", {}).get("regimes", {}))
    _print_memory(results)
    _print_guard(results.get("precision_guard", {}))
    print_rank_rates(results.get("nccl", {}))
    rows = [
        [name, one, _TOLD[kept]] for name, part in results.items() for one, kept in _promises(part)
    ]
    if rows:
        print_table("Promises.", ["part", "promise", ""], rows)
    for name, part in results.items():
        for why in ("skipped", "error", "why_not_judged"):
            if part.get(why):
                print(f"{name}: {why}: {str(part[why]).splitlines()[-1]}")


def _promises(part: Mapping[str, Any]) -> Iterator[tuple[str, bool | None]]:
    yield from part.get("promises", {}).items()


def _print_starts(start: Mapping[str, Any]) -> None:
    if medians := start.get("medians"):
        keys = (
            "overhead_s",
            "tell_and_ask_s",
            "launch_to_first_batch_s",
            "build_s",
            "report_to_return_s",
        )
        head = ["overhead", "tell+ask", "1st batch", "build", "after end"]
        print_table(
            "Start of a trial, medians in seconds.", head, [[f"{medians[key]:.3f}" for key in keys]]
        )


def _print_searches(results: Results) -> None:
    rows = []
    for name, key in (*_SEARCHES, ("default_search", "search")):
        found = results.get(name, {}).get(key)
        if found is None:
            continue
        sides = found["sides"]
        standing = sides.get("recommended", {}).get("standing") or {}
        rows.append(
            [
                f"{name}, {key}",
                *(
                    _number(sides.get(side, {}).get("samples_per_s"), ",.0f")
                    for side in ("baseline", "recommended")
                ),
                _number(found["speedup"], ".2f"),
                _number(standing.get("share_of_lower"), ".0%"),
                str(len(found["trials"])),
                f"{found['wall_s']:.0f}",
            ]
        )
    if rows:
        head = ["search", "today/s", "found/s", "speed-up", "of lowest", "trials", "s"]
        print_table(
            "Searches; of lowest: the recommended trial over the lowest ceiling.", head, rows
        )


def _print_sides(name: str, sides: Mapping[str, Any]) -> None:
    """What the device did, by every source, and how far the ceilings are."""
    told = {side: figures for side, figures in sides.items() if figures}
    if not told:
        return
    sources = sorted({source for figures in told.values() for source in figures["busy"]})
    rows = [
        [source, *(_number(one["busy"].get(source), ".0%") for one in told.values())]
        for source in sources
    ]
    if WAIT_SOURCE not in sources:
        rows.append(
            [WAIT_SOURCE, *(_number(one["one_minus_data_wait"], ".0%") for one in told.values())]
        )
    for group in ("fullness", "breakdown"):
        parts = sorted({part for one in told.values() for part in one[group] or {}})
        rows += [
            [
                f"{group}: {part}",
                *(_number((one[group] or {}).get(part), ".0%") for one in told.values()),
            ]
            for part in parts
        ]
    for key in ("share_of_device", "share_of_lower", "room"):
        rows.append(
            [key, *(_number((one["standing"] or {}).get(key), ".0%") for one in told.values())]
        )
    rows.append(
        ["joules a sample", *(_number(one["joules_per_sample"], ".3g") for one in told.values())]
    )
    print_table(f"{name}: busy by every source, where the time goes, ceilings.", ["", *told], rows)


def _print_fidelity(part: Mapping[str, Any]) -> None:
    rows = [
        [
            one["workload"],
            one["held_by"],
            " ".join(_number(rate, ",.0f") for rate in one.get("plain_samples_per_s", ())),
            " ".join(_number(error, "+.1%") for error in one["errors"]),
            " ".join(_number(error, "+.1%") for error in one.get("raw_errors", ())),
        ]
        for one in part.get("settings", ())
    ]
    if rows:
        head = ["workload", "held by", "plain samples/s", "errors", "uncorrected"]
        print_table("Trials against plain loops.", head, rows)
    for held_by, bias in part.get("bias", {}).items():
        print(
            f"bias, {held_by}: {_number(bias['mean_error'], '+.2%')} +- {_number(bias['standard_error'], '.2%')}"
        )


def _print_blocks(part: Mapping[str, Any]) -> None:
    rows = [
        [
            name,
            str(mean["pairs"]),
            *(_number(mean[key] - 1, "+.2%") for key in ("ratio", "low", "high")),
        ]
        for name, mean in part.get("short_over_long", {}).items()
        if mean is not None
    ]
    if rows:
        head = ["workload", "rounds", "short over long", "from", "to"]
        print_table("Windows of short blocks over windows of long ones, 95 % interval.", head, rows)


def _print_launch(regimes: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a step's milliseconds by regime; of paired regimes the first window, and the ratio of the pairs below."""
    rows = []
    for name, found in regimes.items():
        one = found.get("before") or (found.get("usual") or [found])[0]
        if "samples_per_s" not in one:
            continue
        sums = [sum(one[clock].values()) if clock in one else None for clock in ("wall_s", "cpu_s")]
        backward = sum(
            cpu_s
            for thread, cpu_s in one["threads_cpu_s"].items()
            if thread.startswith("pt_autograd")
        )
        times = [one["seconds"] / one["steps"], one.get("take_s"), *sums, backward]
        milliseconds = [_number(None if time is None else 1e3 * time, ".2f") for time in times]
        rows.append(
            [
                name,
                f"{one['samples_per_s']:,.0f}",
                *milliseconds,
                _number(one.get("voluntary_switches"), ".1f"),
            ]
        )
    if rows:
        head = ["regime", "samples/s", "step", "take", "launch", "CPU", "backward", "switches"]
        print_table(
            "Launching: ms of a step; CPU of the main thread and of backward's own.", head, rows
        )
    for name, found in regimes.items():
        if "short_over_usual" in found:
            mean = found["short_over_usual"]
            print(
                f"{name}: short over usual {mean['ratio']:.3f} ({mean['low']:.3f} to {mean['high']:.3f})"
            )
        if "after_over_before" in found:
            print(f"{name}: after over before {found['after_over_before']:.3f}")


def _print_memory(results: Results) -> None:
    limited = results.get("memory_limit", {})
    if "trials" in limited:
        rows = [
            [
                str(one["micro_batch_size"]),
                one["outcome"],
                *(_gib(one[key]) for key in _MEMORY_KEYS),
            ]
            for one in limited["trials"]
        ]
        head = ["micro_batch_size", "outcome", "peak GiB", "reserved", "by NVML"]
        print_table(f"Under a limit of {_gib(limited['limit_bytes'])} GiB.", head, rows)
    if "outcomes" in (survived := results.get("out_of_memory", {})):
        rows = [[str(size), outcome] for size, outcome in survived["outcomes"]]
        print_table("With absurd batches.", ["micro_batch_size", "outcome"], rows)
    line = results.get("memory_line", {})
    keys = ("predicted_bytes", "error_bytes", "seen_bytes")
    rows = [
        [
            str(one["micro_batch_size"]),
            *(_gib(one[key]) for key in keys),
            _number(one["relative_error"], "+.1%"),
        ]
        for one in line.get("predictions", ())
    ]
    if rows:
        batches = ", ".join(str(batch) for batch, _ in line["fitted"])
        head = ["micro_batch_size", "predicted GiB", "+-", "seen", "error"]
        print_table(f"Memory line through batches of {batches}.", head, rows)
    if stress := results.get("stress", {}).get("stress"):
        row = [f"{stress['largest_item_bytes'] / stress['median_item_bytes']:.1f} times the median"]
        row += [_gib(results["stress"]["trial_peak_bytes"]), _gib(stress["memory"]["peak_bytes"])]
        print_table("Stress run.", ["largest sample", "trial's peak GiB", "stress run's"], [row])


def _print_guard(part: Mapping[str, Any]) -> None:
    rows = [
        [
            model,
            one["precision"],
            one["outcome"],
            _number(one["gradient_cosine"], ".4f"),
            _number(one["loss_deviation"], ".2%"),
        ]
        for model in ("healthy", "broken")
        for one in part.get(model, {}).get("trials", ())
    ]
    if rows:
        print_table(
            "Precision guard.", ["model", "precision", "outcome", "cosine", "losses differ"], rows
        )


def _gib(value: float | None) -> str:
    return _number(None if value is None else value / _GIB, ".2f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
