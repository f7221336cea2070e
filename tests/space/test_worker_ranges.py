"""Try settings of workers for which the probe saw a reason."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.messages.space import out_of_order_tried
from autotune.space.space import ResolvedSpace
from tests.factories import GPU, make_space

TAIL: dict[str, Any] = {"slow_tail_fraction": 0.5}
THREADS: dict[str, Any] = {"cores_per_item": 3.5}


def values(space: ResolvedSpace, name: str) -> list[Any]:
    return list(space.domains[name])


@pytest.mark.parametrize(("share", "tried"), [(None, [True]), (0.19, [True]), (0.2, [True, False])])
def test_default_in_order(share: float | None, tried: list[bool]) -> None:
    assert values(make_space(slow_tail_fraction=share), "in_order") == tried


@pytest.mark.parametrize(
    ("given_space", "facts"),
    [({"in_order": True}, {}), ({"num_workers": [0, 1]}, {}), ({}, {"is_deterministic": True})],
    ids=["fixed", "one worker", "deterministic"],
)
def test_in_order_stays_where_it_can_not_gain(
    given_space: dict[str, Any], facts: dict[str, Any]
) -> None:
    space = make_space(given_space, **TAIL, **facts)
    assert values(space, "in_order") == [True]
    assert space.notes == ()


def test_baseline_out_of_order_is_kept() -> None:
    today = TrainingConfig(num_workers=2, in_order=False)
    assert values(make_space(baseline=today), "in_order") == [False]
    assert make_space(baseline=today, **TAIL).notes == ()
    assert values(make_space(baseline=today, **TAIL), "in_order") == [True, False]


def test_note_on_another_order() -> None:
    by_default, listed = make_space(**TAIL), make_space({"in_order": [True, False]}, **TAIL)
    assert by_default.notes == (out_of_order_tried(slow_tail_fraction=0.5),)
    assert listed.notes == (out_of_order_tried(slow_tail_fraction=None),)


@pytest.mark.parametrize(
    ("busy", "cores", "tried"),
    [
        (None, 16, [None]),
        (1.19, 16, [None]),
        (1.2, 16, [None, 1, 2]),
        (3.5, 4, [None, 1, 2]),
        (1.9, 2, [None, 1]),
        (1.9, 1, [None]),
    ],
)
def test_default_worker_threads(busy: float | None, cores: int, tried: list[int | None]) -> None:
    environment = GPU.model_copy(update={"cores": cores})
    assert (
        values(make_space(environment=environment, cores_per_item=busy), "worker_threads") == tried
    )


@pytest.mark.parametrize(
    ("given_space", "facts"),
    [({"worker_threads": [None]}, {}), ({"num_workers": 0}, {}), ({}, {"is_tf_data": True})],
    ids=["fixed", "no workers", "tf.data"],
)
def test_worker_threads_may_be_fixed(given_space: dict[str, Any], facts: dict[str, Any]) -> None:
    assert values(make_space(given_space, **THREADS, **facts), "worker_threads") == [None]


def test_baselines_worker_threads_are_tried() -> None:
    today = TrainingConfig(num_workers=2, worker_threads=3)
    assert values(make_space(baseline=today), "worker_threads") == [3]
    assert 3 in values(make_space(baseline=today, **THREADS), "worker_threads")
