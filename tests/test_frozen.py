"""Models that are kept by the thousand share what is equal in them, and are otherwise as before."""

from __future__ import annotations

from autotune.frozen import compacted
from autotune.records.trial import TrialRecord
from tests.factories import make_record


def test_compacted_models_share_the_sets_of_their_fields_names_and_stay_equal() -> None:
    plain = make_record()
    first, second = (
        compacted(TrialRecord.model_validate_json(plain.model_dump_json())) for _ in range(2)
    )
    assert first == second == plain
    assert first.model_dump_json() == plain.model_dump_json()
    assert first.config.model_fields_set is second.config.model_fields_set
    assert first.result.measurement is not None
    assert second.result.measurement is not None
    blocks = first.result.measurement.blocks[0], second.result.measurement.blocks[0]
    assert blocks[0].model_fields_set is blocks[1].model_fields_set


def test_a_copy_of_a_compacted_model_notes_its_own_fields() -> None:
    record = compacted(
        TrialRecord(number=1, config=make_record().config, results=make_record().results)
    )
    before = set(record.model_fields_set)
    assert record.model_copy(update={"score": None}).model_fields_set == before | {"score"}
    assert record.model_fields_set == before
