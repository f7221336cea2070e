"""A training run to its end with recommended settings: they are put in, and nothing else is done to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.api.commands import applied, apply_command
from autotune.apply.cores import compile_cache_variables
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.launch.local import LocalLauncher
from autotune.protocol.attach import ATTACH_VARIABLE
from tests.factories import make_script
from tests.worker.script.scripts import Script, ScriptRig

_SCRIPT = """
import atexit, json, os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NAMES = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
epochs, lr = int(sys.argv[1]), float(sys.argv[2].removeprefix("--lr="))
data = TensorDataset(torch.randn(256, 8), torch.arange(256) % 2)
computed = set()

class Net(nn.Linear):
    def forward(self, x):
        found = super().forward(x)
        computed.add(str(found.dtype))
        return found

model = Net(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
train = DataLoader(data, batch_size=16, shuffle=True)
validate = DataLoader(data, batch_size=20)
atexit.register(lambda: Path("at-exit.txt").write_text("written"))
steps = 0
for epoch in range(epochs):
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        steps += 1
Path("last.pt").write_text("of this training")
Path("seen.json").write_text(json.dumps({
    "train": {name: getattr(train, name) for name in NAMES},
    "validate": validate.batch_size, "steps": steps, "lr": lr, "computed": sorted(computed),
    "outputs": str(model(x).dtype), "wandb": os.environ.get("WANDB_MODE"),
}))
sys.exit(7)
"""
_SETTINGS: dict[str, Any] = {
    "num_workers": 1,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory": False,
    "in_order": False,
}


@pytest.fixture(scope="module")
def probed(fork_server: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> Script:
    """The script, as a search has seen it."""
    rig = ScriptRig(launcher=fork_server, folder=tmp_path_factory.mktemp("apply"))
    return rig.probe((*rig.write(_SCRIPT), "100000", "--lr={lr}"), lr=0.1)


def recommended(folder: Path, probed: Script | None = None, **settings: Any) -> Path:
    """A file of recommended settings."""
    script = make_script() if probed is None else probed.script
    config = TrainingConfig.model_validate(script.observed.model_dump() | settings)
    content = {
        "format": 1,
        "settings": config.model_dump(),
        "command": ["python", "train.py"] if probed is None else list(probed.words),
        "script": script.model_dump(mode="json", exclude={"unreached", "modules", "new_files"}),
        "malloc": ["MALLOC_TRIM_THRESHOLD_=1000000"],
    }
    path = folder / "recommended.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_the_training_runs_to_its_end_with_exactly_the_settings(
    probed: Script, tmp_path: Path
) -> None:
    found = recommended(
        tmp_path, probed, micro_batch_size=32, amp_dtype="bfloat16", lr=0.25, **_SETTINGS
    )
    (tmp_path / "last.pt").write_text("of an earlier training")
    command = [
        sys.executable,
        "-m",
        "autotune",
        "apply",
        str(found),
        "--",
        *probed.words[:2],
        "3",
        "--lr={lr}",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == {
        "train": {"batch_size": 32, **_SETTINGS},
        "validate": 20,
        "steps": 3 * 256 // 32,
        "lr": 0.25,
        "computed": ["torch.bfloat16"],
        "outputs": "torch.float32",
        "wandb": None,
    }
    assert (tmp_path / "at-exit.txt").read_text() == "written"
    assert (tmp_path / "last.pt").read_text() == "of this training"
    assert done.stderr.count("autotune: ") == 2, "that it starts, and which loader has the settings"


def test_without_a_placeholder_that_was_searched_nothing_is_started(
    probed: Script, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"\{lr\}.*train.py 100000 '--lr=\{lr\}'$"):
        applied(recommended(tmp_path, probed), [sys.executable, "train.py", "3", "--lr=0.1"])


def test_what_is_started_is_ended_by_a_closed_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores SIGPIPE, and what it becomes would go on ignoring it."""
    seen: list[object] = []
    before = signal.getsignal(signal.SIGPIPE)
    monkeypatch.setattr(os, "execvpe", lambda *_: seen.append(signal.getsignal(signal.SIGPIPE)))
    try:
        apply_command(recommended(tmp_path), ["python", "train.py"])
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert seen == [signal.SIG_DFL]


@pytest.mark.parametrize(
    "switch",
    [
        "LD_PRELOAD=evil.so",
        "MALLOC_TRIM_THRESHOLD_=1\nLD_PRELOAD=evil.so",
        "MALLOC_CHECK_=3",
        "PATH",
    ],
)
def test_a_file_sets_no_variables_but_those_of_malloc(switch: str, tmp_path: Path) -> None:
    path = recommended(tmp_path)
    path.write_text(
        yaml.safe_dump({**yaml.safe_load(path.read_text()), "malloc": [switch]}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="malloc"):
        applied(path, ["python", "train.py"])


def test_another_file_is_told_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "autotune.yaml").write_text(
        "workload: {command: python train.py}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="format"):
        applied(tmp_path / "autotune.yaml", ["python", "train.py"])


@pytest.mark.slow
def test_a_training_lets_go_of_loaders_and_modules_as_ever(probed: Script, tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text(
        """
import gc, json, weakref, torch
from torch.utils.data import DataLoader
held = []
for fold in range(3):
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.zeros(8, 1), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters())
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    held += [weakref.ref(model), weakref.ref(loader)]
del model, loader, optimizer
gc.collect()
gone = [ref() is None for ref in held]
print(json.dumps({"gone": gone, "call": torch.nn.Module.__call__.__module__}))
""",
        encoding="utf-8",
    )
    found = recommended(tmp_path, probed, intra_op_threads=1)
    words, variables = applied(found, [sys.executable, str(tmp_path / "moved.py"), "--lr={lr}"])
    done = subprocess.run(
        words,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"gone": [True] * 6, "call": "torch.nn.modules.module"}


def test_what_is_started_has_the_settings_and_the_allocators_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    path = recommended(tmp_path, lr=0.5)
    words, variables = applied(path, ["bash", "run.sh", "{lr}", "{epoch}"])
    assert words == ("bash", "run.sh", "0.5", "{epoch}")
    assert variables["MALLOC_TRIM_THRESHOLD_"] == "1000000"
    told = json.loads(variables[ATTACH_VARIABLE])
    assert TrainingConfig.model_validate(told["config"]).lr == 0.5
    assert "folder" not in told
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    assert "MALLOC_TRIM_THRESHOLD_" not in applied(path, ["bash", "run.sh"])[1]


def test_the_training_compiles_where_its_search_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    path = recommended(tmp_path)
    assert compile_cache_variables().items() <= applied(path, ["bash", "run.sh"])[1].items()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert "TORCHINDUCTOR_CACHE_DIR" not in applied(path, ["bash", "run.sh"])[1]


def test_a_run_folder_stands_for_its_recommendation(tmp_path: Path) -> None:
    recommended(tmp_path, lr=0.5)
    assert applied(tmp_path, ["bash", "{lr}"])[0] == ("bash", "0.5")


def test_what_would_be_started_can_be_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply_command(recommended(tmp_path), ["bash", "-c", "echo $AUTOTUNE_ATTACH"], only_print=True)
    printed = capsys.readouterr().out
    assert printed.startswith("env ")
    done = subprocess.run(
        ["bash", "-c", printed], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["script"]["framework"] == "plain loop"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["no-such-program-at-all"], "'no-such-program-at-all'"),
        (["python", "-I", "train.py"], "-I"),
        ([], "command"),
    ],
)
def test_a_command_that_can_not_be_used_is_refused(
    tmp_path: Path, command: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        apply_command(recommended(tmp_path), command)


def test_a_file_that_was_found_for_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recommended.yaml"
    path.write_text(
        yaml.safe_dump({"format": 1, "settings": TrainingConfig().model_dump()}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"autotune\.load"):
        applied(path, ["python", "train.py"])
