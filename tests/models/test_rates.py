"""Compute the throughput of a window: without queued batches, with restarts, and with its interval."""

from __future__ import annotations

import json
from itertools import pairwise
from math import inf, isinf
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.models.statistics import wait_fraction, window_rate
from autotune.records.measurement import Block, Restart, Window
from tests.factories import make_window

_DATA = Path(__file__).parent / "data"
_FINITE = st.floats(0, 1e12)
_BLOCKS = st.builds(
    Block,
    samples=st.integers(1, 10**6),
    batches=st.integers(1, 10**4),
    seconds=st.floats(1e-3, 1e3),
    data_wait_s=_FINITE,
    starved_s=st.none() | st.floats(0, 1e3),
    made=st.none() | st.floats(0, 1e6),
)
_WINDOWS = st.builds(
    Window,
    blocks=st.lists(_BLOCKS, min_size=1, max_size=25).map(tuple),
    restarts=st.lists(
        st.builds(Restart, seconds=st.floats(0, 100), samples=st.integers(0, 1000)), max_size=3
    ).map(tuple),
    whole_epochs=st.booleans(),
    epoch_samples=st.none() | st.integers(1, 10**9),
    expected_restart_s=st.floats(0, 100),
    queue_capacity=st.integers(0, 512),
    workers=st.integers(0, 64),
    asked=st.none() | st.integers(0, 512),
    queue_at_start=st.none() | st.integers(0, 512),
    queue_at_end=st.none() | st.integers(0, 512),
    warm_up_batches=st.integers(0, 1000),
    warm_up_s=_FINITE,
    is_drained=st.booleans(),
    is_steady=st.booleans(),
    stopped_by=st.sampled_from(["precision", "time", "deadline"]),
)


def _simulate(
    *, loader: float, device: float, capacity: int, ready: int, batches: int, blocks: int = 10
) -> dict[str, Any]:
    """Window fields of a loader and a device that work at fixed rates (batches/s), joined by a queue."""
    made, edges, now = [0.0] * ready, [0.0], 0.0
    taken, waits = list[float](), [0.0]
    for index in range(batches + capacity):
        if index >= ready:
            slot_free = taken[index - capacity] if index >= capacity else 0.0
            made.append(max(made[-1] if made else 0.0, slot_free) + 1 / loader)
        if index < batches:
            waits[-1] += max(0.0, made[index] - now)
            now = max(now, made[index])
            taken.append(now)
            now += 1 / device
            if (index + 1) * blocks // batches > len(edges) - 1:
                edges.append(now)
                waits.append(0.0)
    counts = [
        (index + 1) * batches // blocks - index * batches // blocks for index in range(blocks)
    ]
    seconds = [stop - start for start, stop in pairwise(edges)]
    ends = [(index + 1) * batches // blocks for index in range(blocks)]
    # Of what is made by a block's end, what was not taken by then.
    left = [
        min(capacity, sum(time <= edge for time in made[end:]))
        for end, edge in zip(ends, edges[1:], strict=True)
    ]
    return {
        "blocks": [
            Block(
                samples=4 * count,
                batches=count,
                seconds=time,
                data_wait_s=wait_s,
                ready_at_end=ready_at_end,
            )
            for count, time, wait_s, ready_at_end in zip(
                counts, seconds, waits[:blocks], left, strict=True
            )
        ],
        "queue_capacity": capacity,
        "queue_at_start": ready,
        "queue_at_end": left[-1],
    }


@given(
    ratio=st.floats(0.1, 0.35) | st.floats(1, 10),
    device=st.floats(1, 1000),
    capacity=st.integers(5, 200),
    is_full=st.booleans(),
    length=st.floats(2, 8),
)
def test_two_queues_show_the_slower_side(
    ratio: float, device: float, capacity: int, is_full: bool, length: float
) -> None:
    """Between, the queue may fall by less than shows in a window of two queues."""
    loader, batches = ratio * device, int(length * capacity)
    fields = _simulate(
        loader=loader,
        device=device,
        capacity=capacity,
        ready=capacity if is_full else 0,
        batches=batches,
    )
    window = make_window(**fields)
    truth, elapsed = 4 * min(loader, device), sum(block.seconds for block in window.blocks)
    two_batches = 8 / elapsed  # a batch that is under way at an edge can't be counted in parts
    rate = window_rate(window)
    assert abs(rate.value - truth) <= max(0.03 * truth, 1.001 * two_batches)
    assert rate.low <= rate.value <= rate.high


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 1.0, 2.0])
def test_usual_queue(ratio: float, is_full: bool) -> None:
    fields = _simulate(
        loader=100 * ratio, device=100, capacity=64, ready=64 if is_full else 0, batches=128
    )
    assert window_rate(make_window(**fields)).value == pytest.approx(
        400 * min(ratio, 1.0), rel=0.03
    )


def test_full_queue_is_corrected() -> None:
    fields = _simulate(loader=10, device=1000, capacity=64, ready=64, batches=128)
    naive = window_rate(make_window(**fields | {"queue_at_start": None}))
    corrected = window_rate(make_window(**fields))
    assert naive.value == pytest.approx(80, rel=0.03)
    assert corrected.value == pytest.approx(40, rel=0.03)
    assert corrected.high >= naive.value  # the interval holds what came


def test_ready_batches_count_as_far_as_starved() -> None:
    # Ten blocks of ten batches of 0.1 s: without 20 of the 100 batches it had waited for 2 s, but it waited for 0.5 s.
    def rate(starved_s: float | None, queue_at_end: int = 0) -> float:
        block = Block(samples=80, batches=10, seconds=1.0, data_wait_s=0.2, starved_s=starved_s)
        window = make_window(blocks=(block,) * 10, queue_at_start=20, queue_at_end=queue_at_end)
        return window_rate(window).value

    assert rate(starved_s=0.0) == 80.0
    assert rate(starved_s=0.05) == pytest.approx(80.0 * 95 / 100)
    assert rate(starved_s=0.2) == pytest.approx(80.0 * 80 / 100)
    assert rate(starved_s=0.2, queue_at_end=18) == pytest.approx(80.0 * 98 / 100)
    assert rate(starved_s=None) == rate(starved_s=0.2), "without a better figure, every wait counts"


def test_chance_fall_of_a_queue() -> None:
    blocks = [
        Block(samples=80, batches=10, seconds=1.0, data_wait_s=0.0, ready_at_end=ready)
        for ready in (22, 24, 21, 23, 22, 24, 21)
    ]
    assert window_rate(make_window(blocks=blocks, queue_at_start=28, queue_at_end=21)).value == 80.0


def test_recorded_launch_bound_loop() -> None:
    """Compare with a plain loop that ran after round 3, for 5 s of an epoch of 19 s, without a restart."""
    recorded = json.loads((_DATA / "launch_bound_h200.json").read_text())
    windows = {name: Window.model_validate(window) for name, window in recorded["windows"].items()}
    for window in windows.values():
        within_an_epoch = window.model_copy(update={"epoch_samples": None})
        assert window_rate(within_an_epoch).value == pytest.approx(window.raw_samples_per_s)
        assert window.starved_s == 0.0
    plain, third = (
        recorded["plain_samples_per_s"],
        windows["round 3"].model_copy(update={"epoch_samples": None}),
    )
    assert window_rate(third).value == pytest.approx(plain, rel=0.015)


def test_filling_queue_takes_nothing_off() -> None:
    assert window_rate(make_window(queue_at_start=0, queue_at_end=50)).value == 100.0


def test_mean_includes_a_stall() -> None:
    # three fast blocks and one that stalls: the mean rate holds the stall, a median would not
    times = (1.0, 1.0, 1.0, 5.0)
    blocks = tuple(Block(samples=80, batches=10, seconds=time, data_wait_s=0.0) for time in times)
    assert window_rate(make_window(blocks=blocks)).value == pytest.approx(4 * 80 / 8)


SEEN = Restart(seconds=2.0, samples=0)


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        # 100 samples/s, epochs of 5,000: 50 s and a restart of 2 s, in the mean
        (
            {"restarts": (Restart(seconds=1.0, samples=0), Restart(seconds=3.0, samples=0))},
            5000 / 52,
        ),
        ({"restarts": (SEEN,), "expected_restart_s": 99.0}, 5000 / 52),
        ({"expected_restart_s": 2.0}, 5000 / 52),
        # 300 samples in 5 s have cost 2 s, in 1 s nothing
        ({"restarts": (Restart(seconds=5.0, samples=300),)}, 5000 / 52),
        ({"restarts": (Restart(seconds=1.0, samples=300),)}, 100.0),
        ({"whole_epochs": True, "expected_restart_s": 99.0}, 100.0),
        ({"epoch_samples": None, "expected_restart_s": 5.0}, 100.0),
    ],
)
def test_restarts_count_in_proportion(changes: dict[str, Any], rate: float) -> None:
    window = make_window(**{"epoch_samples": 5_000, **changes})
    assert window_rate(window).value == pytest.approx(rate)


@pytest.mark.parametrize("expected_restart_s", [0.0, 2.0])
def test_a_single_block_has_no_upper_end(expected_restart_s: float) -> None:
    blocks = (Block(samples=100, batches=10, seconds=1.0, data_wait_s=0.0),)
    window = make_window(blocks=blocks, epoch_samples=1_000, expected_restart_s=expected_restart_s)
    rate = window_rate(window)
    assert (rate.low, rate.high) == (0.0, inf)
    assert isinf(rate.relative_half_width)


@given(_WINDOWS)
def test_any_window_has_an_ordered_interval(window: Window) -> None:
    rate, seconds = window_rate(window), sum(block.seconds for block in window.blocks)
    came, made = (
        sum(block.samples for block in window.blocks) / seconds,
        (window.made or 0.0) / seconds,
    )
    assert 0 < rate.value <= max(came, made) * (1 + 1e-9)
    assert 0 <= wait_fraction(window) <= 1
    assert 0 <= rate.low <= rate.value * (1 + 1e-9)
    assert rate.value <= rate.high * (1 + 1e-9)


def counted(
    made: float, starved_s: float = 0.0, noise: float = 0.0, ready: int | None = None, **more: Any
) -> Window:
    """Blocks of 1 s in which 100 samples came and so many were made, more and less in turn."""
    each = tuple(
        Block(
            samples=100,
            batches=10,
            seconds=1.0,
            data_wait_s=starved_s,
            starved_s=starved_s,
            made=made + noise * (-1) ** index,
            ready_at_end=ready,
        )
        for index in range(10)
    )
    start = 64 if ready is None else ready
    return make_window(
        blocks=each, queue_at_start=start, queue_at_end=ready or 0, queue_capacity=64, **more
    )


@pytest.mark.parametrize(
    ("window", "value", "high"),
    [
        (counted(60.0), 60.0, 100.0),  # the queue falls steadily, and nothing else shows why
        (counted(60.0, starved_s=0.2), 60.0, 60.0),  # the loop has waited for the loader
        (counted(100.0), 100.0, 100.0),
        (counted(300.0), 100.0, 100.0),  # the queue fills up: the device is the limit
        (counted(110.0, starved_s=0.4), 110.0, 110.0),  # less than the loop can take
        (counted(300.0, starved_s=0.5), 200.0, 200.0),  # more than it can
    ],
)
def test_made_or_delivered_whichever_is_slower(window: Window, value: float, high: float) -> None:
    rate = window_rate(window)
    assert rate.value == pytest.approx(value)
    assert rate.high == pytest.approx(high)


def test_what_is_made_by_chance_takes_nothing_off() -> None:
    assert window_rate(counted(99.0, noise=20.0)).value == 100.0


def test_filling_queue_of_a_waiting_loop_is_open() -> None:
    rate = window_rate(counted(150.0, starved_s=0.5))
    assert rate.low == pytest.approx(100.0)
    assert rate.value == pytest.approx(150.0)


def test_busy_device_does_not_hide_a_falling_queue() -> None:
    assert window_rate(counted(60.0).model_copy(update={"host_ahead_s": 0.05})).value == 60.0


def test_recorded_idle_workers() -> None:
    recorded = json.loads((_DATA / "imagenet_h200.json").read_text())
    windows = [Window.model_validate(window) for window in recorded["windows"]]
    assert [round(window.raw_samples_per_s) for window in windows] == [3_628, 3_385]
    assert fmean(window_rate(window).value for window in windows) == pytest.approx(2_820, rel=0.01)
    assert all(window_rate(window).low < 2_820 < window_rate(window).high for window in windows)


@pytest.mark.parametrize("made", [95.0, 105.0])
def test_slow_worker_among_done_ones(
    made: float,
) -> None:
    # eight workers on two cores, seen: 13 of 16 batches lie ready, and the loop waits a fifth of its time
    window = counted(made, starved_s=0.2, ready=13, workers=8, asked=16)
    assert window_rate(window).value == pytest.approx(max(made, 100.0))


def test_idle_workers_could_make_more() -> None:
    # 16 workers, asked for 32 batches of the 64 that are configured; after a pause the queue falls to where it stays
    ready = [32, 29, 27, 26, 24, 23, 22, 21, 21, 20, 20]
    blocks = tuple(
        Block(samples=300, batches=3, seconds=0.2, data_wait_s=0.0, made=made, ready_at_end=after)
        for made, after in zip(
            [30.0, 60.0, 90.0, 120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 270.0],
            ready[1:],
            strict=True,
        )
    )
    window = make_window(blocks=blocks, queue_capacity=64, workers=16, queue_at_start=32, asked=32)
    assert window_rate(window).value == pytest.approx(1_500.0)


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_almost_full_queue_takes_nothing_off(noise: float) -> None:
    rate = window_rate(counted(95.0, noise=noise, ready=62, workers=16, asked=64))
    assert (rate.low, rate.value, rate.high) == (100.0, 100.0, 100.0)


def test_uncounted_blocks() -> None:
    window = counted(0.0, starved_s=0.2)
    uncounted = window.blocks[0].model_copy(update={"made": None})
    partly = window.model_copy(update={"blocks": (uncounted, *counted(60.0, starved_s=0.2).blocks)})
    assert window_rate(window).value > 0
    assert partly.made is None


@pytest.mark.parametrize(
    ("made", "starved_s", "fraction"), [(60.0, 0.0, 0.4), (50.0, 0.2, 0.6), (100.0, 0.2, 0.2)]
)
def test_wait_fraction_after_the_queue(made: float, starved_s: float, fraction: float) -> None:
    assert wait_fraction(counted(made, starved_s)) == pytest.approx(fraction)
