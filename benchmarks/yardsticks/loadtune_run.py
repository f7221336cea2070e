"""Runs loadtune on a case as its command line does, and prints what it recommends: a process of its own.

The case comes as "module:function", with its settings, in the environment, since loadtune imports this very file as its
workload in each of its trials, its folder first on the path: under the name loadtune.py it would hide the package. The
last line of the output is JSON: the settings under TrainingConfig's names, and what it claims of them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.cpu import Case

CASE_VARIABLE, SETTINGS_VARIABLE = "VERSUS_CASE", "VERSUS_SETTINGS"
_STEPS, _WARM_UP = 100, 10  # loadtune's own defaults
_TRIALS = 6


def get_workload() -> Any:
    """The case as loadtune takes it; imported by its trials."""
    from loadtune import Workload

    case = _case()
    return Workload(
        name="case",
        make_dataset=lambda: case.dataset,
        make_model=case.model,
        train_step=lambda model, optimizer, batch, device: _step(
            case, model, optimizer, batch, device
        ),
        make_optimizer=lambda model: _optimizer(case, model),
        default_batch_size=int(case.settings.get("micro_batch_size", 32)),
        collate_fn=case.collate_fn,
    )


def main() -> None:
    from loadtune.experiment import best_trial, run_trial, run_trials
    from loadtune.heuristic import HeuristicBrain
    from loadtune.knobs import Knobs
    from loadtune.profiler import ProfileResult

    here = str(Path(__file__).resolve())
    own = Knobs(num_workers=int(_case().settings.get("num_workers", 0)))
    told = run_trial(here, own, _STEPS, _WARM_UP)
    if told.get("error"):
        sys.exit(f"loadtune's baseline failed: {told['error']}")
    fields = ProfileResult.__dataclass_fields__
    baseline = ProfileResult(**{name: value for name, value in told.items() if name in fields})
    trials = HeuristicBrain().propose(baseline, max_trials=_TRIALS, auto_batch=True)
    run_trials(here, trials, _STEPS, _WARM_UP, baseline_result=told)
    best = best_trial(trials)
    knobs = best.knobs if best is not None and best.throughput > baseline.throughput else own
    claimed = max(best.throughput if best is not None else 0.0, baseline.throughput)
    print(
        json.dumps(
            {
                "settings": _settings(knobs),
                "claimed_samples_per_s": claimed,
                "baseline_samples_per_s": baseline.throughput,
                "trials": 1 + len(trials),
            }
        )
    )


def _case() -> Case:
    module, _, function = os.environ[CASE_VARIABLE].partition(":")
    case: Case = getattr(importlib.import_module(module), function)()
    return replace(case, settings=json.loads(os.environ[SETTINGS_VARIABLE]))


def _settings(knobs: Any) -> dict[str, Any]:
    case = _case()
    settings = {
        "micro_batch_size": knobs.batch_size or int(case.settings.get("micro_batch_size", 32)),
        "num_workers": knobs.num_workers,
        "pin_memory": knobs.pin_memory,
        "amp_dtype": "bfloat16" if knobs.amp else "float32",
        "compile": knobs.compile,
    }
    if knobs.num_workers:
        settings |= {"persistent_workers": knobs.persistent_workers}
        settings |= {"prefetch_factor": knobs.prefetch_factor} if knobs.prefetch_factor else {}
    if knobs.num_threads is not None:
        settings["intra_op_threads"] = knobs.num_threads
    return settings


def _step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, device: torch.device
) -> Tensor:
    moved = _moved(batch, device)
    loss = _loss(case, model, moved)
    loss.backward()  # type: ignore[no-untyped-call] # torch
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _loss(case: Case, model: nn.Module, batch: Any) -> Tensor:
    if case.step is not None:
        return case.step(model, batch)
    if isinstance(batch, dict):
        loss: Tensor = model(**batch)["loss"]
        return loss
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: value.to(device) for name, value in batch.items()}
    return [value.to(device) for value in batch]


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    lr = float(case.settings.get("lr", 1e-3))
    if case.optimizer is not None:
        return case.optimizer(model.parameters(), lr)
    return torch.optim.SGD(model.parameters(), lr=lr)


if __name__ == "__main__":
    main()
