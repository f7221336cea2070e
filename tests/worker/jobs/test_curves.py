"""Ceilings in other settings: each point on its own, none of which can spoil another, and the process as before."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from autotune.apply.prepare import is_fused
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import (
    curves_cut,
    left_to_smaller_batches,
    no_time_left,
    operators_not_counted,
    process_ended_at_point,
)
from autotune.note import Note
from autotune.protocol.messages import CurvesJob
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import HostLoad, MemorySample
from autotune.records.result import CurvePoint, Curves
from autotune.worker.conditions import HostLoadProbe
from autotune.worker.device import Device, open_device
from autotune.worker.extras import roofline
from autotune.worker.jobs import curves as curves_job
from autotune.worker.jobs.bench import WorkloadBench
from autotune.worker.jobs.curves import trace_curves
from autotune.worker.side_alone import device_alone
from tests.factories import make_process

SOME = torch.tensor([3, 5])


class Fussy(nn.Module):
    """Takes batches of four, and of no other size."""

    def __init__(self, threads: list[int] | None = None) -> None:
        super().__init__()
        self.layer, self.threads = nn.Linear(8, 2), threads

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 4:
            raise ValueError(f"four alone\nbut got {len(x)}")
        if self.threads is not None:
            self.threads.append(torch.get_num_threads())
        return functional.linear(x, self.layer.weight, self.layer.bias)


@pytest.fixture
def cpu() -> Device:
    """The processor."""
    return open_device("cpu")


@pytest.fixture(autouse=True)
def _short_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_PEAK_S", 0.001)
    monkeypatch.setattr(roofline, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_MATRIX", {"cpu": 64})


def data(*shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(40, *shape), torch.zeros(40, dtype=torch.long))


def trace(
    model: Any,
    cpu: Device,
    scratch: Path,
    *variations: dict[str, Any],
    dataset: Any = None,
    **job: Any,
) -> Curves:
    own = TrainingConfig(micro_batch_size=4, **job.pop("own", {}))
    left_s, has_roofline = job.pop("left_s", 60.0), job.pop("roofline", True)
    optimizer = job.pop("optimizer", None)
    keep = job.pop("keep", lambda known: None)
    task = CurvesJob(
        process=make_process(scratch, limit_bytes=job.pop("limit_bytes", None)),
        payload=scratch,
        config=own,
        roofline=has_roofline,
        stretch_s=0.005,
        variations=tuple(
            TrainingConfig.model_validate(own.model_dump() | changes) for changes in variations
        ),
        **job,
    )
    workload = Workload(
        model=model, dataset=data(8) if dataset is None else dataset, optimizer=optimizer
    )
    bench = WorkloadBench(workload, task, cpu, scratch)
    return trace_curves(bench, task, cpu, perf_counter() + left_s, keep=keep)


def settings(points: tuple[CurvePoint, ...]) -> list[dict[str, object]]:
    return [point.changes for point in points]


def test_a_variation_is_measured_on_the_side_that_it_changes(cpu: Device, tmp_path: Path) -> None:
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, {"num_workers": 1}, {"micro_batch_size": 8})
    assert settings(curves.loader) == [{}, {"num_workers": 1}]
    assert settings(curves.device)[:2] == [{}, {"micro_batch_size": 8}]
    assert all(
        point.ceiling is not None and point.ceiling.samples_per_s > 0
        for point in (*curves.loader, *curves.device)
    )
    assert curves.threads == torch.get_num_threads()


def test_copies_are_measured_from_both_kinds_of_memory_where_pinning_helps(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(batch: Any) -> Any:
        pinned.append(batch)
        return batch

    pinned: list[Any] = []
    monkeypatch.setattr(curves_job, "pinned", pin)
    curves = trace(nn.Linear(8, 2), replace(cpu, kind="xpu"), tmp_path, roofline=False)
    assert settings(curves.copy) == [{}, {"pin_memory": True}]
    assert all(
        point.ceiling is not None and point.ceiling.samples_per_s > 0 for point in curves.copy
    )
    assert pinned, "the loader's batches lie in pageable memory"
    assert trace(nn.Linear(8, 2), cpu, tmp_path).copy == ()


def test_copies_of_a_job_in_tf32_leave_the_precision_of_float32_as_it_was(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Precise(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().forward(x)

    seen: list[str] = []
    before = torch.backends.cuda.matmul.fp32_precision
    monkeypatch.setattr(curves_job, "pinned", lambda batch: batch)
    machine, own = replace(cpu, kind="xpu"), {"amp_dtype": "tf32"}
    curves = trace(
        Precise(8, 2), machine, tmp_path, {"amp_dtype": "float32"}, own=own, roofline=False
    )
    assert settings(curves.device)[:2] == [{}, {"amp_dtype": "float32"}]
    assert [*dict.fromkeys(seen)] == ["tf32", before]
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_memory_that_can_not_be_pinned_leaves_the_other_points(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(_: Any) -> Any:
        raise RuntimeError("not pinned")

    monkeypatch.setattr(curves_job, "pinned", pin)
    curves = trace(nn.Linear(8, 2), replace(cpu, kind="xpu"), tmp_path, roofline=False)
    own, failed = curves.copy
    assert own.ceiling is not None
    assert (failed.ceiling, failed.reason) == (None, "RuntimeError: not pinned")
    assert curves.device[0].ceiling is not None


@pytest.mark.parametrize("is_asked", [True, False])
def test_operators_are_counted_only_where_that_is_asked_for(
    cpu: Device, tmp_path: Path, is_asked: bool
) -> None:
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, roofline=is_asked)
    assert (curves.roofline is not None) == is_asked
    assert curves.notes == ()


def test_a_point_that_fails_leaves_its_reason_and_spares_the_others(
    cpu: Device, tmp_path: Path
) -> None:
    threads = {"intra_op_threads": torch.get_num_threads() + 1}
    curves = trace(Fussy(), cpu, tmp_path, {"micro_batch_size": 8}, threads)
    own, failed, other = curves.device[:3]
    assert own.ceiling is not None
    assert (failed.ceiling, failed.reason) == (None, "ValueError: four alone")
    assert (other.changes, other.ceiling is not None) == (threads, True)
    assert curves.roofline is not None


def test_the_points_so_far_are_kept_around_each(cpu: Device, tmp_path: Path) -> None:
    kept: list[Curves] = []
    whole = trace(
        nn.Linear(8, 2),
        cpu,
        tmp_path,
        {"num_workers": 0, "lr": 0.1},
        {"micro_batch_size": 8},
        keep=kept.append,
    )
    assert [len(known.loader) + len(known.device) for known in kept] == [1, 1, 2, 2, 3, 3]
    underway = [[*known.loader, *known.device][-1] for known in kept[::2]]
    assert all(
        point.ceiling is None and point.reason == process_ended_at_point() for point in underway
    )
    assert [known.is_cut for known in kept] == [True] * 6
    assert [known.notes for known in kept] == [(curves_cut(),)] * 6
    assert (kept[-1].loader, kept[-1].device) == (whole.loader, whole.device)
    assert (whole.notes, whole.is_cut) == ((), False)


class Failing(nn.Module):
    """A kernel of it fails with one batch size, and then nothing works any more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.has_failed, self.seen = nn.Linear(8, 2), False, set[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        self.has_failed |= len(x) == 8
        if self.has_failed:
            raise torch.AcceleratorError(
                "CUDA error: an illegal memory access was encountered\nSearch for"
            )
        return functional.linear(x, self.layer.weight, self.layer.bias)


BATCHES = ({"micro_batch_size": 2}, {"micro_batch_size": 8}, {"micro_batch_size": 16})


def test_after_a_kernels_failure_nothing_more_is_measured_in_the_process(
    cpu: Device, tmp_path: Path
) -> None:
    kept: list[Curves] = []
    model = Failing()
    curves = trace(model, cpu, tmp_path, {"num_workers": 1}, *BATCHES, keep=kept.append)
    own, first, failed = curves.device
    assert None not in (own.ceiling, first.ceiling)
    assert (failed.changes, failed.ceiling) == (BATCHES[1], None)
    assert str(failed.reason).startswith("AcceleratorError: CUDA error: ")
    assert curves.is_cut
    assert curves.notes == (curves_cut(),)
    assert model.seen == {4, 2, 8}
    assert kept[-1] == curves


def test_points_of_an_earlier_process_are_handed_on_and_not_measured_again(
    cpu: Device, tmp_path: Path
) -> None:
    known = trace(Failing(), cpu, tmp_path, {"num_workers": 1}, *BATCHES)
    model = Failing()
    curves = trace(model, cpu, tmp_path, {"num_workers": 1}, *BATCHES, known=known, roofline=False)
    assert curves.loader == known.loader
    assert curves.device[:3] == known.device
    assert settings(curves.device)[3:] == [BATCHES[2]]
    assert curves.device[3].ceiling is not None
    assert model.seen == {16}
    assert (curves.notes, curves.is_cut) == ((), False)


def test_a_point_without_memory_says_whose(cpu: Device, tmp_path: Path) -> None:
    class Greedy(Fussy):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 4:
                raise RuntimeError(
                    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
                )
            return super().forward(x)

    curves = trace(Greedy(), cpu, tmp_path, {"micro_batch_size": 8}, {"amp_dtype": "bfloat16"})
    assert curves.device[1].ceiling is None
    assert "CUBLAS_STATUS_ALLOC_FAILED" in str(curves.device[1].reason)
    assert curves.device[2].ceiling is not None


def test_a_point_whose_loss_is_not_finite_is_none_and_spares_the_others(
    cpu: Device, tmp_path: Path
) -> None:
    class Diverging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 8:
                self.weight.data.fill_(float("nan"))
            return super().forward(x)

    varied = ({"micro_batch_size": 8}, {"micro_batch_size": 16})
    _, failed, other = trace(Diverging(8, 2), cpu, tmp_path, *varied).device[:3]
    assert failed.ceiling is None
    assert "(nan)" in str(failed.reason)
    assert other.ceiling is not None


def test_threads_hold_for_their_point_alone(cpu: Device, tmp_path: Path) -> None:
    before, seen = torch.get_num_threads(), list[int]()
    trace(Fussy(seen), cpu, tmp_path, {"intra_op_threads": before + 1}, {"amp_dtype": "bfloat16"})
    assert {before, before + 1} == set(seen)
    assert seen[-1] == torch.get_num_threads() == before


def test_threads_that_torch_takes_anyway_are_not_measured_again(
    cpu: Device, tmp_path: Path
) -> None:
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, {"intra_op_threads": torch.get_num_threads()})
    assert settings(curves.device) == [{}]


def test_a_layout_holds_for_its_point_alone(cpu: Device, tmp_path: Path) -> None:
    convolution = nn.Conv2d(3, 4, 3)
    model = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    strides = convolution.weight.stride()
    varied = ({"channels_last": True}, {"amp_dtype": "bfloat16"})
    curves = trace(model, cpu, tmp_path, *varied, dataset=data(3, 8, 8))
    assert settings(curves.device)[:3] == [{}, *varied]
    assert convolution.weight.stride() == strides


def test_a_batch_that_may_pass_the_limit_of_ram_is_not_tried(cpu: Device, tmp_path: Path) -> None:
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, {"micro_batch_size": 4000}, limit_bytes=2**34)
    assert curves.device[1].ceiling is None
    reason = curves.device[1].reason
    assert isinstance(reason, Note)
    assert (reason.code, reason.figures["limit_bytes"]) == ("batch_too_large", 2**34)


def test_a_loader_whose_batches_ahead_may_fill_the_memory_is_not_started(
    cpu: Device, tmp_path: Path
) -> None:
    limit_bytes, bytes_a_sample = 2**30, 8 * 4 + 8
    vast = {
        "num_workers": 2,
        "micro_batch_size": limit_bytes // (2 * 2 * bytes_a_sample),
    }  # as much as there may be
    fits = {"num_workers": 2, "micro_batch_size": 8}
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, vast, fits, limit_bytes=limit_bytes)
    _, refused, taken = curves.loader
    assert refused.ceiling is None
    assert isinstance(refused.reason, Note)
    assert refused.reason.code == "queue_too_large"
    assert taken.ceiling is not None


def test_without_time_only_todays_loader_is_started(cpu: Device, tmp_path: Path) -> None:
    curves = trace(
        nn.Linear(8, 2), cpu, tmp_path, {"num_workers": 1}, {"micro_batch_size": 8}, left_s=-1.0
    )
    points = [*curves.loader, *curves.device]
    assert [point.ceiling for point in points] == [None] * 4
    assert all(point.reason == no_time_left() for point in points)
    assert curves.notes == (operators_not_counted("no time was left"),)


def test_settings_that_help_are_measured_together_too(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes as long for any batch, and a quarter of it with another thread."""
    before, alone = torch.get_num_threads(), device_alone

    def timed(*arguments: Any, **given: Any) -> Ceiling:
        found = alone(*arguments, **given)
        step_s = 1.0 if torch.get_num_threads() == before else 0.25
        seconds = found.batches * step_s
        return found.model_copy(
            update={"seconds": seconds, "samples_per_s": found.samples / seconds}
        )

    monkeypatch.setattr(curves_job, "device_alone", timed)
    varied: list[dict[str, Any]] = [{"micro_batch_size": 40}, {"intra_op_threads": before + 1}]
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, *varied)
    assert settings(curves.device) == [{}, *varied, varied[0] | varied[1]]


def test_weights_are_put_back_after_a_point_that_diverged(cpu: Device, tmp_path: Path) -> None:
    """Products of zeros switch fewer transistors: what follows would read high."""
    seen: list[tuple[int, float]] = []

    class Diverging(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((len(x), float(self.weight.detach().abs().mean())))
            if len(x) == 8:
                self.weight.data.fill_(float("nan"))
            return super().forward(x)

    model = Diverging(8, 2)
    initial = float(model.weight.detach().abs().mean())
    trace(model, cpu, tmp_path, {"micro_batch_size": 8}, {"micro_batch_size": 16}, roofline=False)
    after = next(mean for size, mean in seen if size == 16)
    assert after == pytest.approx(initial)


def test_each_batch_size_of_a_compiled_model_is_compiled_for_itself(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a trial, which has one size: for the second one of a process torch would compile for any."""

    def record(graph: Any, _: Any) -> Any:
        inputs = [
            node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"
        ]
        sizes.extend(
            str(shaped.shape[0])
            for shaped in inputs
            if isinstance(shaped, Tensor) and shaped.shape[1:] == (8,)
        )
        return graph.forward

    class Wide(nn.Linear):  # so that no weight has an input's shape
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cat([x, x], 1))

    sizes: list[str] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    torch.compiler.reset()
    varied = [{"micro_batch_size": size} for size in (8, 16)]
    curves = trace(Wide(16, 2), cpu, tmp_path, *varied, own={"compile": True}, roofline=False)
    assert settings(curves.device)[:3] == [{}, *varied]
    assert all(point.ceiling is not None for point in curves.device)
    assert sizes[:3] == ["4", "8", "16"]
    torch.compiler.reset()


def test_the_weights_kept_aside_are_none_of_a_points_memory(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Device, "peak_memory", lambda _: MemorySample(peak_bytes=2**30, source="a known peak")
    )
    (own,) = trace(nn.Linear(8, 2), cpu, tmp_path, roofline=False).device
    assert own.peak_memory_bytes == 2**30 - 4 * (8 * 2 + 2)


def test_a_fused_optimizer_holds_for_its_point_alone_and_cudnns_timing_is_no_point(
    cpu: Device, tmp_path: Path
) -> None:
    seen = list[tuple[bool, bool]]()

    class Watched(torch.optim.Adam):
        def zero_grad(self, set_to_none: bool = True) -> None:
            seen.append((is_fused(self), torch.backends.cudnn.benchmark))
            super().zero_grad(set_to_none)

    varied = ({"fused": True}, {"cudnn_benchmark": True})
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, *varied, optimizer=Watched)
    assert settings(curves.device) == [{}, {"fused": True}]
    assert all(point.ceiling is not None for point in curves.device)
    assert {(False, False), (True, False)} == {*seen}
    assert seen[0] == (False, False)


def test_a_larger_batch_whose_steps_take_long_is_left_to_what_smaller_ones_tell(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_job, "_LONG_S", 0.0)
    sizes = [{"micro_batch_size": size} for size in (8, 2)]
    for is_short_search, reason in ((True, left_to_smaller_batches()), (False, "")):
        found = trace(
            nn.Linear(8, 2), cpu, tmp_path, *sizes, dataset=data(8), is_short_search=is_short_search
        )
        assert [point.reason for point in found.device] == ["", reason, ""]
        assert [point.ceiling is None for point in found.device] == [False, is_short_search, False]


def test_a_point_that_others_slowed_is_measured_again_and_the_faster_counts(
    cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(*_: Any, **__: Any) -> Ceiling:
        rates.append(100.0 if len(rates) % 2 == 0 else 2000.0)
        return Ceiling(samples_per_s=rates[-1], samples=100, seconds=0.1, batches=10)

    loaded = HostLoad(seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=1.0, stolen_s=0.0)
    rates: list[float] = []
    monkeypatch.setattr(curves_job, "loader_alone", alone)
    monkeypatch.setattr(HostLoadProbe, "stop", lambda _: loaded)
    others = [{"num_workers": 1, "prefetch_factor": factor} for factor in (2, 3, 4)]
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, *others, roofline=False)
    found = [point.ceiling and point.ceiling.samples_per_s for point in curves.loader]
    assert found == [2000.0, 2000.0, 2000.0, 100.0], (
        "where others stay, a second measurement is no better"
    )


@pytest.mark.parametrize(("ends_early", "counts"), [(True, [1, 2]), (False, [1, 2, 3])])
def test_a_search_adds_workers_only_while_the_loader_grows(
    cpu: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends_early: bool,
    counts: list[int],
) -> None:
    same = Ceiling(samples_per_s=100.0, samples=100, seconds=0.1, batches=10)
    monkeypatch.setattr(curves_job, "loader_alone", lambda *_, **__: same)
    more = [{"num_workers": count} for count in (1, 2, 3)]
    curves = trace(nn.Linear(8, 2), cpu, tmp_path, *more, roofline=False, ends_early=ends_early)
    assert settings(curves.loader) == [{}, *({"num_workers": count} for count in counts)]
