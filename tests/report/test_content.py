"""The machine in words: one host, or each of several."""

from __future__ import annotations

from autotune.report.content import describe_environment

from .conftest import make_environment


def test_one_host_is_not_counted() -> None:
    told = describe_environment(make_environment())
    assert told["device"] == "NVIDIA H200 (cuda:0, 139 GiB)"
    assert not any("host" in value for value in told.values())


def test_several_hosts_are_told_with_what_each_has() -> None:
    told = describe_environment(make_environment().model_copy(update={"hosts": 3, "device_count": 8}))
    assert told["device"] == "3 hosts, each: NVIDIA H200 (cuda:0, 139 GiB)"
    assert told["devices"] == "8 on each host"
    assert told["processor"].endswith(" of RAM on each host")
