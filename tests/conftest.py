"""For all tests: how they run, and what would take each of them time that it does not need.

matplotlib draws for those of the report alone; elsewhere its second a search would add up. A study begins as a copy of
an empty one, and nothing waits for the disk: no test pulls the plug. Where tests run side by side, torch has one thread
in each process, trials included: threads that wait for a core which another test holds spin meanwhile. Tests marked
quiet judge a measurement, which another program on the machine can disturb: make test-all alone runs them, one after
another. No test is repeated. Hypothesis draws the same twenty examples of a property each time; make test-all new ones.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from optuna.storages import RDBStorage

from autotune.launch.local import LocalLauncher
from autotune.report import html as page
from autotune.tuning import study
from tests import golden
from tests.nvml_stub import NvmlStub, build_libraries
from tests.processes import marked

TESTS = Path(__file__).parent
LONGEST = (
    "launch/test_ray.py",
    "api/test_end_to_end.py",
    "tuning/test_study.py",
    "worker/test_edges.py",
    "launch/test_launchers.py",
    "tuning/test_loop_slots.py",
    "tuning/test_model_proposer.py",
    "api/test_search_resume.py",
    "worker/script/test_protection.py",
    "api/test_search.py",
    "tuning/test_model_proposer_course.py",
    "api/test_search_failures.py",
    "api/test_command.py",
    "tuning/test_loop.py",
    "docs/test_security.py",
    "models/test_rate_model.py",
)
"""Files that take 15 s and more in make test, in the order in which they begin: begun last, one would leave the other
process without work. All tests of a file run in one process, which makes what they share once; by files and not by
marks of groups, which pytest-xdist 3.8 no longer sees from pytest 9.2 on (pytest-xdist's issue 1386)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update`, which writes golden files in place of comparing with them."""
    parser.addoption("--update", action="store_true", help="rewrite the golden files of reports")


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up, before torch is imported."""
    golden.is_updating = config.getoption("--update")
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # so a shell starts what runs in its background
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # the tests' own processes inherit it
    if hasattr(config, "workerinput"):  # pytest-xdist's own processes
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # No test asserts times. make test-all asks for the second profile, which looks at new examples each time.
    hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)
    hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100)
    hypothesis.settings.load_profile("quick")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector what the tests' modules hold, which lives as long as the process."""
    if hasattr(session.config, "workerinput"):
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave measurements and the benchmarks' own tests to make test-all; begin with the files that take longest."""
    for item in items:
        if item.get_closest_marker("quiet") is not None or item.path.is_relative_to(
            TESTS / "benchmarks"
        ):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        places = {TESTS / name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLauncher]:
    """Start one server for all tests: it takes seconds."""
    launcher = LocalLauncher(tmp_path_factory.mktemp("server") / "server.log")
    yield launcher
    launcher.close()
    assert not marked(launcher._token)


@pytest.fixture(scope="session")
def nvml_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build folders with a libnvidia-ml.so.1 that plays scenarios, of a driver of "today" and of an "old" one."""
    return build_libraries(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(
    nvml_libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NvmlStub:
    """Make one GPU, "GPU-0", that answers nothing yet: pynvml's real code runs over it. See tests/nvml_stub."""
    stub = NvmlStub(nvml_libraries["today"], tmp_path / "nvml.scenario")
    stub.load(monkeypatch)
    return stub


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a real disk of a size ("64k"), where that may be done here."""
    with ExitStack() as mounted:

        def mount(size: str) -> Path:
            place = tmp_path / "disk"
            place.mkdir()
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "autotune-test", str(place)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
            mounted.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)
            return place

        yield mount


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """Spare each of the fifty files that a search writes its wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(study, "_SYNCHRONOUS", "OFF")
        yield


@pytest.fixture(autouse=True, scope="session")
def _studies_begin_as_a_copy(
    _migrations_read_once: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Begin each study as a copy of the first: Optuna makes tables one by one, which takes a tenth of a search."""
    make, empty = study._sqlite, tmp_path_factory.mktemp("study") / "empty.db"

    def copied(path: Path) -> RDBStorage:
        if not empty.exists():
            make(empty).engine.dispose()
        if not path.exists() and path.parent.is_dir():
            shutil.copyfile(empty, path)
        return make(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_sqlite", copied)
        yield


@pytest.fixture(autouse=True, scope="session")
def _migrations_read_once() -> Iterator[None]:
    """Read Optuna's schema history once: for each study that is opened it would take a sixth of a search."""
    read, known = ScriptDirectory.from_config, dict[str | None, ScriptDirectory]()

    def from_config(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in known:
            known[place] = read(config)
        return known[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", from_config)
        yield


@pytest.fixture(autouse=True, scope="module")
def _drawings_for_the_reports_tests_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "report" not in request.path.parts:
            patch.setattr(
                page, "draw", lambda plot: f'<svg role="img" aria-label="{plot.title}"></svg>'
            )
        yield
