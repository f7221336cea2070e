"""What several tests of the report need."""

from __future__ import annotations

import pytest

from autotune.records.result import RunSummary
from tests.factories import make_variants


@pytest.fixture(params=sorted(make_variants()))
def any_summary(request: pytest.FixtureRequest) -> RunSummary:
    return make_variants()[request.param]


@pytest.fixture
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a terminal of 80 columns, whatever the tests themselves run in."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
