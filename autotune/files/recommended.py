"""Write and read recommended.yaml: the settings to use, the evidence, the machine, and instructions.

`settings`, and `command` and `script` for a script, are exact and are read back; everything else is
rounded, for people.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

from autotune.config.environment import COMPARED, Environment
from autotune.config.plan import ScriptFacts, WorkloadFacts
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import ConfigError
from autotune.files.plan_file import validated
from autotune.files.yaml_document import KeyPath, Problem, read_document
from autotune.frozen import FrozenModel
from autotune.models.evidence import rate_of_runs
from autotune.records.measurement import Interval, Measurement
from autotune.records.result import Recommendation, RunSummary
from autotune.records.trial import runs_of
from autotune.settings_table import SETTINGS

# The machine


_KEYS = {"device_name": "name", "device_count": "devices"}
"""Names in the file for fields of an Environment, where they differ."""


def describe_machine(environment: Environment) -> dict[str, object]:
    """Return the file's description of a machine: the fields that are compared, device, Python, fingerprint."""
    compared = {_KEYS.get(name, name): value for name, value in environment.comparable().items()}
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in compared.items()
    }
    return {
        "device": environment.device,
        **plain,
        "python": environment.python,
        "fingerprint": environment.fingerprint,
    }


def read_machine(path: Path) -> dict[str, object]:
    """Read the machine from a recommended.yaml; empty if there is none."""
    machine = read_document(path).data.get("machine")
    return dict(machine) if isinstance(machine, dict) else {}


def differing_fields(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Describe each field in which two machines differ, such as "driver 550 there, 570 here".

    Args:
        there: A machine from a file, with any contents.
        here: A machine by `describe_machine`, or a part of it; only fields of both are compared.
    """
    keys = ((name, _KEYS.get(name, name)) for name in COMPARED)
    return [
        f"{COMPARED[name]} {_shown(there[key])} there, {_shown(here[key])} here"
        for name, key in keys
        if key in there and key in here and there[key] != here[key]
    ]


def _shown(value: object) -> str:
    """Return a value from a file as at most 60 printable characters."""
    return "none" if value is None else _printable(str(value)[:60])


# The head: comments on how to use the settings


_HEADER = """\
# The fastest training settings that autotune {version} found for {name} on {device}.
# Use them in your own training script:
#
#     config = autotune.load("recommended.yaml")
{loader}#     model = config.prepare(model)
#     optimizer = ...  # yours, over model.parameters(), with **config.optimizer_kwargs()
#     accumulator = config.accumulator(model, optimizer)
#     for batch in loader:
#         with accumulator:
#             accumulator.backward(...)  # the loss of config.to_device(batch)
#
{ranks}{binding}{taken_off}{malloc}# `settings` is what is read back; everything below it is the evidence, rounded.

"""
_TRAINER_HEADER = """\
# The fastest training settings that autotune {version} found for {name} on {device},
# by the step of {framework}. Use them there:
#
#     export = autotune.load("recommended.yaml").to("{target}", device="{kind}"{optimizer})
{use}#     export.dropped, export.defaults  # what that does not carry, and what {framework} does otherwise by itself
#
# Or in a shell: autotune export <this file, or its folder> --to {target}
{replaced}#
{taken_off}{malloc}# `settings` is what is read back; everything below it is the evidence, rounded.

"""
_TRAINER_ARGUMENTS = """\
# The search had next to your loader, which must be made with it: {replaced}.
"""
_TRAINERS = {
    "transformers.Trainer": "hf",
    "Lightning's Trainer": "lightning",
    "accelerate": "accelerate",
}
"""Export targets by a framework's name in notes."""
_OF_TRAINERS = {"during_training", "prepared_by"}
"""Codes of notes that name the framework of the given objects."""
_USES = {
    "hf": """\
#     arguments = TrainingArguments(..., **export.settings)  # and all others as in your own
""",
    "lightning": """\
#     print(export.text)  # lines around your Trainer
""",
    "accelerate": """\
#     print(export.text)  # a file for accelerate launch, and lines for your script
""",
}
_SCRIPT_HEADER = """\
# The fastest settings that autotune {version} found for {name} on {device}.
# Train with them, your script unchanged:
#
#     autotune apply <this file, or its folder> -- {command}
#
{lr}# `settings`, `command` and `script` are what is read back; everything else is the evidence, rounded.

"""
_SCRIPT_LR = """\
# The script sets its learning rate itself: multiply it by {factor:g} (it began at {before:g}), since the global batch
# changes, or put {{lr}} into the command where the script has an option for it.
#
"""
_LOADERS = {
    "map": """\
#     loader = DataLoader(dataset, shuffle=True, drop_last=True, **config.dataloader_kwargs())
""",
    "ranks": """\
#     sampler = DistributedSampler(dataset, drop_last=True)  # before each epoch: sampler.set_epoch(epoch)
#     loader = DataLoader(dataset, sampler=sampler, drop_last=True, **config.dataloader_kwargs())
""",
    "stream": """\
#     loader = DataLoader(dataset, drop_last=True, **config.dataloader_kwargs())
""",
    "tf_data": """\
#     loader = TfData(build).loader(config)  # what autotune.TfData was given in the search
""",
    "loader": """\
#     loader = config.loader(loader)  # a copy of your own, with these settings
""",
    "replaced": """\
#     loader = ...  # yours, made with what the search used with it: {replaced}
#     loader = config.loader(loader)  # a copy of it, with these settings
""",
    "tokens": """\
#     batches = ...  # your own batch sampler, made with max_tokens={max_tokens}
#     loader = DataLoader(dataset, batch_sampler=batches, **config.dataloader_kwargs())
""",
    "batches": """\
#     loader = DataLoader(dataset, batch_sampler=..., {threads}**config.loader_settings)  # your own batch sampler
""",
}
"""Lines that make the loader, by kind. A DataLoader refuses `shuffle` with a sampler or a stream, and
`batch_size` with a batch sampler."""
_WORKER_THREADS = 'worker_init_fn=config.dataloader_kwargs()["worker_init_fn"], '
"""Argument of a loader that takes `config.loader_settings`."""
_SHARES = """\
#     # each rank's loader must draw a share of its own, as by a DistributedSampler: a copy keeps the sampler of yours
"""
_DDP = """\
# It was measured in {count} processes; where one machine has all: torchrun --nproc-per-node {count}.
# Call torch.distributed.init_process_group before config.prepare. micro_batch_size and num_workers are those of one
# process.
#
"""
_DP = """\
# It was measured with the model in torch.nn.DataParallel over {count} devices; micro_batch_size is that of one of them.
#
"""
_BINDING = """\
# It was measured with each process bound to cores (numa_binding: {binding}). config.prepare binds yours in the same
# way: start training without another binding (torchrun --numa-binding, numactl), and call it before workers start.
#
"""
_TAKEN_OFF = """\
# Take out of your own code what it has and this has not: {names}.
#
"""
_MALLOC = """\
# It was measured in processes that keep the memory that they free. To have the same in training, put this before the
# command that starts it:
#
#     env {switches}
#
"""


def header_of(summary: RunSummary, recommendation: Recommendation) -> str:
    """Return the comments on how to train with a recommendation."""
    config = recommendation.config
    facts = summary.facts
    framework = _framework(summary)
    target = _TRAINERS.get(framework, "")
    template = _TRAINER_HEADER if target else _HEADER
    if facts.script is not None:
        template = _SCRIPT_HEADER
    replaced = _replaced_arguments(facts, config)
    return template.format(
        version=summary.autotune_version,
        name=_printable(summary.name),
        device=_printable(summary.environment.device_name),
        command=_printable(shlex.join(summary.command)),
        lr=_script_lr(summary, config),
        loader=_loader(facts, config),
        ranks=_ranks(config),
        binding="" if config.numa_binding is None else _BINDING.format(binding=config.numa_binding),
        taken_off=_taken_off(summary.baseline, config),
        malloc=_malloc(summary.environment),
        framework=framework,
        target=target,
        kind=_printable(summary.environment.device.partition(":")[0]),
        optimizer=f', optimizer="{_printable(facts.optimizer.name)}"' if config.fused else "",
        use=_USES.get(target, ""),
        replaced=_TRAINER_ARGUMENTS.format(replaced=replaced) if replaced else "",
    )


def _script_lr(summary: RunSummary, config: TrainingConfig) -> str:
    """Return the comment on a learning rate that the script sets itself; "" if it needs no change."""
    before = summary.baseline.lr
    script = summary.facts.script
    if script is None or config.lr == before or "lr" in script.placeholders:
        return ""
    return _SCRIPT_LR.format(before=before, factor=round(config.lr / before, 4))


def _framework(summary: RunSummary) -> str:
    """Return the framework whose trainer was given, by its name in notes; "" for the user's own loop."""
    named = (
        str(found.figures.get("framework")) for found in summary.notes if found.code in _OF_TRAINERS
    )
    return next((name for name in named if name in _TRAINERS), "")


def _loader(facts: WorkloadFacts, config: TrainingConfig) -> str:
    """Return the lines that make the measured loader."""
    lines = _LOADERS[_loader_of(facts, config)]
    threads = "" if config.worker_threads is None else _WORKER_THREADS
    made = lines.format(
        max_tokens=config.loader_max_tokens,
        replaced=_replaced_arguments(facts, config),
        threads=threads,
    )
    is_whole = facts.objects.has_loader and config.process_count > 1 and not facts.is_iterable
    return made + _SHARES if is_whole else made


def _replaced_arguments(facts: WorkloadFacts, config: TrainingConfig) -> str:
    """Return the arguments given next to a DataLoader, with the size for a batch sampler; "" without any."""
    size = f"batch_size={config.loader_batch_size}"
    if facts.has_token_budget:
        size = f"max_tokens={config.loader_max_tokens}"
    is_made = facts.has_token_budget or facts.fixed_batch_size is None
    sizes = {"batch_sampler": f"batch_sampler (for {size})"} if is_made else {}
    return ", ".join(sizes.get(name, name) for name in facts.objects.replaced_arguments)


def _loader_of(facts: WorkloadFacts, config: TrainingConfig) -> str:
    if facts.objects.has_loader:
        return "replaced" if facts.objects.replaced_arguments else "loader"
    if facts.has_token_budget:
        return "tokens"
    if facts.fixed_batch_size is not None:
        return "batches"
    if facts.is_tf_data:
        return "tf_data"
    if facts.is_iterable:
        return "stream"
    return "ranks" if config.process_count > 1 else "map"


def _ranks(config: TrainingConfig) -> str:
    """Return the comment on several devices; "" for one."""
    if config.is_ddp:
        return _DDP.format(count=config.process_count)
    return _DP.format(count=config.devices_per_process) if config.is_dp else ""


def _taken_off(before: TrainingConfig, config: TrainingConfig) -> str:
    """Return the comment on switches to remove from the user's code; "" without any."""
    names = [
        one.left_on
        for one in SETTINGS
        if one.left_on and one.value(before) and not one.value(config)
    ]
    return _TAKEN_OFF.format(names=", ".join(names)) if names else ""


def _malloc(environment: Environment) -> str:
    """Return the comment on malloc's environment variables; "" if trials had none."""
    return _MALLOC.format(switches=" ".join(environment.malloc)) if environment.keeps_memory else ""


def _printable(text: str) -> str:
    """Return a text as one line of printable characters, for a comment."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


# The file


_FORMAT = 1
_DIGITS = 4  # our convention: finer than any measured figure here


def recommended_yaml(summary: RunSummary) -> str:
    """Return the text of recommended.yaml for a summary that has a recommendation."""
    recommendation = summary.recommendation
    assert recommendation is not None, "without a recommendation there is nothing to write"  # noqa: S101 -- a bug of ours
    script = summary.facts.script
    content = {
        "format": _FORMAT,
        "settings": recommendation.config.model_dump(),
        **({} if script is None else _script(summary, script)),
        "learning_rate": _learning_rate(recommendation),
        "evidence": _evidence(summary, recommendation),
        "same_batch": None
        if recommendation.same_batch is None
        else recommendation.same_batch.model_dump(),
        "baseline": summary.baseline.model_dump(),
        "machine": describe_machine(summary.environment),
    }
    return header_of(summary, recommendation) + yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=100
    )


def read_recommended(path: str | Path) -> TrainingConfig:
    """Read the settings of a recommended.yaml.

    Raises:
        ConfigError: The file can't be read, is no recommended.yaml, or was changed to what breaks a
            rule.
    """
    path = Path(path)
    document = read_document(path)
    settings = document.data.get("settings")
    if "format" not in document.data or not isinstance(settings, dict):
        raise ConfigError(
            f"{path}: is not a recommended.yaml (it has no `format` and `settings`); give one that "
            f"autotune wrote"
        )
    number = document.data["format"]
    if number != _FORMAT or isinstance(number, bool):
        text = f"must be {_FORMAT}, but got {number!r}; read it with the autotune that wrote it, or search again"
        raise ConfigError(*map(str, document.placed([Problem(text=text, path=("format",))])))
    config, problems = validated(TrainingConfig, settings)
    broken = [problem for problem in document.problems if problem.path[:1] in {(), ("settings",)}]
    broken += document.placed([*_left_out(settings), *problems], below=("settings",))
    if config is None or broken:
        raise ConfigError(*map(str, broken))
    return config


def _malloc_switch(switch: str) -> str:
    """Refuse any other variable: LD_PRELOAD, for example, would run code when the file is applied."""
    if re.fullmatch(r"MALLOC_(MMAP|TRIM)_THRESHOLD_=[0-9]+", switch) is None:
        raise ValueError(
            f"must be MALLOC_MMAP_THRESHOLD_=N or MALLOC_TRIM_THRESHOLD_=N, N whole, but got "
            f"{switch!r}"
        )
    return switch


class AppliedScript(FrozenModel):
    """The script's part of a recommended.yaml."""

    command: tuple[str, ...]
    """Command of the search, with placeholders."""
    script: ScriptFacts
    """Facts by which its settings are applied."""
    malloc: tuple[Annotated[str, AfterValidator(_malloc_switch)], ...] = ()
    """Variables for glibc's malloc in trials, as NAME=value."""


def read_script(path: str | Path) -> AppliedScript:
    """Read the script's part of a recommended.yaml.

    Raises:
        ConfigError: The file can't be read, or was not found for a command.
    """
    document = read_document(Path(path))
    names = [name for name in AppliedScript.model_fields if document.data.get(name) is not None]
    if not {"command", "script"} <= set(names):
        raise ConfigError(
            f"{path}: must be of a search for a command, but is for a model and a dataset; use "
            "autotune.load in your own loop, or search with autotune run -- python train.py"
        )
    found, problems = validated(AppliedScript, {name: document.data[name] for name in names})
    if found is None:
        raise ConfigError(*map(str, document.placed(problems)))
    return found


def _script(summary: RunSummary, script: ScriptFacts) -> dict[str, Any]:
    kept = script.model_dump(mode="json", exclude={"unreached", "modules", "new_files"})
    malloc = list(summary.environment.malloc) if summary.environment.keeps_memory else []
    return {"command": list(summary.command), "malloc": malloc, "script": kept}


def _left_out(settings: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each missing setting, since a lost line must not become a default."""
    ddp = settings.get("ddp")
    paths: list[KeyPath] = [(name,) for name in TrainingConfig.model_fields if name not in settings]
    if isinstance(ddp, dict):
        paths += [("ddp", name) for name in DdpConfig.model_fields if name not in ddp]
    for path in paths:
        yield Problem(text="must be given: autotune writes every setting", path=path)


def _learning_rate(recommendation: Recommendation) -> dict[str, Any]:
    advice = recommendation.lr_advice
    figures = advice.model_dump(mode="json", include={"rule", "batch_ratio", "betas", "eps"})
    return {
        **figures,
        "batch_ratio": _rounded(advice.batch_ratio),
        "notes": [*map(str, advice.notes)],
    }


def _evidence(summary: RunSummary, recommendation: Recommendation) -> dict[str, Any]:
    runs = {
        "baseline": runs_of(summary.trials, 0),
        "recommended": runs_of(summary.trials, recommendation.number),
    }
    sources = [run.busy_source for own in runs.values() for run in own if run.busy_source]
    peaks = [run.peak_memory_bytes / 2**30 for run in runs["recommended"]]
    return {
        "verdict": recommendation.verdict,
        "speedup": _interval(recommendation.speedup),
        "gain_probability": _rounded(recommendation.gain_probability),
        "samples_per_s": {
            name: _interval(rate_of_runs(own, summary.run_variation) if own else None)
            for name, own in runs.items()
        },
        "busy_fraction": {
            **{name: _busy(own) for name, own in runs.items()},
            "source": next(iter(sources), None),
        },
        "peak_memory_gib": _rounded(max(peaks, default=None)),
        "memory_limit_gib": _rounded(summary.limit_bytes / 2**30),
        "memory_source": summary.memory_source,
        "reasons": [*map(str, recommendation.reasons)],
        "trials": dict(Counter[str](trial.outcome for trial in summary.trials)),
        "runs": {name: len(own) for name, own in runs.items()},
    }


def _busy(runs: Sequence[Measurement]) -> float | None:
    fractions = [run.busy_fraction for run in runs if run.busy_fraction is not None]
    return _rounded(fmean(fractions)) if fractions else None


def _interval(figure: Interval | None) -> dict[str, float | None] | None:
    return None if figure is None else {name: _rounded(value) for name, value in figure}


def _rounded(value: float | None) -> float | None:
    """Return four significant digits; None for an unknown value, such as an interval's open end."""
    return float(f"{value:.{_DIGITS}g}") if value is not None and isfinite(value) else None
