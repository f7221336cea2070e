"""`python -m autotune.worker serve FD` and `... run FOLDER RANK`: how the parent reaches a worker."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter


def _main(arguments: list[str]) -> None:
    started = perf_counter()
    from autotune.protocol.disk import TrialFolder
    from autotune.worker.serve import die_with_parent, live, serve

    match arguments:
        case ["serve", descriptor]:
            serve(int(descriptor))
        case ["run", folder, rank]:
            die_with_parent()
            live(TrialFolder(Path(folder)), int(rank), started)
        case _:
            raise SystemExit("usage: python -m autotune.worker (serve FD | run FOLDER RANK)")


if __name__ == "__main__":
    _main(sys.argv[1:])
