"""What the worker has to tell the user, in English: every note that it makes has a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autotune.worker
from autotune.note import Note, note
from autotune.report.wording import say
from autotune.report.wording.catalogue import load_codes, load_sentences
from autotune.worker.attach.loop import sightings, step_traits

WHERE = "where the time goes"
_NOTE = re.compile(r'\bnote\(\s*"(\w+)"')
_REASONS = ["no_loader", "own_batches", "own_precision", "not_comparable", "several_ranks", "no_module", "own_layout"]
_REASONS += ["own_threads", "own_algorithms", "own_optimizer", "in_the_script"]


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
        (
            note("outside_training", seconds=3.14, epochs=0),
            (
                "The script spent 3.1 s of the measurement on other than training, such as an evaluation: the rate "
                "leaves that out."
            ),
        ),
        (
            note("outside_training", seconds=3.14, epochs=2),
            (
                "The script spent 3.1 s of the measurement on other than training, such as an evaluation between 2 "
                "epochs: the rate leaves that out."
            ),
        ),
        (
            note("seen_on_rank_0", ranks=2),
            "Rates and memory are those of rank 0, times 2: the script's ranks train in step.",
        ),
    ],
)
def test_a_note_becomes_a_sentence_with_its_figures(told: Note, sentence: str) -> None:
    assert say(told) == sentence


@pytest.mark.parametrize(
    ("setting", "reason", "why"),
    [
        ("num_workers", "no_loader", "it takes its batches from no DataLoader"),
        ("micro_batch_size", "own_batches", "its DataLoader is given batches by a sampler of the script's own"),
        ("amp_dtype", "own_precision", "the script chooses its precision itself"),
        (
            "amp_dtype",
            "not_comparable",
            "without a DataLoader no batch can be given to it twice, to compare precisions",
        ),
        ("amp_dtype", "several_ranks", "precisions are compared in one process, and it has several ranks"),
        ("amp_dtype", "no_module", "no module that trains was seen to be called"),
        ("channels_last", "own_layout", "the script chooses its layout itself"),
        ("intra_op_threads", "own_threads", "the script sets the number of threads itself"),
        ("cudnn_benchmark", "own_algorithms", "the script asks for deterministic algorithms"),
        (
            "fused",
            "own_optimizer",
            "the script makes its optimizer itself; give it fused=True there to measure that",
        ),
        ("compile", "in_the_script", "only the script itself can change it"),
    ],
)
@pytest.mark.parametrize("has_placeholder", [True, False])
def test_a_setting_out_of_reach_is_named_with_the_reason_and_the_way_to_reach_it(
    setting: str, reason: str, why: str, has_placeholder: bool
) -> None:
    option = f"Where the script has an option for it, write its value as {{{setting}}} in the command"
    way = f". {option} to have it searched" if has_placeholder else ""
    told = note("setting_unreached", setting=setting, reason=reason, has_placeholder=has_placeholder)
    assert say(told) == f"{setting} was left as the script has it: {why}{way}."


def test_every_reason_that_a_setting_is_out_of_reach_has_words_of_its_own() -> None:
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (sightings, step_traits))
    template = load_sentences()["setting_unreached"]
    reasons = set(re.findall(r'reason == "(\w+)"', template))
    assert reasons <= set(re.findall(r'"(\w+)"', source))
    assert {code for code in _REASONS if code not in reasons} == {"in_the_script"}
