"""The buckets in which gradients travel, as DDP joins them; measuring them is seen in tests/launch/test_groups.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune.settings.ddp_config import DdpConfig
from autotune.settings.training_config import TrainingConfig
from autotune.worker.after_window.communication import _bucket_bytes
from autotune.worker.measure.step import Step, make_trainer
from autotune.worker.setup.device import open_device

MIB = 2**20


@pytest.mark.parametrize(
    ("ddp", "expected_mib"),
    [
        pytest.param(None, [4, 28, 8], id="torch's own: a small first one"),
        pytest.param(DdpConfig(bucket_cap_mb=8), [8] * 5, id="a size that was given holds for the first too"),
        pytest.param(DdpConfig(comm_hook="fp16"), [2, 14, 4], id="halved on their way"),
        pytest.param(DdpConfig(first_bucket_mb=20, bucket_cap_mb=8), [20, 8, 8, 4], id="a first one of its own"),
    ],
)
def test_gradients_fill_buckets_from_the_last_layer_on(ddp: DdpConfig | None, expected_mib: list[int]) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(10)])
    config = TrainingConfig(strategy="ddp", world_size=2, ddp=ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(model, optimizer, Step(lambda *_: torch.zeros(()), "none"), config, open_device("cpu"))
    assert _bucket_bytes(trainer) == [size * MIB for size in expected_mib]
