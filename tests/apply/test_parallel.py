"""DDP's arguments follow the installed torch, and ranks find out when one only suffers from another's end."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
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
from autotune.worker.step import infer_step, make_trainer
from tests.factories import make_process

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


def test_defaults_name_nothing_that_torch_has_by_itself() -> None:
    assert ddp_arguments(DdpConfig()) == {
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "find_unused_parameters": False,
    }


def test_the_first_bucket_is_told_where_torch_takes_a_list() -> None:
    arguments = ddp_arguments(DdpConfig(bucket_cap_mb=50, first_bucket_mb=2))
    assert arguments["bucket_cap_mb_list"] == [2, 50]
    assert "bucket_cap_mb" not in arguments
    assert ddp_arguments(DdpConfig(first_bucket_mb=2))["bucket_cap_mb_list"] == [2, 25]
    assert without_effect_here(DdpConfig(first_bucket_mb=2)) == ()


def test_what_the_installed_torch_lacks_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(
        self: object, module: nn.Module, broadcast_buffers: bool = True, bucket_cap_mb: float = 25
    ) -> None: ...

    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    wanted = DdpConfig(bucket_cap_mb=50, first_bucket_mb=2, broadcast_buffers=False)
    assert ddp_arguments(wanted) == {"bucket_cap_mb": 50, "broadcast_buffers": False}
    assert without_effect_here(wanted) == (first_bucket_without_effect(torch=torch.__version__),)


def test_a_user_is_warned_of_what_the_installed_torch_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(self: object, module: nn.Module, device_ids: object = None) -> None: ...

    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    wanted = DdpConfig(first_bucket_mb=2)
    with pytest.warns(UserWarning, match="first_bucket_mb"):
        distributed_model(nn.Linear(1, 1), torch.device("cpu"), wanted)
    distributed_model(
        nn.Linear(1, 1), torch.device("cpu"), wanted, is_trial=True
    )  # which has a note of it


def test_buffers_go_by_the_newest_name() -> None:
    arguments = ddp_arguments(DdpConfig(broadcast_buffers=False))
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    newest = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    assert arguments[newest] is False


@pytest.mark.parametrize("hook", [None, "fp16", "powersgd"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_group_of_one_trains_with_each_hook_and_with_accumulation(
    job: TrialJob, hook: str | None, steps: int
) -> None:
    device = open_device("cpu")
    config = job.config.model_copy(
        update={"ddp": DdpConfig(comm_hook=hook), "grad_accum_steps": steps}
    )
    assert open_group(job, 0, device).size == 1
    model = build_model(Workload(model=nn.Linear(8, 2), dataset=None), config, device)
    assert isinstance(model, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model, optimizer, infer_step(Workload(model=None, dataset=None), BATCH), config, device
    )
    before = model.module.weight.detach().clone()
    for _ in range(4 * steps):
        trainer.train(BATCH)
    assert not torch.equal(before, model.module.weight)
    assert trainer.accumulated == 0


def test_powersgd_compresses_before_the_window_begins(job: TrialJob) -> None:
    device = open_device("cpu")
    config = job.config.model_copy(update={"ddp": DdpConfig(comm_hook="powersgd")})
    open_group(job, 0, device)
    model: Any = build_model(Workload(model=nn.Linear(64, 64), dataset=None), config, device)
    ((_, state),) = model._comm_hooks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = infer_step(Workload(model=None, dataset=None), WIDE_BATCH)
    trainer = make_trainer(model, optimizer, step, config, device)
    for _ in range(window.FIRST_STEPS):  # fewer never come before a window
        trainer.train(WIDE_BATCH)
    assert state.iter > state.start_powerSGD_iter
    assert state.p_memory_dict, "what is left of a gradient of low rank"


def test_a_users_own_training_is_compressed_from_where_torch_does(job: TrialJob) -> None:
    open_group(job, 0, open_device("cpu"))
    config = job.config.model_copy(update={"ddp": DdpConfig(comm_hook="powersgd")})
    ((_, state),) = config.prepare(nn.Linear(4, 4), "cpu")._comm_hooks  # type: ignore[misc] # a DDP's
    assert state.start_powerSGD_iter == 1000


def test_a_static_graph_can_not_hold_the_exchange_back(job: TrialJob) -> None:
    device = open_device("cpu")
    config = job.config.model_copy(update={"ddp": DdpConfig(static_graph=True)})
    open_group(job, 0, device)
    model = build_model(Workload(model=nn.Linear(8, 2), dataset=None), config, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model, optimizer, infer_step(Workload(model=None, dataset=None), BATCH), config, device
    )
    assert trainer.accumulator.no_sync is None
    trainer.train(BATCH)


def test_one_process_is_a_group_of_one(job: TrialJob) -> None:
    single = job.model_copy(update={"config": TrainingConfig()})
    assert open_group(single, 0, open_device("cpu")) is ALONE
    assert ALONE.any(True)
    assert not ALONE.all(False)
    assert ALONE.most(3.0) == 3.0
    assert ALONE.is_equal(7)
    ALONE.wait()


def test_only_a_message_about_the_others_is_collateral(job: TrialJob) -> None:
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


def test_each_rank_of_ddp_is_a_process() -> None:
    assert TrainingConfig(strategy="ddp", world_size=2).process_count == 2
    assert TrainingConfig(strategy="dp", world_size=2).process_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that it does not look into threads
@pytest.mark.filterwarnings(
    "ignore:Pickle, copy, and deepcopy support:DeprecationWarning"
)  # Python 3.12's, by Dynamo
def test_a_replicas_thread_runs_uncompiled_what_is_compiled_around_it() -> None:
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
