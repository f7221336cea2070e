"""TrainingConfig: what it refuses, what it hands to torch, and that its helpers leave no trace."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.utils.data import DataLoader, TensorDataset

from autotune.config.training_config import AMP_DTYPES, AmpDtype, DdpConfig, TrainingConfig

_COUNTS = st.integers(1, 4096)
_ANY_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "micro_batch_size": _COUNTS,
        "grad_accum_steps": _COUNTS,
        "lr": st.floats(1e-9, 1e3),
        "amp_dtype": st.sampled_from(AMP_DTYPES),
        "num_workers": st.integers(0, 64),
        "prefetch_factor": st.none() | st.integers(1, 64),
        "persistent_workers": st.booleans(),
        "pin_memory": st.booleans(),
        "in_order": st.booleans(),
        "channels_last": st.booleans(),
        "compile": st.booleans(),
        "intra_op_threads": st.none() | _COUNTS,
        "world_size": st.integers(1, 8),
        "strategy": st.sampled_from(["single", "dp", "ddp"]),
        "ddp": st.none()
        | st.builds(
            DdpConfig, static_graph=st.booleans(), bucket_cap_mb=st.none() | st.floats(1, 99)
        ),
    },
)


def _valid(values: dict[str, Any]) -> TrainingConfig:
    try:
        return TrainingConfig(**values)
    except ValidationError:
        assume(False)
        raise


@given(_ANY_SETTINGS)
def test_every_valid_config_gives_kwargs_that_the_dataloader_takes(values: dict[str, Any]) -> None:
    kwargs = _valid(values).dataloader_kwargs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than this machine has cores
        loader = DataLoader(TensorDataset(torch.zeros(8, 1)), **kwargs)
    assert {name: getattr(loader, name) for name in kwargs if name != "prefetch_factor"} == {
        name: value for name, value in kwargs.items() if name != "prefetch_factor"
    }
    assert loader.prefetch_factor == (
        kwargs["prefetch_factor"] or (2 if kwargs["num_workers"] else None)
    )


def test_with_a_token_budget_the_batch_sampler_takes_the_place_of_a_batch_size() -> None:
    config = TrainingConfig(max_tokens=8)
    kwargs = config.dataloader_kwargs()
    assert "batch_size" not in kwargs
    loader = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_sampler=[[0, 1, 2], [3]], **kwargs)
    assert [len(batch[0]) for batch in loader] == [3, 1]


def test_global_batches_are_compared_in_tokens_where_both_have_a_budget() -> None:
    half, whole = (
        TrainingConfig(micro_batch_size=6, max_tokens=50),
        TrainingConfig(micro_batch_size=13, max_tokens=100),
    )
    assert half.global_batch_ratio(whole) == 0.5
    assert half.model_copy(update={"grad_accum_steps": 2}).global_batch_ratio(whole) == 1
    assert half.global_batch_ratio(TrainingConfig(micro_batch_size=12)) == 0.5


@given(_ANY_SETTINGS)
def test_a_config_comes_back_from_json_as_it_was(values: dict[str, Any]) -> None:
    config = _valid(values)
    assert TrainingConfig.model_validate_json(config.model_dump_json()) == config
    assert TrainingConfig.model_validate(config.model_dump()) == config
    assert hash(TrainingConfig.model_validate(config.model_dump())) == hash(config)


@given(_ANY_SETTINGS)
def test_the_global_batch_is_the_product_over_ranks_and_accumulation(
    values: dict[str, Any],
) -> None:
    config = _valid(values)
    assert (
        config.global_batch_size
        == config.micro_batch_size * config.grad_accum_steps * config.world_size
    )


@pytest.mark.parametrize(
    ("strategy", "world_size", "processes", "batch"),
    [("single", 1, 1, 8), ("dp", 4, 1, 32), ("ddp", 4, 4, 8)],
)
def test_a_process_loads_for_all_devices_that_it_trains_on(
    strategy: str, world_size: int, processes: int, batch: int
) -> None:
    config = TrainingConfig.model_validate(
        {"strategy": strategy, "world_size": world_size, "micro_batch_size": 8}
    )
    assert (config.process_count, config.loader_batch_size) == (processes, batch)


def test_the_default_is_what_the_design_names() -> None:
    config = TrainingConfig()
    assert (config.micro_batch_size, config.num_workers, config.amp_dtype, config.lr) == (
        32,
        0,
        "float32",
        1e-3,
    )
    assert config.intra_op_threads is None
    assert config.ddp is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prefetch_factor": 2}, "prefetch_factor"),
        ({"persistent_workers": True}, "persistent_workers"),
        ({"world_size": 2}, "world_size"),
        ({"ddp": {}}, "ddp"),
        ({"strategy": "ddp", "grad_accum_steps": 2, "ddp": {"static_graph": True}}, "static_graph"),
        ({"strategy": "dp", "world_size": 2, "compile": True}, "compile"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValidationError, match=named):
        TrainingConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"micro_batch_size": 0},
        {"micro_batch_size": 32.0},
        {"micro_batch_size": True},
        {"num_workers": -1},
        {"num_workers": "4"},
        {"pin_memory": 1},
        {"lr": 0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"amp_dtype": "fp16"},
        {"prefetch_factor": 0, "num_workers": 1},
        {"batch_size": 32},
        {"strategy": "ddp", "ddp": {"bucket_cap_mb": float("inf")}},
        {"strategy": "ddp", "ddp": {"bucket_cap": 25}},
    ],
)
def test_values_out_of_range_and_unknown_names_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainingConfig(**values)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainingConfig().lr = 1.0  # type: ignore[misc] # the rule under test


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
def test_autocast_computes_in_the_precision_asked_for(amp_dtype: AmpDtype) -> None:
    matrix = torch.ones(4, 4)
    with TrainingConfig(amp_dtype=amp_dtype).autocast("cpu"):
        product = matrix @ matrix
    expected = torch.float32 if amp_dtype == "tf32" else getattr(torch, amp_dtype)
    assert product.dtype is expected
    assert (matrix @ matrix).dtype is torch.float32


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
@pytest.mark.parametrize("fails", [False, True])
def test_autocast_leaves_no_trace_even_after_an_exception(amp_dtype: AmpDtype, fails: bool) -> None:
    before = _precisions()
    with (
        pytest.raises(ArithmeticError) if fails else nullcontext(),
        TrainingConfig(amp_dtype=amp_dtype).autocast("cpu"),
    ):
        assert _precisions() == (("tf32", "tf32") if amp_dtype == "tf32" else before)
        if fails:
            raise ArithmeticError
    assert _precisions() == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("amp_dtype", AMP_DTYPES)
def test_one_autocast_context_serves_every_step(amp_dtype: AmpDtype) -> None:
    before = _precisions()
    context = TrainingConfig(amp_dtype=amp_dtype).autocast(torch.device("cpu"))
    for _ in range(3):
        with context:
            pass
    assert _precisions() == before


def test_tf32_puts_back_what_the_caller_had_set() -> None:
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
def test_the_grad_scaler_is_active_for_float16_alone(amp_dtype: AmpDtype) -> None:
    config = TrainingConfig(amp_dtype=amp_dtype)
    scaler = config.grad_scaler("cpu")
    assert scaler.is_enabled() == (amp_dtype == "float16")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    torch.autograd.backward(scaler.scale(weight.sum()))
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5, 0.5]


def test_token_budgets_compare_global_batches_by_tokens() -> None:
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
