"""The bytes that dividing a model's state promises, against two ranks on the CPU that divide it by FSDP2."""

from __future__ import annotations

import os
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.diagnosis.memory.sharding import shard_group
from autotune.records.memory import ModelState
from autotune.settings.training_config import TrainingConfig
from autotune.worker.after_window.activations.measure import model_state_of
from autotune.worker.measure.step import Step, make_trainer
from autotune.worker.setup.device import open_device
from tests.factories import FOUR_DEVICES, make_facts, make_measurement

RANKS, WIDTH = 2, 33


def made() -> nn.Module:
    """Layers whose rows two ranks can't divide evenly."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 7))


def whole_state() -> ModelState:
    """Of one rank that keeps everything."""
    model, batch = made(), (torch.randn(4, WIDTH),)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(*batch).sum()
        return outputs

    optimizer = torch.optim.AdamW(model.parameters())
    trainer = make_trainer(model, optimizer, Step(loss, "given"), TrainingConfig(), open_device("cpu"))
    trainer.train(batch)
    return model_state_of(trainer)


def train_sharded(rank: int, meeting: str, found: Any) -> None:
    """A rank that takes a step under fully_shard, and tells the bytes that it keeps."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        model, mesh = made(), init_device_mesh("cpu", (RANKS,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        kept: list[Any] = [*model.parameters(), *(one.grad for one in model.parameters())]
        kept += [one for values in optimizer.state.values() for one in values.values() if one.ndim > 0]
        found.put((rank, sum(one.to_local().nbytes for one in kept)))
    finally:
        destroy_process_group()


def test_two_ranks_save_what_is_promised(tmp_path: Path) -> None:
    state, context = whole_state(), get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])  # imported once, not by each rank
    found, meeting = context.Queue(), f"file://{tmp_path / 'meeting'}"
    ranks = [context.Process(target=train_sharded, args=(rank, meeting, found)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        kept = dict(found.get(timeout=240) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    (advice,) = shard_group(
        TrainingConfig(strategy="ddp", world_size=RANKS),
        RANKS,
        FOUR_DEVICES,
        make_facts(),
        make_measurement(model_state=state),
        limit_bytes=state.total_bytes,
    )
    least, most = advice.figures["least_saved_bytes"], advice.figures["most_saved_bytes"]
    saved = [state.total_bytes - kept[rank] for rank in range(RANKS)]
    assert sum(kept.values()) == state.total_bytes, "each row lies with one rank"
    assert isinstance(least, int)
    assert isinstance(most, int)
    assert least <= min(saved) <= most, "of the rank with the larger part"
    assert min(saved) < most, "rows are not divided"
