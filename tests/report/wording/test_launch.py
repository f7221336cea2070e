"""The English of launch's and ray's notes."""

from __future__ import annotations

import pytest

from autotune.note import note
from autotune.report.wording import say


def test_a_host_that_is_not_used_is_named_with_the_reason() -> None:
    refused = note("host_of_other_kind", host="b (10.0.0.2)", reason="a study is bound to one kind of machine")
    assert say(refused) == "b (10.0.0.2) is not used: a study is bound to one kind of machine."


def test_slower_starts_are_explained_with_the_remedy() -> None:
    sentence = say(note("forks_cannot_open_device", devices="cuda"))
    assert sentence.startswith("Each trial starts an interpreter of its own, which takes some seconds: ")
    assert "opened cuda" in sentence
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in sentence


@pytest.mark.parametrize(
    ("culprit", "reason", "end"),
    [
        (None, "threads", "what the script imports starts threads when it is imported"),
        ("deep", "device", "deep opens a device when it is imported"),
        ("deep", "processes", "deep starts processes when it is imported"),
        ("deep", "hang", "deep could not be imported ahead within two minutes."),
        ("deep", "ended", "deep ended the process that imported it ahead."),
    ],
)
def test_what_each_trial_imports_anew_is_named_with_the_reason(culprit: str | None, reason: str, end: str) -> None:
    sentence = say(note("not_preloaded", packages=["deep", "wide"], culprit=culprit, reason=reason))
    assert sentence.startswith(f"Each trial imports deep, wide anew, which takes it longer to begin: {end}")


def test_why_each_trial_builds_anew_is_told() -> None:
    assert say(note("trials_cannot_share")).startswith("Each trial builds the workload anew, which takes it longer")


def test_why_the_look_at_other_settings_ended_is_told() -> None:
    assert say(note("curves_ended", reason="it hung")) == "The job ended before the rest was measured: it hung."


def test_another_search_is_told_with_whose_it_is() -> None:
    sentence = say(note("another_search", pid=7, user="ann", command="autotune run a.yaml"))
    assert sentence.startswith("Another search runs on this machine: process 7 of ann (autotune run a.yaml). ")
