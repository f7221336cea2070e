"""The simulated accelerator behaves as a GPU does, where our own code leans on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.accelerator import DEVICES, MIB, on_simulated_device

pytestmark = pytest.mark.slow  # a tool of tests, which the tests that use it hold to most of this


def stepped(device: str) -> list[float]:
    """Losses of a few steps of a small net."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(
            model(torch.randn(16, 4).to(device)), torch.ones(16).long().to(device)
        )
        loss.backward()  # type: ignore[no-untyped-call] # torch
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_simulated_device
def test_it_trains_as_the_processor_does() -> None:
    assert stepped("sim:0") == stepped("cpu")
    assert DEVICES[0].queue.kernels > 100


@on_simulated_device
def test_memory_is_shared_by_views_given_back_with_the_last_and_kept_for_the_next() -> None:
    whole = torch.zeros(MIB, dtype=torch.uint8, device="sim:0")
    half = whole[: MIB // 2]
    assert torch.sim.memory_allocated() == MIB  # type: ignore[attr-defined] # registered
    del whole
    assert torch.sim.memory_allocated() == MIB  # type: ignore[attr-defined] # registered
    del half
    assert accelerator.memory_stats("sim:0")["allocated_bytes.all.current"] == 0
    assert accelerator.memory_stats()["reserved_bytes.all.current"] == MIB
    again = torch.zeros(MIB, dtype=torch.uint8, device="sim:0")
    assert accelerator.memory_stats()["reserved_bytes.all.peak"] == again.nbytes


@on_simulated_device
def test_over_the_cap_what_is_kept_is_given_back_first_and_then_memory_is_out() -> None:
    accelerator.set_per_process_memory_fraction(4 * MIB / DEVICES[0].memory.total)
    torch.zeros(3 * MIB, dtype=torch.uint8, device="sim:0")
    larger = torch.zeros(4 * MIB, dtype=torch.uint8, device="sim:0")
    assert accelerator.memory_stats()["num_alloc_retries"] == 1
    with pytest.raises(torch.OutOfMemoryError, match="Sim"):
        torch.zeros(MIB, dtype=torch.uint8, device="sim:0")
    assert (DEVICES[0].memory.ooms, DEVICES[0].memory.allocated) == (1, larger.nbytes)
    torch.zeros(MIB, dtype=torch.uint8, device="sim:1")


@on_simulated_device
def test_kernels_run_on_behind_the_caller_until_somebody_waits() -> None:
    clock, queue = accelerator.use_still_clock(), DEVICES[0].queue
    queue.kernel_s = 0.5
    first, last = accelerator.Event(enable_timing=True), accelerator.Event(enable_timing=True)
    first.record()
    values = torch.ones(3, device="sim:0") * 2
    last.record()
    assert clock.now() == 0.0 < queue.ends_at
    assert not last.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert clock.now() == queue.ends_at
    assert first.elapsed_time(last) == queue.ends_at * 1000 == 500 * queue.kernels
    assert values.sum().item() == 6, "a value asked for waits as well"
    assert clock.now() == queue.ends_at == 0.5 * queue.kernels


@pytest.mark.slow
def test_an_entry_point_registers_it_with_torch_itself(tmp_path: Path) -> None:
    folders = accelerator.write_entry_point(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch; print(torch.accelerator.current_accelerator(True), torch.ones(1).to('sim'))",
        ],
        env={"PYTHONPATH": ":".join(map(str, folders))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("sim SimTensor(tensor([1.]), device=sim:0)")
