"""`python -m autotune.worker serve FD` and `python -m autotune.worker run FOLDER`: how the parent reaches a worker."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

from autotune.protocol import TrialFolder


def _main(arguments: list[str]) -> None:
    started = perf_counter()
    from autotune.worker.serve import die_with_parent, live, serve

    match arguments:
        case ["serve", descriptor]:
            serve(int(descriptor))
        case ["run", folder]:
            die_with_parent()
            live(TrialFolder(Path(folder)), started)
        case _:
            raise SystemExit("usage: python -m autotune.worker (serve FD | run FOLDER)")


if __name__ == "__main__":
    _main(sys.argv[1:])
