"""The report's lines of memory: of the recommended settings' kind, named where there are others, for its workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from autotune.analysis.memory.lines import MemoryLine
from autotune.records.run_summary import RunSummary
from autotune.report.sections import memory
from autotune.report.wording.names import name_group
from autotune.settings.training_config import TrainingConfig
from tests.factories import (
    BASELINE,
    SERVER,
    make_measurement,
    make_recommendation,
    make_rich_summary,
    make_summary,
    make_trial,
)
from tests.report.forms import as_markdown, plots_of

GROUP = TrainingConfig(strategy="ddp", world_size=2)
TWO = name_group("ddp", 2)


def made(peaks: Mapping[TrainingConfig, float], *, kind: str = "cuda", chosen: TrainingConfig = BASELINE) -> RunSummary:
    """A search that recommends some settings; what each trial took, in GiB."""
    trials = [
        make_trial(number, config, measurement=make_measurement(1000.0, gib=gib))
        for number, (config, gib) in enumerate(peaks.items())
    ]
    recommendation = make_recommendation(config=chosen)
    environment = SERVER.model_copy(update={"device_kind": kind})
    return make_summary(trials=tuple(trials), recommendation=recommendation, environment=environment)


def lines_of_group(summary: RunSummary) -> tuple[MemoryLine, ...]:
    return memory.lines_of_group(summary, memory.list_memory_lines(summary))


def say_group(summary: RunSummary) -> str:
    return memory.describe_group(lines_of_group(summary), memory.list_memory_lines(summary))


def say_memory_line(summary: RunSummary) -> tuple[str, ...]:
    return memory.say_memory_line(summary, memory.list_memory_lines(summary))


def amounts(sentence: str, summary: RunSummary) -> list[float]:
    """The sizes in MiB that the line's sentence has in places of "#"."""
    (said,) = say_memory_line(summary)
    found = re.fullmatch(re.escape(sentence).replace(r"\#", r"([\d.,]+ [GM]iB)"), said)
    assert found is not None, said
    sizes = [size.replace(",", "").split() for size in found.groups()]
    return [float(number) * (1024 if unit == "GiB" else 1) for number, unit in sizes]


def batch(size: int, config: TrainingConfig = BASELINE, workers: int = 0) -> TrainingConfig:
    return config.model_copy(update={"micro_batch_size": size, "num_workers": workers})


BOTH = {batch(size): 1 + size / 64 for size in (32, 64, 128)} | {
    batch(size, GROUP): 3 + size / 32 for size in (32, 64, 128)
}
"""On one device, and on the two of a group."""
WORKERS = {batch(size, workers=own): 1 + size / 64 + own / 8 for size in (32, 64, 128) for own in (0, 2, 4)}


def test_the_line_of_the_recommended_devices_is_told_by_name() -> None:
    summary = made(BOTH, chosen=GROUP)
    assert amounts(f"Memory of float32, {TWO}: # + # a sample, ± #.", summary) == [
        pytest.approx(3 * 1024, rel=0.02),
        pytest.approx(32, rel=0.02),
        pytest.approx(0, abs=384),
    ]
    alone = {config: gib for config, gib in BOTH.items() if config.world_size == 1}
    assert amounts("Memory of float32: # + # a sample, ± #.", made(alone))[:2] == pytest.approx([1024, 16], rel=0.02)
    assert say_memory_line(made(alone, chosen=GROUP)) == ()


def test_lines_of_the_recommended_devices_alone_are_drawn() -> None:
    for chosen, name in ((BASELINE, "one device"), (GROUP, TWO)):
        summary = made(BOTH, chosen=chosen)
        (line,) = lines_of_group(summary)
        (plot,) = (plot for plot in plots_of(summary) if plot.name == "memory")
        (trend,) = plot.trends
        assert trend.points[0][1] == line.predict(32)[0] / 2**30
        assert f"They are for {name} only." in plot.caption
    alone = {config: gib for config, gib in BOTH.items() if config.world_size == 1}
    assert say_group(made(alone)) == ""


def test_every_line_stands_in_the_table(tmp_path: Path) -> None:
    text = as_markdown(made(BOTH), tmp_path)
    assert re.search(r"\| float32, one device \| 3 \| \S+ [GM]iB \| 1[56]\.\d MiB \|", text)
    assert re.search(rf"\| float32, {TWO} \| 3 \| [23]\.\d+ GiB \| 3[12]\.\d MiB \|", text)


def test_where_workers_are_part_of_the_peak_the_line_tells_what_each_takes(tmp_path: Path) -> None:
    summary = made(WORKERS, kind="cpu", chosen=batch(32, workers=2))
    told = amounts("Memory of float32: # + # for 2 loader workers + # a sample, ± #.", summary)
    assert told[:3] == pytest.approx([1024, 256, 16], rel=0.06)
    assert say_group(summary) == " The lines hold for 2 loader workers."
    (line,) = lines_of_group(summary)
    assert line.predict(64)[0] / 2**30 == pytest.approx(2.25, rel=0.01)
    text = as_markdown(summary, tmp_path)
    assert re.search(r"\| float32 \| 9 \| \S+ [GM]iB \+ 2\d\d MiB for 2 loader workers \| 1[56]\.\d MiB \|", text)
    assert "The lines hold for 2 loader workers." in text
    assert "worker" not in "".join(say_memory_line(made(WORKERS)))


def test_a_stress_run_in_one_process_is_told_with_what_it_comes_to_for_the_group(tmp_path: Path) -> None:
    rich = make_rich_summary()
    assert rich.recommendation is not None
    facts = rich.facts.model_copy(update={"gradient_bytes": 2 * 2**30})
    found = rich.recommendation.model_copy(update={"config": GROUP})
    text = as_markdown(rich.model_copy(update={"recommendation": found, "facts": facts}), tmp_path)
    assert "trained for 60 steps (12 s) in one process, ordinary batches" in text
    bearer = "a rank with 2.00 GiB of gradient buckets"
    assert f"Peak memory: 10.0 GiB, that is up to 12.0 GiB for {bearer}, within the limit of 16.0 GiB" in text
    alone = as_markdown(rich, tmp_path)
    assert "Peak memory: 10.0 GiB, within the limit of 16.0 GiB" in alone
    assert "trained for 60 steps (12 s), ordinary batches" in alone
