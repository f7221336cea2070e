"""`python -m autotune.worker serve FD` and `python -m autotune.worker run FOLDER`: how the parent reaches a worker."""

from __future__ import annotations

import sys
from pathlib import Path

from autotune.protocol import TrialFolder


def _main(arguments: list[str]) -> None:
    from autotune.worker.serve import live, serve

    match arguments:
        case ["serve", descriptor]:
            serve(int(descriptor))
        case ["run", folder]:
            live(TrialFolder(Path(folder)))
        case _:
            raise SystemExit("usage: python -m autotune.worker (serve FD | run FOLDER)")


if __name__ == "__main__":
    _main(sys.argv[1:])
