"""docs/scaling.md holds what benchmarks/scaling.py has written down, and the law there is the one that is told."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import scaling_cluster as cluster
from benchmarks.cases import scaling_model as law
from benchmarks.tables import scaling as tables

ROOT = Path(__file__).parents[2]

DOCUMENT = (ROOT / "docs" / "scaling.md").read_text()
RESULTS = [
    path
    for path in (ROOT / "benchmarks" / "results").glob("scaling-*.json")
    if "quick" not in path.name
]
NOT_RUN = "TODO-RUN"
GRADIENT_BYTES = 1.4e9
BACKWARD_S = 0.2
BUCKETS_MIB = (1.0, None, 100.0, 400.0)


def setting(micro: int = 64, bucket_mib: float | None = None, *, is_halved: bool = False) -> Any:
    return law.Setting(
        micro=micro,
        steps=64 // micro,
        precision="bfloat16",
        workers=16,
        bucket_mib=bucket_mib,
        is_halved=is_halved,
    )


def steps_on(ranks: int) -> list[Any]:
    """Steps of every exchange with a small and a large batch, without noise."""
    return [
        law.Seen(setting=one, step_s=cluster.step_s(one, ranks, cluster.FLAT))
        for micro, bucket, is_halved in product((8, 64), BUCKETS_MIB, (False, True))
        for one in [setting(micro, bucket, is_halved=is_halved)]
    ]


@pytest.fixture(scope="module")
def fitted() -> Any:
    return law.fit_law(steps_on(8), steps_on(16), gradient_bytes=GRADIENT_BYTES)


def test_the_documents_tables_are_those_of_the_last_run() -> None:
    found = tables.named_tables(DOCUMENT)
    assert sorted(found) == ["assumptions", "curve", "errors", "network", "plans"]
    if not RESULTS:
        assert set(found.values()) == {f"{NOT_RUN}\n"}
        return
    runs = [json.loads(path.read_text())["results"] for path in RESULTS]
    assert any(tables.filled(DOCUMENT, tables.scaling_tables(run)) == DOCUMENT for run in runs)


def test_the_document_says_that_it_is_a_simulation() -> None:
    assert "no measurement" in DOCUMENT.partition("##")[0]


def test_the_documents_law_is_the_models() -> None:
    told = [
        line.strip() for line in DOCUMENT.splitlines() if line.startswith("    ") and "(n)" in line
    ]
    assert told
    assert all(line in (law.__doc__ or "") for line in told)


def test_filling_in_a_document_twice_changes_nothing() -> None:
    document = f"before\n<!-- table: plans -->\n{NOT_RUN}\n<!-- end -->\nafter"
    once = tables.filled(document, {"plans": "| a |"})
    assert once == document.replace(NOT_RUN, "| a |")
    assert tables.filled(once, {"plans": "| a |"}) == once


def test_one_rank_exchanges_nothing() -> None:
    exchange = law.Exchange(sent_bytes=GRADIENT_BYTES, buckets=10, backward_s=BACKWARD_S)
    assert law.exposed_s(exchange, 1, cluster.FLAT.network) == 0


@pytest.mark.parametrize(("ranks", "buckets"), [(16, 1), (16, 7), (64, 50), (1024, 7), (1024, 500)])
def test_equal_buckets_expose_what_sending_one_by_one_leaves(ranks: int, buckets: int) -> None:
    bucket_mib = GRADIENT_BYTES / buckets / 2**20
    exchange = law.Exchange(sent_bytes=GRADIENT_BYTES, buckets=buckets, backward_s=BACKWARD_S)
    one_by_one_s = cluster.exposed_one_by_one_s(
        setting(bucket_mib=bucket_mib),
        ranks,
        cluster.FLAT.network,
        cluster.JOB,
        backward_s=BACKWARD_S,
    )
    assert law.exposed_s(exchange, ranks, cluster.FLAT.network) == pytest.approx(
        one_by_one_s, rel=1e-6
    )


@pytest.mark.parametrize("bucket_mib", BUCKETS_MIB)
def test_buckets_hold_all_gradients(bucket_mib: float | None) -> None:
    sizes = cluster.bucket_sizes(setting(bucket_mib=bucket_mib), GRADIENT_BYTES)
    assert sum(sizes) == pytest.approx(GRADIENT_BYTES)
    assert max(sizes) <= (bucket_mib or law.DEFAULT_BUCKET_MIB) * 2**20


def test_two_sizes_tell_the_network(fitted: Any) -> None:
    true = cluster.FLAT.network
    assert fitted.network.bytes_per_s == pytest.approx(true.bytes_per_s, rel=0.15)
    assert fitted.network.latency_s == pytest.approx(true.latency_s, rel=0.15)


@pytest.mark.parametrize("ranks", [64, 1024])
@pytest.mark.parametrize("bucket_mib", BUCKETS_MIB)
def test_the_law_foretells_full_scale_where_the_network_stays_the_same(
    fitted: Any, ranks: int, bucket_mib: float | None
) -> None:
    true_s = cluster.step_s(setting(bucket_mib=bucket_mib), ranks, cluster.FLAT)
    assert fitted.step_s(setting(bucket_mib=bucket_mib), ranks) == pytest.approx(true_s, rel=0.1)


def test_the_law_foretells_too_short_a_step_beyond_a_slower_network(fitted: Any) -> None:
    assert fitted.step_s(setting(), 1024) < 0.8 * cluster.step_s(setting(), 1024, cluster.KINKED)


def test_steps_at_full_scale_correct_the_network(fitted: Any) -> None:
    seen = [
        law.Seen(setting=one, step_s=cluster.step_s(one, 1024, cluster.KINKED))
        for one in (setting(8), setting(8, 100.0), setting(64), setting(64, 1.0))
    ]
    corrected = law.with_network_of(fitted, seen, 1024)
    true_s = cluster.step_s(setting(bucket_mib=400.0), 1024, cluster.KINKED)
    assert corrected.step_s(setting(bucket_mib=400.0), 1024) == pytest.approx(true_s, rel=0.1)
