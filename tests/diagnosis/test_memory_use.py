"""Memory that is still to come is noted, first where it will not suffice, and has a remedy without a gain."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.bottlenecks import judge
from autotune.diagnosis.memory_use import memory_remedies, memory_warnings
from autotune.records.result import Evidence
from autotune.records.watched_run import MemoryReading, MemoryUse
from tests.factories import make_evidence
from tests.factories.machines import CPU
from tests.factories.measurements import make_window
from tests.factories.watched_runs import MIB, make_copying, make_watched

GIB = 2**30


def evidence_of(
    memory: MemoryUse,
    *,
    epoch_samples: int | None = 1_000_000,
    free_bytes: int = 20 * GIB,
    persistent: bool = False,
    **measured: Any,
) -> Evidence:
    """Return a CPU job whose two workers were watched for 80,000 samples."""
    found = make_evidence(
        environment=CPU,
        config=TrainingConfig(num_workers=2, persistent_workers=persistent),
        window=make_window(1000.0, epoch_samples=epoch_samples),
        **measured,
    )
    changes = {
        "watched": make_watched(memory=memory),
        "free_ram_bytes": free_bytes,
        "environment": CPU.model_copy(update={"ram_bytes": 64 * GIB}),
    }
    return found.model_copy(update=changes)


def leaking(mib: float) -> MemoryUse:
    """Return a process that keeps five nodes and this much memory more with each ten steps."""
    return MemoryUse(
        kept_graph="total",
        kept_graph_place="train.py:41",
        readings=tuple(
            MemoryReading(
                steps=10 * number,
                samples=80 * number,
                process_bytes=round((100 + mib * number) * MIB),
                graph_nodes=5 + 50 * number,
            )
            for number in range(9)
        ),
    )


def test_copies_up_to_the_end_of_the_epoch() -> None:
    # 10 MiB for 5,000 samples of a worker; 140,000 are left to both
    evidence = evidence_of(make_copying(mib_per_reading=10), epoch_samples=220_000)
    (note,) = memory_warnings(evidence)
    assert note.code == "memory_copied_by_workers"
    assert note.figures["further_bytes"] == pytest.approx(2 * 140 * MIB, rel=1e-3)
    assert note.figures["by"] == "epoch"
    assert not note.figures["is_beyond_limit"]


@pytest.mark.parametrize(
    ("persistent", "epoch_samples"), [(True, 220_000), (False, None), (False, 10**9)]
)
def test_copies_reach_all_that_is_shared(persistent: bool, epoch_samples: int | None) -> None:
    evidence = evidence_of(make_copying(), epoch_samples=epoch_samples, persistent=persistent)
    if epoch_samples is None:
        facts = evidence.facts.model_copy(update={"dataset_length": None})
        evidence = evidence.model_copy(update={"facts": facts})
    (note,) = memory_warnings(evidence)
    assert note.figures["further_bytes"] == pytest.approx(2 * 320 * MIB, rel=1e-3)


def test_copies_beyond_the_memory_say_when() -> None:
    # the process holds 500 MiB, its workers 100 MiB each
    evidence = evidence_of(make_copying(), free_bytes=800 * MIB)
    (note,) = memory_warnings(evidence)
    assert note.figures["is_beyond_limit"]
    assert note.figures["left_bytes"] == 100 * MIB
    # 10 MiB for 5,000 samples, at 1,000 samples/s
    assert note.figures["full_after_s"] == pytest.approx(50.0, rel=1e-3)
    (advice,) = memory_remedies(evidence)
    assert advice.kind == "store_index_compactly"
    assert advice.figures["fewer_workers"] == 1
    assert advice.expected_gain is None


def test_workers_that_fit_stay() -> None:
    (advice,) = memory_remedies(evidence_of(make_copying()))
    assert advice.figures["fewer_workers"] == 2


def test_small_copies_are_no_matter() -> None:
    evidence = evidence_of(make_copying(mib_per_reading=0.1, shared_mib=400))
    assert memory_warnings(evidence) == ()
    assert [*memory_remedies(evidence)] == []


def test_kept_graphs_are_named() -> None:
    evidence = evidence_of(leaking(1.0))
    (note,) = memory_warnings(evidence)
    assert note.code == "graphs_kept"
    assert (note.figures["variable"], note.figures["place"]) == ("total", "train.py:41")
    assert note.figures["is_beyond_limit"]
    (advice,) = memory_remedies(evidence)
    assert advice.kind == "detach_kept_tensors"


def test_kept_graphs_without_growth_say_no_time() -> None:
    (note,) = memory_warnings(evidence_of(leaking(0.0)))
    assert note.figures["full_after_s"] is None
    assert not note.figures["is_beyond_limit"]


@pytest.mark.parametrize(
    ("training", "validation", "codes"),
    [
        (100 * MIB, 150 * MIB, ["validation_takes_more_memory"]),
        (100 * MIB, 105 * MIB, []),
        (100 * MIB, None, []),
        (None, None, []),
    ],
)
def test_validation(training: int | None, validation: int | None, codes: list[str]) -> None:
    memory = MemoryUse(training_peak_bytes=training, validation_peak_bytes=validation)
    evidence = evidence_of(memory)
    assert [note.code for note in memory_warnings(evidence)] == codes
    assert [advice.kind for advice in memory_remedies(evidence)] == [
        "validate_with_less_memory" for _ in codes
    ]


def test_what_will_not_suffice_comes_first() -> None:
    memory = make_copying().model_copy(
        update={"training_peak_bytes": GIB, "validation_peak_bytes": 90 * GIB}
    )
    first, second = memory_warnings(evidence_of(memory))
    assert (first.figures["is_beyond_limit"], second.figures["is_beyond_limit"]) == (True, False)


def test_unread_workers_are_not_excluded() -> None:
    evidence = evidence_of(MemoryUse(missing="forbidden"))
    (unchecked,) = [
        note for note in judge("job", evidence).not_excluded if note.figures["cause"] == "growth"
    ]
    assert unchecked.figures["reason"] == "forbidden"


def test_job_without_a_watched_run_has_no_warning() -> None:
    assert memory_warnings(make_evidence()) == ()
    assert [*memory_remedies(make_evidence())] == []


def test_a_diagnosis_notes_it() -> None:
    diagnosis = judge("job", evidence_of(make_copying()))
    assert "memory_copied_by_workers" in [note.code for note in diagnosis.notes]
