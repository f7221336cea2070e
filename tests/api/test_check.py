"""What `check` and `env` find out, and what a user must know before a search begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autotune
from autotune.api.commands import check_plan, environment
from autotune.errors import ConfigError, LauncherError
from autotune.files.plan_file import parse_plan
from autotune.launch.local import LocalLauncher
from autotune.messages.space import default_optimizer
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import RankReport
from autotune.testing import FakeLauncher


@pytest.mark.parametrize("function", [autotune.search, autotune.diagnose])
def test_unknown_device_is_refused(
    function: Any,
) -> None:
    launcher = FakeLauncher()
    with pytest.raises(ConfigError, match=r"^device: .*'gpu'$"):
        function(object, list, device="gpu", launcher=launcher, progress=False)
    with pytest.raises(ConfigError, match=r"^device: .*'gpu'$"):
        environment("gpu")
    assert launcher.jobs == []


class Undescribable(FakeLauncher):
    """A machine on which the process that is to describe it fails."""

    def launch(self, launch: Any) -> Any:
        exit_ = super().launch(launch)
        report = read_model(launch.folder.report, RankReport)
        result = report.result.model_copy(update={"outcome": "crashed", "reason": "no torch"})
        write_model(
            launch.folder.report, report.model_copy(update={"environment": None, "result": result})
        )
        return exit_


def test_a_machine_that_can_not_be_described_is_no_wrong_usage() -> None:
    with pytest.raises(LauncherError, match="no torch") as caught:
        environment(launcher=Undescribable())
    assert caught.value.exit_code == 1


# The default optimizer

SIZES = (16, 4)
STATE = default_optimizer(trainable_parameters=68, adam_bytes=8 * 68)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, targets)


def workload() -> tuple[torch.nn.Module, torch.utils.data.Dataset[Any]]:
    """A model with 68 trainable parameters and 3 frozen ones."""
    model = torch.nn.Linear(*SIZES)
    model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    return model, torch.utils.data.TensorDataset(
        torch.zeros(64, SIZES[0]), torch.zeros(64, SIZES[1])
    )


@pytest.mark.slow
def test_default_optimizer_is_noted_first(
    tmp_path: Path, fork_server: LocalLauncher, capfd: pytest.CaptureFixture[str]
) -> None:
    options: Any = {
        "loss": loss,
        "device": "cpu",
        "baseline": {"micro_batch_size": 8},
        "n_trials": 1,
        "timeout_s": 8,
    }
    result = autotune.search(
        *workload(), run_dir=tmp_path / "run", progress=True, launcher=fork_server, **options
    )
    shown = capfd.readouterr().err
    lines = " ".join(shown.split())
    assert lines.count(STATE.text) == 1
    assert lines.index(STATE.text) < lines.index("Searching:")
    assert result.summary.facts.trainable_parameter_count == 68
    assert STATE in result.summary.notes
    assert STATE.text in result.report().replace("\\", "")


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_check_and_diagnose_say_it_too_unless_an_optimizer_is_given(
    optimizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = FakeLauncher().facts.model_copy(update={"trainable_parameter_count": 68})
    plan = parse_plan(
        {"workload": {"model": object, "dataset": list, "optimizer": optimizer}}, name="x"
    )
    checked = check_plan(plan, launcher=FakeLauncher(facts=facts)).space.notes
    options: Any = {"launcher": FakeLauncher(facts=facts), "progress": True}
    diagnosed = autotune.diagnose(object, list, optimizer=optimizer, **options).diagnosis.notes
    said = "No optimizer was given" in capsys.readouterr().err
    assert (STATE in checked, STATE in diagnosed, said) == (optimizer is None,) * 3
