"""The noise scale by norms of gradients, and the one from which on a larger batch trains sooner."""

from __future__ import annotations

from math import inf, isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.analysis.noise_scale import break_even_noise_scale, noise_scale_of
from autotune.records.noise_scale import GradientNorms

MICRO, COUNT, SIZE = 8, 8, 50
"""Samples of a micro-batch, micro-batches of a group, and parameters of made-up gradients."""


def norms_of(noise_scale: float, seed: int, *, groups: int = 16, has_checkpoint: bool = True) -> GradientNorms:
    """Norms of gradients around one of length 1, with samples' noise of this trace."""
    draw = np.random.default_rng(seed)
    mean = np.zeros(SIZE)
    mean[0] = 1.0
    found = []
    for _ in range(groups):
        noise = draw.normal(size=(COUNT, SIZE)) * np.sqrt(noise_scale / SIZE / MICRO)
        gradients = mean + noise
        found.append((float((gradients**2).sum(axis=1).mean()), float((gradients.mean(axis=0) ** 2).sum())))
    return GradientNorms(
        micro_batch_samples=MICRO,
        micro_batches=COUNT,
        groups=tuple(found),
        epoch_samples=None,
        has_checkpoint=has_checkpoint,
    )


@pytest.mark.parametrize("noise_scale", [5.0, 50.0, 200.0])
def test_the_interval_holds_what_is_true_as_often_as_it_says(noise_scale: float) -> None:
    found = [noise_scale_of(norms_of(noise_scale, seed)) for seed in range(100)]
    known = [one for one in found if one is not None]
    assert len(known) == 100
    assert sum(one.low <= noise_scale <= one.high for one in known) >= 90
    values = [one.value for one in known]
    assert float(np.median(values)) == pytest.approx(noise_scale, rel=0.1)


def test_where_noise_hides_the_gradient_only_a_lower_end_is_told() -> None:
    found = [noise_scale_of(norms_of(1e6, seed)) for seed in range(20)]
    known = [one for one in found if one is not None]
    assert sum(one.high == inf for one in known) >= 17
    assert sum(one.low <= 1e6 for one in known) >= 17
    assert all(isfinite(one.low) for one in known)


def test_gradients_without_noise_have_none() -> None:
    found = noise_scale_of(norms_of(0.0, 0))
    assert found is not None
    assert (found.value, found.high) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert found.samples == MICRO * COUNT * 16


@pytest.mark.parametrize("norms", [norms_of(5.0, 0, groups=7), norms_of(float("nan"), 0)], ids=["few", "no number"])
def test_nothing_is_told_from_too_few_groups_or_from_no_numbers(norms: GradientNorms) -> None:
    assert noise_scale_of(norms) is None


def test_an_epoch_that_gives_each_sample_once_tells_no_less_noise() -> None:
    """Of 512 samples, cut into groups of 64 micro-batches of one."""
    draw = np.random.default_rng(3)
    samples = draw.normal(size=(512, SIZE))
    samples[:, 0] += 2.0
    mean, spread = samples.mean(axis=0), samples.var(axis=0, ddof=1).sum()
    parts = [part for _ in range(20) for part in np.split(draw.permutation(samples), 8)]
    groups = [(float((part**2).sum(axis=1).mean()), float((part.mean(axis=0) ** 2).sum())) for part in parts]
    norms = GradientNorms(
        micro_batch_samples=1, micro_batches=64, groups=tuple(groups), epoch_samples=512, has_checkpoint=True
    )
    found = noise_scale_of(norms)
    assert found is not None
    assert found.value == pytest.approx(spread / float((mean**2).sum()), rel=0.01)


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
