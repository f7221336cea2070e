"""Tries what `python -m build` has made in an environment of its own, as a newcomer would use it.

    python .ci/try_package.py DIST

Of wheel and sdist: installed with nothing but what they ask for, `autotune --help` and `autotune init` answer, and the
README's example, of fewer trials, runs from an unguarded script in another folder. The sdist takes the wheel's place
there, since its dependencies take minutes to install. Both install the same files and ask for the same packages. Ends
with 0, or with the exit code of what failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 900
"""Of one command; the longest installs torch."""
LISTED = r"""
from importlib.metadata import files, requires
print(*sorted(str(file) for file in files("autotune-torch") if file.parts[0] == "autotune" and file.suffix != ".pyc"),
      *sorted(requires("autotune-torch")), sep="\n")
"""
EXAMPLES, BRIEF = "n_trials=6, timeout_s=30", "n_trials=2, timeout_s=8"
"""The search of the README's example, and what it is made for this try."""


def main(dist: Path) -> int:
    """Try every archive of a folder; the exit code."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(sys.executable, "-m", "venv", Path(folder) / "venv", cwd=Path(folder))
            installed = [tried(archive.resolve(), Path(folder)) for archive in (wheel, sdist)]
    except subprocess.CalledProcessError as error:
        print(f"failed: {error}", file=sys.stderr)
        return error.returncode
    except subprocess.TimeoutExpired as error:
        print(f"hung: {error}", file=sys.stderr)
        return 1
    if installed[0] != installed[1]:
        differ = {*installed[0]} ^ {*installed[1]}
        print(
            f"wheel and sdist install other files, or ask for other packages: {differ}",
            file=sys.stderr,
        )
        return 1
    return 0


def tried(archive: Path, here: Path) -> list[str]:
    """Install an archive and use it in a folder that has an environment; the files and packages that it brings."""
    python, autotune = here / "venv" / "bin" / "python", here / "venv" / "bin" / "autotune"
    place = here / archive.name.replace(".", "-")
    place.mkdir()
    (example, *_) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert EXAMPLES in example, "the README's example must be made brief"
    (place / "example.py").write_text(example.replace(EXAMPLES, BRIEF))
    install = (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--constraint",
        ROOT / "constraints.txt",
    )
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "autotune-torch", cwd=here)
    run(*install, archive, cwd=here)
    run(python, "-m", "pip", "check", cwd=here)
    run(autotune, "--help", cwd=place)
    run(autotune, "init", cwd=place)
    run(python, "example.py", cwd=place)
    return run(python, "-c", LISTED, cwd=place).splitlines()


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command, say which, and return what it printed; an error shows that as well."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    # A pipe would wait for a hung command's children.
    with tempfile.TemporaryFile("w+") as said:
        try:
            subprocess.run(words, cwd=cwd, stdout=said, stderr=said, check=True, timeout=LONGEST_S)
        finally:
            said.seek(0)
            told = said.read()
            if sys.exc_info()[0] is not None:
                print(told, file=sys.stderr)
    return told


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
