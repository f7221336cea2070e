"""The tables of docs/scaling.md, in Markdown, from what benchmarks/scaling.py writes down, and their way there. Pure.

In the document a table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["filled", "named_tables", "scaling_tables"]

_PLANS = ("one node", "two sizes", "checked", "full scale")
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def scaling_tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Every table by its name."""
    seeds = results["seeds"]
    return {
        "assumptions": _assumptions(results["assumptions"]),
        "network": _network(results["assumptions"]["cluster"]["network"], seeds),
        "errors": _errors(seeds),
        "curve": _curve([seed["curve"] for seed in seeds]),
        "plans": _plans(seeds),
    }


def filled(document: str, tables: Mapping[str, str]) -> str:
    """The document with the tables between their markers.

    Raises:
        KeyError: a marker names a table that there is not.
    """
    return _MARKED.sub(lambda mark: f"{mark[1]}{tables[mark['name']]}\n{mark[4]}", document)


def named_tables(document: str) -> dict[str, str]:
    """What stands between the markers of a document, by name."""
    return {mark["name"]: mark["body"] for mark in _MARKED.finditer(document)}


def _assumptions(given: Mapping[str, Any]) -> str:
    job, cluster, start = given["job"], given["cluster"], given["baseline"]
    today = (start["precision"], f"micro batch {start['micro']}", f"{start['steps']} accumulated")
    rows = [
        ["gradients", f"{job['gradient_bytes'] / 1e9:.1f} GB, float32"],
        [
            "computing a sample",
            _listed(f"{_ms(s)} in {name}" for name, s in job["sample_s"].items()),
        ],
        [
            "a micro batch, an optimizer step",
            f"{_ms(job['batch_s'])}, {_ms(job['optimizer_s'])}",
        ],
        [
            "backward pass",
            f"{job['backward_share']:.0%} of a micro batch (the law assumes two thirds)",
        ],
        ["loading a sample", f"{_ms(job['item_s'])} in one worker"],
        [f"inside a node of {cluster['node_gpus']} GPUs", _link(cluster["node"])],
        ["between nodes", _link(cluster["network"])],
        [
            f"beyond a rack of {cluster['rack_gpus']} GPUs",
            f"the same, or {_link(given['beyond_a_rack'])}",
        ],
        [
            "variation of computing among ranks",
            f"{cluster['jitter']:.1%}; all wait for the slowest",
        ],
        ["noise of a trial's throughput", f"{given['noise']:.0%}"],
        [
            "current settings",
            _listed((*today, f"{start['workers']} workers a GPU", "torch's own buckets")),
        ],
        ["samples of a step", f"{given['samples_per_gpu']} a GPU, on any number of them"],
        [
            "a job of a search",
            _listed(f"{s:.0f} s on {ranks} GPUs" for ranks, s in given["job_s"].items()),
        ],
        ["the training run", f"{given['run_hours']:.0f} h with the current settings"],
        ["repetitions", f"{given['seeds']} seeds"],
    ]
    return _table(["what", "assumed"], rows)


def _network(true: Mapping[str, float], seeds: Sequence[Mapping[str, Any]]) -> str:
    """The fitted network, with and without what no search would propose."""
    parts: list[tuple[str, str, Callable[[float], str]]] = [
        ("bandwidth", "bytes_per_s", lambda value: f"{value / 1e9:.1f} GB/s"),
        ("latency of a hop", "latency_s", lambda value: f"{value * 1e6:.2f} us"),
    ]
    rows = [
        [
            name,
            say(true[key]),
            _spread((seed["network"][key] for seed in seeds), say),
            _spread((seed["blind_network"][key] for seed in seeds), say),
        ]
        for name, key, say in parts
    ]
    head = [
        "network",
        "true",
        "fitted: median (least to most)",
        "fitted without small batches and tiny buckets",
    ]
    return _table(head, rows)


def _errors(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Foretold steps over true ones, less 1."""
    rows = [
        [name, fit, *_error_cells([seed["scenarios"][name][key] for seed in seeds])]
        for name in seeds[0]["scenarios"]
        for fit, key in (("as described", "errors"), ("without them", "blind_errors"))
    ]
    head = [
        "forecast for",
        "fit",
        "best setting: median (least to most)",
        "all settings: median size",
        "largest size",
    ]
    return _table(head, rows)


def _error_cells(errors: Sequence[Mapping[str, float]]) -> list[str]:
    return [
        _spread((one["best"] for one in errors), lambda value: f"{value:+.1%}"),
        f"{median(one['median_absolute'] for one in errors):.1%}",
        f"{max(one['worst_absolute'] for one in errors):.1%}",
    ]


def _curve(curves: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Medians over the seeds, whose winners may differ."""
    rows = [
        [
            f"{points[0]['ranks']:.0f}",
            *(
                _ms(median(point[key] for point in points))
                for key in ("foretold_s", "flat_s", "kinked_s")
            ),
            f"{median(point['foretold_s'] / point['kinked_s'] - 1 for point in points):+.1%}",
        ]
        for points in zip(*curves, strict=True)
    ]
    return _table(
        [
            "GPUs",
            "forecast",
            "one network",
            "slower beyond a rack",
            "forecast over the last, less 1",
        ],
        rows,
    )


def _plans(seeds: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the seeds; of what is lost also the worst."""
    rows = [["8 GPUs", "one node", *_plan_cells([seed["node"] for seed in seeds])]]
    rows += [
        [name, plan, *_plan_cells([seed["scenarios"][name]["plans"][plan] for seed in seeds])]
        for name in seeds[0]["scenarios"]
        for plan in _PLANS
    ]
    head = [
        "machines",
        "plan",
        "search, GPU-hours",
        "slower than the best: median (most)",
        "saved in the run, GPU-hours",
        "saved less search",
        "pays off after",
    ]
    return _table(head, rows)


def _plan_cells(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    lost = [plan["slower_than_best"] for plan in plans]
    net = median(plan["saved_gpu_hours"] - plan["search_gpu_hours"] for plan in plans)
    pays = [plan["pays_off_after_h"] for plan in plans]
    known = [hours for hours in pays if hours is not None]
    never = "never" if not known else f"never for {len(pays) - len(known)} of {len(pays)} seeds"
    return [
        f"{median(plan['search_gpu_hours'] for plan in plans):,.0f}",
        f"{median(lost):.1%} ({max(lost):.1%})",
        f"{median(plan['saved_gpu_hours'] for plan in plans):,.0f}",
        f"{net:,.0f}",
        f"{median(known):.1f} h" if len(known) == len(pays) else never,
    ]


def _spread(values: Iterable[float], say: Callable[[float], str]) -> str:
    seen = sorted(values)
    return f"{say(median(seen))} ({say(seen[0])} to {say(seen[-1])})"


def _link(link: Mapping[str, float]) -> str:
    return f"{link['bytes_per_s'] / 1e9:.3g} GB/s and {link['latency_s'] * 1e6:.0f} us a hop"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
