"""What stays from one job of a shared process to the next."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.protocol.disk import TrialFolder
from autotune.protocol.messages import PrecisionJob
from autotune.protocol.payload import write_payload
from autotune.worker import rank
from autotune.worker.device import Device
from autotune.worker.failures import HangDump
from autotune.worker.jobs.precision import References
from autotune.worker.place import Place
from tests.factories import make_process


class WithOwnMemory(Device):
    """The CPU, taken for an accelerator."""

    @property
    def has_own_memory(self) -> bool:
        return True


@pytest.mark.parametrize(("kind_of", "keeps"), [(Device, False), (WithOwnMemory, True)])
def test_precision_checks_share_what_takes_no_memory_of_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind_of: type[Device], keeps: bool
) -> None:
    payload = tmp_path / "payload"
    write_payload(
        Workload(model=nn.Linear(2, 2), dataset=TensorDataset(torch.zeros(4, 2))), payload
    )
    seen: list[References | None] = []

    def compare(*arguments: object) -> None:
        seen.append(arguments[-1])  # type: ignore[arg-type] # References or None

    device = kind_of(torch.device("cpu"), "cpu")
    monkeypatch.setattr(rank, "open_device", lambda *_, **__: device)
    monkeypatch.setattr(rank, "compare_to_float32", compare)
    process = make_process(tmp_path)
    config = TrainingConfig(amp_dtype="bfloat16")
    job = PrecisionJob(process=process, payload=payload, config=config)
    worker = rank._Worker(shared_from_s=0.0)
    for _ in range(2):
        place = Place(TrialFolder(tmp_path), 0, 0, is_shared=True)
        dump = HangDump(file=sys.stderr, ends_at=0.0)
        report = worker.do(job, place, dump, perf_counter())
        assert worker.is_sound_after(report)
    first, second = seen
    assert first is second
    assert (first is not None) is keeps
