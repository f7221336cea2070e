from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from autotune.config.plan import Workload
from autotune.protocol.payload import read_payload, write_payload

CODE = """
class Data:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return helper(index)

def helper(index):
    return index + 1
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that was loaded from a file by hand: no entry of the search path leads to it."""
    path = tmp_path / "loaded_by_hand.py"
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("loaded_by_hand", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_class_of_an_unreachable_module_is_read_in_another_process(
    loaded: ModuleType, tmp_path: Path
) -> None:
    workload = Workload(model=loaded.helper, dataset=loaded.Data())
    write_payload(workload, tmp_path / "payload")
    code = """
import sys
from pathlib import Path
from autotune.protocol.payload import read_payload
workload = read_payload(Path(sys.argv[1]))
print([workload.dataset[1], workload.model(1)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "payload")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [2, 2]


def test_cloudpickles_registry_is_as_before(loaded: ModuleType, tmp_path: Path) -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    write_payload(Workload(model=loaded.helper, dataset=loaded.Data()), tmp_path / "payload")
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_modules_that_can_be_imported_go_by_name(tmp_path: Path) -> None:
    write_payload(Workload(model=json.dumps, dataset=Path()), tmp_path / "payload")
    assert read_payload(tmp_path / "payload").model is json.dumps, "by value it would be a copy"
