"""How many rounds of which configurations a confirmation takes, where no time-out limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, cycle, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from autotune.analysis.decisions.confirmation_plan import UNHURRIED_CONFIRMATION_S
from autotune.analysis.time_estimate import overhead_s
from autotune.launch.launcher import Exit, Launch
from autotune.records.recommendation import Recommendation
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import ConfirmationOutcome
from autotune.tuning.selection import select
from tests.factories import searches
from tests.factories.searches import GIB, FailingLauncher, figures_of, finals_of, make_search

_BATCHES = (32, 64, 128)


class Scripted(FakeLauncher):
    """Rates by micro batch: 100, 200 and 195 in the search, and in the confirmation what a script says.

    A rate below 0 does not fit into memory.
    """

    script: Mapping[int, Iterator[float]] = MappingProxyType({})
    startup_s = 0.1
    baseline_fits = True

    def cost_of(self, config: TrainingConfig) -> FakeTrial:
        """The next of the script's rates."""
        rate = next(self.script[config.micro_batch_size])
        fits = rate > 0 and (self.baseline_fits or config.micro_batch_size > min(_BATCHES))
        peak = GIB if fits else 99 * GIB
        return FakeTrial(samples_per_s=abs(rate), peak_memory_bytes=peak, startup_s=self.startup_s)

    def launch(self, launch: Launch) -> Exit:
        """As scripted."""
        self.cost = self.cost_of
        return FakeLauncher.launch(self, launch)


def searched(folder: Path, startup_s: float = 0.1, *, baseline_fits: bool = True) -> tuple[Scripted, Search]:
    """A search that is over but for its confirmation."""
    launcher = Scripted(noise=1e-4)
    launcher.startup_s, launcher.baseline_fits = startup_s, baseline_fits
    launcher.script = {batch: repeat(rate) for batch, rate in zip(_BATCHES, (100.0, 200.0, 195.0), strict=True)}
    space: dict[str, Any] = {"micro_batch_size": list(_BATCHES), "amp_dtype": "float32", "num_workers": 0}
    space |= {"grad_accum_steps": 1, "pin_memory": False, "channels_last": False}
    search = make_search(folder, launcher, method="grid", n_trials=None, **space)
    search.run()
    launcher.jobs.clear()
    return launcher, search


def confirmed(
    folder: Path, script: Mapping[int, Iterator[float]], startup_s: float = 0.1, *, baseline_fits: bool = True
) -> tuple[Scripted, ConfirmationOutcome, Recommendation]:
    """A search and its confirmation, in which rates are as scripted."""
    launcher, search = searched(folder, startup_s, baseline_fits=baseline_fits)
    launcher.script = script
    return launcher, *searches.confirmed(search)


def rounds_of(launcher: FakeLauncher) -> dict[int, int]:
    return dict(Counter(job.config.micro_batch_size for job in launcher.jobs if job.kind == "trial"))


def test_a_clear_gain_takes_three_rounds(tmp_path: Path) -> None:
    launcher, _, chosen = confirmed(tmp_path, {32: repeat(100.0), 64: repeat(200.0), 128: repeat(195.0)})
    assert rounds_of(launcher) == {32: 3, 64: 3, 128: 3}
    assert figures_of(chosen.reasons, "confirmed") == [{"rounds": 3, "configurations": 3}]


def test_a_gain_that_noise_hides_takes_more_rounds_and_what_is_behind_takes_no_part(tmp_path: Path) -> None:
    launcher, sure, chosen = confirmed(
        tmp_path, {32: repeat(100.0), 64: cycle([95.0, 120.0, 110.0]), 128: cycle([60.0, 61.0])}
    )
    rounds = rounds_of(launcher)
    assert rounds[32] == rounds[64] > 6
    assert rounds[128] == 3
    assert {one.number: len(one.rounds) for one in sure.confirmations} == {
        one.number: rounds[one.config.micro_batch_size] for one in sure.confirmations
    }
    assert chosen.config.micro_batch_size == 64


def test_rounds_end_once_nobody_is_likely_to_be_worth_a_change(tmp_path: Path) -> None:
    launcher, _, chosen = confirmed(tmp_path, {32: repeat(100.0), 64: cycle([100.2, 100.9, 99.6]), 128: repeat(90.0)})
    assert rounds_of(launcher)[64] < 28
    assert (chosen.number, chosen.verdict) == (0, "already_best")
    (reason,) = figures_of(chosen.reasons, "nothing_beats_baseline")
    assert reason["leaves_out_larger"]
    assert chosen.larger_batch is not None
    assert chosen.larger_batch.over_same_batch is not None
    assert 1 < chosen.larger_batch.over_same_batch.high < 1.5


def test_what_has_failed_is_not_run_again(tmp_path: Path) -> None:
    fails_later = chain([195.0], repeat(-195.0))
    launcher, _, chosen = confirmed(tmp_path, {32: repeat(100.0), 64: repeat(200.0), 128: fails_later})
    assert rounds_of(launcher) == {32: 3, 64: 3, 128: 2}
    assert (chosen.config.micro_batch_size, chosen.verdict) == (64, "faster")


def test_a_baseline_that_nothing_challenges_any_more_is_not_run_again(tmp_path: Path) -> None:
    launcher, _, chosen = confirmed(tmp_path, {32: repeat(100.0), 64: repeat(-200.0), 128: repeat(-195.0)})
    assert rounds_of(launcher) == {32: 1, 64: 1, 128: 1}
    assert (chosen.number, chosen.verdict) == (0, "already_best")


def test_the_believed_best_is_recommended_though_another_seemed_faster_once(tmp_path: Path) -> None:
    launcher, _, chosen = confirmed(tmp_path, {32: repeat(100.0), 64: cycle([130.0, 90.0]), 128: repeat(105.0)})
    assert rounds_of(launcher)[128] > 3
    assert chosen.measured_speedup is not None
    assert chosen.speedup is not None
    assert 1 < chosen.speedup.value <= chosen.measured_speedup.value
    assert chosen.gain_probability is not None
    assert 0.5 < chosen.gain_probability <= 1


def test_an_interruption_of_a_further_round_keeps_what_the_last_look_saw(tmp_path: Path) -> None:
    def until_interrupted() -> Iterator[float]:
        yield from [101.0, 118.0, 108.0]
        raise KeyboardInterrupt

    script = {32: repeat(100.0), 64: until_interrupted(), 128: repeat(90.0)}
    launcher, search = searched(tmp_path)
    launcher.script = script
    finals = finals_of(search)
    with pytest.raises(KeyboardInterrupt):
        finals.run()
    sure = finals.outcome()
    assert {len(one.rounds) for one in sure.confirmations} == {3}
    chosen = select(search.outcome(), sure)
    assert chosen is not None
    assert chosen.number == 0, "three rounds do not prove that the larger batch is faster"
    assert chosen.larger_batch is not None
    assert not chosen.larger_batch.is_faster


def test_the_plainest_of_those_that_count_as_equal_is_a_finalist_however_many_seem_faster(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        luck = 0.2 * config.pin_memory + 0.3 * config.compile + 0.1 * (config.pin_memory and config.compile)
        return FakeTrial(
            samples_per_s=(100.0 if config.micro_batch_size == 32 else 200.0) + luck, peak_memory_bytes=GIB
        )

    switches: dict[str, Any] = {"pin_memory": [False, True], "compile": [False, True]}
    space: dict[str, Any] = {"amp_dtype": "float32", "num_workers": 0, "grad_accum_steps": 1}
    search = make_search(
        tmp_path,
        FakeLauncher(cost, noise=1e-4),
        method="grid",
        n_trials=None,
        micro_batch_size=[32, 64],
        **space,
        **switches,
    )
    search.run()
    _, chosen = searches.confirmed(search)
    assert chosen.config.micro_batch_size == 64
    assert (chosen.config.pin_memory, chosen.config.compile) == (False, False)


def test_slow_starts_leave_finalists_out_and_that_is_said(tmp_path: Path) -> None:
    launcher, search = searched(tmp_path, startup_s=12.0)
    launcher.script = {batch: repeat(100.0) for batch in _BATCHES}
    sure, _ = searches.confirmed(search)
    assert set(rounds_of(launcher).values()) == {3}
    ran = {job.config.micro_batch_size for job in launcher.jobs if job.kind == "trial"}
    (left_out,) = (one for one in search.study.records if one.config.micro_batch_size not in ran)
    assert left_out.number not in {0, _fastest(search)}
    assert figures_of(sure.notes, "finalist_left_out") == [{"trial": left_out.number}]


def test_a_finalist_that_fails_when_it_is_measured_again_is_noted_with_the_reason(tmp_path: Path) -> None:
    space: dict[str, Any] = {"micro_batch_size": [32, 64], "amp_dtype": "float32", "num_workers": 0}
    launcher = FailingLauncher(
        lambda config: FakeTrial(samples_per_s=float(config.micro_batch_size), peak_memory_bytes=GIB)
    )
    search = make_search(tmp_path, launcher, method="grid", n_trials=None, grad_accum_steps=1, **space)
    search.run()
    best = search.best
    assert best is not None
    launcher.failures = {"trial": TrialResult(outcome="crashed", reason="RuntimeError: later", log="ignored")}
    sure = finals_of(search).run()
    told = figures_of(sure.notes, "finalist_failed")
    assert {0, best.number} <= {one["trial"] for one in told}
    assert {(one["outcome"], one["reason"]) for one in told} == {("crashed", "RuntimeError: later")}
    assert all(one["log"] for one in told)


@pytest.mark.parametrize("startup_s", [0.1, 3.0, 12.0, 60.0])
@pytest.mark.parametrize("fits", [True, False])
def test_three_rounds_take_what_is_planned_or_are_two_configurations_in_short_windows(
    tmp_path: Path, startup_s: float, fits: bool
) -> None:
    rates = {batch: repeat(rate) for batch, rate in zip(_BATCHES, (100.0, 200.0, 195.0), strict=True)}
    launcher, search = searched(tmp_path, startup_s, baseline_fits=fits)
    launcher.script = rates
    searches.confirmed(search)
    jobs = [job for job in launcher.jobs if job.kind == "trial"]
    starts_s = {one.config.micro_batch_size: overhead_s(one) for one in search.study.records if one.is_feasible}
    (window_s,) = {job.window.max_s for job in jobs}
    assert 1.0 <= window_s <= 8.0
    assert fits == (32 in rounds_of(launcher))
    assert 64 in rounds_of(launcher)
    taken_s = sum(starts_s[job.config.micro_batch_size] + window_s for job in jobs)
    fewest = (len(rounds_of(launcher)), max(rounds_of(launcher).values())) == (2, 3)
    assert taken_s <= UNHURRIED_CONFIRMATION_S or fewest


def _fastest(search: Search) -> int:
    assert search.best is not None
    return search.best.number
