"""What several tests of the report need."""

from __future__ import annotations

import pytest

from autotune.records.run_summary import RunSummary
from tests.factories import make_variants


@pytest.fixture(params=sorted(make_variants()))
def any_summary(request: pytest.FixtureRequest) -> RunSummary:
    return make_variants()[request.param]
