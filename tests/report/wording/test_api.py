"""The sentences about the workload as a whole."""

from __future__ import annotations

import pytest

from autotune.note import Note, note
from autotune.report.wording.catalogue import load_codes
from autotune.report.wording.say import say

_SENTENCES: list[tuple[Note, str]] = [
    (
        note("default_optimizer", trainable_parameters=68, adam_bytes=8 * 68),
        "No optimizer was given: trials train with SGD, which keeps no state. Adam and AdamW need 544 B more memory",
    ),
    (
        note("batch_follows_budget", max_tokens=4096, samples=12.61),
        "The batch sampler fills a token budget: what is searched is max_tokens, and micro_batch_size follows it. At",
    ),
    (
        note("goes_on", has_command=False),
        "This search goes on from an earlier one in its folder: workload, settings and machine are equal. The content",
    ),
    (
        note("goes_on", has_command=True),
        "This search goes on from an earlier one in its folder: command, script, settings and machine are equal. What",
    ),
    (
        note("file_damaged", name="curves.json", reason="no JSON"),
        "curves.json in the run folder was damaged; what it told is taken from the study, or measured anew: no JSON",
    ),
    (
        note("trials_lost", count=3, kept="trials.lost.jsonl"),
        "study.db in the run folder does not hold 3 of the trials that trials.jsonl tells of: they are kept in",
    ),
    (
        note("trials_lost", count=3, kept=None),
        "study.db in the run folder does not hold 3 of the trials that trials.jsonl tells of; a search that goes on",
    ),
    (
        note("optimizer_not_told", reason="no JSON"),
        "Exported without the name of your optimizer, which the run folder could not tell: no JSON",
    ),
    (
        note("applying", command="python train.py --lr 0.1"),
        "autotune: starting python train.py --lr 0.1 with the recommended settings",
    ),
    (
        note("not_exported", setting="channels_last", reason="it has no images"),
        "not exported: channels_last: it has no images",
    ),
    (note("differs_by_default", name="optim", reason="adamw"), "differs by default: optim: adamw"),
    (note("not_read", path="args.json", name="optim", reason="say it"), "args.json: not read: optim: say it"),
    (note("others_not_read", path="args.json", names=["a", "b"]), "args.json: nothing here stands for a, b"),
    (
        note("taken_by_default", path="args.json", title="transformers", values=["lr=5e-05"]),
        "args.json: left out, so taken from the defaults of transformers: lr=5e-05",
    ),
    (
        note("not_read_over", setting="fused", name="optim", reason="other_optimizer", own="AdamW", trained="SGD"),
        "optim of the framework's file is left out of the baseline: there it is of AdamW, and trials train with SGD.",
    ),
    (
        note("not_read_over", setting="fused", name="optim", reason="no_fused_optimizer", own="AdamW", trained="Lion"),
        "optim of the framework's file is left out of the baseline: torch can't fuse Lion for these parameters",
    ),
    (
        note("not_read_over", setting="numa_binding", name="enable_cpu_affinity", reason="no_binding"),
        "enable_cpu_affinity of the framework's file is left out of the baseline: processes can't be bound to a NUMA",
    ),
    (
        note("ddp_without_ranks", path="args.json", names=["ddp_static_graph"]),
        "args.json: not read: ddp_static_graph: needs baseline.strategy: ddp and baseline.world_size, which this file",
    ),
]


@pytest.mark.parametrize(("found", "sentence"), _SENTENCES)
def test_a_note_on_the_workload_has_its_sentence(found: Note, sentence: str) -> None:
    assert say(found).startswith(sentence)


def test_a_token_budget_is_told_with_the_samples_that_it_holds() -> None:
    sentence = say(note("batch_follows_budget", max_tokens=4096, samples=12.61))
    assert sentence.endswith("At your 4,096 tokens a batch holds 12.6 samples on average.")


def test_every_code_of_the_table_is_covered() -> None:
    assert {found.code for found, _ in _SENTENCES} == load_codes("api")
