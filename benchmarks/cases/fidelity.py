"""Workloads and settings of benchmarks/fidelity.py: eight jobs as people have them, at least six settings of each.

Four are those of configs/, four are made here. The settings of a workload are chosen so that their rates differ by
several times, and none by next to nothing: else their order would be a matter of chance, which tells nothing.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from benchmarks import ROOT
from benchmarks.cases.cpu import Case

__all__ = [
    "WORKLOADS",
    "FidelityWorkload",
    "Settings",
    "bursty",
    "digits",
    "photos",
    "ragged",
    "sleeping_vectors",
    "stream",
    "text",
    "tiny_gpt",
]

_EXAMPLES = ROOT / "configs" / "workloads"
_FEATURES = 256
_CLASSES = 8
_BURST_EVERY = 2000
_BURST_S = 0.5
_BURSTY_ITEMS = 1 << 18
_RECORDS = 2048
_STREAM_ITEMS = 40_000
_WORDS = 5000
_LONGEST_TEXT = 64  # words
_RAGGED_ITEMS = 8192
_SHORTEST, _LONGEST = 8, 256  # tokens of a ragged item
_MULTIPLE = 16  # lengths are padded to; with each length its own, oneDNN compiles for bfloat16 for half a minute

Settings = Mapping[str, Any]
"""Settings under TrainingConfig's names; what is left out takes its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelityWorkload:
    """A workload of the benchmark, and the settings that it is measured with."""

    case: Callable[[], Case]
    settings: tuple[Settings, ...]


def photos() -> Case:
    """configs/quickstart.yaml: JPEGs decoded by Pillow, a small CNN."""
    return _example("photos")


def digits() -> Case:
    """configs/digits.yaml: an MLP, data in memory, epochs of a fraction of a second."""
    return _example("digits", step=_digits_step)


def sleeping_vectors() -> Case:
    """configs/sleeping_vectors.yaml: 0.1 ms of waiting an item, one linear layer."""
    return _example("sleeping_vectors")


def tiny_gpt() -> Case:
    """configs/tiny_gpt.yaml: a small transformer, bound by computing."""
    return _example("tiny_gpt")


def bursty() -> Case:
    """Items that cost nothing, but every 2,000 items each worker pauses for 0.5 s, as where a shard ends."""
    return Case(model=_linear, dataset=_Bursty())


def stream() -> Case:
    """An iterable, shared out among workers by stride, that parses a JSON record an item; epochs of some seconds."""
    return Case(model=_linear, dataset=_Records(), shuffle=False)


def text() -> Case:
    """A GRU over sentences that are split into words in Python and padded by collate_fn."""
    return Case(model=_Gru, dataset=_Sentences(), optimizer=_adam, collate_fn=_padded_pairs)


def ragged() -> Case:
    """A transformer's encoder over dictionaries of 8 to 256 tokens, padded to the batch's longest, in steps of 16."""
    return Case(model=_Encoder, dataset=_Ragged(), optimizer=_adam, collate_fn=_padded_mapping)


WORKLOADS: Mapping[str, FidelityWorkload] = {
    "photos": FidelityWorkload(
        case=photos,
        settings=(
            {"micro_batch_size": 32},
            {"micro_batch_size": 1, "intra_op_threads": 1},
            {"micro_batch_size": 2},
            {
                "micro_batch_size": 64,
                "num_workers": 1,
                "persistent_workers": True,
                "intra_op_threads": 1,
            },
            {
                "micro_batch_size": 8,
                "num_workers": 2,
                "amp_dtype": "bfloat16",
                "grad_accum_steps": 2,
                "intra_op_threads": 1,
            },
            {
                "micro_batch_size": 64,
                "num_workers": 4,
                "prefetch_factor": 4,
                "persistent_workers": True,
                "intra_op_threads": 1,
            },
        ),
    ),
    "digits": FidelityWorkload(
        case=digits,
        settings=(
            {"micro_batch_size": 32},
            {"micro_batch_size": 4, "grad_accum_steps": 2, "intra_op_threads": 1},
            {"micro_batch_size": 128, "intra_op_threads": 1},
            {"micro_batch_size": 32, "num_workers": 1, "intra_op_threads": 1},
            {"micro_batch_size": 8, "num_workers": 4, "intra_op_threads": 1},
            {
                "micro_batch_size": 64,
                "num_workers": 2,
                "persistent_workers": True,
                "intra_op_threads": 1,
            },
        ),
    ),
    "sleeping_vectors": FidelityWorkload(
        case=sleeping_vectors,
        settings=(
            {"micro_batch_size": 32},
            {"micro_batch_size": 1, "intra_op_threads": 1},
            {"micro_batch_size": 4, "num_workers": 1, "intra_op_threads": 1},
            {
                "micro_batch_size": 16,
                "num_workers": 2,
                "amp_dtype": "bfloat16",
                "grad_accum_steps": 2,
                "intra_op_threads": 1,
            },
            {"micro_batch_size": 64, "num_workers": 2, "prefetch_factor": 4, "intra_op_threads": 1},
            {
                "micro_batch_size": 128,
                "num_workers": 4,
                "persistent_workers": True,
                "intra_op_threads": 1,
            },
        ),
    ),
    "tiny_gpt": FidelityWorkload(
        case=tiny_gpt,
        settings=(
            {"micro_batch_size": 8},
            {"micro_batch_size": 1},
            {"micro_batch_size": 2},
            {"micro_batch_size": 1, "intra_op_threads": 1},
            {"micro_batch_size": 1, "amp_dtype": "bfloat16", "intra_op_threads": 1},
            {"micro_batch_size": 4, "num_workers": 1, "grad_accum_steps": 2, "intra_op_threads": 1},
        ),
    ),
    "bursty": FidelityWorkload(
        case=bursty,
        settings=(
            {"micro_batch_size": 32},
            {"micro_batch_size": 1, "intra_op_threads": 1},
            {"micro_batch_size": 4, "num_workers": 1, "intra_op_threads": 1},
            {
                "micro_batch_size": 32,
                "num_workers": 2,
                "amp_dtype": "bfloat16",
                "grad_accum_steps": 2,
                "intra_op_threads": 1,
            },
            {"micro_batch_size": 64, "num_workers": 3, "prefetch_factor": 4, "intra_op_threads": 1},
            {
                "micro_batch_size": 128,
                "num_workers": 4,
                "persistent_workers": True,
                "intra_op_threads": 1,
            },
        ),
    ),
    "stream": FidelityWorkload(
        case=stream,
        settings=(
            {"micro_batch_size": 32},
            {"micro_batch_size": 2, "intra_op_threads": 1},
            {"micro_batch_size": 8, "num_workers": 1, "intra_op_threads": 1},
            {
                "micro_batch_size": 8,
                "amp_dtype": "bfloat16",
                "grad_accum_steps": 2,
                "intra_op_threads": 1,
            },
            {"micro_batch_size": 64, "num_workers": 2, "prefetch_factor": 4, "intra_op_threads": 1},
            {
                "micro_batch_size": 256,
                "num_workers": 4,
                "persistent_workers": True,
                "intra_op_threads": 1,
            },
        ),
    ),
    "text": FidelityWorkload(
        case=text,
        settings=(
            {"micro_batch_size": 16},
            {"micro_batch_size": 1, "intra_op_threads": 1},
            {"micro_batch_size": 4, "num_workers": 1, "intra_op_threads": 1},
            {"micro_batch_size": 64, "num_workers": 1, "prefetch_factor": 4, "intra_op_threads": 1},
            {"micro_batch_size": 128, "num_workers": 2, "persistent_workers": True},
            {"micro_batch_size": 8, "num_workers": 4, "grad_accum_steps": 2, "intra_op_threads": 1},
        ),
    ),
    "ragged": FidelityWorkload(
        case=ragged,
        settings=(
            {"micro_batch_size": 2},
            {"micro_batch_size": 1, "intra_op_threads": 1},
            {"micro_batch_size": 1, "amp_dtype": "bfloat16", "intra_op_threads": 1},
            {"micro_batch_size": 16, "amp_dtype": "bfloat16", "intra_op_threads": 1},
            {"micro_batch_size": 4, "num_workers": 1, "prefetch_factor": 8, "intra_op_threads": 1},
            {
                "micro_batch_size": 8,
                "num_workers": 4,
                "persistent_workers": True,
                "grad_accum_steps": 2,
            },
        ),
    ),
}


class _Bursty(Dataset[tuple[Tensor, int]]):
    """Counts its own items: each worker holds a copy, and so pauses by itself."""

    def __init__(self) -> None:
        self._vectors = torch.randn(1024, _FEATURES, generator=torch.Generator().manual_seed(0))
        self._served = 0

    def __len__(self) -> int:
        return _BURSTY_ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._served += 1
        if self._served % _BURST_EVERY == 0:
            time.sleep(_BURST_S)
        return self._vectors[index % 1024], index % _CLASSES


class _Records(IterableDataset[tuple[Tensor, int]]):
    """Each worker takes every n-th record, as torch's documentation advises."""

    def __init__(self) -> None:
        generator = random.Random(0)
        self._lines = [
            json.dumps(
                {
                    "label": row % _CLASSES,
                    "features": [round(generator.gauss(0, 1), 4) for _ in range(_FEATURES)],
                }
            )
            for row in range(_RECORDS)
        ]

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, _STREAM_ITEMS, stride):
            record = json.loads(self._lines[index % _RECORDS])
            yield torch.tensor(record["features"]), record["label"]


class _Sentences(Dataset[tuple[Tensor, int]]):
    """Sentences of Python's own reference manual, with a class that follows from the topic."""

    def __init__(self) -> None:
        sentences = [
            (sentence, number % _CLASSES)
            for number, topic in enumerate(topics.values())
            for sentence in re.split(r"(?<=[.:])\s+", topic)
        ]
        self._sentences = [(sentence, label) for sentence, label in sentences if len(sentence) > 20]
        self._numbers: dict[str, int] = {}
        for sentence, _ in self._sentences:
            for word in _words(sentence):
                if len(self._numbers) < _WORDS - 1:
                    self._numbers.setdefault(word, len(self._numbers) + 1)

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sentence, label = self._sentences[index]
        numbers = [self._numbers.get(word, 0) for word in _words(sentence)][:_LONGEST_TEXT]
        return torch.tensor(numbers or [0]), label


class _Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, 64)
        self.gru = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, _CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Scores (batch, 8) from numbers of words (batch, seq)."""
        states, _ = self.gru(self.words(words))
        return self.head(states.mean(dim=1))  # type: ignore[no-any-return] # nn.Module's call is untyped


class _Ragged(Dataset[dict[str, Tensor]]):
    """Lengths are spread evenly on a logarithmic scale."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        spread = torch.rand(_RAGGED_ITEMS, generator=generator)
        self._lengths = (_SHORTEST * (_LONGEST / _SHORTEST) ** spread).long().tolist()
        self._tokens = torch.randint(_WORDS, (1 << 16,), generator=generator)

    def __len__(self) -> int:
        return _RAGGED_ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, length = 7 * index % (len(self._tokens) - _LONGEST), self._lengths[index]
        return {
            "input_ids": self._tokens[start : start + length],
            "labels": torch.tensor(index % _CLASSES),
        }


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_WORDS, 64)
        layer = nn.TransformerEncoderLayer(
            64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(64, _CLASSES)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The mean cross-entropy, from ids and mask (batch, seq) and labels (batch,)."""
        features = self.encoder(self.tokens(input_ids), src_key_padding_mask=~attention_mask)
        weights = attention_mask.unsqueeze(-1).to(features.dtype)
        scores = self.head((features * weights).sum(dim=1) / weights.sum(dim=1))
        return {"loss": nn.functional.cross_entropy(scores, labels)}


def _example(name: str, **parts: Any) -> Case:
    """The job of a file in configs/workloads; the folder joins the search path, so that trials can import it too."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    module = importlib.import_module(name)
    return Case(
        model=module.model,
        dataset=module.dataset(),
        optimizer=getattr(module, "optimizer", None),
        **parts,
    )


def _digits_step(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    loss: Tensor = importlib.import_module("digits").loss(model(images), labels)
    return loss


def _padded_pairs(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    sequences, labels = zip(*items, strict=True)
    return pad_sequence(list(sequences), batch_first=True), torch.tensor(labels)


def _padded_mapping(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    sequences = [item["input_ids"] for item in items]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = pad_sequence(sequences, batch_first=True)
    padded = nn.functional.pad(padded, (0, -padded.shape[1] % _MULTIPLE))
    return {
        "input_ids": padded,
        "attention_mask": torch.arange(padded.shape[1]) < lengths.unsqueeze(1),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def _words(sentence: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", sentence.lower())


def _linear() -> nn.Module:
    return nn.Linear(_FEATURES, _CLASSES)


def _adam(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr)
