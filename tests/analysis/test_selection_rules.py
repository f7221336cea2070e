"""From runs in turns to one configuration: never slower than the baseline, simplest among equals, in any order."""

from __future__ import annotations

from math import inf, isinf, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.analysis.selection_rules import choose, ratio_of, simplicity
from autotune.records.recommendation import Confirmation
from autotune.settings.training_config import DdpConfig, TrainingConfig
from tests.factories import make_confirmation, make_measurement

_FIELD = st.lists(
    st.tuples(
        st.lists(st.floats(80, 130), min_size=3, max_size=3) | st.sampled_from([[100.0] * 3, [101.0] * 3]),
        st.integers(0, 3),  # workers
        st.sampled_from([16, 32, 64]),
        st.floats(0.8, 1.3) | st.just(1.0),  # score
        st.sampled_from([0.001, 0.05]),  # windows' half width
    ),
    min_size=1,
    max_size=6,
)


def test_a_config_is_simpler_with_fewer_workers_then_a_smaller_batch_then_a_plainer_precision() -> None:
    ordered = [
        TrainingConfig(),
        TrainingConfig(compile=True),
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


def test_a_config_is_simpler_on_fewer_devices_then_with_fewer_workers_of_all_ranks() -> None:
    ordered = [
        TrainingConfig(num_workers=9),
        TrainingConfig(strategy="dp", world_size=2, num_workers=1),
        TrainingConfig(strategy="ddp", world_size=2, num_workers=1),
        TrainingConfig(strategy="ddp", world_size=2, num_workers=1, ddp=DdpConfig(static_graph=True)),
        TrainingConfig(strategy="dp", world_size=2, num_workers=3),
    ]
    keys = [simplicity(config) for config in ordered]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_a_ratio_cancels_the_drift_that_both_share() -> None:
    ratio = ratio_of(make_confirmation(1, 200, 140, 280), make_confirmation(0, 100, 70, 140))
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_only_rounds_that_both_ended_are_compared() -> None:
    ratio = ratio_of(make_confirmation(1, 200, None, 999), make_confirmation(0, 100, 100, None))
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio_of(make_confirmation(1, None, 5), make_confirmation(0, 5, None)) is None


def test_below_three_rounds_the_windows_own_intervals_are_joined() -> None:
    one, other = make_confirmation(1, 200, 200, noise=0.03), make_confirmation(0, 100, 100, noise=0.04)
    ratio = ratio_of(one, other)
    assert ratio is not None
    # each round: sqrt(0.03^2 + 0.04^2) = 0.05; the mean of two: 0.05 / sqrt(2)
    assert ratio.high / ratio.value - 1 == pytest.approx(0.05 / sqrt(2), rel=0.03)
    assert ratio.value == pytest.approx(2.0)


def test_an_interval_without_an_upper_end_stays_open() -> None:
    vague = Confirmation(
        number=1, config=TrainingConfig(), rounds=(make_measurement(100, samples_per_s_ci=(0.0, inf)),)
    )
    ratio = ratio_of(vague, make_confirmation(0, 100))
    assert ratio is not None
    assert ratio.low == 0.0
    assert isinf(ratio.high)


def test_a_configuration_over_itself_is_one() -> None:
    ratio = ratio_of(make_confirmation(3, 90, 110), make_confirmation(3, 90, 110))
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_the_rate_of_a_confirmation_is_the_geometric_mean_of_its_runs() -> None:
    assert make_confirmation(1, 100, None, 400).samples_per_s == pytest.approx(200)


def test_a_confirmation_has_at_least_one_round() -> None:
    with pytest.raises(ValidationError):
        Confirmation(number=0, config=TrainingConfig(), rounds=())


def test_the_faster_one_is_chosen_where_the_gain_is_clear() -> None:
    baseline, fast = make_confirmation(0, 100, 101, 99), make_confirmation(4, 150, 151, 149, num_workers=8)
    assert choose([baseline, fast], {0: 1.0, 4: 1.5}, baseline) == fast


def test_the_baseline_is_kept_in_a_tie_even_against_a_better_score() -> None:
    baseline = make_confirmation(0, 100, 103, 97, num_workers=8)
    rival = make_confirmation(1, 101, 99, 100.5)
    assert choose([rival, baseline], {0: 1.0, 1: 1.2}, baseline) == baseline


def test_nothing_slower_than_the_baseline_beyond_noise_is_chosen() -> None:
    baseline = make_confirmation(0, 100, 100.01, 99.99)
    near = make_confirmation(1, 99, 99.01, 98.99)  # within 2 %, and surely slower
    assert choose([baseline, near], {0: 1.0, 1: 9.0}, baseline) == baseline


def test_among_equals_the_simplest_is_chosen() -> None:
    baseline = make_confirmation(0, 50, 50, 50)
    plain = make_confirmation(1, 100, 102, 98, num_workers=2)
    rich = make_confirmation(2, 101, 99, 101, num_workers=6, amp_dtype="bfloat16")
    assert choose([baseline, rich, plain], {0: 0.5, 1: 1.0, 2: 1.1}, baseline) == plain


def test_within_two_percent_and_told_apart_the_score_decides() -> None:
    fastest = make_confirmation(1, 101, 101.01, 100.99)
    busier = make_confirmation(2, 100, 100.01, 99.99, num_workers=4)
    assert choose([fastest, busier], {1: 1.0, 2: 1.01}, None) == busier
    assert choose([fastest, busier], {1: 1.02, 2: 1.01}, None) == fastest


def test_without_a_feasible_baseline_the_fastest_wins() -> None:
    slow, fast = make_confirmation(1, 100, 100), make_confirmation(2, 130, 130)
    assert choose([slow, fast], {1: 1.0, 2: 1.3}, None) == fast


def _low(one: Confirmation, other: Confirmation) -> float:
    ratio = ratio_of(one, other)
    assert ratio is not None
    return ratio.low


@settings(max_examples=100, deadline=None)
@given(field=_FIELD, has_baseline=st.booleans(), data=st.data())
def test_choosing_keeps_its_promises_in_any_order(
    field: list[tuple[list[float], int, int, float, float]],
    has_baseline: bool,
    data: st.DataObject,
) -> None:
    candidates = [
        make_confirmation(number, *rates, noise=noise, num_workers=workers, micro_batch_size=batch)
        for number, (rates, workers, batch, _, noise) in enumerate(field)
    ]
    scores = {number: one[3] for number, one in enumerate(field)}
    baseline = candidates[0] if has_baseline else None
    chosen = choose(candidates, scores, baseline)

    shuffled = data.draw(st.permutations(candidates))
    assert choose(shuffled, scores, baseline) == chosen

    gains = [one for one in candidates if baseline is None or _low(one, baseline) > 1.0]
    if not gains:
        assert chosen == baseline
        return
    assert chosen in gains
    assert chosen.samples_per_s >= 0.98 * max(one.samples_per_s for one in gains)
    for other in gains:
        ratio = ratio_of(other, chosen)
        assert ratio is not None
        twins = ratio.value == 1.0 and scores[other.number] == scores[chosen.number]
        if twins:
            assert simplicity(chosen.config) <= simplicity(other.config)


def test_a_simple_configuration_that_is_no_gain_does_not_stand_in_for_one() -> None:
    baseline = make_confirmation(0, 100.0, 100.0, 100.0, num_workers=0)
    simple = make_confirmation(1, 100.0, 104.0, 106.0, num_workers=1)
    fast = make_confirmation(2, 104.0, 104.2, 103.8, num_workers=4)
    assert choose([baseline, simple, fast], {0: 1.0, 1: 1.03, 2: 1.04}, baseline) == fast


def test_a_clear_gain_is_taken_where_a_larger_one_is_noise() -> None:
    baseline = make_confirmation(0, 100.0, 100.0, 100.0)
    noisy = make_confirmation(1, 99.0, 106.0, 111.0, micro_batch_size=64)
    clear = make_confirmation(2, 102.0, 102.1, 101.9, num_workers=2)
    assert choose([baseline, noisy, clear], {0: 1.0, 1: 1.05, 2: 1.02}, baseline) == clear
