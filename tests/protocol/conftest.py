"""What several tests of the protocol need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def full_disk(disk_of: Callable[[str], Path]) -> Path:
    """A disk of 1 MiB with 64 KiB left."""
    place = disk_of("1m")
    (place / "ballast").write_bytes(b"x" * (2**20 - 2**16))
    return place
