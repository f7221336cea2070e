"""Groups of two gloo ranks on two cores: what starting one costs, how true its rate is, how soon its end is known.

start   from the launch of a trial to the last rank's first batch, and to its first step: two ranks less one, in
        interleaved pairs; with the fork server and with a fresh interpreter. At most 1.5 s.
rate    a trial of two ranks against plain_ranks.py, a script of its own started by torchrun, in interleaved pairs: an
        MLP and a CNN with batch norm, each plain, with accumulation and with the fp16 hook. Within 3 %.
death   one rank kills itself (SIGKILL) or raises at a known time: seconds until the runner has the outcome, and
        whether that names the rank.
ray     what Ray costs a trial (ranks_ray.py).

Some twenty minutes. --part NAME measures one part, and keeps the others of the file.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from autotune import Measurement
from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS, Extras
from autotune.records.trial import TrialResult
from benchmarks.cases import ranks as ranks_cases
from benchmarks.cases.cpu import Case, nothing_to_do
from benchmarks.cases.ranks import RATE_SETTINGS, Death, dies
from benchmarks.measures.ranks_ray import measure_ray
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    git_revision,
    make_parser,
    read_results,
    say,
    start_recording,
)
from benchmarks.quietness import keep_freed_memory
from benchmarks.tables.ranks import print_ranks_tables
from benchmarks.yardsticks.plain_ranks import run_plain_ranks
from benchmarks.yardsticks.product_run import (
    RunTrial,
    TimedLauncher,
    measurement_figures,
    open_trials,
)

_RANKS = 2
_GROUP = {"world_size": _RANKS, "strategy": "ddp"}
_RATE_CASES = ("mlp", "convnet")
_EXTRAS = Extras(loader_ceiling=True, device_ceiling=True)
_SHORT = WindowRules(max_s=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """How long everything takes."""

    starts: int
    """Pairs of a trial with one rank and one with two, for each launcher."""
    pairs: int
    """Of a trial and a plain run, for each setting."""
    deaths: int
    """Of each kind and rank."""
    plain_s: float
    skip_s: float
    window: WindowRules


_LARGE = _Scale(starts=12, pairs=5, deaths=5, plain_s=8.0, skip_s=2.0, window=WindowRules())
_QUICK = _Scale(starts=2, pairs=1, deaths=1, plain_s=1.0, skip_s=0.5, window=WindowRules(max_s=1.0))


def main() -> None:
    arguments = _parse()
    recording = start_recording("ranks", arguments, describe_machine("cpu"))
    if arguments.part is not None:
        recording.results.update(read_results(recording.path, fresh=False))
    scale = _QUICK if arguments.quick else _LARGE
    for name, measure in _PARTS.items():
        if arguments.part in {None, name}:
            measure(recording, scale)
    print_ranks_tables(recording.results)
    print(f"\n{recording.path}")


def _parse() -> argparse.Namespace:
    parser = make_parser(
        __doc__ or "", "two starts, one pair, one death, windows and plain runs of 1 s"
    )
    parser.add_argument("--part", choices=list(_PARTS), help="this one alone")
    return parser.parse_args()


def _measure_starts(recording: Recording, scale: _Scale) -> None:
    launchers: dict[str, Callable[[Path], Launcher]] = {
        "fork server": lambda folder: LocalLauncher(folder / "server.log"),
        "fresh interpreter": lambda _: LocalLauncher(None),
    }
    found = _part_of("launchers")
    for name, make_launcher in launchers.items():
        say(f"start: {name}")
        found["launchers"][name] = {"pairs": _start_pairs(make_launcher, scale.starts)}
        recording.add("start", found)


def _start_pairs(make_launcher: Callable[[Path], Launcher], count: int) -> list[dict[str, Any]]:
    """One rank and two, in turns, in alternating order."""
    with _noting(make_launcher) as (launcher, notes):
        case = nothing_to_do(notes)
        settings = {"one": {**case.settings, "intra_op_threads": 1}}
        settings["two"] = {**settings["one"], **_GROUP}
        with open_trials(
            case, device="cpu", window=_SHORT, extras=NO_EXTRAS, launcher=launcher
        ) as run_trial:
            pairs = []
            for number in range(count):
                order = ("one", "two") if number % 2 == 0 else ("two", "one")
                pairs.append({side: _start(run_trial, launcher, settings[side]) for side in order})
    return pairs


def _start(
    run_trial: RunTrial, launcher: TimedLauncher, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Seconds from the launch of a trial on; of several ranks the last one counts."""
    _measured(run_trial(settings))
    launch = launcher.launches[-1]
    return {
        "first_batch_s": launch.noted["first_batch"] - launch.called_s,
        "first_step_s": launch.noted["first_step"] - launch.called_s,
        "report_to_return_s": launch.after_report_s,
        "launch_s": launch.returned_s - launch.called_s,
    }


def _measure_rates(recording: Recording, scale: _Scale) -> None:
    """A first pair of every setting, then the second ones."""
    found = _part_of("cases")
    for name in _RATE_CASES:
        case: Case = getattr(ranks_cases, name)()
        with open_trials(case, device="cpu", window=scale.window, extras=_EXTRAS) as run_trial:
            for number, setting in product(range(scale.pairs), RATE_SETTINGS):
                settings = {**case.settings, **RATE_SETTINGS[setting]}
                pair = _rate_pair(name, settings, run_trial, scale, number)
                own = (
                    found["cases"]
                    .setdefault(name, {})
                    .setdefault(setting, {"settings": settings, "pairs": []})
                )
                own["pairs"].append(pair)
                recording.add("rate", found)
                _say_pair(f"{name}, {setting}", pair)


def _rate_pair(
    name: str, settings: Mapping[str, Any], run_trial: RunTrial, scale: _Scale, number: int
) -> dict[str, Any]:
    """A trial and a plain run next to each other; the even pairs begin with the product."""
    load = list(os.getloadavg())

    def plain() -> dict[str, Any]:
        case = f"benchmarks.cases.ranks:{name}"
        return run_plain_ranks(
            case, settings, ranks=_RANKS, seconds=scale.plain_s, skip_s=scale.skip_s
        )

    if number % 2 == 0:
        trial, truth = _measured(run_trial({**settings, **_GROUP})), plain()
    else:
        truth, trial = plain(), _measured(run_trial({**settings, **_GROUP}))
    return {"load_average": load, "trial": measurement_figures(trial), "plain": truth}


def _say_pair(what: str, pair: Mapping[str, Any]) -> None:
    trial, plain = pair["trial"]["samples_per_s"], pair["plain"]["samples_per_s"]
    say(f"{what}: trial {trial:,.0f}, plain {plain:,.0f} samples/s ({trial / plain - 1:+.1%})")


def _measure_deaths(recording: Recording, scale: _Scale) -> None:
    found = _part_of("kinds")
    with _noting(lambda folder: LocalLauncher(folder / "server.log")) as (launcher, notes):
        for how, rank in product(get_args(Death), range(_RANKS)):
            say(f"death: rank {rank} {how}")
            found["kinds"][f"rank {rank} {how}"] = _deaths(
                dies(notes, how, rank), launcher, rank, scale.deaths
            )
            recording.add("death", found)


def _deaths(case: Case, launcher: TimedLauncher, rank: int, count: int) -> list[dict[str, Any]]:
    with open_trials(
        case, device="cpu", window=WindowRules(), extras=NO_EXTRAS, launcher=launcher
    ) as run_trial:
        return [
            _death(run_trial, launcher, {**case.settings, **_GROUP}, rank) for _ in range(count)
        ]


def _death(
    run_trial: RunTrial, launcher: TimedLauncher, settings: Mapping[str, Any], rank: int
) -> dict[str, Any]:
    result = run_trial(settings)
    known_s = time.monotonic()
    died_s = launcher.launches[-1].noted.get("died")
    if died_s is None:
        raise RuntimeError(
            f"rank {rank} must have died, but the trial is {result.outcome}: {result.reason}"
        )
    return {
        "outcome": result.outcome,
        "reason": result.reason,
        "names_rank": f"rank {rank}" in result.reason,
        "death_to_outcome_s": known_s - died_s,
    }


def _measure_ray(recording: Recording, scale: _Scale) -> None:
    say("ray: trials by the fork server and by a cluster of one node, in turns")
    recording.add("ray", {**_part_of("triples"), **measure_ray(scale.starts)})


def _part_of(name: str) -> dict[str, Any]:
    """An empty part, with the revision that it is measured with: another part may be of another."""
    return {"revision": git_revision(), "load_average": list(os.getloadavg()), name: {}}


@contextmanager
def _noting(make_launcher: Callable[[Path], Launcher]) -> Iterator[tuple[TimedLauncher, Path]]:
    """A launcher with the clock around it, and the file that its trials note times in; closed afterwards."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as path:
        notes = Path(path) / "notes"
        launcher = TimedLauncher(make_launcher(Path(path)), notes)
        try:
            yield launcher, notes
        finally:
            launcher.close()


def _measured(result: TrialResult) -> Measurement:
    if result.measurement is None:
        traceback = result.failure.traceback if result.failure is not None else ""
        raise RuntimeError(
            f"the trial must end well, but it is {result.outcome}: {result.reason}\n{traceback}"
        )
    return result.measurement


_PARTS: Mapping[str, Callable[[Recording, _Scale], None]] = {
    "start": _measure_starts,
    "rate": _measure_rates,
    "death": _measure_deaths,
    "ray": _measure_ray,
}


if __name__ == "__main__":
    keep_freed_memory()
    main()
