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


def begun(loader: DataLoader[Any]) -> Any:
    return begin_persistent(loader, DataLoader.__iter__)


def epochs_of(loader: DataLoader[Any]) -> set[int]:
    return {int(epoch) for _, epochs in begun(loader) for epoch in epochs}


def worker_of(loader: DataLoader[Any]) -> int:
    iterator: Any = loader._iterator
    return int(iterator._workers[0].pid)


def test_workers_restart_if_the_dataset_changed(loader: DataLoader[Any], data: Data) -> None:
    assert epochs_of(loader) == {0}
    first = worker_of(loader)
    assert epochs_of(loader) == {0}
    assert worker_of(loader) == first
    data.set_epoch(1)
    assert epochs_of(loader) == {1}
    assert worker_of(loader) != first


def test_second_iterator_leaves_the_first_alone(loader: DataLoader[Any]) -> None:
    whole = [[0, 1], [2, 3], [4, 5], [6, 7]]
    seen = []
    for indices, _ in begun(loader):
        seen.append(indices.tolist())
        if len(seen) in {2, 4}:  # the loop asks once more after its last batch
            assert [other.tolist() for other, _ in begun(loader)] == whole
    assert seen == whole


def test_workers_stay_after_an_epoch_left_early(
    loader: DataLoader[Any],
) -> None:
    for _ in begun(loader):
        break
    first = worker_of(loader)
    assert epochs_of(loader) == {0}
    assert worker_of(loader) == first


def test_iterator_that_is_over_may_be_held(loader: DataLoader[Any]) -> None:
    held = begun(loader)
    assert len(list(held)) == 4
    is_over(held)
    assert begun(loader) is held, "as torch has it: with the same workers"


def test_scripts_own_persistent_workers_stay(data: Data) -> None:
    own: DataLoader[Any] = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
    assert epochs_of(own) == {0}
    data.set_epoch(1)
    assert epochs_of(own) == {0}
    own._iterator = None


def test_has_epochs(data: Data) -> None:
    assert has_epochs(data)
    assert has_epochs(Subset(ConcatDataset([range(1), data]), [0]))  # type: ignore[list-item]
    assert not has_epochs(ConcatDataset([range(1)]))  # type: ignore[list-item]
    assert not has_epochs([1, 2])
