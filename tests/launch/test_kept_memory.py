"""Trials keep freed memory unless the user has chosen how malloc gives it back."""

from __future__ import annotations

import os
import sys

import pytest

from autotune.launch.machine import KEEPING, has_kept_memory, malloc_switches, with_kept_memory

KEPT = tuple(f"{name}={value}" for name, value in KEEPING.items())


@pytest.fixture(autouse=True)
def glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")


def test_both_variables_are_set_where_nobody_has_chosen() -> None:
    environment = with_kept_memory(
        {"PATH": "/bin", "GLIBC_TUNABLES": "glibc.pthread.rseq=0", "MALLOC_ARENA_MAX": "2"}
    )
    assert environment["PATH"] == "/bin"
    assert malloc_switches(environment) == KEPT
    assert has_kept_memory(environment)


@pytest.mark.parametrize(
    ("users", "switches"),
    [
        ({"MALLOC_TRIM_THRESHOLD_": "0"}, ("MALLOC_TRIM_THRESHOLD_=0",)),
        ({"MALLOC_MMAP_THRESHOLD_": "4096"}, ("MALLOC_MMAP_THRESHOLD_=4096",)),
        (dict(KEEPING), KEPT),
        (
            {"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.hugetlb=0"},
            ("glibc.malloc.hugetlb=0",),
        ),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, ()),
    ],
)
def test_what_the_user_has_chosen_stays_as_it_is(
    users: dict[str, str], switches: tuple[str, ...]
) -> None:
    environment = with_kept_memory(users)
    assert environment == users
    assert malloc_switches(environment) == switches
    assert not has_kept_memory(environment)


def test_what_a_trial_starts_has_it_of_itself() -> None:
    """A search inside a trial: the variables are its caller's, and its results need not say how to have them."""
    inner = with_kept_memory(with_kept_memory({}))
    assert malloc_switches(inner) == KEPT
    assert not has_kept_memory(inner)


def test_with_another_c_library_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def refuse(name: str) -> str:
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(os, "confstr", refuse)
    assert with_kept_memory({"PATH": "/bin"}) == {"PATH": "/bin"}
