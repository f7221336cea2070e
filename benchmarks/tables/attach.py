"""The tables of benchmarks/attach.py: a row a script, failures too."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, median, stdev
from typing import Any

from benchmarks.measures.recording import print_table

__all__ = ["attach_counts", "attach_rows", "print_attach_tables", "verdict_of_pairs"]

_CLOSE = 0.03
"""Of the median ratio: what issue and docs promise."""


def print_attach_tables(results: Mapping[str, Any]) -> None:
    """Print what there is."""
    names = _scripts(results)
    parts = {
        name: {part: results.get(f"{name}/{part}", {}) for part in ("look", "pairs", "search")}
        for name in names
    }
    head: tuple[str, ...] = (
        "script",
        "found",
        "batch",
        "samples/s",
        "first line s",
        "first batch s",
        "out of reach",
    )
    print_table(
        "Found and measured", head, [(name, *_look_row(parts[name]["look"])) for name in names]
    )
    head = ("script", "attached/unwatched", "pairs", "3 std. errors", "within")
    print_table("Pairs", head, [(name, *_pairs_row(parts[name]["pairs"])) for name in names])
    head = ("script", "verdict", "speedup", "seconds")
    print_table("Searches", head, [(name, *_search_row(parts[name]["search"])) for name in names])
    if "hooks" in results:
        hooks = results["hooks"]
        print(
            f"\nWatching adds {hooks['added_us']:.1f} us to a step of {hooks['plain_us']:.1f} us."
        )


def attach_rows(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A row for each script: what was found, measured and won."""
    return [_row(name, results) for name in _scripts(results)]


def attach_counts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of all pairs together, and of the hooks."""
    pairs = [results[f"{name}/pairs"] for name in _scripts(results)]
    unwatched = [[pair["unwatched"] for pair in one["rates"] if pair["unwatched"]] for one in pairs]
    spreads = [stdev(rates) / mean(rates) for rates in unwatched]
    ratios = [ratio for one in pairs for ratio in one["ratios"]]
    close = sum(verdict_of_pairs(one) == "3 %" for one in pairs)
    return {"scripts": len(pairs), "close": close, "pairs": len(ratios), "median": median(ratios),
            "least_spread": min(spreads), "most_spread": max(spreads), **results["hooks"]}  # fmt: skip


def _scripts(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.partition("/")[0] for key in results if "/" in key))


def _row(name: str, results: Mapping[str, Any]) -> dict[str, Any]:
    look, pairs, search = (results[f"{name}/{part}"] for part in ("look", "pairs", "search"))
    trial, own = (
        look["trials"][-1],
        [one for one in look["unreached"] if one not in {"grad_accum_steps", "compile"}],
    )
    return {
        "name": name,
        "kind": look["kind"],
        "framework": look["framework"],
        "rate": trial["samples_per_s"],
        "line": trial["startup_s"] - trial["build_s"],
        "ratio": pairs["median_ratio"],
        "error": pairs["standard_error"],
        "pairs": len(pairs["ratios"]),
        "within": verdict_of_pairs(pairs),
        "unreached": ", ".join(own) or "-",
        "verdict": search["verdict"].replace("_", " "),
        "speedup": search["speedup"]["value"],
        "seconds": search["took_s"],
    }


def verdict_of_pairs(figures: Mapping[str, Any]) -> str:
    """Whether a script's pairs keep the promise: within 3 %, or within three standard errors."""
    ratio, error = figures.get("median_ratio"), figures.get("standard_error")
    if ratio is None:
        return "-"
    if abs(ratio - 1) <= _CLOSE:
        return "3 %"
    return "3 errors" if error is not None and abs(ratio - 1) <= 3 * error else "no"


def _look_row(figures: Mapping[str, Any]) -> tuple[str, ...]:
    if "failed" in figures or not figures:
        return (figures.get("failed", "-")[:40], "", "", "", "", "")
    trial = figures["trials"][-1]
    rate = f"{trial['samples_per_s']:,.1f}" if "samples_per_s" in trial else trial["outcome"]
    batch = figures["baseline"].get("micro_batch_size", 32)
    line = f"{trial['startup_s'] - trial['build_s']:.2f}" if "startup_s" in trial else "-"
    start = f"{trial['startup_s']:.1f}" if "startup_s" in trial else "-"
    return (figures["framework"], str(batch), rate, line, start, ", ".join(figures["unreached"]))


def _pairs_row(figures: Mapping[str, Any]) -> tuple[str, ...]:
    if figures.get("median_ratio") is None:
        return (figures.get("failed", "-")[:40], "", "", "")
    error = "-" if figures["standard_error"] is None else f"{3 * figures['standard_error']:.3f}"
    return (
        f"{figures['median_ratio']:.3f}",
        str(len(figures["ratios"])),
        error,
        verdict_of_pairs(figures),
    )


def _search_row(figures: Mapping[str, Any]) -> tuple[str, ...]:
    if "verdict" not in figures:
        return (figures.get("failed", "-")[:50], "", "")
    value = (figures["speedup"] or {}).get("value")
    return (
        figures["verdict"],
        "-" if value is None else f"{value:.2f}",
        f"{figures['took_s']:.0f}",
    )
