"""Runs that GPUs have recorded, taken again through early stopping and through the race's ledger.

Comes in: benchmarks/results/gpu-*.json, which hold raw blocks. Goes out: which runs of settings as good as the best, or
a little slower, would be stopped early; what each search would say. Nothing is measured.

The records were made before a window told who holds its loop, which is written down here, as docs/gpu.md has it; and
when a search had a confirmation apart: rounds of the baseline and the finalists after all trials, a run of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune import TrainingConfig
from autotune.api.setup import runner_for
from autotune.config.plan import Plan, Workload
from autotune.files.run_folder import open_run_folder
from autotune.messages.search import interrupted
from autotune.models.evidence import Ledger, PruningThreshold, behind_threshold, luck_of, run_of
from autotune.policy import POLICY
from autotune.records.measurement import Block, Measurement
from autotune.records.result import Recommendation, RunVariation
from autotune.records.trial import PrecisionFigures, Score, TrialRecord, TrialResult
from autotune.space.space import ResolvedSpace
from autotune.tuning.outcomes import SearchOutcome
from autotune.tuning.probe import probe_workload
from autotune.tuning.select import select
from benchmarks import ROOT
from benchmarks.replay.simulated import Noise, SimulatedMachine

__all__ = [
    "RecordedSearch",
    "RunsAlike",
    "is_stopped",
    "read_runs_alike",
    "read_searches",
    "replayed",
]

_FILES = {
    "H200": ROOT / "benchmarks" / "results" / "gpu-nvidia-h200.json",
    "H100": ROOT / "benchmarks" / "results" / "gpu-nvidia-h100-80gb-hbm3.json",
}
_HELD_BY_DEVICE = {
    ("H200", "slow_build"): None,
    ("H200", "out_of_memory"): None,
    ("H100", "gpt2"): None,
    ("H100", "starved, sized"): {1},
    ("H100", "fidelity, gpt2"): None,
}
"""GPT-2 in full batches, and six wide layers once the loader is ample. None: all trials. The host holds the rest."""
_TAKEN = (
    "samples_per_s",
    "samples_per_s_ci",
    "busy_fraction",
    "busy_source",
    "data_wait_fraction",
    "peak_memory_bytes",
    "startup_s",
    "build_s",
    "memory",
    "loss",
)
"""Of a record; the rest decides nothing here, and some of it has changed its form since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsAlike:
    """Runs of the same settings."""

    name: str
    is_held_by_device: bool
    runs: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSearch:
    """A search whose baseline and finalists ran again."""

    name: str
    baseline: TrainingConfig
    records: tuple[TrialRecord, ...]
    """The trials that measured something, in order, with the rounds as repeats; the time of a run is its place."""
    verdict: str
    """As it was said then."""


def read_searches() -> Iterator[RecordedSearch]:
    """Read the searches of all files in which a trial ran again."""
    for device, path in _FILES.items():
        for part, found in json.loads(path.read_text())["results"].items():
            for name, search in _searches_in(part, found):
                if search["confirmations"]:
                    yield _search_of(device, name, search)


def read_runs_alike(searches: Sequence[RecordedSearch]) -> Iterator[RunsAlike]:
    """Gather runs of the same settings, two or more of them: of searches, and of parts that repeat runs."""
    for search in searches:
        for record in search.records:
            if len(record.runs) > 1:
                yield _alike(f"{search.name}, trial {record.number}", record.runs)
    found = json.loads(_FILES["H100"].read_text())["results"]
    for setting in found["fidelity"]["settings"]:
        name, batch = f"fidelity, {setting['workload']}", setting["settings"]["micro_batch_size"]
        is_held = ("H100", name) in _HELD_BY_DEVICE
        yield _alike(
            f"H100, {name}",
            [_measurement(one, batch, is_held=is_held) for one in setting["trials"]],
        )
    for name in dict.fromkeys(window["workload"] for window in found["block_edges"]["windows"]):
        windows = [one for one in found["block_edges"]["windows"] if one["workload"] == name]
        yield _alike(
            f"H100, block_edges, {name}", [_measurement(one, 1, is_held=False) for one in windows]
        )


def is_stopped(run: Measurement, share: float, best: Measurement, spread: RunVariation) -> bool:
    """Return whether a run would be stopped early, had its settings a share of the rate of the best's.

    Args:
        run: A run of the best's settings.
        share: The rate of its settings over the best's.
        best: Another run of them, which leads.
        spread: Between runs.
    """
    luck = luck_of(spread.of([best.window.is_held_by_device]), spread, POLICY.stopping)
    bar = PruningThreshold(number=0, low_samples_per_s=exp(log(best.samples_per_s) - luck))
    blocks = [block.model_copy(update={"seconds": block.seconds / share}) for block in run.blocks]
    return any(
        behind_threshold(blocks[:count], bar, POLICY.stopping) is not None
        for count in range(1, len(blocks) + 1)
    )


def replayed(search: RecordedSearch, spread: RunVariation) -> Recommendation:
    """Return what a search would recommend from what it has measured, with what is said of it.

    Its runs are looked at in the order in which they were made, and it settles on the fastest finalist once all trials
    have ended.
    """
    ledger = _ledger_of(search, spread)
    evidence = ledger.evidence
    found = SearchOutcome(
        space=_space_of(search.baseline),
        records=search.records,
        ended_because=interrupted(by="replay"),
        evidence=evidence,
        believed={
            record.number: evidence.log_rate(record.number)
            for record in search.records
            if record.is_feasible
        },
        proven=ledger.proven,
        is_settled=True,
    )
    chosen = select(found)
    assert chosen is not None, "the baseline has run"
    return chosen


def _ledger_of(search: RecordedSearch, spread: RunVariation) -> Ledger:
    ledger = Ledger(spread)
    trials = [(record.number, record.result) for record in search.records]
    again = [(record.number, run) for record in search.records for run in record.repeats]
    rounds = max(len(record.repeats) for record in search.records)
    for number, result in trials:
        if result.measurement is not None:
            ledger.add(run_of(result.measurement, number=number, at_s=result.at_s))
    finalists = {number for number, _ in again} - {0}
    ledger.settle(max(finalists, key=ledger.evidence.log_rate))
    for number, result in sorted(again, key=lambda run: run[1].at_s):
        assert result.measurement is not None
        ledger.add(run_of(result.measurement, number=number, at_s=result.at_s))
        if number != 0:
            ledger.analyze(ledger.pairs / rounds, is_last=ledger.pairs == rounds)
    return ledger


def _searches_in(part: str, found: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The searches of a part, each by its name."""
    if not isinstance(found, dict):
        return
    if "trials" in found and "confirmations" in found:
        yield part if name in {"", "search"} else f"{part}, {name}", found
    for key, value in found.items():
        yield from _searches_in(part, value, key if key != "search" else name)


def _search_of(device: str, name: str, search: Mapping[str, Any]) -> RecordedSearch:
    held = _HELD_BY_DEVICE.get((device, name), frozenset[int]())
    configs = {
        one["number"]: TrainingConfig.model_validate(one["config"]) for one in search["trials"]
    }

    def measurement(number: int, figures: Mapping[str, Any]) -> Measurement:
        is_held = held is None or number in held
        return _measurement(figures, configs[number].micro_batch_size, is_held=is_held)

    count = len(search["trials"])
    rounds = {
        one["number"]: tuple(
            TrialResult(
                outcome="ok",
                measurement=measurement(one["number"], run),
                at_s=count + len(search["confirmations"]) * round_ + place,
            )
            for round_, run in enumerate(one["rounds"])
        )
        for place, one in enumerate(search["confirmations"])
    }
    records = [
        TrialRecord(
            number=one["number"],
            config=configs[one["number"]],
            results=(
                TrialResult(
                    outcome="ok",
                    measurement=measurement(one["number"], one["measurement"]),
                    guard=None
                    if one["guard"] is None
                    else PrecisionFigures.model_validate(one["guard"]),
                    at_s=place,
                ),
                *rounds.get(one["number"], ()),
            ),
            score=Score(value=one["score"], feasible=True, violation=0.0),
        )
        for place, one in enumerate(search["trials"])
        if one["outcome"] == "ok"
    ]
    return RecordedSearch(
        name=f"{device}, {name}",
        baseline=configs[0],
        records=tuple(records),
        verdict=search["verdict"],
    )


def _measurement(figures: Mapping[str, Any], batch: int, *, is_held: bool) -> Measurement:
    blocks = [
        Block(
            samples=samples,
            batches=max(1, samples // batch),
            seconds=seconds,
            data_wait_s=min(wait_s, seconds),
        )
        for samples, seconds, wait_s in figures["blocks"]
    ]
    batch_s = sum(block.seconds for block in blocks) / sum(block.batches for block in blocks)
    window = {**figures["window"], "blocks": blocks, "host_ahead_s": batch_s if is_held else 0.0}
    own = {name: figures[name] for name in _TAKEN}
    return Measurement.model_validate({**own, "window": window})


def _alike(name: str, runs: Sequence[Measurement]) -> RunsAlike:
    is_held = all(run.window.is_held_by_device for run in runs)
    return RunsAlike(name=name, is_held_by_device=is_held, runs=tuple(runs))


def _space_of(baseline: TrainingConfig) -> ResolvedSpace:
    plan = Plan(name="replay", workload=Workload(model=None, dataset=None), baseline=baseline)
    machine = SimulatedMachine(lambda _: 1.0, Noise(between_runs=0.0), seed=0, holder="host")
    with TemporaryDirectory() as path, open_run_folder(Path(path), fresh=False) as folder:
        return probe_workload(plan, runner_for(plan, folder, machine))[1]
