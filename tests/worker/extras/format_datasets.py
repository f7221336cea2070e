"""Datasets whose items are read from files, in ways that pay and in ways that don't."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy import loadtxt
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

SIDE, SMALL = 512, 64
ROWS = 20_000


class Files(Dataset[Tensor]):
    """An item for each of some files."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(
            np.ascontiguousarray(self.read(self.files[index % len(self.files)]))
        )

    def read(self, path: Path) -> Any:
        """A file as an array."""
        raise NotImplementedError


class Texts(Files):
    """Parsed, by a name of its own."""

    def read(self, path: Path) -> Any:
        return loadtxt(path, dtype=np.float32)


class TextsOfOpenFiles(Files):
    """Parsed from files that are open."""

    def read(self, path: Path) -> Any:
        with path.open() as file:
            return loadtxt(file, dtype=np.float32)


class Arrays(Files):
    """Mapped."""

    def read(self, path: Path) -> Any:
        return np.load(path, mmap_mode="r")


class Photos(Files):
    """Decoded whole, then made small."""

    def read(self, path: Path) -> Any:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((SMALL, SMALL)))


class PhotosInMemory(Files):
    """The same, from bytes at hand."""

    def read(self, path: Path) -> Any:
        return np.asarray(Image.open(BytesIO(path.read_bytes())).resize((SMALL, SMALL)))


class PhotosOfAnySize(Files):
    """Decoded whole, then made small by a scale that is drawn anew."""

    scale = 0

    def read(self, path: Path) -> Any:
        self.scale += 1
        with Image.open(path) as image:
            return np.asarray(image.resize((SMALL + self.scale, SMALL + 2 * self.scale)))


class PhotosOfAnotherSize(Files):
    """Decoded whole, then made small otherwise each time that an item is asked for."""

    def __init__(self, files: list[Path]) -> None:
        super().__init__(files)
        self.seen: dict[int, int] = {}

    def __getitem__(self, index: int) -> Tensor:
        self.seen[index] = self.seen.get(index, 0) + 1
        with Image.open(self.files[index % len(self.files)]) as image:
            side = SMALL if self.seen[index] == 1 else 2 * SMALL
            return torch.from_numpy(np.array(image.resize((side, side))))


class Drafted(Files):
    """Decoded small by the decoder itself."""

    def read(self, path: Path) -> Any:
        with Image.open(path) as image:
            image.draft(None, (2 * SMALL, 2 * SMALL))
            return np.asarray(image.resize((SMALL, SMALL)))


class Whole(Files):
    """Decoded, and trained in that size."""

    def read(self, path: Path) -> Any:
        with Image.open(path) as image:
            return np.asarray(image)


class Rows(Files):
    """A row of a table that is read anew for each item."""

    def __getitem__(self, index: int) -> Tensor:
        from pyarrow import parquet

        return torch.tensor(
            [column[index].as_py() for column in parquet.read_table(self.files[0]).columns]
        )


class RowsOfGroups(Files):
    """A row of a row group that is read anew for each item."""

    def __getitem__(self, index: int) -> Tensor:
        from pyarrow import parquet

        group = parquet.ParquetFile(self.files[0]).read_row_group(index % 2)
        return torch.tensor([column[index].as_py() for column in group.columns])


class Tables(Files):
    """A table for each item."""

    def __getitem__(self, index: int) -> Tensor:
        from pyarrow import parquet

        return torch.tensor(
            np.stack(
                [column.to_numpy() for column in parquet.read_table(self.files[index]).columns]
            )
        )


class RowsOfOneTable(Files):
    """A row of a table that is read once."""

    table: Any = None

    def __getitem__(self, index: int) -> Tensor:
        from pyarrow import parquet

        self.table = self.table or parquet.read_table(self.files[0])
        return torch.tensor([column[index].as_py() for column in self.table.columns])


def write_texts(folder: Path) -> tuple[list[Path], list[Path]]:
    """Some tables as text, and the same as arrays."""
    generator, texts, arrays = np.random.default_rng(0), [], []
    for number in range(4):
        table = generator.random((400, 16)).astype(np.float32)
        texts.append(folder / f"{number}.txt")
        arrays.append(folder / f"{number}.npy")
        np.savetxt(texts[-1], table)
        np.save(arrays[-1], table)
    return texts, arrays


def write_photos(folder: Path, kind: str = "jpg") -> list[Path]:
    """Some photographs, smooth as such are."""
    files = []
    for number in range(4):
        coarse = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        files.append(folder / f"{number}.{kind}")
        Image.fromarray(coarse).resize((SIDE, SIDE)).save(files[-1])
    return files


def write_table(folder: Path) -> list[Path]:
    """A table of numbers as Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    numbers = np.random.default_rng(0).random((ROWS, 8))
    table = pa.table({f"c{at}": numbers[:, at] for at in range(8)})
    parquet.write_table(table, folder / "table.parquet", row_group_size=ROWS // 2)
    return [folder / "table.parquet"]
