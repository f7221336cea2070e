"""Bottlenecks and advice in words, for the figures that a diagnosis gives them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import judge
from autotune.diagnosis.scaling import Cause
from autotune.messages.diagnosis import BOTTLENECKS
from autotune.records.measurement import BucketForecast, Lengths, PackForecast
from autotune.records.result import Bottleneck, Curves
from autotune.report.words import CAUSES
from tests.factories import (
    CPU,
    make_breakdown,
    make_evidence,
    make_loader_costs,
    make_point,
    make_roofline,
)

LENGTHS = Lengths(
    items=500,
    mean=30.0,
    median=25.0,
    longest=90,
    buckets=BucketForecast(pool_batches=5, random_padding=0.5, bucket_padding=0.3),
    packed=PackForecast(
        row_tokens=90, samples_per_row=2.9, padding=0.02, device_time=0.5, device_time_ci=(0.4, 0.6)
    ),
)
WAITING = make_breakdown(wait=0.7)
COPYING = make_breakdown(copy=0.5)


def test_every_bottleneck_has_its_name() -> None:
    assert list(BOTTLENECKS) == list(get_args(Bottleneck))
    assert list(CAUSES) == list(get_args(Cause))


@pytest.mark.parametrize(
    "evidence",
    [
        {"breakdown": COPYING},
        {"breakdown": COPYING, "is_pinned": True},
        {"breakdown": COPYING, "is_pinned": True, "copy_ceiling": 2000.0},
        {
            "breakdown": COPYING,
            "curves": Curves(copy=(make_point(1500.0), make_point(4500.0, pin_memory=True))),
        },
        {"breakdown": make_breakdown(idle=0.5), "loader_ceiling": 1000.0},
        {"breakdown": make_breakdown(synchronise=0.5), "loader_ceiling": 1500.0},
        {
            "breakdown": WAITING,
            "loader_costs": None,
            "rate": 450.0,
            "device_ceiling": 1000.0,
            "loader_ceiling": 500.0,
            "curves": Curves(loader=(make_point(900.0, num_workers=4),)),
        },
        {
            "breakdown": WAITING,
            "rate": 240.0,
            "loader_ceiling": 250.0,
            "device_ceiling": 10_000.0,
            "device_kind": "cpu",
        },
        {
            "breakdown": WAITING,
            "loader_costs": make_loader_costs(20e-3),
            "rate": 55.0,
            "loader_ceiling": 60.0,
            "device_ceiling": None,
        },
        {
            "breakdown": WAITING,
            "loader_costs": make_loader_costs(item_cpu_s=1e-4, disk_bytes_per_item=2048.0),
            "device_ceiling": 9000.0,
        },
        {
            "breakdown": WAITING,
            "loader_costs": make_loader_costs(item_cpu_s=4e-3),
            "device_ceiling": 9000.0,
            "workers": 4,
        },
        {
            "breakdown": make_breakdown(wait=0.2),
            "loader_costs": make_loader_costs(item_cpu_s=2e-3),
            "device_ceiling": 4000.0,
            "workers": 4,
            "device_kind": "cpu",
        },
        {
            "breakdown": WAITING,
            "loader_costs": make_loader_costs(slow_tail_fraction=0.5),
            "device_ceiling": 9000.0,
        },
        {"breakdown": make_breakdown(wait=0.5, restart=0.5), "workers": 2},
        {"curves": Curves(roofline=make_roofline(flops=0.25e12 * 0.032))},
        {"lengths": LENGTHS},
        {
            "curves": Curves(
                roofline=make_roofline(moved_bytes=2e9), loader=(make_point(9e9, num_workers=4),)
            )
        },
        {},
    ],
)
def test_a_diagnosis_is_put_into_words_without_gaps(evidence: dict[str, Any]) -> None:
    given = dict(evidence)
    workers, kind = given.pop("workers", 0), given.pop("device_kind", "cuda")
    settings = {
        "amp_dtype": given.pop("amp", "float32"),
        "pin_memory": given.pop("is_pinned", False),
    }
    config = TrainingConfig(num_workers=workers, persistent_workers=workers > 0, **settings)
    environment = CPU.model_copy(update={"device_kind": kind})
    found = judge("case", make_evidence(config=config, environment=environment, **given))
    assert found.advice
    texts = [text for piece in found.advice for text in (piece.text, piece.basis)]
    texts += [finding.evidence for finding in found.findings]
    assert all(texts)
    assert not [text for text in texts if "None" in text]
