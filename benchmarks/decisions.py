"""Are the decisions right? Whole searches on simulated machines whose truth is known (replay/simulated.py).

On a CPU, on a GPU that holds the loop or whose host does, without a time-out and hurried by one, for each spread
between runs and each gain that there is to win: how often a search says "faster", how often that is false, whether the
95 % interval of the ratio holds the truth (of the claim, and of all that ran more than once, as measured), how far the
claim lies from it, what a user who follows the recommendation loses to the best, and how long it takes. Each share
stands with Wilson's 95 % interval in the file. "Not decided" is counted by itself.

    decisions.py                    400 searches with nothing to win, 200 for each gain, at each spread
    decisions.py --searches 40      fewer, and half as many for each gain
    decisions.py --only 5           one spread between runs, in per cent
    decisions.py --situation hurried  one situation alone; "" is a CPU without a time-out
    decisions.py --nothing          those with nothing to win alone
    decisions.py --fresh            all anew; otherwise parts that the file holds already stay
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import log
from statistics import fmean, median
from typing import Any

import torch
from scipy.stats import binomtest

from autotune import TrainingConfig, TrialRecord
from autotune.apply.cores import usable_cores
from autotune.config.plan import Budget, Objective, Plan, SearchSpace, Workload
from autotune.models.evidence import Evidence
from autotune.records.measurement import Interval
from benchmarks.measures.recording import (
    describe_machine,
    git_revision,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.replay.product import search_whole
from benchmarks.replay.simulated import Holder, Noise, SimulatedMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where searches run, and what strays there."""

    name: str
    """"": as most run."""
    holder: Holder = "cpu"
    timeout_s: float | None = None
    spreads: tuple[float, ...] = (0.015, 0.05, 0.1, 0.2)
    """Between two runs of the same settings: an idle machine, a shared one, one under load, a GPU's worst host."""
    gains: tuple[float, ...] = (0.0, 0.03, 0.1, 0.5, 2.0)
    """What there is to win."""
    slow_first: int = 0
    """As Noise has it."""
    slow_share: float = 0.0
    """As Noise has it."""


_HURRY_S = 30.0
"""A time-out that leaves four trials and one or two rounds of two."""
_SLOW_FIRST = 6
"""Runs before another program leaves the machine: the baseline, the first guesses and the baseline once more."""
_SLOW_SHARE = 0.05
_SOME_SPREADS, _SOME_GAINS = (0.02, 0.05), (0.0, 0.5)
_OF_DEVICE = (0.004,)
"""The spread between runs that the device holds."""
SITUATIONS = (
    Situation(name=""),
    Situation(name="hurried", timeout_s=_HURRY_S, gains=(0.0, 0.5, 3.0)),
    Situation(name="GPU held by its host", holder="host", gains=(0.0, 0.1)),
    Situation(
        name="GPU held by its host, hurried",
        holder="host",
        timeout_s=_HURRY_S,
        gains=(0.0, 0.5, 3.0),
    ),
    Situation(name="GPU", holder="device", spreads=(0.001, 0.004), gains=(0.0, 0.03)),
    Situation(
        name="GPU, hurried",
        holder="device",
        timeout_s=_HURRY_S,
        spreads=(0.001, 0.004),
        gains=(0.0, 0.03),
    ),
    Situation(
        name="first runs slow", spreads=_SOME_SPREADS, gains=_SOME_GAINS, slow_first=_SLOW_FIRST
    ),
    Situation(name="disturbed", spreads=_SOME_SPREADS, gains=_SOME_GAINS, slow_share=_SLOW_SHARE),
    Situation(
        name="GPU, first runs slow",
        holder="device",
        spreads=_OF_DEVICE,
        gains=_SOME_GAINS,
        slow_first=_SLOW_FIRST,
    ),
    Situation(
        name="GPU, disturbed",
        holder="device",
        spreads=_OF_DEVICE,
        gains=_SOME_GAINS,
        slow_share=_SLOW_SHARE,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A search."""

    situation: Situation
    spread: float
    gain: float
    seed: int


_RATE = 1000.0
_SOON_S = 90.0
"""Within which a gain is to be found."""
_BASELINE = TrainingConfig(micro_batch_size=32, num_workers=0)
_SPACE = {
    "micro_batch_size": [32],
    "grad_accum_steps": [1],
    "num_workers": [0, 1, 2, 4],
    "prefetch_factor": [2, 4],
    "persistent_workers": [False],
    "pin_memory": [False],
    "compile": [False],
    "fused": [False],
    "cudnn_benchmark": [False],
    "amp_dtype": ["float32", "bfloat16"],
    "intra_op_threads": [None, 1],
}
_NO_BRACKETS = str.maketrans("", "", "[],")
_CARRIERS: tuple[Callable[[TrainingConfig], bool], ...] = (
    lambda config: config.amp_dtype == "bfloat16",
    lambda config: config.intra_op_threads == 1,
    lambda config: config.num_workers >= 2,
)
"""What may bring the gain: one of these in each search, by its seed. Everything else changes nothing."""


def main() -> int:
    arguments = _parse()
    recording = start_recording("decisions", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=arguments.fresh))
    searches = 4 if arguments.quick else arguments.searches
    with ProcessPoolExecutor(
        usable_cores(), initializer=torch.set_num_threads, initargs=(1,)
    ) as processes:
        for situation, spread, gain in _parts(arguments):
            name = name_of(situation, spread, gain)
            count = searches if gain == 0 else max(1, searches // 2)
            if recording.results.get(name, {}).get("count", 0) >= count:
                continue
            tasks = [
                Task(situation=situation, spread=spread, gain=gain, seed=seed)
                for seed in range(count)
            ]
            ended = list(processes.map(decide, tasks, chunksize=4))
            figures = {"revision": git_revision(), "count": count, **summarise(ended, gain)}
            recording.add(name, {**figures, "searches": _columns(ended)})
            say(name)
    print_decisions(recording.results)
    print(f"\n{recording.path}")
    return 0


def _parts(arguments: argparse.Namespace) -> Iterator[tuple[Situation, float, float]]:
    """The parts that are asked for."""
    for situation in SITUATIONS:
        if arguments.situation not in {None, situation.name}:
            continue
        for spread in situation.spreads:
            if arguments.only in {None, round(100 * spread, 3)}:
                gains = [gain for gain in situation.gains if gain == 0 or not arguments.nothing]
                yield from ((situation, spread, gain) for gain in gains)


def name_of(situation: Situation, spread: float, gain: float) -> str:
    """A part's name in the file."""
    own = f"{situation.name}, " if situation.name else ""
    return f"{own}spread {100 * spread:g} %, gain {100 * gain:g} %"


def decide(task: Task) -> dict[str, Any]:
    """One whole search: what it says, and what is true."""
    spread, gain, seed, situation = task.spread, task.gain, task.seed, task.situation
    carries = _CARRIERS[seed % len(_CARRIERS)]

    def truth(config: TrainingConfig) -> float:
        return _RATE * (1 + gain) if carries(config) else _RATE

    plan = Plan(
        name="decisions",
        workload=Workload(model=None, dataset=None),
        baseline=_BASELINE,
        space=SearchSpace.model_validate(_SPACE),
        objective=Objective(global_batch="keep"),
        seed=seed,
    )
    noise = Noise(
        between_runs=spread, slow_first=situation.slow_first, slow_share=situation.slow_share
    )
    if situation.holder == "device":
        noise = replace(
            noise, block=0.001
        )  # blocks of a loop that the device holds are as even as its runs
    machine = SimulatedMachine(truth, noise, seed, holder=situation.holder)
    ended = search_whole(plan, machine, budget=Budget(timeout_s=situation.timeout_s))
    found = ended.recommendation
    assert found is not None, "every configuration runs"
    claim = (
        found.speedup if found.number != 0 else None
    )  # of the baseline over itself nothing is claimed
    configs = {record.number: record.config for record in ended.found.records}
    return {
        "seed": seed,
        "verdict": found.verdict,
        "falsely_proven": sum(truth(configs[number]) <= _RATE for number in ended.found.proven),
        "claim": None if claim is None else rounded(claim),
        "repeated": list(
            repeated_of(
                ended.found.records, ended.found.evidence, lambda config: truth(config) / _RATE
            )
        ),
        "truth": truth(found.config) / _RATE,
        "best": 1 + gain,
        "trials": len(ended.found.records),
        "runs": len(ended.found.evidence.runs),
        "search_s": round(ended.search_s, 1),
        "whole_s": round(machine.now_s, 1),
    }


def _columns(ended: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The searches by column, a line each in the file; the figures of claims and repeated runs as numbers in a text."""
    return {key: [_written(one[key]) for one in ended] for key in ended[0]}


def _written(value: Any) -> Any:
    return str(value).translate(_NO_BRACKETS) if isinstance(value, list) else value


def repeated_of(
    records: Sequence[TrialRecord], evidence: Evidence, truth: Callable[[TrainingConfig], float]
) -> Iterator[list[float]]:
    """Yield, of each trial that ran more than once, its ratio over the baseline with both ends, and the true one."""
    for record in records:
        contrast = evidence.contrast(record.number, 0) if record.number and record.repeats else None
        if contrast is not None and record.is_feasible:
            yield [*rounded(contrast.ratio()), truth(record.config)]


def rounded(ratio: Interval) -> list[float]:
    """Its value and both ends."""
    return [round(end, 4) for end in (ratio.value, ratio.low, ratio.high)]


def summarise(ended: Sequence[dict[str, Any]], gain: float) -> dict[str, Any]:
    """Shares with their intervals, biases and seconds over searches with one gain."""
    claims = [(one["claim"], one["truth"]) for one in ended if one["claim"] is not None]
    faster = [one for one in ended if one["verdict"] == "faster"]
    said = [(claim, truth) for claim, truth in claims if claim is not None]
    repeated = [ratio for one in ended for ratio in one["repeated"]]
    bias = [one["claim"][0] - one["truth"] for one in faster if one["claim"] is not None]
    bias_of_all = [claim[0] - truth for claim, truth in said]
    return {
        "said_faster": _share(len(faster), len(ended)),
        "false_faster": _share(sum(one["truth"] <= 1 for one in faster), len(ended)),
        "found": None if gain == 0 else _share(sum(one["truth"] > 1 for one in faster), len(ended)),
        "recommended_the_gain": None
        if gain == 0
        else _share(sum(one["truth"] > 1 for one in ended), len(ended)),
        "found_soon": None
        if gain == 0
        else _share(
            sum(one["truth"] > 1 and one["whole_s"] <= _SOON_S for one in faster), len(ended)
        ),
        "falsely_proven": _share(sum(one["falsely_proven"] > 0 for one in ended), len(ended)),
        "not_decided": _share(sum(one["verdict"] == "unconfirmed" for one in ended), len(ended)),
        "claims_covered": _share(
            sum(low <= truth <= high for (_, low, high), truth in said), len(said)
        ),
        "repeated_covered": _share(
            sum(low <= truth <= high for _, low, high, truth in repeated), len(repeated)
        ),
        "bias_of_claims": fmean(bias_of_all) if bias_of_all else None,
        "bias_of_said_faster": fmean(bias) if bias else None,
        "half_width": median(log(high / low) / 2 for _, low, high, _ in repeated)
        if repeated
        else None,
        "regret": fmean(1 - one["truth"] / one["best"] for one in ended),
        "whole_s": median(one["whole_s"] for one in ended),
    }


def _share(count: int, total: int) -> list[float] | None:
    """A share with Wilson's 95 % interval; None of nothing."""
    if total == 0:
        return None
    interval = binomtest(count, total).proportion_ci(0.95, method="wilson")
    return [count / total, float(interval.low), float(interval.high)]


def print_decisions(results: Mapping[str, Any]) -> None:
    """Print a line for each part."""
    head = (
        "spread, gain",
        "proven",
        "false",
        "in 90 s",
        "claims",
        "repeated",
        "bias",
        "open",
        "regret",
        "s",
    )
    rows = [
        (
            name.replace("spread ", "").replace("gain ", ""),
            _shown(part["said_faster"]),
            _shown(part["false_faster"]),
            _shown(part["found_soon"]),
            _shown(part["claims_covered"]),
            _shown(part["repeated_covered"]),
            "–" if part["bias_of_claims"] is None else f"{100 * part['bias_of_claims']:+.1f}",  # noqa: RUF001
            _shown(part["not_decided"]),
            f"{100 * part['regret']:.1f} %",
            f"{part['whole_s']:.0f}",
        )
        for name, part in results.items()
    ]
    print_table(
        "Per cent that are said to be proven, falsely so, that hold the truth in their interval",
        head,
        rows,
    )


def _shown(share: list[float] | None) -> str:
    return "–" if share is None else f"{100 * share[0]:.1f}"  # noqa: RUF001 - the usual sign for no figure


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "four searches of each kind")
    parser.add_argument(
        "--searches", type=int, default=400, metavar="N", help="with nothing to win (%(default)s)"
    )
    parser.add_argument(
        "--only", type=float, metavar="PERCENT", help="this spread between runs alone"
    )
    parser.add_argument("--situation", metavar="NAME", help="this situation alone")
    parser.add_argument("--nothing", action="store_true", help="only searches with nothing to win")
    parser.add_argument("--fresh", action="store_true", help="every part anew")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
