"""Messages on the workload: what the baseline was read from, and what was observed of a script."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.messages import message
from autotune.messages.units import format_bytes, format_fraction

__all__ = [
    "baseline_from_objects",
    "batch_follows_budget",
    "batches_are_fixed",
    "beside_training",
    "default_optimizer",
    "epoch_not_taken",
    "files_left",
    "other_training",
    "outside_training",
    "placeholders_by_default",
    "prepared_by",
    "script_overrides_baseline",
    "seen_on_rank_0",
    "setting_unreached",
    "training_moved",
]


@message
def default_optimizer(trainable_parameters: int, adam_bytes: int) -> str:
    return (
        "No optimizer was given: trials train with SGD, which keeps no state. Adam and AdamW need "
        f"{format_bytes(adam_bytes)} more memory on each device (8 bytes for each of {trainable_parameters:,} "
        "trainable parameters), so the recommended settings may run out of memory with them. Give your own as "
        "workload.optimizer or optimizer=."
    )


@message
def batch_follows_budget(max_tokens: int, samples: float) -> str:
    return (
        "The batch sampler fills a token budget: max_tokens is searched, and micro_batch_size follows it. At your "
        f"{max_tokens:,} tokens a batch holds {samples:.3g} samples on average."
    )


# What was read from the user's own objects.


@message
def baseline_from_objects(settings: Sequence[str], has_loader: bool) -> str:
    sources = ["loader"] if has_loader else []
    if {"lr", "fused"} & {*settings}:
        sources.append("optimizer")
    if "cudnn_benchmark" in settings:
        sources.append("code")
    names = " and ".join(sources or ["optimizer"])
    return f"The baseline is what your {names} {'are' if len(sources) > 1 else 'is'} set to ({', '.join(settings)})."


@message
def batches_are_fixed(size: int) -> str:
    return (
        f"The batch size stays at {size}: your loader's dataset or its own batch sampler makes the batches. To search "
        'it, give a loader with batch_size=, or loader={"batch_sampler": a function of (dataset, batch_size)}.'
    )


@message
def prepared_by(framework: str) -> str:
    return f"Trials run without {framework}: model, optimizer and loader were unwrapped."


@message
def beside_training(framework: str, names: Sequence[str]) -> str:
    return f"Trials run only the training step of {framework}, without: {', '.join(names)}."


@message
def epoch_not_taken(batches: int) -> str:
    return (
        f"Your loader ends an epoch after {batches} batches (with_epoch); trials continue until its dataset ends, and "
        "restart it only then."
    )


# What was observed of a script.


@message
def script_overrides_baseline(settings: Sequence[str]) -> str:
    return (
        f"The baseline is what the script does by itself: your values of {', '.join(settings)} have no effect. To give "
        "a setting's value, put it into the command as a placeholder, such as {lr}."
    )


@message
def placeholders_by_default(values: Sequence[str]) -> str:
    return f"No value was given for {', '.join(values)}: autotune's defaults are used. Set them by baseline."


@message
def files_left(files: Sequence[str], count: int) -> str:
    more = ", ..." if count > len(files) else ""
    return (
        f"Trials of the script leave files or folders behind ({count}): {', '.join(files)}{more}. autotune did not "
        "remove them, because another program may have created them or removing failed."
    )


_UNREACHED = {
    "no_loader": "it takes its batches from no DataLoader",
    "own_batches": "a sampler of the script's own makes its DataLoader's batches",
    "in_step": "the script reads another DataLoader in step with it, and their ratio would change",
    "data_by_epoch": "the script changes its dataset each epoch, and persistent workers would not see it",
    "own_precision": "the script chooses its precision itself",
    "own_layout": "the script chooses its layout itself",
    "own_threads": "the script sets the number of threads itself",
    "own_algorithms": "the script asks for deterministic algorithms",
    "own_optimizer": "the script creates its optimizer itself; give it fused=True there to measure that",
    "not_comparable": "comparing precisions needs a DataLoader, to train on the same batch twice",
    "several_ranks": "precisions are compared in one process, and it has several ranks",
    "no_module": "no module was seen to train",
    "in_the_script": "only the script itself can change it",
}
"""Why a setting of a script is out of reach, by the codes of worker.attach."""


@message
def setting_unreached(setting: str, reason: str, has_placeholder: bool) -> str:
    text = f"{setting} was left as the script has it: {_UNREACHED[reason]}."
    if has_placeholder:
        text += f" If the script has an option for it, write {{{setting}}} as its value in the command to search it."
    return text


@message
def outside_training(seconds: float, epochs: int) -> str:
    between = f" between {epochs} epochs" if epochs else ""
    return (
        f"The script spent {seconds:.1f} s of the measurement outside training, such as on an evaluation{between}: the "
        "throughput excludes that."
    )


@message
def other_training(place: str, seconds: float, waiting: float) -> str:
    return (
        f"The script also trains on another loader, created in {place}: {seconds:.1f} s of the measurement, of which "
        f"it waited {format_fraction(waiting)} for data. The throughput excludes that, and the settings are not for "
        "that loader."
    )


@message
def training_moved(place: str, batch_size: int | None) -> str:
    batches = f" with batches of {batch_size}" if batch_size else ""
    return (
        f"The script moved on to another loader, created in {place}{batches}: that one was measured, with its own "
        "settings."
    )


@message
def seen_on_rank_0(ranks: int) -> str:
    return f"Throughput and memory are those of rank 0, times {ranks}: the script's ranks train in step."
