"""Fix the settings of a script that can't be changed from outside, and refuse them in a space."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import Choices, Domain, ScriptFacts, SearchSpace, SettingValue
from autotune.space.ranges import within_reach
from tests.factories import make_environment, make_script

CPU = make_environment(native_amp_dtypes=("float32", "bfloat16"))
GPU = make_environment()
PLAIN = sorted(name for name in SearchSpace.model_fields if name != "ddp")
"""Settings that a space may have, apart from those of DDP."""


def reached(script: ScriptFacts, environment: Any = GPU, **space: Any) -> Mapping[str, Domain]:
    """Return the user's part of the space, which must be possible."""
    found = within_reach(SearchSpace.model_validate(space).given(), script, environment)
    assert not isinstance(found, str), found
    return found


def refused(script: ScriptFacts, **space: Any) -> str:
    """Return why the user's part of the space can't be searched."""
    found = within_reach(SearchSpace.model_validate(space).given(), script, GPU)
    assert isinstance(found, str)
    return found


def fixed(value: SettingValue) -> Choices:
    return Choices(values=(value,))


@given(st.sets(st.sampled_from(PLAIN)))
def test_out_of_reach_is_fixed(names: set[str]) -> None:
    script = make_script(reached=tuple(sorted(names)))
    found = reached(script)
    own = script.observed.model_dump()
    out_of_reach = [name for name in PLAIN if name not in names]
    assert {name: found[name] for name in out_of_reach} == {
        name: fixed(own[name]) for name in out_of_reach
    }
    assert set(found) - {"amp_dtype"} == set(out_of_reach) - {"amp_dtype"}
    assert list(found) == sorted(found)


@given(
    st.sets(st.sampled_from(PLAIN)),
    st.sampled_from(["num_workers", "micro_batch_size", "grad_accum_steps"]),
)
def test_out_of_reach_is_refused(names: set[str], asked: str) -> None:
    space = SearchSpace.model_validate({asked: [2, 4]}).given()
    found = within_reach(space, make_script(reached=tuple(names)), GPU)
    assert isinstance(found, str) == (asked not in names)
    if not isinstance(found, str):
        assert found[asked] == space[asked]


def test_refusal_names_the_setting() -> None:
    assert "{grad_accum_steps}" in refused(make_script(), grad_accum_steps=[1, 2])
    assert re.search(r"^space\.compile .*True.*False", refused(make_script(), compile=[True]))


def test_scripts_own_value_is_allowed() -> None:
    assert reached(make_script(), grad_accum_steps=[1])["grad_accum_steps"] == fixed(1)


@pytest.mark.parametrize(
    ("environment", "dtypes"),
    [(CPU, ("float32", "bfloat16")), (GPU, ("float32", "tf32", "bfloat16"))],
)
def test_precisions_without_float16(environment: Any, dtypes: tuple[str, ...]) -> None:
    assert reached(make_script(), environment)["amp_dtype"] == Choices(values=dtypes)


def test_float16_needs_the_scripts_scaler() -> None:
    asked = {"amp_dtype": ["float32", "float16"]}
    assert re.search(r"^space\.amp_dtype .*float16", refused(make_script(), **asked))
    placed = make_script(placeholders=("amp_dtype",))
    assert reached(placed, **asked)["amp_dtype"] == Choices(values=("float32", "float16"))
    own = make_script(observed={"amp_dtype": "float16"}, reached=())
    assert reached(own, amp_dtype=["float16"])["amp_dtype"] == fixed("float16")


def test_ddp_settings_without_ddp_are_fixed() -> None:
    group: dict[str, Any] = {"strategy": "ddp", "world_size": 2, "ddp": {"static_graph": True}}
    script = make_script(observed=group, reached=("ddp.bucket_cap_mb", "num_workers"))
    found = reached(script)
    assert found["ddp.static_graph"] == fixed(value=True)
    assert "ddp.bucket_cap_mb" not in found
    assert not any(name.startswith("ddp.") for name in reached(make_script()))


def test_script_that_allows_tf32() -> None:
    script = make_script(observed={"amp_dtype": "tf32"}, reached=("amp_dtype",))
    assert reached(script)["amp_dtype"] == Choices(values=("tf32", "bfloat16"))
    assert "allows TF32" in refused(script, amp_dtype=["float32", "bfloat16"])
