"""Messages on the space: settings without an effect, narrowed ranges, and the learning rate at another batch."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.messages import message
from autotune.messages.units import format_bytes, format_fraction

__all__ = [
    "baseline_without_effect",
    "betas_unchanged",
    "dataset_not_sharded",
    "ddp_settings_without_ddp",
    "first_bucket_without_effect",
    "fp16_hook_overflows",
    "hooks_change_gradients",
    "larger_batch_gain_unused",
    "lr_rule_unknown",
    "lr_unchanged",
    "lr_warm_up",
    "malloc",
    "out_of_order_tried",
    "precision_not_native",
    "reserve",
    "spread_without_effect",
    "tf_data",
    "trials_stay_on_named_device",
    "unlike_devices",
    "unused_parameters_not_searched",
    "value_without_effect",
    "world_size_capped",
]


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
        "processes can only be bound to cores on Linux, with CUDA or ROCm devices or on the CPU, and the device is "
        "{device}"
    ),
    "one_numa_node": "the cores here belong to one NUMA node, and there are no ranks to divide them among",
    "no_buffers": "the model has no buffers",
}
"""Why a setting has no effect, by the codes of space.constraints."""


@message
def baseline_without_effect(setting: str, reason: str, device: str) -> str:
    return f"The baseline's {setting} has no effect here: {_NO_EFFECT[reason].format(device=device)}."


@message
def value_without_effect(setting: str, value: object, reason: str, device: str) -> str:
    return f"{setting}={value} has no effect here: {_NO_EFFECT[reason].format(device=device)}."


@message
def malloc(switches: Sequence[str], is_ours: bool) -> str:
    if not is_ours:
        return f"Trials run with your malloc settings: {', '.join(switches)}."
    return (
        "All trials, including the baseline, ran with malloc trimming off. To reach the same throughput in training, "
        f"most of all on a CPU, start it with: env {' '.join(switches)} python train.py"
    )


@message
def reserve(reserve_bytes: int, trial_bytes: int) -> str:
    return (
        f"Trials may use {format_bytes(trial_bytes)}: objective.reserve keeps {format_bytes(reserve_bytes)} of the "
        "memory limit free."
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
    if most_workers is not None:
        text += f"; num_workers stayed within {most_workers}"
    text += ". Shard it by torch.utils.data.get_worker_info()."
    return text if most_workers is not None else f"{text} The choices given were kept."


@message
def tf_data() -> str:
    return (
        "A tf.data pipeline loads the data: num_workers is its num_parallel_calls (0: sequential) and its threads, "
        "prefetch_factor its prefetch buffer in batches. Use the same loader in your own loop: "
        "TfData(build).loader(config)."
    )


@message
def out_of_order_tried(slow_tail_fraction: float | None) -> str:
    why = ""
    if slow_tail_fraction is not None:
        why = (
            f", because {format_fraction(slow_tail_fraction)} of the sampled items' time went into items slower than 8 "
            "times the median"
        )
    return (
        f"in_order: false was tried{why}. It changes the order of the batches: two runs with the same seed are not "
        "bit-identical. To keep the order, write space: {in_order: true}."
    )


@message
def ddp_settings_without_ddp(settings: Sequence[str]) -> str:
    return f"{', '.join(settings)} had no effect: the space has no strategy 'ddp' with several ranks."


@message
def trials_stay_on_named_device(device: str) -> str:
    return f"Trials stayed on {device}, because it was named; list world_size to try further devices."


@message
def unlike_devices(devices: Sequence[str]) -> str:
    return (
        f"The devices differ ({', '.join(devices)}): a group trains as fast as the slowest one, and fits only what the "
        "smallest one holds."
    )


@message
def unused_parameters_not_searched() -> str:
    return (
        "One step left parameters without a gradient: without ddp.find_unused_parameters=True only a static graph runs "
        "under strategy 'ddp'. The choices given were kept."
    )


@message
def hooks_change_gradients(hooks: Sequence[str]) -> str:
    return (
        f"ddp.comm_hook {', '.join(hooks)} changes the gradients when they are exchanged, and the precision guard does "
        "not compare that: compare the validation metric once."
    )


@message
def fp16_hook_overflows(precisions: Sequence[str]) -> str:
    return (
        "ddp.comm_hook fp16 makes gradients above 65,504 infinite before they are averaged, and those below 6e-8 zero; "
        f"no GradScaler prevents that in {', '.join(precisions)}."
    )


@message
def spread_without_effect(hosts: int) -> str:
    why = "there is one host" if hosts == 1 else "no trial has several ranks"
    return f"executor.ranks=spread had no effect: {why}."


@message
def world_size_capped(most: int, devices: int, hosts: int) -> str:
    return (
        f"world_size stayed within {most} of the {devices} devices of {hosts} hosts: with more, a rank would get no "
        "sample of the largest global batch. List world_size to try more."
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
        f"Raise the learning rate from the old to the new value over the first {epochs} epochs (gradual warm-up, Goyal "
        "et al. 2017), and compare the validation metric once."
    )


@message
def betas_unchanged(betas: Sequence[float], batch_ratio: float) -> str:
    return (
        f"Leave the betas ({', '.join(map(str, betas))}): they can't follow a batch {batch_ratio:g} times as large, "
        "where k * (1 - beta) must be below 1."
    )
