"""Python starts whatever happens to us, the sitecustomize behind ours runs, and torch is watched once it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.protocol.attach import ATTACH_VARIABLE, attached_environment
from tests.factories import make_script

OTHER_PYTHON = Path(sys.base_prefix) / "bin" / "python3"
"""An interpreter without our package, where tests run in a virtual environment."""


def started(
    code: str, told: str | None, *, folder: Path, python: str = sys.executable
) -> tuple[str, str]:
    """What a process below a command prints to both its streams; it must end well."""
    environment = {**os.environ, **attached_environment({})}
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    environment.pop(ATTACH_VARIABLE)
    if told is not None:
        environment[ATTACH_VARIABLE] = told
    command = [python, "-c", code]
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def applied() -> str:
    """What a process is told whose training runs to its end."""
    script = make_script().model_dump(mode="json")
    return json.dumps({"config": script["observed"], "script": script})


@pytest.mark.parametrize(
    "told", [None, "no JSON", "{}", '{"folder": "/no/such/folder", "started": 1}', applied()]
)
def test_next_sitecustomize_runs(tmp_path: Path, told: str | None) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.marked = (__name__, __file__)\n")
    out, _ = started("import sys; print(*sys.marked)", told, folder=tmp_path)
    assert out.split() == ["sitecustomize", str(tmp_path / "sitecustomize.py")]


def test_next_sitecustomize_may_fail(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    out, err = started("print('started')", applied(), folder=tmp_path)
    assert out == "started\n"
    assert "ZeroDivisionError" in err


@pytest.mark.skipif(
    OTHER_PYTHON.resolve() == Path(sys.prefix, "bin", "python3"), reason="there is one interpreter"
)
def test_other_interpreter_starts_and_says_so(tmp_path: Path) -> None:
    out, err = started("print('started')", applied(), folder=tmp_path, python=str(OTHER_PYTHON))
    assert out == "started\n"
    assert err.startswith("autotune: ")
    assert "ModuleNotFoundError" in err


def test_torch_is_not_imported(tmp_path: Path) -> None:
    out, err = started("import sys; print('torch' in sys.modules)", applied(), folder=tmp_path)
    assert (out, err) == ("False\n", "")


def test_loaders_are_watched_once_torch_is_imported(tmp_path: Path) -> None:
    code = "import torch.utils.data as d; print(d.DataLoader.__init__.__module__, d.DataLoader.__init__.__wrapped__)"
    out, _ = started(code, applied(), folder=tmp_path)
    assert out.startswith("torch.utils.data.dataloader <function")


@pytest.mark.slow
def test_deleted_folder_is_said(tmp_path: Path) -> None:
    code = "import torch; print(torch.ones(2).sum().item())"
    out, err = started(code, '{"folder": "/no/such/folder", "started": 1}', folder=tmp_path)
    assert out == "2.0\n"
    assert err.startswith("autotune: ")
    assert "/no/such/folder" in err
