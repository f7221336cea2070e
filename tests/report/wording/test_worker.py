"""What the worker has to tell the user, in English: every note that it makes has a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autotune.worker
from autotune.note import Note, note
from autotune.report.wording import say
from autotune.report.wording.catalogue import load_codes

WHERE = "where the time goes"
_NOTE = re.compile(r'\bnote\(\s*"(\w+)"')


def test_every_note_of_the_worker_has_a_sentence() -> None:
    files = Path(autotune.worker.__file__).parent.rglob("*.py")
    codes = {code for path in files for code in _NOTE.findall(path.read_text())}
    assert codes <= load_codes("worker")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            note("no_time_for_extras", stages=["communication", "time_breakdown", "item_costs"]),
            f"the deadline was too near to measure what exchanging gradients takes, {WHERE} and what an item costs",
        ),
        (
            note("extra_failed", stage="transfer", cause="OSError: full"),
            "a batch's way from a worker could not be measured (OSError: full)",
        ),
        (
            note("rank_gone_before_extras", stages=["item_costs"], on_ranks=[1, 3]),
            "rank 1, 3: another rank was gone before what an item costs could be measured",
        ),
        (
            note("batch_too_large", expected_bytes=2**35, limit_bytes=2**34),
            "it might take 32.0 GiB, over the limit of 16.0 GiB",
        ),
        (
            note("launches_wait", variable="CUDA_LAUNCH_BLOCKING=1"),
            "CUDA_LAUNCH_BLOCKING=1 is set: each launch waits for its kernel, which no training should; unset it.",
        ),
    ],
)
def test_a_note_becomes_a_sentence_with_its_figures(told: Note, sentence: str) -> None:
    assert say(told) == sentence
