"""The stress run: the winner trained for longer on the largest samples that the dataset has shown."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from autotune.core.measurement import MemorySample

__all__ = ["StressFigures"]


class StressFigures(BaseModel):
    """What a stress run has seen."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: int
    """Optimizer steps, ordinary batches and batches of the largest samples in turns."""
    seconds: float
    items_seen: int
    """Items of the dataset whose size was looked at."""
    median_item_bytes: float
    largest_item_bytes: int
    """Equal to the median where all items have one size."""
    largest_batch_bytes: int = 0
    """Tensors of the batch of the largest samples, as it was trained on."""
    remark: str = ""
    """Why no batch of the largest samples was trained on, in a sentence; "" where one was."""
    memory: MemorySample
