"""Batches of any type are trained on in processes of their own, with loader workers, and counted by the sampler."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.config.plan import Ref
from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import Extras
from tests.launch.conftest import GENEROUS_S, SHORT, Rig

pytestmark = pytest.mark.slow
USER_CODE = Path(__file__).with_name("user_batches.py")


def named(**parts: str) -> dict[str, Ref]:
    """References to what user_batches.py holds."""
    return {part: Ref(target=f"{USER_CODE}:{name}") for part, name in parts.items()}


@pytest.mark.parametrize(
    ("collate_fn", "step"), [("joined", "graph_step"), ("hidden", "hidden_step")]
)
def test_a_batch_of_the_users_own_type_is_measured_in_samples(
    rig: Rig, collate_fn: str, step: str
) -> None:
    runner = rig.runner(**named(model="model", dataset="graphs", collate_fn=collate_fn, step=step))
    config = TrainingConfig(micro_batch_size=4, num_workers=2)
    extras = Extras(loader_ceiling=True, device_ceiling=True, breakdown=True, stretch_s=0.05)
    result = runner.run(config, name="trial", deadline_s=GENEROUS_S, window=SHORT, extras=extras)
    assert result.outcome == "ok", result.reason
    found = result.measurement
    assert found is not None
    assert found.notes == ()
    assert all(block.samples == 4 * block.batches for block in found.window.blocks)
    assert found.ceilings is not None
    assert [
        side and side.samples / side.batches
        for side in (found.ceilings.loader, found.ceilings.device)
    ] == [4, 4]


def test_a_probe_finds_the_facts_of_a_batch_of_the_users_own_type(rig: Rig) -> None:
    parts = named(model="model", dataset="graphs", collate_fn="joined", step="graph_step")
    report = rig.runner(**parts).probe(TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S)
    assert report.result.outcome == "ok", report.result.reason
    assert report.facts is not None
