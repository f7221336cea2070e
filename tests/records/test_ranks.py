"""Ranks side by side: what the exchange of gradients adds and hides, and who holds the others up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.records.measurement import Communication, RankFigures, uneven_ranks

seconds = st.floats(0, 100, allow_nan=False)
rates = st.floats(1e-3, 1e9, allow_nan=False)


def rank(number: int, loader: float | None = None, device: float | None = None) -> RankFigures:
    return RankFigures(
        rank=number,
        device=f"cuda:{number}",
        samples_per_s=100.0,
        data_wait_fraction=0.1,
        busy_fraction=None,
        peak_memory_bytes=2**30,
        loader_ceiling=loader,
        device_ceiling=device,
    )


def talk(step_s: float, step_alone_s: float, exchange_s: float) -> Communication:
    return Communication(
        step_s=step_s, step_alone_s=step_alone_s, exchange_s=exchange_s, bytes_exchanged=2**20
    )


def test_what_the_exchange_adds_to_a_step_is_exposed_and_the_rest_of_it_hidden() -> None:
    exchange = talk(step_s=0.10, step_alone_s=0.08, exchange_s=0.05)
    assert exchange.exposed_s == pytest.approx(0.02)
    assert exchange.exposed_fraction == pytest.approx(0.2)
    assert exchange.hidden_fraction == pytest.approx(0.6)


def test_a_step_that_noise_has_made_shorter_with_the_exchange_hides_all_of_it() -> None:
    exchange = talk(step_s=0.079, step_alone_s=0.08, exchange_s=0.05)
    assert (exchange.exposed_s, exchange.exposed_fraction, exchange.hidden_fraction) == (
        0.0,
        0.0,
        1.0,
    )


def test_an_exchange_that_costs_more_than_itself_hides_nothing() -> None:
    assert talk(step_s=0.2, step_alone_s=0.1, exchange_s=0.05).hidden_fraction == 0.0


def test_without_an_exchange_nothing_is_hidden() -> None:
    assert talk(step_s=0.1, step_alone_s=0.1, exchange_s=0.0).hidden_fraction == 0.0


@given(seconds, seconds, seconds)
def test_shares_of_the_exchange_stay_within_the_whole(
    step_s: float, step_alone_s: float, exchange_s: float
) -> None:
    exchange = talk(step_s, step_alone_s, exchange_s)
    assert 0 <= exchange.exposed_fraction <= 1
    assert 0 <= exchange.hidden_fraction <= 1


def test_a_rank_with_a_slow_loader_is_named_with_its_share_of_the_others() -> None:
    found = uneven_ranks([rank(0, loader=100.0), rank(1, loader=60.0), rank(2, loader=100.0)])
    assert found == {1: ("loader", 0.6)}


def test_of_two_ranks_the_slower_device_is_named_alone() -> None:
    found = uneven_ranks([rank(0, device=50.0), rank(1, device=100.0)])
    assert found == {0: ("device", 0.5)}


def test_a_rank_is_compared_to_the_others_and_not_to_a_median_that_holds_itself() -> None:
    assert uneven_ranks([rank(0, device=89.0), rank(1, device=100.0)]).keys() == {0}
    assert uneven_ranks([rank(0, device=91.0), rank(1, device=100.0)]) == {}


def test_a_rank_is_named_once_though_both_its_sides_are_slow() -> None:
    found = uneven_ranks([rank(0, loader=10.0, device=10.0), rank(1, loader=100.0, device=100.0)])
    assert found == {0: ("loader", 0.1)}


def test_what_was_not_measured_names_nobody() -> None:
    assert uneven_ranks([]) == {}
    assert uneven_ranks([rank(0), rank(1)]) == {}
    assert uneven_ranks([rank(0, device=10.0), rank(1)]) == {}


@given(st.lists(rates, min_size=1, max_size=8))
def test_the_fastest_rank_is_never_uneven(devices: list[float]) -> None:
    found = uneven_ranks([rank(number, device=rate) for number, rate in enumerate(devices)])
    assert devices.index(max(devices)) not in found


@given(st.lists(rates, min_size=2, max_size=8))
def test_who_is_uneven_does_not_depend_on_the_order(devices: list[float]) -> None:
    ranks = [rank(number, device=rate) for number, rate in enumerate(devices)]
    assert uneven_ranks(ranks) == uneven_ranks(ranks[::-1])


def test_ranks_and_their_exchange_are_written_and_read_back() -> None:
    exchange, figures = talk(0.1, 0.08, 0.05), rank(1, loader=10.0)
    assert Communication.model_validate_json(exchange.model_dump_json()) == exchange
    assert RankFigures.model_validate_json(figures.model_dump_json()) == figures
