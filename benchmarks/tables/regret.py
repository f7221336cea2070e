"""Tables and plot of benchmarks/regret.py, from the file that it writes. Pure but for the printing and the drawing.

Ground and method are parts of that file; regrets are derived here from the points that it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import hypot, inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.measures.recording import print_table

__all__ = [
    "Comparison",
    "compare_to_tpe",
    "ends",
    "error_of_median",
    "plot_regret",
    "print_regret_tables",
    "promises_kept",
    "regret_of",
    "seconds_to",
]

Part = Mapping[str, Any]
_OURS, _THEIRS = "autotune", "TPE"
_DASH = "-"
_ALIKE = 0.01
_NEAR = 0.25
"""A regret that is as good as none: our own convention, the gain for which a search does not go on either."""
_HEAD = ("method", "regret", "before", "+-", "worst", "> 5 %", "s", "whole", "trials", "oom")


class Comparison(NamedTuple):
    """The seconds of the product and of TPE to one regret on a ground, medians over seeds; inf: not reached."""

    regret: float
    ours_s: float
    theirs_s: float
    ours_whole_s: float
    """Of the whole search, to its end."""
    theirs_whole_s: float
    """The baseline's trial and those until that regret; none of what decides."""

    @property
    def trials_ratio(self) -> float | None:
        """Ours over theirs; None where one does not get there, or theirs needs no trial for it."""
        return (
            self.ours_s / self.theirs_s
            if max(self.ours_s, self.theirs_s) < inf and self.theirs_s > 0
            else None
        )

    @property
    def whole_ratio(self) -> float | None:
        """Ours over theirs, likewise."""
        is_told = 0 < self.theirs_s < inf
        return self.ours_whole_s / self.theirs_whole_s if is_told else None


def regret_of(ground: Part, point: int) -> float:
    """What a point's rate lies under the best; 1 where it may not be used."""
    rates = ground["points"]["samples_per_s"]
    return 1.0 if rates[point] is None else 1 - float(rates[point]) / float(rates[ground["best"]])


def ends(ground: Part, method: str, column: str = "recommended") -> list[float]:
    """The regret of each search in the end; `column` "before_confirmation": of what the search alone had found."""
    return [regret_of(ground, point) for point in ground["methods"][method][column]]


def error_of_median(ground: Part, method: str) -> float:
    """Standard error of the median regret by the truth's own: that of the point whose regret is the median."""
    points = sorted(
        ground["methods"][method]["recommended"], key=lambda point: regret_of(ground, point)
    )
    point, errors = points[(len(points) - 1) // 2], ground["points"]["standard_error"]
    if point == ground["best"] or errors[point] is None:
        return 0.0
    return (1 - regret_of(ground, point)) * hypot(errors[point], errors[ground["best"]])


def compare_to_tpe(ground: Part) -> Comparison | None:
    """At the median regret that the product ends with, the floor, or 1 %, the largest of them; None without both."""
    if not {_OURS, _THEIRS} <= set(ground["methods"]):
        return None
    target = max(median(ends(ground, _OURS)), float(ground["floor"]["median"]), _ALIKE)
    ours, theirs = (ground["methods"][name] for name in (_OURS, _THEIRS))
    theirs_s = median(seconds_to(ground, steps, target) for steps in theirs["steps"])
    before_s = median(
        whole - own for whole, own in zip(theirs["whole_s"], theirs["trial_s"], strict=True)
    )
    return Comparison(
        regret=target,
        ours_s=median(seconds_to(ground, steps, target) for steps in ours["steps"]),
        theirs_s=theirs_s,
        ours_whole_s=median(ours["whole_s"]),
        theirs_whole_s=before_s + theirs_s,
    )


def seconds_to(ground: Part, steps: str, regret: float) -> float:
    """Seconds of the search after which its regret stays within a bound."""
    since = inf
    for seconds, now in _course(ground, steps):
        since = (seconds if since == inf else since) if now <= regret else inf
    return since


def print_regret_tables(results: Mapping[str, Part]) -> None:
    """Print a table for each ground, and how the seconds compare."""
    for name, ground in results.items():
        if ground["methods"]:
            print_table(
                _title(name, ground), _HEAD, [_row(ground, method) for method in ground["methods"]]
            )
    rows = [
        (name.partition("-")[0], *_compared(one))
        for name, ground in results.items()
        if (one := compare_to_tpe(ground)) is not None
    ]
    if rows:
        head = ("ground", "regret", "s", "TPE", "ratio", "whole", "TPE", "ratio")
        print_table(
            "Median seconds to one regret, ours over TPE's (targets: 0.2 of the trials, 0.5 whole)",
            head,
            rows,
        )
    if kept := promises_kept(results):
        rows = [tuple(f"{share:.0%}" for share in kept)]
        print_table(
            "Took what was promised within 25 % (target: 80 %)",
            ("at first", "after 1/3", "after 1/2"),
            rows,
        )


def promises_kept(results: Mapping[str, Part]) -> list[float]:
    """Return the shares of searches that took what they promised within 25 %: at first, after a third, after half."""
    ratios = [
        ratio
        for ground in results.values()
        for ratio in ground["methods"].get(_OURS, {}).get("promised", ())
        if ratio
    ]
    return [
        fmean(abs(ratio - 1) <= _NEAR for ratio in column) for column in zip(*ratios, strict=True)
    ]


def _title(name: str, ground: Part) -> str:
    floor, errors = ground["floor"], ground["points"]["standard_error"]
    held_out = ", held out" if ground["is_held_out"] else ""
    if ground["is_simulated"]:
        return f"{name}{held_out}: {len(errors)} points, simulated"
    least = f"best +- {errors[ground['best']]:.1%}, floor {floor['median']:.1%}, 95 %: {floor['q95']:.1%}"
    return f"{name.partition('-')[0]}{held_out}: {len(errors)} points, {least}"


def _row(ground: Part, method: str) -> tuple[str, ...]:
    one, regrets = ground["methods"][method], ends(ground, method)
    return (
        method,
        f"{median(regrets):.1%}",
        f"{median(ends(ground, method, 'before_confirmation')):.1%}",
        f"{error_of_median(ground, method):.1%}",
        f"{max(regrets):.1%}",
        f"{sum(regret > 0.05 for regret in regrets)}/{len(regrets)}",
        f"{median(one['trial_s']):.0f}",
        f"{median(one['whole_s']):.0f}",
        f"{median(one['trials']):.0f}",
        f"{fmean(one['out_of_memory']):.1f}",
    )


def _compared(one: Comparison) -> tuple[str, ...]:
    return (
        f"{one.regret:.1%}",
        _seconds(one.ours_s),
        _seconds(one.theirs_s),
        _ratio(one.trials_ratio),
        _seconds(one.ours_whole_s),
        _seconds(one.theirs_whole_s),
        _ratio(one.whole_ratio),
    )


def _seconds(value: float) -> str:
    return _DASH if value == inf else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return _DASH if value is None else f"{value:.2f}"


def _course(ground: Part, steps: str) -> Iterator[tuple[float, float]]:
    """(seconds, regret) of each change, from the text in the file."""
    for step in steps.split(", "):
        seconds, point = step.split()
        yield float(seconds), regret_of(ground, int(point))


def plot_regret(results: Mapping[str, Part], path: Path) -> None:
    """A panel for each ground: the median regret of each method before its race is decided, against seconds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
    for axis, (name, ground) in zip(axes.flat, results.items(), strict=False):
        for number, (method, one) in enumerate(ground["methods"].items()):
            times, regrets = _median_curve([list(_course(ground, steps)) for steps in one["steps"]])
            width = 2.5 if method == _OURS else 1
            axis.plot(times, regrets, color=f"C{number}", lw=width, label=method, zorder=3 - number)
        axis.set(
            title=name.partition("-")[0],
            xscale="log",
            yscale="symlog",
            xlabel="seconds",
            ylabel="regret",
        )
        axis.set_yscale("symlog", linthresh=0.01)
    axes.flat[0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def _median_curve(
    courses: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float]]:
    times = sorted({max(1.0, seconds) for course in courses for seconds, _ in course})
    return times, [median(_at(course, seconds) for course in courses) for seconds in times]


def _at(course: Sequence[tuple[float, float]], seconds: float) -> float:
    return next((regret for since, regret in reversed(course) if since <= seconds), course[0][1])
