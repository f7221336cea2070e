"""What the worker has to tell the user: what disturbed a window, what was not measured, what makes a figure less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.report.wording.template import Wording

__all__ = ["WORKER"]

_STAGES = {
    "loader_rate": "the rate of the loader alone",
    "batches": "batches to train on without the loader",
    "device_rate": "the rate of the device alone",
    "communication": "what exchanging gradients takes",
    "time_breakdown": "where the time goes",
    "item_costs": "what an item costs",
    "collate_again": "collating a batch again",
    "transfer": "a batch's way from a worker",
    "pinning": "pinning a batch",
    "copy": "copying a batch",
    "pinned_copy": "copying a pinned batch",
}


def _stages(figures: Mapping[str, Any]) -> str:
    *first, last = (_STAGES.get(name, name) for name in figures["stages"])
    return f"{', '.join(first)} and {last}" if first else str(last)


WORKER: dict[str, Wording] = {
    "batch_too_large": "it might take {expected_bytes:mib}, over the limit of {limit_bytes:mib}",
    "curves_cut": "The job ended before the rest was measured.",
    "extra_failed": lambda figures: (
        f"{_STAGES.get(figures['stage'], figures['stage'])} could not be measured ({figures['cause']})"
    ),
    "first_bucket_without_effect": "ddp.first_bucket_mb has no effect: torch {torch} has no bucket_cap_mb_list.",
    "float32_unknown": (
        "{variable}=1 is set, but NVIDIA documents only 0: the precision in which its libraries then compute float32, "
        "the reference's included, is not known; unset it to compare precisions with float32 itself."
    ),
    "largest_samples_not_batched": "The largest samples can't be put into one batch ({cause}).",
    "launches_wait": "{variable} is set: each launch waits for its kernel, which no training should; unset it.",
    "no_time_for_extras": lambda figures: f"the deadline was too near to measure {_stages(figures)}",
    "no_time_left": "no time was left",
    "operators_not_counted": "Operators were not counted: {cause}.",
    "operators_not_counted_compiled": "Operators were not counted: the model is compiled.",
    "operators_not_counted_no_time": "Operators were not counted: no time was left.",
    "process_ended_at_point": "the process ended while it was measured",
    "queue_too_large": "batches held ready might take {expected_bytes:mib} of the {free_bytes:mib} that are free",
    "rank_gone_before_extras": lambda figures: f"another rank was gone before {_stages(figures)} could be measured",
    "tf32_forbidden": "{variable}=0 is set: NVIDIA's libraries computed tf32 in float32; unset it to use TF32.",
    "torch_without_cuda": (
        "There is an {gpu} GPU, but torch {torch} is built without CUDA, so auto is the CPU: install a torch with CUDA "
        "to train on the GPU."
    ),
    "trial_ended_before_extras": lambda figures: f"the trial ended before it had measured {_stages(figures)}",
}
