"""What one process took on the largest samples, judged for a group of ranks; how long samples are looked at."""

from __future__ import annotations

from math import inf

import pytest

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.records.measurement import MemorySample
from autotune.records.trial import Load, StressFigures, load_of, sample_scan_s
from autotune.testing import fake_environment, fake_facts

MIB = 2**20
FACTS = fake_facts().model_copy(update={"gradient_bytes": 64 * MIB})
FIGURES = StressFigures(
    steps=10,
    seconds=12.0,
    items_seen=100,
    median_item_bytes=1024.0,
    largest_item_bytes=1024,
    memory=MemorySample(peak_bytes=500 * MIB, source="made up"),
)
VIEWS = DdpConfig(gradient_as_bucket_view=True)


def load(kind: str = "cuda", hosts: int = 1, **settings: object) -> Load:
    device = "cpu" if kind == "cpu" else f"{kind}:0"
    environment = fake_environment(device_count=4).model_copy(
        update={"device_kind": kind, "device": device, "hosts": hosts, "is_spread": hosts > 1}
    )
    return load_of(FIGURES, TrainingConfig.model_validate(settings), environment, FACTS)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_what_trains_in_one_process_takes_what_it_took(kind: str) -> None:
    alone = load(kind)
    assert (alone.peak_bytes, alone.is_more, alone.where) == (500 * MIB, False, "")


def test_ranks_with_devices_of_their_own_add_their_buckets() -> None:
    group = load(strategy="ddp", world_size=4)
    assert (group.peak_bytes, group.where) == (564 * MIB, "in one process")
    assert (group.ranks, group.bucket_bytes) == (1, 64 * MIB)
    assert not load(strategy="ddp", world_size=4, ddp=VIEWS).is_more
    replicas = load(strategy="dp", world_size=4)
    assert (replicas.peak_bytes, replicas.where) == (500 * MIB, "on one device")


def test_ranks_that_share_the_ram_add_up_on_each_host() -> None:
    group = load("cpu", strategy="ddp", world_size=2)
    assert group.peak_bytes == 2 * (500 + 64) * MIB
    assert (group.ranks, group.bucket_bytes) == (2, 64 * MIB)
    views = load("cpu", strategy="ddp", world_size=2, ddp=VIEWS)
    assert (views.peak_bytes, views.bucket_bytes, views.ranks) == (1000 * MIB, 0, 2)
    assert load("cpu", hosts=2, strategy="ddp", world_size=4).ranks == 2


def test_samples_are_looked_at_for_a_share_of_the_time_that_is_left() -> None:
    assert [sample_scan_s(left_s) for left_s in (inf, 100.0, 10.0, 0.0, -1.0)] == [
        4.0,
        4.0,
        2.0,
        0.0,
        0.0,
    ]
