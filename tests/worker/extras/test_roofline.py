"""The roofline of a batch: products and bytes that are counted, and the peaks that they are held against."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.records.result import Roofline
from autotune.worker.build import build_model
from autotune.worker.device import Device, open_device
from autotune.worker.extras import roofline
from autotune.worker.extras.roofline import BytesMode, trace_roofline
from autotune.worker.step import open_trainer

SOME = torch.tensor([3, 5])


@pytest.fixture(autouse=True)
def _short_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_PEAK_S", 0.001)
    monkeypatch.setattr(roofline, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_MATRIX", {"cpu": 64})


def test_bytes_are_those_that_are_read_and_written_and_views_move_none() -> None:
    x = torch.zeros(1000)
    with BytesMode() as mode:
        y = x.view(10, 100).t() + 1.0  # reads 4,000, writes 4,000
        y.mul_(2.0)  # reads 4,000, writes 4,000
    assert (mode.operators, mode.moved_bytes) == (2, 16_000)


@pytest.mark.parametrize(
    ("work", "moved_bytes"),
    [
        (lambda x: x.zero_(), 4000),
        (lambda x: x.fill_(1.0), 4000),
        (lambda x: x.copy_(torch.zeros(1).expand(1000)), 4000 + 4 + 4),
        (lambda x: torch.add(x[:10], x[10:20], out=x[20:30]), 3 * 40),
        (lambda x: x.index_select(0, SOME), 2 * 8 + 2 * 8),
        (lambda x: x[SOME], 2 * 8 + 2 * 8),
        (lambda x: x.gather(0, SOME), 2 * 8 + 2 * 8),
        (lambda x: functional.embedding(SOME, x.view(100, 10)), 2 * 80 + 2 * 8),
    ],
    ids=["zero_", "fill_", "copy_", "out=", "index_select", "index", "gather", "embedding"],
)
def test_what_is_overwritten_or_passed_over_is_not_read(work: Any, moved_bytes: int) -> None:
    x = torch.zeros(1000)
    with BytesMode() as mode:
        work(x)
    assert mode.moved_bytes == moved_bytes


def test_an_expanded_tensor_is_as_large_as_its_memory() -> None:
    with BytesMode() as mode:
        torch.zeros(1).expand(1000).sum()
    assert mode.moved_bytes <= 12  # zeros, and one number read and one written


def traced_roofline(**settings: Any) -> Roofline:
    cpu = open_device("cpu")
    config = TrainingConfig(micro_batch_size=4, **settings)
    workload = Workload(model=nn.Linear(8, 2), dataset=None)
    batch = (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    trainer = open_trainer(workload, build_model(workload, config, cpu), batch, config, cpu)
    return trace_roofline(trainer, batch)


def test_a_roofline_counts_the_products_of_forward_and_backward() -> None:
    found = traced_roofline()
    assert found.flops == 2 * (
        2 * 4 * 8 * 2
    )  # the outputs, and the weights' gradient; none for the inputs
    assert found.operators > 5
    assert min(found.peak_flops_per_s, found.peak_bytes_per_s) > 0


def test_a_batch_bears_its_share_of_the_optimizers_step() -> None:
    once, shared = traced_roofline(), traced_roofline(grad_accum_steps=64)
    assert shared.flops == once.flops
    weights = 18 * 4
    assert once.moved_bytes - 3 * weights < shared.moved_bytes < once.moved_bytes + 3 * weights


@pytest.mark.parametrize(
    ("amp_dtype", "kind", "precision", "flops", "runs"),
    [
        ("float32", "cuda", "tf32", {"aten.convolution": 6, "aten.mm": 5}, True),
        ("float32", "cuda", "tf32", {"aten.convolution_backward": 3, "aten.mm": 5}, False),
        ("float32", "cuda", "ieee", {"aten.convolution": 6}, False),
        ("float32", "cpu", "tf32", {"aten.convolution": 6}, False),
        ("bfloat16", "cuda", "tf32", {"aten.convolution": 6}, False),
        ("float32", "cuda", "tf32", {}, False),
    ],
)
def test_float32_runs_in_tf32_where_convolutions_do_most(
    amp_dtype: Any,
    kind: str,
    precision: str,
    flops: dict[str, int],
    runs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = SimpleNamespace(conv=SimpleNamespace(fp32_precision=precision))
    monkeypatch.setattr(torch.backends, "cudnn", settings)
    assert roofline._runs_in_tf32(TrainingConfig(amp_dtype=amp_dtype), kind, flops) is runs


def test_the_peak_is_measured_in_tf32_where_that_is_what_runs_and_all_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def precisions() -> tuple[str, str]:
        backends: Any = torch.backends
        return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision

    def peak(_: object) -> float:
        seen.append(precisions())
        return 1.0

    seen: list[tuple[str, str]] = []
    before = precisions()
    monkeypatch.setattr(roofline, "_runs_in_tf32", lambda *_: True)
    monkeypatch.setattr(roofline, "_peak_flops_per_s", peak)
    traced_roofline()
    assert seen == [("tf32", "tf32")]
    assert precisions() == before


def test_a_peak_is_of_values_that_cost_the_power_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def repeats(work: Any, _: Device) -> float:
        work()
        held.append(
            [
                cell.cell_contents
                for cell in work.__closure__
                if isinstance(cell.cell_contents, Tensor)
            ]
        )
        return 1.0

    held: list[list[Tensor]] = []
    monkeypatch.setattr(roofline, "_repeats_per_s", repeats)
    found = traced_roofline()
    product, copy = held
    for values in product:
        assert values.shape == (64, 64)
        assert len(set(values.flatten().tolist())) > 4000
    assert [len(set(values.tolist())) for values in copy] == [256, 256]
    assert torch.equal(*copy)
    assert (found.peak_flops_per_s, found.peak_bytes_per_s) == (2 * 64**3, 2 * 2**16)


def test_the_bytes_that_are_drawn_are_repeated_up_to_what_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roofline, "_DRAWN_BYTES", 1000)
    monkeypatch.setattr(roofline, "_repeats_per_s", lambda *_: 1.0)
    assert roofline._peak_bytes_per_s(open_device("cpu")) == 2 * (2**16 // 1000) * 1000
