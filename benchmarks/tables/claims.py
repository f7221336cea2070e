"""The calculations behind the claims: figures by name from the raw values of a results file. Pure.

Each takes the "results" of a file and gives the figures of one sentence, or a list, one for each row of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.tables.attach import attach_counts, attach_rows
from benchmarks.tables.endurance import fault_rows, report_figures, soak_figures, tried_rows
from benchmarks.tables.fidelity import summarise
from benchmarks.tables.regret import compare_to_tpe, ends

__all__ = ["CALCULATIONS", "Figures"]

Figures = Mapping[str, Any]
Results = Mapping[str, Any]
_FAR = 0.05
"""Regret that a search is counted beyond: the target for the worst."""


def _pairs(results: Results) -> Figures:
    """How far single trials lie beside the plain loop of their pair."""
    found = summarise(results)
    return {"pairs": found["pairs"], **found["single_trials"]}


def _settings(results: Results) -> Figures:
    """The same of medians of a setting's pairs, and what goes with them."""
    found = summarise(results)
    naive, ranks = found["naive"], found["rank_correlation_by_workload"]
    worst, index = found["worst_setting"].split()
    return {
        "settings": found["settings"],
        "workloads": len(ranks),
        "median": found["median_absolute_error"],
        "worst": found["worst_absolute_error"],
        "worst_workload": worst,
        "worst_index": int(index),
        "worst_spread": _spread(results["pairs"][worst][index]["pairs"]),
        "allowed": 3 * found["median_spread"],
        "beyond": len(found["settings_beyond_target"]),
        "rank": found["rank_correlation"],
        "lowest_rank": min(ranks.values()),
        "lowest_workload": min(ranks, key=lambda name: ranks[name]),
        "own_covered": found["coverage_of_own_plain"],
        "medians_covered": found["coverage_of_medians"],
        "spread": found["median_spread"],
        "changed": found["median_change_of_the_machine"],
        "naive_median": naive["median_absolute_error"],
        "naive_worst": naive["worst_absolute_error"],
        "naive_beyond": naive["settings_beyond_target"],
        "naive_rank": naive["rank_correlation"],
        "naive_lowest_rank": min(naive["rank_correlation_by_workload"].values()),
    }


def _spread(pairs: Sequence[Mapping[str, Any]]) -> float:
    rates = [pair["plain"]["samples_per_s"] for pair in pairs]
    return float((max(rates) - min(rates)) / median(rates))


def _versus(results: Results) -> list[Figures]:
    """A row for each workload: plain rates over today's."""
    rows = list[Figures]()
    for name, one in results.items():
        plain = {who: median(rates) for who, rates in one["plain_samples_per_s"].items()}
        today = (plain["today"] + plain["today again"]) / 2
        claimed = one["autotune"]["claimed_samples_per_s"]
        rows.append(
            {
                "name": name,
                "noise": abs(plain["today again"] / plain["today"] - 1),
                "ours": plain["autotune"] / today,
                "same": plain["same batch"] / today,
                "theirs": plain["loadtune"] / today if "loadtune" in plain else "failed",
                "ours_s": one["autotune"]["seconds"],
                "theirs_s": one["loadtune"]["seconds"],
                "off": claimed / plain["autotune"] - 1,
            }
        )
    return rows


def _versus_counts(results: Results) -> Figures:
    """On how many workloads the product is ahead, all settings free and at today's batch, beyond the noise."""
    answered = [row for row in _versus(results) if row["theirs"] != "failed"]
    return {
        "workloads": len(results),
        "answered": len(answered),
        "ahead": sum(row["ours"] > (1 + row["noise"]) * row["theirs"] for row in answered),
        "ahead_same": sum(row["same"] > (1 + row["noise"]) * row["theirs"] for row in answered),
        "faster_same": sum(row["same"] > 1 + row["noise"] for row in _versus(results)),
    }


def _default_search(results: Results) -> list[Figures]:
    """A row for each workload."""
    return [
        {
            "name": name,
            "seconds": one["seconds"],
            "promised": one["promised_s"],
            "in_trials": one["in_trials_s"],
            "trials": len(one["search"]["trials"]),
            "speedup": one["search"]["speedup"],
        }
        for name, one in results.items()
    ]


def _default_search_range(results: Results) -> Figures:
    """The shortest and the longest whole search."""
    seconds = [one["seconds"] for one in results.values()]
    return {"workloads": len(seconds), "least": min(seconds), "most": max(seconds)}


def _recorded(results: Results) -> Mapping[str, Any]:
    return {name: ground for name, ground in results.items() if not ground["is_simulated"]}


def _simulated(results: Results) -> Mapping[str, Any]:
    return {name: ground for name, ground in results.items() if ground["is_simulated"]}


def _regret_rows(grounds: Mapping[str, Any]) -> list[Figures]:
    """A row for each ground, ours and TPE's; in the order of the file."""
    rows = list[Figures]()
    for name, ground in grounds.items():
        ours, theirs = ends(ground, "autotune"), ends(ground, "TPE")
        columns, against, errors = (
            ground["methods"]["autotune"],
            compare_to_tpe(ground),
            ground["points"],
        )
        assert against is not None, "both were measured"
        rows.append(
            {
                "name": name.partition("-")[0],
                "median": median(ours),
                "worst": max(ours),
                "before": median(ends(ground, "autotune", "before_confirmation")),
                "best_error": errors["standard_error"][ground["best"]],
                "floor": ground["floor"]["median"],
                "floor_q95": ground["floor"]["q95"],
                "trial_s": median(columns["trial_s"]),
                "whole_s": median(columns["whole_s"]),
                "tpe": median(theirs),
                "tpe_worst": max(theirs),
                "tpe_whole_s": median(ground["methods"]["TPE"]["whole_s"]),
                "trials_ratio": against.trials_ratio,
                "whole_ratio": against.whole_ratio,
            }
        )
    return rows


def _regret_counts(grounds: Mapping[str, Any]) -> Figures:
    """Over the grounds: how many searches end far off, seconds of the whole, and against TPE's."""
    regrets = [regret for ground in grounds.values() for regret in ends(ground, "autotune")]
    tpe = [regret for ground in grounds.values() for regret in ends(ground, "TPE")]
    before = [
        regret
        for ground in grounds.values()
        for regret in ends(ground, "autotune", "before_confirmation")
    ]
    rows = _regret_rows(grounds)
    return {
        "grounds": len(grounds),
        "searches": len(regrets),
        "beyond": _far(regrets),
        "beyond_before": _far(before),
        "tpe_beyond": _far(tpe),
        "tpe_searches": len(tpe),
        "none": sum(row["median"] < _NOTHING for row in rows),
        "within": sum(row["median"] <= _TARGET for row in rows),
        "most": max(row["median"] for row in rows),
        "worst": max(regrets),
        "least_s": min(row["whole_s"] for row in rows),
        "most_s": max(row["whole_s"] for row in rows),
        "trials_ratio": _median_of(row["trials_ratio"] for row in rows),
        "trials_compared": sum(row["trials_ratio"] is not None for row in rows),
        "whole_ratio": _median_of(row["whole_ratio"] for row in rows),
        "whole_worst_ratio": max(
            row["whole_ratio"] for row in rows if row["whole_ratio"] is not None
        ),
        "errors_least": min(row["best_error"] for row in rows),
        "errors_most": max(row["best_error"] for row in rows),
    }


_NOTHING = 0.0005  # told as 0.0 %
_TARGET = 0.02


def _far(regrets: Iterable[float]) -> int:
    return sum(regret > _FAR for regret in regrets)


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _decisions(results: Results) -> Figures:
    """False "faster" where there is nothing to win, by spread; coverage, bias and what is found."""
    shares: dict[str, Any] = {}
    results = {
        name: part for name, part in results.items() if name.startswith("spread ")
    }  # no hurry, no GPU
    for spread in ("1.5", "5", "10", "20"):
        nothing = results[f"spread {spread} %, gain 0 %"]
        shares[f"false_{spread.replace('.', '_')}"] = nothing["false_faster"][0]
    gains = [part for name, part in results.items() if not name.endswith("gain 0 %")]
    repeated = [part["repeated_covered"][0] for part in results.values()]
    ten = results["spread 5 %, gain 10 %"]
    return {
        **shares,
        "repeated_least": min(repeated),
        "repeated_most": max(repeated),
        "claims_least": min(part["claims_covered"][0] for part in gains),
        "claims_most": max(part["claims_covered"][0] for part in gains),
        "bias": 100 * max(abs(part["bias_of_claims"]) for part in gains),
        "bias_of_proven": 100 * max(part["bias_of_said_faster"] or 0.0 for part in gains),
        "bias_of_nothing": 100
        * max(
            part["bias_of_claims"] or 0.0
            for name, part in results.items()
            if name.endswith("gain 0 %")
        ),
        "found": ten["found"][0],
        "found_soon": ten["found_soon"][0],
        "regret": ten["regret"],
    }


def _gpu_runs(results: Results) -> list[Figures]:
    """Pairs of runs of each kind, and how many of them early stopping ends, before and now."""
    sums = {name: sum_ for name, sum_ in results["stops"].items() if isinstance(sum_, dict)}
    return [{"name": name.replace("%", " %"), **sum_} for name, sum_ in sums.items()]


def _decisions_here(results: Results) -> list[Figures]:
    """A row for each known gain."""
    return [
        {
            "name": name.removeprefix("gain "),
            "count": part["count"],
            "proven": sum(one["verdict"] == "faster" for one in part["searches"]),
            "false": sum(
                one["verdict"] == "faster" and one["truth"] <= 1 for one in part["searches"]
            ),
            "covered": part.get("repeated_covered", part.get("finalists_covered"))[0],
            "bias": None if part["bias_of_claims"] is None else 100 * part["bias_of_claims"],
            "half_width": part["half_width"],
            "whole_s": part["whole_s"],
        }
        for name, part in results.items()
    ]


def _ranks(results: Results) -> list[Figures]:
    """A row for each case and setting of groups of two ranks."""
    return [
        {
            "name": f"{_MODELS[model]}{'' if setting == 'plain' else f', {setting}'}",
            "plain": median(plain := [pair["plain"]["samples_per_s"] for pair in one["pairs"]]),
            "trial": median(trial := [pair["trial"]["samples_per_s"] for pair in one["pairs"]]),
            "error": median(b / a for a, b in zip(plain, trial, strict=True)) - 1,
            "spread": (max(plain) - min(plain)) / median(plain),
        }
        for model, settings in results["rate"]["cases"].items()
        for setting, one in settings.items()
    ]


def _settings_here(results: Results) -> list[Figures]:
    """A row for each case of a setting on the machine itself."""
    return [
        {
            "setting": case["setting"],
            "expects": case["expects"],
            "times": median(case["times"]),
            "low": min(case["times"]),
            "high": max(case["times"]),
            "effect": case["effect"],
            "tried": case["tried_in"],
            "trials": case["trials"],
            "recommended": "yes" if case["is_recommended"] else "no",
        }
        for case in results.values()
        if case.get("where") == "here"
    ]


def _settings_on_paper(results: Results) -> list[Figures]:
    """A row for each case of a setting on a simulated machine."""
    return [
        {
            "setting": case["setting"],
            "expects": case["expects"],
            "tried": sum(search["tried_in"] for search in case["searches"]),
            "trials": sum(search["trials"] for search in case["searches"]),
            "recommended": sum(search["is_recommended"] for search in case["searches"]),
            "searches": len(case["searches"]),
        }
        for case in results.values()
        if case.get("where") == "paper"
    ]


def _followed(results: Results) -> list[Figures]:
    """A row for each job that has followed advice which sets nothing."""
    return [
        {
            "kind": job["kind"],
            "reached": median(job["reached"]),
            "low": job["interval"][0],
            "high": job["interval"][1],
            "within": job["pairs_within"],
            "pairs": len(job["reached"]),
        }
        for job in results["followed"].values()
        if job.get("interval") is not None
    ]


_MODELS = {"mlp": "MLP", "convnet": "CNN"}

CALCULATIONS: Mapping[str, Callable[[Results], Figures | list[Figures]]] = {
    "fidelity_pairs": _pairs,
    "fidelity_settings": _settings,
    "versus_rows": _versus,
    "versus_counts": _versus_counts,
    "default_search_rows": _default_search,
    "default_search_range": _default_search_range,
    "regret_recorded_rows": lambda results: _regret_rows(_recorded(results)),
    "regret_recorded": lambda results: _regret_counts(_recorded(results)),
    "regret_simulated_rows": lambda results: _regret_rows(_simulated(results)),
    "regret_simulated": lambda results: _regret_counts(_simulated(results)),
    "advice": lambda results: dict(results["summary"]),
    "decisions": _decisions,
    "decisions_here_rows": _decisions_here,
    "gpu_runs_rows": _gpu_runs,
    "ranks_rows": _ranks,
    "settings_here_rows": _settings_here,
    "settings_on_paper_rows": _settings_on_paper,
    "advice_followed_rows": _followed,
    "attach_rows": attach_rows,
    "attach_counts": attach_counts,
    "endurance_rows": tried_rows,
    "endurance_fault_rows": fault_rows,
    "endurance_soak": soak_figures,
    "endurance_report": report_figures,
}
"""By name."""
