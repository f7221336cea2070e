"""Training scripts as people write them (tests/scripts; the first line of each says what it stands for).

Each is probed and then measured in one trial of its own settings: its training loader, its batch, its accumulation and
its precision are seen as they are, and its folder and the machine's processes are as before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from tests.factories.scripts import make_script
from tests.worker.script.scripts import SHORT, ScriptRig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMANDS: dict[str, dict[str, Any]] = yaml.safe_load((SCRIPTS / "commands.yaml").read_text())
SEEN: dict[str, dict[str, Any]] = yaml.safe_load((SCRIPTS / "seen.yaml").read_text())
WORKER = {"num_workers": 1, "prefetch_factor": 2}


@pytest.fixture(scope="module")
def rig(fork_server: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> ScriptRig:
    """A rig in whose folder all scripts lie."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    return ScriptRig(launcher=fork_server, folder=folder)


def files_in(folder: Path) -> set[Path]:
    """All files but the trials' logs and what Python compiles."""
    return {
        path
        for path in folder.rglob("*")
        if path.suffix != ".log" and "__pycache__" not in path.parts
    }


_WAITS_BY_SPINNING = "s63_deepspeed.py"
"""DeepSpeed's ranks on CPUs wait for each other in a loop: beside any other program they hardly come to a step."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.quiet if name == _WAITS_BY_SPINNING else ())
        for name in SEEN
        if not name.startswith(".")
    ],
)
def test_script_is_seen_and_leaves_nothing(
    rig: ScriptRig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, started = SEEN[name], COMMANDS.get(name, {})
    expected, kept = dict(seen.get("own", {})), set(seen.get("kept", ()))
    if "needs" in started and find_spec(started["needs"]) is None:
        pytest.skip(f"{started['needs']} is not installed")
    monkeypatch.chdir(rig.folder / started.get("folder", ""))
    before = files_in(rig.folder)
    words = started.get("command", f"python {name}").split()
    probed = rig.probe(tuple(words), deadline_s=seen.get("deadline_s", 100.0))
    defaults = TrainingConfig().model_dump()
    own = {
        key: value for key, value in probed.observed.model_dump().items() if value != defaults[key]
    }
    # Where tests run in parallel, what the script asks for is what it has.
    if torch.get_num_threads() == 1:
        expected.pop("intra_op_threads", None)
        kept.discard("intra_op_threads")
    assert own == pytest.approx(expected)
    places = [(Path(site.file).name, site.line) for site in probed.script.loaders]
    file = seen.get("file", name.partition(" ")[0])
    assert places[-1:] == ([] if seen["line"] is None else [(file, seen["line"])])
    assert not kept & set(probed.script.reached)
    result = rig.trial(probed.words, probed, window=SHORT)
    assert result.outcome == "ok", result.reason
    assert files_in(rig.folder) == before
    assert children_with(name) == []


def children_with(word: str) -> list[psutil.Process]:
    """Living processes below this one whose command line has a word."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found


def autotune(
    words: str, folder: Path, arguments: Sequence[str] = (), *, held: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """A command of autotune, as it ended."""
    command = [*held, sys.executable, "-m", "autotune", *words.split(), *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )


@dataclass(frozen=True)
class Applied:
    """A script that is run to its end under `autotune apply`."""

    line: int
    settings: dict[str, Any]
    printed: list[str]
    """All that it prints, and nothing of it otherwise than it would be without autotune but for the settings."""
    arguments: tuple[str, ...] = ()
    own: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    """How its loader is made; else its place alone is known."""
    removed: str = ""
    """Text that was taken out of it since it was searched."""
    code: int = 0


APPLIED = {
    "s38_jit_end.py": Applied(
        7,
        {"amp_dtype": "bfloat16"},
        ["save ok", "script ok", "trace ok", "export ok", "compile ok", "fx ok"],
        arguments=("2",),
    ),
    "s46_dataset_per_epoch_apply.py": Applied(
        12,
        {"micro_batch_size": 128, **WORKER},
        [f"epoch {epoch} batch 128 workers 1 steps 25" for epoch in range(3)],
        arguments=("3", "3200"),
        loader={"dataset": "__main__.D", "length": 3200, "order": "shuffle", "batch_size": 32},
    ),
    "s54_persistent_second_iter.py": Applied(
        6,
        {"persistent_workers": True},
        [f"epoch {epoch} steps 20 persistent True" for epoch in range(2)],
        own=WORKER,
    ),
    "s55_set_epoch.py": Applied(
        10,
        {"persistent_workers": True},
        [f"epoch {epoch} the workers' dataset is at epoch {{{epoch}}}" for epoch in range(3)],
        own=WORKER,
    ),
    "s82_helper_process.py": Applied(
        25,
        {"micro_batch_size": 64},
        ["epoch 0 batch 64", "probe ended", "epoch 1 batch 64", "probe ended"],
        arguments=("2",),
    ),
    "s60_moved_line.py": Applied(6, {"micro_batch_size": 256}, ["train batch 256 val batch 16"]),
    "s60_moved_line.py, moved": Applied(
        6, {"micro_batch_size": 256}, [], removed="A = 1  # a line that is later removed\n", code=2
    ),
}


@pytest.mark.parametrize("name", APPLIED)
def test_script_under_apply(name: str, tmp_path: Path) -> None:
    applied, script = APPLIED[name], tmp_path / name.partition(",")[0]
    script.write_text((SCRIPTS / script.name).read_text().replace(applied.removed or "\0", ""))
    observed = TrainingConfig.model_validate({"micro_batch_size": 32, "lr": 0.1, **applied.own})
    loader = {"file": str(script), "line": applied.line, **applied.loader}
    facts = make_script(observed=observed, loaders=[loader], reached=[*applied.settings])
    found = {
        "format": 1,
        "settings": observed.model_copy(update=applied.settings).model_dump(),
        "command": ["python", script.name],
        "script": facts.model_dump(mode="json", exclude={"unreached", "modules", "new_files"}),
    }
    (tmp_path / "recommended.yaml").write_text(yaml.safe_dump(found))
    done = autotune(f"apply recommended.yaml -- python {script.name}", tmp_path, applied.arguments)
    assert done.returncode == applied.code, done.stderr
    assert done.stdout.splitlines() == applied.printed


def test_read_only_folder_can_be_diagnosed(
    tmp_path: Path,
) -> None:
    """As an ordinary user has it in another's folder; the user root is held to a folder's mode by `setpriv` alone."""
    held = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if held and shutil.which(held[0]) is None:
        pytest.skip("root may write to any folder")
    folder = tmp_path / "theirs"
    folder.mkdir()
    shutil.copy(SCRIPTS / "s79_read_only.py", folder)
    folder.chmod(0o555)
    looked, searched = (
        autotune(f"{name} --set budget.timeout_s=20 -- python s79_read_only.py", folder, held=held)
        for name in ("diagnose", "run")
    )
    assert looked.returncode == 0, looked.stderr
    assert "samples/s" in looked.stdout
    assert (searched.returncode, searched.stderr.count("run_dir")) == (2, 1)
    assert [path.name for path in folder.iterdir()] == ["s79_read_only.py"]
