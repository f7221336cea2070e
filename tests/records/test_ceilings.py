"""Ceilings: who overlaps with whom, and that nobody measures, or tries in vain, what another has."""

from __future__ import annotations

import pytest

from autotune.records.ceilings import Ceiling, CeilingBook, loader_key, overlaps
from autotune.settings.training_config import TrainingConfig

REACHED = Ceiling(samples_per_s=10.0, samples=10, seconds=1.0, batches=1)


@pytest.mark.parametrize(
    ("workers", "kind", "expected"), [(0, "cpu", False), (2, "cpu", True), (0, "cuda", True), (2, "cuda", True)]
)
def test_only_without_workers_on_the_cpu_loading_and_training_take_turns(
    workers: int, kind: str, expected: bool
) -> None:
    assert overlaps(TrainingConfig(num_workers=workers), kind) is expected


@pytest.mark.parametrize(("workers", "is_shared"), [(0, False), (2, True)])
def test_only_without_workers_a_loaders_ceiling_depends_on_the_trials_threads(workers: int, is_shared: bool) -> None:
    keys = {loader_key(TrainingConfig(num_workers=workers, intra_op_threads=threads)) for threads in (None, 1, 2)}
    assert (len(keys) == 1) == is_shared


def test_prefetching_that_is_left_to_torch_is_torchs() -> None:
    left, spelt, more = (TrainingConfig(num_workers=2, prefetch_factor=factor) for factor in (None, 2, 4))
    assert loader_key(left) == loader_key(spelt) != loader_key(more)


def test_a_side_that_was_tried_in_vain_is_not_tried_again_and_others_are() -> None:
    book, config = CeilingBook(), TrainingConfig(micro_batch_size=8)
    other = config.model_copy(update={"micro_batch_size": 16})
    assert book.needs_loader(config)
    assert book.needs_device(config)
    book.give_up(config, loader=True, device=False)
    assert (book.needs_loader(config), book.needs_device(config), book.needs_loader(other)) == (False, True, True)
    book.keep(config, loader=None, device=REACHED)
    assert not book.needs_device(config)


def test_one_loader_for_two_devices_is_not_two_loaders() -> None:
    config = TrainingConfig(strategy="dp", world_size=2)
    assert loader_key(config) != loader_key(config.model_copy(update={"strategy": "ddp"}))
