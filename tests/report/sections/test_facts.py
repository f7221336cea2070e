"""Machine, workload and run in words."""

from __future__ import annotations

from pathlib import Path

from autotune.note import note
from autotune.report.sections.facts import describe_environment, describe_run, describe_workload, list_files
from tests.factories import SERVER, make_facts, make_script, make_summary


def test_one_host_is_not_counted() -> None:
    told = describe_environment(SERVER)
    assert told["device"] == "NVIDIA H200 (cuda:0, 139 GiB)"
    assert not any("host" in value for value in told.values())


def test_several_hosts_are_told_with_what_each_has() -> None:
    told = describe_environment(SERVER.model_copy(update={"hosts": 3, "device_count": 8}))
    assert told["device"] == "3 hosts, each: NVIDIA H200 (cuda:0, 139 GiB)"
    assert told["devices"] == "8 on each host"
    assert told["processor"].endswith(" of RAM on each host")


def test_numa_nodes_are_told_where_there_are_several() -> None:
    assert describe_environment(SERVER)["processor"].startswith("16 cores, ")
    told = describe_environment(SERVER.model_copy(update={"numa_nodes": 2}))
    assert told["processor"].startswith("16 cores of 2 NUMA nodes, ")


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


def test_a_script_is_told_by_its_loop_its_loader_and_its_command() -> None:
    told = describe_workload(make_facts(script=make_script(framework="transformers")))
    assert (told["data"], told["loop"]) == ("map-style dataset, 10,000 samples", "transformers")
    assert told["loader"] == "made in train.py, line 7"
    unfed = describe_workload(make_facts(dataset_length=None, script=make_script(loaders=())))
    assert unfed["data"] == "no DataLoader"
    assert "loader" not in unfed
    command = ("python", "my train.py", "--lr={lr}")
    assert describe_run(make_summary(command=command))["command"] == "python 'my train.py' '--lr={lr}'"
    assert "command" not in describe_run(make_summary())


def test_a_change_of_the_script_is_listed_where_there_is_one(tmp_path: Path) -> None:
    assert "recommended.patch" not in list_files(tmp_path)
    (tmp_path / "recommended.patch").touch()
    assert list_files(tmp_path) == {"recommended.patch": "the loader's settings as a change of the script"}
