"""What people do with a run folder, each in one function: what it ended with, what it said, whether it was ours.

Comes in: a run folder, damaged or whole. Goes out: an Ending.
"""

from __future__ import annotations

import logging
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import autotune
from autotune.config.training_config import TrainingConfig
from autotune.errors import AutotuneError
from autotune.testing import CostModel, FakeLauncher, FakeTrial, analytic_cost

__all__ = ["READS", "USES", "Ending", "make_run", "search", "used"]

_ARGUMENTS: dict[str, Any] = {
    "space": {
        "num_workers": [0, 2, 4],
        "micro_batch_size": [16, 32, 64],
        "prefetch_factor": 2,
        "persistent_workers": True,
    },
    "n_trials": 5,
    "timeout_s": 300.0,
    "method": "random",
    "progress": False,
}
_TRIALS_BEFORE = 3  # that an interrupt or a kill comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a use of a run folder ended."""

    kind: str
    """"result", "told" (an error of ours), or "fell" (any other)."""
    text: str
    """What was said: an error's message, warnings, the notes of a result."""

    def figures(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)


def search(run_dir: Path, cost: CostModel = analytic_cost, **others: Any) -> autotune.SearchResult:
    """The search that all run folders here are of."""
    return autotune.search(
        object, list, launcher=FakeLauncher(cost), run_dir=run_dir, **{**_ARGUMENTS, **others}
    )


def make_run(state: str, run_dir: Path) -> None:
    """A run folder as it is after a search that has ended, was interrupted, or whose process was killed.

    To be called in a process of its own where it is to be killed.
    """
    if state == "finished":
        search(run_dir)
        return
    seen: list[TrainingConfig] = []

    def cost(config: TrainingConfig) -> FakeTrial:
        seen.append(config)
        if len(seen) > _TRIALS_BEFORE:
            if state == "killed":
                os._exit(0)
            raise KeyboardInterrupt
        return analytic_cost(config)

    try:
        search(run_dir, cost)
    except KeyboardInterrupt:
        return


def _report(run_dir: Path) -> str:
    return _command("report", str(run_dir))


def _resume(run_dir: Path) -> str:
    found = search(run_dir)
    return "\n".join(map(str, found.summary.notes))


def _open(run_dir: Path) -> str:
    found = autotune.open_run(run_dir)
    found.report()
    found._repr_html_()
    _ = [trial.value for trial in found.study.trials]
    return "\n".join(map(str, found.summary.notes))


def _load(run_dir: Path) -> str:
    autotune.load(run_dir / "recommended.yaml")
    return ""


def _export(run_dir: Path) -> str:
    return _command("export", str(run_dir), "--to", "hf")


def _warm_start(run_dir: Path) -> str:
    found = search(run_dir.parent / "warm", warm_start=run_dir)
    return "\n".join(map(str, found.summary.notes))


USES: Mapping[str, Callable[[Path], str]] = {
    "report": _report,
    "resume": _resume,
    "open_run": _open,
    "load": _load,
    "export": _export,
    "warm_start": _warm_start,
}
"""By name: uses a run folder, and hands on what it said."""
READS: Mapping[str, frozenset[str]] = {
    "report": frozenset({"summary.json"}),
    "resume": frozenset({"study.db", "summary.json", "curves.json"}),
    "open_run": frozenset({"summary.json", "study.db", "study.db-wal"}),
    "load": frozenset({"recommended.yaml"}),
    "export": frozenset({"recommended.yaml", "summary.json"}),
    "warm_start": frozenset({"summary.json"}),
}
"""The files that a use needs: where one is damaged, it must be told."""


def used(use: str, run_dir: Path) -> Ending:
    """Use a run folder; whatever comes of it is an Ending."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autotune").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said.append(USES[use](run_dir))
            kind = "result"
        except AutotuneError as error:
            said.append(str(error))
            kind = "told"
        except Exception:  # noqa: BLE001 - the fault that is looked for
            said.append(traceback.format_exc())
            kind = "fell"
    return Ending(kind=kind, text="\n".join([*said, *(str(one.message) for one in caught)]))


def _command(*words: str) -> str:
    """What a command says on stderr.

    Raises:
        AutotuneError: it ended with an error that was told.
        RuntimeError: it called itself a bug.
    """
    from autotune.cli import cli

    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli(list(words), standalone_mode=False) or 0
        except SystemExit as end:
            code = int(end.code or 0)
    if "this is a bug" in err.getvalue() or code not in {0, 2, 3}:
        raise RuntimeError(f"exit code {code}: {err.getvalue()}")
    if code:
        raise AutotuneError(err.getvalue())
    return err.getvalue()
