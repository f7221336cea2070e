"""What every benchmark writes down: the machine, the versions, the raw values, as one JSON file; and a short table.

A Recording is written anew after each part, so that a benchmark that is cut off still leaves what it has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.api.commands import environment
from autotune.apply.cores import processor_name
from benchmarks import ROOT

__all__ = [
    "Recording",
    "describe_machine",
    "git_revision",
    "machine_name",
    "make_parser",
    "print_table",
    "read_results",
    "say",
    "start_recording",
]

_WIDTH = 80
_FORMAT_VERSION = 1
_OF_MALLOC = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


@dataclass(slots=True, kw_only=True)
class Recording:
    """A benchmark's figures under way, and where they are kept."""

    benchmark: str
    arguments: dict[str, Any]
    machine: dict[str, Any]
    path: Path
    started: str
    results: dict[str, Any] = field(default_factory=dict)

    def add(self, part: str, value: Any) -> None:
        """Keep the figures of a part, and write all that there is so far."""
        self.results[part] = value
        document = {
            "version": _FORMAT_VERSION,
            "benchmark": self.benchmark,
            "started": self.started,
            "written": _now(),
            "git_revision": git_revision(),
            "arguments": self.arguments,
            "machine": self.machine,
            "malloc": {
                name: value for name, value in os.environ.items() if name.startswith(_OF_MALLOC)
            },
            "load_average": list(os.getloadavg()),
            "results": self.results,
        }
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(_on_short_lines(json.dumps(document, indent=1)) + "\n")
        beside.replace(self.path)


def make_parser(description: str, quick: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take; `quick` says what --quick leaves out."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{quick}; tells that it runs, gives no figures"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        metavar="FOLDER",
        help="where the JSON goes (%(default)s)",
    )
    return parser


def start_recording(
    benchmark: str, arguments: argparse.Namespace, machine: dict[str, Any]
) -> Recording:
    """A recording for this machine; a quick run has a file of its own, so that it never replaces figures."""
    is_quick = arguments.quick or getattr(arguments, "smoke_cpu", False)
    name = f"{benchmark}-{machine_name(machine)}{'-quick' if is_quick else ''}.json"
    arguments.results.mkdir(parents=True, exist_ok=True)
    shown = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    return Recording(
        benchmark=benchmark,
        arguments=shown,
        machine=machine,
        path=arguments.results / name,
        started=_now(),
    )


def read_results(path: Path, *, fresh: bool) -> dict[str, Any]:
    """What an earlier run of a benchmark has written down, to go on with it; nothing where there is none, or `fresh`.

    Raises:
        ValueError: the file is of another version.
    """
    if fresh or not path.exists():
        return {}
    document = json.loads(path.read_text())
    if document["version"] != _FORMAT_VERSION:
        raise ValueError(
            f"{path} must be of version {_FORMAT_VERSION}, but is of {document['version']}; use --fresh"
        )
    results: dict[str, Any] = document["results"]
    return results


def describe_machine(device: str = "auto") -> dict[str, Any]:
    """Device, driver, cores and versions as a trial sees them, and the processor."""
    seen = environment(device)
    return {
        **seen.model_dump(mode="json"),
        "fingerprint": seen.fingerprint,
        "processor": processor_name(),
    }


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table at 80 columns: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print(f"\n{title}")
    for row in [head, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip()[:_WIDTH])
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line of progress at once."""
    print(f"{datetime.now().astimezone():%H:%M:%S}  {text}", flush=True)


def machine_name(machine: dict[str, Any]) -> str:
    name = str(machine.get("device_name", "unknown machine"))
    if machine.get("device_kind") == "cpu":
        name = f"{name} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _on_short_lines(text: str) -> str:
    """JSON with each list of plain values on one line."""
    return re.sub(
        r"\[\s+([^\[\]{}]*?)\s+\]",
        lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]",
        text,
    )


def git_revision() -> str | None:
    """The commit that is checked out, with "-changed" where the package or the benchmarks differ from it.

    AUTOTUNE_REVISION goes first: it tells the revision of a tree that was copied without .git.
    """
    if told := os.environ.get("AUTOTUNE_REVISION"):
        return told
    revision = _git("rev-parse", "--short=12", "HEAD")
    if revision is None:
        return None
    changes = _git("status", "--porcelain", "--", "autotune", "benchmarks/*.py")
    return f"{revision}-changed" if changes else revision


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
