"""A line is named if it was sampled often enough, and takes enough of its part's time."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.diagnosis.bottlenecks import find_bottlenecks
from autotune.diagnosis.hot_lines import (
    hottest_collate_line,
    hottest_forward_line,
    hottest_item_line,
    hottest_sampler_line,
    hottest_script_line,
    hottest_wait,
)
from autotune.note import Note
from autotune.records.stacks import StackLine, StackPart, Stacks
from autotune.records.watched_run import Startup, WatchedRun
from tests.factories import make_breakdown, make_evidence, make_loader_costs


def line(part: StackPart, fraction: float, place: str = "train.py:41", **fields: Any) -> StackLine:
    return StackLine(part=part, fraction=fraction, place=place, function="main", **fields)


def of_main(*lines: StackLine, samples: int = 200) -> Stacks:
    """Make stacks of a training thread whose parts hold these lines alone."""
    return Stacks(seconds=4.0, samples=samples, main=lines, main_parts=parts_of(lines))


def of_workers(*lines: StackLine, samples: int = 200) -> Stacks:
    """Make stacks of workers, with a training thread that makes items of a validation."""
    return Stacks(
        seconds=4.0,
        samples=200,
        main=(line("item", 0.5, "val.py:1"),),
        main_parts={"item": 0.5},
        worker_samples=samples,
        workers=lines,
        worker_parts=parts_of(lines),
    )


def parts_of(lines: tuple[StackLine, ...]) -> dict[StackPart, float]:
    parts = dict[StackPart, float]()
    for one in lines:
        parts[one.part] = parts.get(one.part, 0.0) + one.fraction
    return parts


def figures(note: Note | None) -> tuple[object, object]:
    assert note is not None
    return note.figures["place"], pytest.approx(note.figures["fraction"])


def test_a_share_is_that_of_the_part() -> None:
    stacks = of_main(line("item", 0.1, "a.py:1"), line("item", 0.3, "a.py:2"), line("other", 0.6))
    assert figures(hottest_item_line(stacks)) == ("a.py:2", 0.75)


def test_workers_come_before_the_training_thread() -> None:
    stacks = of_workers(line("item", 0.8, "a.py:1"), line("collate", 0.2, "a.py:2"))
    assert figures(hottest_item_line(stacks)) == ("a.py:1", 1.0)
    assert figures(hottest_collate_line(stacks)) == ("a.py:2", 1.0)


def test_the_share_of_a_callee_is_its_own() -> None:
    called = line("item", 0.5, calls="PIL.Image.Image.resize", calls_fraction=0.25)
    assert figures(hottest_item_line(of_main(called))) == ("train.py:41", 0.5)
    native = line("item", 0.5, calls="zlib.decompress")
    assert figures(hottest_item_line(of_main(native))) == ("train.py:41", 1.0)


def test_few_samples_name_no_line() -> None:
    assert hottest_item_line(of_main(line("item", 0.5), samples=39)) is None
    assert hottest_item_line(of_main(line("item", 0.5), samples=40)) is not None
    assert hottest_script_line(of_main(line("other", 0.5), samples=19)) is None


def test_collating_is_named_from_a_tenth_of_the_loader_s_work_on() -> None:
    small = of_workers(line("item", 0.95), line("collate", 0.05), samples=1000)
    assert hottest_collate_line(small) is None


def test_many_small_lines_name_no_line() -> None:
    lines = [line("forward", 0.02, f"a.py:{number}") for number in range(20)]
    assert hottest_forward_line(of_main(*lines)) is None


def test_sampler_and_script_lines_have_shares_of_the_thread() -> None:
    stacks = of_main(line("sampler", 0.2, "a.py:1"), line("other", 0.3, "a.py:2"))
    assert figures(hottest_sampler_line(stacks)) == ("a.py:1", 0.2)
    assert figures(hottest_script_line(stacks)) == ("a.py:2", 0.3)
    assert hottest_script_line(of_main(line("other", 0.09))) is None


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("total += loss.item()", True),
        ("total += float(loss)", True),
        ("batch = batch.to(device)", True),
        ("torch.cuda.synchronize()", True),
        ("x = pointer(y)", False),
        ("s = sum(values)", False),
    ],
)
def test_a_step_waits_where_a_call_needs_a_value_of_the_device(code: str, waits: bool) -> None:
    note = hottest_wait(of_main(line("other", 0.5, code=code)))
    assert (note is not None) == waits


def test_nothing_sampled_names_no_line() -> None:
    nothing = Stacks(seconds=0.0, samples=0)
    named = [
        hottest_collate_line,
        hottest_forward_line,
        hottest_item_line,
        hottest_sampler_line,
        hottest_script_line,
        hottest_wait,
    ]
    assert [find(nothing) for find in named] == [None] * 6


def test_a_finding_carries_its_lines() -> None:
    stacks = of_workers(line("item", 1.0, code="raw = zlib.decompress(x)", calls="zlib.decompress"))
    startup = Startup(before_loader_s=1.0, first_batch_s=1.0, first_step_s=1.0)
    watched = WatchedRun(startup=startup, steps=9, watched_s=5.0, parts_s={}, stacks=stacks)
    evidence = make_evidence(
        breakdown=make_breakdown(wait=0.7), loader_costs=make_loader_costs(1e-3, item_cpu_s=1e-3)
    )
    plain = find_bottlenecks(evidence)[0]
    found = find_bottlenecks(evidence.model_copy(update={"watched": watched}))[0]
    assert found.bottleneck == plain.bottleneck == "data_cpu"
    assert found.evidence.startswith(f"{plain.evidence}; ")
    assert "zlib.decompress, called at train.py:41" in found.evidence
    assert found.figures.keys() - plain.figures.keys() == {"hot_item_line"}
