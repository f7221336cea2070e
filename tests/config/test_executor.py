"""The executor as users write it, and how ranks lie on hosts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.config.plan import Executor, places

_FEW = st.integers(1, 12)


def refusal(value: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Executor.model_validate(value)
    (problem,) = caught.value.errors()
    return str(problem["msg"])


def test_text_is_the_kind() -> None:
    assert Executor.model_validate("ray") == Executor(kind="ray")


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "head.cluster-1:1", "[fe80::1]:65535"]
)
def test_address(address: str) -> None:
    assert Executor(kind="ray", address=address).address == address


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1", "host:", "host:0", "host:65536", "ray://host:1", "a:1\n", "::1:1"]
)
def test_bad_address(address: str) -> None:
    assert repr(address) in refusal({"kind": "ray", "address": address})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"address": "10.0.0.1:6379"}, "address='10.0.0.1:6379'"),
        ({"kind": "local", "ranks": "spread"}, "ranks='spread'"),
        ({"address": "auto", "ranks": "spread"}, "address='auto' and ranks='spread'"),
    ],
)
def test_local_refuses_ray_settings(settings: dict[str, Any], named: str) -> None:
    assert f"kind='local' with {named};" in refusal(settings)


def test_round_trip() -> None:
    assert Executor(kind="local", ranks="pack") == Executor()
    for executor in (Executor(), Executor(kind="ray", address="auto", ranks="spread")):
        assert Executor.model_validate(executor.model_dump()) == executor
        assert Executor.model_validate_json(executor.model_dump_json()) == executor


@given(st.integers(1, 144), _FEW, _FEW, st.booleans())
def test_places_properties(ranks: int, hosts: int, per_host: int, spread: bool) -> None:
    if ranks > hosts * per_host:
        with pytest.raises(
            ValueError, match=rf"\(ranks={ranks}, hosts={hosts}, per_host={per_host}\)"
        ):
            places(ranks, hosts=hosts, per_host=per_host, spread=spread)
        return
    laid_out = places(ranks, hosts=hosts, per_host=per_host, spread=spread)
    assert sum(laid_out) == ranks
    assert 1 <= min(laid_out) <= max(laid_out) <= min(per_host, min(laid_out) + 1)
    assert list(laid_out) == sorted(laid_out, reverse=True)
    if spread:
        assert len(laid_out) == min(ranks, hosts)
    else:
        assert (len(laid_out) - 1) * per_host < ranks


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_places_refuses_zero(numbers: tuple[int, int, int]) -> None:
    ranks, hosts, per_host = numbers
    with pytest.raises(ValueError, match=rf"ranks={ranks}, hosts={hosts}, per_host={per_host}"):
        places(ranks, hosts=hosts, per_host=per_host, spread=False)
