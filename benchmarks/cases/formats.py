"""Workloads of benchmarks/formats.py: items read from files as many do it, and as the advice says.

The files are generated. Nothing here knows how it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case

__all__ = ["FORMAT_CASES"]

_FILES = 32
_ITEMS = 2048
_SIDE, _SMALL = 768, 96
_ROWS, _COLUMNS, _GROUP = 50_000, 16, 1000


class _Items(Dataset[Tensor]):
    """Each file is read for many items, by one of the functions below."""

    def __init__(self, files: list[Path], read: Callable[[Path, int], Any]) -> None:
        self._files, self._read = files, read

    def __len__(self) -> int:
        return _ITEMS

    def __getitem__(self, index: int) -> Tensor:
        values = np.ascontiguousarray(self._read(self._files[index % len(self._files)], index))
        return torch.from_numpy(values).flatten().float()[:1024]


class _Mean(nn.Module):
    """A step that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.weight


class _Deep(nn.Module):
    """A step that costs far more than any item."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(80)))

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows)
        return outputs


def _step(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).mean()
    return loss


def _parsed(path: Path, _index: int) -> Any:
    return np.loadtxt(path, dtype=np.float32)


def _mapped(path: Path, _index: int) -> Any:
    return np.load(path.with_suffix(".npy"), mmap_mode="r")


def _decoded(path: Path, _index: int) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((_SMALL, _SMALL)))


def _drafted(path: Path, _index: int) -> Any:
    with Image.open(path) as image:
        image.draft(None, (2 * _SMALL, 2 * _SMALL))
        return np.asarray(image.convert("RGB").resize((_SMALL, _SMALL)))


def _whole_table(path: Path, index: int) -> Any:
    from pyarrow import parquet

    table = parquet.read_table(path)
    return np.array([column[index].as_py() for column in table.columns])


def _row_group(path: Path, index: int) -> Any:
    from pyarrow import parquet

    table = parquet.ParquetFile(path).read_row_group(index // _GROUP)
    return np.array([column[index % _GROUP].as_py() for column in table.columns])


def _texts(folder: Path) -> list[Path]:
    files, generator = [], np.random.default_rng(0)
    for number in range(_FILES):
        table = generator.random((200, 16)).astype(np.float32)
        files.append(folder / f"{number}.txt")
        np.savetxt(files[-1], table)
        np.save(files[-1].with_suffix(".npy"), table)
    return files


def _photos(folder: Path) -> list[Path]:
    files = []
    for number in range(_FILES):
        coarse = np.random.default_rng(number).integers(0, 255, (24, 24, 3), dtype=np.uint8)
        files.append(folder / f"{number}.jpg")
        Image.fromarray(coarse).resize((_SIDE, _SIDE)).save(files[-1])
    return files


def _table(folder: Path) -> list[Path]:
    import pyarrow as pa
    from pyarrow import parquet

    numbers, path = np.random.default_rng(0).random((_ROWS, _COLUMNS)), folder / "table.parquet"
    columns = {f"c{at}": numbers[:, at] for at in range(_COLUMNS)}
    parquet.write_table(pa.table(columns), path, row_group_size=_GROUP)
    return [path]


def _case(
    files: list[Path], read: Callable[[Path, int], Any], model: Callable[[], nn.Module] = _Mean
) -> Case:
    settings = {"micro_batch_size": 16, "intra_op_threads": 1}
    return Case(model=model, dataset=_Items(files, read), step=_step, settings=settings)


def _pair(
    write: Callable[[Path], list[Path]],
    today: Callable[[Path, int], Any],
    followed: Callable[[Path, int], Any],
) -> Callable[[Path], tuple[Case, Case]]:
    def made(folder: Path) -> tuple[Case, Case]:
        files = write(folder)
        return _case(files, today), _case(files, followed)

    return made


def _device_bound(folder: Path) -> tuple[Case, Case]:
    files = _texts(folder)
    return _case(files, _parsed, _Deep), _case(files, _mapped, _Deep)


FORMAT_CASES: dict[str, tuple[str, Callable[[Path], tuple[Case, Case]]]] = {
    "text": ("save_as_arrays", _pair(_texts, _parsed, _mapped)),
    "images": ("decode_smaller", _pair(_photos, _decoded, _drafted)),
    "parquet": ("read_row_groups", _pair(_table, _whole_table, _row_group)),
    "text, a deep model": ("save_as_arrays", _device_bound),
}
"""By name: the kind of advice, and what makes the job as it is and as the advice says, in a folder for its files."""
