"""Train in a user's own loop with a configuration's helpers, as a trial does."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from autotune.apply import cores, prepare
from autotune.apply.cores import own_device, set_current
from autotune.apply.precision import Float32Precision
from autotune.apply.prepare import Accumulator
from autotune.config.plan import Workload
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import ConfigError
from autotune.protocol.messages import TrialJob
from autotune.worker import rank
from autotune.worker.build import build_model
from autotune.worker.device import open_device
from autotune.worker.group import open_group
from autotune.worker.step import open_trainer
from tests.factories import make_process

Seen = list[tuple[Any, ...]]
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)
BATCHES = [(torch.randn(4, 3, 6, 6), torch.randint(0, 2, (4,))) for _ in range(6)]


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """What a loop sets for the whole process ends with its test."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    with Float32Precision(lambda _: None):
        yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    if distributed.is_initialized():
        gc.collect()  # a model in a cycle would let go of the group on one of gloo's own threads, which then aborts
        distributed.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 2))


class Watched:
    """A step that notes what the process, the model and the batch are like when it is called."""

    def __init__(self) -> None:
        self.seen: Seen = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        outputs = model(images)
        backends: Any = torch.backends
        self.seen.append(
            (
                type(model).__name__,
                outputs.dtype,
                images.is_contiguous(memory_format=torch.channels_last),
                next(model.parameters()).is_contiguous(memory_format=torch.channels_last),
                torch.is_autocast_enabled("cpu"),
                torch.get_num_threads(),
                backends.cuda.matmul.fp32_precision,
                backends.cudnn.benchmark,
                getattr(model, "require_backward_grad_sync", None),
            )
        )
        return nn.functional.cross_entropy(outputs, labels)


def as_a_trial_does(config: TrainingConfig, folder: Path) -> tuple[Seen, list[Tensor]]:
    device, step = open_device("cpu"), Watched()
    job = TrialJob(process=make_process(folder), payload=folder, config=config)
    rank._set_threads(job, 0, device)
    workload = Workload(model=network, dataset=None, step=step)
    model = build_model(workload, config, device)
    trainer = open_trainer(workload, model, BATCHES[0], config, device)
    for batch in BATCHES:
        trainer.train(batch)
    return step.seen, [parameter.detach() for parameter in model.parameters()]


def as_a_user_does(config: TrainingConfig) -> tuple[Seen, list[Tensor]]:
    loss_of = Watched()
    model = config.prepare(network(), "cpu")
    accumulator = config.accumulator(
        model, torch.optim.SGD(model.parameters(), **config.optimizer_kwargs())
    )
    for batch in BATCHES:
        with accumulator:
            accumulator.backward(loss_of(model, config.to_device(batch, "cpu")))
    return loss_of.seen, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings",
    [
        {"amp_dtype": "float16", "grad_accum_steps": 3},
        {"amp_dtype": "tf32", "intra_op_threads": 1},
        {"cudnn_benchmark": True, "fused": True, "amp_dtype": "bfloat16", "channels_last": True},
        {"strategy": "ddp", "ddp": DdpConfig(static_graph=True, comm_hook="fp16")},
        {
            "strategy": "ddp",
            "amp_dtype": "bfloat16",
            "grad_accum_steps": 2,
            "channels_last": True,
            "ddp": DdpConfig(gradient_as_bucket_view=True, comm_hook="fp16"),
        },
        {"strategy": "dp"},
    ],
    ids=str,
)
def test_each_setting_is_applied_as_in_a_trial(settings: dict[str, Any], tmp_path: Path) -> None:
    config = TrainingConfig(micro_batch_size=4, lr=0.1, **settings)
    if config.strategy == "ddp":
        rendezvous = f"file://{tmp_path}/rendezvous"
        job = TrialJob(
            process=make_process(tmp_path), payload=tmp_path, config=config, rendezvous=rendezvous
        )
        open_group(job, 0, open_device("cpu"))
    torch.set_num_threads(2)
    with Float32Precision(lambda _: None):
        theirs, their_weights = as_a_trial_does(config, tmp_path)
    torch.set_num_threads(2)
    ours, our_weights = as_a_user_does(config)
    assert ours == theirs
    assert all(
        torch.equal(one, other) for one, other in zip(our_weights, their_weights, strict=True)
    )


def test_model_is_compiled_last_in_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[tuple[str, bool]]()

    def compile_model(model: nn.Module, *, mode: str) -> nn.Module:
        weight = next(model.parameters())
        compiled.append((mode, weight.is_contiguous(memory_format=torch.channels_last)))
        return model

    monkeypatch.setattr(torch, "compile", compile_model)
    TrainingConfig(compile=True, channels_last=True).prepare(network())
    TrainingConfig(compile=True, compile_mode="max-autotune").prepare(network())
    assert compiled == [("default", True), ("max-autotune", False)]


def accumulator_of(model: nn.Module, **settings: Any) -> Accumulator:
    config = TrainingConfig.model_validate(settings)
    return config.accumulator(model, torch.optim.SGD(model.parameters()))


def in_float16(*, steps: int, optimizer: Any = torch.optim.SGD) -> tuple[nn.Linear, Accumulator]:
    """A model whose gradients are all one, and what steps after so many batches with a learning rate of one."""
    model = nn.Linear(2, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)  # nothing overflows
    config = TrainingConfig(amp_dtype="float16", grad_accum_steps=steps)
    return model, config.accumulator(model, optimizer(model.parameters(), lr=1.0), scaler=scaler)


def test_before_step_sees_unscaled_gradients() -> None:
    model, accumulator = in_float16(steps=2)
    before, seen = model.weight.detach().clone(), list[Any]()

    def clip() -> None:
        assert model.weight.grad is not None
        seen.append(model.weight.grad.tolist())
        model.weight.grad.fill_(0.5)

    due = []
    for _ in range(4):
        with accumulator:
            loss = model(torch.ones(1, 2)).sum()
            due.append(accumulator.backward(loss, before_step=clip))
    assert due == [False, True, False, True]
    assert seen == [[[1.0, 1.0]], [[1.0, 1.0]]]
    assert torch.allclose(before - model.weight, torch.ones(1, 2))


def test_batch_that_raises_leaves_no_context() -> None:
    model = nn.Linear(2, 1)
    accumulator = accumulator_of(model, amp_dtype="bfloat16", grad_accum_steps=2)
    with suppress(ArithmeticError), accumulator:
        assert torch.is_autocast_enabled("cpu")
        raise ArithmeticError
    assert not torch.is_autocast_enabled("cpu")
    assert accumulator.accumulated == 0
    with accumulator:
        loss = model(torch.ones(1, 2)).sum()
        accumulator.backward(loss)
    assert not torch.is_autocast_enabled("cpu")
    assert accumulator.accumulated == 1


class _Precision(torch.autograd.Function):
    """Notes whether its backward pass is run under autocast."""

    seen: list[bool] = []  # noqa: RUF012 - of the class, since torch makes no object of it

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Precision.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient


@pytest.mark.parametrize("is_on", [True, False])
def test_backward_pass_has_no_autocast(is_on: bool) -> None:
    model = nn.Linear(2, 1)
    noted: Any = _Precision
    noted.seen.clear()
    with accumulator_of(model, amp_dtype="bfloat16") as accumulator:
        loss = noted.apply(model(torch.ones(1, 2)).sum())
        with torch.autocast("cpu", enabled=is_on):
            accumulator.backward(loss)
            assert torch.is_autocast_enabled("cpu") == is_on
    assert noted.seen == [False]


def test_batch_has_one_context_and_one_backward() -> None:
    model = nn.Linear(2, 1)
    accumulator = accumulator_of(model, amp_dtype="bfloat16")

    def loss() -> Tensor:
        total: Tensor = model(torch.ones(1, 2)).sum()
        return total

    with pytest.raises(RuntimeError, match="with accumulator"):
        accumulator.backward(loss())
    with accumulator:
        with pytest.raises(RuntimeError, match="with accumulator"), accumulator:
            raise AssertionError("entered twice")
        accumulator.backward(loss())
        with pytest.raises(RuntimeError, match="with accumulator"):
            accumulator.backward(loss())
    assert not torch.is_autocast_enabled("cpu")
    with accumulator:
        assert accumulator.backward(loss())


def test_exception_drops_batches() -> None:
    model, accumulator = in_float16(steps=2)
    before, seen = model.weight.detach().clone(), list[Any]()

    def refuse() -> None:
        raise ArithmeticError

    def look() -> None:
        assert model.weight.grad is not None
        seen.append(model.weight.grad.tolist())

    for hooks in ((None, refuse), (None, look)):
        for hook in hooks:
            with suppress(ArithmeticError), accumulator:
                accumulator.backward(model(torch.ones(1, 2)).sum(), before_step=hook)
    assert seen == [[[1.0, 1.0]]]
    assert torch.allclose(before - model.weight, torch.ones(1, 2))


@pytest.mark.parametrize("before_step", [None, lambda: None])
def test_step_that_raises_leaves_the_scaler_usable(before_step: Any) -> None:
    class Full(torch.optim.SGD):
        """Runs out of memory for its state in its first step."""

        is_full = True

        def step(self, closure: Any = None) -> Any:
            if Full.is_full:
                Full.is_full = False
                raise MemoryError
            return super().step(closure)

    model, accumulator = in_float16(steps=1, optimizer=Full)
    before = model.weight.detach().clone()
    for _ in range(2):
        with suppress(MemoryError), accumulator:
            accumulator.backward(model(torch.ones(1, 2)).sum(), before_step=before_step)
    assert torch.allclose(before - model.weight, torch.ones(1, 2))


def test_reset_drops_gradients() -> None:
    model = nn.Linear(2, 1, bias=False)
    accumulator = accumulator_of(model, grad_accum_steps=4)
    with accumulator:
        accumulator.backward(model(torch.ones(1, 2)).sum())
    accumulator.reset()
    assert (accumulator.accumulated, model.weight.grad) == (0, None)


@pytest.mark.parametrize("settings", [{"strategy": "ddp", "world_size": 4}, {}], ids=str)
def test_group_of_another_size_is_refused(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = distributed
    monkeypatch.setattr(group, "is_initialized", lambda: True)
    monkeypatch.setattr(group, "get_world_size", lambda: 2)
    monkeypatch.setattr(group, "destroy_process_group", lambda: None)
    with pytest.raises(ConfigError, match=r"has 2; .*torchrun"):
        TrainingConfig.model_validate(settings).prepare(network(), "cpu")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the current CUDA device, the last one in force."""
    current = [0]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[-1])
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    return current


def test_set_current(current: list[int]) -> None:
    for name in ("cpu", "cuda:1", "cuda", "xpu:2"):
        set_current(torch.device(name))
    assert current == [0, 1]


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize(
    ("is_rank", "local_rank", "expected"),
    [(True, "1", "cuda:1"), (False, "1", "cuda:0"), (True, "none", "cuda:0")],
)
def test_rank_has_the_device_of_its_number(
    is_rank: bool, local_rank: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert str(own_device(is_rank=is_rank)) == expected


@pytest.mark.usefixtures("current")
def test_batch_goes_to_the_prepared_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    found: list[str] = []

    class Moving:
        def to(self, device: Any) -> None:
            found.append(str(device))

    config = TrainingConfig()
    monkeypatch.setattr(prepare, "arranged", lambda _, model, device: model)
    config.prepare(network(), "cuda:1")
    config.to_device(Moving())
    assert found == ["cuda:1"]


@pytest.mark.parametrize(("given", "expected"), [("2", 3), ("", 1), ("none", 1)])
def test_ranks_share_the_cores_of_a_host(
    given: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(cores, "usable_cores", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    with pytest.raises((ValueError, RuntimeError)):
        TrainingConfig(strategy="ddp", world_size=8).prepare(
            network(), "cpu"
        )  # there is no process group
    assert set_to == [expected]


def test_cudnn_benchmark_is_switched_on_but_never_off() -> None:
    for is_on, before in ((True, False), (False, True), (False, False)):
        torch.backends.cudnn.benchmark = before
        TrainingConfig(cudnn_benchmark=is_on).prepare(network(), "cpu")
        assert torch.backends.cudnn.benchmark is (is_on or before)


class _OfAGraph(torch.autograd.Function):
    """A product whose gradients lie in memory that the next backward pass writes over, as a CUDA graph's do."""

    memory = torch.zeros(2, 1)

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (inputs,) = ctx.saved_tensors
        torch.mm(inputs.T, gradient, out=_OfAGraph.memory)
        return None, _OfAGraph.memory.view(2, 1)


def test_gradients_in_a_graphs_memory_are_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = list[int]()
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(1))
    batches = [torch.randn(3, 2) for _ in range(6)]

    def trained(product: Any, *, records_graphs: bool) -> tuple[Tensor, Tensor | None]:
        weight, unused = nn.Parameter(torch.ones(2, 1)), nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight, unused], lr=0.1, weight_decay=0.1)
        accumulator = Accumulator(
            optimizer=optimizer, scaler=UNSCALED, steps=3, records_graphs=records_graphs
        )
        for batch in batches:
            with accumulator:
                accumulator.backward(product(batch, weight).square().mean())
        # without a gradient a parameter must not decay
        assert torch.equal(unused, torch.ones(1))
        return weight.detach(), weight.grad

    expected, _ = trained(torch.matmul, records_graphs=False)
    assert not marked
    wrong, _ = trained(_OfAGraph.apply, records_graphs=False)
    # the stand-in must write over its gradients
    assert not torch.allclose(wrong, expected)
    found, gradient = trained(_OfAGraph.apply, records_graphs=True)
    torch.testing.assert_close(found, expected)
    assert gradient is None
    assert len(marked) == len(batches)


def test_graph_gradients_are_copied_by_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied, copy_all = list[int](), torch._foreach_copy_

    def copying(copies: list[Tensor], gradients: list[Tensor]) -> None:
        copied.append(len(copies))
        copy_all(copies, gradients)

    monkeypatch.setattr(torch, "_foreach_copy_", copying)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45])
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    sparse = torch.tensor([0.0, 1.0]).to_sparse()
    gradients = [
        special,
        image,
        torch.randn(()),
        torch.randn(7).bfloat16(),
        torch.randn(8).bfloat16(),
        sparse,
    ]
    parameters = [nn.Parameter(torch.zeros_like(gradient.to_dense())) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    without = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*parameters, without], lr=0.1)
    accumulator = Accumulator(
        optimizer=optimizer, scaler=UNSCALED, steps=2, records_graphs=True, accumulated=1
    )
    accumulator._keep_gradients()
    # of float32 and of bfloat16; one that is sparse is cloned
    assert copied == [3, 2]
    assert without.grad is None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        copy = parameter.grad
        assert copy is not None
        assert copy is not gradient
        assert torch.equal(bits_of(copy), bits_of(gradient))
        if gradient.layout == torch.strided:
            assert copy.data_ptr() != gradient.data_ptr()
            assert copy.stride() == gradient.stride()


def bits_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, in which NaN equals itself and -0 differs from 0."""
    return tensor.to_dense().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("mode", "device", "records"),
    [
        ("reduce-overhead", "cuda", True),
        ("max-autotune", "cuda:1", True),
        ("max-autotune-no-cudagraphs", "cuda", False),
        ("default", "cuda", False),
        ("reduce-overhead", "cpu", False),
    ],
)
def test_modes_that_record_graphs(mode: Any, device: str, records: bool) -> None:
    config = TrainingConfig(compile=True, compile_mode=mode)
    optimizer = torch.optim.SGD(network().parameters())
    made = config.accumulator(network(), optimizer, device=device, scaler=UNSCALED)
    assert made.records_graphs is records
