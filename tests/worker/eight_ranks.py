"""Train eight ranks in one interpreter, in threads that exchange their gradients.

Run as a script: what is set up for a process here can't be undone. Prints a line of JSON for each configuration of
DistributedDataParallel, given as JSON in the first argument.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from threading import Thread
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
)

from autotune.apply.prepare import arranged
from autotune.config.training_config import TrainingConfig
from autotune.worker.device import open_device
from autotune.worker.step import Step, make_trainer

RANKS, BATCH, LR = 8, 4, 0.1
STEPS = 2
GROUP: Any = ProcessLocalGroup


class Model(nn.Module):
    """Two layers, of which one may go unused, with a buffer between them."""

    def __init__(self, *, has_unused: bool) -> None:
        super().__init__()
        self.first, self.between, self.last = (
            nn.Linear(6, 64),
            nn.BatchNorm1d(64, affine=False),
            nn.Linear(64, 2),
        )
        self.unused = nn.Linear(2, 2) if has_unused else nn.Identity()
        self.between.eval()
        self.between.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.between(torch.relu(self.first(inputs))))
        return outputs


def step(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (
            torch.randn(BATCH, 6, generator=generator),
            torch.randint(0, 2, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def trained(model: nn.Module, config: TrainingConfig, given: list[Any]) -> Any:
    """The model after some batches, as a trial trains it."""
    device = open_device("cpu")
    parallel = arranged(config, model, device.torch_device)
    optimizer = torch.optim.SGD([one for one in parallel.parameters() if one.requires_grad], lr=LR)
    trainer = make_trainer(
        parallel, optimizer, Step(step, "the step that was given"), config, device
    )
    for batch in given:
        trainer.train(batch)
    return parallel


def alone(model: nn.Module, steps: int) -> list[Tensor]:
    """The weights that one process has after steps on the batches of all ranks together."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=LR)
    shares = [batches(rank, steps) for rank in range(RANKS)]
    per_step = steps // STEPS
    for number in range(STEPS):
        for at in range(number * per_step, (number + 1) * per_step):
            whole = tuple(torch.cat([share[at][part] for share in shares]) for part in (0, 1))
            torch.autograd.backward(step(model, whole) / per_step)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: Any) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters() if one.requires_grad]


def together(config: TrainingConfig) -> dict[str, Any]:
    """Steps of eight ranks in threads: how far their weights lie apart, and from those of one process."""
    base = Model(has_unused=config.ddp is not None and config.ddp.find_unused_parameters)
    copies = [deepcopy(base) for _ in range(RANKS)]
    count, found, store = STEPS * config.grad_accum_steps, dict[int, Any](), HashStore()

    def rank(number: int) -> None:
        try:
            distributed.init_process_group("threaded", rank=number, world_size=RANKS, store=store)
            parallel = trained(copies[number], config, batches(number, count))
            found[number] = weights(parallel)
            distributed.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - a thread's failure is told by the main one
            found[number] = f"{type(error).__name__}: {error}"
            GROUP.exception_handle(error)

    threads = [Thread(target=rank, args=(number,), daemon=True) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    GROUP.reset()
    said = [one for one in found.values() if isinstance(one, str)]
    if said or len(found) < RANKS:
        return {"error": said[0] if said else f"{RANKS - len(found)} ranks did not end"}
    expected = alone(deepcopy(base), count)
    return {
        "apart": max(distance(found[0], other) for other in found.values()),
        "off": distance(found[0], expected),
        "moved": distance(expected, weights(base)),
    }


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    configs = [TrainingConfig.model_validate(one) for one in json.loads(sys.argv[1])]
    _install_threaded_pg()  # type: ignore[no-untyped-call] # torch
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined] # torch hides it
    for config in configs:
        sys.stdout.write(json.dumps(together(config)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
