"""A diagnosis as text: the same content in both forms, 80 columns, and a user's text never taken for markup."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import autotune
from autotune.diagnosis.verdict import headroom_today
from autotune.records.breakdown import PARTS, Share, TimeBreakdown
from autotune.records.diagnosis import Curves, Diagnosis
from autotune.records.utilization import Fullness
from autotune.report.sections.diagnosis import print_diagnosis, render_diagnosis, say_present
from autotune.settings.training_config import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost
from tests.factories import TALK, make_rank

Cost = Callable[[TrainingConfig], FakeTrial]


def healthy(_: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=1000.0, busy_fraction=0.99, loader_ceiling=9000.0, device_ceiling=1005.0)


def held_by_loader(_: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=430.0, busy_fraction=0.4, loader_ceiling=440.0, device_ceiling=1000.0)


def in_turns(_: TrainingConfig) -> FakeTrial:
    return FakeTrial(samples_per_s=500.0, busy_fraction=0.5, loader_ceiling=1000.0, device_ceiling=1000.0)


def diagnosis_of(cost: Cost) -> Diagnosis:
    launcher = FakeLauncher(cost, noise=0.0)
    return autotune.diagnose(object, list, progress=False, launcher=launcher).diagnosis


def bare(diagnosis: Diagnosis) -> Diagnosis:
    """With nothing measured beside the window."""
    run = diagnosis.evidence.measurement.model_copy(update={"breakdown": None, "loader_costs": None})
    evidence = diagnosis.evidence.model_copy(update={"measurement": run, "curves": Curves()})
    return diagnosis.model_copy(update={"evidence": evidence, "advice": ()})


def printed(diagnosis: Diagnosis, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    print_diagnosis(diagnosis, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("cost", [analytic_cost, healthy, held_by_loader])
def test_every_line_fits_into_80_columns(cost: Cost) -> None:
    lines = printed(diagnosis_of(cost)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > 20


@pytest.mark.parametrize("cost", [analytic_cost, healthy])
def test_what_was_not_measured_is_left_out(cost: Cost) -> None:
    text = printed(bare(diagnosis_of(cost)))
    assert "Where the time goes" in text
    assert "Inside the loader" not in text
    assert "each side alone" not in text
    assert "Nothing that was measured promises 3 % or more." in text


@pytest.mark.parametrize("cost", [analytic_cost, healthy, held_by_loader])
def test_both_forms_say_the_same_first(cost: Cost) -> None:
    diagnosis = diagnosis_of(cost)
    head = diagnosis.headline
    assert " ".join(printed(diagnosis).split()).startswith(head)
    assert render_diagnosis(diagnosis).splitlines()[2].replace("\\", "") == f"**{head}**"


def test_advice_stands_in_its_order_with_its_gain() -> None:
    diagnosis = diagnosis_of(analytic_cost)
    text = render_diagnosis(diagnosis)
    places = [text.index(advice.text[:20].replace("_", "\\_")) for advice in diagnosis.advice[:2]]
    assert places == sorted(places)


def test_the_present_rate_is_set_against_the_device_and_the_loader() -> None:
    assert say_present(diagnosis_of(held_by_loader)) == (
        "You run at 43 % of what this device can do (430 of 1,000 samples/s); "
        "the loader alone reaches 440: the loader is the bottleneck."
    )
    beside = diagnosis_of(in_turns)
    on_cpu = beside.evidence.environment.model_copy(update={"device_kind": "cpu"})
    alone = beside.model_copy(update={"evidence": beside.evidence.model_copy(update={"environment": on_cpu})})
    assert "take turns" in say_present(alone)
    assert "take turns" not in say_present(beside), "an accelerator computes while the host loads"
    assert "only the device's own settings" in say_present(diagnosis_of(healthy))


def copying(config: TrainingConfig) -> FakeTrial:
    """Copies from pageable memory take as long as computing does."""
    copy = 6000.0 if config.pin_memory else 1000.0
    rate = 1 / (1 / 1000 + 1 / copy)
    return FakeTrial(
        samples_per_s=rate, busy_fraction=1.0, loader_ceiling=9000.0, device_ceiling=1000.0, copy_ceiling=copy
    )


def test_copies_are_shown_beside_both_sides() -> None:
    diagnosis = diagnosis_of(copying)
    shown = " ".join(printed(diagnosis).split())
    assert "copying alone 1,000 samples/s" in shown
    assert diagnosis.evidence.measurement.copy_ceiling == diagnosis.standing.copy_ceiling == 1000.0
    assert [point.changes for point in diagnosis.evidence.curves.copy] == [{}, {"pin_memory": True}]
    assert "| copy | pin\\_memory=True | 6,000 |" in render_diagnosis(diagnosis)
    assert "Set pin_memory=True" in shown
    assert "copying alone" not in printed(diagnosis_of(in_turns))


def test_copies_that_are_the_lowest_ceiling_are_said_to_hold_the_rate() -> None:
    diagnosis = with_measurement(diagnosis_of(copying), copy_ceiling=520.0)
    assert say_present(diagnosis).endswith("copying batches to it is the bottleneck.")


def with_measurement(diagnosis: Diagnosis, **changes: Any) -> Diagnosis:
    """As if its run had measured otherwise."""
    run = diagnosis.evidence.measurement.model_copy(update=changes)
    evidence = diagnosis.evidence.model_copy(update={"measurement": run})
    return diagnosis.model_copy(update={"evidence": evidence, "standing": headroom_today(evidence)})


@pytest.mark.parametrize(
    ("missing", "present", "today"),
    [
        (
            {"device_ceiling": None},
            (
                "Judged by the waits for data, you run at about 40 % of what this device can do "
                "(430 of 1,075 samples/s); the device alone was not measured; the loader alone reaches 440."
            ),
            "device alone not measured (about 1,075 samples/s by the waits for data)",
        ),
        (
            {"loader_ceiling": None},
            (
                "You run at 43 % of what this device can do (430 of 1,000 samples/s); "
                "the loader alone was not measured, its items' costs allow 439.4."
            ),
            "loader alone not measured (about 439.4 samples/s by its items' costs)",
        ),
        (
            {"loader_ceiling": None, "loader_costs": None},
            "You run at 43 % of what this device can do (430 of 1,000 samples/s); the loader alone was not measured.",
            "loader alone not measured ",
        ),
    ],
)
def test_a_ceiling_that_was_not_measured_is_never_given_as_measured(missing: Any, present: str, today: str) -> None:
    diagnosis = with_measurement(diagnosis_of(held_by_loader), **missing)
    assert say_present(diagnosis) == present
    assert today in " ".join(printed(diagnosis).split()) + " "
    assert Diagnosis.model_validate_json(diagnosis.model_dump_json()) == diagnosis


def test_each_part_of_the_time_names_its_source() -> None:
    shares = {part: Share(fraction=0.2, source=f"source of {part}") for part in PARTS}
    diagnosis = with_measurement(diagnosis_of(analytic_cost), breakdown=TimeBreakdown(**shares, restart_fraction=0.1))
    lines = [line.strip() for line in printed(diagnosis).splitlines()]
    assert "waiting for data, of it at epochs' ends: source of data_wait" in lines
    assert "idle: source of idle" in lines
    assert not any("measured by" in line for line in lines)
    markdown = render_diagnosis(diagnosis)
    assert "| share | measured by |" in markdown
    assert all(f"source of {part}".replace("_", "\\_") in markdown for part in PARTS)


def test_time_that_was_not_measured_is_not_shown_as_computing() -> None:
    diagnosis = with_measurement(diagnosis_of(analytic_cost), breakdown=None)
    text = printed(diagnosis)
    assert "all else: not measured" in text
    assert "computing  " not in text


def test_a_loaders_costs_and_the_devices_fullness_are_shown() -> None:
    costs = diagnosis_of(analytic_cost).evidence.measurement.loader_costs
    assert costs is not None
    costs = costs.model_copy(update={"item_p99_s": 0.077, "batches_per_worker_per_s": 31.0, "pin_s": None})
    fullness = Fullness(sm_fraction=0.91, sm_occupancy=None, tensor_fraction=0.13, dram_fraction=0.47)
    diagnosis = with_measurement(diagnosis_of(analytic_cost), loader_costs=costs, fullness=fullness)
    text = " ".join(printed(diagnosis).split())
    assert "its 99th percentile 77 ms" in text
    assert "batches per worker and second 31" in text
    assert "pin a batch" not in text
    assert "multiprocessors in use (GPM) 91 %" in text
    assert "memory bandwidth used (GPM) 47 %" in text
    assert "warps resident" not in text


def test_several_ranks_and_their_exchange_are_shown() -> None:
    ranks = (make_rank(0), make_rank(1, device_ceiling=6_400.0))
    diagnosis = with_measurement(diagnosis_of(analytic_cost), ranks=ranks, communication=TALK)
    text = " ".join(printed(diagnosis).split())
    assert "exchange exchanging gradients makes a step 2.5 ms longer (20 % of it)" in text
    assert "Rank 1 (cuda:1) is uneven: its device alone gives 50" in text
    assert "Each rank" in render_diagnosis(diagnosis)
    assert max(map(len, printed(diagnosis).splitlines())) <= 80
    assert "Each rank" not in printed(diagnosis_of(analytic_cost))


def test_foreign_text_is_neither_markup_nor_more_than_a_line() -> None:
    hostile = "ValueError: [red]no[/red] | `x`\n\x1b[31m<b>this</b>"
    diagnosis = diagnosis_of(analytic_cost).model_copy(update={"name": hostile, "notes": (hostile,)})
    text = printed(diagnosis)
    assert "[red]no[/red] | `x` <b>this</b>" in text
    assert "\x1b" not in text
    markdown = render_diagnosis(diagnosis)
    assert "- ValueError: \\[red\\]no\\[/red\\] \\| \\`x\\` \\<b\\>this\\</b\\>" in markdown
