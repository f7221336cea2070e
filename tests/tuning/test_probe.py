"""What one look at the machine has a search say."""

from __future__ import annotations

import pytest

from autotune.api.setup import runner_for, temporary_folder
from autotune.note import Note, note
from autotune.records.conditions import DeviceConditions
from autotune.settings.plan import Plan
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.testing import FakeLauncher
from autotune.tuning.probe import look

NOTE = note("others_on_device", held_bytes=20 * 2**30, busy_fraction=0.9)


@pytest.mark.parametrize(
    ("conditions", "notes"),
    [
        (None, ()),
        (DeviceConditions(others_memory_bytes=0, others_busy_fraction=0.0), ()),
        (
            DeviceConditions(others_memory_bytes=20 * 2**30, others_busy_fraction=0.9),
            (NOTE,),
        ),
    ],
)
def test_others_on_the_device_are_noted_before_the_first_trial(
    conditions: DeviceConditions | None, notes: tuple[Note, ...]
) -> None:
    plan = Plan(
        name="case", workload=Workload(model=object, dataset=list), baseline=TrainingConfig(micro_batch_size=64)
    )
    with temporary_folder() as folder:
        _, space = look(plan, runner_for(plan, folder, FakeLauncher(conditions=conditions)))
    assert space.notes == notes
