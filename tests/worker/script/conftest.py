"""The rig over the fork server that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.launch.local import LocalLauncher
from tests.worker.script.scripts import ScriptRig


@pytest.fixture
def rig(fork_server: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptRig:
    """A rig in a folder of its own, which is the working folder too."""
    monkeypatch.chdir(tmp_path)
    return ScriptRig(launcher=fork_server, folder=tmp_path)
