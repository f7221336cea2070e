"""Use batches again as they were, copied no further than necessary."""

from __future__ import annotations

from collections import namedtuple
from itertools import islice
from typing import Any

import pytest
import torch

from autotune.worker import batch as reuse
from autotune.worker.batch import Reused, copied, tensors_of, unpacked

Pair = namedtuple("Pair", "x y")


class Own:
    """A batch of the user's own class."""

    def __init__(self) -> None:
        self.x, self.labels = torch.ones(3), torch.zeros(3)


class Refusing(Own):
    """One that won't be copied whole."""

    def __deepcopy__(self, memo: object) -> Own:
        raise TypeError("not this one")


class RefusingAll(Refusing):
    """One that won't be copied at all."""

    def __copy__(self) -> Own:
        raise TypeError("nor so")


@pytest.mark.parametrize(
    "batch", [torch.ones(3), (torch.ones(3), [torch.ones(1), 2]), {"x": torch.ones(3), "n": "a"}]
)
def test_plain_containers_share_tensors(batch: Any) -> None:
    own = unpacked(batch)
    assert type(own) is type(batch)
    assert all(
        tensor is before for tensor, before in zip(tensors_of(own), tensors_of(batch), strict=True)
    )


def test_objects_are_copied_and_share_tensors() -> None:
    batch = Own()
    own = unpacked({"all": [batch], "names": ("a",)})["all"][0]
    assert own.x is batch.x
    del own.labels
    assert hasattr(batch, "labels")
    pair = Pair(torch.ones(3), torch.zeros(3))
    assert unpacked(pair).x is pair.x


def test_objects_that_refuse_copies() -> None:
    batch, stubborn = Refusing(), RefusingAll()
    assert copied(batch) is not batch
    assert copied(batch).x is batch.x
    assert copied(stubborn) is stubborn


def test_tensors_are_cloned_once_changed() -> None:
    batches = [(torch.ones(3),), (torch.zeros(2),)]
    kept, changed = Reused(batches), Reused(batches)
    first = next(kept)
    # nobody knows yet
    assert first[0].data_ptr() != batches[0][0].data_ptr()
    assert [batch[0].data_ptr() for batch in islice(kept, 3)] == [
        batches[at][0].data_ptr() for at in (1, 0, 1)
    ]
    next(changed)[0][:1].mul_(2.0)
    for batch in islice(changed, 4):
        batch[0].add_(1.0)
    assert (batches[0][0].tolist(), batches[1][0].tolist()) == ([1.0] * 3, [0.0] * 2)


def test_inference_tensors_are_not_cloned() -> None:
    with torch.inference_mode():
        batch = (torch.ones(3),)
    again = Reused([batch])
    next(again)
    assert next(again)[0] is batch[0]


@pytest.mark.parametrize(("limit_bytes", "steps"), [(0, 1), (2 * 24, 2), (10**9, 5)])
def test_clones_are_limited(limit_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_CLONED_BYTES", limit_bytes)
    batch = (torch.ones(3),)
    shared, cloning = Reused([batch]), Reused([batch])
    next(shared)
    next(cloning)[0].zero_()
    assert len(shared.take(5, 2)) == 10
    assert len(cloning.take(5, 2)) == 2 * steps
