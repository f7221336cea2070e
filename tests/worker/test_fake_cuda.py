"""Check devices, dtypes and layouts of a forward pass on CUDA, without a device."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.apply.prepare import _DataParallel
from autotune.config.training_config import AMP_DTYPES, AmpDtype, TrainingConfig
from autotune.worker.step import Step, Trainer
from tests.worker.fake_cuda import CUDA, Seen, fake_cuda, forward_alone, on_device

COMPUTED: dict[AmpDtype, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))


def train_forward(batch: Any, **settings: Any) -> Any:
    """What the user's step was given on the device, and what the model has made of it."""
    config = TrainingConfig(micro_batch_size=2, **settings)
    model = convolution().to(
        memory_format=torch.channels_last if config.channels_last else torch.contiguous_format
    )  # type: ignore[call-overload] # torch's stubs lack the keyword alone
    with fake_cuda():
        optimizer = torch.optim.SGD([torch.zeros(1)])
        accumulator = config.accumulator(
            model, optimizer, device="cuda:0", scaler=config.grad_scaler("cpu")
        )
        step = Step(forward_alone, "the step that was given")
        trainer = Trainer(on_device(model), optimizer, step, config, CUDA, accumulator)
        with pytest.raises(Seen) as seen:
            trainer.train(batch() if callable(batch) else batch)
        return seen.value.found


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
def test_precision_and_layout(amp_dtype: AmpDtype, channels_last: bool) -> None:
    found = train_forward(pair, amp_dtype=amp_dtype, channels_last=channels_last)
    inputs, targets = found.batch
    assert (found.outputs.device, found.outputs.dtype) == (
        torch.device("cuda:0"),
        COMPUTED[amp_dtype],
    )
    # autocast casts, not the copy
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert inputs.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("pin_memory", [False, True])
def test_only_pinned_copies_do_not_block(pin_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked.append(kwargs["non_blocking"])
        return moved(self, *args, **kwargs)

    asked, moved = list[bool](), FakeTensor.to
    monkeypatch.setattr(FakeTensor, "to", to)
    train_forward(pair, pin_memory=pin_memory)
    assert asked == [pin_memory] * 2


class InTurns(nn.Linear):
    """Fake tensors can't be computed with in two threads at once."""

    lock = Lock()

    def forward(self, inputs: Tensor) -> Tensor:
        with self.lock:
            return super().forward(inputs)


def replicas(
    amp_dtype: AmpDtype, kind: type[nn.DataParallel[nn.Module]]
) -> list[tuple[torch.device, torch.dtype]]:
    """Where and in what DataParallel's own code has its two replicas compute, the model called as a Trainer does."""
    config = TrainingConfig(amp_dtype=amp_dtype, strategy="dp", world_size=2)
    with fake_cuda():
        parallel = kind(InTurns(4, 2))
        parallel.device_ids, parallel.src_device_obj = [0, 1], torch.device("cuda:0")
        models = [on_device(InTurns(4, 2), index) for index in (0, 1)]
        inputs = [(torch.empty(3, 4, device=f"cuda:{index}"),) for index in (0, 1)]
        with config.autocast(CUDA.torch_device):
            outputs = parallel.parallel_apply(models, inputs, ({}, {}))
        return [(one.device, one.dtype) for one in outputs]


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
def test_precision_of_replicas(
    amp_dtype: AmpDtype,
) -> None:
    expected = [(torch.device(f"cuda:{index}"), COMPUTED[amp_dtype]) for index in (0, 1)]
    assert replicas(amp_dtype, _DataParallel) == expected


def test_torchs_dataparallel_loses_bfloat16() -> None:
    """Why there is another; once this fails, torch's own will do."""
    assert [dtype for _, dtype in replicas("bfloat16", nn.DataParallel)] == [torch.float16] * 2
