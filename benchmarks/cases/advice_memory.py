"""Advice on memory that benchmarks/advice.py follows: checkpointing.

Nothing here knows how it is measured.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from benchmarks.cases.cpu import Case
from benchmarks.cases.followed_cases import FollowedCase

__all__ = ["MEMORY_CASES"]

_WIDTH = 32
_INNER = 128
_TOKENS = 256
_BLOCKS = 16
_CLASSES = 10
_HEAD = 640
_MATRICES = 4
"""Of _HEAD rows and columns, each orthogonalised in every step: a heavy step whatever the batch."""
_BATCH = 16
_FACTOR = 4
"""Times today's batch, which fits once blocks are checkpointed: where the diagnosis promises none."""
_LIMIT = "420MiB"
"""Room for twice the batch (some 350 MiB), and not for four times (520): a sample keeps 5 MiB."""
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 * 2**10)}
"""Freed tensors go back to the system. In trials they are kept (launch/machine.py): with tensors of some MiB
the heap then grows by fragments, after the window to several times its peak, and what passes the limit is ended."""


class _Block(nn.Module):
    """The feed-forward half of a transformer's layer: of what it keeps its input is a tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, _INNER),
            nn.Linear(_INNER, _WIDTH),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.down(
            nn.functional.relu(self.up(self.norm(inputs))).square()
        )
        return outputs


class _Deep(nn.Module):
    """Blocks over many tokens, then layers over their mean, which are many parameters and little work."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.widen = nn.Linear(_WIDTH, _HEAD, bias=False)
        self.head = nn.ParameterList(nn.Parameter(torch.eye(_HEAD)) for _ in range(_MATRICES))
        self.classes = nn.Linear(_HEAD, _CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = (
                checkpoint(block, tokens, use_reentrant=False)
                if self.is_checkpointed
                else block(tokens)
            )
        pooled = self.widen(tokens.mean(1))
        for matrix in self.head:
            pooled = pooled @ matrix
        outputs: Tensor = self.classes(pooled)
        return outputs


class _Orthogonalised(torch.optim.Optimizer):
    """Steps along orthogonalised gradients of the large matrices, and along the gradients of the rest.

    Source: Jordan et al. 2024, "Muon": five Newton-Schulz steps, here in float32.
    """

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type] # as torch's own take it

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - without a closure
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    is_large = parameter.shape == (_HEAD, _HEAD)
                    parameter.sub_(
                        _orthogonal(parameter.grad) if is_large else parameter.grad,
                        alpha=group["lr"],
                    )


class _TokenRows(Dataset[tuple[Tensor, int]]):
    """Random tokens, the same for every item: nothing to load."""

    def __init__(self) -> None:
        self._tokens = torch.randn(_TOKENS, _WIDTH)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._tokens, index % _CLASSES


def _orthogonal(gradient: Tensor) -> Tensor:
    matrix: Tensor = gradient / (gradient.norm() + 1e-7)
    for _ in range(5):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * square + 2.0315 * square @ square) @ matrix
    return matrix


def _whole() -> nn.Module:
    return _Deep(is_checkpointed=False)


def _checkpointed() -> nn.Module:
    return _Deep(is_checkpointed=True)


_TODAY = Case(
    model=_whole,
    dataset=_TokenRows(),
    optimizer=_Orthogonalised,
    settings={"micro_batch_size": _BATCH, "lr": 1e-4},
)

MEMORY_CASES = (
    FollowedCase(
        name="heavy_step",
        kind="checkpoint_activations",
        today=_TODAY,
        followed=replace(
            _TODAY, model=_checkpointed, settings={"micro_batch_size": _FACTOR * _BATCH, "lr": 1e-4}
        ),
        memory_limit=_LIMIT,
        environment=_MALLOC,
        why="most of a step does not grow with the batch, and a larger batch fits only without the blocks' activations",
    ),
)
