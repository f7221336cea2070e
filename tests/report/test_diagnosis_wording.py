"""The words of a diagnosis and of several devices compared: every code has its sentence, and some are read here."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

import autotune.diagnosis
from autotune.diagnosis.gains import advise
from autotune.diagnosis.remedies import FORMAT_ADVICE
from autotune.diagnosis.scaling_bottlenecks import Cause, ScalingBottleneck
from autotune.diagnosis.verdict import judge
from autotune.note import note
from autotune.records.diagnosis import Bottleneck, Curves
from autotune.records.lengths import BucketForecast, Lengths, PackForecast
from autotune.report.sections.advice import advice_in_words, diagnosis_in_words, say_group_evidence
from autotune.report.wording.catalogue import load_codes
from autotune.report.wording.names import BOTTLENECKS, CAUSES
from autotune.report.wording.say import say
from autotune.settings.training_config import TrainingConfig
from tests.factories import CPU, make_breakdown, make_evidence, make_loader_costs, make_point, make_roofline

LENGTHS = Lengths(
    items=500,
    mean=30.0,
    median=25.0,
    longest=90,
    batch_samples=32,
    buckets=BucketForecast(pool_batches=5, random_padding=0.5, bucket_padding=0.3),
    packed=PackForecast(row_tokens=90, samples_per_row=2.9, padding=0.02, device_time=0.5, device_time_ci=(0.4, 0.6)),
)
GIVES_ADVICE = {"advise", "_advise", "_expecting", "_promised", "_saving", "_up_to_the_device"}


def test_every_bottleneck_has_its_name_and_its_evidence() -> None:
    assert list(BOTTLENECKS) == list(get_args(Bottleneck))
    assert {f"{code}_evidence" for code in BOTTLENECKS} <= load_codes("diagnosis")
    assert list(CAUSES) == list(get_args(Cause))
    assert {f"{code}_evidence" for code in CAUSES} <= load_codes("scaling")


def advised_kinds() -> set[str]:
    """Every kind of advice that the room gives, read from its calls; that on formats stands in a table."""
    calls = [
        node
        for path in Path(autotune.diagnosis.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GIVES_ADVICE
    ]
    texts = [next((one.value for one in call.args if isinstance(one, ast.Constant)), None) for call in calls]
    return {text for text in texts if isinstance(text, str)} | {*FORMAT_ADVICE.values()}


def test_every_kind_of_advice_has_its_text_and_its_basis_and_no_other_has() -> None:
    worded = {code for code in load_codes("advice") | load_codes("scaling") if not code.endswith("_evidence")}
    kinds = advised_kinds()
    assert {*kinds, *(f"{kind}_basis" for kind in kinds)} == worded


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            note("healthy", share=0.99, least_gain=0.05),
            "Healthy: the device computes 99 % of the time, and nothing measured here gives 5 %.",
        ),
        (
            note("healthy", share=0.99, least_gain=None),
            "Healthy: the device computes 99 % of the time. Other settings were not measured.",
        ),
        (note("bottleneck", bottleneck="data_cpu", share=0.7), "Data-bound by CPU work (70 % of the time)."),
        (
            note("bottleneck", bottleneck="compute", share=0.57, second="launch", second_share=0.43),
            "Compute-bound (57 % of the time), but also launch-bound: the operations are too small (43 %).",
        ),
        (note("best_setting", settings={"pin_memory": True}, gain=1.4), "pin_memory=True should give 2.4 times."),
        (note("no_setting_helps", least_gain=0.03), "No setting that was measured helps by more than 3 %."),
        (
            note("side_not_measured", side="loader", settings={}, reason="it broke"),
            "The loader alone was not measured with today's settings: it broke.",
        ),
    ],
)
def test_notes_read_as_sentences(found: Any, sentence: str) -> None:
    assert say(found) == sentence


def evidence_of(bottleneck: Bottleneck, **evidence: Any) -> str:
    found = diagnosis_in_words(judge("case", make_evidence(**evidence)))
    return next(finding.evidence for finding in found.findings if finding.bottleneck == bottleneck)


WAITING = make_breakdown(wait=0.7)


@pytest.mark.parametrize(
    ("bottleneck", "evidence", "sentence"),
    [
        (
            "data_cpu",
            {"breakdown": WAITING, "loader_costs": None},
            "70 % of the time is spent waiting for data; what an item costs was not measured",
        ),
        (
            "data_cpu",
            {"breakdown": WAITING},
            (
                "70 % of the time is spent waiting for data: an item takes 1 ms, 100 % of it CPU time; "
                "collating a batch takes 0 us"
            ),
        ),
        (
            "data_io",
            {"breakdown": WAITING, "loader_costs": make_loader_costs(item_cpu_s=1e-4, disk_bytes_per_item=2048.0)},
            (
                "70 % of the time is spent waiting for data: an item takes 1 ms, 10 % of it CPU time, "
                "and reads 2 KiB from the disk"
            ),
        ),
        (
            "data_tail",
            {"breakdown": WAITING, "loader_costs": make_loader_costs(slow_tail_fraction=0.5, item_slowest_s=0.2)},
            (
                "70 % of the time is spent waiting for data: 50 % of the loading time goes into items over 8 times the "
                "median of 1 ms, up to 200 ms"
            ),
        ),
        (
            "restart",
            {"breakdown": make_breakdown(wait=0.6, restart=0.6)},
            "restarting the loader takes 60 % of the time: 6 s in each epoch of 10 s",
        ),
        (
            "copy",
            {"breakdown": make_breakdown(copy=0.5)},
            "50 % of the time copies batches to the device while nothing computes",
        ),
        (
            "copy",
            {
                "breakdown": make_breakdown(copy=0.5),
                "curves": Curves(copy=(make_point(1500.0), make_point(4500.0, pin_memory=True))),
            },
            (
                "while nothing computes: 75 % of what the copies take by themselves (from pageable memory "
                "1,500 samples/s, as today, from pinned memory 4,500 samples/s)"
            ),
        ),
        (
            "copy",
            {"breakdown": make_breakdown(copy=0.5), "config": TrainingConfig(pin_memory=True), "copy_ceiling": 2000.0},
            (
                "while nothing computes: 100 % of what the copies take by themselves (from pinned memory "
                "2,000 samples/s, as today)"
            ),
        ),
        (
            "threads",
            {
                "config": TrainingConfig(num_workers=4),
                "environment": CPU,
                "device_ceiling": 4000.0,
                "loader_costs": make_loader_costs(item_cpu_s=2e-3),
                "breakdown": make_breakdown(wait=0.2),
            },
            (
                "4 threads and 4 loader workers share 4 cores: computing is 3.2 times slower in the loop than on the "
                "device alone (4,000 samples/s)"
            ),
        ),
        (
            "memory",
            {"curves": Curves(roofline=make_roofline(moved_bytes=2.0**31))},
            "a batch moves 2.00 GiB in 32 ms; a large copy would take 21.5 ms",
        ),
        (
            "compute",
            {"curves": Curves(roofline=make_roofline(flops=0.25e12 * 0.032))},
            (
                "the device computes 100 % of the time, at 25 % of the rate of a large matrix product in the same "
                "precision"
            ),
        ),
    ],
)
def test_evidence_reads_as_a_sentence(bottleneck: Bottleneck, evidence: Any, sentence: str) -> None:
    said = evidence_of(bottleneck, **evidence)
    assert sentence in said
    assert "None" not in said


def test_advice_to_pin_rests_on_both_copies_ceilings() -> None:
    figures = {"pageable_samples_per_s": 1500.0, "pinned_samples_per_s": 4500.0}
    found = advice_in_words(advise("pin_memory", 600.0, 818.0, {"pin_memory": True}, **figures))
    assert found.basis == "copies alone bring 4,500 samples/s from it instead of 1,500"


def test_advice_to_pin_says_what_copies_take_where_these_were_not_measured_alone() -> None:
    copies = "; copies that nothing hides take 40 % of the time"
    found = advice_in_words(advise("pin_memory", 600.0, 818.0, {"pin_memory": True}, share=0.4))
    assert found.basis == f"at most, since copies from page-locked memory were not measured{copies}"
    times = {"copy_s": 4e-3, "pinned_copy_s": 2e-3}
    found = advice_in_words(advise("pin_memory", 600.0, 818.0, {"pin_memory": True}, share=0.4, **times))
    assert found.basis == f"copying a batch takes 2 ms from it instead of 4 ms{copies}"


def test_advice_on_settings_reads_with_its_caution_and_its_basis() -> None:
    advice = advise("set", 1000.0, 1500.0, {"micro_batch_size": 64}, device_samples_per_s=2000.0)
    found = advice_in_words(advice)
    assert found.text == "Set micro_batch_size=64 (the learning rate has to follow the batch)"
    assert found.basis == "the device alone reaches 2,000 samples/s with it"


@pytest.mark.parametrize(
    "evidence",
    [
        {"breakdown": make_breakdown(copy=0.5)},
        {"breakdown": make_breakdown(idle=0.5), "loader_ceiling": 1000.0},
        {"breakdown": make_breakdown(synchronise=0.5), "loader_ceiling": 1500.0},
        {"breakdown": WAITING, "loader_ceiling": 250.0, "device_ceiling": 10_000.0, "device_kind": "cpu"},
        {
            "breakdown": WAITING,
            "loader_costs": make_loader_costs(20e-3),
            "loader_ceiling": 60.0,
            "device_ceiling": None,
        },
        {"breakdown": WAITING, "loader_costs": make_loader_costs(item_cpu_s=1e-4), "device_ceiling": 9000.0},
        {
            "breakdown": WAITING,
            "loader_costs": make_loader_costs(item_cpu_s=4e-3),
            "device_ceiling": 9000.0,
            "workers": 4,
        },
        {"breakdown": WAITING, "loader_costs": make_loader_costs(slow_tail_fraction=0.5), "device_ceiling": 9000.0},
        {"breakdown": make_breakdown(wait=0.5, restart=0.5), "workers": 2},
        {"lengths": LENGTHS},
        {"curves": Curves(roofline=make_roofline(moved_bytes=2e9), loader=(make_point(9e9, num_workers=4),))},
        {},
    ],
)
def test_all_advice_of_a_diagnosis_has_a_text_and_a_basis_without_gaps(evidence: dict[str, Any]) -> None:
    workers, kind = evidence.pop("workers", 0), evidence.pop("device_kind", "cuda")
    config = TrainingConfig(num_workers=workers, persistent_workers=workers > 0)
    environment = CPU.model_copy(update={"device_kind": kind})
    found = diagnosis_in_words(judge("case", make_evidence(config=config, environment=environment, **evidence)))
    assert found.advice
    for piece in found.advice:
        assert piece.text
        assert piece.basis
        assert "None" not in piece.text + piece.basis


def test_a_groups_bottleneck_reads_as_a_sentence() -> None:
    figures = {"strategy": "dp", "world_size": 2, "reached_fraction": 0.6}
    assert say_group_evidence(ScalingBottleneck(cause="communication", share=0.3, figures=figures)) == (
        "with batches on the devices, 2 devices under DataParallel reach 60 % of 2 times the rate of a single device: "
        "each step copies the model to all of them and gathers their outputs"
    )


def test_advice_on_lengths_tells_padding_gain_and_their_interval() -> None:
    figures = {"pool_batches": 50, "padding": 0.45, "bucket_padding": 0.1, "device_time": 0.5, "timed": 7}
    advice = advise("batch_like_lengths", 100.0, 200.0, {}, **figures, items=1024, gain_low=0.6, gain_high=1.5)
    words = advice_in_words(advice)
    assert "45 % of the tokens are padding now, 10 % would be" in words.text
    assert words.basis == (
        "by the lengths of 1,024 items and the time of batches of 7 lengths the device then needs 50 % of its time; by "
        "their scatter the gain is +60 % to 2.5 times"
    )


def words_of(kind: str, **figures: Any) -> tuple[str, str]:
    found = advice_in_words(advise(kind, 100.0, 200.0, {}, **figures, gain_low=0.6, gain_high=1.5))
    return found.text, found.basis


def test_advice_on_full_rows_tells_how_many_samples_a_row_holds() -> None:
    figures: dict[str, Any] = {"row_tokens": 2048, "samples_per_row": 6.04, "padding": 0.45, "packed_padding": 0.02}
    text, basis = words_of("pack_sequences", **figures, items=1024, timed=7, device_time=0.5)
    assert "rows of 2,048 tokens, about 6 to a row" in text
    assert "45 % of the tokens are padding now, 2.0 % would be" in text
    assert basis.endswith("the gain is +60 % to 2.5 times")


@pytest.mark.parametrize(("number", "words"), [(1.0, "1"), (2.94, "2.9"), (128.0, "128"), (1280.0, "1,280")])
def test_how_many_to_a_row_is_told_without_a_power_of_ten(number: float, words: str) -> None:
    row: dict[str, Any] = {"row_tokens": 2048, "samples_per_row": number, "padding": 0.45, "packed_padding": 0.02}
    assert f"about {words} to a row" in words_of("pack_sequences", **row, items=1024, timed=7, device_time=0.5)[0]


KEPT = {
    "block": "Layer",
    "blocks": 12,
    "kept_bytes": 20 * 2**30,
    "inside_bytes": 18 * 2**30,
    "samples": 32,
    "micro_batch_size": 128,
    "own_batch": 32,
    "least_saved_bytes": 58 * 2**30,
    "most_saved_bytes": 65 * 2**30,
    "forward_fraction": 0.2,
}


@pytest.mark.parametrize(
    ("kind", "figures", "text", "basis"),
    [
        (
            "checkpoint_activations",
            {**KEPT, "gain_low": 0.2, "gain_high": 0.5},
            (
                "Checkpoint the 12 blocks of class Layer (torch.utils.checkpoint): a batch of 128 samples then fits "
                "the memory, instead of 32 today (the learning rate has to follow the batch)"
            ),
            (
                "a batch of 32 samples keeps 20.0 GiB for its backward pass, 18.0 GiB of it inside these blocks; with "
                "128 samples 58.0 GiB to 65.0 GiB of it are saved; computing the blocks once more takes 20 % of "
                "today's step; by the scatter of what was measured the gain is +20 % to +50 %"
            ),
        ),
        (
            "checkpoint_activations",
            {**KEPT, "micro_batch_size": 32, "left_bytes": 2**33, "limit_bytes": 2**34, "forward_fraction": None},
            (
                "Checkpoint the 12 blocks of class Layer (torch.utils.checkpoint): today's batch then takes about "
                "8.00 GiB, if its peak falls between these blocks' passes; the limit is 16.0 GiB"
            ),
            (
                "a batch of 32 samples keeps 20.0 GiB for its backward pass, 18.0 GiB of it inside these blocks; with "
                "32 samples 58.0 GiB to 65.0 GiB of it are saved"
            ),
        ),
        (
            "checkpoint_activations",
            {**KEPT, "micro_batch_size": 32, "forward_fraction": None},
            (
                "Checkpoint the 12 blocks of class Layer (torch.utils.checkpoint): today's batch, which has no room "
                "now, then keeps 58.0 GiB to 65.0 GiB less for its backward pass"
            ),
            (
                "a batch of 32 samples keeps 20.0 GiB for its backward pass, 18.0 GiB of it inside these blocks; with "
                "32 samples 58.0 GiB to 65.0 GiB of it are saved"
            ),
        ),
    ],
)
def test_advice_on_memory_tells_what_is_won_and_what_it_rests_on(
    kind: str, figures: dict[str, Any], text: str, basis: str
) -> None:
    words = advice_in_words(advise(kind, 100.0, None, {}, **figures))
    assert (words.text, words.basis) == (text, basis)
