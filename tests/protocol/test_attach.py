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


def test_own_folders_come_first_on_both_paths(
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


def test_path_of_programs_is_extended_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_own_python_is_bare_or_in_the_same_folder(program: str, is_own: bool) -> None:
    assert is_own_python(program) is is_own


def test_environment_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to(BIN.parent)
    assert is_own_python(str(tmp_path / "env" / "bin" / "python"))
    assert not is_own_python(str(Path(os.path.realpath(sys.executable)).with_name("python")))


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("python", str(BIN / "python")),
        ("python9.9", sys.executable),
        ("/opt/python", "/opt/python"),
        ("no-such-program", "no-such-program"),
        ("torchrun", str(BIN / "torchrun")),  # only this environment has it
    ],
)
def test_programs_of_this_environment_are_found(
    monkeypatch: pytest.MonkeyPatch, program: str, found: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert with_own_python([program, "a.py"]) == (found, "a.py")


def test_program_on_the_path_stays() -> None:
    assert with_own_python(["bash", "a.sh"]) == ("bash", "a.sh")


def test_baseline_changes_nothing() -> None:
    assert changed_settings(config(), make_script()) == frozenset()


@given(
    st.sets(st.sampled_from(["num_workers", "micro_batch_size", "amp_dtype", "channels_last"])),
    st.sets(st.sampled_from(["micro_batch_size", "amp_dtype"])),
)
def test_changed_settings(reached: set[str], placeholders: set[str]) -> None:
    script = make_script(reached=tuple(reached), placeholders=tuple(placeholders))
    wanted = config(num_workers=2, micro_batch_size=32, amp_dtype="bfloat16", lr=0.5)
    assert changed_settings(wanted, script) == (reached - {"channels_last"}) - placeholders


def test_ddp_is_changed_as_one() -> None:
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
def test_precision_variable_of_a_framework(
    framework: str, dtype: str, variables: dict[str, str]
) -> None:
    script = make_script(framework=framework)
    assert framework_environment(config(amp_dtype=dtype), script) == variables
    out_of_reach = make_script(framework=framework, reached=())
    assert framework_environment(config(amp_dtype=dtype), out_of_reach) == {}
    assert framework_environment(config(amp_dtype=dtype), None) == {}
