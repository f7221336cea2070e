"""Measure each point by itself, refuse what may fill the memory, and leave the process as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autotune.apply.prepare import is_fused
from autotune.config.environment import DeviceKind
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.messages.trials import (
    curves_cut,
    left_to_smaller_batches,
    no_time_left,
    operators_not_counted,
    process_ended_at_point,
)
from autotune.models.memory import Peak
from autotune.note import Note
from autotune.protocol.messages import CurvesJob
from autotune.records.ceilings import Ceiling
from autotune.records.measurement import HostLoad, MemorySample
from autotune.records.result import CurvePoint, Curves
from autotune.worker.conditions import HostLoadProbe
from autotune.worker.device import Device, open_device
from autotune.worker.extras import roofline
from autotune.worker.jobs import curves as curves_job
from autotune.worker.jobs.curves import (
    WorkloadBench,
    combined_config,
    loader_share,
    refusal_of_batch,
    refusal_of_queue,
    trace_curves,
)
from autotune.worker.side_alone import device_alone
from tests.factories import make_process
from tests.factories.lengths import ByBudget, Sequences, Tagger, padded_rows, tagging_step


class Fussy(nn.Linear):
    """Takes batches of four, and of no other size."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(8, 2)
        self.error, self.threads = error or ValueError("four alone\nbut got more"), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 4:
            raise self.error
        self.threads.append(torch.get_num_threads())
        return super().forward(x)


class Diverging(nn.Linear):
    """Has no finite weights after a batch of eight."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.seen: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((len(x), float(self.weight.detach().abs().mean())))
        if len(x) == 8:
            self.weight.data.fill_(float("nan"))
        return super().forward(x)


@pytest.fixture(autouse=True)
def _short_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_PEAK_S", 0.001)
    monkeypatch.setattr(roofline, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_MATRIX", {"cpu": 64})


def data(*shape: int) -> TensorDataset:
    return TensorDataset(torch.randn(40, *shape), torch.zeros(40, dtype=torch.long))


def trace(
    *variations: dict[str, Any],
    model: Any = None,
    kind: DeviceKind = "cpu",
    dataset: Any = None,
    parts: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    limit_bytes: int | None = None,
    left_s: float = 60.0,
    stretch_s: float = 0.005,
    keep: Callable[[Curves], None] = lambda known: None,
    **job: Any,
) -> Curves:
    nowhere = Path("/nowhere")
    config = TrainingConfig(**({"micro_batch_size": 4} | (own or {})))
    task = CurvesJob(
        process=make_process(nowhere, limit_bytes=limit_bytes),
        payload=nowhere,
        config=config,
        stretch_s=stretch_s,
        variations=tuple(
            TrainingConfig.model_validate(config.model_dump() | changes) for changes in variations
        ),
        **job,
    )
    model = model or nn.Linear(8, 2)
    workload = Workload(model=model, dataset=dataset or data(8), **(parts or {}))
    device = replace(open_device("cpu"), kind=kind)
    bench = WorkloadBench(workload, task, device, nowhere)
    return trace_curves(bench, task, device, perf_counter() + left_s, keep=keep)


def settings(points: tuple[CurvePoint, ...]) -> list[dict[str, object]]:
    return [point.changes for point in points]


def test_a_variation_is_measured_on_the_side_that_it_changes() -> None:
    curves = trace({"num_workers": 1}, {"micro_batch_size": 8})
    assert settings(curves.loader) == [{}, {"num_workers": 1}]
    assert settings(curves.device)[:2] == [{}, {"micro_batch_size": 8}]
    points = (*curves.loader, *curves.device)
    assert all(point.ceiling and point.ceiling.samples_per_s > 0 for point in points)
    assert curves.threads == torch.get_num_threads()
    assert (curves.roofline, curves.notes) == (None, ())


def test_copies_are_measured_from_both_kinds_of_memory_where_pinning_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curves_job, "pinned", pinned := Mock(side_effect=lambda batch: batch))
    curves = trace(kind="xpu")
    assert settings(curves.copy) == [{}, {"pin_memory": True}]
    assert all(point.ceiling and point.ceiling.samples_per_s > 0 for point in curves.copy)
    assert pinned.called, "the loader's batches lie in pageable memory"
    assert trace().copy == ()


def test_copies_of_a_job_in_tf32_leave_the_precision_of_float32_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Precise(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return super().forward(x)

    seen: list[str] = []
    before = torch.backends.cuda.matmul.fp32_precision
    monkeypatch.setattr(curves_job, "pinned", lambda batch: batch)
    own = {"amp_dtype": "tf32"}
    curves = trace({"amp_dtype": "float32"}, model=Precise(8, 2), kind="xpu", own=own)
    assert settings(curves.device)[:2] == [{}, {"amp_dtype": "float32"}]
    assert [*dict.fromkeys(seen)] == ["tf32", before]
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_memory_that_can_not_be_pinned_leaves_the_other_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curves_job, "pinned", Mock(side_effect=RuntimeError("not pinned")))
    curves = trace(kind="xpu")
    own, failed = curves.copy
    assert own.ceiling is not None
    assert (failed.ceiling, failed.reason) == (None, "RuntimeError: not pinned")
    assert curves.device[0].ceiling is not None


NO_MEMORY = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(None, "ValueError: four alone"), (RuntimeError(NO_MEMORY), "CUBLAS_STATUS_ALLOC_FAILED")],
)
def test_a_failed_point_spares_the_others(error: Exception | None, reason: str) -> None:
    threads = {"intra_op_threads": torch.get_num_threads() + 1}
    curves = trace({"micro_batch_size": 8}, threads, model=Fussy(error), roofline=True)
    own, failed, other = curves.device[:3]
    assert own.ceiling is not None
    assert failed.ceiling is None
    assert reason in str(failed.reason)
    assert (other.changes, other.ceiling is not None) == (threads, True)
    assert curves.roofline is not None


def test_the_points_so_far_are_kept_around_each() -> None:
    kept: list[Curves] = []
    whole = trace({"num_workers": 0, "lr": 0.1}, {"micro_batch_size": 8}, keep=kept.append)
    assert [len(known.loader) + len(known.device) for known in kept] == [1, 1, 2, 2, 3, 3]
    underway = [[*known.loader, *known.device][-1] for known in kept[::2]]
    assert [point.reason for point in underway] == [process_ended_at_point()] * 3
    assert all(known.is_cut and known.notes == (curves_cut(),) for known in kept)
    assert (kept[-1].loader, kept[-1].device) == (whole.loader, whole.device)
    assert (whole.notes, whole.is_cut) == ((), False)


class Failing(nn.Linear):
    """A kernel of it fails with one batch size, and then nothing works any more."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.seen = set[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        if 8 in self.seen:
            raise torch.AcceleratorError(
                "CUDA error: an illegal memory access was encountered\nSearch for"
            )
        return super().forward(x)


BATCHES = ({"micro_batch_size": 2}, {"micro_batch_size": 8}, {"micro_batch_size": 16})


def test_after_a_kernels_failure_nothing_more_is_measured_in_the_process() -> None:
    kept: list[Curves] = []
    model = Failing()
    curves = trace({"num_workers": 1}, *BATCHES, model=model, keep=kept.append)
    own, first, failed = curves.device
    assert None not in (own.ceiling, first.ceiling)
    assert (failed.changes, failed.ceiling) == (BATCHES[1], None)
    assert str(failed.reason).startswith("AcceleratorError: CUDA error: ")
    assert curves.is_cut
    assert curves.notes == (curves_cut(),)
    assert model.seen == {4, 2, 8}
    assert kept[-1] == curves


def test_points_of_an_earlier_process_are_handed_on_and_not_measured_again() -> None:
    known = trace({"num_workers": 1}, *BATCHES, model=Failing())
    model = Failing()
    curves = trace({"num_workers": 1}, *BATCHES, model=model, known=known)
    assert curves.loader == known.loader
    assert curves.device[:3] == known.device
    assert settings(curves.device)[3:] == [BATCHES[2]]
    assert curves.device[3].ceiling is not None
    assert model.seen == {16}
    assert (curves.notes, curves.is_cut) == ((), False)


def test_a_diverged_point_spares_the_others_and_their_weights() -> None:
    """Products of zeros switch fewer transistors: what follows would read high."""
    model = Diverging()
    initial = float(model.weight.detach().abs().mean())
    curves = trace({"micro_batch_size": 8}, {"micro_batch_size": 16}, model=model)
    _, failed, other = curves.device[:3]
    assert failed.ceiling is None
    assert "(nan)" in str(failed.reason)
    assert other.ceiling is not None
    after = next(mean for size, mean in model.seen if size == 16)
    assert after == pytest.approx(initial)


def test_threads_hold_for_their_point_alone() -> None:
    before, model = torch.get_num_threads(), Fussy()
    varied: list[dict[str, Any]] = [{"intra_op_threads": before + 1}, {"amp_dtype": "bfloat16"}]
    curves = trace({"intra_op_threads": before}, *varied, model=model)
    assert settings(curves.device)[:3] == [{}, *varied], "torch's own threads are measured once"
    assert {before, before + 1} == set(model.threads)
    assert model.threads[-1] == torch.get_num_threads() == before


def test_a_layout_holds_for_its_point_alone() -> None:
    convolution = nn.Conv2d(3, 4, 3)
    model = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    strides = convolution.weight.stride()
    varied = ({"channels_last": True}, {"amp_dtype": "bfloat16"})
    curves = trace(*varied, model=model, dataset=data(3, 8, 8), roofline=True)
    assert settings(curves.device)[:3] == [{}, *varied]
    assert convolution.weight.stride() == strides


def test_a_batch_that_may_pass_the_limit_of_ram_is_not_tried() -> None:
    reason = trace({"micro_batch_size": 4000}, limit_bytes=2**34).device[1].reason
    assert isinstance(reason, Note)
    assert (reason.code, reason.figures["limit_bytes"]) == ("batch_too_large", 2**34)


def test_a_loader_whose_batches_ahead_may_fill_the_memory_is_not_started() -> None:
    limit_bytes, bytes_a_sample = 2**30, 8 * 4 + 8
    most = limit_bytes // (2 * 2 * bytes_a_sample)
    varied = [{"num_workers": 2, "micro_batch_size": size} for size in (most, 8)]
    _, refused, taken = trace(*varied, limit_bytes=limit_bytes).loader
    assert isinstance(refused.reason, Note)
    assert refused.reason.code == "queue_too_large"
    assert taken.ceiling is not None


@pytest.mark.parametrize(
    ("check", "side", "other"),
    [("refusal_of_queue", "loader", "device"), ("refusal_of_batch", "device", "loader")],
)
def test_a_failed_check_of_memory_spares_the_other_side(
    check: str, side: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variations = {"num_workers": 1}, {"micro_batch_size": 8}
    monkeypatch.setattr(curves_job, check, failing := Mock(side_effect=OSError("unreadable")))
    curves = trace(*variations)
    assert getattr(curves, side)[-1].reason == "OSError: unreadable"
    assert getattr(curves, other)[-1].ceiling is not None
    failing.reset_mock()
    trace(*variations, known=curves)
    assert failing.call_count == 0


def test_without_time_only_todays_loader_is_started() -> None:
    curves = trace({"num_workers": 1}, {"micro_batch_size": 8}, left_s=-1.0, roofline=True)
    points = [*curves.loader, *curves.device]
    assert [point.reason for point in points] == [no_time_left()] * 4
    assert curves.notes == (operators_not_counted("no time was left"),)


def test_settings_that_help_are_measured_together_too(monkeypatch: pytest.MonkeyPatch) -> None:
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
    curves = trace(*varied)
    assert settings(curves.device) == [{}, *varied, varied[0] | varied[1]]


def test_each_batch_size_of_a_compiled_model_is_compiled_for_itself(
    monkeypatch: pytest.MonkeyPatch,
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
    curves = trace(*varied, model=Wide(16, 2), own={"compile": True})
    assert settings(curves.device)[:3] == [{}, *varied]
    assert all(point.ceiling is not None for point in curves.device)
    assert sizes[:3] == ["4", "8", "16"]
    torch.compiler.reset()


def test_the_weights_kept_aside_are_none_of_a_points_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Device, "peak_memory", lambda _: MemorySample(peak_bytes=2**30, source="a known peak")
    )
    (own,) = trace().device
    assert own.peak_memory_bytes == 2**30 - 4 * (8 * 2 + 2)


def test_a_fused_optimizer_holds_for_its_point_alone_and_cudnns_timing_is_no_point() -> None:
    seen = list[tuple[bool, bool]]()

    class Watched(torch.optim.Adam):
        def zero_grad(self, set_to_none: bool = True) -> None:
            seen.append((is_fused(self), torch.backends.cudnn.benchmark))
            super().zero_grad(set_to_none)

    varied = ({"fused": True}, {"cudnn_benchmark": True})
    curves = trace(*varied, parts={"optimizer": Watched})
    assert settings(curves.device) == [{}, {"fused": True}]
    assert all(point.ceiling is not None for point in curves.device)
    assert {(False, False), (True, False)} == {*seen}
    assert seen[0] == (False, False)


def test_a_larger_batch_whose_steps_take_long_is_left_to_what_smaller_ones_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curves_job, "_LONG_S", 0.0)
    sizes = [{"micro_batch_size": size} for size in (8, 2)]
    for is_short_search, reason in ((True, left_to_smaller_batches()), (False, "")):
        found = trace(*sizes, dataset=data(8), is_short_search=is_short_search)
        assert [point.reason for point in found.device] == ["", reason, ""]
        assert [point.ceiling is None for point in found.device] == [False, is_short_search, False]


def test_a_point_that_others_slowed_is_measured_again_and_the_faster_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alone(*_: Any, **__: Any) -> Ceiling:
        rates.append(100.0 if len(rates) % 2 == 0 else 2000.0)
        return Ceiling(samples_per_s=rates[-1], samples=100, seconds=0.1, batches=10)

    loaded = HostLoad(seconds=1.0, cores=2, reachable_cores=2, busy_s=2.0, own_s=1.0, stolen_s=0.0)
    rates: list[float] = []
    monkeypatch.setattr(curves_job, "loader_alone", alone)
    monkeypatch.setattr(HostLoadProbe, "stop", lambda _: loaded)
    others = [{"num_workers": 1, "prefetch_factor": factor} for factor in (2, 3, 4)]
    curves = trace(*others)
    found = [point.ceiling and point.ceiling.samples_per_s for point in curves.loader]
    assert found == [2000.0, 2000.0, 2000.0, 100.0], (
        "where others stay, a second measurement is no better"
    )


@pytest.mark.parametrize(("ends_early", "counts"), [(True, [1, 2]), (False, [1, 2, 3])])
def test_a_search_adds_workers_only_while_the_loader_grows(
    monkeypatch: pytest.MonkeyPatch, ends_early: bool, counts: list[int]
) -> None:
    same = Ceiling(samples_per_s=100.0, samples=100, seconds=0.1, batches=10)
    monkeypatch.setattr(curves_job, "loader_alone", lambda *_, **__: same)
    more = [{"num_workers": count} for count in (1, 2, 3)]
    curves = trace(*more, ends_early=ends_early)
    assert settings(curves.loader) == [{}, *({"num_workers": count} for count in counts)]


def point(rate: float | None, **changes: object) -> CurvePoint:
    ceiling = rate and Ceiling(samples_per_s=rate, samples=10, seconds=10 / rate, batches=2)
    return CurvePoint(changes=changes, ceiling=ceiling or None)


@pytest.mark.parametrize(
    ("loader", "device", "share"),
    [(100.0, 200.0, 0.75), (200.0, 100.0, 0.25), (None, 100.0, 0.5), (100.0, None, 0.5)],
)
def test_the_slower_side_gets_most_of_the_time(
    loader: float | None, device: float | None, share: float
) -> None:
    assert loader_share(Curves(loader=(point(loader),), device=(point(device),))) == share
    assert loader_share(Curves()) == 0.5


def test_the_best_value_of_each_setting_that_helps_is_combined() -> None:
    points = (
        point(100.0),
        point(120.0, micro_batch_size=8),
        point(150.0, micro_batch_size=16),
        point(90.0, micro_batch_size=32),
        point(110.0, intra_op_threads=1),
    )
    together = combined_config(TrainingConfig(micro_batch_size=4), points)
    assert together == TrainingConfig(micro_batch_size=16, intra_op_threads=1)


def test_a_token_budget_and_its_samples_are_combined_as_one_setting() -> None:
    own = TrainingConfig(micro_batch_size=4, max_tokens=16)
    larger = point(150.0, micro_batch_size=8, max_tokens=32)
    assert combined_config(own, (point(100.0), larger)) is None
    together = combined_config(own, (point(100.0), larger, point(110.0, intra_op_threads=1)))
    assert together == TrainingConfig(micro_batch_size=8, max_tokens=32, intra_op_threads=1)


@pytest.mark.parametrize(
    ("own", "batch", "threads"), [(None, 150.0, 150.0), (100.0, 150.0, 102.0), (100.0, None, 150.0)]
)
def test_fewer_than_two_helping_settings_are_not_combined(
    own: float | None, batch: float | None, threads: float
) -> None:
    points = (point(own), point(batch, micro_batch_size=8), point(threads, intra_op_threads=1))
    assert combined_config(TrainingConfig(micro_batch_size=4), points) is None


def test_another_token_budget_is_measured_with_so_many_times_the_samples_of_each_batch() -> None:
    seen = list[tuple[int, ...]]()

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(tuple(batch["input_ids"].shape))
        return tagging_step(model, batch)

    larger = {"micro_batch_size": 6, "max_tokens": 32}
    curves = trace(
        larger,
        model=Tagger(),
        own={"micro_batch_size": 3, "max_tokens": 16},
        stretch_s=0.2,
        dataset=Sequences([4] * 8 + [16] * 2),
        parts={"collate_fn": padded_rows, "batch_sampler": ByBudget, "step": step},
    )
    assert settings(curves.device) == [{}, larger]
    own = {(4, 4), (1, 16)}
    assert own <= set(seen)
    assert set(seen) - own == {(8, 4), (2, 16)}


MIB = 2**20
BATCH = (torch.zeros(65, 2**10, dtype=torch.uint8), torch.zeros(2**14, dtype=torch.uint8))
"""65 and 16 KiB: four of them take 324 KiB in shared memory; page-locked, by powers of two, 576 KiB."""


@pytest.mark.parametrize(
    ("kind", "pins", "ram_bytes", "shared_bytes", "is_refused"),
    [
        ("cuda", True, MIB, 8 * MIB, True),
        ("xpu", True, MIB, 8 * MIB, True),
        ("cuda", True, 2 * MIB, 8 * MIB, False),
        ("cuda", True, 2 * MIB, MIB, False),  # what is page-locked lies in no shared memory
        ("cuda", False, MIB, 8 * MIB, False),
        ("cpu", True, MIB, 8 * MIB, False),  # torch pins nothing without an accelerator
        ("cpu", False, 8 * MIB, MIB // 2, True),
    ],
)
def test_batches_that_are_pinned_exist_twice_and_take_a_power_of_two(
    kind: Any,
    pins: bool,
    ram_bytes: int,
    shared_bytes: int,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    own = TrainingConfig(micro_batch_size=8)
    job = CurvesJob(
        process=make_process(tmp_path, device=kind),
        payload=tmp_path,
        config=own,
    )
    config = own.model_copy(update={"num_workers": 2, "prefetch_factor": 2, "pin_memory": pins})
    device = Device(torch.device("cpu"), kind)
    monkeypatch.setattr(curves_job, "_free_ram_bytes", lambda *_: ram_bytes)
    monkeypatch.setattr(curves_job, "_free_shared_bytes", lambda: shared_bytes)
    refusal = refusal_of_queue([BATCH], config, job, device)
    assert (None if refusal is None else refusal.code) == (
        "queue_too_large" if is_refused else None
    )


def test_batches_grow_with_their_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [curves_job._batch_sizes(BATCH, growth) for growth in (0.5, 1, 4)] == [
        (40 * 1024 + 512, 72 * 1024),
        (81 * 1024, 144 * 1024),
        (324 * 1024, 576 * 1024),
    ]


@pytest.mark.parametrize(
    ("sizes", "batch", "limit_mib", "is_refused"),
    [
        ((8,), 16, 400, False),  # it takes twice as much at the most
        ((8,), 32, 400, True),
        ((8, 16, 32), 256, 600, False),
        ((8, 16, 32), 256, 420, True),
        ((8, 16, 32), 256, None, False),
    ],
)
def test_a_batch_is_tried_only_where_the_peaks_so_far_make_it_sure_to_fit(
    sizes: tuple[int, ...], batch: int, limit_mib: int | None, is_refused: bool
) -> None:
    """150 MiB, and one more a sample."""
    peaks = [Peak(TrainingConfig(micro_batch_size=size), (150 + size) * MIB) for size in sizes]
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    config, device = TrainingConfig(micro_batch_size=batch), Device(torch.device("cpu"), "cpu")
    refusal = refusal_of_batch(peaks, config, limit_bytes, device)
    assert (None if refusal is None else refusal.code) == (
        "batch_too_large" if is_refused else None
    )
