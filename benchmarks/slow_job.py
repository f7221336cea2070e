"""A default search of a job that is slow to build and slow to step: how long it takes, and what it finds.

Searched with nothing but its baseline given: no number of trials, no time-out. Twice over: simulated, a build of 60 s
and a step of 2 s as in fine-tuning a large model, with and without a process that trials share, on a machine whose
truth is known; and for real, scaled to a machine of two cores: a build of 20 s (it sleeps, as the reading of a
checkpoint would), a step of the baseline of some 0.7 s of both cores.

Targets: 6 minutes simulated, 2.5 minutes for real. About four minutes; --apart adds the real one with a process for
each trial, ten minutes more.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autotune import TrainingConfig
from autotune.launch.local import LocalLauncher
from benchmarks.cases.cpu import Case
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)
from benchmarks.replay.product import search_whole
from benchmarks.replay.slow_machine import SlowMachine
from benchmarks.yardsticks.product_run import TimedLauncher, plan_for, search, search_figures

_BUILD_S = 20.0
_BATCH = 32
_WIDTH, _LAYERS, _TOKENS = 256, 7, 64
_SIMULATED_BUILD_S = 60.0
_SEEDS = 5
_SPEED = {"float32": 1.0, "tf32": 1.5, "bfloat16": 2.2, "float16": 2.2}
"""Of a step's computing, by precision: our own convention, what an A100 makes of a large transformer."""
_LAUNCH_S = {"large": 0.1, "small": 0.3}
"""Of a step, whatever its batch: of a model that fills the device at once, and of one that does not."""
_STEP_S = 2.0


class SlowToBuild(nn.Module):
    """A transformer's encoder, whose making takes its time."""

    def __init__(self, builds: Path, build_s: float) -> None:
        super().__init__()
        with builds.open("a") as file:
            file.write("built\n")
        time.sleep(build_s)
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores of ten classes."""
        outputs: Tensor = self.head(self.encoder(inputs).mean(1))
        return outputs


def slow_job(builds: Path, build_s: float = _BUILD_S) -> Case:
    """The real job; each build adds a line to a file."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, _TOKENS, _WIDTH, generator=generator)
    labels = torch.randint(0, 10, (512,), generator=generator)
    return Case(
        model=lambda: SlowToBuild(builds, build_s),
        dataset=TensorDataset(inputs, labels),
        optimizer=torch.optim.AdamW,
        settings={"micro_batch_size": _BATCH, "num_workers": 0, "lr": 1e-4},
    )


def simulated_step_s(config: TrainingConfig, launch_s: float) -> float:
    """Seconds of a micro batch: 2 s at the baseline."""
    computing_s = (_STEP_S - launch_s) * config.micro_batch_size / _BATCH / _SPEED[config.amp_dtype]
    return (launch_s + computing_s) * (0.98 if config.fused else 1.0)


def simulate(law: str, seed: int, *, shares: bool) -> dict[str, Any]:
    """A search on the simulated machine."""
    machine = SlowMachine(
        lambda config: simulated_step_s(config, _LAUNCH_S[law]),
        _SIMULATED_BUILD_S,
        seed=seed,
        shares=shares,
    )
    whole = search_whole(replace(plan_for(slow_job(Path()), "auto"), seed=seed), machine)
    chosen = whole.recommendation
    return {
        "seconds": machine.now_s,
        "builds": machine.builds,
        "trials": len(whole.found.records),
        "verdict": None if chosen is None else chosen.verdict,
        "speedup": None if chosen is None or chosen.speedup is None else chosen.speedup.value,
        "jobs": machine.jobs,
    }


def run_real(build_s: float, *, shares: bool, timeout_s: float | None = None) -> dict[str, Any]:
    """A search of the real job."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as path:
        folder, builds = Path(path), Path(path) / "builds"
        server_log, from_s = folder / "server.log", 0.0 if shares else inf
        with closing(LocalLauncher(server_log, device="cpu", shared_from_s=from_s)) as launcher:
            timed, begun = TimedLauncher(launcher), time.monotonic()
            result = search(
                slow_job(builds, build_s), launcher=timed, device="cpu", timeout_s=timeout_s
            )
            seconds = time.monotonic() - begun
        launches = [
            (one.name, one.called_s - begun, one.returned_s - one.called_s)
            for one in timed.launches
        ]
        built = len(builds.read_text().splitlines())
    return {
        "seconds": seconds,
        "builds": built,
        "launches": launches,
        "search": search_figures(result),
    }


def main() -> int:
    parser = make_parser(
        __doc__ or "", "one simulated search; for real a build of 11 s and a time-out of 40 s"
    )
    parser.add_argument(
        "--apart", action="store_true", help="the real one with a process for each trial, too"
    )
    arguments = parser.parse_args()
    recording = start_recording("slow_job", arguments, describe_machine("cpu"))
    recording.results.update(read_results(recording.path, fresh=False))
    for law in _LAUNCH_S:
        for shares in (True, False):
            found = [
                simulate(law, seed, shares=shares)
                for seed in range(1 if arguments.quick else _SEEDS)
            ]
            recording.add(_name(law, shares=shares), {"searches": found})
    for shares in (True, False) if arguments.apart else (True,):
        say(_name("real", shares=shares))
        build_s, timeout_s = (11.0, 40.0) if arguments.quick else (_BUILD_S, None)
        recording.add(
            _name("real", shares=shares),
            {"searches": [run_real(build_s, shares=shares, timeout_s=timeout_s)]},
        )
    _print(recording.results)
    print(f"\n{recording.path}")
    return 0


def _name(what: str, *, shares: bool) -> str:
    return what if shares else f"{what}, a process for each trial"


def _print(results: dict[str, Any]) -> None:
    rows = []
    for name, one in results.items():
        found = one["searches"]
        outcomes = [search.get("search", search) for search in found]
        gains = [outcome["speedup"] for outcome in outcomes if outcome["speedup"] is not None]
        rows.append(
            [
                name,
                str(len(found)),
                f"{median(search['seconds'] for search in found):.0f}",
                f"{max(search['seconds'] for search in found):.0f}",
                f"{median(search['builds'] for search in found):.0f}",
                f"{median(gains):.2f}" if gains else "-",
            ]
        )
    print_table(
        "Default searches of slow jobs",
        ["", "searches", "s", "longest", "builds", "speed-up"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
