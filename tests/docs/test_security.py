"""What the page on security promises: each of its lines has a test that exists, and some have it here."""

from __future__ import annotations

import ast
import os
import pickle
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import cli
from autotune.config.environment import Environment
from autotune.worker.device import open_device
from autotune.worker.environment import describe
from tests.factories.searches import fake_search

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
PACKAGE = ROOT / "autotune"

UNPICKLING = {
    "protocol/payload.py": "reads what write_payload of the same search has written, in a folder of its user's alone",
    "worker/build.py": "registers a module to be pickled by value; reads nothing",
}
"""Modules that import pickle or cloudpickle, and why they may."""
RUNNING = {
    "worker/script/start.py": "the script that the user's own command names",
    "worker/script/site/sitecustomize.py": "the user's own sitecustomize, which ours stands before",
}
"""Modules that run code by its text."""
READERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
TEMPORARY = {
    "launch/processes.py": "has tempfile make a name there where the usual place's is too long for a socket",
    "launch/ray_host.py": "removes what this user's killed hosts have left",
    "apply/cores.py": "knows by it the folder that torch has named by itself",
}
"""Modules that name the shared temporary folder, and why: all others have tempfile make a name at random."""


@cache
def of_package() -> dict[str, ast.Module]:
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


@cache
def called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def imported(tree: ast.AST) -> set[str]:
    names = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a simulated search."""
    return fake_search(tmp_path, n_trials=2, method="random").run_dir


def test_each_line_of_the_page_names_a_test_that_exists() -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "---" not in row][1:]
    assert len(rows) >= 15
    for row in rows:
        (place,) = re.findall(r"`(tests/[^`]+)`", row)
        file, _, name = place.partition("::")
        assert (ROOT / file).is_file(), place
        assert not name or f"def {name}(" in (ROOT / file).read_text(), place


def test_nothing_else_unpickles() -> None:
    assert {
        name for name, tree in of_package().items() if imported(tree) & READERS
    } == UNPICKLING.keys()
    assert not [name for name, tree in of_package().items() if "torch.jit.load" in called(tree)]
    safe = {"np.load": "allow_pickle=False", "torch.load": "weights_only=True"}
    for name, tree in of_package().items():
        if not called(tree) & safe.keys():
            continue
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in safe
        ]
        assert all(safe[ast.unparse(node.func)] in ast.unparse(node) for node in calls), name


def test_nothing_else_runs_code_by_its_text() -> None:
    running = {
        name
        for name, tree in of_package().items()
        if called(tree) & {"exec", "eval", "runpy.run_path"}
    }
    assert running == RUNNING.keys()


def test_no_name_in_a_shared_temporary_folder_is_predictable() -> None:
    naming = {
        name
        for name, tree in of_package().items()
        if {call.rpartition(".")[2] for call in called(tree)}
        & {"gettempdir", "mktemp", "gettempprefix"}
        or any(
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("/tmp", "/var/tmp"))
            for node in ast.walk(tree)
        )
    }
    assert naming == TEMPORARY.keys()


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.place),)


def test_a_pickle_that_lies_in_a_run_folder_is_not_read(run: Path, tmp_path: Path) -> None:
    planted = pickle.dumps(Planted(tmp_path / "made"))
    for place in (run / "payload" / "stream", run / "curves.json", run / "scratch" / "job.json"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(planted)
    again = fake_search(tmp_path, n_trials=3, method="random")
    assert len(again.trials) == 3
    assert not (tmp_path / "made").exists()
    assert not (run / "payload").exists()


def test_reading_a_run_imports_nothing_that_its_files_name(run: Path, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    summary = run / "summary.json"
    summary.write_text(summary.read_text().replace("made up", "planted:run"))
    assert "planted:run" in summary.read_text()
    with (run / "recommended.yaml").open("a") as file:
        file.write("# planted:run\n")
    program = (
        "import sys, autotune; from autotune.cli import cli; "
        f"autotune.load({str(run / 'recommended.yaml')!r}); autotune.open_run({str(run)!r}); "
        f"cli(['report', {str(run)!r}], standalone_mode=False); assert 'planted' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, check=True)
    assert CliRunner().invoke(cli, ["report", str(run)]).exit_code == 0


def test_no_secret_of_the_environment_stands_in_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "PYTHONPATH",
        "HTTPS_PROXY",
        "GLIBC_TUNABLES",
    ):
        monkeypatch.setenv(name, f"{os.environ.get(name, '')}:s3cr3t-of-{name}")
    found = describe(open_device("cpu", 0, count=1, limit_bytes=None), job_blocks=False)
    assert isinstance(found, Environment)
    assert "s3cr3t" not in found.model_dump_json()
    run_dir = fake_search(tmp_path, n_trials=2, method="random").run_dir
    texts = {path.name: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert {"environment.json", "summary.json", "study.db", "recommended.yaml"} <= texts.keys()
    assert [name for name, content in texts.items() if b"s3cr3t" in content] == []


def test_an_errors_text_can_not_steer_the_terminal(tmp_path: Path) -> None:
    config = tmp_path / "tune.yaml"
    config.write_text('"\\e]0;title\\a\\u202e": 1\n"\\x9b2J": 2\n')
    found = CliRunner().invoke(cli, ["check", str(config)])
    assert found.exit_code == 2
    assert all(char == "\n" or char.isprintable() for char in found.stderr)
