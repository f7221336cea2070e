"""Ceilings: who overlaps with whom, and that nobody measures, or tries in vain, what another has."""

from __future__ import annotations

from math import inf, log

import pytest

from autotune.config.training_config import TrainingConfig
from autotune.records.ceilings import (
    Ceiling,
    CeilingBook,
    headroom_of,
    host_ceiling_of,
    loader_key,
    overlaps,
)

REACHED = Ceiling(samples_per_s=10.0, samples=10, seconds=1.0, batches=1)


@pytest.mark.parametrize(
    ("workers", "kind", "expected"),
    [(0, "cpu", False), (2, "cpu", True), (0, "cuda", True), (2, "cuda", True)],
)
def test_only_without_workers_on_the_cpu_loading_and_training_take_turns(
    workers: int, kind: str, expected: bool
) -> None:
    assert overlaps(TrainingConfig(num_workers=workers), kind) is expected


@pytest.mark.parametrize(("workers", "is_shared"), [(0, False), (2, True)])
def test_only_without_workers_a_loaders_ceiling_depends_on_the_trials_threads(
    workers: int, is_shared: bool
) -> None:
    keys = {
        loader_key(TrainingConfig(num_workers=workers, intra_op_threads=threads))
        for threads in (None, 1, 2)
    }
    assert (len(keys) == 1) == is_shared


def test_prefetching_that_is_left_to_torch_is_torchs() -> None:
    left, spelt, more = (
        TrainingConfig(num_workers=2, prefetch_factor=factor) for factor in (None, 2, 4)
    )
    assert loader_key(left) == loader_key(spelt) != loader_key(more)


def test_a_side_that_was_tried_in_vain_is_not_tried_again_and_others_are() -> None:
    book, config = CeilingBook(), TrainingConfig(micro_batch_size=8)
    other = config.model_copy(update={"micro_batch_size": 16})
    assert book.needs("loader", config)
    assert book.needs("device", config)
    book.give_up("loader", config)
    assert not book.needs("loader", config)
    assert book.needs("device", config)
    assert book.needs("loader", other)
    book.keep("device", config, REACHED)
    assert not book.needs("device", config)


def test_one_loader_for_two_devices_is_not_two_loaders() -> None:
    config = TrainingConfig(strategy="dp", world_size=2)
    assert loader_key(config) != loader_key(config.model_copy(update={"strategy": "ddp"}))


def test_copies_are_measured_once_for_each_kind_of_memory_and_layout_whatever_the_batch() -> None:
    book, config = CeilingBook(), TrainingConfig(micro_batch_size=8)
    book.keep("copy", config, REACHED)
    larger, pinned = TrainingConfig(micro_batch_size=64), TrainingConfig(pin_memory=True)
    assert (book.needs("copy", larger), book.needs("copy", pinned)) == (False, True)
    assert (book.ceiling_of("copy", larger), book.ceiling_of("copy", pinned)) == (REACHED, None)


@pytest.mark.parametrize(
    ("loader", "device", "copy", "host", "lower", "room"),
    [
        (300.0, 200.0, None, 350.0, "device", 1.0),
        (150.0, 200.0, 160.0, 350.0, "loader", 0.5),
        (300.0, 200.0, 125.0, 350.0, "copy", 0.25),
        (200.0, 200.0, 200.0, 350.0, "device", 1.0),
        (inf, 200.0, inf, None, "device", 1.0),
        (300.0, 200.0, None, 110.0, "host", 0.1),
    ],
)
def test_the_lowest_of_the_ceilings_leaves_the_room(
    loader: float, device: float, copy: float | None, host: float | None, lower: str, room: float
) -> None:
    found = headroom_of(
        100.0, loader_ceiling=loader, device_ceiling=device, copy_ceiling=copy, host_ceiling=host
    )
    assert (found.lower, found.copy_ceiling, found.host_ceiling) == (lower, copy, host)
    assert found.room == pytest.approx(room)


@pytest.mark.parametrize(
    ("busy", "device", "lower", "limit", "share"),
    [
        (0.727, 62_753.0, "host", "host", 0.727),
        (None, 62_753.0, "host", None, 47_783 / 62_753),
        (0.727, 50_000.0, "device", "device", 47_783 / 50_000),
    ],
)
def test_a_device_that_launching_holds_alone_as_well_can_do_what_its_busy_time_shows(
    busy: float | None, device: float, lower: str, limit: str | None, share: float
) -> None:
    """Figures of `launch_bound` on an H200; the third device is slower than that."""
    found = headroom_of(
        47_783.0,
        loader_ceiling=86_920.0,
        device_ceiling=device,
        host_ceiling=62_220.0,
        host_bound_busy=busy,
    )
    assert (found.lower, found.limit) == (lower, limit)
    assert found.share_of_device == pytest.approx(share)


@pytest.mark.parametrize(("rate", "limit"), [(95.0, "loader"), (60.0, None)])
def test_a_side_near_whose_ceiling_the_loop_runs_limits_it(rate: float, limit: str | None) -> None:
    found = headroom_of(
        rate, loader_ceiling=100.0, device_ceiling=150.0, host_ceiling=140.0, host_bound_busy=0.7
    )
    assert found.limit == limit


def test_a_host_takes_a_batch_and_launches_its_work_one_after_the_other() -> None:
    device = Ceiling(samples_per_s=1000.0, samples=640, seconds=0.64, batches=20, host_s=0.03)
    assert host_ceiling_of(device, take_s=0.01) == pytest.approx(32 / 0.04)
    assert host_ceiling_of(device, take_s=None) == pytest.approx(32 / 0.03)
    assert host_ceiling_of(device.model_copy(update={"host_s": None}), take_s=0.01) is None
    assert host_ceiling_of(None, take_s=0.01) is None


def reached(samples_per_s: float, seconds: float = 0.2, **more: float) -> Ceiling:
    samples = round(samples_per_s * seconds)
    return Ceiling(
        samples_per_s=samples_per_s, samples=samples, seconds=seconds, batches=10, **more
    )


def book_of(*rates: float) -> CeilingBook:
    """A device that was measured several times, each time for longer."""
    book = CeilingBook()
    for place, rate in enumerate(rates):
        book.keep("device", TrainingConfig(), reached(rate, 0.2 + 0.1 * place))
    return book


@pytest.mark.parametrize(
    ("rates", "shown", "expected", "is_needed"),
    [
        ((5069.0,), 0.0, 5069.0, False),
        ((5069.0, 4500.0), 0.0, 4500.0, False),  # two that agree: the longer
        ((5069.0, 307.0), 0.0, 5069.0, True),  # slowed later
        ((307.0, 5069.0), 0.0, 5069.0, True),  # slowed first
        ((5069.0, 307.0, 4900.0), 0.0, 4900.0, False),
        ((5069.0, 307.0, 310.0), 0.0, 310.0, False),
        ((307.0,), 320.0, 307.0, False),  # within 5 %
        ((307.0,), 722.0, None, True),  # exceeded
        ((307.0, 5000.0), 722.0, 5000.0, False),  # measured again
        ((307.0, 310.0), 722.0, None, False),  # in vain: not a third time
        ((307.0, 5000.0, 310.0), 722.0, 5000.0, False),  # whatever most say
    ],
)
def test_measurements_that_disagree_or_are_exceeded_are_settled_by_one_more(
    rates: tuple[float, ...], shown: float, expected: float | None, is_needed: bool
) -> None:
    book = book_of(*rates)
    book.show(TrainingConfig(num_workers=3), shown)
    ceiling = book.ceiling_of("device", TrainingConfig())
    assert (ceiling and ceiling.samples_per_s) == expected
    assert book.needs("device", TrainingConfig()) is is_needed


def test_a_run_shows_nothing_of_settings_that_it_did_not_have() -> None:
    book = book_of(307.0)
    book.show(TrainingConfig(micro_batch_size=256), 5000.0)
    assert book.ceiling_of("device", TrainingConfig()) is not None


def test_a_loader_that_pauses_is_exceeded_by_more_than_its_own_error() -> None:
    book, config = CeilingBook(), TrainingConfig()
    book.keep("loader", config, reached(300.0, relative_sd=0.5))
    book.show(config, 550.0)
    assert book.ceiling_of("loader", config) is not None
    book.show(config, 700.0)
    assert book.ceiling_of("loader", config) is None


def test_a_measurement_is_as_doubtful_as_it_is_far_off() -> None:
    book, config = book_of(307.0, 5000.0), TrainingConfig()
    assert book.doubt("device", config, reached(5000.0, 0.3)) == 0
    assert book.doubt("device", config, reached(307.0)) == pytest.approx(log(5000 / 307))
    alone = book_of(307.0)
    alone.show(config, 614.0)
    assert alone.doubt("device", config, reached(307.0)) == pytest.approx(log(2))
