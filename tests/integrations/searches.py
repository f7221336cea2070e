"""What a short search is, and what every one of them must have come to; conftest.py makes it."""

from __future__ import annotations

from collections.abc import Callable

import autotune

__all__ = ["Search", "assert_runs"]

Search = Callable[..., autotune.SearchResult]
"""Of a model, data and a run folder; the rest is autotune.search's own."""


def assert_runs(result: autotune.SearchResult) -> None:
    """The baseline was measured, and nothing failed."""
    first, *rest = (trial.outcome for trial in result.trials)
    assert first == "ok"
    assert {*rest} <= {"ok", "pruned"}
