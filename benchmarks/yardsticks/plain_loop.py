"""A training loop as a user writes it, in a fresh process: the yardstick that the product's figures are held against.

It is written apart from the product and shares none of its code. It makes no attempt to be clever about queues or
outliers: it runs for long, leaves its own first seconds out, and divides samples by seconds. Beside that it tells what
two common short cuts would have said of the same run.

`run_plain` starts it; as a script it takes jobs as lines of JSON and forks for each (`PlainForks`).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks import ROOT
from benchmarks.cases.cpu import Case

__all__ = ["PlainForks", "Stepper", "run_plain"]

_NAIVE_WARM_UP_STEPS = 3
_NAIVE_STEPS = 10


class PlainForks:
    """A fresh interpreter that has imported torch, and forks a process for each plain loop: that spares its import.

    It has touched no device, has run no tensor operation, and holds none of the product's code. It ends with its owner.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.yardsticks.plain_loop"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, job: Mapping[str, Any], deadline_s: float) -> tuple[int, str]:
        """Run a job in a fork; its exit code (negative: a signal), and what it has printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with NamedTemporaryFile("r", prefix="autotune-plain-") as output:
            order = {"job": job, "output": output.name, "deadline_s": deadline_s}
            with suppress(BrokenPipeError):
                print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            return int(answer or -1), output.read()

    def close(self) -> None:
        """End the interpreter, which waits for a job."""
        self._process.communicate()


def run_plain(  # noqa: PLR0913 - a run is told by these, and they travel as JSON
    case: str,
    settings: Mapping[str, Any],
    *,
    seconds: float,
    skip_s: float,
    device: str = "cpu",
    arguments: Mapping[str, Any] | None = None,
    deadline_s: float = 300.0,
    forks: PlainForks | None = None,
) -> dict[str, Any]:
    """Train a case in a fresh process for `seconds`, after `skip_s` that are left out; the figures.

    Args:
        case: where the case is made, as "module:function".
        settings: under TrainingConfig's names; what is left out takes torch's defaults.
        seconds: length of the stretch that counts.
        skip_s: seconds after the end of the first step that don't count.
        device: torch's name for the device.
        arguments: keyword arguments of the function that makes the case.
        deadline_s: the process is ended after so long.
        forks: starts the process; None: a process that starts with importing torch, and nothing else is left of it.

    Raises:
        RuntimeError: the process failed; the message holds the end of its output.
    """
    job = {
        "case": case,
        "arguments": dict(arguments or {}),
        "settings": dict(settings),
        "device": device,
        "seconds": seconds,
        "skip_s": skip_s,
    }
    starter = forks or PlainForks()
    try:
        exit_code, output = starter.run(job, deadline_s)
    finally:
        if forks is None:
            starter.close()
    if exit_code != 0:
        raise RuntimeError(f"the plain loop ended with {exit_code}:\n{output[-3000:]}")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def _main() -> None:
    """Fork for each order that comes as a line; answer with the exit code."""
    importlib.import_module(
        "torch._dynamo"
    )  # by the first optimizer of each fork else, for seconds
    for line in sys.stdin:
        order = json.loads(line)
        process = get_context("fork").Process(target=_run, args=(order["job"], order["output"]))
        process.start()
        process.join(order["deadline_s"])
        process.kill()
        process.join()
        print(process.exitcode, flush=True)


def _run(job: Mapping[str, Any], output: str) -> None:
    """Do a job in the forked process, which prints to a file: the figures come last."""
    with Path(output).open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    module, _, function = job["case"].partition(":")
    case: Case = getattr(importlib.import_module(module), function)(**job["arguments"])
    print(json.dumps(_train(case, job)), flush=True)


def _train(case: Case, job: Mapping[str, Any]) -> dict[str, Any]:
    settings, device = job["settings"], torch.device(job["device"])
    if settings.get("intra_op_threads"):
        torch.set_num_threads(settings["intra_op_threads"])
    begun = perf_counter()
    loader = _loader(case, settings)
    stepper = Stepper(case, settings, device)
    batches = _endless(loader)
    micro_steps = int(settings.get("grad_accum_steps", 1))
    ends, counts = [perf_counter()], list[int]()

    def take_a_step() -> None:
        count = 0
        for index in range(micro_steps):
            batch = next(batches)
            count += _size_of(batch)
            stepper.train(batch, is_last=index == micro_steps - 1, share=1 / micro_steps)
        ends.append(perf_counter())
        counts.append(count)

    take_a_step()
    _synchronise(device)
    startup_s = perf_counter() - begun
    skip_until = perf_counter() + job["skip_s"]
    while perf_counter() < skip_until:
        take_a_step()
    _synchronise(device)
    first, start, started_at = len(counts), perf_counter(), monotonic()
    while perf_counter() < start + job["seconds"]:
        take_a_step()
    _synchronise(device)
    seconds, samples = perf_counter() - start, sum(counts[first:])
    steps = [end - before for before, end in pairwise(ends)]
    return {
        "samples_per_s": samples / seconds,
        "samples": samples,
        "seconds": seconds,
        "samples_by_second": _by_second(ends[first + 1 :], counts[first:], start),
        "median_step_samples_per_s": counts[first] / median(steps[first:]),
        "naive_samples_per_s": _naive(counts, steps),
        "startup_s": startup_s,
        "started_at": started_at,
        "ended_at": started_at + seconds,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device)
        if device.type == "cuda"
        else None,
    }


class Stepper:
    """Model, optimizer and precision; trains on one batch."""

    def __init__(self, case: Case, settings: Mapping[str, Any], device: torch.device) -> None:
        self._case, self._device = case, device
        self._precision = settings.get("amp_dtype", "float32")
        self._is_channels_last = bool(settings.get("channels_last"))
        self._is_pinned = bool(settings.get("pin_memory"))
        if self._precision == "tf32":
            torch.set_float32_matmul_precision(
                "high"
            )  # as users do; with fp32_precision alone torch.compile raises
            torch.backends.cudnn.allow_tf32 = True
        model = case.model().to(device).train()
        if self._is_channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # as above
        self._model: Any = torch.compile(model) if settings.get("compile") else model
        parameters, lr = list(model.parameters()), float(settings.get("lr", 1e-3))
        self._optimizer = (
            case.optimizer(parameters, lr) if case.optimizer else torch.optim.SGD(parameters, lr=lr)
        )
        self._scaler = torch.amp.GradScaler(device.type, enabled=self._precision == "float16")

    def train(self, batch: Any, *, is_last: bool, share: float) -> None:
        """Forward and backward on a batch, and the optimizer's step where it is the step's last."""
        batch = self._moved(batch)
        with self._autocast():
            loss = self._loss(batch)
        if share != 1:
            loss = loss * share
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call] # untyped in torch
        if is_last:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad()

    def _loss(self, batch: Any) -> Tensor:
        if self._case.step is not None:
            return self._case.step(self._model, batch)
        if isinstance(batch, dict):
            loss: Tensor = self._model(**batch)["loss"]
            return loss
        inputs, labels = batch
        return nn.functional.cross_entropy(self._model(inputs), labels)

    def _moved(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return {name: self._moved(value) for name, value in batch.items()}
        if isinstance(batch, list | tuple):
            return [self._moved(value) for value in batch]
        moved = batch.to(
            self._device, non_blocking=self._is_pinned
        )  # as a trial does, by the same setting
        return (
            moved.to(memory_format=torch.channels_last)
            if self._is_channels_last and moved.dim() == 4
            else moved
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision in {"float32", "tf32"}:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=getattr(torch, self._precision))


def _loader(case: Case, settings: Mapping[str, Any]) -> DataLoader[Any]:
    return DataLoader(
        case.dataset,
        batch_size=settings.get("micro_batch_size", 32),
        shuffle=None if isinstance(case.dataset, IterableDataset) else case.shuffle,
        drop_last=True,
        num_workers=settings.get("num_workers", 0),
        prefetch_factor=settings.get("prefetch_factor"),
        persistent_workers=settings.get("persistent_workers", False),
        pin_memory=settings.get("pin_memory", False),
        collate_fn=case.collate_fn,
    )


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _size_of(batch: Any) -> int:
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(first)


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _by_second(ends: list[float], counts: list[int], start: float) -> list[int]:
    seconds = [0] * (int(ends[-1] - start) + 1)
    for end, count in zip(ends, counts, strict=True):
        seconds[int(end - start)] += count
    return seconds


def _naive(counts: list[int], steps: list[float]) -> float | None:
    """Ten steps after three warm-up steps, as it is often done; None where there were fewer."""
    window = slice(_NAIVE_WARM_UP_STEPS, _NAIVE_WARM_UP_STEPS + _NAIVE_STEPS)
    if len(steps) < _NAIVE_WARM_UP_STEPS + _NAIVE_STEPS:
        return None
    return sum(counts[window]) / sum(steps[window])


if __name__ == "__main__":
    _main()
