"""From runs in turns to one configuration: the best that is believed, simplest among equals, in any order."""

from __future__ import annotations

from math import log1p

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.analysis.decisions.rounds import fit_rounds
from autotune.analysis.decisions.run_spread import assumed_spread
from autotune.analysis.decisions.selection_rules import (
    believed_gains,
    break_even_noise_scale,
    choose,
    claim_of,
    ratio_of,
    simplest_of_the_best,
    simplicity,
)
from autotune.records.recommendation import Confirmation
from autotune.records.run_spread import RunSpread
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.training_config import TrainingConfig
from tests.factories import make_confirmation, make_record

STEADY = RunSpread(sd=0.005, degrees_of_freedom=30.0, source="workload")
ASSUMED = assumed_spread("cpu")
LOUD = RunSpread(sd=0.1, degrees_of_freedom=30.0, source="workload")
_FIELD = st.lists(
    st.tuples(
        st.lists(st.floats(80, 130), min_size=3, max_size=3) | st.sampled_from([[100.0] * 3, [101.0] * 3]),
        st.integers(0, 3),  # workers
        st.sampled_from([16, 32, 64]),
        st.floats(0.0, 0.02),  # what an idle device costs
    ),
    min_size=1,
    max_size=6,
)


def test_a_config_is_simpler_with_fewer_workers_then_a_smaller_batch_then_a_plainer_precision() -> None:
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


def chosen(*candidates: Confirmation, spread: RunSpread = STEADY, idle: dict[int, float] | None = None) -> int:
    return choose(candidates, believed_gains(candidates, spread), idle or {}).number


def test_a_ratio_cancels_the_drift_that_both_share() -> None:
    ratio = ratio_of(make_confirmation(1, 200, 140, 280), make_confirmation(0, 100, 70, 140), STEADY)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert 1.97 < ratio.low < 2.0 < ratio.high < 2.03


def test_only_rounds_that_both_ended_are_compared() -> None:
    ratio = ratio_of(make_confirmation(1, 200, None, 999), make_confirmation(0, 100, 100, None), STEADY)
    assert ratio is not None
    assert ratio.value == pytest.approx(2.0)
    assert ratio_of(make_confirmation(1, None, 5), make_confirmation(0, 5, None), STEADY) is None


def test_the_rate_of_a_confirmation_is_the_geometric_mean_of_its_runs() -> None:
    assert make_confirmation(1, 100, None, 400).samples_per_s == pytest.approx(200)


def test_a_confirmation_has_at_least_one_round() -> None:
    with pytest.raises(ValidationError):
        Confirmation(number=0, config=TrainingConfig(), rounds=())


def test_a_claim_is_the_believed_ratio_in_the_interval_of_the_measured_one() -> None:
    fit = fit_rounds([make_confirmation(0, 100, 100, 100), make_confirmation(1, 104, 116, 110)], LOUD)
    claim = claim_of(1, fit, 0.025)
    assert claim is not None
    assert 1 < claim.speedup.value < claim.measured.value == pytest.approx(1.1, rel=0.01)
    assert (claim.speedup.low, claim.speedup.high) == (claim.measured.low, claim.measured.high)
    assert not claim.is_proven
    assert 0.5 < claim.gain_probability < 0.99


def test_a_smaller_error_proves_less() -> None:
    fit = fit_rounds([make_confirmation(0, 100, 100, 100), make_confirmation(1, 102, 102, 102)], STEADY)
    likely, strict = (claim_of(1, fit, error) for error in (0.025, 1e-7))
    assert likely is not None
    assert strict is not None
    assert likely.is_proven
    assert not strict.is_proven


def test_what_is_assumed_of_a_machine_proves_nothing() -> None:
    assumed = STEADY.model_copy(update={"source": "assumed"})
    for spread, rounds, proven in ((assumed, 1, False), (assumed, 2, False), (assumed, 3, True), (STEADY, 1, True)):
        field = [make_confirmation(number, *[rate] * rounds) for number, rate in ((0, 100), (1, 200))]
        claim = claim_of(1, fit_rounds(field, spread), 0.025)
        assert claim is not None
        assert claim.measured.low > 1
        assert claim.is_proven == proven


def test_without_a_common_round_nothing_is_claimed() -> None:
    assert (
        claim_of(1, fit_rounds([make_confirmation(0, 5, None), make_confirmation(1, None, 5)], STEADY), 0.025) is None
    )


def test_the_faster_one_is_chosen_where_the_gain_is_clear() -> None:
    assert chosen(make_confirmation(0, 100, 101, 99), make_confirmation(4, 150, 151, 149, num_workers=8)) == 4


def test_the_simplest_of_the_best_is_within_two_percent_and_of_equals_the_baseline() -> None:
    scores = {0: 50.0, 1: 100.0, 2: 98.5, 3: 97.5}
    settings = {0: {}, 1: {"fused": True, "pin_memory": True}, 2: {"fused": True}, 3: {}}
    records = [make_record(number, config=TrainingConfig(**settings[number])) for number in scores]
    assert simplest_of_the_best(records, lambda record: scores[record.number]).number == 2
    scores[0] = 98.1
    assert simplest_of_the_best(records, lambda record: scores[record.number]).number == 0


def test_the_baseline_stays_where_nothing_is_believed_to_win_two_percent() -> None:
    baseline = make_confirmation(0, 100, 103, 97, num_workers=8)
    assert chosen(make_confirmation(1, 101, 99, 100.5), baseline) == 0
    assert chosen(make_confirmation(1, 101.5, 101.5, 101.5), baseline) == 0


def test_a_gain_that_noise_may_have_made_is_not_chosen_over_the_baseline() -> None:
    baseline, rival = make_confirmation(0, 100), make_confirmation(1, 105)
    assert chosen(baseline, rival, spread=STEADY) == 1
    assert chosen(baseline, rival, spread=LOUD) == 0


def test_among_equals_the_simplest_is_chosen() -> None:
    baseline = make_confirmation(0, 50, 50, 50)
    plain = make_confirmation(1, 100, 102, 98, num_workers=2)
    rich = make_confirmation(2, 101, 99, 101, num_workers=6, amp_dtype="bfloat16")
    assert chosen(baseline, rich, plain) == 1


def test_an_idle_device_decides_between_equals() -> None:
    field = [make_confirmation(1, *[101] * 3), make_confirmation(2, *[100] * 3, num_workers=4)]
    assert chosen(*field) == 1
    assert chosen(*field, idle={1: 0.05, 2: 0.0}) == 2


def test_without_a_feasible_baseline_the_fastest_wins() -> None:
    assert chosen(make_confirmation(1, 100, 100), make_confirmation(2, 130, 130)) == 2


def test_what_shares_no_round_with_the_reference_is_not_chosen() -> None:
    baseline, fast = make_confirmation(0, 100, None), make_confirmation(1, None, 999)
    assert believed_gains([baseline, fast], STEADY) == {0: 0.0}
    assert chosen(baseline, fast) == 0


@given(field=_FIELD, data=st.data())
def test_choosing_keeps_its_promises_in_any_order(
    field: list[tuple[list[float], int, int, float]], data: st.DataObject
) -> None:
    candidates = [
        make_confirmation(number, *rates, num_workers=workers, micro_batch_size=batch)
        for number, (rates, workers, batch, _) in enumerate(field)
    ]
    idle = {number: one[3] for number, one in enumerate(field)}
    gains = believed_gains(candidates, STEADY)
    best = choose(candidates, gains, idle)
    assert choose(data.draw(st.permutations(candidates)), gains, idle) == best

    scores = {number: gain + log1p(-idle[number]) for number, gain in gains.items()}
    assert scores[best.number] >= max(scores.values()) + log1p(-0.02) - 1e-9
    near = [one for one in candidates if scores[one.number] >= max(scores.values()) + log1p(-0.02)]
    assert best.number == 0 or candidates[0] not in near
    assert best.number == 0 or simplicity(best.config) == min(simplicity(one.config) for one in near)


@given(st.integers(1, 4096), st.integers(1, 64), st.floats(1.001, 100.0))
def test_at_the_break_even_samples_are_worth_as_much_less_as_they_come_faster(
    batch: int, times: int, ratio: float
) -> None:
    larger = batch * times
    scale = break_even_noise_scale(batch, larger, ratio)
    assert scale is not None
    worth = (scale + batch) / (scale + larger)
    assert worth * ratio >= 1 - 1e-9
    if scale > 0:
        assert worth * ratio == pytest.approx(1)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_larger_batch_that_is_no_faster_never_pays(ratio: float) -> None:
    assert break_even_noise_scale(32, 64, ratio) is None


def test_a_batch_that_is_faster_by_more_than_it_is_larger_always_pays() -> None:
    assert break_even_noise_scale(32, 64, 2.0) == 0.0
    assert break_even_noise_scale(32, 64, 3.0) == 0.0


@pytest.mark.parametrize(("ratio", "is_proven"), [(2.9, False), (3.3, True)])
def test_a_gain_beyond_any_spread_that_was_seen_is_proven_after_one_round(ratio: float, is_proven: bool) -> None:
    """Nothing is known of the spread: t of 3 degrees, times sqrt(2), times 0.25, is ln 3.08."""
    claim = claim_of(1, fit_rounds([make_confirmation(0, 100), make_confirmation(1, 100 * ratio)], ASSUMED), 0.025)
    assert claim is not None
    assert claim.measured.low > 1
    assert (claim.is_proven, claim.is_by_far) == (is_proven, is_proven)


@pytest.mark.parametrize(("seen", "is_proven"), [(0.01, True), (0.15, False)])
def test_a_few_rounds_prove_what_lies_beyond_the_spread_that_runs_have_shown(seen: float, is_proven: bool) -> None:
    """Two runs each; in a wide spread what was assumed would narrow the interval."""
    sd = ((3 * ASSUMED.sd**2 + 2 * seen**2) / 5) ** 0.5
    taught = RunSpread(sd=sd, degrees_of_freedom=5.0, source="workload")
    field = [make_confirmation(0, 100), make_confirmation(1, 170)]
    claim = claim_of(1, fit_rounds(field, taught, ASSUMED), 0.025)
    assert claim is not None
    assert claim.measured.low > 1
    assert (claim.is_proven, claim.is_by_far) == (is_proven, False)


def test_three_rounds_carry_their_interval_themselves() -> None:
    field = [make_confirmation(0, 100, 101, 99), make_confirmation(1, 130, 131, 129)]
    claim = claim_of(1, fit_rounds(field, ASSUMED, ASSUMED), 0.025)
    assert claim is not None
    assert (claim.is_proven, claim.is_by_far) == (True, False)
