"""The model of the machine, from the curves and a few trials of a recorded surface, tells what its other points reach.

Surfaces are recorded by benchmarks/surfaces.py on real machines, whose rates differ from visit to visit: bounds are
given in that spread.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import correlation, fmean, median
from typing import Any

import numpy as np
import pytest

from autotune.config.plan import Objective, SearchSpace
from autotune.config.training_config import TrainingConfig
from autotune.models.evidence import assumed_variation
from autotune.models.observations import ConfiguredPoint, configured_points, rate_observations
from autotune.models.throughput import Forecast, RateModel
from autotune.records.trial import TrialRecord
from autotune.space.ranges import Basis
from autotune.space.space import resolve
from benchmarks.replay import replay

PATHS = sorted(replay.SURFACES.glob("*.jsonl"))
TRIALS, DRAWS = 12, 5
LEAST_SPREAD = 0.05
LEAST_RANK_CORRELATION = 0.8
MOST_SPREADS = 3.0
LEAST_COVERAGE = 0.6
VISIT_SD = 1 / (0.6745 * 2**0.5)
"""Standard deviation of a visit, in median differences between two."""

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was forecast of the points that no trial was shown of, and the mean of what was measured there."""

    forecast: Forecast
    log_rate: Numbers
    spread: float
    """How far two visits of a point lie apart as a rule."""

    @property
    def errors(self) -> Numbers:
        return self.forecast.log_rate - self.log_rate

    @property
    def rank_correlation(self) -> float:
        """Spearman's."""
        ours, true = (
            np.argsort(np.argsort(values)).tolist()
            for values in (self.forecast.log_rate, self.log_rate)
        )
        return correlation(ours, true)


def looks(surface: Any) -> list[ConfiguredPoint]:
    space = resolve(
        Basis(
            given=SearchSpace.model_validate(
                {**fixed(surface), **surface.header["domains"]}
            ).given(),
            baseline=surface.baseline,
            objective=Objective(memory_limit=surface.limit_bytes),
            facts=surface.facts,
            environment=surface.environment,
        )
    )
    return configured_points(surface.curves, space)


def fixed(surface: Any) -> Mapping[str, object]:
    named = surface.header["domains"]
    settings: Mapping[str, object] = surface.baseline.model_dump(
        exclude={"lr", "world_size", "strategy", "ddp", *named}
    )
    return settings


def tell(surface: Any, trials: int, seed: int = 0) -> Comparison:
    """Fit the curves, the baseline and so many other trials by chance, one visit of each."""
    measured = {
        config: [one.measurement.samples_per_s for one in visits if one.measurement is not None]
        for config, visits in surface.visits.items()
    }
    others = [config for config, found in measured.items() if found and config != surface.baseline]
    random.Random(seed).shuffle(others)
    shown: list[TrainingConfig] = [surface.baseline, *islice(others, trials)]
    records = [
        TrialRecord(number=number, config=config, results=(surface.visits[config][0],))
        for number, config in enumerate(shown)
    ]
    environment = surface.environment
    model = RateModel(
        list(rate_observations(looks(surface), records, environment.device_kind)),
        environment,
        assumed_variation(environment.device_kind),
    )
    rest = others[trials:]
    differences = [abs(np.log(one / other)) for one, other in surface.pairs()]
    return Comparison(
        forecast=model.forecast(rest),
        log_rate=np.log([fmean(measured[config]) for config in rest]),
        spread=max(LEAST_SPREAD, median(differences)) if differences else LEAST_SPREAD,
    )


def test_surfaces_were_recorded() -> None:
    assert PATHS


@pytest.fixture(scope="module", params=[path.name for path in PATHS])
def surface(request: pytest.FixtureRequest) -> Any:
    return replay.read_surface(replay.SURFACES / request.param)


@pytest.fixture(scope="module")
def draws(surface: Any) -> list[Comparison]:
    return [tell(surface, TRIALS, seed) for seed in range(DRAWS)]


def test_what_was_not_run_is_ranked(draws: list[Comparison]) -> None:
    assert fmean(comparison.rank_correlation for comparison in draws) >= LEAST_RANK_CORRELATION


def test_the_typical_error_is_that_of_a_few_visits(draws: list[Comparison]) -> None:
    assert (
        fmean(
            float(np.median(np.abs(comparison.errors))) / comparison.spread for comparison in draws
        )
        <= MOST_SPREADS
    )


def test_the_interval_of_another_visit_holds_most_of_what_it_promises(
    draws: list[Comparison],
) -> None:
    within = [
        comparison.errors**2
        < 1.96**2 * (comparison.forecast.sd**2 + (VISIT_SD * comparison.spread) ** 2)
        for comparison in draws
    ]
    assert np.mean(within) >= LEAST_COVERAGE


def test_trials_leave_less_uncertainty_than_the_baseline_alone(
    surface: Any, draws: list[Comparison]
) -> None:
    start = tell(surface, 0)
    assert all(comparison.forecast.sd.mean() < start.forecast.sd.mean() for comparison in draws)
