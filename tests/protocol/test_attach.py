"""What Python processes below a command are told, and which settings a script must be given at all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import TrainingConfig
from autotune.protocol.attach import (
    ATTACH_VARIABLE,
    attached_environment,
    changed_settings,
    framework_environment,
    is_own_python,
    with_own_python,
)
from tests.factories import make_script

BIN = Path(sys.executable).parent
GROUP: dict[str, Any] = {"strategy": "ddp", "world_size": 2}


def config(**changes: Any) -> TrainingConfig:
    """What the script does by itself, but for some settings."""
    return TrainingConfig.model_validate(make_script().observed.model_dump() | changes)


def test_our_folder_stands_first_on_the_path_of_modules_and_this_interpreter_on_that_of_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own/modules")
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", str(BIN)]))
    told = attached_environment({"folder": "/x", "started": 1.5})
    site, *others = told["PYTHONPATH"].split(os.pathsep)
    assert others == ["/own/modules"]
    assert [path.name for path in sorted(Path(site).glob("*.py"))] == [
        "__init__.py",
        "sitecustomize.py",
    ]
    assert told["PATH"].split(os.pathsep) == [str(BIN), "/usr/bin", str(BIN)]
    assert json.loads(told[ATTACH_VARIABLE]) == {"folder": "/x", "started": 1.5}


def test_nothing_is_put_twice_before_the_path_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join([str(BIN), "/usr/bin"]))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    told = attached_environment({})
    assert told["PATH"] == os.environ["PATH"]
    assert os.pathsep not in told["PYTHONPATH"]


@pytest.mark.parametrize(
    ("program", "is_own"),
    [
        ("python", True),
        ("python3", True),
        (sys.executable, True),
        (str(BIN / "python3"), True),
        ("/opt/other/bin/python", False),
        ("./python", False),
    ],
)
def test_an_interpreter_is_this_one_where_it_is_bare_or_lies_beside_it(
    program: str, is_own: bool
) -> None:
    assert is_own_python(program) is is_own


def test_an_environment_that_is_reached_by_a_link_is_this_one(tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to(BIN.parent)
    assert is_own_python(str(tmp_path / "env" / "bin" / "python"))
    assert not is_own_python(str(Path(os.path.realpath(sys.executable)).with_name("python")))


def test_a_bare_python_is_this_interpreter_and_programs_are_found_beside_it() -> None:
    assert with_own_python(["python", "a.py"]) == (str(BIN / "python"), "a.py")
    assert with_own_python(["python9.9", "a.py"]) == (sys.executable, "a.py")
    assert with_own_python(["/opt/python", "a.py"]) == ("/opt/python", "a.py")
    assert with_own_python(["bash", "a.sh"]) == ("bash", "a.sh")
    assert with_own_python(["no-such-program"]) == ("no-such-program",)


def test_a_program_that_only_this_environment_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert with_own_python(["torchrun", "a.py"]) == (str(BIN / "torchrun"), "a.py")


def test_the_baseline_changes_nothing() -> None:
    assert changed_settings(config(), make_script()) == frozenset()


@given(
    st.sets(st.sampled_from(["num_workers", "micro_batch_size", "amp_dtype", "channels_last"])),
    st.sets(st.sampled_from(["micro_batch_size", "amp_dtype"])),
)
def test_a_setting_is_changed_only_where_it_differs_is_within_reach_and_has_no_placeholder(
    reached: set[str], placeholders: set[str]
) -> None:
    script = make_script(reached=tuple(reached), placeholders=tuple(placeholders))
    wanted = config(num_workers=2, micro_batch_size=32, amp_dtype="bfloat16", lr=0.5)
    assert changed_settings(wanted, script) == (reached - {"channels_last"}) - placeholders


def test_arguments_of_ddp_are_changed_together() -> None:
    script = make_script(observed=GROUP, reached=("ddp.bucket_cap_mb", "ddp.static_graph"))
    wanted = TrainingConfig.model_validate(GROUP | {"ddp": {"bucket_cap_mb": 50}})
    assert changed_settings(wanted, script) == {"ddp"}
    assert changed_settings(script.observed, script) == frozenset()


@pytest.mark.parametrize(
    ("framework", "dtype", "variables"),
    [
        ("accelerate", "bfloat16", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        ("transformers", "float16", {"ACCELERATE_MIXED_PRECISION": "fp16"}),
        ("lightning", "bfloat16", {"PL_TRAINER_PRECISION": "bf16-mixed"}),
        ("lightning", "tf32", {}),
        ("accelerate", "tf32", {}),
        ("accelerate", "float32", {}),
        ("plain loop", "bfloat16", {}),
    ],
)
def test_a_framework_is_told_of_a_precision_by_its_own_variable(
    framework: str, dtype: str, variables: dict[str, str]
) -> None:
    script = make_script(framework=framework)
    assert framework_environment(config(amp_dtype=dtype), script) == variables
    out_of_reach = make_script(framework=framework, reached=())
    assert framework_environment(config(amp_dtype=dtype), out_of_reach) == {}
    assert framework_environment(config(amp_dtype=dtype), None) == {}
