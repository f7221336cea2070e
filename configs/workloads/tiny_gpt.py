"""A small decoder-only transformer on characters: computing is the bottleneck, so the loader has little to give.

Batches are mappings and the model returns one with its loss, as Hugging Face's models do: neither a loss nor a step
has to be given.
"""

from __future__ import annotations

from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["Characters", "TinyGpt", "dataset", "model", "optimizer"]

VOCABULARY = 128  # ASCII
CONTEXT = 128
_WIDTH = 128
_HEADS = 4
_LAYERS = 4


class Characters(Dataset[dict[str, Tensor]]):
    """Stretches of a text: `input_ids` (128,), and as `labels` (128,) the characters that follow them."""

    def __init__(self, text: str) -> None:
        ascii_text = text.encode("ascii", errors="ignore")
        self._ids = torch.frombuffer(bytearray(ascii_text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._ids) - 1) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._ids[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


class TinyGpt(nn.Module):
    """Four layers of 128 features, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, _WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, _WIDTH))
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, VOCABULARY, bias=False))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Logits (batch, seq, 128) and the mean cross-entropy, from ids and labels (batch, seq)."""
        features = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        logits = self.head(self.blocks(features))
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries_keys_values = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        )
        self.mixed = nn.Linear(_WIDTH, _WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 4 * _WIDTH),
            nn.GELU(),
            nn.Linear(4 * _WIDTH, _WIDTH),
        )

    def forward(self, features: Tensor) -> Tensor:
        batch, length, _ = features.shape
        heads = self.queries_keys_values(features).view(batch, length, 3, _HEADS, -1)
        # each (batch, heads, seq, features of a head)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        features = features + self.mixed(attended.transpose(1, 2).reshape(batch, length, _WIDTH))
        return features + self.feed_forward(features)  # type: ignore[no-any-return] # nn.Module's call is untyped


def model() -> nn.Module:
    """The transformer, 0.8 million parameters."""
    return TinyGpt()


def dataset() -> Characters:
    """The Python manual's topics, which come with Python: some 460 thousand characters."""
    return Characters("\n".join(topics.values()))


def optimizer(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(params, lr=lr)
