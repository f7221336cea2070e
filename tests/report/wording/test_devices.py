"""The sentences on a device's conditions and on ranks."""

from __future__ import annotations

import pytest

from autotune.note import Note, note
from autotune.report.wording.catalogue import load_codes
from autotune.report.wording.say import say

_SENTENCES: list[tuple[Note, str]] = [
    (
        note("cores_taken", others_cores=1.04, cores=2),
        (
            "Other programs used 1.0 of the 2 cores during the window: rates are lower than on a quiet machine, most "
            "of all where threads wait for each other."
        ),
    ),
    (
        note("clock_lowered", reasons=["power_brake", "thermal"]),
        "The device's clock was lowered during the window: power brake and heat.",
    ),
    (
        note("clock_moved", first_mhz=1980, last_mhz=1500, on_ranks=[0, 2]),
        "rank 0, 2: The device's clock moved from 1980 to 1500 MHz during the window.",
    ),
    (
        note("others_on_device", held_bytes=3 * 2**30, busy_fraction=None),
        "Before the first trial other processes held 3.00 GiB of the device's memory, which counts in every peak.",
    ),
    (
        note("others_on_device", held_bytes=3 * 2**30, busy_fraction=0.62),
        (
            "Before the first trial other processes held 3.00 GiB of the device's memory, which counts in every peak, "
            "and kept it busy for 62 % of the time: rates are lower than on a device of its own."
        ),
    ),
]


@pytest.mark.parametrize(("given", "sentence"), _SENTENCES)
def test_each_note_has_its_sentence(given: Note, sentence: str) -> None:
    assert say(given) == sentence


def test_every_sentence_is_tested() -> None:
    assert {given.code for given, _ in _SENTENCES} == load_codes("devices")
