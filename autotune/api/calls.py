"""The public functions `search` and `diagnose`: turn a call's arguments into a Plan and run it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.api.diagnose import DiagnosisResult, diagnose_plan
from autotune.api.search import SearchResult, run_plan
from autotune.api.setup import kept_random_state
from autotune.config.command import command_name
from autotune.config.plan import WITH_A_LOADER, Executor, Method, Objective, Plan, SearchSpace
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.files.plan_file import parse_plan
from autotune.launch.launcher import Launcher
from autotune.messages.space import epoch_not_taken, prepared_by
from autotune.note import Note
from autotune.report.progress import ProgressMode
from autotune.trainers.objects import take_apart

_LOADERS_OWN = {"shuffle", "drop_last"}
"""Keys of the argument `loader` that a DataLoader decides itself."""
_LOADER_KEYS = {*_LOADERS_OWN, *WITH_A_LOADER} - {"collate_fn"}
"""Keys of the argument `loader`."""
_SECTIONS = {
    "workload": ("model", "dataset", "command", "loss", "step", "optimizer", "collate_fn"),
    "budget": ("n_trials", "timeout_s", "training_hours"),
    "search": ("method", "warm_start"),
}
"""Arguments of a call that belong to a section of the Plan."""
_PLAIN = ("baseline", "space", "device", "run_dir", "seed", "executor")
"""Arguments of a call that are fields of the Plan."""


def search(  # noqa: PLR0913 - the contract's signature
    model: Any = None,
    dataset: Any = None,
    *,
    command: Sequence[str] | str | None = None,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    optimizer: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    accelerator: Any = None,
    baseline: TrainingConfig | Mapping[str, Any] | None = None,
    space: SearchSpace | Mapping[str, Any] | None = None,
    objective: Objective | Mapping[str, Any] | None = None,
    memory_limit: float | str | None = None,
    n_trials: int | None = None,
    timeout_s: float | None = None,
    training_hours: float | None = None,
    device: str = "auto",
    run_dir: str | Path | None = None,
    seed: int = 0,
    progress: ProgressMode = "auto",
    loader: Mapping[str, Any] | None = None,
    fresh: bool = False,
    method: Method = "model",
    warm_start: str | Path | None = None,
    launcher: Launcher | None = None,
    executor: Executor | Mapping[str, Any] | str = "local",
) -> SearchResult:
    """Find the settings that train your model fastest on this machine, by measuring short trials.

    Your current settings are measured first, then candidates; the winner must be faster by more
    than noise and stay within the memory limit.

        result = autotune.search(model, dataset, timeout_s=600)
        print(result.report())
        result.best  # the TrainingConfig to train with

    Args:
        model: An nn.Module, or a function without arguments that returns one. Trials train copies.
            A LightningModule trains by its training_step; a transformers.Trainer stands for all
            parts at once.
        dataset: A Dataset, IterableDataset or DataLoader, or a function without arguments that
            returns one. The settings of a DataLoader become the baseline's defaults. With a
            LightningModule: a LightningDataModule, or None for its own train_dataloader.
        command: The command of a training script, as words or as one string, such as
            "python train.py --lr {lr}" (see Workload); instead of model, dataset and their parts.
        loss: loss(outputs, targets) -> scalar tensor, for batches (inputs, targets).
        step: step(model, batch) -> scalar loss, where a loss alone is not enough.
        optimizer: optimizer(params, lr) -> torch.optim.Optimizer, or an optimizer of the model's
            parameters, whose class and settings are used. None: SGD.
        collate_fn: As for torch.utils.data.DataLoader.
        accelerator: The accelerate.Accelerator that prepared the parts; gives precision and
            gradient accumulation.
        baseline: Your current settings. Default: those of the DataLoader and optimizer given, else
            batch 32, no workers, float32, learning rate 1e-3.
        space: Settings to search, each as a list of choices, {low, high[, log]}, or one fixed
            value. Default: all settings.
        objective: What counts as better, as an Objective or a mapping of its fields.
        memory_limit: Bytes, a size such as "20GiB", or a fraction of the device's memory. None:
            0.9, or the objective's.
        n_trials: Measured trials, baseline included. None: at most 40; the search may stop early.
        timeout_s: Seconds for the whole search. None: no limit.
        training_hours: Hours of training still to come; a trial must be worth its time. None: 24.
        device: A torch device name, or "auto": the accelerator if there is one, else the CPU.
        run_dir: Folder for study, logs, report and recommended.yaml; an interrupted search in it
            continues. None: a new folder in ./runs.
        seed: Seed of the search and of each trial.
        progress: True, False, or "auto": a live line on a terminal, plain lines elsewhere.
        loader: Further DataLoader arguments: shuffle, drop_last, sampler, batch_sampler,
            worker_init_fn, multiprocessing_context. With a DataLoader as dataset all but the first
            two.
        fresh: Delete an earlier search in run_dir.
        method: What proposes trials: "model", a model of this machine's throughput; or an Optuna
            sampler: "tpe", "gp", "random", "grid".
        warm_start: A run folder or recommended.yaml of a similar search; its winner is tried first.
        launcher: Starts trials instead of the executor; for tests, autotune.testing.FakeLauncher.
        executor: Where trials run: "local", or "ray" for a Ray cluster
            (pip install 'autotune-torch[ray]'); or an Executor or a mapping of its fields.

    Returns:
        The winner with all measurements; the same is saved in run_dir.

    Raises:
        ConfigError: An argument breaks a rule, or ray is not installed.
        WorkloadError: The model, dataset, step or script fails in the baseline, or can't be sent
            to a trial.
        NothingFeasibleError: No configuration meets the memory limit.
        RepeatedFailureError: The same exception ended three different configurations.
        RunFolderError: The run folder can't be written, or is in use.
        StudyMismatchError: The run folder holds a different search.
    """
    return run_plan(_plan_of(locals()), fresh=fresh, progress=progress, launcher=launcher)


def diagnose(  # noqa: PLR0913 - the contract's signature
    model: Any = None,
    dataset: Any = None,
    *,
    command: Sequence[str] | str | None = None,
    loss: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    optimizer: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    accelerator: Any = None,
    baseline: TrainingConfig | Mapping[str, Any] | None = None,
    objective: Objective | Mapping[str, Any] | None = None,
    memory_limit: float | str | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: ProgressMode = "auto",
    loader: Mapping[str, Any] | None = None,
    launcher: Launcher | None = None,
    executor: Executor | Mapping[str, Any] | str = "local",
) -> DiagnosisResult:
    """Find out why training is slow and what to change, usually in under a minute.

        print(autotune.diagnose(model, dataset).report())

    The arguments are those of `search` without `space`, `n_trials`, `timeout_s`, `training_hours`,
    `run_dir`, `fresh`, `method` and `warm_start`; `baseline` is what is diagnosed. If your code is
    slow to start or to make a step, it takes as long as measuring the baseline, and no other
    settings are tried. No run folder is kept.

    Returns:
        The bottleneck, its share of the time, and the remedies.

    Raises:
        ConfigError: An argument breaks a rule, or ray is not installed.
        WorkloadError: The model, dataset, step or script fails, or can't be sent to a trial.
        NothingFeasibleError: The baseline needs more memory than there is.
    """
    return diagnose_plan(_plan_of(locals()), progress=progress, launcher=launcher)


def _plan_of(given: Mapping[str, Any]) -> Plan:
    """Return the Plan of a Python call, from its arguments by name.

    Raises:
        ConfigError: An argument breaks a rule.
    """
    # A trainer or an Accelerator stands for several arguments.
    with kept_random_state():  # a trainer's own methods may draw
        taken = take_apart(given)
    if taken is not None:
        baseline = given["baseline"] or {}
        if isinstance(baseline, TrainingConfig):
            baseline = baseline.model_dump(include=baseline.model_fields_set)
        given = {**given, "baseline": {**taken.baseline, **baseline}}
        for name in ("model", "dataset", "optimizer", "step"):
            part = getattr(taken, name)
            if part is not None:
                given[name] = part

    loader = _loader_arguments(given["loader"])
    sections = {
        name: {key: given[key] for key in keys if key in given} for name, keys in _SECTIONS.items()
    }
    data, optimizer, notes = _unwrapped(given["dataset"], given["optimizer"], loader)
    sections["workload"] |= {**loader, "dataset": data, "optimizer": optimizer}
    plain = {name: given[name] for name in _PLAIN if name in given}

    # The argument memory_limit overrides the objective's.
    objective = given["objective"]
    memory_limit = given["memory_limit"]
    if memory_limit is not None and isinstance(objective, Objective | Mapping | None):
        objective = {**dict(objective or {}), "memory_limit": memory_limit}

    model = given["model"]
    name = getattr(model, "__name__", type(model).__name__) if taken is None else taken.name
    plan = parse_plan({**plain, **sections, "objective": objective}, name=name)
    if taken is not None:
        if given["accelerator"] is not None:
            notes += (prepared_by(framework="accelerate"),)
        notes += taken.notes
    plan = replace(plan, notes=notes)
    command = plan.workload.command
    return plan if command is None else replace(plan, name=command_name(command))


def _loader_arguments(loader: object) -> Mapping[str, Any]:
    """Return the argument `loader`, checked; an empty mapping for None."""
    if loader is None:
        return {}
    if not isinstance(loader, Mapping):
        raise ConfigError(f"loader must be a mapping, but got {type(loader).__name__}")
    unknown = sorted(set(loader) - _LOADER_KEYS, key=str)
    if unknown:
        raise ConfigError(
            f"loader takes {', '.join(sorted(_LOADER_KEYS))}, but got "
            f"{', '.join(map(str, unknown))}"
        )
    return loader


def _unwrapped(
    dataset: Any, optimizer: Any, loader: Mapping[str, Any]
) -> tuple[Any, Any, tuple[Note, ...]]:
    """Unwrap a dataset or DataLoader and an optimizer from framework wrappers; return notes on what that loses.

    Raises:
        ConfigError: The dataset can't be unwrapped, or decides itself what `loader` gives.
    """
    torch = sys.modules.get("torch")  # neither can exist without it
    if torch is None:
        return dataset, optimizer, ()
    from autotune.apply.loader import inner_loader, lost_epoch
    from autotune.apply.prepare import inner_optimizer

    try:
        data = inner_loader(dataset)
        batches = lost_epoch(dataset)
    except ValueError as error:
        raise ConfigError(f"dataset: {error}") from error
    own = sorted(_LOADERS_OWN & set(loader))
    if own and isinstance(data, torch.utils.data.DataLoader):
        raise ConfigError(
            f"loader: a DataLoader keeps its own {' and '.join(own)}; set that where you make it"
        )
    notes = () if batches is None else (epoch_not_taken(batches),)
    return data, inner_optimizer(optimizer), notes
