"""Loaders of other packages are searched with as they are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from autotune.errors import ConfigError
from tests.integrations.searches import Search, assert_runs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LENGTH = 1920


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    """An input and a class."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8), index % 3


def test_a_stateful_loader_is_searched_with_as_it_is(tmp_path: Path, search: Search) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(
            Pairs(), 12, shuffle=True, num_workers=1, persistent_workers=True
        )
    result = search(nn.Linear(8, 3), loader, tmp_path, space={"micro_batch_size": [12, 24]})
    assert (result.baseline.micro_batch_size, result.baseline.num_workers) == (12, 1)
    assert_runs(result)
    made = result.best.loader(loader)
    assert type(made) is StatefulDataLoader
    assert (made.batch_size, made.num_workers) == (
        result.best.micro_batch_size,
        result.best.num_workers,
    )


class GraphNet(nn.Module):
    """Reads a batch of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, graphs: Any) -> torch.Tensor:
        summed = torch.zeros(graphs.num_graphs, 4).index_add_(0, graphs.batch, graphs.x)
        return self.line(summed)  # type: ignore[no-any-return] # a Linear's


def test_graphs_are_counted_as_graphs(tmp_path: Path, search: Search) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric.data import Data
        from torch_geometric.loader import DataLoader

    graphs = [
        Data(
            x=torch.randn(3 + index % 4, 4),
            edge_index=torch.zeros(2, 1, dtype=torch.long),
            y=torch.tensor([0]),
        )
        for index in range(640)
    ]
    loader = DataLoader(graphs, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch), batch.y)

    result = search(GraphNet(), loader, tmp_path, step=step, space={"micro_batch_size": 8})
    assert_runs(result)
    measurement = result.trials[0].measurement
    assert measurement is not None
    assert all(block.samples == 8 * block.batches for block in measurement.blocks)


def test_a_webloader_keeps_the_size_of_its_batches(tmp_path: Path, search: Search) -> None:
    import tarfile
    from io import BytesIO

    import webdataset

    shards = []
    for shard in range(2):
        shards.append(str(tmp_path / f"{shard}.tar"))
        with tarfile.open(shards[-1], "w") as tar:
            for number in range(320):
                for name, content in (("cls", b"1"), ("json", b"[1, 2, 3, 4, 5, 6, 7, 8]")):
                    member = tarfile.TarInfo(f"{shard}-{number:03}.{name}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
    data = webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("json", "cls")
    data = data.map_tuple(lambda numbers: torch.tensor(numbers, dtype=torch.float32), int).batched(
        16
    )
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=1, persistent_workers=True)
    result = search(nn.Linear(8, 3), loader, tmp_path / "run")
    assert_runs(result)
    assert result.baseline.micro_batch_size == 16
    assert "batches_are_fixed" in {note.code for note in result.summary.notes}
    with pytest.raises(ConfigError, match="stages"):
        search(nn.Linear(8, 3), loader.unbatched().batched(8), tmp_path / "run")


def test_a_loader_over_datasets_of_hugging_face_is_searched_with(
    tmp_path: Path, search: Search
) -> None:
    from datasets import Dataset as Table

    table = Table.from_dict(
        {"x": [[float(number)] * 8 for number in range(LENGTH)], "y": [0, 1, 2] * (LENGTH // 3)}
    )
    loader = torch.utils.data.DataLoader(table.with_format("torch"), 8, shuffle=True, num_workers=1)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    result = search(nn.Linear(8, 3), loader, tmp_path, step=step, space={"micro_batch_size": 8})
    assert_runs(result)
    assert result.summary.facts.dataset_length == LENGTH
