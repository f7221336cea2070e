"""What accelerate has prepared, taken apart: the model without its wrappers, and what the Accelerator is set to.

Source: accelerate 1.15, accelerator.py (prepare_model) and utils/other.py (extract_model_from_parallel).
"""

from __future__ import annotations

from typing import Any

from autotune.errors import ConfigError
from autotune.trainers.taken import Taken, note_beside
from autotune.trainers.unwrapping import plain_model

__all__ = ["take_prepared"]

_DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


def take_prepared(accelerator: Any, model: Any, dataset: Any, optimizer: Any) -> Taken:
    """What trials train of a model, a loader and an optimizer, each prepared or not.

    Raises:
        ConfigError: the Accelerator stands for several processes, or for an engine or a precision that can't be had.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or kind in {"DEEPSPEED", "FSDP", "MEGATRON_LM"}:
        what = f"of {accelerator.num_processes} processes" if accelerator.num_processes > 1 else f"with {kind}"
        raise ConfigError(
            f"accelerator: an Accelerator {what} can't be taken apart; search with autotune run -- and your command"
        )
    if accelerator.mixed_precision not in _DTYPES:
        raise ConfigError(
            f"accelerator: mixed_precision must be one of {', '.join(_DTYPES)}, but is {accelerator.mixed_precision}"
        )
    plain = plain_model(model)
    backend = getattr(getattr(accelerator.state, "dynamo_plugin", None), "backend", None)
    trackers = [type(tracker).__name__ for tracker in accelerator.trackers]
    return Taken(
        name=type(plain).__name__,
        model=plain,
        dataset=dataset,
        optimizer=optimizer,
        step=None,
        baseline={
            "amp_dtype": _DTYPES[accelerator.mixed_precision],
            "grad_accum_steps": accelerator.gradient_accumulation_steps,
            "compile": str(getattr(backend, "value", "NO")).upper() not in {"NO", "NONE"},
        },
        notes=note_beside("accelerate", ["the trackers " + ", ".join(trackers)] if trackers else []),
    )
