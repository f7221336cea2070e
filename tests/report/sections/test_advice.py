"""Every bottleneck and every kind of advice has words for the figures that a diagnosis gives it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

import autotune.diagnosis
from autotune.diagnosis.remedies import FORMAT_ADVICE
from autotune.diagnosis.scaling_bottlenecks import Cause
from autotune.diagnosis.verdict import judge
from autotune.records.diagnosis import Bottleneck, Curves
from autotune.records.lengths import BucketForecast, Lengths, PackForecast
from autotune.report.sections.advice import diagnosis_in_words
from autotune.report.wording.catalogue import load_codes
from autotune.report.wording.names import BOTTLENECKS, CAUSES
from autotune.settings.training_config import TrainingConfig
from tests.factories import CPU, make_breakdown, make_evidence, make_loader_costs, make_point, make_roofline

LENGTHS = Lengths(
    items=500,
    mean=30.0,
    median=25.0,
    longest=90,
    batch_samples=32,
    buckets=BucketForecast(pool_batches=5, random_padding=0.5, bucket_padding=0.3),
    packed=PackForecast(row_tokens=90, samples_per_row=2.9, padding=0.02, device_time=0.5, device_time_ci=(0.4, 0.6)),
)
GIVES_ADVICE = {"advise", "_advise", "_expecting", "_promised", "_saving", "_up_to_the_device"}
WAITING = make_breakdown(wait=0.7)
COPYING = make_breakdown(copy=0.5)


def test_every_bottleneck_has_its_name_and_its_evidence() -> None:
    assert list(BOTTLENECKS) == list(get_args(Bottleneck))
    assert {f"{code}_evidence" for code in BOTTLENECKS} <= load_codes("diagnosis")
    assert list(CAUSES) == list(get_args(Cause))
    assert {f"{code}_evidence" for code in CAUSES} <= load_codes("scaling")


def advised_kinds() -> set[str]:
    """Every kind of advice that the room gives, read from its calls; that on formats stands in a table."""
    calls = [
        node
        for path in Path(autotune.diagnosis.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GIVES_ADVICE
    ]
    texts = [next((one.value for one in call.args if isinstance(one, ast.Constant)), None) for call in calls]
    return {text for text in texts if isinstance(text, str)} | {*FORMAT_ADVICE.values()}


def test_every_kind_of_advice_has_its_text_and_its_basis_and_no_other_has() -> None:
    worded = {code for code in load_codes("advice") | load_codes("scaling") if not code.endswith("_evidence")}
    kinds = advised_kinds()
    assert {*kinds, *(f"{kind}_basis" for kind in kinds)} == worded


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
        {"breakdown": WAITING, "loader_costs": make_loader_costs(slow_tail_fraction=0.5), "device_ceiling": 9000.0},
        {"breakdown": make_breakdown(wait=0.5, restart=0.5), "workers": 2},
        {"curves": Curves(roofline=make_roofline(flops=0.25e12 * 0.032))},
        {"lengths": LENGTHS},
        {"curves": Curves(roofline=make_roofline(moved_bytes=2e9), loader=(make_point(9e9, num_workers=4),))},
        {},
    ],
)
def test_a_diagnosis_is_put_into_words_without_gaps(evidence: dict[str, Any]) -> None:
    given = dict(evidence)
    workers, kind = given.pop("workers", 0), given.pop("device_kind", "cuda")
    settings = {"amp_dtype": given.pop("amp", "float32"), "pin_memory": given.pop("is_pinned", False)}
    config = TrainingConfig(num_workers=workers, persistent_workers=workers > 0, **settings)
    environment = CPU.model_copy(update={"device_kind": kind})
    found = diagnosis_in_words(judge("case", make_evidence(config=config, environment=environment, **given)))
    assert found.advice
    texts = [text for piece in found.advice for text in (piece.text, piece.basis)]
    texts += [finding.evidence for finding in found.findings]
    assert all(texts)
    assert not [text for text in texts if "None" in text]
