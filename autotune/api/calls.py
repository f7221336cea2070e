"""The public functions `search` and `diagnose`: a Python call's arguments become a Plan, which is carried out."""

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
from autotune.config.plan import Executor, Method, Objective, Plan, SearchSpace
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.files.plan_file import parse_plan
from autotune.launch.launcher import Launcher
from autotune.messages.space import epoch_not_taken, prepared_by
from autotune.note import Note
from autotune.report.progress import ProgressMode
from autotune.trainers.objects import take_apart

_LOADER_KEYS = {
    "shuffle",
    "drop_last",
    "sampler",
    "batch_sampler",
    "worker_init_fn",
    "multiprocessing_context",
}
_LOADERS_OWN = {"shuffle", "drop_last"}
"""Of these, what a DataLoader decides itself."""
_SECTIONS = {
    "workload": ("model", "dataset", "command", "loss", "step", "optimizer", "collate_fn"),
    "budget": ("n_trials", "timeout_s", "training_hours"),
    "search": ("method", "warm_start"),
}
"""A call's arguments that are a Plan's own only below a section."""
_PLAIN = ("baseline", "space", "device", "run_dir", "seed", "executor")
"""Those that are a Plan's by the same name."""


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
    """Find the training settings that train fastest on this machine within a memory limit, by measured trials.

    Args:
        model: nn.Module, or a zero-argument callable that returns one. It is not touched: trials
            train copies. A LightningModule trains by its own training_step; a transformers.Trainer
            stands for all parts at once.
        dataset: Dataset, IterableDataset or DataLoader, or a zero-argument callable that returns
            one. A DataLoader is
            not touched: trials load by copies of it, and its settings are the baseline's, where
                that says nothing else.
            For a LightningModule a LightningDataModule too; None: the module's own
            train_dataloader.
        command: what starts a training script, in place of model and dataset and all that belongs
            to them: its words, or one string, such as "python train.py --lr {lr}" (see Workload).
            It runs in the working directory.
        loss: loss(outputs, targets) -> scalar tensor, for batches (inputs, targets).
        step: step(model, batch) -> scalar loss, for what inference does not cover.
        optimizer: optimizer(params, lr) -> torch.optim.Optimizer; or an optimizer of the model's
            parameters, of which trials have class, groups and settings, without its state; None:
            SGD.
        collate_fn: as for torch.utils.data.DataLoader.
        accelerator: the accelerate.Accelerator that has prepared model, loader and optimizer, for
            its precision and accumulation.
        baseline: what you run today; what it does not say is what a DataLoader and an optimizer
            that are given are set to, else batch 32, no workers, float32, learning rate 1e-3.
        space: settings to search, each a list of choices, {low, high[, log]}, or one value that
            fixes it.
        objective: an Objective or its fields.
        memory_limit: bytes, "20GiB", or a fraction of the device's memory; None: the objective's
            (0.9).
        n_trials: measured trials, the baseline included; None: at most 40, and it may stop by
            itself.
        timeout_s: seconds for the whole search; None: no limit.
        training_hours: hours of training that are still to come, against which a further trial must
            pay; None: 24.
        device: torch's name for the device; "auto": the accelerator where there is one, else the
            CPU. A GPU that torch was built for and can't use is an error: the CPU does not take its
            place.
        run_dir: folder for study, logs, report and recommended.yaml; an interrupted search in it
            goes on. None: a new folder below ./runs.
        seed: of the sampler and of each trial.
        progress: True, False, or "auto": a live line on a terminal, plain lines elsewhere.
        loader: further arguments of the loader: shuffle, drop_last, sampler, batch_sampler,
            worker_init_fn, multiprocessing_context (see Workload); beside a DataLoader all but the
            first two.
        fresh: remove what a former search has left in run_dir.
        method: what proposes trials: "model", a model of this machine that learns as the search
            goes on; or one of Optuna's samplers: "tpe", "gp", "random", "grid".
        warm_start: a run folder or a recommended.yaml, of the same workload on another machine or
            of a similar one: what it found best is tried first.
        launcher: starts trials in place of the executor's. For tests,
            autotune.testing.FakeLauncher.
        executor: where trials run: "local", this machine; "ray", the machines of a Ray cluster,
            several trials at once (pip install 'autotune-torch[ray]'); or an Executor or its
            fields: kind, address, ranks.

    Returns:
        The result; the same is in run_dir.

    Raises:
        ConfigError: an argument breaks a rule, or ray is not installed.
        WorkloadError: the model, dataset, step or script fails in the baseline, or can't be carried
            to a trial.
        NothingFeasibleError: no configuration meets the memory limit.
        RepeatedFailureError: the same exception ended three different configurations.
        RunFolderError, StudyMismatchError: the run folder can't be used.
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
    """Say why training is slow and what to do about it, without a search.

    It takes under a minute, unless your own code takes long to build (it is built once where trials
    share a process, else two or three times) or to make a step: then it takes as long as measuring
    the baseline does, and other settings are not measured. The arguments are those of `search`,
    `command` among them, but for space, n_trials, timeout_s, training_hours, run_dir, method,
    warm_start and fresh; `baseline` is what is diagnosed. No run folder is kept: the trials' files
    lie in a temporary folder until the end.

    Raises:
        ConfigError: an argument breaks a rule, or ray is not installed.
        WorkloadError: the model, dataset, step or script fails, or can't be carried to a trial.
        NothingFeasibleError: the baseline needs more memory than there is.
    """
    return diagnose_plan(_plan_of(locals()), progress=progress, launcher=launcher)


def _plan_of(given: Mapping[str, Any]) -> Plan:
    """The Plan of a Python call, from its arguments by name.

    Raises:
        ConfigError: an argument breaks a rule.
    """
    with kept_random_state():  # a trainer's own methods may draw
        taken = take_apart(given)
    if taken is not None:
        said = given["baseline"] or {}
        said = (
            said.model_dump(include=said.model_fields_set)
            if isinstance(said, TrainingConfig)
            else said
        )
        parts = {name: getattr(taken, name) for name in ("model", "dataset", "optimizer", "step")}
        parts = {name: part for name, part in parts.items() if part is not None}
        given = {**given, **parts, "baseline": {**taken.baseline, **said}}
    model = given["model"]
    loader = {} if given["loader"] is None else given["loader"]
    if not isinstance(loader, Mapping):
        raise ConfigError(f"loader must be a mapping, but got {type(loader).__name__}")
    unknown = sorted(set(loader) - _LOADER_KEYS, key=str)
    if unknown:
        raise ConfigError(
            f"loader takes {', '.join(sorted(_LOADER_KEYS))}, but got "
            f"{', '.join(map(str, unknown))}"
        )
    sections = {
        name: {key: given[key] for key in keys if key in given} for name, keys in _SECTIONS.items()
    }
    sections["workload"] |= loader
    data, notes = _data_of(given["dataset"], loader)
    sections["workload"] |= {"dataset": data, "optimizer": _optimizer_of(given["optimizer"])}
    plain = {name: given[name] for name in _PLAIN if name in given}
    objective = given["objective"]
    memory_limit = given["memory_limit"]
    if memory_limit is not None and isinstance(objective, Objective | Mapping | None):
        objective = {**dict(objective or {}), "memory_limit": memory_limit}
    name = getattr(model, "__name__", type(model).__name__) if taken is None else taken.name
    plan = parse_plan({**plain, **sections, "objective": objective}, name=name)
    if taken is not None:
        prepared = (
            (prepared_by(framework="accelerate"),) if given["accelerator"] is not None else ()
        )
        notes += (*prepared, *taken.notes)
    plan = replace(plan, notes=notes)
    command = plan.workload.command
    return plan if command is None else replace(plan, name=command_name(command))


def _data_of(dataset: Any, loader: Mapping[str, Any]) -> tuple[Any, tuple[Note, ...]]:
    """The dataset, or the DataLoader, that was given, without what a framework has put around it; and what that loses.

    Raises:
        ConfigError: it can't be taken apart, or decides itself what `loader` says.
    """
    torch = sys.modules.get("torch")  # a DataLoader can't be made without it
    if torch is None:
        return dataset, ()
    from autotune.apply.loader import inner_loader, lost_epoch

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
    return data, () if batches is None else (epoch_not_taken(batches),)


def _optimizer_of(optimizer: Any) -> Any:
    """What was given as an optimizer, without what a framework has put around it."""
    if "torch" not in sys.modules:
        return optimizer
    from autotune.apply.prepare import inner_optimizer

    return inner_optimizer(optimizer)
