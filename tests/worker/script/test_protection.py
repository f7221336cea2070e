"""What a trial may not do to files that existed before: what it writes is redirected, and it sees what it has written.

Whatever protects a process is global there, so that each case runs in a child: forked, or an interpreter of its own.
"""

# ruff: noqa: BLE001, PLW0108, PT012, PTH101, PTH102, PTH103, PTH104, PTH105, PTH106, PTH107, PTH108, PTH109
# ruff: noqa: PTH110, PTH113, PTH114, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208, PTH211, SIM115
# Scripts call os, and by the name that stands there when they do.

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.protocol.disk import remove_made
from autotune.worker.script.files import protection
from autotune.worker.script.files.protection import protect_files, protect_torch

OLD_NS = 1_600_000_000_000_000_000


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


def make_tree(root: Path) -> Path:
    for name, content in {"a": "one", "b": "two", "d/a": "three", "d/e/a": "four"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        os.utime(path, ns=(OLD_NS, OLD_NS))
    (root / "l").symlink_to("a")
    (root / "m").symlink_to("d")
    return root


def fingerprint(root: Path) -> dict[str, tuple[Any, ...]]:
    """All that must not change: what is there, its bytes, its permissions, times and identity."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        kept: tuple[Any, ...] = (status.st_mode, status.st_ino, status.st_uid)
        if path.is_symlink():
            kept += (path.readlink(),)
        elif path.is_file():
            kept += (path.read_bytes(), status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)
        found[str(path)] = kept
    return found


def forked(act: Callable[[], Any]) -> Any:
    """Act in a forked child; return what it returns, or raise what it raises."""
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = True, act()
        except BaseException as error:
            result = False, error
        with os.fdopen(begin, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(begin)
    with os.fdopen(end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    is_done, value = pickle.loads(data)
    if not is_done:
        raise value
    return value


def protected(act: Callable[[], Any], scratch: Path) -> Any:
    """Act in a forked child that is protected."""

    def run() -> Any:
        os.chdir(scratch.parent)
        protect_files(scratch)
        return act()

    return forked(run)


def assert_restored(tree: Path, before: dict[str, tuple[Any, ...]], scratch: Path) -> None:
    """What was there before a trial is as it was, and what the trial has made can be removed."""
    left = fingerprint(tree)
    assert {path: left.get(path) for path in before} == before
    assert remove_made(scratch) == ()
    assert fingerprint(tree) == before


Trial = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def trial(tree: Path, scratch: Path) -> Trial:
    """Act under protection; what was in the tree is left as it was, and what is new is removed."""

    def run(act: Callable[[], Any]) -> Any:
        before = fingerprint(tree)
        result = protected(act, scratch)
        assert_restored(tree, before, scratch)
        return result

    return run


def in_fresh_interpreter(code: str, scratch: Path, cwd: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    begin = (
        "from pathlib import Path; from autotune.worker.script.files.protection import *\n"
        f"protect_files(Path({str(scratch)!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# what the script sees is what it would have seen


def seen_tree(root: str) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            kept: tuple[Any, ...] = (stat.S_IFMT(status.st_mode),)
            if stat.S_ISLNK(status.st_mode):
                kept += (os.readlink(path),)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    kept += (file.read(), stat.S_IMODE(status.st_mode))
                if status.st_mtime_ns < OLD_NS + 1_000_000_000:
                    kept += (status.st_mtime_ns,)
            found[os.path.relpath(path, root)] = kept
    return found


def write(path: str, mode: str) -> None:
    with open(path, mode) as file:
        file.write("+")


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def write_by_descriptor(path: str, flags: int) -> None:
    descriptor = os.open(path, flags, 0o640)
    if flags & (os.O_WRONLY | os.O_RDWR):
        os.write(descriptor, b"*")
    os.close(descriptor)


def save(path: str) -> None:
    """An atomic write."""
    write(path + ".tmp", "w")
    os.replace(path + ".tmp", path)


def look(path: str) -> Any:
    status = os.stat(path)
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return stat.S_IFMT(status.st_mode), size, os.access(path, os.R_OK), os.path.islink(path)


def entries(path: str) -> Any:
    with os.scandir(path) as found:
        return sorted(
            (entry.name, entry.is_dir(), entry.is_symlink(), entry.is_file()) for entry in found
        )


def remove_tree(path: str) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise OSError(
            0, ""
        ) from error  # by path and by descriptor, shutil says different things of a link


def copy_tree(one: str, other: str) -> None:
    if not (os.path.realpath(other) + "/").startswith(
        os.path.realpath(one) + "/"
    ):  # shutil would not end
        shutil.copytree(one, other, symlinks=True)


ACTS: dict[str, Callable[..., Any]] = {
    "append": lambda path: write(path, "a"),
    "chmod": lambda path: os.chmod(path, 0o700) if os.path.isfile(path) else None,
    "entries": entries,
    "exclusive": lambda path: write(path, "x"),
    "list": lambda path: sorted(os.listdir(path)),
    "look": look,
    "makedirs": lambda path: os.makedirs(path, exist_ok=True),
    "mkdir": lambda path: os.mkdir(path),
    "open_creat": lambda path: write_by_descriptor(path, os.O_RDONLY | os.O_CREAT),
    "open_nofollow": lambda path: write_by_descriptor(path, os.O_WRONLY | os.O_NOFOLLOW),
    "open_truncate": lambda path: write_by_descriptor(path, os.O_RDWR | os.O_TRUNC),
    "overwrite": lambda path: write(path, "w"),
    "read": read,
    "rmdir": lambda path: os.rmdir(path),
    "rmtree": remove_tree,
    "save": save,
    "touch": lambda path: Path(path).touch(),
    "truncate": lambda path: os.truncate(path, 1),
    "unlink": lambda path: os.unlink(path),
    "update": lambda path: write(path, "r+"),
    "utime": lambda path: (
        os.utime(path, ns=(OLD_NS + 5, OLD_NS + 5)) if os.path.isfile(path) else None
    ),
}
TWO: dict[str, Callable[..., Any]] = {
    "copy": shutil.copy2,
    "copytree": copy_tree,
    "move": shutil.move,
    "rename": lambda one, other: os.rename(one, other),
    "replace": lambda one, other: os.replace(one, other),
    "symlink": lambda one, other: os.symlink(os.path.relpath(one, os.path.dirname(other)), other),
}
NAMES = [
    "a",
    "b",
    "d",
    "d/a",
    "d/e",
    "d/e/a",
    "l",
    "m",
    "m/a",
    "m/e/a",
    "n",
    "n/a",
    "d/n",
    "d/n/a",
    "d/../a",
    "d/",
    "d/e/n",
]
paths = st.sampled_from(NAMES)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(ACTS)), paths),
        st.tuples(st.sampled_from(sorted(TWO)), paths, paths),
    ),
    max_size=12,
)


def follow(root: str, taken: list[tuple[str, ...]]) -> list[Any]:
    """What a script sees step by step."""
    said: list[Any] = []
    for name, *given_paths in taken:
        act = (ACTS | TWO)[name]
        try:
            answer = act(*(f"{root}/{path}" for path in given_paths))
            said.append((name, given_paths, None if name in TWO else answer))
        except shutil.Error:
            said.append((name, given_paths, "shutil.Error"))
        except OSError as error:
            said.append((name, given_paths, type(error), error.errno))
    return said


@given(steps)
@settings(report_multiple_bugs=False)
def test_a_script_sees_what_it_would_have_seen_and_leaves_what_was_there(
    taken: list[tuple[str, ...]],
) -> None:
    with TemporaryDirectory() as folder:
        tree, model, scratch = (
            make_tree(Path(folder, "tree")),
            make_tree(Path(folder, "model")),
            Path(folder, "scratch"),
        )
        before = fingerprint(tree)

        def act() -> Any:
            said = follow(str(tree), taken)
            return said, seen_tree(str(tree)), forked(lambda: seen_tree(str(tree)))

        said, seen, seen_by_child = protected(act, scratch)
        assert said == follow(str(model), taken)
        assert seen == seen_tree(str(model))
        assert seen_by_child == seen
        assert_restored(tree, before, scratch)


# Native writers


def test_torch_files(tree: Path, trial: Trial) -> None:
    torch = pytest.importorskip("torch")
    path = tree / "model.pt"
    torch.save({"w": torch.zeros(3)}, path)

    def act() -> Any:
        protect_torch()
        torch.save({"w": torch.ones(3)}, path)
        mapped = torch.load(path, mmap=True)["w"].sum().item()
        seen = torch.load(str(path))["w"].sum().item()
        torch.save({"w": torch.ones(5)}, path, _use_new_zipfile_serialization=False)
        legacy = torch.load(path)["w"].sum().item()
        torch.save({"w": torch.ones(2)}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        torch.save({"w": torch.ones(1)}, tree / "new.pt")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), str(tree / "b"))
            loaded = torch.jit.load(str(tree / "b"))
        shared = torch.from_file(str(tree / "a"), shared=True, size=3, dtype=torch.uint8)
        shared.fill_(65)
        return seen, mapped, legacy, torch.load(path)["w"].sum().item(), loaded is not None

    assert trial(act) == (3, 3, 5, 2, True)
    assert torch.load(path)["w"].sum() == 0


def test_safetensors(tree: Path, trial: Trial) -> None:
    """Also new ones, over which safetensors renames another file."""
    pytest.importorskip("safetensors.torch")
    import torch

    def act() -> Any:
        from safetensors import safe_open  # type: ignore[import-not-found, unused-ignore]
        from safetensors.torch import load_file, save_file

        (tree / "adapter").mkdir()
        for name in ("a", "new", "adapter/new", "adapter/new"):
            save_file({"w": torch.ones(3)}, tree / name)
        with safe_open(tree / "a", framework="pt") as file:
            opened = file.get_tensor("w").sum().item()
        return load_file(tree / "a")["w"].sum().item(), opened, (tree / "new").exists()

    assert trial(act) == (3, 3, True)


def test_pandas_and_tokenizers(tree: Path, trial: Trial) -> None:
    pandas, tokenizers = pytest.importorskip("pandas"), pytest.importorskip("tokenizers")
    pytest.importorskip("pyarrow")
    for name in ("d.parquet", "tokenizer.json"):
        (tree / name).write_bytes(b"mine")

    def act() -> Any:
        for end in ("", ".new"):
            pandas.DataFrame({"x": [1]}).to_parquet(tree / f"d.parquet{end}")
            tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tree / f"tokenizer.json{end}"))
            tokenizers.Tokenizer.from_file(str(tree / f"tokenizer.json{end}"))
        return pandas.read_parquet(tree / "d.parquet").x.sum()

    assert trial(act) == 1


def test_text_files_traces_and_temporary_files(tree: Path, trial: Trial) -> None:
    numpy = pytest.importorskip("numpy")
    import torch

    (tree / "out").mkdir()
    for name in ("losses.txt", "trace.json", "out/x"):
        (tree / name).write_bytes(b"1 2")

    def act() -> Any:
        shutil.rmtree(tree / "out")
        (tree / "out").mkdir()
        with tempfile.NamedTemporaryFile(dir=tree / "out"):
            numpy.savetxt(tree / "losses.txt", [3.0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.ones(2).sum()
        profile.export_chrome_trace(str(tree / "trace.json"))
        return float(numpy.loadtxt(tree / "losses.txt")), (tree / "trace.json").stat().st_size > 3

    assert trial(act) == (3.0, True)


def test_hdf5(tree: Path, trial: Trial) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tree / "old.h5", "w") as file:
        file["x"] = [1]

    def act() -> Any:
        for mode in ("a", "r+", "r"):  # an old one is changed in its copy
            with h5py.File(tree / "old.h5", mode) as file:
                if mode != "r":
                    file[mode] = [2]
                old = sorted(file)
        for name, mode in (("w", "w"), ("a", "a"), ("x", "x"), ("x", "w")):
            with h5py.File(tree / f"new-{name}.h5", mode) as file:
                file["y"] = [3]
        with pytest.raises(FileExistsError):
            h5py.File(tree / "new-x.h5", "x")
        with pytest.raises(FileNotFoundError):
            h5py.File(tree / "none.h5", "r+")
        with h5py.File("/nowhere/memory.h5", "w", driver="core", backing_store=False) as file:
            file["z"] = [4]
        return old, (tree / "new-a.h5").exists()

    assert trial(act) == (["a", "r+", "x"], True)


def test_opencv_and_parquet(tree: Path, trial: Trial) -> None:
    cv2, pyarrow = pytest.importorskip("cv2"), pytest.importorskip("pyarrow")
    parquet, numpy = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("numpy")
    (tree / "old.png").write_bytes(b"mine")
    (tree / "old.parquet").write_bytes(b"mine")
    pixels, table = numpy.zeros((4, 4, 3), dtype=numpy.uint8), pyarrow.table({"x": [1]})

    def act() -> Any:
        for name in ("old", "new"):
            assert cv2.imwrite(str(tree / f"{name}.png"), pixels)
            parquet.write_table(table, tree / f"{name}.parquet")
            assert cv2.imread(str(tree / f"{name}.png")).shape == (4, 4, 3)
            assert parquet.read_table(tree / f"{name}.parquet") == table
            assert parquet.read_metadata(tree / f"{name}.parquet").num_rows == 1
        assert not cv2.imwrite(str(tree / "no/folder.png"), pixels)
        return (tree / "new.png").exists(), (tree / "old.png").read_bytes()[1:4]

    assert trial(act) == (True, b"PNG")


def test_sqlite(tree: Path, trial: Trial) -> None:
    """A database is copied before it is opened; a new one goes with its journal."""
    import sqlite3

    def rows(connection: sqlite3.Connection) -> int:
        count: int = connection.execute("select count(*) from t").fetchone()[0]
        connection.close()
        return count

    def add(connection: sqlite3.Connection) -> None:
        with connection:
            connection.execute("create table if not exists t (x)")
            connection.execute("insert into t values (1)")
        connection.close()

    add(sqlite3.connect(tree / "db"))

    def act() -> Any:
        add(sqlite3.connect(str(tree / "db")))
        add(sqlite3.connect(f"file:{tree / 'db'}?mode=rw", uri=True))
        add(sqlite3.connect(tree / "other"))
        add(sqlite3.connect(":memory:"))
        new = sqlite3.connect(tree / "new.db")
        new.execute("pragma journal_mode=wal")
        new.execute("create table t (x)")
        read_only = sqlite3.connect(f"file:{tree / 'db'}?mode=ro", uri=True)
        return (
            rows(read_only),
            rows(sqlite3.dbapi2.connect(tree / "db")),
            (tree / "new.db-wal").exists(),
        )

    assert trial(act) == (3, 3, True)


def test_numpy_files_and_a_large_map(tree: Path, trial: Trial) -> None:
    """A map of a large file changes this process's memory only, so that it is not copied."""
    import numpy as np

    with open(tree / "large", "wb") as file:
        file.truncate(300 << 20)

    def act() -> Any:
        np.ones(2).tofile(str(tree / "a"))
        np.save(tree / "b", np.ones(3))
        large = np.memmap(tree / "large", dtype=np.uint8)
        large[0] = 1
        small = np.memmap(tree / "d/a", dtype=np.uint8, mode="r+")
        small[0] = 65
        small.flush()
        return large[0], np.fromfile(str(tree / "a")).sum(), read(str(tree / "d/a"))

    assert trial(act) == (1, 2, "Ahree")


# Several processes


def test_processes_share_what_was_changed(tree: Path, scratch: Path, trial: Trial) -> None:
    def act() -> Any:
        os.chdir(tree)
        write("a", "a")
        os.remove("b")
        os.rename("d", "moved")
        code = """
print(open('a').read(), Path('b').exists(), open('moved/a').read(), Path('d').exists())
open('from_child', 'w').write('x'); open('moved/a', 'a').write('+')
"""
        said = in_fresh_interpreter(code, scratch, tree).split()
        return said, read("from_child"), read("moved/a"), forked(lambda: read("moved/a"))

    assert trial(act) == (["one+", "False", "three", "False"], "x", "three+", "three+")


def test_concurrent_writes_are_all_kept(tree: Path, trial: Trial) -> None:
    def act() -> Any:
        children = []
        for number in range(4):
            if (child := os.fork()) == 0:
                for step in range(25):
                    write(str(tree / "a"), "a")
                    write(str(tree / f"{number}-{step}"), "w")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        return read(str(tree / "a")), len([*tree.glob("?-*")])

    assert trial(act) == ("one" + "+" * 100, 100)


# What is removed afterwards, and what stays


def test_a_users_pipe_stays(tree: Path, trial: Trial) -> None:
    os.mkfifo(tree / "pipe")

    def act() -> None:
        ((_, changes),) = protection._installed
        changes.replaced(str(tree / "pipe"))

    trial(act)


def test_bytecode_stays(tree: Path, scratch: Path) -> None:
    (tree / "mine.py").write_text("x = 1")
    in_fresh_interpreter("import mine", scratch, tree)
    assert remove_made(scratch) == ()
    assert list((tree / "__pycache__").iterdir())


def test_new_files_are_removed_where_they_end_up(tree: Path, trial: Trial) -> None:
    def act() -> bool:
        os.makedirs(tree / "runs/one")
        write(str(tree / "runs/one/log"), "w")
        os.mkdir(tree / "empty")
        write(str(tree / "gone"), "w")
        os.remove(tree / "gone")
        write(str(tree / "part"), "w")
        write(str(tree / "runs/part"), "w")
        os.rename(tree / "part", tree / "whole")
        os.replace(tree / "runs/part", tree / "runs/one/log")
        os.rename(tree / "runs", tree / "done")
        write(str(tree / "done/more"), "w")
        os.symlink("d", tree / "done/link")
        subprocess.run(["cp", tree / "a", tree / "done/one/copied"], check=True)
        write("/dev/shm/autotune-test", "w")
        write("/dev/null", "w")
        return (tree / "done/one/copied").is_file()

    assert trial(act)
    assert not Path("/dev/shm/autotune-test").exists()
    assert Path("/dev/null").exists()


def test_others_files_stay_and_are_named(tree: Path, scratch: Path) -> None:
    def act() -> None:
        os.mkdir(tree / "runs")
        os.mkdir(tree / "runs/ours")
        write(str(tree / "runs/ours/log"), "w")
        write(str(tree / "last.pt"), "w")

    protected(act, scratch)
    (tree / "runs/theirs").mkdir()
    for name in ("runs/theirs/log", "other.pt"):
        (tree / name).write_text("of another training")
    (tree / "other.pt").replace(tree / "last.pt")
    assert remove_made(scratch) == (str(tree / "last.pt"), str(tree / "runs/theirs"))
    for name in ("runs/theirs/log", "last.pt"):
        assert (tree / name).read_text() == "of another training"
    assert not (tree / "runs/ours").exists()


def test_caches_and_downloads_stay(
    tree: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tree / "cache"))

    def download(url: str, root: str) -> None:
        os.makedirs(f"{root}/raw")
        write(f"{root}/raw/part", "w")
        os.rename(f"{root}/raw/part", f"{root}/raw/{url}")

    def act() -> None:
        os.mkdir(tree / "cache")
        write(str(tree / "cache/weights"), "w")
        module = ModuleType("torchvision.datasets.utils")
        module.__dict__["download_url"] = download
        sys.modules["torchvision.datasets.utils"] = module
        protection._protect("torchvision.datasets.utils")
        os.mkdir(tree / "data")
        module.__dict__["download_url"]("images", root=str(tree / "data"))
        write(str(tree / "data/log"), "w")

    protected(act, scratch)
    assert remove_made(scratch) == ()
    found = [os.listdir(tree / name) for name in ("cache", "data", "data/raw")]
    assert found == [["weights"], ["raw"], ["images"]]


def test_a_trials_own_folder_is_not_redirected(tree: Path, scratch: Path) -> None:
    def act() -> None:
        protect_files(scratch, own=[tree])
        write(str(tree / "a"), "a")
        write(str(tree / "new"), "w")

    forked(act)
    assert remove_made(scratch) == ()
    assert (tree / "a").read_text() == "one+"
    assert (tree / "new").exists()


# Unusual calls, and errors


def test_descriptors_and_bytes(tree: Path, trial: Trial) -> None:
    def act() -> Any:
        folder = os.open(tree, os.O_RDONLY)
        descriptor = os.open("a", os.O_WRONLY | os.O_APPEND, dir_fd=folder)
        os.write(descriptor, b"+")
        with open(descriptor, "ab", buffering=0) as file:
            file.write(b"-")
        os.unlink("b", dir_fd=folder)
        with open(tree / "d/a", "rb") as kept:
            os.fchmod(kept.fileno(), 0o600)
            os.utime(kept.fileno(), ns=(1, 1))
        path = os.fsencode(tree / "d/a")
        with open(path, "r+", encoding="utf-8", newline="", opener=os.open) as text:
            name = text.name
            text.write("T")
        names = sorted(os.listdir(os.fsencode(tree)))
        return read(str(tree / "a")), names, os.listdir(folder) != [], name, read(str(tree / "d/a"))

    names = [b"a", b"d", b"l", b"m"]
    assert trial(act) == ("one+-", names, True, os.fsencode(tree / "d/a"), "Three")


FAILING: list[tuple[Callable[[str], Any], int]] = [
    (lambda tree: open(f"{tree}/a", "x"), errno.EEXIST),
    (lambda tree: open(f"{tree}/d", "w"), errno.EISDIR),
    (lambda tree: open(f"{tree}/none/a", "w"), errno.ENOENT),
    (lambda tree: open(f"{tree}/a/b", "w"), errno.ENOTDIR),
    (lambda tree: os.link(f"{tree}/a", f"{tree}/b"), errno.EEXIST),
    (lambda tree: os.truncate(f"{tree}/none", 0), errno.ENOENT),
    (lambda tree: os.chmod(f"{tree}/none", 0), errno.ENOENT),
    (lambda tree: os.rename(f"{tree}/d", f"{tree}/d/e/x"), errno.EINVAL),
]


def test_errors_are_those_of_the_real_call(tree: Path, trial: Trial) -> None:
    def failing() -> list[tuple[object, ...]]:
        raised = list[tuple[object, ...]]()
        for act, _ in FAILING:
            try:
                act(str(tree))
            except OSError as error:
                raised.append((type(error), error.errno, error.filename, error.filename2))
        return raised

    real = failing()
    assert [number for _, number, *_ in real] == [number for _, number in FAILING]
    assert trial(failing) == real


def test_a_file_without_permission_is_refused(tree: Path, scratch: Path) -> None:
    (tree / "a").chmod(0o444)

    def act() -> str:
        if os.geteuid() == 0:
            os.chmod(scratch, 0o777)
            os.seteuid(65534)
        with pytest.raises(PermissionError) as raised:
            open(tree / "a", "a")
        return str(raised.value.filename)

    for folder in (tree, *tree.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o005:
            folder.chmod(folder.stat().st_mode | 0o005)
    assert protected(act, scratch) == str(tree / "a")


def test_a_hard_link_to_an_old_file_is_a_copy(tree: Path, trial: Trial) -> None:
    def act() -> str:
        os.link(tree / "a", tree / "linked")
        write(str(tree / "linked"), "a")
        return read(str(tree / "linked"))

    assert trial(act) == "one+"


def test_the_current_folder_may_be_redirected(tree: Path, trial: Trial) -> None:
    def act() -> Any:
        os.rename(tree / "d", tree / "moved")
        os.chdir(tree / "moved/e")
        write("a", "a")
        write("new", "w")
        return os.getcwd(), sorted(os.listdir()), read("../a"), read("a"), Path("new").resolve()

    place = str(tree / "moved/e")
    assert trial(act) == (place, ["a", "new"], "three", "four+", Path(place, "new"))


def test_standard_library(tree: Path, trial: Trial) -> None:
    def act() -> Any:
        import logging
        import tarfile
        import zipfile

        handler = logging.FileHandler(tree / "a", mode="w")
        handler.emit(logging.makeLogRecord({"msg": "said"}))
        handler.close()
        with zipfile.ZipFile(tree / "b", "w") as archive:
            archive.writestr("x", "y")
        with tarfile.open(tree / "d/a", "w") as tar:
            tar.add(tree / "a", arcname="a")
        with tempfile.TemporaryDirectory(dir=tree) as folder:
            write(f"{folder}/x", "w")
        names = zipfile.ZipFile(tree / "b").namelist(), tarfile.open(tree / "d/a").getnames()
        return read(str(tree / "a")), *names

    assert trial(act) == ("said\n", ["x"], ["a"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_scratch_raises_and_writes_no_file(small_disk: Path) -> None:
    tree = make_tree(small_disk / "tree")
    (tree / "large").write_bytes(b"x" * (600 << 10))
    before = fingerprint(tree)

    def error_of(change: Callable[[], Any], times: int = 1) -> int | None:
        try:
            for _ in range(times):
                change()
        except OSError as error:
            return error.errno
        return None

    def act() -> list[int | None]:
        large = str(tree / "large")
        said = [error_of(partial(write, large, mode)) for mode in ("a", "r+")]
        said.append(len(read(large)))
        with open(small_disk / "filler", "wb", buffering=0) as filler:
            with pytest.raises(OSError, match="No space"):
                while True:
                    filler.write(b"x" * 512)
            said.append(error_of(lambda: write(str(tree / "a"), "a"), 200))
            # Whether these fail depends on the room that is left.
            error_of(lambda: write(str(tree / "new"), "w"), 200)
            error_of(lambda: os.remove(tree / "b"), 200)
            error_of(lambda: os.rename(tree / "d", tree / "f"), 200)
        return said

    assert protected(act, small_disk / "scratch") == [
        errno.ENOSPC,
        errno.ENOSPC,
        600 << 10,
        errno.ENOSPC,
    ]
    left = fingerprint(tree)
    assert {path: left.get(path) for path in before} == before


def test_a_rename_across_file_systems_keeps_both_sides(
    tree: Path, small_disk: Path, trial: Trial
) -> None:
    (small_disk / "old").write_text("old")

    def act() -> Any:
        write(str(small_disk / "tmp"), "w")
        os.replace(small_disk / "tmp", small_disk / "old")
        os.mkdir(small_disk / "folder")
        write(str(small_disk / "folder/x"), "w")
        shutil.move(tree / "a", small_disk / "a")
        names = sorted(os.listdir(small_disk))
        moved = read(str(small_disk / "a")), os.path.exists(tree / "a")
        return read(str(small_disk / "old")), names, *moved

    assert trial(act) == ("+", ["a", "folder", "old"], "one", False)
    assert (small_disk / "old").read_text() == "old"


# Copies on the file system of the original, where scratch lies on another one


def stores_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".autotune-")]


@pytest.fixture
def far_tree() -> Any:
    """A tree on another file system than scratch."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(tempfile.gettempdir()).st_dev:
            pytest.skip("there is no second file system here")
        yield make_tree(Path(folder) / "tree")


def test_an_overwritten_file_is_written_to_its_own_file_system(
    far_tree: Path, scratch: Path
) -> None:
    before = fingerprint(far_tree)

    def act() -> Any:
        write(str(far_tree / "a"), "w")
        write(str(far_tree / "d/a"), "a")
        write(str(far_tree / "tmp"), "w")
        os.replace(far_tree / "tmp", far_tree / "b")
        with open(far_tree / "a", "r+b") as file:
            os.fsync(file.fileno())
            where = os.stat(file.fileno()).st_dev
        devices = {os.stat(far_tree / name).st_dev for name in ("a", "b", "d/a")}
        return where, devices, protection.files_elsewhere()

    device = far_tree.stat().st_dev
    assert protected(act, scratch) == (device, {device}, ())
    left = fingerprint(far_tree)
    assert {path: left.get(path) for path in before} == before
    (store,) = stores_in(far_tree)
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert remove_made(scratch) == ()
    assert fingerprint(far_tree) == before


def test_a_script_does_not_see_where_copies_lie(far_tree: Path, scratch: Path) -> None:
    names = sorted(os.listdir(far_tree))

    def act() -> Any:
        write(str(far_tree / "a"), "w")
        os.unlink(far_tree / "a")
        write(str(far_tree / "a"), "w")
        scanned = sorted(entry.name for entry in os.scandir(far_tree))
        walked = sorted({*next(os.walk(far_tree))[1], *next(os.walk(far_tree))[2]})
        shutil.rmtree(far_tree)
        return sorted(names), scanned, walked, os.path.exists(far_tree)

    assert protected(act, scratch) == (names, names, names, False)
    assert stores_in(far_tree)
    assert remove_made(scratch) == ()
    assert sorted(os.listdir(far_tree)) == names


def test_all_processes_of_a_trial_share_a_store(far_tree: Path, scratch: Path) -> None:
    def act() -> Any:
        write(str(far_tree / "a"), "w")
        return forked(lambda: write(str(far_tree / "b"), "a")), read(str(far_tree / "b"))

    assert protected(act, scratch)[1] == "two+"
    assert len(stores_in(far_tree)) == 1


def test_copies_are_removed_after_a_kill_amid_a_write(far_tree: Path, scratch: Path) -> None:
    before = fingerprint(far_tree)
    child = os.fork()
    if child == 0:
        protect_files(scratch)
        with open(far_tree / "a", "wb", buffering=0) as file:
            file.write(b"half")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert stores_in(far_tree)
    assert remove_made(scratch) == ()
    assert fingerprint(far_tree) == before


def test_a_file_system_without_room_is_left_alone(small_disk: Path, scratch: Path) -> None:
    large = small_disk / "large"
    large.write_bytes(b"x" * (600 << 10))

    def act() -> Any:
        with open(large, "r+b") as file:
            file.write(b"y")
        return read(str(large))[:2], protection.files_elsewhere()

    assert protected(act, scratch) == ("yx", (str(large),))
    assert large.read_bytes()[:1] == b"x"
    assert not stores_in(small_disk)


def test_a_copy_that_outgrows_the_file_system_raises(small_disk: Path, scratch: Path) -> None:
    old = small_disk / "old"
    old.write_text("old")

    def act() -> int | None:
        try:
            old.write_bytes(b"x" * (2 << 20))
        except OSError as error:
            return error.errno
        return None

    assert protected(act, scratch) == errno.ENOSPC
    assert old.read_text() == "old"
    assert remove_made(scratch) == ()
    assert os.listdir(small_disk) == ["old"]


def test_copies_lie_in_scratch_where_no_folder_can_be_made(far_tree: Path, scratch: Path) -> None:
    def act() -> Any:
        from autotune.worker.script.patching import real_os

        make = real_os.mkdir

        def refuse(path: str, *arguments: Any) -> None:
            if ".autotune-" in path:
                raise PermissionError(errno.EACCES, "refused", path)
            make(path, *arguments)

        real_os.mkdir = refuse  # type: ignore[assignment]
        write(str(far_tree / "a"), "a")
        return read(str(far_tree / "a")), protection.files_elsewhere()

    assert protected(act, scratch) == ("one+", (str(far_tree / "a"),))
    assert not stores_in(far_tree)


def test_a_store_that_was_replaced_by_a_link_is_not_used(
    far_tree: Path, scratch: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")

    def act() -> Any:
        write(str(far_tree / "a"), "w")
        (store,) = [
            Path(entry) for entry in protection._installed[0][0]._redirected.stores.values()
        ]
        from autotune.worker.script.patching import real_os

        real_os.rename(store, store.with_suffix(".moved"))
        real_os.symlink(victim, store)
        write(str(far_tree / "b"), "a")
        return read(str(far_tree / "b"))

    assert protected(act, scratch) == "two+"
    remove_made(scratch)
    assert fingerprint(victim).keys() == {str(victim / "kept")}
    assert (victim / "kept").read_text() == "kept"
    assert (far_tree / "b").read_text() == "two"


def test_protecting_twice_is_protecting_once(tree: Path, scratch: Path) -> None:
    code = (
        f"protect_files(Path({str(scratch)!r})); import os, json; from os import rename\n"
        "open('a', 'w').close(); rename('a', 'z'); print(json.dumps(sorted(os.listdir('.'))))"
    )
    assert json.loads(in_fresh_interpreter(code, scratch, tree)) == ["b", "d", "l", "m", "z"]
    assert (tree / "a").read_text() == "one"
