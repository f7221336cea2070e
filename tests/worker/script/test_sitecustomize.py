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
    done = subprocess.run(
        [python, "-c", code],
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
    script = make_script()
    return json.dumps(
        {
            "config": script.observed.model_dump(mode="json"),
            "script": script.model_dump(mode="json"),
        }
    )


@pytest.mark.parametrize(
    "told", [None, "no JSON", "{}", '{"folder": "/no/such/folder", "started": 1}', applied()]
)
def test_the_sitecustomize_behind_ours_runs_whatever_we_are_told(
    tmp_path: Path, told: str | None
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.marked = (__name__, __file__)\n")
    out, _ = started("import sys; print(*sys.marked)", told, folder=tmp_path)
    assert out.split() == ["sitecustomize", str(tmp_path / "sitecustomize.py")]


def test_one_that_fails_keeps_python_from_starting_no_more_than_it_does_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")
    out, err = started("print('started')", applied(), folder=tmp_path)
    assert out == "started\n"
    assert "ZeroDivisionError" in err


@pytest.mark.skipif(
    OTHER_PYTHON.resolve() == Path(sys.prefix, "bin", "python3"), reason="there is one interpreter"
)
def test_an_interpreter_that_can_not_import_us_starts_and_says_so(tmp_path: Path) -> None:
    out, err = started("print('started')", applied(), folder=tmp_path, python=str(OTHER_PYTHON))
    assert out == "started\n"
    assert err.startswith("autotune: ")
    assert "ModuleNotFoundError" in err


def test_a_process_without_torch_stays_without_it(tmp_path: Path) -> None:
    out, err = started("import sys; print('torch' in sys.modules)", applied(), folder=tmp_path)
    assert (out, err) == ("False\n", "")


def test_once_torch_is_imported_its_loaders_are_watched(tmp_path: Path) -> None:
    code = "import torch.utils.data as d; print(d.DataLoader.__init__.__module__, d.DataLoader.__init__.__wrapped__)"
    out, _ = started(code, applied(), folder=tmp_path)
    assert out.startswith("torch.utils.data.dataloader <function")


@pytest.mark.slow
def test_a_folder_that_is_gone_is_said_and_torch_works(tmp_path: Path) -> None:
    code = "import torch; print(torch.ones(2).sum().item())"
    out, err = started(code, '{"folder": "/no/such/folder", "started": 1}', folder=tmp_path)
    assert out == "2.0\n"
    assert err.startswith("autotune: ")
    assert "/no/such/folder" in err
