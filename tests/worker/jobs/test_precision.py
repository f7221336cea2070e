"""The comparison to float32: same weights, seeds and batches on both sides, and what breaks is seen."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autotune.apply.precision import tf32_products
from autotune.apply.prepare import is_fused
from autotune.config.plan import Workload
from autotune.config.training_config import TrainingConfig
from autotune.protocol.messages import PrecisionJob
from autotune.records.trial import GUARD_STEPS, MIN_STEPS, PrecisionFigures, objection
from autotune.worker.device import Device, open_device
from autotune.worker.jobs import precision as guard
from autotune.worker.jobs.precision import References, compare_to_float32, gradient_cosine
from tests.factories import make_process


class Layered(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(8, 16), nn.Linear(16, 2), between

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.relu(self.between(self.first(inputs))))
        return outputs


def beyond_float16(hidden: Tensor) -> Tensor:
    return hidden * 1e3 * 1e3 / 1e6


def cancelling(hidden: Tensor) -> Tensor:
    return (hidden + 1e4) - 1e4


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(128, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def compare(
    model: Any = None,
    *,
    ends_at: float = inf,
    is_short_search: bool = False,
    parts: dict[str, Any] | None = None,
    references: References | None = None,
    **changes: Any,
) -> PrecisionFigures:
    """Return the guard's figures for a model, in bfloat16 unless a setting says otherwise."""
    nowhere = Path("/nowhere")
    settings = {"amp_dtype": "bfloat16", "micro_batch_size": 16, "lr": 0.1} | changes
    job = PrecisionJob(
        process=make_process(nowhere),
        payload=nowhere,
        config=TrainingConfig(**settings),
        is_short_search=is_short_search,
    )
    model = model or Layered(nn.Identity())
    workload = Workload(**({"model": model, "dataset": pairs()} | (parts or {})))
    return compare_to_float32(workload, job, open_device("cpu"), nowhere, ends_at, references)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
def test_a_healthy_model_passes(dtype: str) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    figures = compare(amp_dtype=dtype)
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert objection(figures) is None
    assert figures.steps == GUARD_STEPS
    assert figures.repeat_cosine == pytest.approx(1)
    assert (figures.gradient_cosine or 0) > 0.99


def test_activations_beyond_float16_are_seen_and_bfloat16_holds_them() -> None:
    against = objection(compare(Layered(beyond_float16), amp_dtype="float16"))
    assert against is not None
    assert against.code == "loss_not_finite"
    assert objection(compare(Layered(beyond_float16))) is None


def test_digits_that_bfloat16_loses_are_seen() -> None:
    figures = compare(Layered(cancelling))
    assert objection(figures) is not None
    assert all(isfinite(loss) for loss in figures.losses)


def test_a_second_precision_is_compared_to_the_float32_runs_that_are_there() -> None:
    read: list[int] = []

    class Read(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)  # type: ignore[no-untyped-call] # torch

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Layered(nn.Identity())

    parts, references = {"dataset": Read(*pairs().tensors)}, References()
    first = compare(model, parts=parts, references=references)
    so_far = len(read)
    second = compare(model, amp_dtype="float16", parts=parts, references=references)
    assert len(read) == so_far > 0
    assert second.reference_losses == first.reference_losses
    alone = compare(model, amp_dtype="float16", parts=parts)
    assert second.losses == pytest.approx(alone.losses)
    compare(model, micro_batch_size=8, parts=parts, references=references)
    assert len(references) == 2, "another batch has a reference of its own"


def halving_step(model: nn.Module, batch: Any) -> Tensor:
    """Change the batch in place."""
    batch[0].mul_(0.5)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


NORMED = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (Layered(nn.Identity()), {}),
        (Layered(nn.Dropout(0.5)), {}),
        (NORMED, {"optimizer": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9)}),
        (Layered(nn.Identity()), {"step": halving_step}),
    ],
    ids=["plain", "dropout", "buffers", "batch changed in place"],
)
def test_float32_equals_itself_to_the_last_bit(model: nn.Module, parts: dict[str, Any]) -> None:
    figures = compare(model, amp_dtype="float32", parts=parts)
    assert figures.losses == figures.reference_losses
    assert figures.loss_deviation == 0


def test_the_repeat_shows_a_model_that_draws() -> None:
    figures = compare(Layered(nn.Dropout(0.5)))
    assert (figures.repeat_cosine or 0) < 0.99
    assert figures.repeat_deviation > 0


def test_a_scale_that_is_too_high_at_first_is_found_and_its_batches_taken_again() -> None:
    figures = compare(amp_dtype="float16", parts={"loss": _steep})
    assert any(figures.skipped_steps)
    assert not any(figures.skipped_steps[-5:])
    assert figures.steps == GUARD_STEPS == figures.skipped_steps.count(False)
    assert objection(figures) is None


def _steep(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss in whose gradient a scale of 65536 passes what float16 holds."""
    return nn.functional.cross_entropy(outputs, targets) + (outputs * 4).mean() * 1e-3 * 2**10


class Infinite(torch.autograd.Function):
    """Gives an infinite gradient in some of its passes in float16."""

    passes: range
    done = 0

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        context.is_half = inputs.dtype == torch.float16
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        Infinite.done += context.is_half
        return gradient * (inf if context.is_half and Infinite.done in Infinite.passes else 1.0)


def test_gradients_that_never_are_finite_end_in_skipped_steps() -> None:
    Infinite.passes = range(10**6)
    figures = compare(Layered(Infinite.apply), amp_dtype="float16")
    assert figures.steps == 0
    assert all(figures.skipped_steps)
    against = objection(figures)
    assert against is not None
    assert (against.code, against.figures["last_skipped"]) == ("steps_skipped", 5)


def test_a_step_skipped_later_leaves_the_first_gradient() -> None:
    Infinite.passes = range(Infinite.done + 10, Infinite.done + 11)
    figures = compare(Layered(Infinite.apply), amp_dtype="float16")
    assert figures.skipped_steps[9]
    assert (figures.gradient_cosine or 0) > 0.99
    assert objection(figures) is None


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("as a device would"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_batch_that_float32_has_no_memory_for_is_halved(error: Exception) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) > 4 and not torch.is_autocast_enabled("cpu"):
            raise error
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    figures = compare(parts={"step": step})
    assert figures.micro_batch_size == 4
    assert figures.steps == GUARD_STEPS


def test_no_memory_for_a_single_sample_is_told() -> None:
    step = Mock(side_effect=torch.OutOfMemoryError("as a device would"))
    with pytest.raises(torch.OutOfMemoryError):
        compare(parts={"step": step})


def test_a_deadline_that_is_near_leaves_few_steps() -> None:
    figures = compare(ends_at=0.0)
    assert figures.steps == 1
    assert len(figures.losses) == len(figures.reference_losses) == 1


def test_slow_steps_of_a_brief_comparison_are_fewer_but_as_many_as_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "_BRIEF_S", 0.0)
    assert compare(is_short_search=True).steps == MIN_STEPS
    assert compare().steps == GUARD_STEPS


def test_few_batches_are_taken_in_turn_if_they_are_large() -> None:
    taken = list[int]()

    def collate(items: list[tuple[Tensor, Tensor]]) -> Any:
        taken.append(len(items))
        padding = torch.empty(100 * 2**20, dtype=torch.uint8)  # never touched
        inputs, targets = zip(*items, strict=True)
        return Padded(torch.stack(inputs), torch.stack(targets), padding)

    def step(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets)

    assert compare(parts={"collate_fn": collate, "step": step}).steps == GUARD_STEPS
    assert taken == [16, 16]


class Padded:
    """A batch of the user's own class, which does not take to being copied."""

    def __init__(self, inputs: Tensor, targets: Tensor, padding: Tensor) -> None:
        self.inputs, self.targets, self.padding = inputs, targets, padding

    def __deepcopy__(self, memo: object) -> Padded:
        raise TypeError("not this one")


def noting(seen: list[tuple[str, str]]) -> nn.Module:
    """Return a model that writes down the precision of matrix products and convolutions."""
    backends: Any = torch.backends

    def note(hidden: Tensor) -> Tensor:
        seen.append((backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision))
        return hidden

    return Layered(note)


@pytest.mark.parametrize("amp_dtype", ["tf32", "bfloat16"])
def test_the_reference_is_exact_where_float32_may_run_in_tf32(amp_dtype: str) -> None:
    """As in NVIDIA's containers; the candidate computes as its trial would."""
    seen: list[tuple[str, str]] = []
    with tf32_products():
        figures = compare(noting(seen), amp_dtype=amp_dtype)
    exact = GUARD_STEPS + 5
    assert figures.steps == GUARD_STEPS
    assert set(seen[:exact]) == {("ieee", "tf32")}, "the reference and its repeat"
    assert {matmul for matmul, _ in seen[exact:]} == {"tf32"}


def test_the_reference_leaves_convolutions_to_the_user() -> None:
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined] # torch does not list it
    before = convolutions.fp32_precision
    seen: list[tuple[str, str]] = []
    try:
        convolutions.fp32_precision = "ieee"
        compare(noting(seen))
        assert {convolution for _, convolution in seen} == {"ieee"}
    finally:
        convolutions.fp32_precision = before


@pytest.mark.parametrize(
    ("told", "amp_dtype", "kind", "said"),
    [
        ("1", "bfloat16", "cuda", "float32_unknown"),
        ("0", "tf32", "cuda", "tf32_forbidden"),
        ("0", "bfloat16", "cuda", None),
        ("yes", "bfloat16", "cuda", None),
        (None, "bfloat16", "cuda", None),
        ("1", "bfloat16", "cpu", None),
    ],
)
def test_what_nvidias_libraries_were_told_past_torch_is_said(
    told: str | None, amp_dtype: Any, kind: Any, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if told is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", told)
    notes = guard._overridden(TrainingConfig(amp_dtype=amp_dtype), Device(torch.device(kind), kind))
    assert [note.code for note in notes] == ([] if said is None else [said])


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(0.01, 100),
)
def test_the_cosine_is_that_of_all_parameters_as_one_vector(
    values: list[list[float]], scale: float
) -> None:
    one = [torch.tensor(part) for part in values]
    whole = torch.cat(one).double()
    if whole.norm() < 1e-3:
        return
    assert gradient_cosine(one, [scale * part for part in one]) == pytest.approx(1)
    assert gradient_cosine(one, [-part for part in one]) == pytest.approx(-1)
    other = [part.flip(0) for part in one]
    expected = float(whole @ torch.cat(other).double() / whole.norm() ** 2)
    assert gradient_cosine(one, other) == pytest.approx(expected, abs=1e-9)


def test_a_gradient_that_is_not_there_is_zero() -> None:
    one = torch.tensor([1.0, 0.0])
    assert gradient_cosine([one, None], [one, None]) == 1
    assert gradient_cosine([one, None], [None, one]) == 0
    assert gradient_cosine([None], [None]) == 1
    assert gradient_cosine([one], [torch.zeros(2)]) == 0
    assert gradient_cosine([one], [torch.tensor([1.0, float("inf")])]) is None
    assert gradient_cosine([one.to_sparse()], [one.to_sparse()]) == 1


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
def test_a_fused_candidate_is_compared_to_a_plain_reference(amp_dtype: str) -> None:
    steps = list[bool]()

    class Watched(torch.optim.Adam):
        def zero_grad(self, set_to_none: bool = True) -> None:
            steps.append(is_fused(self))
            super().zero_grad(set_to_none)

    optimizer = {"optimizer": lambda parameters, lr: Watched(parameters, lr, fused=True)}
    figures = compare(amp_dtype=amp_dtype, fused=True, parts=optimizer)
    assert objection(figures) is None
    assert (steps[0], steps[-1]) == (False, True)
    assert steps == sorted(steps)


def test_a_compiled_candidate_is_compiled_in_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", compiled := Mock(side_effect=lambda model, mode: model))
    compare(amp_dtype="float32", compile=True, compile_mode="max-autotune")
    assert compiled.call_args.kwargs == {"mode": "max-autotune"}
