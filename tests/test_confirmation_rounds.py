"""How many rounds of which configurations a confirmation takes, where no time-out limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, cycle, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tunings import GIB, make_tuning

from autotune.confirm import confirm, recommend
from autotune.core.training_config import TrainingConfig
from autotune.launch.launcher import Exit, Launch
from autotune.testing import FakeLauncher, FakeTrial
from autotune.tune import Tuning

_BATCHES = (32, 64, 128)


class Scripted(FakeLauncher):
    """Rates by micro batch: 100, 200 and 195 in the search, and in the confirmation what a script says."""

    script: Mapping[int, Iterator[float]] = MappingProxyType({})
    startup_s = 0.1

    def cost_of(self, config: TrainingConfig) -> FakeTrial:
        """The next of the script's rates."""
        rate = next(self.script[config.micro_batch_size])
        return FakeTrial(samples_per_s=rate, peak_memory_bytes=GIB, startup_s=self.startup_s)

    def launch(self, launch: Launch) -> Exit:
        """As scripted."""
        self.cost = self.cost_of
        return FakeLauncher.launch(self, launch)


def confirmed(folder: Path, script: dict[int, Iterator[float]], startup_s: float = 0.1) -> tuple[Scripted, Tuning]:
    launcher = Scripted(noise=1e-4)
    launcher.startup_s = startup_s
    launcher.script = {batch: repeat(rate) for batch, rate in zip(_BATCHES, (100.0, 200.0, 195.0), strict=True)}
    space: dict[str, Any] = {
        "micro_batch_size": list(_BATCHES),
        "amp_dtype": "float32",
        "num_workers": 0,
        "grad_accum_steps": 1,
    }
    tuning = make_tuning(folder, launcher, method="grid", n_trials=None, pin_memory=False, channels_last=False, **space)
    tuning.search()
    launcher.jobs.clear()
    launcher.script = script
    confirm(tuning)
    return launcher, tuning


def rounds_of(launcher: FakeLauncher) -> dict[int, int]:
    return dict(Counter(job.config.micro_batch_size for job in launcher.jobs if job.kind == "trial"))


def test_a_clear_gain_takes_three_rounds(tmp_path: Path) -> None:
    launcher, tuning = confirmed(tmp_path, {32: repeat(100.0), 64: repeat(200.0), 128: repeat(195.0)})
    assert rounds_of(launcher) == {32: 3, 64: 3, 128: 3}
    chosen = recommend(tuning)
    assert chosen is not None
    assert "Confirmed in 3 rounds of 3 configurations measured in turns." in chosen.reasons


def test_a_gain_that_noise_hides_has_the_fastest_and_the_baseline_run_again(tmp_path: Path) -> None:
    launcher, tuning = confirmed(
        tmp_path, {32: repeat(100.0), 64: cycle([95.0, 120.0, 110.0]), 128: cycle([90.0, 110.0])}
    )
    assert rounds_of(launcher) == {32: 6, 64: 6, 128: 3}
    assert {one.config.micro_batch_size: len(one.rounds) for one in tuning.confirmations} == {32: 6, 64: 6, 128: 3}


def test_what_a_fourth_round_decides_takes_no_fifth(tmp_path: Path) -> None:
    rising = chain([101.0, 108.0, 108.0], repeat(108.0))
    launcher, tuning = confirmed(tmp_path, {32: repeat(100.0), 64: rising, 128: repeat(90.0)})
    assert rounds_of(launcher) == {32: 4, 64: 4, 128: 3}
    chosen = recommend(tuning)
    assert chosen is not None
    assert chosen.config.micro_batch_size == 64
    assert "Confirmed in 3 to 4 rounds of 3 configurations measured in turns." in chosen.reasons


@pytest.mark.parametrize("rates", [[99.0, 101.0, 100.0], [100.2, 101.9, 99.6]])
def test_a_gain_under_one_percent_is_not_looked_into(tmp_path: Path, rates: list[float]) -> None:
    launcher, _ = confirmed(tmp_path, {32: repeat(100.0), 64: cycle(rates), 128: repeat(90.0)})
    assert rounds_of(launcher) == {32: 3, 64: 3, 128: 3}


def test_a_machine_that_is_fast_in_the_further_rounds_helps_nobody(tmp_path: Path) -> None:
    """In absolute terms the fastest of three rounds would win over a better one that was not run again."""
    baseline = chain([100.0, 100.0, 100.0], repeat(200.0))
    noisy = chain([99.0, 118.0, 108.5], repeat(206.0))
    launcher, tuning = confirmed(tmp_path, {32: baseline, 64: noisy, 128: repeat(107.0)})
    assert rounds_of(launcher)[128] == 3
    chosen = recommend(tuning)
    assert chosen is not None
    assert chosen.config.micro_batch_size == 128


@pytest.mark.parametrize(("startup_s", "entrants", "window_s"), [(0.1, 3, 8.0), (9.0, 2, 5.0), (60.0, 2, 4.0)])
def test_slow_starts_leave_out_finalists_but_never_the_best(
    tmp_path: Path, startup_s: float, entrants: int, window_s: float
) -> None:
    launcher, tuning = confirmed(
        tmp_path, {32: repeat(100.0), 64: repeat(200.0), 128: repeat(195.0)}, startup_s=startup_s
    )
    assert rounds_of(launcher) == dict.fromkeys(_BATCHES[:entrants], 3)
    (window,) = {job.window.max_s for job in launcher.jobs if job.kind == "trial"}
    assert window == pytest.approx(window_s, rel=0.1)
    assert len(tuning.confirmations) == entrants
