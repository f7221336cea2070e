"""What of a search has to run at full scale, for 8, 64 and 1024 GPUs: a simulation, no measurement of such machines.

The product's own search runs through autotune.testing.FakeLauncher, which answers from the made-up machines of
scaling_cluster.py, with noise. Four plans are held against the truth that only the simulation knows:

one node        a search on 8 GPUs; its winner is used on n as it stands
two sizes       beside it all settings of the exchange, on 8 and on 16 GPUs; the law of scaling_model.py is fitted, and
                the setting with the shortest step that it foretells for n is used
checked         beside that the three best foretold and the baseline on n GPUs; the law gets the network that these
                tell, what it foretells now is run as well, and the fastest of them all is used
full scale      the whole search on n GPUs

Prints the tables of docs/scaling.md; --into FILE puts them there. Some five minutes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases.scaling_cluster import FLAT, JOB, KINKED, Cluster, step_s
from benchmarks.cases.scaling_model import Law, Seen, Setting, fit_law, with_network_of
from benchmarks.measures.recording import describe_machine, make_parser, say, start_recording
from benchmarks.measures.scaling_search import (
    NOISE,
    SAMPLES_PER_GPU,
    TINY_BUCKET_MIB,
    TRIALS,
    Search,
    baseline_setting,
    best_step_s,
    search_all,
    search_exchange,
)
from benchmarks.tables.scaling import filled, scaling_tables

_SEEDS = 10
_NODE = FLAT.node_gpus
_CHECKED = 3
_RUN_HOURS = 24.0
_START_S, _START_S_A_GPU, _MEASURE_S = (
    30.0,
    0.09,
    30.0,
)  # of a job: a group of many ranks takes longer to meet
_CURVE = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """A size, and the machines there."""

    name: str
    ranks: int
    cluster: Cluster


_SCENARIOS = (
    _Scenario(name="64 GPUs", ranks=64, cluster=FLAT),
    _Scenario(name="1024 GPUs, one network", ranks=1024, cluster=FLAT),
    _Scenario(name="1024 GPUs, slower beyond a rack", ranks=1024, cluster=KINKED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What a plan comes to."""

    setting: Setting
    runs: Mapping[int, int]
    """Jobs that it takes, by the GPUs that each of them holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Small:
    """What eight and sixteen GPUs have told."""

    first: Search
    one_node: Search
    two_nodes: Search
    law: Law
    blind: Law
    """Fitted without what no search would propose: tiny buckets and small batches."""

    @property
    def runs(self) -> dict[int, int]:
        """Of the search, and of the exchange's settings on both sizes."""
        return {_NODE: self.first.runs + self.one_node.runs, 2 * _NODE: self.two_nodes.runs}

    @property
    def settings(self) -> list[Setting]:
        """Those whose step the law can foretell, less the tiny buckets."""
        found = dict.fromkeys(one.setting for one in self.two_nodes.seen)
        return [setting for setting in found if setting.bucket_mib != TINY_BUCKET_MIB]


def main() -> None:
    arguments = _parse()
    recording = start_recording("scaling", arguments, describe_machine("cpu"))
    recording.add("assumptions", _assumptions(arguments.seeds))
    seeds: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        say(f"seed {seed}")
        seeds.append(_simulate(seed))
        recording.add("seeds", seeds)
    tables = scaling_tables(recording.results)
    print("\n" + "\n\n".join(tables.values()))
    if arguments.into:
        document = Path(arguments.into)
        document.write_text(filled(document.read_text(), tables))
    print(f"\n{recording.path}")


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "one seed")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help=f"repetitions, each with its own noise ({_SEEDS})"
    )
    parser.add_argument(
        "--into", metavar="FILE", help="put the tables into this document, between their markers"
    )
    arguments = parser.parse_args()
    if arguments.seeds is None:
        arguments.seeds = 1 if arguments.quick else _SEEDS
    return arguments


def _simulate(seed: int) -> dict[str, Any]:
    """All plans in all scenarios, once."""
    small = _look_small(seed)
    return {
        "network": asdict(small.law.network),
        "blind_network": asdict(small.blind.network),
        "node": _figures(
            _Choice(setting=small.first.best, runs={_NODE: small.first.runs}), _NODE, FLAT
        ),
        "curve": _curve(small),
        "scenarios": {one.name: _scenario_figures(small, one, seed) for one in _SCENARIOS},
    }


def _look_small(seed: int) -> _Small:
    """Search on a node, then measure the exchange's settings there and on two nodes, and fit."""
    first = search_all(_NODE, FLAT, seed)
    one = search_exchange(first.best, _NODE, FLAT, seed)
    two = search_exchange(first.best, 2 * _NODE, FLAT, seed)
    return _Small(
        first=first,
        one_node=one,
        two_nodes=two,
        law=_fit(one.seen, two.seen),
        blind=_fit(_proposable(one.seen, first.best), _proposable(two.seen, first.best)),
    )


def _fit(one_node: Iterable[Seen], two_nodes: Iterable[Seen]) -> Law:
    return fit_law(
        list(one_node), list(two_nodes), gradient_bytes=JOB.gradient_bytes, node_gpus=_NODE
    )


def _proposable(seen: Iterable[Seen], best: Setting) -> list[Seen]:
    return [
        one
        for one in seen
        if one.setting.micro == best.micro and one.setting.bucket_mib != TINY_BUCKET_MIB
    ]


def _scenario_figures(small: _Small, scenario: _Scenario, seed: int) -> dict[str, Any]:
    usual = [setting for setting in small.settings if setting.micro == small.first.best.micro]
    plans = _plans(small, scenario, seed)
    return {
        "errors": _errors(small.law, small.settings, scenario),
        "blind_errors": _errors(small.blind, usual, scenario),
        "plans": {
            name: _figures(choice, scenario.ranks, scenario.cluster)
            for name, choice in plans.items()
        },
    }


def _plans(small: _Small, scenario: _Scenario, seed: int) -> dict[str, _Choice]:
    full = search_all(scenario.ranks, scenario.cluster, seed)
    return {
        "one node": _Choice(setting=small.first.best, runs={_NODE: small.first.runs}),
        "two sizes": _Choice(
            setting=_by_law(small.law, small.settings, scenario.ranks)[0], runs=small.runs
        ),
        "checked": _check(small, scenario, seed),
        "full scale": _Choice(setting=full.best, runs={scenario.ranks: full.runs}),
    }


def _check(small: _Small, scenario: _Scenario, seed: int) -> _Choice:
    """Run what is foretold to be best, correct the law's network by it, and run what it foretells then."""
    ranks, numbers = scenario.ranks, random.Random(f"{seed}/{scenario.name}")

    def see(setting: Setting) -> Seen:
        return Seen(
            setting=setting,
            step_s=step_s(setting, ranks, scenario.cluster) / numbers.gauss(1, NOISE),
        )

    seen = [see(setting) for setting in _by_law(small.law, small.settings, ranks)[:_CHECKED]]
    corrected = _by_law(with_network_of(small.law, seen, ranks), small.settings, ranks)[0]
    if corrected not in {one.setting for one in seen}:
        seen.append(see(corrected))
    seen.append(see(baseline_setting()))
    best = min(seen, key=lambda one: one.step_s)
    return _Choice(setting=best.setting, runs={**small.runs, ranks: len(seen)})


def _by_law(law: Law, settings: Iterable[Setting], ranks: int) -> list[Setting]:
    """Settings by their foretold step, the shortest first."""
    return sorted(settings, key=lambda setting: law.step_s(setting, ranks))


def _figures(choice: _Choice, ranks: int, cluster: Cluster) -> dict[str, Any]:
    """What a plan costs, what its choice is worth, and what a training run saves by it."""
    own_s = step_s(choice.setting, ranks, cluster)
    saved_share = 1 - own_s / step_s(baseline_setting(), ranks, cluster)
    hours = sum(runs * _job_s(held) * held for held, runs in choice.runs.items()) / 3600
    return {
        "setting": asdict(choice.setting),
        "runs": {str(held): runs for held, runs in choice.runs.items()},
        "search_gpu_hours": hours,
        "slower_than_best": own_s / best_step_s(ranks, cluster) - 1,
        "saved_gpu_hours": _RUN_HOURS * ranks * saved_share,
        "pays_off_after_h": hours / (ranks * saved_share) if saved_share > 0 else None,
    }


def _job_s(ranks: int) -> float:
    return _START_S + _START_S_A_GPU * ranks + _MEASURE_S


def _errors(law: Law, settings: Iterable[Setting], scenario: _Scenario) -> dict[str, float]:
    """Foretold steps over true ones, less 1: of the setting foretold to be best, and of all in absolute terms."""
    ranks, ordered = scenario.ranks, _by_law(law, settings, scenario.ranks)
    errors = [law.step_s(one, ranks) / step_s(one, ranks, scenario.cluster) - 1 for one in ordered]
    sizes = [abs(error) for error in errors]
    return {"best": errors[0], "median_absolute": median(sizes), "worst_absolute": max(sizes)}


def _curve(small: _Small) -> list[dict[str, float]]:
    """Steps by size with torch's own buckets: foretold, and true with either network beyond a rack."""
    usual = replace(small.first.best, bucket_mib=None, is_halved=False)
    return [
        {
            "ranks": ranks,
            "foretold_s": small.law.step_s(usual, ranks),
            "flat_s": step_s(usual, ranks, FLAT),
            "kinked_s": step_s(usual, ranks, KINKED),
        }
        for ranks in _CURVE
    ]


def _assumptions(seeds: int) -> dict[str, Any]:
    """What the simulation takes for granted, for the document."""
    return {
        "job": asdict(JOB),
        "cluster": asdict(FLAT),
        "beyond_a_rack": asdict(KINKED.beyond),
        "baseline": asdict(baseline_setting()),
        "samples_per_gpu": SAMPLES_PER_GPU,
        "noise": NOISE,
        "seeds": seeds,
        "trials": TRIALS,
        "checked": _CHECKED,
        "job_s": {str(ranks): _job_s(ranks) for ranks in (_NODE, 64, 1024)},
        "run_hours": _RUN_HOURS,
    }


if __name__ == "__main__":
    main()
