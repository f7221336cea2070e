"""The buckets in which gradients travel, as DDP joins them; measuring them is seen in tests/launch/test_groups.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
from torch import distributed, nn

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.worker.device import open_device
from autotune.worker.extras.extra_steps import _bucket_bytes, _exchange_s
from autotune.worker.group import Group
from autotune.worker.step import Step, Trainer, make_trainer

MIB = 2**20


@pytest.mark.parametrize(
    ("ddp", "expected_mib"),
    [
        (None, [4, 28, 8]),  # torch's own: a small first one
        (DdpConfig(bucket_cap_mb=8), [8] * 5),  # a size that was given holds for the first too
        (DdpConfig(comm_hook="fp16"), [2, 14, 4]),  # halved on their way
        (DdpConfig(first_bucket_mb=20, bucket_cap_mb=8), [20, 8, 8, 4]),  # a first one of its own
    ],
)
def test_gradients_fill_buckets_from_the_last_layer_on(
    ddp: DdpConfig | None, expected_mib: list[int]
) -> None:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(10)])
    assert _bucket_bytes(trainer_of(model, ddp)) == [size * MIB for size in expected_mib]


def trainer_of(model: nn.Module, ddp: DdpConfig | None = None) -> Trainer:
    config = TrainingConfig(strategy="ddp", world_size=2, ddp=ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_trainer(
        model, optimizer, Step(lambda *_: torch.zeros(()), "none"), config, open_device("cpu")
    )


@dataclass(frozen=True)
class Meeting(Group):
    """One of two ranks that are threads."""

    told: dict[int, float] = field(default_factory=dict)
    """What each has answered; one dictionary for both, for one question."""
    both: Barrier = field(default_factory=lambda: Barrier(2))

    def most(self, value: float) -> float:
        """Wait for the other's answer; the larger one."""
        self.told[self.rank] = value
        self.both.wait(timeout=60)
        return max(self.told.values())


def test_a_rank_without_memory_for_the_gradients_leaves_no_other_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = list[torch.Tensor]()
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, **_: begun.append(tensor))
    trainer, sizes = trainer_of(nn.Linear(1, 1)), {0: [4], 1: [4, 2**60]}
    first = Meeting(0, 2)
    groups = [first, Meeting(1, 2, told=first.told, both=first.both)]

    def exchange(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            _exchange_s(sizes[rank], trainer, groups[rank], 0.1)
        return str(raised.value.__cause__)

    with ThreadPoolExecutor(2) as ranks:
        ample, short = ranks.map(exchange, range(2))
    assert not begun
    assert "allocate memory" in short
    assert ample == "None"
