"""Rules that every entry of the settings table keeps."""

from __future__ import annotations

import pytest

from autotune.config.plan import SearchSpace
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.export import TARGETS
from autotune.models.throughput_law import COSTS
from autotune.settings_table import BY_NAME, SETTINGS, Setting


def test_each_field_has_an_entry() -> None:
    assert BY_NAME.keys() - {"ddp"} == TrainingConfig().by_name.keys()
    assert (
        len(BY_NAME)
        == len(SETTINGS)
        == len(TrainingConfig.model_fields) + len(DdpConfig.model_fields)
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_an_entry_names_what_there_is(setting: Setting) -> None:
    assert setting.neutral == {**TrainingConfig().by_name, "ddp": None}[setting.name]
    assert {cost for effect in setting.effects for cost in effect.sds} <= set(COSTS)
    assert {*setting.names, *setting.unnamed, *setting.reasons} <= TARGETS.keys()
    assert setting.needs is None or setting.needs in BY_NAME
    assert (setting.tried is not None) == (
        setting.is_of_ddp or setting.name in SearchSpace.model_fields.keys() - {"ddp"}
    )


@pytest.mark.parametrize("name", TrainingConfig.model_fields)
def test_each_field_has_words(name: str) -> None:
    assert BY_NAME[BY_NAME[name].worded_by or name].words is not None


def test_items_depend_first_on_batch_and_workers() -> None:
    names = [
        setting.name for setting in SETTINGS for effect in setting.effects if "items" in effect.sds
    ]
    assert names[:2] == ["micro_batch_size", "num_workers"], (
        "the throughput model has the interaction of the first two"
    )
