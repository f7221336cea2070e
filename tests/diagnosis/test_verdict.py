"""The answer: health, headline, headroom and remarks of an Evidence."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import advise
from autotune.diagnosis.bottlenecks import (
    current_headroom,
    find_bottlenecks,
    is_healthy,
    judge,
    make_headline,
)
from autotune.messages import advice as advice_messages
from autotune.messages import diagnosis as messages
from autotune.messages.trials import no_time_left
from autotune.note import Note
from autotune.records.ceilings import Ceiling, Headroom
from autotune.records.measurement import PROFILER_SOURCE, BusyReading, Ceilings, HostLoad
from autotune.records.result import Advice, Curves
from tests.factories import (
    make_breakdown,
    make_evidence,
    make_loader_costs,
    make_point,
    make_window,
)


def test_unmeasured_ceilings_are_estimated() -> None:
    measured: dict[str, Any] = {
        "loader_ceiling": None,
        "device_ceiling": None,
        "data_wait_fraction": 0.5,
    }
    headroom = current_headroom(
        make_evidence(500.0, loader_costs=make_loader_costs(1e-3), **measured)
    )
    assert [headroom.loader_ceiling, headroom.device_ceiling] == pytest.approx([1000.0, 1000.0])


def test_unknown_loader_survives_json() -> None:
    headroom = current_headroom(make_evidence(loader_ceiling=None, loader_costs=None))
    assert headroom.loader_ceiling == inf
    assert Headroom.model_validate_json(headroom.model_dump_json()) == headroom


def advice(gain: float) -> Advice:
    return advise(
        advice_messages.set(settings={"pin_memory": True}), present=1.0, expected=1 + gain
    )


def test_computing_alone_is_healthy() -> None:
    evidence = make_evidence()
    computing = find_bottlenecks(evidence)
    assert is_healthy(evidence, computing, [advice(0.04)])
    assert not is_healthy(evidence, computing, [advice(0.06)])


@pytest.mark.parametrize(
    "breakdown",
    [make_breakdown(wait=0.7), make_breakdown(idle=0.43), make_breakdown(synchronise=0.12), None],
    ids=["waits for data", "gaps beside computing", "the host's waits beside it", "not measured"],
)
def test_other_findings_are_not_healthy(breakdown: Any) -> None:
    evidence = make_evidence(breakdown=breakdown, data_wait_fraction=0.0)
    assert not is_healthy(evidence, find_bottlenecks(evidence), [])


OTHERS = Curves(loader=(make_point(1000.0), make_point(1000.0, num_workers=1)))
NO_OTHERS = Curves(loader=(make_point(1000.0), make_point(None, num_workers=1)))
NOTHING_HELPS = messages.no_setting_helps(least_gain=0.03)


def headline(breakdown: Any, *pieces: Advice, curves: Curves = OTHERS) -> tuple[Note, ...]:
    evidence = make_evidence(breakdown=breakdown, curves=curves)
    return make_headline(evidence, find_bottlenecks(evidence), pieces)


def test_headline_has_bottleneck_and_setting() -> None:
    waiting = messages.bottleneck(bottleneck="data_cpu", share=0.7)
    best = messages.best_setting(settings={"pin_memory": True}, gain=1.4)
    assert headline(make_breakdown(wait=0.7), advice(1.4)) == (waiting, best)
    assert headline(make_breakdown(wait=0.7)) == (waiting, NOTHING_HELPS)
    assert headline(make_breakdown()) == (messages.healthy(share=1.0, least_gain=0.05),)


def test_headline_marks_computed_workers() -> None:
    piece = advice(1.4).model_copy(update={"kind": "add_workers"})
    computed = messages.computed_setting(settings={"pin_memory": True}, gain=1.4)
    assert headline(make_breakdown(wait=0.7), piece)[1] == computed


def test_points_without_time_are_one_note() -> None:
    late = [
        make_point(None, num_workers=count).model_copy(update={"reason": no_time_left()})
        for count in (1, 2)
    ]
    curves = Curves(loader=(*late, make_point(None, num_workers=4)), device=(late[0],))
    found = judge("case", make_evidence(curves=curves)).notes
    assert [one.code for one in found] == ["side_not_measured", "no_time_for_points"]
    assert found[1].figures == {"counts": {"loader": 2, "device": 1}}


def test_headline_of_a_loaded_machine() -> None:
    load = HostLoad(seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=0.5, stolen_s=0.0)
    evidence = make_evidence(breakdown=make_breakdown(wait=0.7), host_load=load)
    _, best = make_headline(evidence, find_bottlenecks(evidence), [advice(1.4)])
    assert best == messages.may_help(settings={"pin_memory": True}, others_cores=1.5, cores=2)


def test_script_without_a_loader_is_unknown() -> None:
    """It makes its batches without a DataLoader; that was told as computing for all of the time."""
    found = judge("case", make_evidence(breakdown=None, data_wait_fraction=None))
    assert (found.verdict, found.is_healthy, found.advice) == ("unknown", False, ())
    assert found.headline_notes == (messages.time_unknown(),)


def test_headline_has_the_finding_after_computing() -> None:
    found, rest = headline(make_breakdown(idle=0.43))
    both = {
        "bottleneck": "compute",
        "share": pytest.approx(0.57),
        "second": "launch",
        "second_share": 0.43,
    }
    assert (found.code, found.figures, rest) == ("bottleneck", both, NOTHING_HELPS)
    assert headline(None)[0] == messages.time_not_attributed(share=0.9)


@pytest.mark.parametrize(
    ("rate", "alone", "host", "busy", "idle", "wait"),
    [
        (47_783.0, (62_753.0, 0.003999, 256), 62_220.0, 0.727, 0.252, 0.021),
        (2_641.0, (2_771.0, 0.0238, 64), 2_663.0, 0.39, 0.6, 0.0),
    ],
    ids=["18 narrow layers", "minGPT"],
)
def test_host_is_the_limit_of_launches(
    rate: float, alone: tuple[float, float, int], host: float, busy: float, idle: float, wait: float
) -> None:
    """Figures of an H200, whose device alone was held by launching as well."""
    device_rate, host_s, batch = alone
    device = Ceiling(
        samples_per_s=device_rate,
        samples=50 * batch,
        seconds=50 * batch / device_rate,
        batches=50,
        host_s=host_s,
    )
    evidence = make_evidence(
        rate,
        config=TrainingConfig(micro_batch_size=batch, num_workers=16),
        loader_ceiling=16 * rate,
        device_ceiling=device_rate,
        host_ceiling=host,
        ceilings=Ceilings(device=device),
        breakdown=make_breakdown(idle=idle, wait=wait),
        busy_readings=[BusyReading(fraction=busy, source=PROFILER_SOURCE)],
        data_wait_fraction=0.005,
        window=make_window(rate, host_ahead_s=0.0),
    )
    found = judge("case", evidence)
    assert (found.verdict, found.headroom.limit) == ("launch", "host")
    assert found.headroom.share_of_device == pytest.approx(busy)


def test_headline_without_other_settings() -> None:
    assert headline(make_breakdown(), curves=NO_OTHERS) == (
        messages.healthy(share=1.0, least_gain=None),
    )
    assert headline(make_breakdown(wait=0.7), curves=NO_OTHERS)[1] == messages.others_not_measured()


def test_callers_notes_come_first() -> None:
    failed = make_point(None, num_workers=1).model_copy(update={"reason": "it broke"})
    curves = Curves(loader=(failed,), notes=(messages.others_failed(reason="late"),))
    evidence = make_evidence(
        breakdown=None, curves=curves, peak_memory_bytes=2**40, notes=(Note(code="hot"),)
    )
    found = judge("case", evidence, [Note(code="first")]).notes
    codes = [note.code if isinstance(note, Note) else note for note in found]
    assert codes == [
        "first",
        "breakdown_not_measured",
        "search_would_refuse",
        "hot",
        "others_failed",
        "side_not_measured",
    ]
    assert found[-1] == messages.side_not_measured(
        side="loader", settings={"num_workers": 1}, reason="it broke"
    )


def test_exceeded_ceiling_is_none() -> None:
    found = judge(
        "case",
        make_evidence(1000.0, loader_ceiling=840.0, device_ceiling=500.0, copy_ceiling=2000.0),
    )
    assert (
        found.evidence.measurement.loader_ceiling,
        found.evidence.measurement.device_ceiling,
    ) == (None, None)
    assert found.evidence.measurement.copy_ceiling == 2000.0
    assert found.headroom.share_of_lower <= 1.05
