"""What a script does by itself is what a probe says: its loader, its batches, its accumulation, its precision."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from autotune.config.training_config import TrainingConfig
from autotune.messages.space import setting_unreached
from autotune.worker.script import sightings
from autotune.worker.script.sightings import Sightings
from tests.worker.script.scripts import HEAD, LOADER, STEP, ScriptRig

_TRAIN = """
from train_data import make_loader
loader = make_loader(data)
"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of script, and what is seen of it."""

    text: str
    files: dict[str, str] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    site: str = "train.py"
    """The file that makes the training loader."""
    unreached: frozenset[str] = frozenset({"grad_accum_steps", "compile", "fused"})


KINDS = {
    "a plain loop": Kind(
        text=HEAD + LOADER + STEP,
        observed={
            "micro_batch_size": 16,
            "grad_accum_steps": 1,
            "lr": 0.05,
            "num_workers": 0,
            "amp_dtype": "float32",
        },
        facts={
            "dataset_length": 512,
            "parameter_count": 8 * 32 + 32 + 32 * 2 + 2,
            "trainable_parameter_count": 8 * 32 + 32 + 32 * 2 + 2,
            "is_iterable": False,
            "has_4d_input": False,
            "fixed_batch_size": None,
            "has_convolutions": False,
            "has_fixed_shapes": True,
        },
    ),
    "a generator over its loader": Kind(
        text=HEAD
        + LOADER
        + """
def forever():
    while True:
        yield from loader

batches = forever()
for _ in range(1000000):
    step(*next(batches))
""",
        observed={"micro_batch_size": 16, "grad_accum_steps": 1},
    ),
    "a loop that enumerates and ends its epochs early": Kind(
        text=HEAD
        + LOADER
        + """
for epoch in range(100000):
    for number, (x, y) in enumerate(loader):
        if number == 20:
            break
        step(x, y)
""",
        observed={"micro_batch_size": 16, "grad_accum_steps": 1},
    ),
    "batches that are taken ahead": Kind(
        text=HEAD
        + LOADER
        + """
from itertools import islice
for epoch in range(100000):
    for x, y in list(islice(loader, 8)):
        step(x, y)
""",
        observed={"micro_batch_size": 16, "grad_accum_steps": 1},
    ),
    "four batches a step": Kind(
        text=HEAD
        + "loader = DataLoader(data, 4, shuffle=True, num_workers=1, prefetch_factor=3, persistent_workers=1)\n"
        + """
for epoch in range(100000):
    for number, (x, y) in enumerate(loader):
        (nn.functional.cross_entropy(model(x), y) / 4).backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
        observed={
            "micro_batch_size": 4,
            "grad_accum_steps": 4,
            "num_workers": 1,
            "prefetch_factor": 3,
            "persistent_workers": True,
        },
    ),
    "two optimizers": Kind(
        text=HEAD
        + "loader = DataLoader(data, batch_size=8)\n"
        + """
maker = nn.Sequential(nn.Linear(4, 8))
making = torch.optim.Adam(maker.parameters(), lr=0.002)
for epoch in range(100000):
    for x, y in loader:
        step(x, y)
        making.zero_grad()
        nn.functional.cross_entropy(model(maker(torch.randn(len(x), 4))), 1 - y).backward()
        making.step()
""",
        observed={"micro_batch_size": 8, "grad_accum_steps": 1},
        facts={"trainable_parameter_count": 8 * 32 + 32 + 32 * 2 + 2 + 4 * 8 + 8},
    ),
    "a stream": Kind(
        text=HEAD
        + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(*data.tensors)

loader = DataLoader(Stream(), batch_size=16)
"""
        + STEP,
        observed={"micro_batch_size": 16, "grad_accum_steps": 1},
        facts={"is_iterable": True, "dataset_length": None, "is_sharded": False},
    ),
    "a loader that another module makes": Kind(
        text=HEAD + _TRAIN + STEP,
        files={
            "train_data.py": (
                "from torch.utils.data import DataLoader\n"
                "def make_loader(data):\n    return DataLoader(data, batch_size=32)\n"
            )
        },
        observed={"micro_batch_size": 32},
        site="train_data.py",
    ),
    "batches of a sampler of its own": Kind(
        text=HEAD
        + """
from torch.utils.data import BatchSampler, SequentialSampler
loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 8, drop_last=True))
"""
        + STEP,
        observed={"micro_batch_size": 8},
        facts={"fixed_batch_size": 8},
        unreached=frozenset({"micro_batch_size", "grad_accum_steps", "compile", "fused"}),
    ),
    "a loader of a class of its own": Kind(
        text=HEAD
        + """
class Loader(DataLoader):
    def __init__(self, what, size):
        super().__init__(what, batch_size=size)

loader = Loader(data, 8)
"""
        + STEP,
        observed={"micro_batch_size": 8},
    ),
    "no loader at all": Kind(
        text=HEAD
        + """
x, y = data.tensors
while True:
    at = torch.randint(512, (24,))
    step(x[at], y[at])
""",
        observed={"micro_batch_size": 24, "grad_accum_steps": 1, "lr": 0.05},
        facts={"fixed_batch_size": 24, "dataset_length": None},
        site="",
        unreached=frozenset(
            {"micro_batch_size", "num_workers", "amp_dtype", "grad_accum_steps", "compile", "fused"}
        ),
    ),
    "a script that decides much itself": Kind(
        text="""
import torch
torch.set_num_threads(3)
"""
        + HEAD
        + LOADER
        + """
torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
images = torch.randn(16, 3, 8, 8).to(memory_format=torch.channels_last)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(memory_format=torch.channels_last)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
for epoch in range(100000):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).mean() + net(images).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
""",
        observed={
            "lr": 0.05,
            "amp_dtype": "bfloat16",
            "channels_last": True,
            "intra_op_threads": 3,
            "cudnn_benchmark": True,
            "fused": True,
        },
        facts={"has_4d_input": True, "has_convolutions": True, "has_fixed_shapes": True},
        unreached=frozenset(
            {"amp_dtype", "channels_last", "intra_op_threads", "grad_accum_steps", "compile"}
        ),
    ),
    "two loaders in step": Kind(
        text=HEAD
        + LOADER
        + """
others = DataLoader(data, batch_size=48, shuffle=True)
while True:
    for (x, y), (other, _) in zip(loader, others):
        step(x, y)
""",
        observed={"micro_batch_size": 16, "grad_accum_steps": 1},
        unreached=frozenset({"micro_batch_size", "grad_accum_steps", "compile", "fused"}),
    ),
}


_FAST = {
    "a plain loop",
    "a generator over its loader",
    "four batches a step",
    "a stream",
    "batches of a sampler of its own",
    "no loader at all",
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=() if name in _FAST else pytest.mark.slow)
        for name, kind in KINDS.items()
    ],
)
def test_baseline_is_what_the_script_does(rig: ScriptRig, kind: Kind) -> None:
    for name, text in kind.files.items():
        rig.write(text, name)
    found = rig.probe(rig.write(kind.text))
    assert found.observed.model_dump(include=set(kind.observed)) == kind.observed
    assert found.facts.model_dump(include=set(kind.facts)) == kind.facts
    sites = [site.file for site in found.script.loaders]
    assert sites == ([str(rig.folder / kind.site)] if kind.site else [])
    assert {told.figures["setting"] for told in found.script.unreached} == kind.unreached
    assert not kind.unreached & set(found.script.reached)
    assert (found.script.framework, found.script.device, found.script.is_in_process) == (
        "plain loop",
        "cpu",
        True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "lr"),
    [
        (
            "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10**9)",
            0.5,
        ),
        ("schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=10**9)", 0.05),
        (
            "class schedule:\n    step = lambda group=optimizer.param_groups[0]: group.update(lr=group['lr'] * 0.9)",
            0.05,
        ),
    ],
)
def test_lr_is_the_one_before_a_schedule(rig: ScriptRig, schedule: str, lr: float) -> None:
    text = HEAD + schedule + "\nwhile True:\n    step(*next(iter(loader)))\n    schedule.step()\n"
    text = text.replace("\nwhile", f"\n{LOADER}while")
    assert rig.probe(rig.write(text)).observed.lr == lr


@pytest.mark.slow
def test_variables_set_before_imports_are_kept_nowhere(
    rig: ScriptRig,
) -> None:
    text = (
        'import os\nos.environ["READ_AT_IMPORT"] = "secret"\nos.environ.pop("HOME")\n'
        + HEAD
        + LOADER
        + STEP
    )
    found = rig.probe(rig.write(text))
    assert found.report.variables == {"READ_AT_IMPORT": "secret"}
    assert "secret" not in found.facts.model_dump_json()


@pytest.mark.slow
def test_unreached_settings_say_why(
    rig: ScriptRig,
) -> None:
    loop = KINDS["no loader at all"]
    found = rig.probe((*rig.write(loop.text), "--unused", "{grad_accum_steps}"))
    told = {str(one.figures["setting"]): one for one in found.script.unreached}
    assert told["micro_batch_size"] == setting_unreached(
        setting="micro_batch_size", reason="no_loader", has_placeholder=True
    )
    assert told["amp_dtype"].figures["reason"] == "not_comparable"
    assert "grad_accum_steps" not in told
    assert found.script.placeholders == ("grad_accum_steps",)
    assert "grad_accum_steps" in found.script.reached


# By Sightings alone, without a script


@pytest.fixture(autouse=True)
def _algorithms_of_today() -> Iterator[None]:
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic
    torch.use_deterministic_algorithms(False)


def sightings_of(model: nn.Module, **arguments: Any) -> Sightings:
    """Sightings after one step of a model with SGD."""
    seen = Sightings(outermost=[model])
    seen.step(torch.optim.SGD(model.parameters(), **arguments))
    return seen


def test_dropped_models_are_not_held() -> None:
    """Federated and meta learning make a model and an optimizer for each client."""
    seen = Sightings()
    main = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for _ in range(3):
        seen.step(main)
    client = torch.optim.SGD(nn.Linear(2, 2).parameters())
    parameter = ref(client.param_groups[0]["params"][0])
    for _ in range(5):
        seen.step(client)
    assert seen.main_optimizer is client
    seen.step(main)
    del client
    gc.collect()
    assert parameter() is None
    assert seen.main_optimizer is main
    assert (seen.most_steps, list(seen.steps.values())) == (5, [4, 5])


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.bfloat16, ("bfloat16", False)),
        (torch.float32, (None, False)),
        (torch.float64, (None, True)),
    ],
)
def test_weights_have_the_scripts_own_precision(
    dtype: torch.dtype, found: tuple[str | None, bool]
) -> None:
    """An autocast leaves 64 bits alone: bfloat16 would be measured as float64."""
    seen, model = Sightings(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(dtype)
    model[1].float()
    assert seen.call(model, (torch.ones(1, 8, dtype=dtype),), {})
    assert (seen.autocast, seen.is_double) == found


def test_model_compiled_in_place() -> None:
    model = nn.Linear(2, 2)
    seen, given = sightings_of(model), TrainingConfig()
    assert not seen.observed(given, None, 1, ()).compile
    model.compile(backend="eager")
    observed = seen.observed(given, None, 1, ())
    assert observed.compile
    assert unreached(seen, observed)["compile_mode"] == "in_the_script"


def test_tf32_is_the_baseline_on_an_nvidia_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.set_float32_matmul_precision("high")`: tf32 was searched as a change of it."""
    seen = sightings_of(nn.Linear(2, 2))
    monkeypatch.setattr(sightings, "allows_tf32", lambda: True)
    assert seen.observed(TrainingConfig(), None, 1, ()).amp_dtype == "float32"
    monkeypatch.setattr(sightings, "device_of", lambda _: torch.device("cuda"))
    assert seen.observed(TrainingConfig(), None, 1, ()).amp_dtype == "tf32"


@pytest.mark.parametrize(
    ("spans", "found"),
    [([4, 4, 2, 4, 4, 2], 4), ([1, 4], 4), ([4, 8, 4], 4), ([1, 1, 1], 1), ([], 1)],
    ids=["ten batches an epoch", "begun in an epoch", "skipped by a GradScaler", "none", "no step"],
)
def test_accumulation_is_that_of_most_steps(spans: list[int], found: int) -> None:
    assert Sightings(spans=spans).accumulation == found


@pytest.mark.parametrize(
    ("batches", "are_fixed"),
    [
        ([], None),
        ([(8, 3), (8, 3)], None),
        ([(8, 3), (8, 3), (8, 3)], True),
        ([(8, 3), (8, 3), (5, 3)], True),
        ([(8, 3), (6, 3), (5, 3)], False),
        ([(8, 3), (8, 3), (8, 4)], False),
        ([(8, 3), (8, 3), (8, 3, 1)], False),
        (["text"] * 4, None),
    ],
)
def test_shapes_are_fixed_but_for_an_epochs_last(
    batches: list[Any], are_fixed: bool | None
) -> None:
    seen = Sightings()
    for shape in batches:
        tensors = {"x": torch.empty(shape)} if isinstance(shape, tuple) else {}
        seen.batch({**tensors, "id": "a"}, 8)
    assert seen.has_fixed_shapes is are_fixed


def unreached(seen: Sightings, observed: TrainingConfig | None = None) -> dict[str, object]:
    """The settings that can't be changed from outside, with the codes of the reasons."""
    notes = seen.facts(observed or TrainingConfig(), None, ()).unreached
    return {str(note.figures["setting"]): note.figures["reason"] for note in notes}


@pytest.mark.parametrize("by_torch", [True, False])
def test_deterministic_algorithms_are_kept(monkeypatch: pytest.MonkeyPatch, by_torch: bool) -> None:
    convolving, linear = sightings_of(nn.Conv2d(3, 4, 3)), sightings_of(nn.Linear(2, 2))
    assert "cudnn_benchmark" not in convolving.facts(TrainingConfig(), None, ()).reached
    monkeypatch.setattr(sightings, "device_of", lambda _: torch.device("cuda"))
    assert "cudnn_benchmark" in convolving.facts(TrainingConfig(), None, ()).reached
    if by_torch:
        torch.use_deterministic_algorithms(True)
    else:
        torch.backends.cudnn.deterministic = True
    assert "cudnn_benchmark" not in convolving.facts(TrainingConfig(), None, ()).reached
    assert unreached(convolving)["cudnn_benchmark"] == "own_algorithms"
    assert "cudnn_benchmark" not in unreached(linear)


def test_fused_is_noted_if_torch_could_fuse() -> None:
    class Own(torch.optim.SGD):
        pass

    def is_noted(optimizer: torch.optim.Optimizer) -> bool:
        seen = Sightings()
        seen.step(optimizer)
        return "fused" in unreached(seen, seen.observed(TrainingConfig(), None, 1, ()))

    parameters = list(nn.Linear(2, 2).parameters())
    assert is_noted(torch.optim.AdamW(parameters))
    assert not is_noted(torch.optim.AdamW(parameters, fused=True))
    assert not is_noted(torch.optim.RMSprop(parameters))
    assert not is_noted(Own(parameters))


@pytest.mark.parametrize("is_on", [True, False])
def test_step_settings_are_observed(is_on: bool) -> None:
    torch.backends.cudnn.benchmark = is_on
    observed = sightings_of(nn.Linear(2, 2), fused=is_on).observed(TrainingConfig(), None, 1, ())
    assert (observed.cudnn_benchmark, observed.fused) == (is_on, is_on)
