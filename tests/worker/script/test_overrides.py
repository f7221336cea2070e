"""Settings really reach a script, those of the training loader alone; and what a script does itself stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config.plan import LoaderSite, ScriptFacts
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.worker.script.overrides import Overrides
from tests.factories.scripts import make_script
from tests.worker.script.scripts import Script, ScriptRig

_SHOWS = """
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SETTINGS = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order", "timeout")
data = TensorDataset(torch.randn(512, 3, 8, 8), torch.arange(512) % 2)
SEEN = {"begun_with": torch.backends.cudnn.benchmark}
torch.backends.cudnn.benchmark = False

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 2)
    def forward(self, x):
        inner = self.conv(x)
        if self.training:
            SEEN["batch"], SEEN["computed"] = len(x), str(inner.dtype)
            SEEN["input_last"] = x.is_contiguous(memory_format=torch.channels_last)
        return self.head(inner.flatten(1))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train = DataLoader(data, batch_size=16, shuffle=True)
validate = DataLoader(data, batch_size=20)
steps = 0
for epoch in range(100000):
    for x, y in train:
        optimizer.zero_grad()
        outputs = model(x)
        nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
        steps += 1
        if steps == 3:
            SEEN["outputs"], SEEN["parameters"] = str(outputs.dtype), str(model.conv.weight.dtype)
            SEEN["weight_last"] = model.conv.weight.is_contiguous(memory_format=torch.channels_last)
            SEEN["threads"], SEEN["benchmark"] = torch.get_num_threads(), torch.backends.cudnn.benchmark
            for name, loader in {"train": train, "validate": validate}.items():
                SEEN[name] = {each: getattr(loader, each) for each in SETTINGS}
                SEEN[name + "_threads"] = getattr(loader.worker_init_fn, "threads", None)
            with torch.no_grad():
                model.eval()
                SEEN["validated"] = str(model(next(iter(validate))[0]).dtype)
                model.train()
            print("SEEN", json.dumps(SEEN), flush=True)
"""
_PLAIN = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory": False,
}
_PLAIN |= {"in_order": True, "timeout": 0}


@pytest.fixture(scope="module")
def shared(fork_server: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> ScriptRig:
    """A rig whose folder the module's tests share."""
    return ScriptRig(launcher=fork_server, folder=tmp_path_factory.mktemp("overrides"))


@pytest.fixture(scope="module")
def probed(shared: ScriptRig) -> Script:
    """The script, probed."""
    return shared.probe(shared.write(_SHOWS))


def seen_with(rig: ScriptRig, probed: Script, **settings: Any) -> dict[str, Any]:
    """What the script has seen of itself in a trial with these settings."""
    rig.measured(probed.words, probed, **settings)
    found: dict[str, Any] = rig.printed()
    return found


KNOWN = LoaderSite(
    file="/train.py",
    line=7,
    code="return DataLoader(data, **kind)",
    dataset="data.Images",
    length=100,
    order="shuffle",
    batch_size=16,
)
IN_ORDER = KNOWN.model_copy(update={"order": ""})


def is_changed(script: ScriptFacts, site: LoaderSite, **changes: Any) -> bool:
    """Whether a loader of such a site gets the searched batch size."""
    overrides = Overrides(TrainingConfig(micro_batch_size=64, lr=0.1), script)
    arguments: dict[str, Any] = {"dataset": [], "batch_size": 16}
    is_searched = overrides.loader(site.model_copy(update=changes), arguments)
    assert is_searched == (arguments["batch_size"] == 64)
    return is_searched


@pytest.mark.parametrize(
    ("known", "changes", "is_known"),
    [
        (KNOWN, {}, True),
        (KNOWN, {"line": 9}, True),  # lines before it were added
        (KNOWN, {"length": 90}, True),  # another fold
        (KNOWN, {"file": "/other.py"}, False),
        (KNOWN, {"code": "train = DataLoader(data, 16, True)"}, False),
        (KNOWN, {"dataset": "data.Texts"}, False),
        (KNOWN, {"order": ""}, False),  # an evaluation's
        (KNOWN, {"batch_size": 20}, False),
        (IN_ORDER, {}, True),
        (IN_ORDER, {"length": 20}, False),  # an evaluation's
    ],
)
def test_loader_is_known_by_place_and_manner(
    known: LoaderSite, changes: dict[str, Any], is_known: bool
) -> None:
    assert is_changed(make_script(loaders=(known,)), known, **changes) is is_known


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [({}, True), ({"batch_size": 20}, False), ({"line": 8}, False), ({"nth": 1}, False)],
)
def test_of_a_place_alone_the_batch_size_must_be_the_observed(
    changes: dict[str, Any], is_known: bool
) -> None:
    script = make_script()
    manner = {"dataset": "data.Images", "length": 100, "order": "shuffle", "batch_size": 16}
    assert is_changed(script, script.loaders[0], **(manner | changes)) is is_known


def test_baseline_changes_nothing(shared: ScriptRig, probed: Script) -> None:
    assert seen_with(shared, probed) == {
        "batch": 16,
        "computed": "torch.float32",
        "input_last": False,
        "weight_last": False,
        "outputs": "torch.float32",
        "parameters": "torch.float32",
        "threads": torch.get_num_threads(),
        "begun_with": False,
        "benchmark": False,
        "train": {"batch_size": 16, **_PLAIN},
        "train_threads": None,
        "validate": {"batch_size": 20, **_PLAIN},
        "validate_threads": None,
        "validated": "torch.float32",
    }


def test_loader_settings_reach_the_training_loader(shared: ScriptRig, probed: Script) -> None:
    settings = {
        "num_workers": 1,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory": True,
        "in_order": False,
    }
    found = seen_with(shared, probed, micro_batch_size=32, worker_threads=1, **settings)
    assert found["train"] == {"batch_size": 32, "timeout": 0, **settings}
    assert (found["train_threads"], found["validate_threads"]) == (1, None)
    assert found["validate"] == {"batch_size": 20, **_PLAIN}
    assert found["batch"] == 32


def test_bfloat16_leaves_parameters_and_outputs(shared: ScriptRig, probed: Script) -> None:
    found = seen_with(shared, probed, amp_dtype="bfloat16")
    kinds = [found[name] for name in ("computed", "outputs", "parameters", "validated")]
    assert kinds == ["torch.bfloat16", "torch.float32", "torch.float32", "torch.float32"]


@pytest.mark.slow
def test_channels_last_and_threads(shared: ScriptRig, probed: Script) -> None:
    threads = torch.get_num_threads() + 1
    found = seen_with(shared, probed, channels_last=True, intra_op_threads=threads)
    assert (found["input_last"], found["weight_last"], found["threads"]) == (True, True, threads)


@pytest.mark.slow
def test_cudnn_benchmark_outlives_the_scripts_own(shared: ScriptRig, probed: Script) -> None:
    """Simulated: where there is no GPU the switch is there, but within reach only by this."""
    script = probed.script.model_copy(
        update={"reached": (*probed.script.reached, "cudnn_benchmark")}
    )
    facts = probed.facts.model_copy(update={"script": script})
    reached = replace(probed, report=probed.report.model_copy(update={"facts": facts}))
    found = seen_with(shared, reached, cudnn_benchmark=True)
    assert (found["begun_with"], found["benchmark"]) == (True, True), (
        "a forward pass comes before the first step"
    )
    assert seen_with(shared, reached)["benchmark"] is False


@pytest.mark.slow
def test_without_workers_their_settings_go(rig: ScriptRig) -> None:
    words = rig.write(
        _SHOWS.replace(
            "train = DataLoader(data, batch_size=16, shuffle=True)",
            "train = DataLoader(data, 16, True, num_workers=1, prefetch_factor=4, persistent_workers=True, timeout=30)",
        )
    )
    probed = rig.probe(words)
    own = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    assert probed.observed.model_dump(include=set(own)) == own
    found = seen_with(rig, probed, num_workers=0, prefetch_factor=None, persistent_workers=False)
    assert found["train"] == {"batch_size": 16, **_PLAIN}


@pytest.mark.slow
def test_unreached_settings_stay(rig: ScriptRig) -> None:
    sampled = "batch_sampler=torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 16, drop_last=True)"
    words = rig.write(_SHOWS.replace("batch_size=16, shuffle=True", sampled))
    probed = rig.probe(words)
    found = seen_with(rig, probed, micro_batch_size=64, num_workers=1, prefetch_factor=2)
    assert (found["batch"], found["train"]["batch_size"], found["train"]["num_workers"]) == (
        16,
        None,
        1,
    )


@pytest.mark.slow
def test_baseline_has_the_placeholders_values(
    rig: ScriptRig,
) -> None:
    words = rig.write(
        """
        import sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]) / 10)
        loader = DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=int(sys.argv[2]) // 2, num_workers=1)
        while True:
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
        """
    )
    command = (
        *words,
        *["{lr}", "{micro_batch_size}", "{amp_dtype}", "{num_workers}", "{prefetch_factor}"],
    )
    given: dict[str, Any] = {
        "lr": 0.5,
        "micro_batch_size": 8,
        "amp_dtype": "bfloat16",
        "num_workers": 2,
        "prefetch_factor": 3,
    }
    assert rig.probe(command, **given).observed.model_dump(include=set(given)) == given


def test_placeholders_carry_settings(rig: ScriptRig) -> None:
    words = rig.write(
        """
        import json, sys, torch
        from torch.utils.data import DataLoader, TensorDataset
        size, lr, steps = int(sys.argv[2]), float(sys.argv[3].split("=")[1]), int(sys.argv[4])
        print("SEEN", json.dumps(sys.argv[1:]))
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        loader = DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=size)
        number = 0
        while True:
            for (x,) in loader:
                (model(x).pow(2).mean() / steps).backward()
                number += 1
                if number % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """
    )
    command = (
        *words,
        *["--batch", "{micro_batch_size}", "--lr={lr}", "{grad_accum_steps}", "{epoch}"],
    )
    probed = rig.probe(command, micro_batch_size=8, lr=0.25, grad_accum_steps=2)
    assert rig.printed(name="probe") == ["--batch", "8", "--lr=0.25", "2", "{epoch}"]
    observed = probed.observed
    assert (observed.micro_batch_size, observed.lr, observed.grad_accum_steps) == (8, 0.25, 2)
    assert probed.script.observed == observed
    rig.measured(command, probed, micro_batch_size=16, lr=0.5, grad_accum_steps=1)
    assert rig.printed() == ["--batch", "16", "--lr=0.5", "1", "{epoch}"]


@pytest.mark.slow
def test_loader_of_an_unknown_place_is_left_alone(
    shared: ScriptRig, probed: Script, tmp_path: Path
) -> None:
    other = ScriptRig(launcher=shared.launcher, folder=tmp_path)
    words = other.write(_SHOWS, "moved.py")
    result = other.trial(words, probed, num_workers=1, prefetch_factor=2)
    assert other.printed()["train"] == {"batch_size": 16, **_PLAIN}
    assert result.outcome in {"ok", "invalid"}
