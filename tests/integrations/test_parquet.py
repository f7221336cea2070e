"""Parquet that is read row by row, with the real pyarrow."""

from __future__ import annotations

import shutil
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from autotune.worker.extras.formats import measure_formats, watched
from tests.worker.extras.format_datasets import (
    ROWS,
    Rows,
    RowsOfGroups,
    RowsOfOneTable,
    Tables,
    write_table,
)

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def pyarrow() -> Any:
    return pytest.importorskip("pyarrow")


def test_a_table_that_is_read_for_each_item_costs_more_than_one_that_is_read_once(
    tmp_path: Path,
) -> None:
    files = write_table(tmp_path)
    (cost,) = measure_formats(DataLoader(Rows(files)), 0.01, tmp_path, perf_counter() + 60)
    assert (cost.kind, cost.calls_per_item) == ("parquet", 1)
    assert cost.better_s < cost.now_s
    assert cost.figures == {"rows": ROWS, "columns": 8}


def test_a_table_that_is_read_once_gets_no_figure(tmp_path: Path) -> None:
    assert (
        measure_formats(
            DataLoader(RowsOfOneTable(write_table(tmp_path))), 0.01, tmp_path, perf_counter() + 60
        )
        == ()
    )


def test_a_row_group_that_several_items_read_costs_more_than_one_that_is_read_once(
    tmp_path: Path,
) -> None:
    files = write_table(tmp_path)
    (cost,) = measure_formats(DataLoader(RowsOfGroups(files)), 0.01, tmp_path, perf_counter() + 60)
    assert (cost.kind, cost.calls_per_item) == ("parquet", 1)
    assert cost.figures == {"rows": ROWS // 2, "columns": 8}


def test_a_table_of_an_items_own_gets_no_figure(tmp_path: Path) -> None:
    (table,) = write_table(tmp_path)
    files = [Path(shutil.copy(table, tmp_path / f"{number}.parquet")) for number in range(64)]
    assert measure_formats(DataLoader(Tables(files)), 0.01, tmp_path, perf_counter() + 60) == ()


def test_what_items_read_is_not_kept(tmp_path: Path) -> None:
    import pyarrow as pa

    dataset, held = Rows(write_table(tmp_path)), pa.total_allocated_bytes()
    with watched() as watch:
        assert watch is not None
        for index in range(8):
            dataset[index]
            watch.item += 1
    assert [call.rows for call in watch.calls] == [ROWS] * 8
    assert (
        pa.total_allocated_bytes() - held < 4 * ROWS * 8 * 8
    )  # of eight tables; pyarrow lets go of the last one late
