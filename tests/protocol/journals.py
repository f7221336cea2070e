"""Journals as a script's processes write them, without such processes."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["write_journal"]


def write_journal(overlay: Path, *made: Path, kind: str = "new") -> None:
    """Write a trial's journal, which says that the trial has made what lies at these paths."""
    overlay.mkdir(parents=True, exist_ok=True)
    journal = overlay / "journal"
    journal.touch()
    entries = [("journal", journal), *((kind, path) for path in made)]
    found = [(kind, path, path.lstat()) for kind, path in entries]
    lines = [
        json.dumps([kind, str(path), status.st_dev, status.st_ino, status.st_mtime_ns])
        for kind, path, status in found
    ]
    journal.write_text("".join(f"{line}\n" for line in lines))
