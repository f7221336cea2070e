"""Print how many tokens of Python each package has: a report, never a limit.

    python .ci/token_report.py

Comments, line ends and indents are not counted. A docstring is one token, however long it is. From Python 3.12 on an
f-string is several tokens.
"""

from __future__ import annotations

import tokenize
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_NOT_COUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_tokens(path: Path) -> int:
    """Return the tokens of a file."""
    with path.open("rb") as file:
        return sum(token.type not in _NOT_COUNTED for token in tokenize.tokenize(file.readline))


def make_table(root: Path) -> str:
    """Return the table: each package in autotune by size, then autotune, tests and benchmarks in total."""
    rooms = Counter[str]()
    files = Counter[str]()
    totals = Counter[str]()
    for package in ("autotune", "tests", "benchmarks"):
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).parts
            names = [package]
            if package == "autotune":
                names.append(f"autotune/{parts[1]}" if len(parts) > 2 else "autotune/*.py")
            tokens = count_tokens(path)
            for name in names:
                counts = totals if name == package else rooms
                counts[name] += tokens
                files[name] += 1
    rows = [*rooms.most_common(), *totals.items()]
    lines = [f"{'tokens of':<30}{'files':>8}{'tokens':>12}"]
    lines += [f"{name:<30}{files[name]:>8}{tokens:>12,}" for name, tokens in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_table(_ROOT))
