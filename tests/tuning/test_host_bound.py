"""Where the host holds the best loop: what is tried against it, when compiling pays, and what the report says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.plan import Budget, Objective, OptimizerFacts, SearchSpace
from autotune.config.training_config import TrainingConfig
from autotune.note import Note
from autotune.records.measurement import BusyReading
from autotune.space.ranges import Basis
from autotune.space.space import ResolvedSpace, compose, resolve
from autotune.testing import FakeLauncher, FakeTrial
from autotune.tuning.loop import Search
from autotune.tuning.outcomes import (
    busy_while_host_bound,
    compilation_domains,
    host_notes,
    is_host_bound,
    list_cures,
)
from tests.factories import (
    GPU,
    make_breakdown,
    make_facts,
    make_measurement,
    make_recommendation,
    make_window,
)
from tests.factories.searches import GIB, make_search

HELD = make_measurement(
    1000.0,
    window=make_window(1000.0, host_ahead_s=0.0),
    breakdown=make_breakdown(idle=0.4),
    data_wait_fraction=0.0,
)


def space_of(
    baseline: TrainingConfig | None = None, *, keeps: bool = False, **given: Any
) -> ResolvedSpace:
    return resolve(
        Basis(
            given=SearchSpace.model_validate(given).given(),
            baseline=baseline or TrainingConfig(micro_batch_size=64),
            objective=Objective(global_batch="keep" if keeps else "scale"),
            facts=make_facts(
                has_fixed_shapes=True,
                dataset_length=10**6,
                optimizer=OptimizerFacts(name="AdamW", can_fuse=True),
            ),
            environment=GPU,
        )
    )


def cures(best: TrainingConfig, space: ResolvedSpace, most: int = 10**9) -> list[TrainingConfig]:
    found = [
        compose(params, space)
        for params in list_cures(best, space, fits=lambda one: one.micro_batch_size <= most)
    ]
    assert all(isinstance(config, TrainingConfig) for config in found)
    return found  # type: ignore[return-value] # as checked


def test_cures_of_a_busy_host() -> None:
    larger, easy = cures(TrainingConfig(micro_batch_size=64), space_of())
    assert (larger.micro_batch_size, larger.pin_memory, larger.fused) == (256, True, True)
    assert (easy.micro_batch_size, easy.pin_memory, easy.fused) == (64, True, True)


def test_cure_by_less_accumulation() -> None:
    best = TrainingConfig(micro_batch_size=64, grad_accum_steps=4)
    larger, _ = cures(best, space_of(best))
    assert (larger.micro_batch_size, larger.grad_accum_steps) == (256, 1)


def test_cure_by_a_larger_global_batch() -> None:
    best = TrainingConfig(micro_batch_size=64, grad_accum_steps=4)
    larger, _ = cures(best, space_of(best, grad_accum_steps=[4, 8]))
    assert (larger.micro_batch_size, larger.grad_accum_steps) == (256, 4)


def test_a_global_batch_that_is_kept_stays() -> None:
    best = TrainingConfig(micro_batch_size=64, grad_accum_steps=4)
    assert {config.global_batch_size for config in cures(best, space_of(best, keeps=True))} == {256}


def test_a_batch_that_would_not_fit_gives_way_to_a_smaller_one() -> None:
    larger, _ = cures(TrainingConfig(micro_batch_size=64), space_of(), most=128)
    assert larger.micro_batch_size == 128


def test_graphs_are_a_cure_where_they_are_searched() -> None:
    graphs = cures(TrainingConfig(micro_batch_size=64), space_of(compile=[False, True]))[1]
    assert (graphs.compile, graphs.compile_mode, graphs.micro_batch_size) == (
        True,
        "reduce-overhead",
        64,
    )


@pytest.mark.parametrize(
    ("hours", "given", "facts", "is_worth_it"),
    [
        (None, {}, {}, True),
        (0.5, {}, {}, False),
        (None, {"compile": [False]}, {}, False),
        (None, {}, {"has_fixed_shapes": False}, False),
    ],
)
def test_compiling_is_worth_searching(
    hours: float | None, given: dict[str, Any], facts: dict[str, Any], is_worth_it: bool
) -> None:
    space = space_of(**given)
    space = replace(space, facts=space.facts.model_copy(update=facts))
    found = compilation_domains(HELD, space, Budget(training_hours=hours))
    assert bool(found) == is_worth_it


@pytest.mark.parametrize(
    ("idle", "ahead_s", "is_held"), [(0.2, 0.0, True), (0.19, 0.0, False), (0.5, 0.1, False)]
)
def test_host_bound_from_a_fifth(idle: float, ahead_s: float, is_held: bool) -> None:
    run = make_measurement(
        1000.0,
        window=make_window(1000.0, host_ahead_s=ahead_s),
        breakdown=make_breakdown(idle=idle),
    )
    assert is_host_bound(run) == is_held
    assert not is_host_bound(None)


@pytest.mark.parametrize(("waiting", "is_most"), [(0.1, True), (0.45, False)])
def test_data_bound_is_not_host_bound(waiting: float, is_most: bool) -> None:
    breakdown = make_breakdown(idle=0.25, wait=waiting)
    window = make_window(1000.0, host_ahead_s=0.0)
    readings = (BusyReading(fraction=0.5, source="NVML"),)
    run = make_measurement(
        1000.0,
        window=window,
        breakdown=breakdown,
        data_wait_fraction=waiting,
        busy_readings=readings,
    )
    assert (busy_while_host_bound(run) is not None) == is_most


def launching(config: TrainingConfig) -> FakeTrial:
    """Kernels of 10,000 samples/s, beside a host that launches 100 batches a second, 400 of them by graphs."""
    batch, has_graphs = (
        config.micro_batch_size,
        config.compile and config.compile_mode == "reduce-overhead",
    )
    kernels, host = 10_000.0, batch * (400.0 if has_graphs else 100.0)
    loader = 5_000.0 * max(1, config.num_workers)
    rate = min(kernels, host, loader)
    return FakeTrial(
        samples_per_s=rate,
        busy_fraction=rate / kernels,
        loader_ceiling=loader,
        device_ceiling=min(kernels, 1.3 * host),
        host_ceiling=1.1 * host,
        peak_memory_bytes=GIB,
    )


def launched_search(tmp_path: Path, **space: Any) -> Search:
    launcher = FakeLauncher(launching)
    launcher.facts = launcher.facts.model_copy(update={"has_fixed_shapes": True})
    given = {"num_workers": [0, 4], "micro_batch_size": [32], "amp_dtype": ["float32"], **space}
    return make_search(
        tmp_path, launcher, n_trials=None, baseline=TrainingConfig(micro_batch_size=32), **given
    )


def test_a_search_of_a_loop_that_its_host_holds_tries_graphs_and_finds_them(tmp_path: Path) -> None:
    search = launched_search(tmp_path)
    found = search.run()
    assert found.best is not None
    assert found.best.config.compile_mode == "reduce-overhead"
    assert len(search.space.domains["compile"]) == 2, (
        "they are searched since the host holds the loop"
    )


def test_what_the_user_has_listed_is_all_that_is_tried(tmp_path: Path) -> None:
    found = launched_search(tmp_path, compile=[False]).run()
    assert not any(record.config.compile for record in found.records)


def noted(search: Search, number: int) -> list[Note]:
    """The notes on a recommendation of a trial."""
    found = search.outcome()
    config = next(record.config for record in found.records if record.number == number)
    chosen = make_recommendation(number=number, config=config)
    return list(host_notes(found.records, search.ceilings, chosen))


def test_the_report_says_so_where_the_host_holds_what_is_recommended(tmp_path: Path) -> None:
    search = launched_search(tmp_path)
    best = search.run().best
    assert best is not None
    (held,) = noted(search, 0)
    assert held.code == "host_bound"
    assert held.figures["host_fraction"] == pytest.approx(1 - 0.32, abs=0.02)
    assert held.figures["launch_s"] is not None
    assert held.figures["has_compiled"] is True
    assert noted(search, best.number) == [], "graphs have cured it"
    assert list(host_notes((), search.ceilings, None)) == []


def test_a_device_that_is_always_behind_has_nothing_compiled(tmp_path: Path) -> None:
    search = launched_search(tmp_path, micro_batch_size=[128])
    found = search.run()
    assert not any(record.config.compile for record in found.records)
