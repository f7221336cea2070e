"""What makes two runs of the same settings differ, and what takes that away: figures behind cheaper noise.

memory   trials of a small CNN in turns, with malloc as glibc has it and keeping what is freed, as trials have it by
         default: rates, page faults a step, peak memory. A minute or two.

looks    two settings of each of three workloads in turns, twenty times: which share of what makes a rate differ from
         run to run is explained, out of sample, by short looks at the machine's speed inside the trial (10 ms of each
         of three kinds, before its build and after its window), by long ones between trials (0.3 s of each), and by
         what other programs took of the cores in the window (Measurement.host_load). Some twelve minutes.

A machine that others use at the same time is no obstacle: runs are in turns, and pairs of neighbours are compared.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn

from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from benchmarks.cases.cpu import Case
from benchmarks.cases.fidelity import photos, text
from benchmarks.cases.surfaces import cliff
from benchmarks.measures.explained import COVARIATES, Turn, errors_of_ratio, explained_shares
from benchmarks.measures.recording import (
    describe_machine,
    make_parser,
    print_table,
    say,
    start_recording,
)
from benchmarks.measures.trial_looks import looked_at
from benchmarks.quietness import look_at_speeds
from benchmarks.yardsticks.product_run import RunTrial, measurement_figures, open_trials

_PAIRS = 8
_WINDOW = WindowRules(max_s=3.0)
_AS_GLIBC_HAS_IT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
"""A tunable at its default: the user's own choice, beside which nothing is set."""
_CNN: Mapping[str, Any] = {"micro_batch_size": 32, "intra_op_threads": 1}
"""One thread: two that wait for each other stand still for whole time slices where a neighbour takes a core."""
_STEPS_A_NOTE = 10
_TURNS = 20
_LOOKED_AT: Mapping[str, tuple[Callable[[], Case], Sequence[Mapping[str, Any]]]] = {
    "cliff": (cliff, ({"micro_batch_size": 32}, {"micro_batch_size": 32, "intra_op_threads": 1})),
    "text": (text, ({"micro_batch_size": 32}, {"micro_batch_size": 32, "num_workers": 2})),
    "photos": (photos, ({"micro_batch_size": 32}, {"micro_batch_size": 32, "num_workers": 2})),
}


def main() -> None:
    parser = make_parser(__doc__ or "", "one pair")
    parser.add_argument("part", choices=["memory", "looks"])
    arguments = parser.parse_args()
    recording = start_recording(f"noise-{arguments.part}", arguments, describe_machine("cpu"))
    if arguments.part == "memory":
        recording.add("memory", _compare_memory(1 if arguments.quick else _PAIRS))
    else:
        for name, (make_case, settings) in _LOOKED_AT.items():
            turns = _run_in_turns(name, make_case(), settings, 3 if arguments.quick else _TURNS)
            found = {"explained": explained_shares(turns), "ratio_errors": errors_of_ratio(turns)}
            recording.add(name, {"turns": turns, **found})
        _print_explained(recording.results)
    print(f"\n{recording.path}")


def _compare_memory(pairs: int) -> dict[str, Any]:
    """Trials with either malloc in turns, in alternating order."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        notes = Path(folder) / "faults"
        case = Case(
            model=cliff().model, dataset=cliff().dataset, step=_CountingStep(notes), settings=_CNN
        )
        with _trials(case, _AS_GLIBC_HAS_IT) as freeing, _trials(case, {}) as keeping:
            sides = {"freed": freeing, "kept": keeping}
            runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for number in range(pairs):
                for side in sides if number % 2 == 0 else reversed(sides):
                    runs[side].append(_run(sides[side], notes))
                    found = runs[side][-1]
                    say(
                        f"{side}: {found['samples_per_s']:,.0f} samples/s, {found['faults_a_step']:,.0f} faults a step"
                    )
    ratios = [
        kept["samples_per_s"] / freed["samples_per_s"]
        for freed, kept in zip(runs["freed"], runs["kept"], strict=True)
    ]
    rows = [[side, *_row(own)] for side, own in runs.items()]
    head = ["freed memory is", "samples/s", "least", "most", "faults a step", "peak MiB"]
    print_table(
        f"{pairs} trials each; kept over freed, median of pairs: {median(ratios):.2f}", head, rows
    )
    return {"runs": runs, "ratios": ratios, "median_ratio": median(ratios)}


@contextmanager
def _trials(case: Case, variables: Mapping[str, str]) -> Iterator[RunTrial]:
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        launcher = LocalLauncher(Path(folder) / "log", {**os.environ, **variables}, device="cpu")
        with (
            closing(launcher),
            open_trials(
                case, device="cpu", window=_WINDOW, extras=NO_EXTRAS, launcher=launcher
            ) as run,
        ):
            yield run


def _run(run: RunTrial, notes: Path) -> dict[str, Any]:
    notes.write_text("")
    result = run(_CNN)
    if result.measurement is None:
        raise RuntimeError(f"the trial must end well, but it is {result.outcome}: {result.reason}")
    counts = [int(line) for line in notes.read_text().split()]
    half = counts[len(counts) // 2 :]  # the warm-up takes more
    faults = (half[-1] - half[0]) / _STEPS_A_NOTE / max(1, len(half) - 1)
    return {"faults_a_step": faults, **measurement_figures(result.measurement)}


def _row(runs: list[dict[str, Any]]) -> list[str]:
    rates = [run["samples_per_s"] for run in runs]
    return [
        f"{median(rates):,.0f}",
        f"{min(rates):,.0f}",
        f"{max(rates):,.0f}",
        f"{median(run['faults_a_step'] for run in runs):,.0f}",
        f"{median(run['peak_memory_bytes'] for run in runs) / 2**20:,.0f}",
    ]


def _run_in_turns(
    name: str, case: Case, settings: Sequence[Mapping[str, Any]], turns: int
) -> list[list[Turn]]:
    """Turns of both settings, in alternating order, with all looks; a list for each of the settings."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        notes, found = Path(folder) / "looks", [list[Turn]() for _ in settings]
        with open_trials(
            looked_at(case, notes), device="cpu", window=_WINDOW, extras=NO_EXTRAS
        ) as run:
            between = look_at_speeds()
            for number in range(turns):
                for which in (
                    range(len(settings)) if number % 2 == 0 else reversed(range(len(settings)))
                ):
                    notes.write_text("")
                    result, earlier = run(settings[which]), between
                    between = look_at_speeds()
                    if result.measurement is None or result.measurement.host_load is None:
                        raise RuntimeError(
                            f"the trial must end well, with the host's load: {result.reason}"
                        )
                    load = result.measurement.host_load
                    own = json.loads(notes.read_text())
                    found[which].append(
                        {
                            "samples_per_s": result.measurement.samples_per_s,
                            "inside": [own["before"], own["after"]],
                            "between": [earlier, between],
                            "others": load.others_cores / load.cores,
                            "load": load.model_dump(mode="json"),
                        }
                    )
                    rate = result.measurement.samples_per_s
                    say(f"{name} {which}: {rate:,.0f} samples/s, others {load.others_cores:.1f}")
    return found


def _print_explained(results: Mapping[str, Any]) -> None:
    rows = [
        [
            name,
            kind,
            f"{shares['sd']:.0%}",
            *(f"{shares[covariates]:.0%}" for covariates in COVARIATES),
        ]
        for name, figures in results.items()
        for kind, shares in figures["explained"].items()
    ]
    head = ["workload", "of", "sd", *COVARIATES]
    print_table(
        "Share of the variance of log(rate) explained, each run foretold from the others",
        head,
        rows,
    )
    kinds = ("plain", "one", "others")
    rows = [
        [name, *(f"{figures['ratio_errors'][kind]:.2f}" for kind in kinds)]
        for name, figures in results.items()
    ]
    print_table(
        "Spread of log(ratio) from six rounds: as it is, and adjusted by",
        ["workload", *kinds],
        rows,
    )


class _CountingStep:
    """The default step for images and labels; notes the page faults of its process so far, every few steps."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._steps = notes, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self._steps % _STEPS_A_NOTE == 0:
            with self._notes.open("a") as file:
                file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_minflt}\n")
        self._steps += 1
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)


if __name__ == "__main__":
    main()
