"""Records whole grids: every point of eight workloads measured as a trial of the product, one JSON line each.

A surface is recorded over several sittings: each begins where the file ends. First comes one look at the workload, then
twenty points that are spread over the grid, then the curves (loader and device alone, as a search's probe measures
them), then every other point once in random order, the baseline again after every tenth, so that drift can be seen;
then a fifth of the points once more, and what `--visits` asks for; then what may be the best point is visited until it
has `--contender-visits`, since the best of many points seen once is the luckiest one as well. Nothing is smoothed: a
line holds what a trial has answered, the blocks of its window included, and how fast the machine was right before it.
Each sitting is noted, since the machine is another one in each.

What is there can be made sharper: `--best 10 --until 0.015` visits the baseline and the ten best points in turns until
the standard error of each one's mean logarithm of the rate (replay/truth.py) is 1.5 % at most. Which are the best is
asked anew after each round; of the points, what is sharp enough is left out of it.

    surfaces.py                    all that is missing, workload after workload
    surfaces.py --minutes 10       as much as ends within ten minutes
    surfaces.py --points 20        the first twenty points alone
    surfaces.py --workload cliff   this one alone
    surfaces.py --visits 2         each point twice
    surfaces.py --contender-visits 6  what lies close to the best six times
    surfaces.py --best 10 --until 0.015 --minutes 10   what lies closest to the best, sharper; goes on by itself
    surfaces.py --held-out         the workloads that no constant may be chosen on, alone
    surfaces.py --summary          what there is, and how far repeats differ

replay.py serves the files through the product's own launcher seam; regret.py compares ways of searching on them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median
from time import monotonic

from autotune import TrainingConfig
from autotune.config.training_config import LOADER_SETTINGS
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from autotune.tuning.loop import THOROUGH_EXTRAS
from benchmarks.cases.cpu import Case
from benchmarks.cases.surfaces import Grid, grids_for, small_gpu_grids
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    machine_name,
    print_table,
    say,
)
from benchmarks.quietness import keep_freed_memory, look_at_speeds
from benchmarks.replay.replay import FORMAT_VERSION, SURFACES, Surface, Visit, read_surface
from benchmarks.replay.surface_order import FIRST_POINTS, missing_visits
from benchmarks.yardsticks.product_run import TRIAL_DEADLINE_S, open_runner

_WINDOW = WindowRules(max_s=2.0)
_STRETCH_S = 0.2  # of a ceiling, as a search's probe takes
_PROBE_S = 0.1  # of each kind of work, before each trial
_REFERENCE_EVERY = 10
_CONTENDER_VISITS = 4
_CURVES_DEADLINE_S = 300.0
_CURVES_NEED_S = 150.0  # of a sitting, before they begin: they are recorded once
_TRIAL_NEEDS_S = 10.0  # as long as none was seen
_SHARP = 0.015
"""Standard error at which the ten best points tell a regret of 2 % from none in most cases: our own convention."""
_SHOWN_BEST = 10


@dataclass(slots=True)
class _File:
    """A surface under way: lines are added at the end, each whole."""

    path: Path

    def read(self) -> Surface | None:
        """What there is; a last line that was cut off is removed."""
        if not self.path.exists():
            return None
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self.path.write_bytes(whole)
        return read_surface(self.path) if whole else None

    def add(self, kind: str, **content: object) -> None:
        """Add a line."""
        line = {"kind": kind, "at": datetime.now(UTC).isoformat(timespec="seconds"), **content}
        with self.path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


@dataclass(slots=True)
class _Sitting:
    """The time that there is: nothing begins that may not end within it."""

    ends_at: float
    longest_s: float = _TRIAL_NEEDS_S
    """Of the trials of this sitting."""

    def begin(self, file: _File) -> None:
        """Note it in a surface's file."""
        file.add("sitting", git_revision=git_revision(), load_average=list(os.getloadavg()))

    @property
    def left_s(self) -> float:
        return self.ends_at - monotonic()

    def has(self, seconds: float) -> bool:
        return self.left_s >= seconds

    def took(self, seconds: float) -> None:
        self.longest_s = max(self.longest_s, seconds)


def main() -> int:
    begun, machine = monotonic(), describe_machine()
    grids = small_gpu_grids() if "--smoke-cpu" in sys.argv else grids_for(machine["device_kind"])
    arguments = _parse(list(grids))
    sitting = _Sitting(ends_at=inf if arguments.minutes is None else begun + 60 * arguments.minutes)
    arguments.surfaces.mkdir(parents=True, exist_ok=True)
    is_wanted = {name: grid.is_held_out or not arguments.held_out for name, grid in grids.items()}
    names = (
        [arguments.workload] if arguments.workload else [name for name in grids if is_wanted[name]]
    )
    files = {
        name: _File(arguments.surfaces / f"{name}-{machine_name(machine)}.jsonl") for name in names
    }
    if not arguments.summary:
        for name, file in files.items():
            if arguments.best is None:
                _record(name, grids[name], file, machine, arguments, sitting)
            else:
                _sharpen(name, grids[name], file, arguments, sitting)
    _print_summary({name: file.read() for name, file in files.items()})
    return 0


def _parse(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=names, help="this one alone")
    parser.add_argument(
        "--visits", type=int, default=1, metavar="N", help="visits of every point (%(default)s)"
    )
    parser.add_argument(
        "--contender-visits",
        type=int,
        default=_CONTENDER_VISITS,
        metavar="N",
        help="visits of every point close to the best (%(default)s)",
    )
    parser.add_argument(
        "--best", type=int, metavar="N", help="visit the N best points of what there is again"
    )
    parser.add_argument(
        "--until",
        type=float,
        default=_SHARP,
        metavar="SE",
        help="standard error to reach with --best (%(default)s)",
    )
    parser.add_argument("--held-out", action="store_true", help="held-out workloads alone")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="begin nothing that may end after so many minutes",
    )
    parser.add_argument("--points", type=int, metavar="N", help="the first N points alone")
    parser.add_argument("--smoke-cpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--summary", action="store_true", help="record nothing")
    parser.add_argument(
        "--surfaces",
        type=Path,
        default=SURFACES,
        metavar="FOLDER",
        help="where they are (%(default)s)",
    )
    return parser.parse_args()


def _record(
    name: str,
    grid: Grid,
    file: _File,
    machine: Mapping[str, object],
    arguments: argparse.Namespace,
    sitting: _Sitting,
) -> None:
    surface = file.read()
    if not _missing(grid, surface, arguments) or not sitting.has(sitting.longest_s):
        return
    case = _case_of(name, grid)
    if case is None:
        return
    with open_runner(case, device="auto", space=grid.space, memory_limit=grid.memory_limit) as (
        runner,
        space,
    ):
        if surface is None:
            file.add(
                "header",
                version=FORMAT_VERSION,
                workload=name,
                is_held_out=grid.is_held_out,
                baseline=dict(grid.baseline),
                domains={setting: list(values) for setting, values in grid.domains.items()},
                limit_bytes=runner.limits.limit_bytes,
                environment=space.environment.model_dump(mode="json"),
                facts=space.facts.model_dump(mode="json"),
                processor=machine["processor"],
                window=_WINDOW.model_dump(),
                probe_s=runner.probe(space.baseline, deadline_s=TRIAL_DEADLINE_S).result.wall_s,
                git_revision=git_revision(),
            )
        sitting.begin(file)
        if surface is None or surface.curves is None:
            first = FIRST_POINTS - (0 if surface is None else len(surface.configs))
            if not _visit_all(
                name,
                grid,
                runner,
                file,
                _missing(grid, surface, arguments)[: max(0, first)],
                sitting,
            ):
                return
            if not sitting.has(_CURVES_NEED_S):
                return
            _record_curves(grid, runner, file, sitting)
        while left := _missing(grid, file.read(), arguments):
            if not _visit_all(name, grid, runner, file, left, sitting):
                return


def _sharpen(
    name: str, grid: Grid, file: _File, arguments: argparse.Namespace, sitting: _Sitting
) -> None:
    """Visit the baseline and the best points in rounds, every second one in reverse, until each is sharp enough."""
    surface = file.read()
    if surface is None or not _not_sharp(surface, arguments) or not sitting.has(sitting.longest_s):
        return
    case = _case_of(name, grid)
    if case is None:
        return
    with open_runner(case, device="auto", space=grid.space, memory_limit=grid.memory_limit) as (
        runner,
        _,
    ):
        sitting.begin(file)
        rounds = 0
        while left := _not_sharp(surface, arguments):
            worst = max(surface.truth.errors[config] for config in left)
            say(f"{name}: {len(left)} points, of which one has an error of {worst:.1%}")
            visited = _int_visits(surface)
            for config in [surface.baseline, *left][:: 1 if rounds % 2 == 0 else -1]:
                if not sitting.has(sitting.longest_s):
                    return
                sitting.took(_visit(runner, file, config, visited[config]))
            surface, rounds = file.read() or surface, rounds + 1


def _not_sharp(surface: Surface, arguments: argparse.Namespace) -> list[TrainingConfig]:
    """Of the best points, those whose error is still too large."""
    truth = surface.truth
    best = sorted(truth.rates, key=lambda config: -truth.rates[config])[: arguments.best]
    return [
        config
        for config in best
        if config != surface.baseline and truth.errors[config] > arguments.until
    ]


def _int_visits(surface: Surface) -> Counter[TrainingConfig]:
    """How often each point was visited, references not counted: the number of its next visit."""
    return Counter(trial.config for trial in surface.trials if trial.visit != "reference")


def _case_of(name: str, grid: Grid) -> Case | None:
    """The workload; None where its libraries are missing, such as Pillow for JPEGs."""
    try:
        return replace(grid.case(), settings=grid.baseline)
    except ImportError as error:
        print(f"{name}: left out: {error}", file=sys.stderr)
        return None


def _visit_all(
    name: str,
    grid: Grid,
    runner: TrialRunner,
    file: _File,
    visits: Sequence[tuple[TrainingConfig, Visit]],
    sitting: _Sitting,
) -> bool:
    """Make visits, the baseline between them; False where the sitting's time was over before."""
    own = TrainingConfig.model_validate(dict(grid.baseline))
    for number, (config, visit) in enumerate(visits):
        is_tenth = number % _REFERENCE_EVERY == 0
        if not sitting.has((1 + is_tenth) * sitting.longest_s):
            return False
        if is_tenth:
            sitting.took(_visit(runner, file, own, "reference"))
            say(f"{name}: {number}/{len(visits)}")
        sitting.took(_visit(runner, file, config, visit))
    return True


def _missing(
    grid: Grid, surface: Surface | None, arguments: argparse.Namespace
) -> list[tuple[TrainingConfig, Visit]]:
    return missing_visits(
        grid,
        surface,
        points=arguments.points,
        visits=arguments.visits,
        contender_visits=arguments.contender_visits,
    )


def _visit(runner: TrialRunner, file: _File, config: TrainingConfig, visit: Visit) -> float:
    """Run a trial and write it down; how long it took."""
    thorough = THOROUGH_EXTRAS.model_copy(update={"stretch_s": _STRETCH_S})
    extras = thorough if visit == "reference" else NO_EXTRAS
    speeds = look_at_speeds(_PROBE_S)
    result = runner.run(
        config, name="point", deadline_s=TRIAL_DEADLINE_S, window=_WINDOW, extras=extras
    )
    file.add(
        "trial",
        visit=visit,
        config=config.model_dump(mode="json", exclude_defaults=True),
        result=result.model_dump(mode="json", exclude_defaults=True),
        speeds=speeds,
    )
    return result.wall_s


def _record_curves(grid: Grid, runner: TrialRunner, file: _File, sitting: _Sitting) -> None:
    """All device settings of the grid in one process, and all loader settings."""
    own = TrainingConfig.model_validate(dict(grid.baseline))
    deadline_s = min(_CURVES_DEADLINE_S, sitting.left_s)
    report = runner.curves(own, curve_points(grid), deadline_s=deadline_s, stretch_s=_STRETCH_S)
    if report.curves is None:
        print(f"the curves failed: {report.result.reason}", file=sys.stderr)
        return
    file.add(
        "curves",
        wall_s=report.result.wall_s,
        curves=report.curves.model_dump(mode="json", exclude_defaults=True),
    )


def curve_points(grid: Grid) -> list[TrainingConfig]:
    """The points whose loader or device is looked at alone: those of one side, at the baseline's batch of the other.

    Of the loader with the most workers also the ends of the batch, as a search looks at it.
    """
    own = TrainingConfig.model_validate(dict(grid.baseline))
    most, batches = max(grid.domains["num_workers"]), grid.domains["micro_batch_size"]
    variations, of_loader = [], {*LOADER_SETTINGS}
    for config in sorted(grid.configs(), key=lambda one: one.micro_batch_size):
        changed = {name for name, _ in set(config) if getattr(config, name) != getattr(own, name)}
        is_end = config.num_workers == most and config.micro_batch_size in {
            min(batches),
            max(batches),
        }
        is_of_loader = changed <= of_loader or (
            is_end and changed <= of_loader | {"micro_batch_size"}
        )
        if changed and (is_of_loader or not changed & of_loader):
            variations.append(config)
    return variations


def _print_summary(surfaces: Mapping[str, Surface | None]) -> None:
    rows = [_row(name, surface) for name, surface in surfaces.items() if surface is not None]
    head = ("surface", "points", "visits", "best/s", "vs base", "repeats", "SE", "over", "s/trial")
    title = "Surfaces (repeats: median difference of two visits of a point; SE: the largest of the ten best points)"
    print_table(title, head, rows)


def _row(name: str, surface: Surface) -> Sequence[str]:
    rates = surface.rates()
    visits = sum(isinstance(trial.visit, int) for trial in surface.trials)
    base = rates.get(surface.baseline)
    differences = [abs(one / other - 1) for one, other in surface.pairs()]
    errors = sorted((-rate, surface.truth.errors[config]) for config, rate in rates.items())
    over = sum(surface.is_over(config) for config in surface.configs)
    return (
        name,
        str(len(surface.configs)),
        str(visits),
        f"{max(rates.values(), default=0.0):,.0f}",
        f"{max(rates.values()) / base:.2f}" if base else "-",
        f"{median(differences):.1%}" if differences else "-",
        f"{max(error for _, error in errors[:_SHOWN_BEST]):.1%}" if errors else "-",
        str(over),
        f"{median(trial.result.wall_s for trial in surface.trials):.1f}" if surface.trials else "-",
    )


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
