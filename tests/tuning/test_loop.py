from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.messages.search import no_recent_gain, trials_asked_for
from autotune.models.observations import ConfiguredPoint
from autotune.models.time_estimate import overhead_s
from autotune.policy import WindowRules
from autotune.protocol.messages import Extras
from autotune.records.ceilings import CeilingBook, device_key, loader_key
from autotune.records.result import CurvePoint
from autotune.records.trial import Failure, Score, TrialRecord, TrialResult, best_of
from autotune.space.space import ResolvedSpace
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from autotune.tuning.loop import Search
from autotune.tuning.probe import with_ceilings
from autotune.tuning.proposals import largest_batch_variant
from autotune.tuning.proposer import Proposer
from autotune.tuning.study import METHODS, SearchMethod
from autotune.tuning.time_budget import Clock
from tests.factories import make_measurement, with_first
from tests.factories.searches import GIB, confirmed, figures_of, make_search


@pytest.mark.parametrize(
    ("timeout_s", "writing_s", "now_s", "left_s", "for_trials_s"),
    [
        (None, 0.0, 1000.0, None, inf),
        (100.0, 0.0, 1020.0, 80.0, 55.0),
        (100.0, 2.0, 1090.0, 8.0, 0.0),
        (100.0, 2.0, 1200.0, 0.0, 0.0),
    ],
)
def test_clock_keeps_time_to_decide_and_to_write(
    timeout_s: float | None,
    writing_s: float,
    now_s: float,
    left_s: float | None,
    for_trials_s: float,
) -> None:
    clock = Clock(timeout_s, writing_s=writing_s, started=1000.0, now=lambda: now_s)
    assert (clock.left_s, clock.left_for_trials_s) == (left_s, for_trials_s)


def test_each_ceiling_is_measured_once_and_known_to_all_trials(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    search = make_search(tmp_path, launcher, n_trials=20, method="tpe")  # without a look
    search.run()
    asked = [job for job in launcher.jobs if job.kind == "trial"]
    loaders = [loader_key(job.config) for job in asked if job.extras.loader_ceiling]
    devices = [device_key(job.config) for job in asked if job.extras.device_ceiling]
    assert len(loaders) == len(set(loaders)) == len({loader_key(job.config) for job in asked})
    assert len(devices) == len(set(devices)) < len(asked)
    for record in search.study.records:
        assert record.measurement is not None
        assert record.measurement.loader_ceiling is not None
        assert record.measurement.device_ceiling is not None


def test_after_a_look_trials_measure_their_windows_alone(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    search = make_search(tmp_path, launcher, n_trials=20)
    search.run()
    (look,) = (job for job in launcher.jobs if job.kind == "curves")
    before, later = (
        launcher.jobs[: launcher.jobs.index(look)],
        launcher.jobs[launcher.jobs.index(look) :],
    )
    assert [
        job.extras.loader_ceiling and job.extras.device_ceiling
        for job in before
        if job.kind == "trial"
    ] == [True], "the baseline"
    trials = [job for job in later if job.kind == "trial"]
    thorough = [job for job in trials if job.extras.loader_ceiling or job.extras.device_ceiling]
    assert len(trials) - sum(len(record.repeats) for record in search.study.records) == 19
    assert 0 < len(thorough) <= 3, (
        "only what may lead at the end looks at its sides again, and for longer"
    )
    assert {job.extras.stretch_s for job in thorough} == {0.5}


def test_the_baseline_alone_shows_where_its_time_goes(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher())
    search.run()
    shown = [
        record.number
        for record in search.study.records
        if record.measurement and record.measurement.breakdown
    ]
    assert shown == [0]


def test_ceilings_are_known_after_a_resume(tmp_path: Path) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return replace(analytic_cost(config), copy_ceiling=1e6)

    first = make_search(tmp_path, FakeLauncher(cost), n_trials=8, is_kept=True, method="tpe")
    first.run()
    first.study.close()
    again = make_search(tmp_path, FakeLauncher(cost), n_trials=8, is_kept=True, method="tpe")
    assert again.ceilings.ceiling_of("copy", again.space.baseline) is not None
    assert again.ceilings == first.ceilings


def test_ceiling_not_measured_is_not_tried_again() -> None:
    config, book = TrainingConfig(), CeilingBook()
    bare = TrialResult(outcome="ok", measurement=make_measurement(100.0))
    with_ceilings(bare, config, book)
    assert book.needs("loader", config), "it was not tried"
    with_ceilings(bare, config, book, asked=Extras(loader_ceiling=True))
    assert not book.needs("loader", config)


@pytest.mark.slow
def test_what_came_after_a_window_is_no_part_of_what_a_run_takes(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher())
    search.run()
    record = search.study.records[0]
    assert record.measurement is not None

    def with_after(after_s: float) -> TrialRecord:
        measurement = (
            record.measurement.model_copy(update={"after_s": after_s})
            if record.measurement
            else None
        )
        return with_first(record, wall_s=1000.0 + after_s, measurement=measurement)

    bare, longer = with_after(0.0), with_after(500.0)
    assert overhead_s(longer, 0.0) == overhead_s(bare, 0.0)


def test_ceiling_takes_a_tenth_of_the_window_within_bounds(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher())
    baseline = TrialRecord(number=0, config=search.space.baseline)
    windows = [WindowRules(max_s=max_s) for max_s in (0.1, 3.0, 20.0)]
    stretches = [search._extras_of(baseline, window).stretch_s for window in windows]
    assert stretches == pytest.approx([0.2, 0.3, 0.5])


def linear_memory(config: TrainingConfig) -> FakeTrial:
    """A gibibyte, and 16 MiB a sample; faster with every sample, but for the largest micro batches."""
    batch = config.micro_batch_size
    rate = 100.0 + batch if batch <= 512 else 10.0
    return FakeTrial(samples_per_s=rate, peak_memory_bytes=GIB + batch * 16 * 2**20)


def test_about_the_biggest_batch_that_fits_by_the_memory_model_is_run(tmp_path: Path) -> None:
    space: dict[str, Any] = {
        "micro_batch_size": {"low": 32, "high": 2048},
        "amp_dtype": "float32",
        "grad_accum_steps": 1,
    }
    limit_bytes = 14 * GIB + 2**20
    search = make_search(
        tmp_path,
        FakeLauncher(linear_memory),
        n_trials=14,
        limit_bytes=limit_bytes,
        method="tpe",
        **space,
    )
    search.run()
    _, chosen = confirmed(search)
    run = {
        record.config.micro_batch_size
        for record in search.study.records
        if record.measurement is not None
    }
    biggest = max(batch for batch in run if batch <= 832)
    assert biggest >= 0.95 * 832, "13 GiB for samples of 16 MiB"
    (largest,) = figures_of(search.notes, "largest_batch")
    assert largest["micro_batch_size"] == biggest, "the next was not run"
    assert largest["peak_bytes"] == GIB + biggest * 16 * 2**20
    assert chosen.config.micro_batch_size in run


@pytest.mark.parametrize(("limit_gib", "largest"), [(14, 512), (40, 2048)])
def test_a_batch_beyond_the_memory_model_is_not_proposed(
    tmp_path: Path, limit_gib: int, largest: int
) -> None:
    space: dict[str, Any] = {
        "micro_batch_size": [32, 64, 512, 2048],
        "amp_dtype": "float32",
        "grad_accum_steps": 1,
    }
    search = make_search(tmp_path, FakeLauncher(linear_memory), n_trials=24, method="tpe", **space)
    search.run()
    known = [record for record in search.study.records if record.config.micro_batch_size <= 64]
    assert {record.config.micro_batch_size for record in known} == {32, 64}
    objective = search.space.objective.model_copy(update={"memory_limit": limit_gib * GIB})
    params = largest_batch_variant(known[0], replace(search.space, objective=objective), known)
    assert params is not None
    assert params["micro_batch_size"] == largest


@dataclass(slots=True)
class Proposals:
    """Takes the place of a study: holds records, and keeps what is proposed; nothing waits, more can be sampled."""

    records: list[TrialRecord]
    promising: list[TrialRecord] = field(default_factory=list)
    proposed: list[dict[str, Any]] = field(default_factory=list)
    running: list[TrialRecord] = field(default_factory=list)
    has_waiting: bool = False
    method: SearchMethod = METHODS["model"]
    space: ResolvedSpace | None = None

    @property
    def ended(self) -> tuple[TrialRecord, ...]:
        """They ended in the order in which they are held."""
        return tuple(self.records)

    @property
    def best(self) -> TrialRecord | None:
        """By the scores that they hold."""
        return best_of(self.records)

    def propose(self, params: Mapping[str, Any]) -> bool:
        """Keep it, once."""
        is_new = params not in self.proposed
        self.proposed += [dict(params)] if is_new else []
        return is_new

    def ask(self, skip: object) -> TrialRecord:
        """A sample."""
        return TrialRecord(number=99, config=TrainingConfig())


def stand_in(search: Search, study: Proposals) -> None:
    """Put what is asked of a study in its place."""
    study.space = search.space
    search.time.study = study  # type: ignore[assignment]


def is_over(search: Search) -> bool:
    """Whether the search asks for no further trial."""
    search.time.slots = lambda: 100
    return search._ask() is None


def ran(number: int, score: float, **settings: Any) -> TrialRecord:
    config = TrainingConfig.model_validate({**TrainingConfig().model_dump(), **settings})
    measurement = make_measurement(score, peak_memory_bytes=GIB)
    result = TrialResult(outcome="ok", measurement=measurement, wall_s=1.0)
    return TrialRecord(
        number=number, config=config, results=(result,), score=Score(value=score, feasible=True)
    )


@pytest.mark.parametrize("n_trials", [4, None])
def test_same_batch_follows_the_best(tmp_path: Path, n_trials: int | None) -> None:
    search = make_search(
        tmp_path, FakeLauncher(), n_trials=n_trials, method="tpe", amp_dtype="float32"
    )
    # An open number of trials is near its end from the 13th on.
    records = [
        ran(number, 1.0, intra_op_threads=number or None) for number in range(1 if n_trials else 13)
    ]
    study = Proposals(records)
    stand_in(search, study)

    def proposed() -> list[tuple[int, int]]:
        assert not is_over(search)
        of_the_batch = (one for one in study.proposed if one["micro_batch_size"] == 32)
        return [(one["micro_batch_size"], one["num_workers"]) for one in of_the_batch]

    assert proposed() == [], "the baseline is the best so far"
    records.append(ran(20, 2.0, micro_batch_size=64, num_workers=2))
    assert proposed() == proposed() == [(32, 2)]
    records.append(ran(21, 3.0, micro_batch_size=64, num_workers=4))
    assert proposed() == proposed() == [(32, 2), (32, 4)]


def test_trials_that_run_count_when_the_end_is_near(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher(), n_trials=13, method="tpe", amp_dtype="float32")
    study = Proposals([ran(0, 1.0), ran(1, 2.0, micro_batch_size=64, num_workers=2)])
    stand_in(search, study)
    study.running = [TrialRecord(number=number, config=TrainingConfig()) for number in range(2, 9)]
    assert not is_over(search)
    assert study.proposed == []
    study.running.append(TrialRecord(number=9, config=TrainingConfig()))
    assert not is_over(search)
    assert study.proposed
    study.running += [
        TrialRecord(number=number, config=TrainingConfig()) for number in range(10, 13)
    ]
    assert is_over(search)
    assert search._why_none == trials_asked_for(trials=13)


def test_a_trial_that_ended_late_is_news_whatever_its_number(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher(), n_trials=None, method="tpe", amp_dtype="float32")
    others = [
        ran(number, 1.0, intra_op_threads=number or None) for number in range(20) if number != 1
    ]
    late = ran(1, 2.0, num_workers=2)
    stand_in(search, Proposals([*others, late]))
    assert not is_over(search)
    stand_in(search, Proposals([late, *others]))
    assert is_over(search)
    assert search._why_none == no_recent_gain(trials=12, is_promising=False)


def test_patience_counts_promising_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = make_search(tmp_path, FakeLauncher(), n_trials=None, amp_dtype="float32")
    monkeypatch.setattr(Proposer, "outlook", lambda *_: None)  # patience alone may end it
    search.proposer.sides = [
        ConfiguredPoint(
            side="device", config=TrainingConfig(), point=CurvePoint(changes={}, ceiling=None)
        )
    ]
    records = [ran(number, 1.0, intra_op_threads=number or None) for number in range(20)]

    def ends(records: list[TrialRecord], promising: list[TrialRecord]) -> bool:
        stand_in(search, Proposals(records, promising))
        return is_over(search)

    assert not ends(records, promising=records[1:6])
    assert not ends([*records, ran(20, 2.0, num_workers=2)], promising=records[1:7])
    assert not ends(records[:9], promising=records[1:7])
    assert ends(records, promising=records[1:7])
    assert search._why_none == no_recent_gain(trials=6, is_promising=True)
    won_early = [*records[:3], ran(20, 2.0, num_workers=2), *records[3:]]
    assert ends(won_early, promising=won_early[3:10])
    assert not ends(won_early, promising=won_early[3:9])


def test_failures_without_a_true_place_have_no_cause_in_common(tmp_path: Path) -> None:
    search = make_search(tmp_path, FakeLauncher(), n_trials=1, amp_dtype=["float32", "bfloat16"])
    search.run()
    late = Failure(signature="AcceleratorError at net.py:3", traceback="", is_asynchronous=True)
    for number in range(1, 7):
        config = TrainingConfig(amp_dtype="bfloat16", num_workers=number)
        result = TrialResult(outcome="crashed", reason="an illegal memory access", failure=late)
        record = TrialRecord(number=number, config=config, results=(result,))
        assert search.failures.learn(record, search.study) == []
    assert not search.failures.failures


def test_before_the_end_what_would_be_recommended_is_asked_for_plainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that count as equal that is the simplest, not the best: and never the baseline, which is plain."""

    def cost(config: TrainingConfig) -> FakeTrial:
        rates = {
            (16, False): 199.0,
            (64, False): 200.0,
            (64, True): 200.5,
        }  # the first is the baseline's
        rate = rates.get((config.micro_batch_size, config.pin_memory), 150.0)
        return FakeTrial(samples_per_s=rate, peak_memory_bytes=GIB)

    space: dict[str, Any] = {
        "micro_batch_size": [16, 32, 64],
        "pin_memory": [False, True],
        "grad_accum_steps": 1,
    }
    search = make_search(
        tmp_path,
        FakeLauncher(cost, noise=1e-6),
        method="grid",
        n_trials=6,
        baseline=TrainingConfig(micro_batch_size=16),
        amp_dtype="float32",
        num_workers=0,
        **space,
    )
    asked = list[TrainingConfig]()
    monkeypatch.setattr(type(search.proposer), "plainer", lambda _, config: asked.append(config))
    search.run()
    assert len(search.study.records) == 6
    assert (asked[-1].micro_batch_size, asked[-1].pin_memory) == (64, False)
