"""A diagnosis as text: the same content in both forms, 80 columns, and a user's text never taken for markup."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

import autotune
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import judge
from autotune.messages.diagnosis import CHECKS, not_excluded
from autotune.messages.trials import no_time_left
from autotune.note import Note
from autotune.records.measurement import HostLoad
from autotune.records.result import CurvePoint, Curves, Diagnosis
from autotune.report.blocks import Table
from autotune.report.diagnosis import describe_present, diagnosis_sections, render_diagnosis
from autotune.report.words import one_line, shorten
from autotune.testing import FakeLauncher, FakeTrial
from tests.factories import GPU, make_evidence, make_point
from tests.report.cases import diagnosis_cases, make_advice
from tests.report.forms import diagnosis_on_console

CASES = diagnosis_cases()


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_line_fits_into_80_columns(name: str, is_full: bool) -> None:
    text = diagnosis_on_console(CASES[name], is_full=is_full)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "None" not in text


@pytest.mark.parametrize("name", CASES)
def test_default_has_at_most_40_lines(name: str) -> None:
    assert len(diagnosis_on_console(CASES[name]).splitlines()) <= 40


@pytest.mark.parametrize("name", CASES)
def test_both_forms_say_the_same_first(name: str) -> None:
    head = CASES[name].headline
    on_console = diagnosis_on_console(CASES[name], is_full=True)
    assert "".join(on_console.split()).startswith("".join(head.split()))
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


LOADED = HostLoad(seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=0.5, stolen_s=0.0)


def test_default_shows_doubts_and_counts_all_notes() -> None:
    noted = CASES["nothing-recurs"]
    doubt = next(note for note in noted.notes if note.code == "cores_taken")
    quiet = Note(code="quiet", text="a detail")
    lines = diagnosis_on_console(
        noted.model_copy(update={"notes": (quiet, doubt, doubt)})
    ).splitlines()
    assert [line for line in lines if line.startswith("Note: ")] == [shorten(f"Note: {doubt}", 80)]
    assert "3 notes" in lines[-1]


def test_default_leaves_out_no_cause_that_is_not_excluded() -> None:
    causes = tuple(not_excluded(cause, "why " * 20) for cause in CHECKS)
    text = diagnosis_on_console(CASES["gpu"].model_copy(update={"not_excluded": causes}))
    assert all(name in text for name in CHECKS.values())
    assert all(
        str(cause)
        in " ".join(
            render_diagnosis(CASES["gpu"].model_copy(update={"not_excluded": causes})).split()
        )
        for cause in causes
    )


def test_settings_of_an_earlier_piece_are_not_advised_again() -> None:
    both = make_advice("both", gain=(0.3, 0.2, 0.4), num_workers=4, pin_memory=True)
    one = make_advice("one", gain=(0.2, 0.1, 0.3), num_workers=4)
    other = make_advice("other", gain=(0.1, 0.1, 0.2), num_workers=8)
    code = make_advice("code", gain=(0.1, 0.1, 0.2))
    found = CASES["gpu"].model_copy(update={"advice": (both, one, other, code)})
    advised = diagnosis_on_console(found).partition("What to do")[2].splitlines()
    assert [line.rsplit(maxsplit=1)[-1] for line in advised[1:4]] == ["both.", "other.", "code."]
    assert "1 more piece" in advised[-1]


def test_full_form_has_all_advice_and_sections() -> None:
    case = CASES["anomaly-mode"]
    text = " ".join(diagnosis_on_console(case, is_full=True).split())
    assert all(section.title in text for section in diagnosis_sections(case))
    assert all(piece.text.split()[-1] in text for piece in case.advice)


def test_shares_replace_the_time_breakdown_by_default() -> None:
    titles = [section.title for section in diagnosis_sections(CASES["checkpoints"])]
    assert titles[0] in diagnosis_on_console(CASES["checkpoints"])
    assert titles[1] not in diagnosis_on_console(CASES["checkpoints"])
    assert diagnosis_sections(CASES["healthy"])[0].title in diagnosis_on_console(CASES["healthy"])


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
    measurement = case.evidence.measurement.model_copy(update={"host_load": LOADED})
    evidence = case.evidence.model_copy(update={"measurement": measurement})
    loaded = case.model_copy(update={"evidence": evidence})
    assert "1. +" in diagnosis_on_console(case)
    assert "1. +" not in diagnosis_on_console(loaded)
    text = render_diagnosis(loaded)
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
    text = diagnosis_on_console(diagnosis, is_full=True)
    assert one_line(hostile) in text
    assert "\x1b" not in text
    markdown = render_diagnosis(diagnosis)
    assert r"\[red\]no\[/red\] \| \`x\`" in markdown
    assert r"\<b\>this\</b\>" in markdown
