"""Forecast peaks as a line over the batch, unsure before there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.training_config import TrainingConfig
from autotune.models.memory import MemoryModel, Peak
from autotune.models.statistics import t_95

MIB = 2**20


def batch(size: int, **settings: object) -> TrainingConfig:
    return TrainingConfig.model_validate({"micro_batch_size": size, **settings})


def line(size: int) -> int:
    return (300 + 4 * size) * MIB


def forecast(*seen: tuple[TrainingConfig, int], workers_in_ram: bool = False) -> MemoryModel:
    return MemoryModel(observed=[Peak(*one) for one in seen], has_workers_in_ram=workers_in_ram)


def expected(known: MemoryModel, *configs: TrainingConfig) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each in MiB."""
    mean, sd = known.expect(configs)
    return (mean / MIB).tolist(), (sd / MIB).tolist()


def test_a_line_through_two_batches_is_found_again() -> None:
    known = forecast((batch(32), line(32)), (batch(128), line(128)))
    mean, sd = expected(known, batch(64), batch(256), batch(1024))
    assert mean == pytest.approx([556, 1324, 4396], rel=0.06)
    assert sd == sorted(sd)


@given(
    st.integers(1, 64),
    st.integers(1, 4),
    st.floats(0.05, 1.0),
    st.integers(10 * MIB, 2**36),
    st.integers(2, 1024),
)
def test_a_line_stays_within_its_uncertainty(
    smallest: int, doublings: int, share: float, highest: int, further: int
) -> None:
    """`share`: of the highest peak that grows with the batch; what is fixed takes the rest."""
    most = smallest * 2**doublings
    seen = [smallest * 2**step for step in range(doublings + 1)]

    def peak(size: int) -> int:
        return int(highest * (1 - share + share * size / most))

    known = forecast(*((batch(size), peak(size)) for size in seen))
    mean, sd = known.expect([batch(further)])
    assert abs(mean[0] - peak(further)) < 2.5 * sd[0]


def test_one_batch_leaves_the_growth_open() -> None:
    one, two = (
        forecast((batch(32), line(32))),
        forecast((batch(32), line(32)), (batch(64), line(64))),
    )
    (here, there), (here_sd, there_sd) = expected(one, batch(32), batch(64))
    assert here == pytest.approx(428, rel=0.02)
    assert here_sd < 0.06 * 428
    assert here < there < 2 * here
    assert there_sd > 0.35 * here
    assert expected(two, batch(128))[1][0] < expected(one, batch(128))[1][0] / 3


@given(
    st.lists(st.sampled_from([8, 16, 32, 64, 128]), min_size=1, max_size=6),
    st.sampled_from([8, 64, 512]),
)
def test_peaks_never_add_uncertainty(sizes: list[int], asked: int) -> None:
    peaks = [(batch(size), line(size)) for size in sizes]
    highest = (batch(256), line(256))  # the scale of the prior, in both
    (before,), (after,) = (
        expected(forecast(highest, *seen), batch(asked))[1] for seen in (peaks[:-1], peaks)
    )
    assert after <= before * (1 + 1e-9)


def test_half_precision_is_learned_from_one_batch() -> None:
    full = [(batch(size), line(size)) for size in (32, 64, 128)]
    half = batch(128, amp_dtype="bfloat16")
    before, after = forecast(*full), forecast(*full, (half, line(128) - 200 * MIB))
    other = batch(256, amp_dtype="float16")
    (plain,), _ = expected(after, batch(256))
    (unknown,), (unknown_sd,) = expected(before, other)
    (learned,), (learned_sd,) = expected(after, other)
    assert unknown == pytest.approx(plain, rel=0.01)
    assert learned == pytest.approx(plain - 400, rel=0.05)
    assert learned_sd < unknown_sd / 3


HALVES: dict[str, Callable[[int], int]] = {
    "float32": line,
    "bfloat16": lambda size: (340 + 2 * size) * MIB,
    "float16": lambda size: (380 + 3 * size) * MIB,
}


def test_half_precisions_may_differ() -> None:
    """Add to the fixed part in both; a sample takes half as much in one, three quarters in the other."""
    seen = [
        (batch(size, amp_dtype=dtype), peak(size))
        for dtype, peak in HALVES.items()
        for size in (32, 64, 256)
    ]
    mean, sd = expected(forecast(*seen), *(batch(512, amp_dtype=dtype) for dtype in HALVES))
    true = [peak(512) / MIB for peak in HALVES.values()]
    assert mean == pytest.approx(true, rel=0.05)
    assert mean[2] - mean[1] > 4 * max(sd[1:])


def test_tf32_takes_the_memory_of_float32() -> None:
    known = forecast((batch(32), line(32)), (batch(64), line(64)))
    assert expected(known, batch(128, amp_dtype="tf32")) == expected(known, batch(128))


def test_workers_take_ram() -> None:
    seen = [
        (batch(32), line(32)),
        (batch(64), line(64)),
        (batch(32, num_workers=4), line(32) + 400 * MIB),
    ]
    asked = [batch(32), batch(32, num_workers=8)]
    (none, eight), _ = expected(forecast(*seen, workers_in_ram=True), *asked)
    assert 500 < eight - none < 1000
    (none, eight), _ = expected(forecast(*seen, workers_in_ram=False), *asked)
    assert eight == none


def test_untried_workers_take_ram() -> None:
    known = forecast((batch(32), line(32)), workers_in_ram=True)
    mean, sd = expected(known, *(batch(32, num_workers=count) for count in (0, 1, 4, 16)))
    assert mean == sorted(set(mean))
    assert sd == sorted(sd)


def test_batches_held_ready_count_where_workers_do() -> None:
    deep, flat = (batch(64, num_workers=4, prefetch_factor=factor) for factor in (16, 2))
    known = forecast((batch(32), line(32)), (flat, line(64)), workers_in_ram=True)
    _, (of_deep, of_flat) = expected(known, deep, flat)
    assert of_deep > of_flat
    unset = batch(64, num_workers=4)
    assert expected(known, unset) == expected(known, flat)


WAYS = [
    batch(128, channels_last=True),
    batch(128, compile=True),
    batch(128, grad_accum_steps=2),
    batch(128, strategy="ddp", world_size=2),
    batch(128, strategy="dp", world_size=2),
]
"""Other ways to run."""


@pytest.mark.parametrize("other", WAYS)
def test_another_way_to_run_is_less_sure(other: TrainingConfig) -> None:
    known = forecast((batch(32), line(32)), (batch(64), line(64)), (batch(128), line(128)))
    _, (plain, varied) = expected(known, batch(128), other)
    assert varied > 1.5 * plain


def test_oom_makes_larger_batches_unlikely() -> None:
    limit = 2_000 * MIB
    seen = [(batch(32), line(32)), (batch(64), line(64))]
    asked = [batch(64), batch(512), batch(1024)]
    hopeful = forecast(*seen).chance_to_fit(asked, 4_000 * MIB)
    assert hopeful[1] > 0.9
    fits = forecast(*seen, (batch(256), int(1.25 * limit))).chance_to_fit(asked, limit)
    assert fits[0] > 0.95
    assert max(fits[1:]) < 0.01


@given(
    st.sets(st.sampled_from([4, 8, 16, 32, 64, 128]), min_size=1, max_size=4),
    st.integers(0, 4_000),
    st.integers(1, 64),
    st.lists(st.floats(-0.02, 0.02), min_size=4, max_size=4),
    st.floats(1.0, 20.0),
)
def test_a_larger_batch_is_never_likelier_to_fit(
    sizes: set[int], fixed: int, slope: int, noise: Sequence[float], room: float
) -> None:
    seen = [
        (batch(size), int((fixed + slope * size) * MIB * (1 + by)))
        for size, by in zip(sorted(sizes), noise, strict=False)
    ]
    limit = int(room * max(peak for _, peak in seen))
    chances = forecast(*seen).chance_to_fit([batch(2**power) for power in range(14)], limit)
    assert np.diff(chances).max() <= 0.01


def test_chance_to_fit_around_the_limit() -> None:
    known = forecast((batch(32), line(32)), (batch(64), line(64)))
    mean, sd = known.expect([batch(128)])
    few = t_95(known.degrees_of_freedom)
    assert 2.3 < few < 3, "two peaks tell little of the spread"
    chances = [
        known.chance_to_fit([batch(128)], int(mean[0] + z * sd[0]))[0] for z in (-few, 0, few)
    ]
    assert chances == pytest.approx([0.025, 0.5, 0.975], abs=1e-3)


ROOM = line(128)
"""Bytes that a batch of 128 takes, and no more."""
SEEN_TO_FIT = [(batch(32), line(32)), (batch(128), line(128))]


@pytest.mark.parametrize(
    "asked", [batch(64), batch(128), batch(128, num_workers=8), batch(128, amp_dtype="bfloat16")]
)
def test_lower_demands_fit(asked: TrainingConfig) -> None:
    assert forecast(*SEEN_TO_FIT).chance_to_fit([asked], ROOM) == [1.0]


@pytest.mark.parametrize("asked", [batch(129), *WAYS])
def test_what_asks_for_anything_more_may_not_fit(asked: TrainingConfig) -> None:
    assert forecast(*SEEN_TO_FIT).chance_to_fit([asked], ROOM)[0] < 0.9


def test_workers_are_a_demand_in_ram() -> None:
    known = forecast(*SEEN_TO_FIT, workers_in_ram=True)
    assert known.chance_to_fit([batch(128), batch(128, num_workers=1)], ROOM).tolist() == [
        1.0,
        pytest.approx(0, abs=0.5),
    ]


def test_half_precision_proves_nothing_for_full() -> None:
    known = forecast((batch(32), line(32)), (batch(128, amp_dtype="float16"), ROOM))
    assert known.chance_to_fit([batch(128, amp_dtype="bfloat16")], ROOM) == [1.0]
    assert known.chance_to_fit([batch(128)], ROOM)[0] < 0.9


def test_contradicting_peaks_are_unsure() -> None:
    known = forecast(*SEEN_TO_FIT, (batch(128, num_workers=2), int(1.25 * ROOM)))
    below, same, above = known.chance_to_fit(
        [batch(64), batch(128), batch(128, amp_dtype="tf32")], ROOM
    )
    assert below == 1.0
    assert max(same, above) < 0.9


def test_ranks_take_ram_each() -> None:
    """Four ranks of a model of 20 GiB: on devices of their own each has the memory that one has."""
    one, two, four = batch(32), *(batch(32, strategy="ddp", world_size=count) for count in (2, 4))
    seen = (one, 20_000 * MIB)
    (of_one, of_four), _ = expected(forecast(seen, workers_in_ram=True), one, four)
    assert 3.5 * of_one < of_four < 4.5 * of_one
    (of_one, of_four), _ = expected(forecast(seen), one, four)
    assert of_four == of_one
    ram = forecast((two, 20_000 * MIB), workers_in_ram=True)
    assert ram.chance_to_fit([two], 22_000 * MIB) == [1.0]
    assert ram.chance_to_fit([four], 22_000 * MIB)[0] < 0.5


def test_k_times_the_batch_takes_at_most_k_times() -> None:
    known = forecast((batch(32), 100 * MIB))
    sure, unsure = known.chance_to_fit([batch(64), batch(96)], 200 * MIB)
    assert sure == 1.0
    assert unsure < 0.9


def test_oom_at_an_absurd_batch() -> None:
    seen = [Peak(batch(size), line(size)) for size in (32, 64, 128)]
    absurd = Peak(batch(10**9), 10_000 * MIB, "least")
    (plain,), (beside,) = (
        MemoryModel(observed=peaks, has_workers_in_ram=False).expect([batch(256)])[0]
        for peaks in (seen, [*seen, absurd])
    )
    assert beside == pytest.approx(plain, rel=0.01)


def test_device_alone_in_ram_is_less_sure() -> None:
    """Doubt the curves' process, which keeps what earlier points took."""
    asked, sds = batch(256), []
    for source in ("trial", "alone"):
        peaks = [Peak(batch(size), line(size), source) for size in (32, 64, 128)]
        sds.append(
            float(MemoryModel(observed=peaks, has_workers_in_ram=True).expect([asked])[1][0])
        )
    assert sds[1] > 2 * sds[0]


def test_what_scatters_is_less_sure() -> None:
    sds = []
    for by in (0.001, 0.1):
        peaks = [
            (batch(size), int(line(size) * share))
            for size in (32, 64, 128)
            for share in (1 - by, 1 + by)
        ]
        sds += expected(forecast(*peaks), batch(64))[1]
    assert sds[1] > 3 * sds[0]


@pytest.mark.parametrize(
    "switch", [{"cudnn_benchmark": True}, {"compile": True, "compile_mode": "reduce-overhead"}]
)
def test_workspaces_and_pools_are_unsure(switch: dict[str, object]) -> None:
    plain = {name: value for name, value in switch.items() if name == "compile"}
    known = forecast((batch(32, **plain), line(32)), (batch(64, **plain), line(64)))
    (mean, other), (sd, other_sd) = expected(known, batch(32, **plain), batch(32, **switch))
    assert other == pytest.approx(mean, rel=0.02)
    assert other_sd > 3 * sd
    limit = int(1.001 * line(64))
    sure, unsure = known.chance_to_fit([batch(64, **plain), batch(64, **switch)], limit)
    assert sure == 1.0
    assert unsure < 0.9
