"""A training step whose gain by a setting is known: real work of fixed size, and a sleep in proportion to what it took.

The work is one thread's hashing, which no setting of the space changes; the machine's noise is in it. Where the setting
that carries the gain is not on, the step sleeps until the time since the last step is `ratio` times what it had been
after the work: whatever the machine does, the rate with the setting is `ratio` times that without. Threads are no such
setting: beside another program, two of them may cost the smallest of steps a factor of five.
"""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autotune import TrainingConfig
from benchmarks.cases.cpu import Case

__all__ = ["BASELINE", "CARRIERS", "SEARCHED", "Carrier", "known_gain", "true_ratio"]

Carrier = Literal["amp_dtype", "channels_last"]
CARRIERS: tuple[Carrier, ...] = ("amp_dtype", "channels_last")
BASELINE = {"micro_batch_size": 16, "intra_op_threads": 1}
SEARCHED = {"amp_dtype": ["float32", "bfloat16"], "channels_last": [False, True]}
_WORK = bytes(
    8 << 20
)  # some 10 to 30 ms: what the settings cost by themselves is nothing beside it
_LONGEST_STEPS = (
    2.0  # of the work's time: what lies further back is no step, but a pause of the measuring
)
_SPUN_S = 3e-4  # at the end of a sleep, which may take longer than asked for by about so much
_last_end_s = 0.0


def known_gain(ratio: float, carrier: Carrier) -> Case:
    """A case in which `carrier` brings a rate `ratio` times the baseline's; with 1 nothing changes anything."""
    images = torch.zeros(4096, 3, 4, 4)
    data = TensorDataset(images, torch.zeros(len(images), dtype=torch.long))
    return Case(model=_model, dataset=data, settings=BASELINE, step=partial(_step, ratio, carrier))


def true_ratio(config: TrainingConfig, ratio: float, carrier: Carrier) -> float:
    """A configuration's rate over the baseline's."""
    is_on = config.amp_dtype == "bfloat16" if carrier == "amp_dtype" else config.channels_last
    return ratio if is_on else 1.0


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))


def _step(ratio: float, carrier: Carrier, model: nn.Module, batch: Any) -> Tensor:
    global _last_end_s  # noqa: PLW0603 - the trial's process trains once
    begun_s = time.perf_counter()
    inputs, targets = batch
    loss: Tensor = nn.functional.cross_entropy(model(inputs).float(), targets)
    hashlib.sha256(_WORK)
    now_s = time.perf_counter()
    took_s = min(now_s - _last_end_s, _LONGEST_STEPS * (now_s - begun_s))
    if not _is_on(carrier, model):
        _wait_until(now_s + (ratio - 1) * took_s)
    _last_end_s = time.perf_counter()
    return loss


def _is_on(carrier: Carrier, model: nn.Module) -> bool:
    if carrier == "amp_dtype":
        return torch.is_autocast_enabled("cpu")
    return next(model.parameters()).is_contiguous(memory_format=torch.channels_last)


def _wait_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter() - _SPUN_S
    if left_s > 0:
        time.sleep(left_s)
    while time.perf_counter() < end_s:
        pass
