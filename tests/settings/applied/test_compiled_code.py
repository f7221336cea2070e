"""Compiled code of a search is there for the training, and what is not the user's own is not unpickled."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.settings.applied import compiled_code
from autotune.settings.applied.compiled_code import code_file, load_compiled, sealed
from autotune.settings.training_config import TrainingConfig

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files there have no owner to be asked for")

CPU = torch.device("cpu")
CONFIG = TrainingConfig(micro_batch_size=8, compile=True)
TRAINS = """
import sys, torch
from torch import nn
from torch._dynamo.utils import counters
from autotune.settings.training_config import TrainingConfig

config = TrainingConfig(micro_batch_size=8, compile=True)
model = config.prepare(nn.Sequential(nn.Linear(4, 4), nn.GELU()), "cpu", use_kept_code="unused" not in sys.argv)
model(torch.ones(8, 4)).sum().backward()
print(counters["inductor"]["fxgraph_cache_hit"])
if "keep" in sys.argv:
    from autotune.settings.applied.compiled_code import code_file
    from autotune.worker.setup.compile_cache import keep_compiled
    assert keep_compiled(code_file(config, model, torch.device("cpu")))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of compiled code; torch's own folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    (tmp_path / "torch").mkdir()
    return tmp_path / "home" / "autotune" / "compiled"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was handed to torch."""
    found: list[bytes] = []

    def load(content: bytes) -> object:
        found.append(content)
        return object()

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return found


def keep(content: bytes = b"code", config: TrainingConfig = CONFIG) -> Path:
    """The file that a search has kept for a linear layer."""
    file = code_file(config, nn.Linear(2, 2), CPU)
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(sealed(content))
    return file


def test_a_training_finds_what_a_search_has_compiled_though_torchs_own_cache_is_empty(
    tmp_path: Path, cache: Path
) -> None:
    def hits(name: str, *arguments: str) -> int:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name)}
        command = [sys.executable, "-W", "ignore", "-c", TRAINS, *arguments]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert hits("search", "keep") == 0
    assert len(list(cache.iterdir())) == 1
    assert hits("unused", "unused") == 0
    assert hits("training") > 0


def test_it_is_put_into_torchs_folder_once_a_day(cache: Path, loaded: list[bytes]) -> None:
    keep()
    assert load_compiled(CONFIG, nn.Linear(2, 2), CPU)
    assert load_compiled(CONFIG, nn.Linear(2, 2), CPU)
    assert loaded == [b"code"]
    keep(b"of a later search")
    assert load_compiled(CONFIG, nn.Linear(2, 2), CPU)
    assert loaded == [b"code", b"of a later search"]
    (stamp,) = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).iterdir()
    os.utime(stamp, (1, 1))
    assert load_compiled(CONFIG, nn.Linear(2, 2), CPU)
    assert loaded[2:] == [b"of a later search"]


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (CONFIG.model_copy(update={"micro_batch_size": 16}), nn.Linear(2, 2)),
        (CONFIG.model_copy(update={"amp_dtype": "bfloat16"}), nn.Linear(2, 2)),
        (CONFIG, nn.Linear(3, 2)),
        (CONFIG, nn.Bilinear(2, 2, 2)),
        (CONFIG, nn.Linear(2, 2).double()),
        (CONFIG, nn.LazyLinear(2)),
    ],
)
def test_it_is_loaded_for_the_same_settings_and_model_alone(
    cache: Path, loaded: list[bytes], config: TrainingConfig, model: nn.Module
) -> None:
    keep()
    assert not load_compiled(config, model, CPU)
    assert loaded == []


def test_code_of_a_processor_with_other_instructions_is_another_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = code_file(CONFIG, nn.Linear(2, 2), CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX512")
    assert code_file(CONFIG, nn.Linear(2, 2), CPU) != here


@pytest.mark.parametrize("how", ["changed", "cut", "link", "writable", "folder", "another user's"])
def test_what_others_may_have_put_there_is_not_unpickled(
    how: str,
    cache: Path,
    loaded: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = keep()
    if how == "changed":
        file.write_bytes(file.read_bytes() + b"evil")
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:10])
    elif how == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif how == "writable":
        file.chmod(0o620)
    elif how == "folder":
        cache.chmod(0o770)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with caplog.at_level(logging.INFO):
        assert not load_compiled(CONFIG, nn.Linear(2, 2), CPU)
    assert loaded == []
    assert "is not used" in caplog.text


def test_it_is_not_put_where_others_may_have_filled_torchs_folder(
    cache: Path, loaded: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep()
    monkeypatch.setattr(compiled_code, "own_torch_cache", lambda: None)
    assert not load_compiled(CONFIG, nn.Linear(2, 2), CPU)
    assert loaded == []


def test_what_torch_can_not_read_is_compiled_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep()

    def fail(_: bytes) -> None:
        raise RuntimeError("of another version")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", fail)
    assert not load_compiled(CONFIG, nn.Linear(2, 2), CPU)


def test_garbage_that_is_whole_stops_no_training(cache: Path) -> None:
    keep(b"no artifacts of torch's")
    assert not load_compiled(CONFIG, nn.Linear(2, 2), CPU)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
@pytest.mark.parametrize(
    ("config", "is_loaded"),
    [
        (CONFIG, True),
        (CONFIG.model_copy(update={"compile": False}), False),
        (CONFIG.model_copy(update={"strategy": "dp", "world_size": 2}), False),
    ],
)
def test_prepare_loads_it_for_a_compiled_model_in_one_process_alone(
    cache: Path, loaded: list[bytes], config: TrainingConfig, is_loaded: bool
) -> None:
    model = config.arrange(nn.Linear(2, 2), CPU)
    file = code_file(config, model, CPU)
    assert file is not None
    file.parent.mkdir(parents=True)
    file.write_bytes(sealed(b"code"))
    config.prepare(nn.Linear(2, 2), "cpu", use_kept_code=False)
    assert loaded == []
    config.prepare(nn.Linear(2, 2), "cpu")
    assert loaded == ([b"code"] if is_loaded else [])
