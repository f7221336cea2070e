"""Training scripts that nobody here wrote: what `diagnose` and `run` answer, and what each script reaches by `apply`.

The scripts are those of PyTorch's examples, timm, Lightning and minGPT, unchanged, with generated data of the format
that they read. They are not part of this repository; `--scripts` names a folder that holds, from a checkout of each:
    imagenet/main.py          pytorch/examples
    timm/train.py, timm/timm  huggingface/pytorch-image-models
    lightning/transformer.py  Lightning-AI/pytorch-lightning, examples/pytorch/basics
    mingpt/                   karpathy/minGPT
Throughput without and with the settings is read from the lines of progress that the script itself prints. What each
command prints is kept with its seconds in the folder of the JSON's name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import yaml
from PIL import Image

from benchmarks.measures.commands import RunCommand, run_command, write_log
from benchmarks.measures.gpu_watch import GpuWatch
from benchmarks.measures.progress import read_pace
from benchmarks.measures.recording import (
    Recording,
    describe_machine,
    make_parser,
    print_table,
    read_results,
    say,
    start_recording,
)

_IMAGES, _NAMES_AN_IMAGE, _CLASSES = 2_000, 20, 100
"""Distinct JPEGs, how many files are links to each, and folders of classes: an epoch of 40,000 files lasts long next to
the start of its loader's workers, as ImageNet's does."""
_WORDS, _VOCABULARY = 2_000_000, 30_000  # as WikiText-2 has
_SHAKESPEARE = 1_100_000  # characters, as minGPT's text has
_LONGEST_S = 200.0
_PLAIN_S, _APPLIED_S = 36.0, 44.0  # of training with its start; `apply` starts later
_SMOKE_SEARCH_S = 45.0
_SMOKE = {
    "-b 256": "-b 8",
    "-b 128": "-b 8",
    "-j 4": "-j 1",
    "resnet50": "resnet18",
    "--amp": "--device cpu",
}
"""Words of a command, and their replacements on a CPU."""
_AUTOTUNE = (sys.executable, "-m", "autotune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, its command, and how its progress is read."""

    folder: str
    command: str
    """Its words after Python; {data} stands for the folder of generated data."""
    batch: int = 0
    """Samples a batch, as the command asks for them; 0: its throughput is not read."""
    progress: str = ""
    """Regular expression of a line of progress, as `read_pace` takes it."""
    search_s: float = 0.0
    """Time for `run`; 0: it is diagnosed alone."""
    paths: Sequence[str] = ()
    """Folders that the script imports from, besides its own."""


SCRIPTS: Mapping[str, Script] = {
    "imagenet": Script(
        folder="imagenet",
        command="main.py -a resnet18 -b 256 -j 4 {data}/images",
        batch=256,
        progress=r"Epoch: \[(?P<epoch>\d+)\]\[ *(?P<batch>\d+)/",
        search_s=90,
    ),
    "mingpt": Script(
        folder="mingpt/projects/chargpt",
        command="chargpt.py",
        batch=64,
        progress=r"iter_dt .*; iter (?P<batch>\d+):",
        search_s=90,
        paths=("mingpt",),
    ),
    "timm": Script(
        folder="timm",
        command="train.py --data-dir {data}/images --val-split val --model resnet50 --num-classes 100 --amp"
        " --pin-mem -b 128 -j 4 --log-interval 10 --output {data}/timm",
    ),
    "lightning": Script(folder="lightning", command="transformer.py"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One command on one script."""

    name: str
    what: str
    scripts: Path
    data: Path
    logs: Path
    smoke: bool

    @property
    def script(self) -> Script:
        """The script."""
        return SCRIPTS[self.name]

    @property
    def words(self) -> list[str]:
        """The command that trains by the script alone."""
        command = self.script.command
        for usual, small in _SMOKE.items() if self.smoke else ():
            command = command.replace(usual, small)
        return [sys.executable, *shlex.split(command.format(data=self.data))]

    @property
    def run_folder(self) -> Path:
        """The folder that `run` writes and `apply` reads."""
        return self.data / f"run-{self.name}"

    def run(self, command: Sequence[str], *, within_s: float) -> RunCommand:
        """Run a command in the script's folder, interrupt it as a user would, and keep what it printed."""
        paths = [str(self.scripts / path) for path in self.script.paths]
        python_path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        ran = run_command(
            command,
            folder=self.scripts / self.script.folder,
            environment={**os.environ, "PYTHONPATH": python_path, "COLUMNS": "100"},
            within_s=within_s,
            ends_by=signal.SIGINT,
        )
        self.logs.mkdir(exist_ok=True)
        write_log(self.logs / f"{self.name}-{self.what}.log", ran.lines)
        return ran


def main() -> int:
    """Try what is asked for, one command after the other."""
    arguments = _parse()
    scripts, data = arguments.scripts.resolve(), Path(arguments.data).resolve()
    recording = start_recording("other_scripts", arguments, describe_machine())
    recording.results.update(read_results(recording.path, fresh=False))
    _make_data(data, scripts, smoke=arguments.smoke_cpu)
    for task in arguments.only.split(","):
        name, what = task.split(":")
        say(task)
        logs = recording.path.with_suffix("")
        found = _TRIED[what](
            Attempt(
                name=name,
                what=what,
                scripts=scripts,
                data=data,
                logs=logs,
                smoke=arguments.smoke_cpu,
            )
        )
        recording.add(name, {**recording.results.get(name, {}), what: found})
        say(f"{task}: {json.dumps(found)[:600]}")
    _print(recording)
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "nothing")
    parser.add_argument("--scripts", type=Path, required=True, help="the folder with the scripts")
    parser.add_argument(
        "--data", default=tempfile.gettempdir() + "/other-scripts", help="where data is made"
    )
    parser.add_argument(
        "--smoke-cpu", action="store_true", help="tiny data and batches, short times: no figures"
    )
    parser.add_argument(
        "--only",
        default="imagenet:diagnose,imagenet:run,imagenet:plain,imagenet:apply,mingpt:diagnose,mingpt:run,mingpt:plain,"
        "mingpt:apply,timm:diagnose,lightning:diagnose",
        help="script:what, by commas, in this order (%(default)s); what is diagnose, run, plain or apply",
    )
    return parser.parse_args()


def _diagnosed(attempt: Attempt) -> dict[str, Any]:
    return _answer(attempt.run([*_AUTOTUNE, "diagnose", "--", *attempt.words], within_s=_LONGEST_S))


def _searched(attempt: Attempt) -> dict[str, Any]:
    limit_s, folder = (
        _SMOKE_SEARCH_S if attempt.smoke else attempt.script.search_s,
        attempt.run_folder,
    )
    settings = ["--set", f"budget.timeout_s={limit_s}", "--set", f"run_dir={folder}"]
    found = _answer(
        attempt.run([*_AUTOTUNE, "run", *settings, "--", *attempt.words], within_s=_LONGEST_S)
    )
    if (folder / "recommended.yaml").exists():
        found["recommended"] = yaml.safe_load((folder / "recommended.yaml").read_text())
        shutil.copy(folder / "trials.jsonl", attempt.logs / f"{attempt.name}-trials.jsonl")
    return found


def _answer(ran: RunCommand) -> dict[str, Any]:
    """Return the exit code, seconds, and the first lines of the answer with the seconds at which they came."""
    out = [
        (round(line.at_s, 1), line.text)
        for line in ran.lines
        if line.stream == "out" and line.text.strip()
    ]
    errors = [text for text in ran.texts("err") if text.startswith("error: ")]
    return {
        "code": ran.code,
        "seconds": round(ran.seconds, 1),
        "said": out[:12],
        "errors": errors[:2],
    }


def _trained(attempt: Attempt) -> dict[str, Any]:
    return _throughput(attempt, attempt.words, batch=attempt.script.batch, within_s=_PLAIN_S)


def _applied(attempt: Attempt) -> dict[str, Any]:
    document = attempt.run_folder / "recommended.yaml"
    if not document.exists():
        return {"error": "nothing was recommended"}
    batch = yaml.safe_load(document.read_text())["settings"]["micro_batch_size"]
    command = [*_AUTOTUNE, "apply", str(attempt.run_folder), "--", *attempt.words]
    return _throughput(attempt, command, batch=batch, within_s=_APPLIED_S)


def _throughput(
    attempt: Attempt, command: Sequence[str], *, batch: int, within_s: float
) -> dict[str, Any]:
    """Train for some seconds; samples/s, and how busy NVML sees the device over the same seconds."""
    with GpuWatch() as watch:
        ran = attempt.run(command, within_s=within_s)
    found: dict[str, Any] = {"code": ran.code, "seconds": round(ran.seconds, 1), "batch": batch}
    pace = read_pace(ran.lines, attempt.script.progress)
    if pace is None:
        return {**found, "samples_per_s": None, "errors": ran.texts("err")[-3:]}
    return {
        **found,
        "samples_per_s": batch * pace.batches_per_s,
        "batches": pace.batches,
        "over_s": pace.seconds,
        "nvml_busy": watch.busy_fraction(ran.begun_s + pace.begun_s, ran.begun_s + pace.ended_s),
    }


_TRIED: Mapping[str, Callable[[Attempt], dict[str, Any]]] = {
    "diagnose": _diagnosed,
    "run": _searched,
    "plain": _trained,
    "apply": _applied,
}


def _make_data(data: Path, scripts: Path, *, smoke: bool) -> None:
    """Make JPEGs in folders of classes, and words as often as those of a language."""
    begun = monotonic()
    if not (data / "images").exists():
        count = 1 if smoke else _IMAGES // _CLASSES
        with ProcessPoolExecutor() as pool:
            list(
                pool.map(
                    _make_class,
                    [(data / "images", label, count, smoke) for label in range(_CLASSES)],
                )
            )
    generator = random.Random(1)
    words = [
        "".join(generator.choices("etaoinshrdlucmfwygpbvk", k=1 + index % 9))
        for index in range(_VOCABULARY)
    ]
    frequencies = [1 / (1 + rank) for rank in range(_VOCABULARY)]
    drawn = generator.choices(words, frequencies, k=250_000 if smoke else _WORDS)
    lines = [" ".join(drawn[start : start + 25]) for start in range(0, len(drawn), 25)]
    text = "\n".join(["O God, O God!", *lines])
    target = scripts / "lightning/data/wikitext-2.txt"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)
    (scripts / "mingpt/projects/chargpt/input.txt").write_text(text[:_SHAKESPEARE])
    say(f"data made in {monotonic() - begun:.1f} s")


def _make_class(task: tuple[Path, int, int, bool]) -> None:
    """Make a class's JPEGs of 500 x 375, some 100 kB as photographs have, each under several names."""
    images, label, count, smoke = task
    generator = np.random.default_rng(label)
    for split, files, names in (
        ("train", count, 2 if smoke else _NAMES_AN_IMAGE),
        ("val", max(1, count // 4), 1),
    ):
        folder = images / split / f"n{label:08d}"
        folder.mkdir(parents=True)
        for index in range(files):
            coarse = generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)
            smooth = np.asarray(
                Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16
            )
            noisy = (smooth + generator.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
            first = folder / f"{index}-0.JPEG"
            Image.fromarray(noisy).save(first, quality=90)
            for name in range(1, names):
                os.link(first, folder / f"{index}-{name}.JPEG")


def _print(recording: Recording) -> None:
    rows = [
        row(name, what, found)
        for name, tried in recording.results.items()
        for what, found in tried.items()
    ]
    print_table("Each command", ["command", "code", "samples/s", "answer at s", "first line"], rows)


def row(name: str, what: str, found: Mapping[str, Any]) -> list[str]:
    """Return a command's row of the table."""
    rate, said = found.get("samples_per_s"), found.get("said")
    at_s, first = said[0] if said else ("", "")
    return [
        f"{name} {what}",
        str(found.get("code")),
        "" if rate is None else f"{rate:,.0f}",
        str(at_s),
        first[:50],
    ]


if __name__ == "__main__":
    raise SystemExit(main())
