"""Workers that autotune lets persist make no difference to what is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from autotune.worker.script.hooks import begin_persistent, guard_persistent, has_epochs, is_over


class Data(Dataset[tuple[int, int]]):
    """Samples know the epoch that the dataset was told of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.epoch


class Still(Dataset[int]):
    """It is told of nothing."""

    def __len__(self) -> int:
        return 1


@pytest.fixture
def data() -> Data:
    return Data()


@pytest.fixture
def loader(data: Data) -> Iterator[DataLoader[Any]]:
    made: DataLoader[Any] = DataLoader(
        Subset(data, range(8)), batch_size=2, num_workers=1, persistent_workers=True
    )
    guard_persistent(made)
    yield made
    made._iterator = None


def epochs_of(loader: DataLoader[Any]) -> set[int]:
    return {
        int(epoch)
        for _, epochs in begin_persistent(loader, DataLoader.__iter__)
        for epoch in epochs
    }


def worker_of(loader: DataLoader[Any]) -> int:
    iterator: Any = loader._iterator
    return int(iterator._workers[0].pid)


def test_workers_begin_again_where_the_dataset_was_changed_and_stay_where_it_was_not(
    loader: DataLoader[Any], data: Data
) -> None:
    assert epochs_of(loader) == {0}
    first = worker_of(loader)
    assert epochs_of(loader) == {0}
    assert worker_of(loader) == first
    data.set_epoch(1)
    assert epochs_of(loader) == {1}
    assert worker_of(loader) != first


def test_a_second_iterator_within_an_epoch_leaves_the_first_alone(loader: DataLoader[Any]) -> None:
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    seen = []
    for indices, _ in begin_persistent(loader, DataLoader.__iter__):
        seen.append(indices.tolist())
        if len(seen) in {2, 4}:  # the loop asks once more after its last batch
            assert [
                other.tolist() for other, _ in begin_persistent(loader, DataLoader.__iter__)
            ] == [
                [0, 1],
                [2, 3],
                [4, 5],
                [6, 7],
            ]
    assert seen == whole


def test_after_an_epoch_that_was_left_early_the_same_workers_begin_the_next(
    loader: DataLoader[Any],
) -> None:
    for _ in begin_persistent(loader, DataLoader.__iter__):
        break
    first = worker_of(loader)
    assert epochs_of(loader) == {0}
    assert worker_of(loader) == first


def test_an_iterator_that_is_over_may_be_held_on_to(loader: DataLoader[Any]) -> None:
    held = begin_persistent(loader, DataLoader.__iter__)
    assert len(list(held)) == 4
    is_over(held)
    assert begin_persistent(loader, DataLoader.__iter__) is held, (
        "as torch has it: with the same workers"
    )


def test_a_loader_whose_workers_the_script_lets_persist_is_its_own_affair(data: Data) -> None:
    own: DataLoader[Any] = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
    assert epochs_of(own) == {0}
    data.set_epoch(1)
    assert epochs_of(own) == {0}
    own._iterator = None


def test_a_dataset_that_is_told_of_epochs_is_known_wherever_it_lies(data: Data) -> None:
    assert has_epochs(data)
    assert has_epochs(Subset(ConcatDataset([Still(), data]), [0]))
    assert not has_epochs(ConcatDataset([Still()]))
    assert not has_epochs([1, 2])
