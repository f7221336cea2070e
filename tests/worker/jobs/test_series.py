"""What the jobs of a series are handed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.protocol.disk import TrialFolder, write_model
from autotune.protocol.messages import PrecisionJob, RankReport, SeriesJob, WorkloadJob
from autotune.protocol.payload import write_payload
from autotune.records.trial import TrialResult
from autotune.worker.device import Device
from autotune.worker.jobs.precision import References
from autotune.worker.place import Place
from autotune.worker.rank import _Parts, _Series
from tests.factories import make_process


class WithOwnMemory(Device):
    """The CPU, taken for an accelerator."""

    @property
    def has_own_memory(self) -> bool:
        return True


@pytest.mark.parametrize(("kind_of", "keeps"), [(Device, False), (WithOwnMemory, True)])
def test_precision_checks_share_what_they_compare_to_where_it_takes_no_memory_of_the_trials(
    tmp_path: Path, kind_of: type[Device], keeps: bool
) -> None:
    write_payload(
        Workload(model=nn.Linear(2, 2), dataset=TensorDataset(torch.zeros(4, 2))),
        tmp_path / "payload",
    )
    process, device = make_process(tmp_path), kind_of(torch.device("cpu"), "cpu")
    seen: list[References | None] = []

    def do(
        _job: WorkloadJob, _workload: object, _device: object, place: Place, *_: object
    ) -> RankReport:
        seen.append(place.references)
        return RankReport(result=TrialResult(outcome="ok"))

    series = _Series(
        device, {}, do, _Parts(SeriesJob(process=process, payload=tmp_path / "payload"), device)
    )
    config = TrainingConfig(amp_dtype="bfloat16")
    write_model(
        tmp_path / "job.json",
        PrecisionJob(process=process, payload=tmp_path / "payload", config=config),
    )
    for _ in range(2):
        assert series.do_one(TrialFolder(tmp_path))
    first, second = seen
    assert first is second
    assert (first is not None) is keeps
