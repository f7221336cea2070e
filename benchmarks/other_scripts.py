"""Training scripts that nobody here wrote: what is diagnosed, what is promised, and what the script reaches by `apply`.

The scripts are those of PyTorch's examples, timm, Lightning and minGPT, unchanged, with generated data of the format
that they read. They are not part of this repository; `--scripts` names a folder that holds, from a checkout of each:
    imagenet/main.py          pytorch/examples
    timm/train.py, timm/timm  huggingface/pytorch-image-models
    lightning/transformer.py  Lightning-AI/pytorch-lightning, examples/pytorch/basics
    mingpt/                   karpathy/minGPT
The rate with and without the settings is read from the lines of progress that the script itself prints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import psutil
import yaml
from PIL import Image

from benchmarks.measures.gpu_watch import GpuWatch
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
"""Distinct JPEGs, and how many files are links to each: an epoch of ImageNet lasts long beside the start of its loader's
workers, so that one of 2,000 files would be another job."""
_WORDS, _VOCABULARY = 2_000_000, 30_000  # as WikiText-2 has
_SETTLED_S = 8.0  # of training, from the first line of progress on, before its rate counts
_LONGEST_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, its command, and how its progress is read."""

    folder: str
    command: str
    batch: int
    """Samples a batch, as the command asks for them."""
    progress: str
    """Regular expression of a line of progress: `batch` counts batches within `epoch`, if the line tells one."""
    search_s: float | None = None
    """Time for `run`; None: it is diagnosed alone."""
    paths: Sequence[str] = ()
    """Folders that the script imports from, besides its own."""


SCRIPTS: Mapping[str, Script] = {
    "imagenet": Script(
        folder="imagenet",
        command="python main.py -a resnet18 -b 256 -j 4 {data}/images",
        batch=256,
        progress=r"Epoch: \[(?P<epoch>\d+)\]\[ *(?P<batch>\d+)/",
        search_s=90,
    ),
    "mingpt": Script(
        folder="mingpt/projects/chargpt",
        command="python chargpt.py",
        batch=64,
        progress=r"iter_dt .*; iter (?P<batch>\d+):",
        search_s=90,
        paths=("mingpt",),
    ),
    "timm": Script(
        folder="timm",
        command="python train.py --data-dir {data}/images --val-split val --model resnet50 --num-classes 100 --amp"
        " --pin-mem -b 128 -j 4 --log-interval 10 --output {data}/timm",
        batch=128,
        progress=r"Train: (?P<epoch>\d+) \[ *(?P<batch>\d+)/",
    ),
    "lightning": Script(
        folder="lightning",
        command="python transformer.py",
        batch=20,
        progress=r"Epoch (?P<epoch>\d+):.* (?P<batch>\d+)/\d+ ",
    ),
}


def main() -> int:
    arguments = _parse()
    scripts, data = arguments.scripts.resolve(), Path(arguments.data).resolve()
    recording = start_recording("other_scripts", arguments, describe_machine())
    recording.results.update(read_results(recording.path, fresh=False))
    _make_data(data, scripts, smoke=arguments.smoke_cpu)
    for task in arguments.only.split(","):
        name, what = task.split(":")
        say(task)
        found = _TRIED[what](Trial(SCRIPTS[name], scripts, data, recording.path.parent, task, arguments.smoke_cpu))
        recording.add(name, {**recording.results.get(name, {}), what: found})
        say(f"{task}: {json.dumps(found)[:600]}")
    _print(recording)
    return 0


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", "nothing")
    parser.add_argument("--scripts", type=Path, required=True, help="the folder with the scripts")
    parser.add_argument("--data", default=tempfile.gettempdir() + "/other-scripts", help="where data is made")
    parser.add_argument("--smoke-cpu", action="store_true", help="tiny data and batches, short times: no figures")
    parser.add_argument(
        "--only",
        default="imagenet:diagnose,imagenet:run,imagenet:plain,imagenet:apply,mingpt:diagnose,mingpt:run,mingpt:plain,"
        "mingpt:apply,timm:diagnose,lightning:diagnose",
        help="script:what, by commas, in this order (%(default)s); what is diagnose, run, plain or apply",
    )
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Trial:
    """One command on one script."""

    script: Script
    scripts: Path
    data: Path
    results: Path
    task: str
    smoke: bool

    @property
    def words(self) -> list[str]:
        command = self.script.command.format(data=self.data)
        if self.smoke:
            command = command.replace("-b 256", "-b 8").replace("-b 128", "-b 8").replace("-j 4", "-j 1")
            command = command.replace("resnet50", "resnet18").replace(" --amp", " --device cpu")
        return [sys.executable, *shlex.split(command)[1:]]

    @property
    def folder(self) -> Path:
        return self.scripts / self.script.folder

    @property
    def run_folder(self) -> Path:
        return self.data / f"run-{self.task.split(':')[0]}"

    @property
    def environment(self) -> dict[str, str]:
        paths = [str(self.scripts / path) for path in self.script.paths]
        return {**os.environ, "PYTHONPATH": ":".join([*paths, os.environ.get("PYTHONPATH", "")]), "COLUMNS": "100"}


@dataclass(slots=True)
class Ran:
    """A command's end, and its lines with the seconds at which each came."""

    code: int | None = None
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    """Seconds from the start, the stream, the line."""
    seconds: float = 0.0
    busy: float | None = None
    """NVML's share of time with a kernel running, from the tenth line of progress to the end."""


def _ran(trial: Trial, command: Sequence[str], *, within_s: float, settled: str | None = None) -> Ran:
    """Run a command and keep its lines; interrupt it after `within_s`, as a user would."""
    ran, begun = Ran(), monotonic()
    process = psutil.Popen(
        command,
        cwd=trial.folder,
        env=trial.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def read(stream: Any, name: str) -> None:
        pending = b""
        while part := os.read(stream.fileno(), 65_536):
            *whole, pending = re.split(rb"[\r\n]", pending + part)
            ran.lines += [(monotonic() - begun, name, one.decode(errors="replace")) for one in whole if one]
        if pending:
            ran.lines.append((monotonic() - begun, name, pending.decode(errors="replace")))

    readers = [
        threading.Thread(target=read, args=(stream, name), daemon=True)
        for stream, name in ((process.stdout, "out"), (process.stderr, "err"))
    ]
    with GpuWatch() as watch:
        for reader in readers:
            reader.start()
        try:
            ran.code = process.wait(within_s)
        except psutil.TimeoutExpired:
            tree = [process, *process.children(recursive=True)]
            process.send_signal(signal.SIGINT)
            psutil.wait_procs(tree, timeout=8.0)
            for one in tree:
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
        ran.seconds = round(monotonic() - begun, 1)
        if settled is not None:
            first = next((at for at, _, line in ran.lines if re.search(settled, line)), None)
            if first is not None:
                ran.busy = watch.busy_fraction(begun + first + _SETTLED_S, begun + ran.seconds - 9.0)
    for reader in readers:
        reader.join(5.0)
    name = f"{trial.task.replace(':', '-')}.log"
    folder = trial.results / "other_scripts"
    folder.mkdir(exist_ok=True)
    text = "".join(f"{at:7.1f} {stream} {line}\n" for at, stream, line in sorted(ran.lines))
    (folder / name).write_text(text[:400_000])
    return ran


def _diagnosed(trial: Trial) -> dict[str, Any]:
    ran = _ran(trial, [sys.executable, "-m", "autotune", "diagnose", "--", *trial.words], within_s=_LONGEST_S)
    return _answer(ran)


def _searched(trial: Trial) -> dict[str, Any]:
    limit_s = 45.0 if trial.smoke else trial.script.search_s
    sets = [f"budget.timeout_s={limit_s}", f"run_dir={trial.run_folder}"]
    words = [word for one in sets for word in ("--set", one)]
    ran = _ran(trial, [sys.executable, "-m", "autotune", "run", *words, "--", *trial.words], within_s=_LONGEST_S)
    document = trial.run_folder / "recommended.yaml"
    found = _answer(ran)
    if document.exists():
        found["recommended"] = yaml.safe_load(document.read_text())
    return found


def _answer(ran: Ran) -> dict[str, Any]:
    """The exit code, seconds, and when the first lines of the answer came."""
    out = [(round(at, 1), line) for at, stream, line in ran.lines if stream == "out" and line.strip()]
    errors = [line for _, stream, line in ran.lines if stream == "err" and line.startswith("error: ")]
    return {"code": ran.code, "seconds": ran.seconds, "said": out[:12], "errors": errors[:2]}


def _trained(trial: Trial) -> dict[str, Any]:
    """Train by the script alone; samples/s."""
    return _rate(trial, _ran(trial, trial.words, within_s=36.0, settled=trial.script.progress), batch=None)


def _applied(trial: Trial) -> dict[str, Any]:
    document = trial.run_folder / "recommended.yaml"
    if not document.exists():
        return {"error": "nothing was recommended"}
    command = [sys.executable, "-m", "autotune", "apply", str(trial.run_folder), "--", *trial.words]
    batch = yaml.safe_load(document.read_text())["settings"]["micro_batch_size"]
    return _rate(trial, _ran(trial, command, within_s=44.0, settled=trial.script.progress), batch=batch)


def _rate(trial: Trial, ran: Ran, *, batch: int | None) -> dict[str, Any]:
    """Samples/s between the first line of progress after `_SETTLED_S` and the last one before the end of its epoch."""
    samples = batch or (8 if trial.smoke else trial.script.batch)
    seen = []
    for at, _, line in ran.lines:
        if match := re.search(trial.script.progress, line):
            parts = match.groupdict()
            seen.append((at, int(parts.get("epoch") or 0), int(parts["batch"])))
    settled = [one for one in seen if one[0] >= seen[0][0] + _SETTLED_S]
    within = [one for one in settled if one[1] == settled[0][1]]
    rate = None
    if len(within) >= 2 and within[-1][0] > within[0][0]:
        rate = (within[-1][2] - within[0][2]) * samples / (within[-1][0] - within[0][0])
    return {
        "code": ran.code,
        "seconds": ran.seconds,
        "first_batch_s": seen[0][0] if seen else None,
        "batch": samples,
        "samples_per_s": rate,
        "over_s": within[-1][0] - within[0][0] if within else None,
        "nvml_busy": ran.busy,
        "errors": [line for _, stream, line in ran.lines if stream == "err"][-3:] if rate is None else [],
    }


_TRIED = {"diagnose": _diagnosed, "run": _searched, "plain": _trained, "apply": _applied}


def _make_data(data: Path, scripts: Path, *, smoke: bool) -> None:
    """Make JPEGs in folders of classes, and words that are as often as those of a language."""
    begun = monotonic()
    images = 60 if smoke else _IMAGES
    if not (data / "images").exists():
        with ProcessPoolExecutor() as pool:
            list(pool.map(_make_class, [(data, label, images // _CLASSES or 1, smoke) for label in range(_CLASSES)]))
    generator = random.Random(1)
    words = ["".join(generator.choices("etaoinshrdlucmfwygpbvk", k=1 + index % 9)) for index in range(_VOCABULARY)]
    weights = [1 / (1 + rank) for rank in range(_VOCABULARY)]
    drawn = generator.choices(words, weights, k=250_000 if smoke else _WORDS)
    lines = [" ".join(drawn[start : start + 25]) for start in range(0, len(drawn), 25)]
    text = "\n".join(["O God, O God!", *lines])
    target = scripts / "lightning/data/wikitext-2.txt"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)
    (scripts / "mingpt/projects/chargpt/input.txt").write_text(text[:1_100_000])  # as long as tiny Shakespeare
    say(f"data made in {monotonic() - begun:.1f} s")


def _make_class(task: tuple[Path, int, int, bool]) -> None:
    """Make a class's photograph-like JPEGs of 500 x 375 (some 100 kB), each under several names."""
    data, label, count, smoke = task
    generator = np.random.default_rng(label)
    for split, names in (("train", 2 if smoke else _NAMES_AN_IMAGE), ("val", 1)):
        folder = data / "images" / split / f"n{label:08d}"
        folder.mkdir(parents=True)
        for index in range(count if split == "train" else max(1, count // 4)):
            coarse = generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)
            smooth = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
            noisy = (smooth + generator.normal(0, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
            first = folder / f"{index}-0.JPEG"
            Image.fromarray(noisy).save(first, quality=90)
            for name in range(1, names):
                os.link(first, folder / f"{index}-{name}.JPEG")


def _print(recording: Recording) -> None:
    rows = []
    for name, found in recording.results.items():
        for what, one in found.items():
            said = one["said"][0] if one.get("said") else (None, "")
            rate = one.get("samples_per_s")
            rows.append(
                [f"{name} {what}", str(one.get("code")), f"{rate:.0f}/s" if rate else str(said[0]), said[1][:50]]
            )
    print_table("Each command", ["command", "code", "at s", "first line"], rows)


if __name__ == "__main__":
    raise SystemExit(main())
