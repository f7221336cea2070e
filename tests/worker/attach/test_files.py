"""A trial never changes what existed before it, and its script does not notice: in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from autotune.worker.attach.files import new_files

PROTECTED = """
import json, os, shutil, sys
from pathlib import Path
from autotune.worker.attach.files import protect_files, protect_torch
tree, scratch = Path(sys.argv[1]), Path(sys.argv[2])
protect_files(scratch)
os.chdir(tree)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "runs" / "last").mkdir(parents=True)
    (folder / "log.txt").write_text("old\n")
    (folder / "model.pt").write_bytes(b"weights")
    (folder / "runs" / "last" / "state.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in files
    }


def run_protected(code: str, tree: Path, *, protect: bool = True) -> str:
    head = PROTECTED if protect else PROTECTED.replace("protect_files(scratch)", "")
    scratch = tree.parent / "scratch"
    done = subprocess.run(
        [sys.executable, "-c", head + dedent(code), str(tree), str(scratch)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CHANGES = {
    "written": "open('log.txt', 'w').write('new'); print(open('log.txt').read())",
    "appended": "open('log.txt', 'a').write('more'); print(open('log.txt').read())",
    "changed in place": "f = open('log.txt', 'r+'); f.write('O'); f.close(); print(Path('log.txt').read_text())",
    "by pathlib": "Path('log.txt').write_text('new'); print(Path('log.txt').read_text())",
    "by descriptor": "d = os.open('log.txt', os.O_WRONLY | os.O_TRUNC); os.write(d, b'n'); os.close(d); "
    "print(Path('log.txt').read_text())",
    "replaced": "Path('tmp').write_text('new'); os.replace('tmp', 'log.txt'); "
    "print(open('log.txt').read(), os.path.exists('tmp'))",
    "removed": "os.remove('log.txt'); print(os.path.exists('log.txt'), sorted(os.listdir('.')))",
    "removed and made again": "os.remove('log.txt'); open('log.txt', 'x').write('n'); print(open('log.txt').read())",
    "renamed": "os.rename('log.txt', 'kept.txt'); print(open('kept.txt').read(), os.path.exists('log.txt'))",
    "tree removed": "shutil.rmtree('runs'); print(os.path.exists('runs'), os.path.exists('runs/last/state.json'))",
    "tree removed and made again": "shutil.rmtree('runs'); os.makedirs('runs/last'); "
    "Path('runs/last/state.json').write_text('[]'); print(os.listdir('runs/last'), "
    "Path('runs/last/state.json').read_text())",
    "truncated": "os.truncate('log.txt', 1); print(open('log.txt').read())",
    "mode changed": "os.chmod('log.txt', 0o600); print(oct(os.stat('log.txt').st_mode))",
    "times changed": "os.utime('log.txt', (1, 1)); print(os.stat('log.txt').st_mtime)",
    "through a link": "os.symlink('log.txt', 'link'); open('link', 'w').write('n'); print(open('log.txt').read())",
    "copied over": "Path('new').write_text('n'); shutil.copy('new', 'log.txt'); print(open('log.txt').read())",
    "folder renamed": "os.rename('runs', 'old_runs'); print(os.path.exists('runs'), "
    "Path('old_runs/last/state.json').read_text())",
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_existed_before_is_as_it_was_and_the_script_sees_what_it_did(how: str, tree: Path) -> None:
    before, copy = contents(tree), Path(shutil.copytree(tree, tree.parent / "copy"))
    seen = run_protected(CHANGES[how], tree)
    after = contents(tree)
    assert {name: after[name] for name in before} == before
    assert seen == run_protected(CHANGES[how], copy, protect=False)


def test_errors_are_those_of_the_real_calls(tree: Path) -> None:
    code = """
    for act in (lambda: open('log.txt', 'x'), lambda: os.remove('runs'), lambda: os.rmdir('runs'),
                lambda: open('none/there', 'w'), lambda: os.remove('none'), lambda: open('runs', 'w'),
                lambda: os.mkdir('runs'), lambda: (os.remove('model.pt'), open('model.pt'))):
        try:
            act()
            print('nothing')
        except OSError as error:
            print(type(error).__name__, error.errno)
    """
    copy = Path(shutil.copytree(tree, tree.parent / "copy"))
    assert run_protected(code, tree) == run_protected(code, copy, protect=False)


def test_all_processes_of_a_trial_see_the_same(tree: Path) -> None:
    code = f"""
    import subprocess
    open('log.txt', 'w').write('new')
    os.remove('model.pt')
    pid = os.fork()
    if pid == 0:
        print(open('log.txt').read(), os.path.exists('model.pt'), flush=True)
        open('log.txt', 'a').write('er')
        os._exit(0)
    os.waitpid(pid, 0)
    print(open('log.txt').read(), flush=True)
    fresh = {PROTECTED!r} + "print(open('log.txt').read(), os.path.exists('model.pt'))"
    subprocess.run([sys.executable, '-c', fresh, *sys.argv[1:]], check=True)
    """
    assert run_protected(code, tree).split("\n")[:3] == ["new False", "newer", "newer False"]
    assert (tree / "log.txt").read_text() == "old\n"


def test_new_files_are_where_the_script_wants_them_and_are_listed(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_protected(
        "os.makedirs('out/a'); Path('out/a/x').write_text('x'); Path('gone').touch(); os.remove('gone')", tree
    )
    assert (tree / "out" / "a" / "x").read_text() == "x"
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/nowhere")
    assert new_files(tmp_path / "scratch") == (str((tree / "out" / "a" / "x").resolve()),)
    assert not (tree / "gone").exists()


def test_torch_and_sqlite_are_led_too(tree: Path) -> None:
    code = """
    import sqlite3, torch
    protect_torch()
    with sqlite3.connect('runs/db') as own:
        own.execute('create table t (x)')
    torch.save({'a': torch.ones(3)}, 'model.pt')
    torch.save({'a': torch.ones(2)}, Path('runs/last/state.json'))
    print(torch.load('model.pt')['a'].sum().item(), len(torch.load('runs/last/state.json', mmap=False)['a']))
    """
    before = contents(tree)
    assert run_protected(code, tree).split() == ["3.0", "2"]
    after = contents(tree)
    assert {name: after[name] for name in before} == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small file system")
def test_a_full_disk_is_an_error_and_no_write_to_the_users_file(tree: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(scratch)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        code = """
        try:
            with open('log.txt', 'a') as file:
                file.write('x' * 1_000_000)
        except OSError as error:
            print(error.errno)
        """
        assert run_protected(code, tree).strip() == "28"
        assert (tree / "log.txt").read_text() == "old\n"
    finally:
        subprocess.run(["umount", str(scratch)], check=True)
