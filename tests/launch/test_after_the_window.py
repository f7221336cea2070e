"""What a window has measured survives whatever the user's code does to the process afterwards."""

from __future__ import annotations

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import Extras
from autotune.records.measurement import Measurement
from tests.launch.conftest import GENEROUS_S, SHORT, Rig

EXTRAS = Extras(loader_ceiling=True, device_ceiling=True, breakdown=True, stretch_s=0.05)


def measured(rig: Rig, dataset: str = "pairs", deadline_s: float = GENEROUS_S) -> Measurement:
    """A trial with everything that follows its window, whose items are made in a worker until then."""
    runner = rig.runner(dataset=dataset)
    config = TrainingConfig(micro_batch_size=4, num_workers=1)
    result = runner.run(config, name="trial", deadline_s=deadline_s, window=SHORT, extras=EXTRAS)
    assert result.outcome == "ok", result.reason
    assert result.measurement is not None
    return result.measurement


def test_a_trial_measures_what_follows_its_window(rig: Rig) -> None:
    found = measured(rig)
    assert found.notes == ()
    assert found.loader_ceiling is not None
    assert found.device_ceiling is not None
    assert found.breakdown is not None
    assert found.loader_costs is not None
    rig.assert_next_trial_works()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "deadline_s"), [("killing_its_reader", GENEROUS_S), ("hanging_its_reader", 5.0)]
)
def test_a_process_that_ends_or_hangs_after_the_window_has_measured_what_it_had(
    rig: Rig, dataset: str, deadline_s: float
) -> None:
    found = measured(rig, dataset, deadline_s)
    assert found.samples_per_s > 0
    assert found.loader_costs is None
    assert [str(note.figures["stages"]).endswith("'item_costs']") for note in found.notes] == [True]
    rig.assert_next_trial_works()
