"""Count tokens by the first integer tensor (batch, length), and padding by a mask of its shape."""

from __future__ import annotations

from collections import UserDict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autotune.worker.batch import token_count, token_tensors


def rows(samples: int, length: int) -> Tensor:
    return torch.ones(samples, length, dtype=torch.long)


@dataclass
class Encoded:
    ids: Tensor
    attention_mask: Tensor


@pytest.mark.parametrize(
    ("batch", "has_mask"),
    [
        (rows(4, 6), False),
        ((rows(4, 6), torch.zeros(4)), False),
        ([torch.zeros(4, 6), rows(4, 6)], False),
        ({"attention_mask": rows(4, 6), "input_ids": rows(4, 6)}, True),
        ({"labels": rows(4, 6), "input_ids": rows(4, 6), "attention_mask": torch.ones(4, 6)}, True),
        ({"special_tokens_mask": rows(4, 6), "input_ids": rows(4, 6)}, False),
        (UserDict(input_ids=rows(4, 6)), False),
        (({"input_ids": rows(4, 6), "attention_mask": rows(4, 6)}, torch.zeros(4)), True),
        (Encoded(rows(4, 6), rows(4, 6).bool()), True),
    ],
)
def test_token_tensors(batch: Any, has_mask: bool) -> None:
    found = token_tensors(batch, 4)
    assert found is not None
    assert found[0].shape == (4, 6)
    assert (found[1] is not None) == has_mask


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(4, 6),
        rows(4, 6)[0],
        rows(3, 6),
        torch.ones(4, 3, 8, 8),
        (torch.ones(4, 6), torch.ones(4, dtype=torch.long)),
        {"attention_mask": rows(4, 6)},
        "text",
        ["a", "b", "c", "d"],
        None,
    ],
)
def test_batches_without_tokens(batch: Any) -> None:
    assert token_count(batch, 4) is None


class Unreadable(dict[str, Tensor]):
    """Raises what nobody expects."""

    def items(self) -> Any:
        raise OSError("not yours")


@dataclass
class Unset:
    """Has a field that is not set yet."""

    rows: Tensor
    later: Tensor = field(init=False)


def test_odd_batches() -> None:
    assert token_count(Unreadable(rows=rows(4, 6)), 4) is None
    assert token_count(deque([rows(4, 6), 1]), 4) is not None
    assert token_count(Unset(rows(4, 6)), 4) is not None


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30)), min_size=1, max_size=20))
def test_figures(shapes: list[tuple[int, int]]) -> None:
    count = token_count({"input_ids": rows(*shapes[0])}, shapes[0][0])
    assert count is not None
    for shape in shapes:
        count.add({"input_ids": rows(*shape)}, shape[0])
    found = count.figures()
    assert found is not None
    samples, lengths = zip(*shapes, strict=True)
    tokens = sum(size * length for size, length in shapes)
    assert found.per_sample == pytest.approx(tokens / sum(samples))
    assert (found.batches, found.shortest, found.longest) == (
        len(shapes),
        min(lengths),
        max(lengths),
    )
    assert (found.relative_sd is None) == (len(shapes) == 1)


def test_relative_sd() -> None:
    count = token_count({"input_ids": rows(2, 3)}, 2)
    assert count is not None
    for length in [3, 5] * 1500:
        count.add({"input_ids": rows(2, length)}, 2)
    found = count.figures()
    assert found is not None
    assert found.relative_sd == pytest.approx(1 / (4 * 3000**0.5), rel=0.01)


def test_masks_are_read_before_the_window() -> None:
    mask = rows(2, 10)
    mask[0, 4:] = 0
    batch = {"input_ids": rows(2, 10), "attention_mask": mask}
    count = token_count(batch, 2)
    assert count is not None
    count.add(batch, 2)
    count.begin_window()
    count.add({"input_ids": rows(2, 30), "attention_mask": object()}, 2)
    found = count.figures()
    assert found is not None
    assert found.padding == pytest.approx(0.3)
    assert (found.per_sample, found.batches, list(count.lengths)) == (30.0, 1, [30])


def test_table_of_integers_is_no_tokens() -> None:
    table = (rows(4, 6), torch.zeros(4))
    count = token_count(table, 4)
    assert count is not None
    count.add(table, 4)
    count.add(table, 4)
    assert count.figures() is None
    count.add((rows(4, 9), torch.zeros(4)), 4)
    assert count.figures() is not None


@pytest.mark.parametrize("other", [{}, None, {"input_ids": "text"}, {"input_ids": torch.ones(3)}])
def test_unlike_batch_ends_the_count(other: Any) -> None:
    count = token_count({"input_ids": rows(2, 3)}, 2)
    assert count is not None
    count.add(other, 2)
    count.add({"input_ids": rows(2, 3)}, 2)
    assert count.figures() is None
