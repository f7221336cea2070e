"""Loaders that might fill the memory with batches held ready are refused, and batches that are not sure to fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config.training_config import TrainingConfig
from autotune.models.memory import Peak
from autotune.protocol.messages import CurvesJob
from autotune.worker.device import Device
from autotune.worker.jobs import curves
from autotune.worker.jobs.curves import refusal_of_batch, refusal_of_queue
from tests.factories import make_process

MIB = 2**20
BATCH = (torch.zeros(65, 2**10, dtype=torch.uint8), torch.zeros(2**14, dtype=torch.uint8))
"""65 and 16 KiB: four of them take 324 KiB in shared memory; page-locked, by powers of two, 576 KiB."""


@pytest.mark.parametrize(
    ("kind", "pins", "ram_bytes", "shared_bytes", "is_refused"),
    [
        ("cuda", True, MIB, 8 * MIB, True),
        ("xpu", True, MIB, 8 * MIB, True),
        ("cuda", True, 2 * MIB, 8 * MIB, False),
        ("cuda", True, 2 * MIB, MIB, False),  # what is page-locked lies in no shared memory
        ("cuda", False, MIB, 8 * MIB, False),
        ("cpu", True, MIB, 8 * MIB, False),  # torch pins nothing without an accelerator
        ("cpu", False, 8 * MIB, MIB // 2, True),
    ],
)
def test_batches_that_are_pinned_exist_twice_and_take_a_power_of_two(
    kind: Any,
    pins: bool,
    ram_bytes: int,
    shared_bytes: int,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    own = TrainingConfig(micro_batch_size=8)
    job = CurvesJob(
        process=make_process(tmp_path, device=kind),
        payload=tmp_path,
        config=own,
    )
    config = own.model_copy(update={"num_workers": 2, "prefetch_factor": 2, "pin_memory": pins})
    device = Device(torch.device("cpu"), kind)
    monkeypatch.setattr(curves, "_free_ram_bytes", lambda *_: ram_bytes)
    monkeypatch.setattr(curves, "_free_shared_bytes", lambda: shared_bytes)
    refusal = refusal_of_queue([BATCH], config, job, device)
    assert (None if refusal is None else refusal.code) == (
        "queue_too_large" if is_refused else None
    )


def test_batches_grow_with_their_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [curves._batch_sizes(BATCH, growth) for growth in (0.5, 1, 4)] == [
        (40 * 1024 + 512, 72 * 1024),
        (81 * 1024, 144 * 1024),
        (324 * 1024, 576 * 1024),
    ]


@pytest.mark.parametrize(
    ("sizes", "batch", "limit_mib", "is_refused"),
    [
        ((8,), 16, 400, False),  # it takes twice as much at the most
        ((8,), 32, 400, True),
        ((8, 16, 32), 256, 600, False),
        ((8, 16, 32), 256, 420, True),
        ((8, 16, 32), 256, None, False),
    ],
)
def test_a_batch_is_tried_only_where_the_peaks_so_far_make_it_sure_to_fit(
    sizes: tuple[int, ...], batch: int, limit_mib: int | None, is_refused: bool
) -> None:
    """150 MiB, and one more a sample."""
    peaks = [Peak(TrainingConfig(micro_batch_size=size), (150 + size) * MIB) for size in sizes]
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    config, device = TrainingConfig(micro_batch_size=batch), Device(torch.device("cpu"), "cpu")
    refusal = refusal_of_batch(peaks, config, limit_bytes, device)
    assert (None if refusal is None else refusal.code) == (
        "batch_too_large" if is_refused else None
    )
