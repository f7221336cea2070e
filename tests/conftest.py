"""For all tests: matplotlib draws for those of the report alone; elsewhere its second a search would add up."""

from __future__ import annotations

import pytest

from autotune.report import page


@pytest.fixture(autouse=True)
def _drawings_for_the_reports_tests_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.parent.name != "report":
        monkeypatch.setattr(page, "draw", lambda plot: f'<svg role="img" aria-label="{plot.title}"></svg>')
