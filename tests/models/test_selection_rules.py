"""Recommend the simplest of the best, and the baseline if nothing is worth a change."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.models.evidence import (
    break_even_noise_scale,
    choose,
    simplicity,
    worth_its_batch,
)
from autotune.policy import POLICY
from autotune.records.measurement import Interval
from autotune.records.trial import TrialRecord
from tests.factories import make_record

_FIELD = st.lists(
    st.tuples(
        st.floats(-0.5, 0.5) | st.sampled_from([0.0, 0.01]),
        st.integers(0, 3),
        st.sampled_from([16, 32, 64]),
    ),
    min_size=1,
    max_size=6,
)
"""Gains over the baseline, workers and batches."""


def test_order_of_simplicity() -> None:
    ordered = [
        TrainingConfig(),
        TrainingConfig(numa_binding="node"),
        TrainingConfig(numa_binding="exclusive"),
        TrainingConfig(fused=True),
        TrainingConfig(compile=True),
        TrainingConfig(compile=True, compile_mode="reduce-overhead"),
        TrainingConfig(amp_dtype="tf32"),
        TrainingConfig(amp_dtype="bfloat16"),
        TrainingConfig(amp_dtype="float16"),
        TrainingConfig(micro_batch_size=64),
        TrainingConfig(num_workers=1, micro_batch_size=1),
        TrainingConfig(num_workers=1),
        TrainingConfig(num_workers=1, prefetch_factor=2),
        TrainingConfig(num_workers=1, persistent_workers=True),
    ]
    keys = [simplicity(config) for config in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_order_of_simplicity_of_groups() -> None:
    ordered = [
        TrainingConfig(num_workers=9),
        TrainingConfig(strategy="dp", world_size=2, num_workers=1),
        TrainingConfig(strategy="ddp", world_size=2, num_workers=1),
        TrainingConfig(
            strategy="ddp", world_size=2, num_workers=1, ddp=DdpConfig(static_graph=True)
        ),
        TrainingConfig(strategy="dp", world_size=2, num_workers=3),
    ]
    keys = [simplicity(config) for config in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def trials(*configs: TrainingConfig) -> list[TrialRecord]:
    return [make_record(number, config=config) for number, config in enumerate(configs)]


def chosen(
    candidates: list[TrialRecord], gains: dict[int, float], settled: int | None = None
) -> int:
    return choose(
        candidates,
        lambda record: exp(gains[record.number]),
        settled=settled,
        worthwhile=POLICY.proof.worthwhile,
    ).number


def test_simplest_within_two_percent() -> None:
    field = trials(
        TrainingConfig(),
        TrainingConfig(num_workers=2),
        TrainingConfig(num_workers=6, amp_dtype="bfloat16"),
    )
    assert chosen(field, {0: 0.0, 1: -1.0, 2: 0.4}) == 2
    assert chosen(field[1:], {1: 0.0, 2: 0.01}) == 1
    assert chosen(field[1:], {1: 0.0, 2: 0.03}) == 2
    assert chosen(field, {0: -0.01, 1: 0.0, 2: 0.005}) == 0


def test_of_equals_the_settled_one_stays() -> None:
    field = trials(TrainingConfig(), TrainingConfig(num_workers=2), TrainingConfig(num_workers=6))[
        1:
    ]
    assert chosen(field, {1: 0.0, 2: 0.01}, settled=2) == 2
    assert chosen(field, {1: 0.0, 2: -0.05}, settled=2) == 1


@given(field=_FIELD, data=st.data())
def test_choosing_keeps_its_promises_in_any_order(
    field: list[tuple[float, int, int]], data: st.DataObject
) -> None:
    candidates = trials(
        *(
            TrainingConfig(num_workers=workers, micro_batch_size=batch)
            for _, workers, batch in field
        )
    )
    scores = {number: exp(gain) for number, (gain, _, _) in enumerate(field)}

    def score(record: TrialRecord) -> float:
        return scores[record.number]

    best = choose(candidates, score, worthwhile=POLICY.proof.worthwhile)
    assert (
        choose(data.draw(st.permutations(candidates)), score, worthwhile=POLICY.proof.worthwhile)
        == best
    )
    near = [one for one in candidates if score(one) >= (1 - 0.02) * max(scores.values())]
    assert best in near
    assert best.number == 0 or candidates[0] not in near
    assert best.number == 0 or simplicity(best.config) == min(
        simplicity(one.config) for one in near
    )


@pytest.mark.parametrize(
    ("low", "value", "high", "is_worth_it"),
    [
        (1.02, 1.10, 1.2, True),
        (1.01, 1.03, 1.2, None),
        (0.97, 1.10, 1.2, None),
        (0.9, 0.95, 1.0, False),
        (1.01, 1.02, 1.04, False),
    ],
)
def test_worth_its_batch(low: float, value: float, high: float, is_worth_it: bool | None) -> None:
    assert worth_its_batch(Interval(value=value, low=low, high=high), 1.05) is is_worth_it


@given(st.integers(1, 4096), st.integers(1, 64), st.floats(1.001, 100.0))
def test_break_even_noise_scale(batch: int, times: int, ratio: float) -> None:
    larger = batch * times
    scale = break_even_noise_scale(batch, larger, ratio)
    assert scale is not None
    worth = (scale + batch) / (scale + larger)
    assert worth * ratio >= 1 - 1e-9
    if scale > 0:
        assert worth * ratio == pytest.approx(1)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_no_break_even_without_a_gain(ratio: float) -> None:
    assert break_even_noise_scale(32, 64, ratio) is None


def test_break_even_at_any_noise_scale() -> None:
    assert break_even_noise_scale(32, 64, 2.0) == 0.0
    assert break_even_noise_scale(32, 64, 3.0) == 0.0
