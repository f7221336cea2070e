"""benchmarks/replay/replay.py: what a search asks of a recorded surface is answered from what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.config.plan import Objective
from autotune.config.training_config import TrainingConfig
from autotune.launch.runner import TrialRunner
from autotune.models.observations import (
    adds_workers_in_vain,
    device_variations,
    loader_variations,
)
from autotune.records.ceilings import CeilingBook, loader_key
from autotune.records.result import Curves, changed_settings
from autotune.space.ranges import Basis
from autotune.space.space import ResolvedSpace, resolve
from benchmarks.replay.methods import _plan
from benchmarks.replay.replay import SURFACES, Surface, read_surface

PATHS = sorted(SURFACES.glob("*.jsonl"))


def space_of(surface: Surface) -> ResolvedSpace:
    """Return the space of a search on a surface."""
    return resolve(
        Basis(
            given=_plan(surface, 0).space.given(),
            baseline=surface.baseline,
            objective=Objective(memory_limit=surface.limit_bytes),
            facts=surface.facts,
            environment=surface.environment,
        )
    )


def measure(surface: Surface, folder: Path, variations: list[TrainingConfig]) -> Curves:
    """Return the curves that a search gets which asks for these variations."""
    folders: dict[str, Any] = dict.fromkeys(("payload", "scratch", "logs"), folder)
    runner = TrialRunner(launcher=surface.launcher(0), device="cpu", seed=0, **folders)
    report = runner.curves(surface.baseline, variations, deadline_s=60.0, stretch_s=0.2)
    assert report.curves is not None
    return report.curves


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem.split("-")[0])
def test_every_side_that_a_search_asks_for_is_answered_where_the_grid_holds_it(
    path: Path, tmp_path: Path
) -> None:
    surface = read_surface(path)
    space = space_of(surface)
    loaders = [surface.baseline, *loader_variations(space, CeilingBook())]
    devices = [surface.baseline, *device_variations(space, CeilingBook())]
    curves = measure(surface, tmp_path, [*loaders, *devices])
    answered = {loader_key(at(surface, point.changes)) for point in curves.loader}
    assert answered <= {loader_key(one) for one in loaders}
    # More workers are not measured once two points show that they add nothing
    missing = [one for one in loaders if loader_key(one) not in answered]
    for one in missing:
        names = changed_settings(one, surface.baseline)
        assert adds_workers_in_vain(curves.loader, {name: getattr(one, name) for name in names})
    assert {at(surface, point.changes) for point in curves.device} == set(devices)
    assert len({*map(loader_key, loaders)}) > 3


def at(surface: Surface, changes: dict[str, Any]) -> TrainingConfig:
    """Return the configuration of a point."""
    return TrainingConfig.model_validate({**surface.baseline.model_dump(), **changes})


def test_what_was_not_recorded_is_not_answered_by_what_is_near(tmp_path: Path) -> None:
    surface = read_surface(min(SURFACES.glob("photos-*.jsonl")))
    near = at(surface, {"num_workers": 4, "prefetch_factor": 3, "persistent_workers": True})
    assert [point.changes for point in measure(surface, tmp_path, [near]).loader] == [{}]


def test_a_change_of_the_loader_alone_asks_nothing_more_of_the_device(tmp_path: Path) -> None:
    surface = read_surface(min(SURFACES.glob("photos-*.jsonl")))
    largest = at(surface, {"num_workers": 8, "persistent_workers": True, "micro_batch_size": 128})
    curves = measure(surface, tmp_path, [largest])
    assert [point.changes.get("micro_batch_size") for point in curves.loader] == [None, 128]
    assert [point.changes for point in curves.device] == [{}]
