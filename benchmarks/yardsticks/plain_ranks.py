"""A script for several ranks as a user writes it, started by torchrun: the yardstick of benchmarks/ranks.py.

DistributedDataParallel over gloo, DistributedSampler with set_epoch, no_sync while accumulating. It is written apart
from the product and shares none of its code. All ranks take a number of steps that rank 0 has told beforehand, so that
nothing but training is exchanged inside the stretch that counts.

`run_plain_ranks` starts it; as a script it takes its job as JSON and rank 0 writes the figures to the file named there.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed.nn.functional  # before there is a group; see _main
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import ROOT
from benchmarks.cases.cpu import Case

__all__ = ["run_plain_ranks"]

_STEPS_A_LOOK = 10  # between two looks at rank 0's clock, outside the stretch that counts
_ENDS_WITHIN_S = 30.0


def run_plain_ranks(
    case: str,
    settings: Mapping[str, Any],
    *,
    ranks: int,
    seconds: float,
    skip_s: float,
    deadline_s: float = 300.0,
) -> dict[str, Any]:
    """Train a case on the CPU by so many ranks for about `seconds`, after `skip_s` that are left out; the figures.

    Args:
        case: where the case is made, as "module:function"; its batches are (inputs, labels).
        settings: under TrainingConfig's names; what is left out takes torch's defaults.
        ranks: processes that torchrun starts.
        seconds: length of the stretch that counts.
        skip_s: seconds after the end of the first step that don't count.
        deadline_s: torchrun is ended after so long.

    Raises:
        RuntimeError: the group failed, or did not end in time; the message holds the end of its output.
    """
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        answer, output = Path(folder) / "figures.json", Path(folder) / "output"
        job = {
            "case": case,
            "settings": dict(settings),
            "seconds": seconds,
            "skip_s": skip_s,
            "answer": str(answer),
        }
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [
            sys.executable,
            *start,
            "--module",
            "benchmarks.yardsticks.plain_ranks",
            json.dumps(job),
        ]
        code = _run(command, output, deadline_s)
        if code != 0:
            how = "did not end in time" if code is None else f"ended with {code}"
            raise RuntimeError(f"torchrun {how}:\n{output.read_text(errors='replace')[-3000:]}")
        figures: dict[str, Any] = json.loads(answer.read_text())
        return figures


def _run(command: list[str], output: Path, deadline_s: float) -> int | None:
    """The exit code; None where it was ended."""
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_WITHIN_S)


def _main() -> None:
    """Train; end only once gloo's threads have, or the exit may abort: "terminate called without an active exception".

    They free the last tensors after a collective has returned; one that needs Python for it while the interpreter shuts
    down ends the process. destroy_process_group waits for them only if nothing else holds the group. What does: the
    model, in cycles; and torch.distributed.nn.functional, if it is first imported where there is a group (DDP does so),
    since its functions' default `group=group.WORLD` is then this one.

    Source: https://github.com/pytorch/pytorch/pull/179291, the abort; torch/distributed/nn/functional.py of torch 2.13.
    """
    job = json.loads(sys.argv[1])
    module, _, function = job["case"].partition(":")
    case: Case = getattr(importlib.import_module(module), function)()
    distributed.init_process_group("gloo")
    try:
        figures = _train(case, job)
        if distributed.get_rank() == 0:
            Path(job["answer"]).write_text(json.dumps(figures))
    finally:
        gc.collect()
        distributed.destroy_process_group()


def _train(case: Case, job: Mapping[str, Any]) -> dict[str, Any]:
    settings = job["settings"]
    if settings.get("intra_op_threads"):
        torch.set_num_threads(settings["intra_op_threads"])
    torch.manual_seed(0)
    begun = perf_counter()
    take_a_step = _Stepper(case, settings)
    take_a_step()
    startup_s = perf_counter() - begun
    skipped, skip_from = 0, perf_counter()
    while _by_rank_0(perf_counter() - skip_from) < job["skip_s"]:
        for _ in range(_STEPS_A_LOOK):
            take_a_step()
        skipped += _STEPS_A_LOOK
    steps = int(_by_rank_0(max(1, ceil(job["seconds"] * skipped / (perf_counter() - skip_from)))))
    distributed.barrier()
    start = perf_counter()
    samples = sum(take_a_step() for _ in range(steps))
    distributed.barrier()
    seconds = perf_counter() - start
    total = _sum_of_ranks(samples)
    return {
        "samples_per_s": total / seconds,
        "samples": total,
        "steps": steps,
        "seconds": seconds,
        "startup_s": startup_s,
        "threads": torch.get_num_threads(),
    }


class _Stepper:
    """A rank's model, optimizer and batches; a call takes an optimizer step and tells its samples."""

    def __init__(self, case: Case, settings: Mapping[str, Any]) -> None:
        wanted = dict(settings.get("ddp") or {})
        hook = wanted.pop("comm_hook", None)
        self._model = DistributedDataParallel(case.model().train(), **wanted)
        if hook == "fp16":
            self._model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        parameters, lr = list(self._model.parameters()), float(settings.get("lr", 1e-3))
        self._optimizer = (
            case.optimizer(parameters, lr) if case.optimizer else torch.optim.SGD(parameters, lr=lr)
        )
        self._micro_steps = int(settings.get("grad_accum_steps", 1))
        self._batches = _endless(case, settings)

    def __call__(self) -> int:
        samples = 0
        for index in range(self._micro_steps):
            inputs, labels = next(self._batches)
            is_last = index == self._micro_steps - 1
            with nullcontext() if is_last else self._model.no_sync():
                loss = nn.functional.cross_entropy(self._model(inputs), labels)
                (loss / self._micro_steps).backward()  # type: ignore[no-untyped-call] # untyped in torch
            samples += len(labels)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return samples


def _endless(case: Case, settings: Mapping[str, Any]) -> Iterator[Any]:
    """Batches of this rank, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        case.dataset, shuffle=case.shuffle, drop_last=True
    )
    loader = DataLoader(
        case.dataset,
        batch_size=settings.get("micro_batch_size", 32),
        sampler=sampler,
        drop_last=True,
        num_workers=settings.get("num_workers", 0),
        prefetch_factor=settings.get("prefetch_factor"),
        persistent_workers=settings.get("persistent_workers", False),
        collate_fn=case.collate_fn,
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def _by_rank_0(value: float) -> float:
    """Rank 0's value, on every rank."""
    shared = torch.tensor([value], dtype=torch.float64)
    distributed.broadcast(shared, src=0)
    return float(shared.item())


def _sum_of_ranks(value: int) -> int:
    shared = torch.tensor([value], dtype=torch.int64)
    distributed.all_reduce(shared)
    return int(shared.item())


if __name__ == "__main__":
    _main()
