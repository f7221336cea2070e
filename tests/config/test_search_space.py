"""What a user may write as a space, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from autotune.config.plan import Choices, DdpSpace, IntRange, SearchSpace
from autotune.config.training_config import LOADER_SETTINGS, DdpConfig, TrainingConfig


def test_domain_objects_are_checked() -> None:
    assert SearchSpace(num_workers=IntRange(low=1, high=2)).given() == {
        "num_workers": IntRange(low=1, high=2)
    }
    with pytest.raises(ValidationError):
        SearchSpace(num_workers=IntRange(low=-1, high=2))
    with pytest.raises(ValidationError):
        SearchSpace(amp_dtype=Choices(values=("fp8",)))


def test_repeated_choices() -> None:
    assert SearchSpace.model_validate({"num_workers": (2, 2, 0)}).given() == {
        "num_workers": Choices(values=(2, 0))
    }


@pytest.mark.parametrize(
    ("given_space", "said"),
    [
        ({"num_workers": []}, "num_workers"),
        ({"num_workers": [0, True]}, "True .*num_workers"),
        ({"num_workers": None}, "None .*num_workers"),
        ({"num_workers": {"low": 3, "high": 1}}, r"\(low=3, high=1\)"),
        ({"num_workers": {"low": 0, "high": 4, "log": True}}, "low"),
        ({"num_workers": {"low": 0}}, "high"),
        ({"num_workers": {"low": 0, "high": 4, "step": 2}}, "step"),
        ({"pin_memory": {"low": 0, "high": 1}}, "pin_memory"),
        ({"amp_dtype": ["fp8"]}, "'fp8' .*amp_dtype"),
        ({"lr": [0.1]}, "lr"),
    ],
)
def test_bad_space(given_space: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SearchSpace.model_validate(given_space)


def test_domains_compare_types() -> None:
    assert True not in Choices(values=(1, 0))
    assert 1 not in Choices(values=(True,))
    assert True not in IntRange(low=0, high=2)
    assert list(IntRange(low=2, high=4)) == [2, 3, 4]
    assert len(IntRange(low=2, high=4)) == 3


def test_ddp_settings() -> None:
    space = SearchSpace.model_validate(
        {
            "world_size": [1, 2],
            "prefetch_factor": None,
            "ddp": {"bucket_cap_mb": [None, 50], "static_graph": True},
        }
    )
    assert space.given() == {
        "ddp.bucket_cap_mb": Choices(values=(None, 50.0)),
        "ddp.static_graph": Choices(values=(True,)),
        "prefetch_factor": Choices(values=(None,)),
        "world_size": Choices(values=(1, 2)),
    }
    assert SearchSpace(ddp=None).given() == SearchSpace(ddp=DdpSpace()).given() == {}
    assert set(DdpSpace.model_fields) == set(DdpConfig.model_fields)


def test_every_setting_but_lr() -> None:
    assert set(SearchSpace.model_fields) == set(TrainingConfig.model_fields) - {"lr"}
    assert set(LOADER_SETTINGS) < set(TrainingConfig.model_fields)
