"""The report's lines of memory: of the recommended settings' kind, named where there are others, for its workers."""

from __future__ import annotations

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.models.memory import MemoryLine
from autotune.records.result import RunSummary
from autotune.report import sections
from tests.report.cases import memory_cases
from tests.report.forms import plots_of

CASES = memory_cases()
GIB, MIB = 2**30, 2**20
TWO = TrainingConfig(strategy="ddp", world_size=2).group_name


def lines_of_group(summary: RunSummary) -> tuple[MemoryLine, ...]:
    return sections.lines_of_group(summary, sections.list_memory_lines(summary))


def test_lines_are_of_the_recommended_devices() -> None:
    (line,) = lines_of_group(CASES["two groups, the larger recommended"])
    assert line.intercept_bytes == pytest.approx(3 * GIB, rel=0.02)
    assert line.bytes_per_sample == pytest.approx(32 * MIB, rel=0.02)
    assert line.error_bytes < 384 * MIB


@pytest.mark.parametrize(
    ("case", "name"), [("two groups", "one device"), ("two groups, the larger recommended", TWO)]
)
def test_plot_names_its_devices(case: str, name: str) -> None:
    (line,) = lines_of_group(CASES[case])
    (plot,) = (plot for plot in plots_of(CASES[case]) if plot.name == "memory")
    (trend,) = plot.trends
    assert trend.points[0][1] == line.predict(32)[0] / GIB
    assert name in plot.caption
    alone = sections.list_memory_lines(CASES["one group"])
    assert sections.describe_group(alone, alone) == ""


def test_table_has_every_line() -> None:
    summary = CASES["two groups"]
    table, _ = sections.memory_table(summary, sections.list_memory_lines(summary))
    assert [row[:2] for row in table.rows] == [
        ("float32, one device", "3"),
        (f"float32, {TWO}", "3"),
    ]


def test_line_is_for_the_number_of_workers() -> None:
    (line,) = lines_of_group(CASES["workers"])
    assert line.config.num_workers == 2
    assert line.workers_bytes == pytest.approx(256 * MIB, rel=0.06)
    assert line.predict(64)[0] / GIB == pytest.approx(2.25, rel=0.01)
    assert {other.workers_bytes for other in sections.list_memory_lines(CASES["workers, GPU"])} == {
        0
    }
