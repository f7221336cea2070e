"""Stacks are sampled by a program that may be missing, forbidden, stuck, or write too much; training goes on."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.messages import stacks as messages
from autotune.protocol.attach import ATTACH_VARIABLE, workers_unwatched
from autotune.records.stacks import Stacks
from autotune.worker.script import reading, stacks
from autotune.worker.script.stacks import Sampling, find_program

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a program in place of py-spy, of which the Python code is given."""

    def install(code: str) -> None:
        program = tmp_path / "py-spy"
        program.write_text(f"#!{sys.executable} -S\nimport os, signal, sys, time\n{code}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(stacks, "find_program", lambda: str(program))

    return install


def sampled(folder: Path) -> Stacks | str:
    """Sample until the program has ended, or has made the file "ready"."""
    sampling = Sampling.start(folder, 1.0)
    process = sampling._process
    assert process is not None
    while process.poll() is None and not (folder / "ready").exists():
        time.sleep(0.01)
    return sampling.finish()


READY = "open(os.path.join(os.path.dirname(sys.argv[-1]), 'ready'), 'w').close()"


def test_the_program_is_found_without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_program()


def test_a_missing_program_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_program", lambda: None)
    assert Sampling.start(tmp_path, 1.0).finish() == str(messages.sampling_not_installed())


def test_a_folder_that_is_gone_is_a_reason(tmp_path: Path) -> None:
    reason = Sampling.start(tmp_path / "gone", 1.0).finish()
    assert isinstance(reason, str)
    assert "FileNotFoundError" in reason


def test_a_script_that_replaced_popen_is_a_reason(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no processes here")

    install("")
    monkeypatch.setattr(subprocess, "Popen", refuse)
    reason = Sampling.start(tmp_path, 1.0).finish()
    assert isinstance(reason, str)
    assert "RuntimeError" in reason


def test_a_program_of_another_machine_is_a_reason(tmp_path: Path, install: Install) -> None:
    install("")
    (tmp_path / "py-spy").write_bytes(b"\x7fELF for another machine")
    reason = sampled(tmp_path)
    assert isinstance(reason, str)
    assert "Exec format error" in reason


@pytest.mark.parametrize(
    ("scope", "reason"), [("0", "system"), ("1", "system"), ("2", "yama"), (None, "system")]
)
def test_a_system_that_forbids_it_is_a_reason(
    scope: str | None,
    reason: str,
    tmp_path: Path,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yama = tmp_path / "ptrace_scope"
    if scope is not None:
        yama.write_text(f"{scope}\n")
    monkeypatch.setattr(stacks, "_YAMA", yama)
    install("sys.exit('Permission Denied: Try running again with elevated permissions')")
    expected = messages.sampling_forbidden("yama" if reason == "yama" else "system")
    assert sampled(tmp_path) == str(expected)


def test_a_program_that_fails_is_a_reason(tmp_path: Path, install: Install) -> None:
    install(
        "print('one', flush=True); print('Error: unsupported \\x1bversion', file=sys.stderr); sys.exit(3)"
    )
    assert sampled(tmp_path) == str(messages.sampling_failed(3, "Error: unsupported version"))


def test_a_program_that_dies_is_a_reason(tmp_path: Path, install: Install) -> None:
    install("os.kill(os.getpid(), signal.SIGKILL)")
    assert sampled(tmp_path) == str(messages.sampling_failed(-signal.SIGKILL, ""))


def test_a_program_that_has_not_begun_is_a_reason(tmp_path: Path, install: Install) -> None:
    install(f"signal.signal(signal.SIGINT, signal.SIG_DFL); {READY}; time.sleep(1000)")
    assert sampled(tmp_path) == str(messages.sampling_not_begun())


def test_a_program_that_hangs_is_killed(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_GRACE_S", 0.2)
    install(f"signal.signal(signal.SIGINT, signal.SIG_IGN); {READY}; time.sleep(1000)")
    assert sampled(tmp_path) == str(messages.sampling_late(0.2))


@pytest.mark.parametrize("stream", ["sys.stdout", "open(sys.argv[-1], 'w')"])
def test_a_program_that_writes_without_end_is_stopped(
    stream: str, tmp_path: Path, install: Install
) -> None:
    install(f"stream = {stream}\nwhile True: stream.write('x' * 2**20)")
    assert sampled(tmp_path) == str(messages.sampling_too_large(stacks._MOST_BYTES))
    assert not {*tmp_path.iterdir()} - {tmp_path / "py-spy"}


@pytest.mark.parametrize("text", ["", "strange\n", "\\xff\\xfe 3\n"])
def test_output_without_stacks_is_a_reason(text: str, tmp_path: Path, install: Install) -> None:
    install(f"open(sys.argv[-1], 'wb').write(b{text!r})")
    assert sampled(tmp_path) == str(messages.sampling_found_nothing())


def test_no_output_is_a_reason(tmp_path: Path, install: Install) -> None:
    install("")
    assert sampled(tmp_path) == str(messages.sampling_found_nothing())


def test_the_program_does_not_attach(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTACH_VARIABLE, json.dumps({"folder": "/x"}))
    monkeypatch.setenv("PYTHONPATH", "/x")
    install("sys.exit(' '.join(sorted(os.environ)))")
    reason = sampled(tmp_path)
    assert isinstance(reason, str)
    assert "PATH" in reason
    assert "AUTOTUNE" not in reason
    assert "PYTHONPATH" not in reason


def test_the_program_ends_with_the_process(tmp_path: Path, install: Install) -> None:
    install(f"print(os.getpid(), flush=True); {READY}; time.sleep(1000)")
    code = f"""
import os, time
from pathlib import Path
from autotune.worker.script import stacks
stacks.find_program = lambda: {str(tmp_path / "py-spy")!r}
stacks.Sampling.start(Path({str(tmp_path)!r}), 1.0)
while not os.path.exists({str(tmp_path / "ready")!r}):
    time.sleep(0.01)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    program = int((tmp_path / "stacks.log").read_text())
    while _is_running(program):
        time.sleep(0.01)


def _is_running(process: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


# Permission


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes whose descendants were given the permission, in order; 0 for none."""
    found: list[int] = []

    class Library:
        def prctl(self, option: int, root: ctypes.c_ulong, *_: int) -> int:
            assert option == 0x59616D61
            found.append(root.value)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(reading, "_READING", reading._Reading(is_at_fork=True))
    return found


def test_the_permission_is_taken_back(asked: list[int], tmp_path: Path, install: Install) -> None:
    install("")
    reading.allow_reading()
    sampled(tmp_path)
    assert asked == [os.getpid(), 0]


@pytest.mark.parametrize("is_watched", [False, True])
def test_workers_may_be_read_by_the_trainers_descendants_if_watched(
    monkeypatch: pytest.MonkeyPatch, is_watched: bool
) -> None:
    given = {"folder": "/x", "started": 1.0, "is_watched": is_watched}
    monkeypatch.setenv(ATTACH_VARIABLE, json.dumps(given))
    with workers_unwatched():
        attached = json.loads(os.environ[ATTACH_VARIABLE])
    assert attached == {"folder": "/x"} | ({"sampled_by": os.getpid()} if is_watched else {})
    assert "started" in os.environ[ATTACH_VARIABLE]


# The real program


def test_a_process_that_may_not_be_read_is_a_reason(tmp_path: Path) -> None:
    code = f"""
import ctypes
from pathlib import Path
from autotune.worker.script.stacks import Sampling
ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)  # root's programs lose CAP_SYS_PTRACE
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # this process may not be read
sampling = Sampling.start(Path({str(tmp_path)!r}), 1.0)
sampling._process.wait()
print(sampling.finish())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    forbidden = {str(messages.sampling_forbidden(by)) for by in ("yama", "system")}
    assert ran.stdout.strip() in forbidden


@pytest.mark.slow
def test_training_and_its_workers_are_sampled(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from autotune.worker.script.reading import allow_reading
allow_reading()
import sampled
steps = sampled.train("fork")
next(steps)
from autotune.worker.script.stacks import Sampling
sampling = Sampling.start(Path({str(tmp_path)!r}), 4)
while sampling._process.poll() is None:
    next(steps)
stacks = sampling.finish()
print(stacks if isinstance(stacks, str) else stacks.model_dump_json())
"""
    scripts = Path(__file__).parents[2] / "scripts"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=scripts,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(scripts)])},
        capture_output=True,
        text=True,
        check=True,
    )
    if "forbids" in ran.stdout:
        pytest.skip(ran.stdout)
    found = Stacks.model_validate_json(ran.stdout)
    assert found.samples > 5
    assert found.worker_samples > 0
    assert {line.place.partition(":")[0] for line in found.main} >= {"sampled.py"}
    assert "sampled.py" in {line.place.partition(":")[0] for line in found.workers}
    assert not (tmp_path / "stacks.txt").exists()
