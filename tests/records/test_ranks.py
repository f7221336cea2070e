"""Ranks side by side: what the exchange of gradients adds and hides, and who holds the others up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records.measurement import Communication, RankFigures, uneven_ranks
from tests.factories import make_rank

seconds = st.floats(0, 100, allow_nan=False)
rates = st.floats(1e-3, 1e9, allow_nan=False)


def rank(number: int, loader: float | None = None, device: float | None = None) -> RankFigures:
    return make_rank(number, loader_ceiling=loader, device_ceiling=device)


def exchange_of(step_s: float, step_alone_s: float, exchange_s: float) -> Communication:
    return Communication(
        step_s=step_s, step_alone_s=step_alone_s, exchange_s=exchange_s, bytes_exchanged=2**20
    )


@pytest.mark.parametrize(
    ("exchange", "exposed_s", "exposed", "hidden"),
    [
        (exchange_of(0.10, 0.08, 0.05), 0.02, 0.2, 0.6),
        (exchange_of(0.079, 0.08, 0.05), 0, 0, 1),  # a step that noise made shorter
        (exchange_of(0.2, 0.1, 0.05), 0.1, 0.5, 0),  # more than the exchange itself
        (exchange_of(0.1, 0.1, 0.0), 0, 0, 0),  # without an exchange
    ],
)
def test_what_the_exchange_adds_is_exposed_and_the_rest_hidden(
    exchange: Communication, exposed_s: float, exposed: float, hidden: float
) -> None:
    assert exchange.exposed_s == pytest.approx(exposed_s)
    assert exchange.exposed_fraction == pytest.approx(exposed)
    assert exchange.hidden_fraction == pytest.approx(hidden)


@given(seconds, seconds, seconds)
def test_shares_of_the_exchange_stay_within_the_whole(
    step_s: float, step_alone_s: float, exchange_s: float
) -> None:
    exchange = exchange_of(step_s, step_alone_s, exchange_s)
    assert 0 <= exchange.exposed_fraction <= 1
    assert 0 <= exchange.hidden_fraction <= 1


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([rank(0, 100.0), rank(1, 60.0), rank(2, 100.0)], {1: ("loader", 0.6)}),
        ([rank(0, device=50.0), rank(1, device=100.0)], {0: ("device", 0.5)}),
        ([rank(0, device=89.0), rank(1, device=100.0)], {0: ("device", 0.89)}),
        ([rank(0, device=91.0), rank(1, device=100.0)], {}),
        ([rank(0, 10.0, 10.0), rank(1, 100.0, 100.0)], {0: ("loader", 0.1)}),  # named once
        ([], {}),
        ([rank(0), rank(1)], {}),
        ([rank(0, device=10.0), rank(1)], {}),
    ],
)
def test_a_rank_far_below_the_others_is_uneven(ranks: list[RankFigures], found: Any) -> None:
    assert uneven_ranks(ranks) == found


@given(st.lists(rates, min_size=1, max_size=8))
def test_the_fastest_rank_is_never_uneven(devices: list[float]) -> None:
    found = uneven_ranks([rank(number, device=rate) for number, rate in enumerate(devices)])
    assert devices.index(max(devices)) not in found


@given(st.lists(rates, min_size=2, max_size=8))
def test_who_is_uneven_does_not_depend_on_the_order(devices: list[float]) -> None:
    ranks = [rank(number, device=rate) for number, rate in enumerate(devices)]
    assert uneven_ranks(ranks) == uneven_ranks(ranks[::-1])
