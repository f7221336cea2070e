"""What becomes of trials when their parent, or the server between, is interrupted or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from autotune.launch.local import LocalLauncher
from tests.launch.conftest import USER_CODE, Rig
from tests.processes import marked

PARENT = """
import sys
from pathlib import Path
from autotune.config.plan import Ref, Workload
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.protocol.payload import write_payload

here = Path.cwd()
launcher = LocalLauncher(here / "server.log" if "{kind}" == "fork server" else None)
Path("token").write_text(launcher._token)
write_payload(Workload(model=Ref(target="{code}:linear"), dataset=Ref(target="{code}:hanging_item")), here / "payload")
runner = TrialRunner(launcher=launcher, payload=here / "payload", scratch=here, logs=here, device="cpu", seed=0)
config = TrainingConfig(micro_batch_size=4, num_workers=2)
try:
    runner.run(config, name="trial", deadline_s=600, window=WindowRules())
except KeyboardInterrupt:
    launcher.close()
    Path("interrupted").touch()
"""
PATIENCE_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fork server", "fresh interpreter"])
def test_a_parent_that_is_killed_takes_server_rank_and_loader_workers_along(
    kind: str, tmp_path: Path
) -> None:
    parent, token = start_hanging_trial(kind, tmp_path)
    parent.kill()
    parent.wait()
    await_that(lambda: not marked(token))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fork server", "fresh interpreter"])
def test_an_interrupt_during_a_trial_leaves_no_process(kind: str, tmp_path: Path) -> None:
    parent, token = start_hanging_trial(kind, tmp_path)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(PATIENCE_S) == 0
    assert (tmp_path / "interrupted").exists()
    assert not marked(token)


@pytest.mark.slow
def test_a_server_that_was_killed_between_trials_is_started_anew(rig: Rig) -> None:
    rig.assert_next_trial_works()
    before = rig.server_pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    result = rig.run(settings={"num_workers": 1})
    assert (result.outcome, result.reason) == ("ok", "")
    assert not rig.left_over()
    assert rig.server_pid != before


@pytest.mark.slow
def test_a_closed_launcher_starts_again(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "server.log")
    (tmp_path / "payload").mkdir()
    rig = Rig(launcher=launcher, folder=tmp_path)
    try:
        launcher.close()
        launcher.close()
        assert not marked(launcher._token)
        rig.assert_next_trial_works()
    finally:
        launcher.close()
    assert not marked(launcher._token)


def start_hanging_trial(kind: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A parent in a process of its own, whose trial's two loader workers hang by now; and its launcher's token."""
    script = folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT).format(kind=kind, code=USER_CODE))
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    pids = folder / "pids"
    await_that(
        lambda: (
            parent.poll() is not None or (pids.exists() and len(pids.read_text().splitlines()) >= 2)
        )
    )
    assert parent.poll() is None, "the parent must still run"
    token = (folder / "token").read_text()
    assert len(marked(token)) >= 3
    return parent, token


def await_that(condition: Callable[[], bool]) -> None:
    """Wait until something holds; it fails when that takes far too long."""
    begun = monotonic()
    while not condition():
        assert monotonic() - begun < PATIENCE_S, "it did not come to pass"
        sleep(0.02)


@pytest.mark.slow
def test_a_parent_that_is_killed_while_its_server_starts_takes_it_along(tmp_path: Path) -> None:
    script = "import os, signal, sys; from pathlib import Path; from autotune.launch.local import Server\n"
    script += "server = Server(Path('log'), os.environ, sys.argv[1]); print(server.process.pid, flush=True)\n"
    script += "os.kill(os.getpid(), signal.SIGKILL)"
    command = [sys.executable, "-c", script, token := uuid.uuid4().hex]
    paths = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    await_that(lambda: not marked(token))
    assert (tmp_path / "log").read_text() == "", (
        "it was ended, and did not come to find its socket closed"
    )
