"""The machine in words: one host, or each of several."""

from __future__ import annotations

from autotune.note import note
from autotune.report.sections.facts import describe_environment
from tests.factories import SERVER


def test_one_host_is_not_counted() -> None:
    told = describe_environment(SERVER)
    assert told["device"] == "NVIDIA H200 (cuda:0, 139 GiB)"
    assert not any("host" in value for value in told.values())


def test_several_hosts_are_told_with_what_each_has() -> None:
    told = describe_environment(SERVER.model_copy(update={"hosts": 3, "device_count": 8}))
    assert told["device"] == "3 hosts, each: NVIDIA H200 (cuda:0, 139 GiB)"
    assert told["devices"] == "8 on each host"
    assert told["processor"].endswith(" of RAM on each host")


def test_unlike_devices_switches_and_remarks_are_told_where_there_are_any() -> None:
    plain = SERVER
    assert describe_environment(plain).keys().isdisjoint({"devices", "TF32 switches", "malloc", "note"})
    remarks = (note("odd", what="more"),)
    odd = {"device_count": 2, "device_names": ("A", "B"), "tf32_overrides": ("X=1",), "remarks": remarks}
    told = describe_environment(plain.model_copy(update=odd))
    assert (told["devices"], told["TF32 switches"], told["note"]) == ("2: A, B", "X=1", "odd: what=more")


def test_what_is_set_for_malloc_is_told_and_whether_for_trials_alone() -> None:
    users = SERVER.model_copy(update={"malloc": ("A=1", "B=2")})
    assert describe_environment(users)["malloc"] == "A=1 B=2"
    assert describe_environment(users.model_copy(update={"keeps_memory": True}))["malloc"] == "A=1 B=2 (set for trials)"
