from __future__ import annotations

import sqlite3
from functools import partial

import pytest

from autotune.note import note
from autotune.records.study_identity import identify
from autotune.settings.plan import Plan
from autotune.settings.workload import Ref, Workload
from autotune.testing import fake_environment


class Photos:
    """A dataset with something that can't be compared."""

    def __init__(self, side: int) -> None:
        self.side, self.reader = side, sqlite3.connect(":memory:")


def test_what_has_changed_is_named_by_the_part() -> None:
    def fields(side: int) -> dict[str, str]:
        workload = Workload(model=partial(Photos, 3), dataset=Photos(side), multiprocessing_context="spawn")
        return identify(Plan(name="x", workload=workload), fake_environment(), {}).fields

    before, after = fields(32), fields(64)
    assert {name for name in before if before[name] != after[name]} == {"dataset"}
    assert before["multiprocessing_context"] == "spawn"


def test_what_is_not_compared_is_a_note_with_its_names() -> None:
    workload = Workload(model=object, dataset=Photos(32))
    found = identify(Plan(name="x", workload=workload), fake_environment(), {})
    assert found.notes == (note("not_compared", parts=["dataset.reader (Connection)"]),)
    assert "not compared: dataset.reader (Connection)" in found.fields["dataset"]
    assert identify(PLAN, fake_environment(), {}).notes == ()


def test_a_reference_counts_by_its_target_and_its_files() -> None:
    ref = Ref(target="net.py:build", folders=("/anywhere",))
    plan = Plan(name="x", workload=Workload(model=ref, dataset=ref))
    found = identify(plan, fake_environment(), {"model": "abc", "dataset": ""}).fields
    assert (found["model"], found["dataset"]) == ("net.py:build#abc", "net.py:build")


PLAN = Plan(name="x", workload=Workload(model=object, dataset=list))


@pytest.mark.parametrize(
    ("part", "value", "name", "told"),
    [
        ("device_name", "NVIDIA H200", "device", "NVIDIA H200"),
        ("device_kind", "rocm", "kind of device", "rocm"),
        ("device_count", 8, "devices", "8"),
        ("driver", None, "driver", "none"),
        ("cores", 16, "cores", "16"),
        ("torch", "2.13", "torch", "2.13"),
        ("cuda", "13.0", "CUDA", "13.0"),
        ("device_names", ("Fake GPU", "Other GPU"), "unlike devices", "Fake GPU, Other GPU"),
        ("tf32_overrides", ("NVIDIA_TF32_OVERRIDE=0",), "TF32 switches", "NVIDIA_TF32_OVERRIDE=0"),
    ],
)
def test_each_part_of_the_fingerprint_tells_searches_apart_by_its_own_name(
    part: str, value: object, name: str, told: str
) -> None:
    before = fake_environment()
    after = before.model_copy(update={part: value})
    assert after.fingerprint != before.fingerprint
    here, there = identify(PLAN, after, {}).fields, identify(PLAN, before, {}).fields
    assert {key for key in here if here[key] != there[key]} == {name}
    assert here[name] == told


def test_what_the_fingerprint_leaves_out_tells_no_searches_apart() -> None:
    before = fake_environment()
    after = before.model_copy(update={"python": "3.14", "hosts": 4, "ram_bytes": 1, "versions": {"numpy": "3"}})
    assert after.fingerprint == before.fingerprint
    assert identify(PLAN, after, {}) == identify(PLAN, before, {})
