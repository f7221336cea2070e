"""What a script imports is imported once in the fork server, where its forks stay usable; else that is said.

The packages are real ones, in a folder named site-packages that lies on the search path.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from autotune.config.plan import Ref
from autotune.errors import LauncherError
from autotune.launch import local
from autotune.launch.launcher import notes_of, preload_in
from autotune.launch.local import LocalLauncher
from autotune.messages.trials import not_preloaded
from autotune.protocol.channel import Channel
from autotune.protocol.messages import PreloadResult
from autotune.testing import FakeLauncher
from autotune.worker import preload as fork_watch
from autotune.worker.preload import installed_modules, preload
from tests.launch.conftest import Rig, rig_over
from tests.processes import marked

PACKAGES = {
    "harmless/__init__.py": "import os\nPID = os.getpid()\n",
    "harmless/inner.py": "",
    "raising.py": "import harmless_too\nraise SystemExit('not here')\n",
    "harmless_too.py": "",
    "printing.py": "print('x' * 2**20)\nprint('the end', end='')\n",
    "reading.py": "import os\nREAD = os.environ.get('READ_AT_IMPORT')\nos.environ['SET_AT_IMPORT'] = 'yes'\n",
    "meddling.py": (
        "import os, random, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "os.chdir('/')\nsys.path.insert(0, '/meddled')\nrandom.seed(1)\n"
    ),
    "polite.py": (
        "import os, threading\n"
        "end = threading.Event()\nthread = threading.Thread(target=end.wait)\nthread.start()\n"
        "os.register_at_fork(before=lambda: (end.set(), thread.join()))\n"
    ),
    "threading_away.py": "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    "waiting.py": "import threading\nend = threading.Event()\nthreading.Thread(target=end.wait).start()\n",
    "later.py": "",
    "chained.py": "import waiting\nimport later\n",
    "importer/__init__.py": "",
    "importer/lazily.py": "import threading_away\n",
    "starting.py": "import subprocess\nprocess = subprocess.Popen(['sleep', '600'])\n",
    "hanging.py": "import time\ntime.sleep(600)\n",
    "ending.py": "import os\nos._exit(3)\n",
    "opening.py": (
        "import os, torch\n"
        "os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, '_is_in_bad_fork', lambda: True))\n"
    ),
    "touching.py": "import os\nfile = open(os.environ['TOUCHED'])\n",
}
SCRIPT = """
import json, os, random, signal, sys
from pathlib import Path
from torch import nn

def model():
    harmless = sys.modules.get("harmless")
    Path("seen").write_text(json.dumps({
        "modules": [name for name in ORDER if name in sys.modules],
        "pid": getattr(harmless, "PID", None),
        "own": os.getpid(),
        "read": getattr(sys.modules.get("reading"), "READ", None),
        "environment": [os.environ.get("READ_AT_IMPORT"), os.environ.get("SET_AT_IMPORT")],
        "terminates": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "interrupts": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        "folder": os.getcwd(),
    }))
    return nn.Linear(4, 2)
"""
NAMES = sorted(
    name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in PACKAGES
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A folder of installed packages, and what starts launchers that find them."""

    folder: Path
    begin: Callable[..., Rig]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("preload")
    for name, text in PACKAGES.items():
        path = folder / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "script.py").write_text(f"ORDER = {NAMES!r}\n{SCRIPT}")
    launchers = list[LocalLauncher]()

    def begin(**options: Any) -> Rig:
        place = tmp_path_factory.mktemp("rig")
        launchers.append(LocalLauncher(place / "server.log", **options))
        return rig_over(launchers[-1], place)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "site-packages")
        patch.chdir(folder)
        yield Site(folder=folder, begin=begin)
        for launcher in launchers:
            launcher.close()
            assert not marked(launcher._token)


def seen_by_trial(site: Site, rig: Rig) -> dict[str, Any]:
    """What a trial that measures sees of its world."""
    result = rig.run(model=Ref(target=f"{site.folder / 'script.py'}:model"))
    assert (result.outcome, result.reason) == ("ok", "")
    assert result.measurement is not None
    assert not rig.left_over()
    return dict(json.loads((site.folder / "seen").read_text()))


def ask(rig: Rig, *names: str, **environment: str) -> None:
    assert isinstance(rig.launcher, LocalLauncher)
    rig.launcher.preload(names, environment)


@dataclass(frozen=True, kw_only=True)
class Preloaded:
    """A server that could import all that it was to, and what a trial saw then."""

    rig: Rig
    first: Mapping[str, Any]
    seen: Mapping[str, Any]
    log: bytes
    server_pid: int | None


@pytest.fixture(scope="module")
def preloaded(site: Site) -> Preloaded:
    rig = site.begin()
    first = seen_by_trial(site, rig)
    server_pid = rig.server_pid
    several = (
        "harmless",
        "harmless.inner",
        "raising",
        "printing",
        "reading",
        "meddling",
        "polite",
        "nowhere",
    )
    ask(rig, *several, READ_AT_IMPORT="yes", SET_AT_IMPORT="no")
    seen = seen_by_trial(site, rig)
    assert rig.server_pid == server_pid, "it did not have to begin anew"
    return Preloaded(rig=rig, first=first, seen=seen, log=rig.log, server_pid=server_pid)


def test_a_trial_finds_imported_what_was_preloaded_between_trials(preloaded: Preloaded) -> None:
    assert preloaded.first["modules"] == []
    expected = [
        "harmless",
        "harmless.inner",
        "harmless_too",
        "meddling",
        "polite",
        "printing",
        "reading",
    ]
    assert preloaded.seen["modules"] == expected
    assert preloaded.seen["pid"] == preloaded.server_pid != preloaded.seen["own"]
    assert notes_of(preloaded.rig.launcher) == ()


def test_what_an_import_raises_or_prints_is_in_the_servers_log_alone(preloaded: Preloaded) -> None:
    log = (preloaded.rig.folder / "server.log").read_text()
    assert "SystemExit: not here" in log
    assert "x" * 2**20 in log
    assert log.count("the end") == 1
    assert b"xxx" not in preloaded.log
    assert b"the end" not in preloaded.log


def test_variables_are_set_for_the_imports_alone_and_what_these_set_stays(
    preloaded: Preloaded,
) -> None:
    assert preloaded.seen["read"] == "yes"
    assert preloaded.seen["environment"] == [None, "yes"]


def test_handlers_and_folder_are_put_back(preloaded: Preloaded) -> None:
    assert preloaded.seen["terminates"]
    assert preloaded.seen["interrupts"]
    assert preloaded.seen["folder"] == str(Path.cwd())


@pytest.mark.slow
def test_a_server_that_is_started_anew_preloads_again(site: Site, preloaded: Preloaded) -> None:
    pid = preloaded.rig.server_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    seen = seen_by_trial(site, preloaded.rig)
    assert seen["modules"] == preloaded.seen["modules"]
    assert seen["pid"] == preloaded.rig.server_pid != pid


@pytest.mark.slow
def test_a_later_call_takes_the_place_of_the_former_though_no_server_can_be_started_by_then(
    site: Site, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launch starts it, or tells why not."""

    def refuse(*_: object, **__: object) -> None:
        raise LauncherError("no process")

    with monkeypatch.context() as patch:
        patch.setattr(local, "start_worker", refuse)
        ask(preloaded.rig, "harmless_too")
    assert preloaded.rig.server_pid is None
    assert seen_by_trial(site, preloaded.rig)["modules"] == ["harmless_too"]


@pytest.mark.slow
def test_a_server_that_may_have_taken_half_a_message_is_ended(
    site: Site, preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = preloaded.rig

    def refuse(*_: object, **__: object) -> None:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "send", refuse)
        ask(rig, "harmless")
    assert rig.server_pid is None
    assert seen_by_trial(site, rig)["modules"] == ["harmless"]


@pytest.mark.slow
def test_what_keeps_forks_from_a_device_is_found_and_left_out(site: Site) -> None:
    rig = site.begin(device="cuda")
    ask(rig, "harmless", "opening", "harmless_too")
    assert seen_by_trial(site, rig)["modules"] == ["harmless", "harmless_too"]
    assert notes_of(rig.launcher) == (
        not_preloaded(packages=["opening"], culprit="opening", reason="device"),
    )


@pytest.fixture(scope="module")
def other(site: Site) -> Rig:
    """A server for what can't be preloaded; it goes through several, each of which takes seconds to start."""
    return site.begin()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reason"), [("hanging", "hang"), ("ending", "end")])
def test_an_import_that_hangs_or_ends_the_server_is_told_and_nothing_is_preloaded(
    name: str, reason: str, site: Site, other: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(other)
    other.assert_next_trial_works()  # it is ready: the deadline begins with the preload
    if reason == "hang":
        monkeypatch.setattr(local, "_PRELOADED_WITHIN_S", 1.0)
    ask(other, "harmless", name)
    assert seen_by_trial(site, other)["modules"] == []
    expected = not_preloaded(packages=sorted(["harmless", name]), culprit=name, reason=reason)
    assert notes_of(other.launcher)[-1] == expected


@pytest.mark.slow
def test_what_starts_a_thread_is_left_out_with_all_that_imports_it(site: Site, other: Rig) -> None:
    ask(other, "importer", "importer.lazily", "threading_away", "harmless", "harmless.inner")
    assert seen_by_trial(site, other)["modules"] == ["harmless", "harmless.inner", "importer"]
    expected = not_preloaded(
        packages=["importer", "threading_away"], culprit="threading_away", reason="threads"
    )
    assert notes_of(other.launcher)[-1] == expected


def test_names_are_given_up_step_by_step() -> None:
    """Twice without what was in the way, then what the last server had come through, then none."""
    names = ("a", "b", "b.c", "bb", "d")
    fault = PreloadResult(reason="threads", culprit="b", chain=("b",), preloaded=1)
    tried = [local.Preload(names=names, environment={}, left=n) for n in (4, 3, 2, 1)]
    reduced = [LocalLauncher(None)._reduced(one, fault) for one in tried]
    left = [one and one.names for one in reduced]
    assert left == [("a", "bb", "d"), ("a", "bb", "d"), ("a",), None]


def test_a_launcher_that_can_not_preload_is_left_alone() -> None:
    preload_in(FakeLauncher(), ["harmless"], {})
    launcher = LocalLauncher(None)
    preload_in(launcher, ["harmless"], {})
    assert launcher._server is None


@pytest.fixture
def imported(site: Site) -> Iterator[set[str]]:
    """What this process had imported; what it imports of the site is forgotten afterwards."""
    before = set(sys.modules)
    yield before
    for name in set(sys.modules) - before:
        if name in NAMES:
            del sys.modules[name]


def test_modules_that_came_from_installed_packages_are_listed_in_their_order(
    site: Site, imported: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "space/inside.py",
        "tests/__init__.py",
        "pack/__init__.py",
        "pack/tests/__init__.py",
    ):
        (site.folder / "site-packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (site.folder / "site-packages" / name).touch()
    (site.folder / "of_mine.py").touch()
    monkeypatch.syspath_prepend(site.folder)
    for name in ("reading", "space.inside", "pack.tests", "of_mine", "harmless.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        __import__(name)
    monkeypatch.setitem(sys.modules, "alias", sys.modules["harmless"])
    monkeypatch.setitem(sys.modules, "odd", Odd())
    monkeypatch.delenv("SET_AT_IMPORT", raising=False)
    assert installed_modules(imported) == (
        "reading",
        "space.inside",
        "pack",
        "harmless",
        "harmless.inner",
    )


class Odd:
    """In a module's place; raises whatever is asked."""

    def __getattr__(self, name: str) -> object:
        raise ImportError(name)


def test_a_module_that_opens_a_drivers_file_is_the_culprit(
    site: Site, imported: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such file is a real device elsewhere."""
    monkeypatch.setattr(fork_watch, "_DEVICE_FILES", re.compile(r".*/of_mine\.txt"))
    (site.folder / "of_mine.txt").touch()
    own, drawn = SourceFileLoader.exec_module, random.getstate()
    touched = {"TOUCHED": str(site.folder / "of_mine.txt")}
    result = preload(["harmless", "touching", "harmless_too"], touched, lambda: ())
    assert (result.reason, result.culprit, result.chain) == ("device", "touching", ("touching",))
    assert result.preloaded == 1
    assert "harmless_too" not in sys.modules
    assert SourceFileLoader.exec_module is own
    assert "exec_module" not in vars(SourceFileLoader)
    assert random.getstate() == drawn
    assert "TOUCHED" not in os.environ
    sys.modules["touching"].file.close()


def test_after_a_fault_nothing_is_checked_any_more(site: Site, imported: set[str]) -> None:
    forks = list[int]()

    def count() -> tuple[str, ...]:
        forks.append(1)
        return ()

    result = preload(["chained"], {}, count)
    sys.modules["waiting"].end.set()
    assert "later" in sys.modules
    assert (result.reason, result.chain) == ("threads", ("chained", "waiting"))
    assert len(forks) == 2, "at first, and for the thread"


def test_a_package_that_starts_a_process_is_the_culprit(site: Site, imported: set[str]) -> None:
    result = preload(["harmless", "starting", "harmless_too"], {}, lambda: ())
    sys.modules["starting"].process.kill()
    sys.modules["starting"].process.wait()
    assert (result.reason, result.culprit, result.chain) == ("processes", "starting", ("starting",))
    assert result.preloaded == 1


def test_a_module_that_is_not_installed_here_is_passed_over(
    site: Site, imported: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.folder / "of_the_user.py").touch()
    monkeypatch.syspath_prepend(site.folder)
    result = preload(["of_the_user", "raising"], {}, lambda: ())
    assert "of_the_user" not in sys.modules
    assert (result.preloaded, result.reason) == (2, None)
