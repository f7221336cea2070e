"""TrainingConfig: what it refuses, what it hands to torch, and that its helpers leave no trace."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from pydantic import ValidationError
from torch.utils.data import DataLoader, TensorDataset

from autotune.config.training_config import AMP_DTYPES, AmpDtype, TrainingConfig
from tests.factories.configs import any_configs


@given(any_configs())
def test_dataloader_takes_any_kwargs(config: TrainingConfig) -> None:
    kwargs = config.dataloader_kwargs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than this machine has cores
        loader = DataLoader(TensorDataset(torch.zeros(8, 1)), **kwargs)
    assert {name: getattr(loader, name) for name in kwargs if name != "prefetch_factor"} == {
        name: value for name, value in kwargs.items() if name != "prefetch_factor"
    }
    assert loader.prefetch_factor == (
        kwargs["prefetch_factor"] or (2 if kwargs["num_workers"] else None)
    )


def test_token_budget_leaves_batch_size_out() -> None:
    config = TrainingConfig(max_tokens=8)
    kwargs = config.dataloader_kwargs()
    assert "batch_size" not in kwargs
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_sampler=[[0, 1, 2], [3]], **kwargs)
    assert [len(batch[0]) for batch in loader] == [3, 1]


@given(any_configs())
def test_json_round_trip(config: TrainingConfig) -> None:
    assert TrainingConfig.model_validate_json(config.model_dump_json()) == config
    assert TrainingConfig.model_validate(config.model_dump()) == config
    assert hash(TrainingConfig.model_validate(config.model_dump())) == hash(config)


@pytest.mark.parametrize(
    ("strategy", "world_size", "processes", "batch"),
    [("single", 1, 1, 8), ("dp", 4, 1, 32), ("ddp", 4, 4, 8)],
)
def test_dp_loads_for_all_devices(
    strategy: str, world_size: int, processes: int, batch: int
) -> None:
    config = TrainingConfig.model_validate(
        {"strategy": strategy, "world_size": world_size, "micro_batch_size": 8}
    )
    assert (config.process_count, config.loader_batch_size) == (processes, batch)


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"prefetch_factor": 4}, "num_workers=0 and prefetch_factor=4"),
        ({"in_order": False}, "num_workers=0 and in_order=False"),
        ({"compile_mode": "reduce-overhead"}, "compile=False"),
        ({"world_size": 4}, "world_size=4"),
        ({"ddp": {}}, "'single'"),
        (
            {"strategy": "ddp", "grad_accum_steps": 2, "ddp": {"static_graph": True}},
            "grad_accum_steps=2",
        ),
        ({"strategy": "dp", "world_size": 2, "compile": True}, "compile=True"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], seen: str) -> None:
    with pytest.raises(ValidationError, match=seen):
        TrainingConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"micro_batch_size": 0},
        {"micro_batch_size": 32.0},
        {"micro_batch_size": True},
        {"num_workers": "4"},
        {"pin_memory": 1},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"batch_size": 32},
        {"strategy": "ddp", "ddp": {"bucket_cap_mb": float("inf")}},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig(**values)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainingConfig().lr = 1.0  # type: ignore[misc] # the rule under test


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
def test_autocast_precision(amp_dtype: AmpDtype) -> None:
    matrix = torch.ones(4, 4)
    with TrainingConfig(amp_dtype=amp_dtype).autocast("cpu"):
        product = matrix @ matrix
    expected = torch.float32 if amp_dtype == "tf32" else getattr(torch, amp_dtype)
    assert product.dtype is expected
    assert (matrix @ matrix).dtype is torch.float32


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
@pytest.mark.parametrize("fails", [False, True])
def test_autocast_leaves_no_trace(amp_dtype: AmpDtype, fails: bool) -> None:
    before = _precisions()
    context = TrainingConfig(amp_dtype=amp_dtype).autocast("cpu")
    for _ in range(2):
        with pytest.raises(ArithmeticError) if fails else nullcontext(), context:
            assert _precisions() == (("tf32", "tf32") if amp_dtype == "tf32" else before)
            if fails:
                raise ArithmeticError
        assert _precisions() == before
    assert not torch.is_autocast_enabled("cpu")


def test_tf32_restores_callers_precision() -> None:
    backends: Any = torch.backends
    before = _precisions()
    try:
        backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = "ieee", "ieee"
        context = TrainingConfig(amp_dtype="tf32").autocast("cpu")
        with context, context:
            assert _precisions() == ("tf32", "tf32")
        assert _precisions() == ("ieee", "ieee")
    finally:
        backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
def test_grad_scaler_only_for_float16(amp_dtype: AmpDtype) -> None:
    config = TrainingConfig(amp_dtype=amp_dtype)
    scaler = config.grad_scaler("cpu")
    assert scaler.is_enabled() == (amp_dtype == "float16")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    torch.autograd.backward(scaler.scale(weight.sum()))
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


def test_global_batch_ratio_in_tokens() -> None:
    baseline = TrainingConfig(micro_batch_size=3, max_tokens=4096)
    halved = TrainingConfig(micro_batch_size=2, max_tokens=2048, grad_accum_steps=2)
    assert halved.global_batch_ratio(baseline) == 1, "as many tokens, though four samples for three"
    assert TrainingConfig(micro_batch_size=6, max_tokens=8192).global_batch_ratio(baseline) == 2
    assert (
        TrainingConfig(micro_batch_size=6).global_batch_ratio(TrainingConfig(micro_batch_size=4))
        == 1.5
    )


def _precisions() -> tuple[str, str]:
    backends: Any = torch.backends
    return backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
