"""Other searches on the machine are told, with whose they are; this one's own workers are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autotune.launch.local import LocalLauncher
from autotune.launch.machine import Neighbours

SEARCH = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-P", "-m", "autotune.worker", "serve", "7"], stdin=subprocess.PIPE)
print("runs", flush=True)
sys.stdin.read()
worker.communicate()
"""

DETACH = "import os, sys; os.fork() and os._exit(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is no child of this one, with a worker whose command line is that of autotune's."""
    package = tmp_path / "autotune" / "worker"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text("import sys; sys.stdin.read()")
    (tmp_path / "search.py").write_text(SEARCH)
    begin = [sys.executable, "-c", DETACH, str(tmp_path / "search.py"), "--token", "abc"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        begin, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        yield process


def of_strangers(notes: Neighbours, folder: Path) -> list[dict[str, object]]:
    return [
        dict(found.figures) for found in notes.new() if str(folder) in str(found.figures["command"])
    ]


def test_another_search_is_told_once_with_its_process_its_user_and_its_command(
    stranger: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.launch.machine._LONGEST", 10_000)
    monkeypatch.setattr(
        "autotune.launch.machine._MOST_NOTED", 1_000
    )  # others' searches run here, too
    assert stranger.poll() is None or stranger.returncode == 0
    neighbours = Neighbours()
    (found,) = of_strangers(neighbours, tmp_path)
    assert isinstance(found["pid"], int)
    assert found["user"] == psutil.Process().username()
    assert str(found["command"]).endswith("--token '***'")
    assert of_strangers(neighbours, tmp_path) == []


def test_a_searchs_own_server_is_no_neighbour(fork_server: LocalLauncher) -> None:
    assert fork_server._server is not None
    assert os.getpid() not in {found.figures["pid"] for found in Neighbours().new()}
