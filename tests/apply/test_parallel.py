"""Pass DDP the arguments that the installed torch has, train in a group of one, and recognize collateral errors."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional  # first imported where there is a group, it would hold that one for good
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from autotune.apply.prepare import ddp_arguments, without_effect_here
from autotune.apply.prepare import distributed as distributed_model
from autotune.config.plan import Workload
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.messages.space import first_bucket_without_effect
from autotune.protocol.messages import TrialJob
from autotune.worker import window
from autotune.worker.build import build_model
from autotune.worker.device import open_device
from autotune.worker.group import ALONE, is_collateral, open_group
from autotune.worker.step import Trainer, open_trainer
from tests.factories import make_process

WORKLOAD = Workload(model=None, dataset=None)
BATCH = (torch.randn(4, 8), torch.randint(0, 2, (4,)))
WIDE_BATCH = (torch.randn(4, 64), torch.randint(0, 64, (4,)))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TrialJob]:
    """A DDP trial of one rank, whose process group is closed afterwards."""
    yield TrialJob(
        process=make_process(tmp_path),
        payload=tmp_path,
        config=TrainingConfig(micro_batch_size=4, strategy="ddp", world_size=1),
        rendezvous=f"file://{tmp_path}/rendezvous",
    )
    if distributed.is_initialized():
        gc.collect()  # a model in a cycle would let go of the group on one of gloo's own threads, which then aborts
        distributed.destroy_process_group()


def test_ddp_arguments() -> None:
    plain = {
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "find_unused_parameters": False,
    }
    assert ddp_arguments(DdpConfig()) == plain
    listed = ddp_arguments(DdpConfig(bucket_cap_mb=50, first_bucket_mb=2))
    assert listed == {**plain, "bucket_cap_mb_list": [2, 50]}
    assert ddp_arguments(DdpConfig(first_bucket_mb=2))["bucket_cap_mb_list"] == [2, 25]
    assert without_effect_here(DdpConfig(first_bucket_mb=2)) == ()
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    newest = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    assert ddp_arguments(DdpConfig(broadcast_buffers=False)) == {**plain, newest: False}


def test_arguments_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(
        self: object,
        module: nn.Module,
        device_ids: object = None,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
    ) -> None: ...

    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    wanted = DdpConfig(bucket_cap_mb=50, first_bucket_mb=2, broadcast_buffers=False)
    assert ddp_arguments(wanted) == {"bucket_cap_mb": 50, "broadcast_buffers": False}
    assert without_effect_here(wanted) == (first_bucket_without_effect(torch=torch.__version__),)
    with pytest.warns(UserWarning, match="first_bucket_mb"):
        distributed_model(nn.Linear(1, 1), torch.device("cpu"), wanted)
    # a trial has a note instead
    distributed_model(nn.Linear(1, 1), torch.device("cpu"), wanted, is_trial=True)


def open_trainer_of(job: TrialJob, net: Any, batch: Any, **settings: Any) -> Trainer:
    """Join the job's group and return a trainer with other settings."""
    device = open_device("cpu")
    config = job.config.model_copy(update=settings)
    assert open_group(job, 0, device).size == 1
    return open_trainer(
        WORKLOAD, build_model(replace(WORKLOAD, model=net), config, device), batch, config, device
    )


@pytest.mark.parametrize(("hook", "steps"), [(None, 2), ("fp16", 1), ("powersgd", 2)])
def test_group_of_one_trains(job: TrialJob, hook: str | None, steps: int) -> None:
    ddp = DdpConfig(comm_hook=hook)
    trainer = open_trainer_of(job, nn.Linear(8, 2), BATCH, ddp=ddp, grad_accum_steps=steps)
    model = trainer.model
    assert isinstance(model, DistributedDataParallel)
    before = model.module.weight.detach().clone()
    for _ in range(4 * steps):
        trainer.train(BATCH)
    assert not torch.equal(before, model.module.weight)
    assert trainer.accumulated == 0


def test_powersgd_compresses_before_the_window(job: TrialJob) -> None:
    ddp = DdpConfig(comm_hook="powersgd")
    trainer = open_trainer_of(job, nn.Linear(64, 64), WIDE_BATCH, ddp=ddp)
    model: Any = trainer.model
    ((_, state),) = model._comm_hooks
    for _ in range(window.FIRST_STEPS):
        trainer.train(WIDE_BATCH)
    assert state.iter > state.start_powerSGD_iter
    assert state.p_memory_dict  # what is left of a gradient of low rank


def test_powersgd_of_a_user_starts_as_torch_does(job: TrialJob) -> None:
    open_group(job, 0, open_device("cpu"))
    config = job.config.model_copy(update={"ddp": DdpConfig(comm_hook="powersgd")})
    ((_, state),) = config.prepare(nn.Linear(4, 4), "cpu")._comm_hooks  # type: ignore[misc] # a DDP's
    assert state.start_powerSGD_iter == 1000


def test_static_graph_cannot_skip_the_exchange(job: TrialJob) -> None:
    trainer = open_trainer_of(job, nn.Linear(8, 2), BATCH, ddp=DdpConfig(static_graph=True))
    assert trainer.accumulator.no_sync is None
    trainer.train(BATCH)


def test_single_process_is_alone(job: TrialJob) -> None:
    single = job.model_copy(update={"config": TrainingConfig()})
    assert open_group(single, 0, open_device("cpu")) is ALONE
    assert ALONE.any(True)
    assert not ALONE.all(False)
    assert ALONE.most(3.0) == 3.0
    assert ALONE.is_equal(7)
    ALONE.wait()


def test_is_collateral(job: TrialJob) -> None:
    closed = RuntimeError(
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:23456"
    )
    assert not is_collateral(closed)  # without a group there are no others
    open_group(job, 0, open_device("cpu"))
    lost = distributed.DistBackendError(
        "NCCL error: remote process exited or there was a network error"
    )
    late = RuntimeError("Timed out waiting 17000ms for recv operation to complete")
    assert [is_collateral(error) for error in (closed, lost, late)] == [True] * 3
    full = distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'")
    own = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    users = ValueError("Connection closed by peer")
    assert [is_collateral(error) for error in (full, own, users)] == [False] * 3


def test_process_count() -> None:
    assert TrainingConfig(strategy="ddp", world_size=2).process_count == 2
    assert TrainingConfig(strategy="dp", world_size=2).process_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that it does not look into threads
@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support:DeprecationWarning"
)  # Python 3.12's, by Dynamo
def test_replica_threads_run_uncompiled() -> None:
    """Why DataParallel with a compiled model is refused; once this fails, that rule may go."""

    def record(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.replica = nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: list[torch.Tensor] = []
            thread = Thread(target=lambda: found.append(self.replica(inputs)))
            thread.start()
            thread.join()
            return found[0]

    graphs: list[Any] = []
    model, inputs = Threaded(), torch.ones(2, 4)
    compiled: Any = torch.compile(model, backend=record)
    assert torch.equal(compiled(inputs), model.replica(inputs))
    assert graphs == []
    alone: Any = torch.compile(model.replica, backend=record)
    alone(inputs)
    assert len(graphs) == 1
    torch.compiler.reset()
