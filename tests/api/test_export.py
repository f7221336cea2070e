"""`autotune export` of a run folder or a recommended.yaml: for the device that the settings were found on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.api.commands import export_json, export_notes, export_run
from autotune.errors import ConfigError
from autotune.files.recommended import read_recommended, recommended_yaml
from autotune.files.run_folder import RunFolder
from tests.factories import make_script, make_summary

pytestmark = pytest.mark.filterwarnings("ignore:.* was found on another machine:UserWarning")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The run folder of a finished search."""
    found = RunFolder(tmp_path / "run")
    found.path.mkdir()
    summary = make_summary()
    found.recommended.write_text(recommended_yaml(summary))
    found.write_summary(summary)
    return found


def test_a_run_folder_gives_device_and_optimizer_too(folder: RunFolder) -> None:
    content = yaml.safe_load(folder.recommended.read_text())
    config = read_recommended(folder.recommended)
    optimizer = make_summary().facts.optimizer.name
    found = export_run(folder.path, "deepspeed")
    assert found == config.to("deepspeed", device=content["machine"]["device"], optimizer=optimizer)
    assert found.settings["optimizer"]["type"] == optimizer


def test_export_of_a_file_alone(
    folder: RunFolder,
) -> None:
    alone = export_run(folder.recommended, "deepspeed")
    folder.summary.unlink()
    assert export_run(folder.path, "deepspeed") == alone
    assert "optimizer" not in alone.settings


def test_what_was_found_for_a_command_is_exported_alike(folder: RunFolder) -> None:
    before = make_summary()
    facts = before.facts.model_copy(update={"script": make_script()})
    script = before.model_copy(update={"facts": facts, "command": ("python", "train.py")})
    folder.recommended.write_text(recommended_yaml(script))
    assert "command" in yaml.safe_load(folder.recommended.read_text())
    assert export_run(folder.path, "hf").settings["per_device_train_batch_size"] > 0


def test_a_search_on_a_cpu_is_exported_for_a_cpu(folder: RunFolder) -> None:
    content = yaml.safe_load(folder.recommended.read_text())
    content["machine"]["device"] = "cpu"
    folder.recommended.write_text(yaml.safe_dump(content))
    assert export_run(folder.recommended, "hf").settings["use_cpu"] is True


def test_each_thing_that_is_dropped_or_differs_is_a_line(folder: RunFolder) -> None:
    found = export_run(folder.path, "torchrun")
    lines = export_notes(found)
    assert len(lines) == len(found.dropped) + len(found.defaults)
    assert sum(" lr: " in line for line in lines) == 1


def test_the_document_holds_all_of_an_export(folder: RunFolder) -> None:
    found = export_run(folder.path, "lightning")
    document: dict[str, Any] = json.loads(export_json(found))
    assert document["text"] == found.text
    assert document["settings"] == found.settings
    assert {one["setting"] for one in document["dropped"]} == {one.setting for one in found.dropped}
    assert {one["name"] for one in document["defaults"]} == {one.name for one in found.defaults}


def test_a_folder_without_a_recommendation_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recommended\.yaml: "):
        export_run(tmp_path, "hf")
