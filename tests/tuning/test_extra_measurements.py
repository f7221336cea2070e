"""What a search measures of a group of devices that loses: why it does, though it is never confirmed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.diagnosis.scaling import compare_strategies
from autotune.models.evidence import assumed_variation
from autotune.records.ceilings import Ceiling, CeilingBook, device_key
from autotune.records.measurement import Ceilings, Communication
from autotune.records.trial import Score, TrialRecord, TrialResult
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost, fake_environment
from autotune.tuning.loop import Search
from autotune.tuning.probe import with_ceilings
from tests.factories import GPU, make_measurement
from tests.factories.searches import confirmed, make_search

SPACE: dict[str, Any] = {
    "strategy": ["single", "ddp"],
    "world_size": [1, 2],
    "micro_batch_size": [16, 32, 64],
    "num_workers": [2, 4],
    "amp_dtype": "float32",
    "grad_accum_steps": 1,
    "pin_memory": False,
}


def losing(config: TrainingConfig) -> FakeTrial:
    """A group of devices is slower than one device ever is."""
    trial = analytic_cost(config)
    return (
        trial
        if config.world_size == 1
        else replace(trial, samples_per_s=100.0 + config.num_workers)
    )


def searched(folder: Path, **space: Any) -> Search:
    launcher = FakeLauncher(losing)
    launcher.environment = fake_environment(device_count=2)
    search = make_search(folder, launcher, n_trials=10, **{**SPACE, **space})
    search.run()
    return search


def group_trials(search: Search) -> list[TrialRecord]:
    return [record for record in search.study.records if record.config.world_size > 1]


def test_a_group_that_loses_is_told_why(tmp_path: Path) -> None:
    search = searched(tmp_path)
    assert group_trials(search)
    _, sure = confirmed(search)
    assert all(one.config.world_size == 1 for one in sure.confirmations)
    comparison = compare_strategies(
        search.study.records, search.space.environment, assumed_variation("cuda")
    )
    assert comparison is not None
    assert comparison.fastest is not None
    assert comparison.fastest.communication is not None
    assert comparison.fastest.device_ceiling is not None


def test_every_group_is_looked_into_and_its_first_is_seen_through(tmp_path: Path) -> None:
    search = searched(tmp_path)
    launcher = search.runner.launcher
    assert isinstance(launcher, FakeLauncher)
    trials = [job for job in launcher.jobs if job.kind == "trial" and job.config.world_size == 2]
    newcomers = {device_key(job.config): job for job in reversed(trials)}.values()
    assert all(job.extras.device_ceiling for job in newcomers)
    first, *others = group_trials(search)
    assert first.measurement is not None
    assert {one.outcome for one in others} <= {"pruned"}, "they are stopped early"


@pytest.mark.parametrize("static_graph", [True, False])
def test_communication_of_a_static_graph(
    static_graph: bool,
) -> None:
    talk = Communication(step_s=0.04, step_alone_s=0.032, exchange_s=0.012, bytes_exchanged=2**25)
    told = measured(1, 150.0, DdpConfig(gradient_as_bucket_view=True), communication=talk)
    silent = measured(
        2, 160.0, DdpConfig(static_graph=static_graph, comm_hook=None if static_graph else "fp16")
    )
    comparison = compare_strategies(
        [measured(0, 100.0, None), told, silent], GPU, assumed_variation("cuda")
    )
    assert comparison is not None
    assert comparison.fastest is not None
    assert comparison.fastest.number == 2
    assert comparison.fastest.communication == (talk if static_graph else None), (
        "another hook sends other bytes"
    )


def measured(number: int, rate: float, ddp: DdpConfig | None, **more: Any) -> TrialRecord:
    """A trial that ran: of two devices, or of one where no DDP is given."""
    group = {} if ddp is None else {"strategy": "ddp", "world_size": 2, "ddp": ddp}
    result = TrialResult(outcome="ok", measurement=make_measurement(rate, **more))
    score = Score(value=1.0, feasible=True, violation=-0.5)
    return TrialRecord(
        number=number, config=TrainingConfig.model_validate(group), results=(result,), score=score
    )


def test_copies_are_measured_once_per_kind_of_memory(
    tmp_path: Path,
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return replace(analytic_cost(config), copy_ceiling=6000.0 if config.pin_memory else 2000.0)

    launcher = FakeLauncher(cost)
    space = {**SPACE, "pin_memory": [False, True], "strategy": "single", "world_size": 1}
    search = make_search(tmp_path, launcher, n_trials=8, **space)
    search.run()
    asked = [
        job.config.pin_memory
        for job in launcher.jobs
        if job.kind == "trial" and job.extras.copy_ceiling
    ]
    assert asked[0] is False, "the baseline's own"
    known = {
        (record.config.pin_memory, record.measurement.copy_ceiling)
        for record in search.study.records
        if record.measurement is not None
    }
    assert known <= {(False, 2000.0), (True, 6000.0)}
    assert (False, 2000.0) in known


def ended(rate: float, **alone: float) -> TrialResult:
    """A run that has measured sides alone."""
    sides = {
        side: Ceiling(samples_per_s=value, samples=round(value), seconds=1.0, batches=1)
        for side, value in alone.items()
    }
    rates = {f"{side}_ceiling": value for side, value in alone.items()}
    return TrialResult(
        outcome="ok", measurement=make_measurement(rate, ceilings=Ceilings(**sides), **rates)
    )


def test_a_ceiling_that_the_run_exceeds_is_evidence_and_no_ceiling() -> None:
    book, config = CeilingBook(), TrainingConfig()
    run = with_ceilings(ended(1000.0, loader=300.0, device=1200.0), config, book).measurement
    assert run is not None
    assert (run.loader_ceiling, run.device_ceiling) == (None, 1200.0)
    assert run.ceilings is not None
    assert run.ceilings.loader is not None
    assert book.needs("loader", config), "it is measured again"


def test_slowed_ceiling_replaces_no_other() -> None:
    book, config = CeilingBook(), TrainingConfig()
    with_ceilings(ended(300.0, device=5069.0), config, book)
    run = with_ceilings(ended(290.0, device=307.0), config, book).measurement
    assert run is not None
    assert run.device_ceiling == 5069.0
