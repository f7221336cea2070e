"""The executor as users write it, and how ranks lie on hosts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.config.plan import Executor, ExecutorKind, Plan, Workload, places

_FEW = st.integers(1, 12)


def refusal(value: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Executor.model_validate(value)
    (problem,) = caught.value.errors()
    return str(problem["msg"])


def test_this_machine_is_the_executor_unless_another_is_asked_for() -> None:
    assert Executor() == Executor.model_validate("local") == Executor.model_validate({})
    assert (Executor().kind, Executor().address, Executor().ranks) == ("local", None, "pack")


def test_a_text_is_taken_as_the_kind() -> None:
    assert Executor.model_validate("ray") == Executor(kind="ray")


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "head.cluster-1:1", "[fe80::1]:65535"]
)
def test_a_clusters_address_is_a_host_and_a_port_or_left_to_ray(address: str) -> None:
    assert Executor(kind="ray", address=address).address == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "local",
        "10.0.0.1",
        "host:",
        "host:0",
        "host:65536",
        "ray://host:10001",
        " a:1",
        "a:1\n",
        "::1:1",
    ],
)
def test_another_address_is_refused(address: str) -> None:
    assert repr(address) in refusal({"kind": "ray", "address": address})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"address": "10.0.0.1:6379"}, "address='10.0.0.1:6379'"),
        ({"kind": "local", "ranks": "spread"}, "ranks='spread'"),
        ({"address": "auto", "ranks": "spread"}, "address='auto' and ranks='spread'"),
    ],
)
def test_what_only_a_cluster_obeys_is_refused_on_this_machine_alone(
    settings: dict[str, Any], named: str
) -> None:
    assert f"kind='local' with {named};" in refusal(settings)


def test_packing_is_what_one_machine_does_anyway() -> None:
    assert Executor(kind="local", ranks="pack") == Executor()
    for executor in (Executor(), Executor(kind="ray", address="auto", ranks="spread")):
        assert Executor.model_validate(executor.model_dump()) == executor
        assert Executor.model_validate_json(executor.model_dump_json()) == executor


@pytest.mark.parametrize("value", [3, True, ["ray"], None])
def test_what_is_neither_text_nor_mapping_is_refused(value: object) -> None:
    assert refusal(value).endswith(f" {value!r}")


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "rey"},
        {"kind": "ray", "ranks": "even"},
        {"hosts": 3},
        {"kind": "ray", "address": 6379},
    ],
)
def test_unknown_settings_and_values_are_refused(settings: dict[str, Any]) -> None:
    assert refusal(settings)


def test_a_device_by_its_number_means_nothing_on_several_hosts() -> None:
    def plan(device: str, kind: ExecutorKind) -> Plan:
        return Plan(
            name="net",
            workload=Workload(model=None, dataset=None),
            device=device,
            executor=Executor(kind=kind),
        )

    assert plan("cuda:1", "local").device == "cuda:1"
    assert [plan(device, "ray").device for device in ("auto", "cpu", "cuda")] == [
        "auto",
        "cpu",
        "cuda",
    ]
    with pytest.raises(ValidationError, match=r"'cuda:1'; .*cuda"):
        plan("cuda:1", "ray")


@pytest.mark.parametrize(
    ("ranks", "hosts", "per_host", "spread", "laid_out"),
    [
        (1, 1, 1, False, (1,)),
        (6, 4, 4, False, (3, 3)),
        (4, 4, 4, False, (4,)),
        (9, 4, 4, False, (3, 3, 3)),
        (6, 4, 4, True, (2, 2, 1, 1)),
        (2, 4, 4, True, (1, 1)),
        (16, 4, 4, True, (4, 4, 4, 4)),
    ],
)
def test_ranks_lie_evenly_on_few_hosts_or_on_many(
    ranks: int, hosts: int, per_host: int, spread: bool, laid_out: tuple[int, ...]
) -> None:
    assert places(ranks, hosts=hosts, per_host=per_host, spread=spread) == laid_out


@given(st.integers(1, 144), _FEW, _FEW, st.booleans())
def test_every_rank_has_a_place_and_no_host_too_many(
    ranks: int, hosts: int, per_host: int, spread: bool
) -> None:
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
def test_no_rank_and_no_host_is_refused(numbers: tuple[int, int, int]) -> None:
    ranks, hosts, per_host = numbers
    with pytest.raises(ValueError, match=rf"ranks={ranks}, hosts={hosts}, per_host={per_host}"):
        places(ranks, hosts=hosts, per_host=per_host, spread=False)
