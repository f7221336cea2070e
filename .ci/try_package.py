"""Tries what `python -m build` has made: each archive in an environment of its own, as a newcomer would use it.

    python .ci/try_package.py DIST

Of wheel and sdist: installed with nothing but what they ask for, `autotune --help` and `autotune init` answer, and the
README's example runs from an unguarded script in another folder. Both install the same files. Ends with 0, or with the
exit code of what failed.
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
LISTED = """
from importlib.metadata import files
print(*sorted(str(file) for file in files("autotune-torch") if file.parts[0] == "autotune" and file.suffix != ".pyc"))
"""


def main(dist: Path) -> int:
    """Try every archive of a folder; the exit code."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    try:
        installed = [tried(archive.resolve()) for archive in (wheel, sdist)]
    except subprocess.CalledProcessError as error:
        print(f"failed: {error}", file=sys.stderr)
        return error.returncode
    except subprocess.TimeoutExpired as error:
        print(f"hung: {error}", file=sys.stderr)
        return 1
    if installed[0] != installed[1]:
        print(f"wheel and sdist install other files: {set(installed[0]) ^ set(installed[1])}", file=sys.stderr)
        return 1
    return 0


def tried(archive: Path) -> list[str]:
    """Install an archive and use it; the files that it has installed."""
    (example, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        python, autotune = here / "venv" / "bin" / "python", here / "venv" / "bin" / "autotune"
        (here / "example.py").write_text(example)
        run(sys.executable, "-m", "venv", here / "venv", cwd=here)
        constraints = ("--constraint", ROOT / "constraints.txt")
        run(python, "-m", "pip", "install", "--quiet", *constraints, archive, cwd=here)
        run(python, "-m", "pip", "check", cwd=here)
        run(autotune, "--help", cwd=here)
        run(autotune, "init", cwd=here)
        run(python, "example.py", cwd=here)
        return run(python, "-c", LISTED, cwd=here).split()


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command, say which, and return what it printed; an error shows that as well."""
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    with tempfile.TemporaryFile("w+") as said:  # a pipe would keep a hung command's children waited for
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
