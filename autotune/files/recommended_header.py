"""The head of a recommended.yaml: how its settings are used, as comments.

Comes in: the RunSummary of a search and its recommendation. Goes out: lines of comments.
"""

from __future__ import annotations

import shlex

from autotune.records.recommendation import Recommendation
from autotune.records.run_summary import RunSummary
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts

__all__ = ["header_of"]

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
{beside}#
{taken_off}{malloc}# `settings` is what is read back; everything below it is the evidence, rounded.

"""
_TRAINERS = {
    "transformers.Trainer": "hf",
    "Lightning's Trainer": "lightning",
    "accelerate": "accelerate",
}
"""Targets by what notes call a framework."""
_OF_TRAINERS = {"beside_training", "prepared_by"}
"""Notes that name the framework whose objects were given."""
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
    "beside": """\
#     loader = ...  # yours, made with what the search had beside it: {beside}
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
"""A DataLoader refuses `shuffle` beside a sampler or for a stream, and `batch_size` beside a batch sampler."""
_WORKER_THREADS = 'worker_init_fn=config.dataloader_kwargs()["worker_init_fn"], '
"""For a loader that takes the settings alone."""
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
_SWITCHES = {"fused": "fused=True of the optimizer", "cudnn_benchmark": "torch.backends.cudnn.benchmark = True"}
"""What stands in the user's own code for settings that nothing here switches off there."""
_MALLOC = """\
# It was measured in processes that keep the memory that they free. To have the same in training, put this before the
# command that starts it:
#
#     env {switches}
#
"""


def header_of(summary: RunSummary, recommendation: Recommendation) -> str:
    """How to train with what is recommended: in one's own loop, or by one's own script."""
    if summary.facts.script is not None:
        return _script_header(summary, recommendation)
    framework = _framework(summary)
    if framework is not None:
        return _trainer_header(summary, recommendation.config, framework)
    return _HEADER.format(
        version=summary.autotune_version,
        name=_printable(summary.name),
        device=_printable(summary.environment.device_name),
        loader=_loader(summary.facts, recommendation.config),
        ranks=_ranks(recommendation.config),
        binding=_binding(recommendation.config),
        taken_off=_taken_off(summary.baseline, recommendation.config),
        malloc=_malloc(summary.environment),
    )


def _script_header(summary: RunSummary, recommendation: Recommendation) -> str:
    config, before = recommendation.config, summary.baseline
    script = summary.facts.script
    is_left = config.lr != before.lr and script is not None and "lr" not in script.placeholders
    return _SCRIPT_HEADER.format(
        version=summary.autotune_version,
        name=_printable(summary.name),
        device=_printable(summary.environment.device_name),
        command=_printable(shlex.join(summary.command)),
        lr=_SCRIPT_LR.format(before=before.lr, factor=round(config.lr / before.lr, 4)) if is_left else "",
    )


def _framework(summary: RunSummary) -> str | None:
    """Whose trainer was given, by the name that notes have for it; None: the loop is the user's own."""
    named = (str(found.figures.get("framework")) for found in summary.notes if found.code in _OF_TRAINERS)
    return next((name for name in named if name in _TRAINERS), None)


def _trainer_header(summary: RunSummary, config: TrainingConfig, framework: str) -> str:
    target, beside = _TRAINERS[framework], _beside(summary.facts, config)
    return _TRAINER_HEADER.format(
        version=summary.autotune_version,
        name=_printable(summary.name),
        device=_printable(summary.environment.device_name),
        framework=framework,
        target=target,
        kind=_printable(summary.environment.device.partition(":")[0]),
        optimizer=f', optimizer="{_printable(summary.facts.optimizer.name)}"' if config.fused else "",
        use=_USES[target],
        beside=f"# The search had beside your loader, which must be made with it: {beside}.\n" if beside else "",
        taken_off=_taken_off(summary.baseline, config),
        malloc=_malloc(summary.environment),
    )


def _loader(facts: WorkloadFacts, config: TrainingConfig) -> str:
    """How the loader that was measured is made."""
    lines = _LOADERS[_loader_of(facts, config)]
    threads = "" if config.worker_threads is None else _WORKER_THREADS
    made = lines.format(max_tokens=config.loader_max_tokens, beside=_beside(facts, config), threads=threads)
    is_whole = facts.objects.has_loader and config.process_count > 1 and not facts.is_iterable
    return made + _SHARES if is_whole else made


def _beside(facts: WorkloadFacts, config: TrainingConfig) -> str:
    """What was given beside a DataLoader, with the size that a batch sampler was made for; "": nothing was."""
    size = (
        f"max_tokens={config.loader_max_tokens}" if facts.has_token_budget else f"batch_size={config.loader_batch_size}"
    )
    is_made = facts.has_token_budget or facts.fixed_batch_size is None
    sizes = {"batch_sampler": f"batch_sampler (for {size})"} if is_made else {}
    return ", ".join(sizes.get(name, name) for name in facts.objects.beside)


def _loader_of(facts: WorkloadFacts, config: TrainingConfig) -> str:
    if facts.objects.has_loader:
        return "beside" if facts.objects.beside else "loader"
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
    """How several devices were used; "" for one."""
    if config.strategy == "single":
        return ""
    return (_DDP if config.strategy == "ddp" else _DP).format(count=config.world_size)


def _binding(config: TrainingConfig) -> str:
    return "" if config.numa_binding is None else _BINDING.format(binding=config.numa_binding)


def _taken_off(before: TrainingConfig, config: TrainingConfig) -> str:
    """Switches of the user's own code that are not recommended; "" where there are none."""
    names = [name for setting, name in _SWITCHES.items() if getattr(before, setting) and not getattr(config, setting)]
    return _TAKEN_OFF.format(names=", ".join(names)) if names else ""


def _malloc(environment: Environment) -> str:
    """How to start training as trials were; "" where that goes without saying."""
    return _MALLOC.format(switches=" ".join(environment.malloc)) if environment.keeps_memory else ""


def _printable(text: str) -> str:
    """A text for a comment, which must be one line of characters that YAML allows."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
