"""The rate of a script that nobody watches: steps a second between two moments of a run of its own.

A fresh interpreter runs the command as it is; a counter and a clock a step are added, and what tells an evaluation
(unwatched_site). The seconds that a start takes, which differ by more than what is compared, are not in it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

__all__ = ["steps_per_s"]

_SITE = Path(__file__).resolve().parent / "unwatched_site"


def steps_per_s(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    skip_s: float,
    seconds: float,
    within_s: float,
) -> float | None:
    """Optimizer steps a second of a command; None where it ended, or took too long, before it had made enough.

    Args:
        command: What is run.
        folder: Where.
        environment: What is set beside what is set anyway.
        skip_s: Seconds from the first step on that do not count.
        seconds: Seconds that do.
        within_s: When the run is ended, whatever it has done.
    """
    with tempfile.TemporaryDirectory() as scratch:
        noted = Path(scratch) / "noted.json"
        own = {
            "UNWATCHED_FILE": str(noted),
            "UNWATCHED_SKIP_S": str(skip_s),
            "UNWATCHED_S": str(seconds),
            "PYTHONPATH": os.pathsep.join(
                [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ends_at = monotonic() + within_s
        while process.poll() is None and not noted.exists() and monotonic() < ends_at:
            sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not noted.exists():
            return None
        figures = json.loads(noted.read_text())
        return float(figures["steps"] / figures["seconds"])
