"""Sentences of the space's notes, and of the learning rate's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.report.wording.template import Wording

__all__ = ["SPACE"]

_REASONS = {
    "no_copy_to_accelerator": "pinned memory serves copies to an accelerator, and the device is {device}",
    "no_nvidia_gpu": "TF32 is computed by NVIDIA GPUs, and the device is {device}",
    "no_4d_input": "no input of the model has four dimensions",
    "static_graph": "with static_graph torch finds unused parameters by itself",
    "no_buffers": "the model has no buffers",
}
"""Why a setting has no effect."""


def _without_effect(figures: Mapping[str, Any]) -> str:
    setting = (
        f"{figures['setting']}={figures['value']}" if "value" in figures else f"The baseline's {figures['setting']}"
    )
    return f"{setting} has no effect here: {_REASONS[figures['reason']].format(device=figures['device'])}."


def _dataset_not_sharded(figures: Mapping[str, Any]) -> str:
    repeated = "each further worker would repeat the data: shard it by torch.utils.data.get_worker_info()"
    if figures["most_workers"] is None:
        return f"The iterable dataset is not sharded; {repeated}. The choices given were kept."
    most = figures["most_workers"]
    return f"The iterable dataset is not sharded, so num_workers stayed within {most}; {repeated}."


def _spread_without_effect(figures: Mapping[str, Any]) -> str:
    why = "there is one host" if figures["hosts"] == 1 else "no trial has several ranks"
    return f"executor.ranks=spread had no effect: {why}."


SPACE: dict[str, Wording] = {
    "baseline_without_effect": _without_effect,
    "value_without_effect": _without_effect,
    "precision_not_native": "{device} does not compute {precisions:list} natively: tried as given.",
    "dataset_not_sharded": _dataset_not_sharded,
    "ddp_settings_without_ddp": (
        "{settings:list} had no effect: no strategy 'ddp' with several ranks lies in the space."
    ),
    "trials_stay_on_named_device": (
        "{device} was named, so trials stayed on it; list world_size to have further devices tried."
    ),
    "unlike_devices": (
        "The devices differ ({devices:list}): a group of them trains as fast as the slowest one, and fits only what "
        "the smallest one holds."
    ),
    "unused_parameters_not_searched": (
        "One step has left parameters without a gradient: without ddp.find_unused_parameters=True only a static graph "
        "runs under strategy 'ddp'. The choices given were kept."
    ),
    "hooks_change_gradients": (
        "ddp.comm_hook {hooks:list} changes the gradients on their way, which the precision guard does not compare: "
        "compare the validation metric once."
    ),
    "fp16_hook_overflows": (
        "ddp.comm_hook fp16 makes gradients above 65,504 infinite before they are averaged, and those below 6e-8 zero; "
        "in {precisions:list} no GradScaler makes up for that."
    ),
    "spread_without_effect": _spread_without_effect,
    "world_size_capped": (
        "world_size stayed within {most} of the {devices} devices of {hosts} hosts: with more, a rank would have no "
        "sample of the largest global batch that is tried; list world_size to have more tried."
    ),
    "lr_unchanged": "The learning rate is left as it is (lr_rule: none).",
    "lr_rule_unknown": ("No scaling rule is known for {optimizer}; the square root, the more careful one, was taken."),
    "lr_warm_up": (
        "Raise the learning rate from the old to the new value over the first {epochs} epochs (gradual warm-up, Goyal "
        "et al. 2017), and compare the validation metric once."
    ),
    "betas_unchanged": (
        "betas ({betas:list}) can't follow a batch {batch_ratio:g} times as large (k * (1 - beta) must be below 1): "
        "leave them."
    ),
}
"""By code."""
