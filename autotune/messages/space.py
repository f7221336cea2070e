"""Write the notes on the space, the learning rate, the workload, and a script that is tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autotune.messages import message
from autotune.messages.units import format_bytes, format_fraction

_NO_EFFECT = {
    "no_copy_to_accelerator": "pinned memory serves copies to an accelerator, and the device is {device}",
    "no_nvidia_gpu": "only NVIDIA GPUs compute TF32, and the device is {device}",
    "no_4d_input": "no input of the model has four dimensions",
    "no_cuda_graphs": "it records CUDA graphs, and the device is {device}",
    "no_cudnn": "cuDNN computes on GPUs, and the device is {device}",
    "no_fused_optimizer": "torch has no fused implementation of this optimizer for these parameters",
    "static_graph": "with static_graph torch finds unused parameters by itself",
    "tf_data": "a tf.data pipeline has threads instead of workers, and starts them in each epoch",
    "no_affinity": (
        "processes can only be bound to cores on Linux, with CUDA or ROCm devices or on the CPU, "
        "and the device is {device}"
    ),
    "one_numa_node": "the cores here belong to one NUMA node, and there are no ranks to divide them among",
    "no_buffers": "the model has no buffers",
}
"""Reason why a setting has no effect, by the codes of `space.constraints`."""


@message
def baseline_without_effect(setting: str, reason: str, device: str) -> str:
    return (
        f"The baseline's {setting} has no effect here: {_NO_EFFECT[reason].format(device=device)}."
    )


@message
def value_without_effect(setting: str, value: object, reason: str, device: str) -> str:
    return f"{setting}={value} has no effect here: {_NO_EFFECT[reason].format(device=device)}."


@message
def malloc(switches: Sequence[str], is_ours: bool) -> str:
    if not is_ours:
        return f"Trials run with your malloc settings: {', '.join(switches)}."
    return (
        "All trials, including the baseline, ran with malloc trimming off. To reach the same "
        f"throughput in training, most of all on a CPU, start it with: env {' '.join(switches)} "
        "python train.py"
    )


@message
def reserve(reserve_bytes: int, trial_bytes: int) -> str:
    return (
        f"Trials may use {format_bytes(trial_bytes)}: objective.reserve keeps "
        f"{format_bytes(reserve_bytes)} of the memory limit free."
    )


@message
def larger_batch_gain_unused() -> str:
    return "objective.larger_batch_gain has no effect with global_batch keep: no larger batch is tried."


@message
def precision_not_native(device: str, precisions: Sequence[str]) -> str:
    return f"{device} does not compute {', '.join(precisions)} natively: tried as given."


@message
def dataset_not_sharded(most_workers: int | None) -> str:
    text = "The iterable dataset is not sharded, so each further worker would repeat the data"
    remedy = "Shard it by torch.utils.data.get_worker_info()."
    if most_workers is None:
        return f"{text}. {remedy} The choices given were kept."
    return f"{text}; num_workers stayed within {most_workers}. {remedy}"


@message
def tf_data() -> str:
    return (
        "A tf.data pipeline loads the data: num_workers is its num_parallel_calls (0: sequential) "
        "and its threads, prefetch_factor its prefetch buffer in batches. Use the same loader in "
        "your own loop: TfData(build).loader(config)."
    )


@message
def out_of_order_tried(slow_tail_fraction: float | None) -> str:
    why = ""
    if slow_tail_fraction is not None:
        share = format_fraction(slow_tail_fraction)
        why = (
            f", because {share} of the sampled items' time went into items over 8 times the median"
        )
    return (
        f"in_order: false was tried{why}. It changes the order of the batches: two runs with the "
        "same seed are not bit-identical. To keep the order, write space: {in_order: true}."
    )


@message
def ddp_settings_without_ddp(settings: Sequence[str]) -> str:
    return (
        f"{', '.join(settings)} had no effect: the space has no strategy 'ddp' with several ranks."
    )


@message
def trials_stay_on_named_device(device: str) -> str:
    return (
        f"Trials stayed on {device}, because it was named; list world_size to try further devices."
    )


@message
def unlike_devices(devices: Sequence[str]) -> str:
    return (
        f"The devices differ ({', '.join(devices)}): a group trains as fast as the slowest one, "
        "and fits only what the smallest one holds."
    )


@message
def unused_parameters_not_searched() -> str:
    return (
        "One step left parameters without a gradient: without ddp.find_unused_parameters=True only "
        "a static graph runs under strategy 'ddp'. The choices given were kept."
    )


@message
def hooks_change_gradients(hooks: Sequence[str]) -> str:
    return (
        f"ddp.comm_hook {', '.join(hooks)} changes the gradients when they are exchanged, and the "
        "precision guard does not compare that: compare the validation metric once."
    )


@message
def fp16_hook_overflows(precisions: Sequence[str]) -> str:
    return (
        "ddp.comm_hook fp16 makes gradients above 65,504 infinite before they are averaged, and "
        f"those below 6e-8 zero; no GradScaler prevents that in {', '.join(precisions)}."
    )


@message
def spread_without_effect(hosts: int) -> str:
    why = "there is one host" if hosts == 1 else "no trial has several ranks"
    return f"executor.ranks=spread had no effect: {why}."


@message
def world_size_capped(most: int, devices: int, hosts: int) -> str:
    return (
        f"world_size stayed within {most} of the {devices} devices of {hosts} hosts: with more, a "
        "rank would get no sample of the largest global batch. List world_size to try more."
    )


@message
def first_bucket_without_effect(torch: str) -> str:
    return f"ddp.first_bucket_mb has no effect: torch {torch} has no bucket_cap_mb_list."


# The learning rate at another global batch.


@message
def lr_unchanged() -> str:
    return "The learning rate is left as it is (lr_rule: none)."


@message
def lr_rule_unknown(optimizer: str) -> str:
    return f"No scaling rule is known for {optimizer}: the square root, the more careful one, was used."


@message
def lr_warm_up(epochs: int) -> str:
    return (
        f"Raise the learning rate from the old to the new value over the first {epochs} epochs "
        "(gradual warm-up, Goyal et al. 2017), and compare the validation metric once."
    )


@message
def betas_unchanged(betas: Sequence[float], batch_ratio: float) -> str:
    return (
        f"Leave the betas ({', '.join(map(str, betas))}): they can't follow a batch "
        f"{batch_ratio:g} times as large, where k * (1 - beta) must be below 1."
    )


# A framework's own file that the baseline was read from.


FileReason = Literal["other_optimizer", "no_fused_optimizer", "no_binding"]


@message
def not_read(path: str, name: str, reason: str) -> str:
    return f"{path}: not read: {name}: {reason}"


@message
def keys_not_used(path: str, names: Sequence[str]) -> str:
    return f"{path}: autotune has no setting for {', '.join(names)}"


@message
def taken_by_default(path: str, title: str, values: Sequence[str]) -> str:
    return f"{path}: missing, so taken from the defaults of {title}: {', '.join(values)}"


@message
def ddp_without_ranks(path: str, names: Sequence[str]) -> str:
    return (
        f"{path}: not read: {', '.join(names)}: needs baseline.strategy: ddp and "
        "baseline.world_size, which this file does not have"
    )


@message
def not_read_over(
    name: str,
    reason: FileReason,
    own: str | None,
    trained: str,
) -> str:
    why = {
        "other_optimizer": f"there it is of {own}, and trials train with {trained}",
        "no_fused_optimizer": f"torch can't fuse {trained} for these parameters on this device",
        "no_binding": "processes can't be bound to a NUMA node here, or it would change nothing",
    }[reason]
    return f"{name} of the framework's file is left out of the baseline: {why}."


# The workload.


@message
def default_optimizer(trainable_parameters: int, adam_bytes: int) -> str:
    return (
        "No optimizer was given: trials train with SGD, which keeps no state. Adam and AdamW need "
        f"{format_bytes(adam_bytes)} more memory on each device (8 bytes for each of "
        f"{trainable_parameters:,} trainable parameters), so the recommended settings may run out "
        "of memory with them. Give your own as workload.optimizer or optimizer=."
    )


@message
def batch_follows_budget(max_tokens: int, samples: float) -> str:
    return (
        "The batch sampler fills a token budget: max_tokens is searched, and micro_batch_size "
        f"follows it. At your {max_tokens:,} tokens a batch holds {samples:.3g} samples on average."
    )


# The user's own objects.


@message
def baseline_from_objects(settings: Sequence[str], has_loader: bool) -> str:
    sources = []
    if has_loader:
        sources.append("loader")
    if "lr" in settings or "fused" in settings:
        sources.append("optimizer")
    if "cudnn_benchmark" in settings:
        sources.append("code")
    names = " and ".join(sources or ["optimizer"])
    return f"The baseline was read from your {names}: {', '.join(settings)}."


@message
def batches_are_fixed(size: int) -> str:
    return (
        f"The batch size stays at {size}: your loader's dataset or its own batch sampler makes the "
        "batches. To search it, give a loader with batch_size=, or "
        'loader={"batch_sampler": a function of (dataset, batch_size)}.'
    )


@message
def prepared_by(framework: str) -> str:
    return f"Trials run without {framework}: model, optimizer and loader were unwrapped."


@message
def during_training(framework: str, names: Sequence[str]) -> str:
    return f"Trials run only the training step of {framework}, without: {', '.join(names)}."


@message
def epoch_not_taken(batches: int) -> str:
    return (
        f"Your loader ends an epoch after {batches} batches (with_epoch); trials continue until "
        "its dataset ends, and restart it only then."
    )


# A script.


@message
def script_overrides_baseline(settings: Sequence[str]) -> str:
    return (
        f"The baseline is what the script does by itself: your values of {', '.join(settings)} "
        "have no effect. To set a value, put it into the command as a placeholder, such as {lr}."
    )


@message
def placeholders_by_default(values: Sequence[str]) -> str:
    return f"No value was given for {', '.join(values)}: autotune's defaults are used. Set them by baseline."


@message
def files_left(files: Sequence[str], count: int) -> str:
    more = ", ..." if count > len(files) else ""
    return (
        f"Trials of the script leave files or folders behind ({count}): {', '.join(files)}{more}. "
        "autotune did not remove them, because another program may have created them or removing "
        "failed."
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
"""Reason why a setting of a script is out of reach, by the codes of `worker.attach`."""


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
        f"The script spent {seconds:.1f} s of the measurement outside training, such as on an "
        f"evaluation{between}: the throughput excludes that."
    )


@message
def other_training(place: str, seconds: float, waiting: float) -> str:
    return (
        f"The script also trains on another loader, created in {place}: {seconds:.1f} s of the "
        f"measurement, of which it waited {format_fraction(waiting)} for data. The throughput "
        "excludes that, and the settings are not for that loader."
    )


@message
def training_moved(place: str, batch_size: int | None) -> str:
    batches = f" with batches of {batch_size}" if batch_size else ""
    return (
        f"The script moved on to another loader, created in {place}{batches}: that one was "
        "measured, with its own settings."
    )


@message
def seen_on_rank_0(ranks: int) -> str:
    return f"Throughput and memory are those of rank 0, times {ranks}: the script's ranks train in step."
