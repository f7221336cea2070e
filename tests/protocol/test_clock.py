"""The clock of a search and the longest deadline that a test allows."""

from __future__ import annotations

import pytest

from autotune.protocol import disk


def test_a_deadline_is_as_it_is_where_no_test_shortens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(disk.LONGEST_DEADLINE, raising=False)
    assert disk.deadline_within(600.0) == 600.0


@pytest.mark.parametrize(("seconds", "within"), [(600.0, 8.5), (2.0, 2.0)])
def test_a_test_shortens_what_is_longer_and_nothing_else(
    seconds: float, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(disk.LONGEST_DEADLINE, "8.5")
    assert disk.deadline_within(seconds) == within
