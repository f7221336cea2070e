"""What `check` and `env` find out, over the fake launcher."""

from __future__ import annotations

from typing import Any

import pytest

import autotune
from autotune.api.check import environment
from autotune.errors import ConfigError, LauncherError
from autotune.protocol.messages import RankReport, read_model, write_model
from autotune.testing import FakeLauncher


@pytest.mark.parametrize("function", [autotune.search, autotune.diagnose])
def test_a_device_that_torch_does_not_know_is_the_callers_error_before_anything_starts(function: Any) -> None:
    launcher = FakeLauncher()
    with pytest.raises(ConfigError, match=r"^device: must be auto, cpu, .* but got 'gpu'$"):
        function(object, list, device="gpu", launcher=launcher, progress=False)
    with pytest.raises(ConfigError, match=r"^device: must be auto, cpu, .* but got 'gpu'$"):
        environment("gpu")
    assert launcher.jobs == []


class Undescribable(FakeLauncher):
    """A machine on which the process that is to describe it fails."""

    def launch(self, launch: Any) -> Any:
        exit_ = super().launch(launch)
        report = read_model(launch.folder.report, RankReport)
        result = report.result.model_copy(update={"outcome": "crashed", "reason": "torch can't be imported"})
        write_model(launch.folder.report, report.model_copy(update={"environment": None, "result": result}))
        return exit_


def test_a_machine_that_can_not_be_described_is_no_wrong_usage() -> None:
    with pytest.raises(LauncherError, match="describe this machine .* torch can't be imported; ") as caught:
        environment(launcher=Undescribable())
    assert caught.value.exit_code == 1
