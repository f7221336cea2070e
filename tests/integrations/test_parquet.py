"""Parquet that is read row by row, with the real pyarrow."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from autotune.worker.after_window.formats import measure_formats
from tests.worker.after_window.format_datasets import ROWS, Rows, RowsOfOneTable, write_table

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def pyarrow() -> Any:
    return pytest.importorskip("pyarrow")


def test_a_table_that_is_read_for_each_item_costs_more_than_one_that_is_read_once(tmp_path: Path) -> None:
    files = write_table(tmp_path)
    (cost,) = measure_formats(DataLoader(Rows(files)), 0.01, tmp_path, perf_counter() + 60)
    assert (cost.kind, cost.calls_per_item) == ("parquet", 1)
    assert cost.better_s < cost.now_s
    assert cost.figures == {"rows": ROWS, "columns": 8}


def test_a_table_that_is_read_once_gets_no_figure(tmp_path: Path) -> None:
    assert measure_formats(DataLoader(RowsOfOneTable(write_table(tmp_path))), 0.01, tmp_path, perf_counter() + 60) == ()
