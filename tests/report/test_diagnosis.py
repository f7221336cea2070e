"""A diagnosis as text: the same content in both forms, 80 columns, and a user's text never taken for markup."""

from __future__ import annotations

import pytest

import autotune
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import judge
from autotune.messages.trials import no_time_left
from autotune.note import Note
from autotune.records.measurement import HostLoad
from autotune.records.result import CurvePoint, Curves, Diagnosis
from autotune.report.blocks import Table
from autotune.report.diagnosis import describe_present, diagnosis_sections, render_diagnosis
from autotune.report.words import one_line
from autotune.testing import FakeLauncher, FakeTrial
from tests.factories import GPU, make_evidence, make_point
from tests.report.cases import diagnosis_cases
from tests.report.forms import diagnosis_on_console

CASES = diagnosis_cases()


@pytest.mark.parametrize("name", CASES)
def test_every_line_fits_into_80_columns(name: str) -> None:
    text = diagnosis_on_console(CASES[name])
    assert max(map(len, text.splitlines())) <= 80
    assert "None" not in text


@pytest.mark.parametrize("name", CASES)
def test_both_forms_say_the_same_first(name: str) -> None:
    head = CASES[name].headline
    assert " ".join(diagnosis_on_console(CASES[name]).split()).startswith(head)
    assert render_diagnosis(CASES[name]).splitlines()[2].replace("\\", "") == f"**{head}**"


@pytest.mark.parametrize("name", CASES)
def test_a_diagnosis_survives_json(name: str) -> None:
    assert Diagnosis.model_validate_json(CASES[name].model_dump_json()) == CASES[name]


def test_loading_alternates_on_the_cpu_alone() -> None:
    on_cpu = CASES["in-turns"]
    evidence = on_cpu.evidence.model_copy(update={"environment": GPU})
    replaced_arguments = on_cpu.model_copy(update={"evidence": evidence})
    assert ["alternate" in describe_present(one) for one in (on_cpu, replaced_arguments)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(("name", "limit"), [("copies-hold", "copying"), ("host-holds", "host")])
def test_known_limit_needs_no_loader(name: str, limit: str) -> None:
    case = CASES[name]
    run = case.evidence.measurement.model_copy(update={"loader_ceiling": None})
    evidence = case.evidence.model_copy(update={"measurement": run})
    assert limit in describe_present(case.model_copy(update={"evidence": evidence}))


def test_exceeded_ceiling_has_no_share() -> None:
    """The device alone was measured while other programs had the cores."""
    healthy = CASES["healthy"]
    headroom = healthy.headroom.model_copy(update={"share_of_device": 5.36})
    assert "%" in describe_present(healthy)
    assert "%" not in describe_present(healthy.model_copy(update={"headroom": headroom}))


TODAYS, FASTER = make_point(658.0), make_point(2820.0, num_workers=16)
LATE = make_point(None, num_workers=8).model_copy(update={"reason": no_time_left()})


@pytest.mark.parametrize(
    ("points", "shown"),
    [
        ((TODAYS, LATE), None),
        ((TODAYS, make_point(None, num_workers=4)), None),
        ((TODAYS, FASTER, LATE), ["yours", "num_workers=16"]),
        (
            (TODAYS, FASTER, make_point(None, num_workers=4)),
            ["yours", "num_workers=16", "num_workers=4"],
        ),
    ],
)
def test_other_settings_are_shown_if_measured(
    points: tuple[CurvePoint, ...], shown: list[str] | None
) -> None:
    found = judge("resnet", make_evidence(658.0, curves=Curves(loader=points)))
    tables = [
        section.blocks[0]
        for section in diagnosis_sections(found)
        if section.title == "Other settings, each side alone"
    ]
    rows = [row[1] for table in tables if isinstance(table, Table) for row in table.rows]
    assert rows == (shown or [])
    assert bool(tables) == bool(shown)


def test_advice_on_a_loaded_machine_has_no_gains() -> None:
    case = next(one for one in CASES.values() if one.advice)
    load = HostLoad(seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=0.5, stolen_s=0.0)
    measurement = case.evidence.measurement.model_copy(update={"host_load": load})
    evidence = case.evidence.model_copy(update={"measurement": measurement})
    text = render_diagnosis(case.model_copy(update={"evidence": evidence}))
    assert "| advice |\n" in text
    assert "| gain |" not in text
    assert "| gain |" in render_diagnosis(case)


def copying(config: TrainingConfig) -> FakeTrial:
    """Copies from pageable memory take as long as computing does."""
    copy = 6000.0 if config.pin_memory else 1000.0
    rate = 1 / (1 / 1000 + 1 / copy)
    return FakeTrial(
        samples_per_s=rate,
        busy_fraction=1.0,
        loader_ceiling=9000.0,
        device_ceiling=1000.0,
        copy_ceiling=copy,
    )


def test_copies_are_measured_beside_both_sides() -> None:
    launcher = FakeLauncher(copying, noise=0.0)
    diagnosis = autotune.diagnose(object, list, progress=False, launcher=launcher).diagnosis
    assert diagnosis.evidence.measurement.copy_ceiling == diagnosis.headroom.copy_ceiling == 1000.0
    assert [point.changes for point in diagnosis.evidence.curves.copy] == [{}, {"pin_memory": True}]
    assert {"pin_memory": True} in [advice.settings for advice in diagnosis.advice]


def test_foreign_text_is_one_plain_line() -> None:
    hostile = "ValueError: [red]no[/red] | `x`\n\x1b[31m<b>this</b>"
    diagnosis = CASES["healthy"].model_copy(
        update={"name": hostile, "notes": (Note(code="a", text=hostile),)}
    )
    text = diagnosis_on_console(diagnosis)
    assert one_line(hostile) in text
    assert "\x1b" not in text
    markdown = render_diagnosis(diagnosis)
    assert r"\[red\]no\[/red\] \| \`x\`" in markdown
    assert r"\<b\>this\</b\>" in markdown
