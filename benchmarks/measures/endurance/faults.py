"""Does a fault of the user's code, of any kind and in any phase, cost more than the trial that it strikes?

A case is a fault; each cell of it is a real search, or a diagnosis, by the command line, of a workload that misbehaves
in one phase alone (fault_workload.py); a harmless fault strikes in all phases at once. All share one launcher. Held
against it: how the command ends and what it says (fault_verdict.py), that nothing of it is left, and that the calling
process is as before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import psutil
from click.testing import CliRunner

from autotune.api import diagnose as diagnosing
from autotune.api import search as searching
from autotune.cli import cli
from autotune.files.run_folder import read_summary
from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from autotune.protocol.disk import LONGEST_DEADLINE
from benchmarks.measures.endurance.fault_surroundings import Surroundings, enter, has_memory_groups
from benchmarks.measures.endurance.fault_table import FAULTS, PHASES, is_reached
from benchmarks.measures.endurance.fault_verdict import (
    AND,
    Seen,
    faults_in,
    is_without_strike,
    told_of,
)
from benchmarks.measures.endurance.part import TORCHS_CACHE, Part
from benchmarks.measures.endurance.short_windows import shorten_all, shorten_those_of
from benchmarks.measures.part_guard import MARK, Figures

__all__ = ["FAULTS_OF_TRIALS", "FAULTS_ON_FRESH_INTERPRETERS", "FAULTS_ON_RAY"]

_WORKLOAD = Path(__file__).with_name("fault_workload.py")
_DIAGNOSED = ("diagnose", "others")
_CONFIG = """
workload: {model: "work.py:model", dataset: "work.py:dataset", loss: "work.py:loss", collate_fn: "work.py:collate"}
baseline: {num_workers: 1, micro_batch_size: 8}
space: {num_workers: 4, amp_dtype: bfloat16, micro_batch_size: 8, grad_accum_steps: 1, prefetch_factor: 2,
        persistent_workers: true, intra_op_threads: null}
budget: {n_trials: 2, timeout_s: 120}
objective: {memory_limit: 1GiB}
device: cpu
run_dir: disk/run
"""
_DEADLINE_S, _FRESH_DEADLINE_S = 12.0, 30.0
_TRIES = 3
"""Of a cell: a search in which the baseline is the best, as may happen on a busy machine, comes to no stress check."""
_FOUND_BY_THE_SERVER = ("daemon",)
"""What nobody else finds: the page says that it is not promised."""
_GONE_WITHIN_S = 5.0
_LIMIT_S = 1500.0
_LOG_BYTES, _RUN_BYTES = 600 * 1024, 8 * 2**20
_FLOOD_MIB = 1024
_SERVER, _OF_RAY = "autotune.worker serve", ("ray::", "/ray/")
"""Parts of the command lines of what lives on between trials; ranks have that of the server that has forked them."""
_RAY_STORE_BYTES = 80 * 1024 * 1024


def _phases_of(cell: str) -> tuple[str, ...]:
    """The phases in which a cell's fault strikes."""
    return {"search": PHASES[: -len(_DIAGNOSED)], "diagnosis": _DIAGNOSED}.get(cell, (cell,))


def _cells_of(fault: str) -> tuple[str, ...]:
    if FAULTS[fault].outcome == "ok":
        return "search", "diagnosis"
    return tuple(phase for phase in PHASES if is_reached(FAULTS[fault], phase))


def _pairs(*, without: Collection[str] = ()) -> Mapping[str, tuple[str, ...]]:
    """Each fault but some in one phase, and each phase several times; what is harmless in all at once."""
    failing = [name for name in FAULTS if FAULTS[name].outcome != "ok"]
    reached = {
        name: [phase for phase in PHASES if is_reached(FAULTS[name], phase)] for name in failing
    }
    turns = {
        name: (reached[name][number % len(reached[name])],) for number, name in enumerate(failing)
    }
    return {name: turns.get(name, _cells_of(name)[:1]) for name in FAULTS if name not in without}


def _run(launcher: str, cells: Mapping[str, tuple[str, ...]], name: str, folder: Path) -> Figures:
    fault, around = FAULTS[name], enter(folder)
    if (fault.needs == "mounts" and not around.has_mounts) or (
        fault.needs == "cgroup" and not has_memory_groups()
    ):
        return {"skipped": f"needs {fault.needs}"}
    _set_up(folder)
    shorten_all()
    deadline_s = _FRESH_DEADLINE_S if launcher == "fresh interpreter" else _DEADLINE_S
    os.environ[LONGEST_DEADLINE] = str(fault.deadlines * deadline_s)
    found = {}
    with ExitStack() as held:
        held.enter_context(_ray(folder)) if launcher == "Ray" else _share(
            held.enter_context(_opened(launcher, folder))
        )
        for cell in cells[name]:
            for _ in range(_TRIES):
                with around.memory_group(is_wanted=fault.needs == "cgroup") as group:
                    found[cell] = _try(name, cell, folder, around, group)
                if not is_without_strike(found[cell]["fault"]):
                    break
    broken = [f"{cell}: {one['fault']}" for cell, one in found.items() if one["fault"]]
    return {
        "cells": found,
        "fault": " || ".join([*broken, *_left(folder, around, set(), spares_servers=False)]),
    }


def _opened(launcher: str, folder: Path) -> closing[LocalLauncher]:
    if launcher == "fork server":
        return closing(LocalLauncher(folder / "server.log", device="cpu"))
    return closing(LocalLauncher(None))


def _share(launcher: Launcher) -> None:
    """Have all searches and diagnoses of this process start trials by one launcher."""
    for module, call in ((searching, "run_plan"), (diagnosing, "diagnose_plan")):
        setattr(module, call, partial(getattr(module, call), launcher=launcher))


@contextmanager
def _ray(folder: Path) -> Iterator[None]:
    """A cluster of this machine alone, which searches and diagnoses of this process use by executor: ray."""
    import ray

    from autotune.launch.ray_launcher import RayLauncher

    shorten_those_of(RayLauncher)
    (folder / "tune.yaml").write_text(f"{_CONFIG}executor: ray\n")
    with TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as place:  # sockets' paths are short
        ray.init(
            num_cpus=2,
            object_store_memory=_RAY_STORE_BYTES,
            _plasma_directory=place,
            _temp_dir=place,
            include_dashboard=False,
            log_to_driver=False,
            namespace="autotune",
        )
        try:
            yield
        finally:
            ray.shutdown()


def _try(name: str, cell: str, folder: Path, around: Surroundings, group: str) -> Figures:
    """One search or diagnosis, in folders of its own."""
    fault, phases = FAULTS[name], _phases_of(cell)
    plan = {
        "fault": name,
        "hook": fault.hook,
        "phases": phases,
        "cgroup": group,
        "flood_mib": _FLOOD_MIB,
    }
    (folder / "fault.json").write_text(json.dumps(plan))
    shutil.rmtree(folder / "disk" / "run", ignore_errors=True)
    (folder / "struck").unlink(missing_ok=True)
    temporary, before, begun = {*_temporary(folder)}, _own_state(), monotonic()
    command = (
        ["diagnose", "tune.yaml", "--json"] if phases[0] in _DIAGNOSED else ["run", "tune.yaml"]
    )
    done = CliRunner().invoke(cli, command, prog_name="autotune")
    took_s = monotonic() - begun
    seen = _seen(folder, done, took_s)
    found = [
        *faults_in(fault, phases, seen),
        *_left(folder, around, temporary, spares_servers=True),
        *_changed(before, _own_state()),
        *_unbounded(folder, seen),
    ]
    return {
        "exit_code": seen.exit_code,
        "search_s": round(took_s, 1),
        "struck": sorted(seen.struck),
        "told": told_of(seen, folder),
        "fault": AND.join(found),
    }


def _set_up(folder: Path) -> None:
    """A user's folder, and what his shell would set; the process is the case's own."""
    (folder / "work.py").write_bytes(_WORKLOAD.read_bytes())
    (folder / "tune.yaml").write_text(_CONFIG)
    (folder / "disk" / "tmp").mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "disk" / "tmp"), None
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.chdir(folder)


def _seen(folder: Path, done: Any, took_s: float) -> Seen:
    run_dir, struck = folder / "disk" / "run", folder / "struck"
    has_summary = (run_dir / "summary.json").exists()
    words = struck.read_text().split() if struck.exists() else []
    return Seen(
        exit_code=done.exit_code,
        output=done.stdout,
        errors=done.stderr,
        summary=read_summary(run_dir) if has_summary else None,
        diagnosis=done.stdout if done.stdout.startswith("{") else "",
        curves=curves.read_text() if (curves := run_dir / "curves.json").exists() else "",
        struck=frozenset(words[::2]),
        strikes=len(words) // 2,
        took_s=took_s,
        logs={path.name: path.read_text(errors="replace") for path in run_dir.glob("logs/*.log")},
        deadline_s=float(os.environ[LONGEST_DEADLINE]),
    )


def _left(
    folder: Path, around: Surroundings, before: Collection[str], *, spares_servers: bool
) -> Iterator[str]:
    """Processes but for servers that are to live on, shared memory, folders of trials, temporary files that are new."""
    pids = folder / "pids"
    noted = {int(line) for line in pids.read_text().split()} if pids.exists() else set[int]()
    begun = monotonic()
    while running := [*_running(noted, spares_servers=spares_servers)]:
        if monotonic() - begun > _GONE_WITHIN_S:
            yield f"processes are left: {running}"
            break
        sleep(0.1)
    if shared := around.shared_memory():
        yield f"shared memory is left: {shared}"
    if temporary := sorted({*_temporary(folder)}.difference(before)):
        yield f"temporary files are left: {temporary}"


def _temporary(folder: Path) -> Iterator[str]:
    yield from (
        path.name
        for path in (folder / "disk" / "tmp").iterdir()
        if not path.name.startswith(TORCHS_CACHE)
    )
    yield from (
        name for name in ("scratch", "payload") if (folder / "disk" / "run" / name).exists()
    )


def _running(noted: Collection[int], *, spares_servers: bool) -> Iterator[str]:
    """Living processes that bear this case's mark, or that the workload has noted down."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_own = process.pid in noted
            is_marked = (
                process.environ().get(MARK) == os.environ[MARK] and process.pid != os.getpid()
            )
            is_spared = spares_servers and not is_own and _is_server(process)
            if (is_marked or is_own) and not is_spared and process.status() != psutil.STATUS_ZOMBIE:
                yield " ".join(process.cmdline())


def _is_server(process: psutil.Process) -> bool:
    """Whether it is the server that forks trials, which is no child of another one, or of Ray."""
    words, above = " ".join(process.cmdline()), process.parent()
    is_forked = above is not None and _SERVER in " ".join(above.cmdline())
    return any(part in words for part in _OF_RAY) or (_SERVER in words and not is_forked)


def _own_state() -> Mapping[str, Any]:
    umask = os.umask(0o22)
    os.umask(umask)
    handlers = {one.name: signal.getsignal(one) for one in signal.Signals}
    return {"working directory": str(Path.cwd()), "umask": umask, **handlers}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        f"{name} of the caller has changed: {after[name]}"
        for name in before
        if after[name] != before[name]
    )


def _unbounded(folder: Path, seen: Seen) -> Iterator[str]:
    """Raw escapes where a terminal shows them, and what grows with what the user's code prints or says."""
    report = folder / "disk" / "run" / "report.md"
    texts = {
        "stdout": seen.output,
        "stderr": seen.errors,
        "report.md": report.read_text() if report.exists() else "",
    }
    for where, text in texts.items():
        if raw := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text):
            yield f"{where} has a raw control character {raw[0]!r} after {text[: raw.start()][-40:]!r}"
        if len(text) > _LOG_BYTES:
            yield f"{where} is {len(text):,} characters long"
    sizes = {
        path.name: path.stat().st_size for path in (folder / "disk").rglob("*") if path.is_file()
    }
    large = {
        name: size for name, size in sizes.items() if name.endswith(".log") and size > _LOG_BYTES
    }
    if large or sum(sizes.values()) > _RUN_BYTES:
        yield f"the run folder must stay small, but holds {dict(sorted(sizes.items(), key=lambda one: -one[1])[:3])}"


def _judge(cases: Mapping[str, Figures]) -> Figures:
    tried = {name: found["cells"] for name, found in cases.items() if "skipped" not in found}
    cells = {f"{name}/{cell}": found for name, own in tried.items() for cell, found in own.items()}
    slowest = max(cells, key=lambda cell: float(cells[cell]["search_s"]), default="")
    return {
        "kinds": len(tried),
        "cells": sum(len(found["struck"]) for found in cells.values()),
        "skipped": [name for name in cases if name not in tried],
        "slowest": {slowest: cells[slowest]["search_s"]} if slowest else {},
        "promises": {
            "each fault costs its trial alone, and is named": not any(
                found["fault"] for found in cases.values()
            )
            if cells
            else None
        },
    }


def _part(launcher: str, cells: Mapping[str, tuple[str, ...]]) -> Part:
    return Part(
        proves=f"a fault of a trial hangs no search, ends none wrongly, and is named ({launcher})",
        cases=lambda quick: [*cells][::6] if quick else [*cells],
        run=partial(_run, launcher, cells),
        judge=_judge,
        limit_s=_LIMIT_S,
    )


FAULTS_OF_TRIALS = _part("fork server", {name: _cells_of(name) for name in FAULTS})
FAULTS_ON_FRESH_INTERPRETERS = _part("fresh interpreter", _pairs(without=_FOUND_BY_THE_SERVER))
FAULTS_ON_RAY = _part("Ray", _pairs())
