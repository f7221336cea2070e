"""A neighbour that takes the cores from a trial is told, and a trial's own loader workers are none."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from autotune.apply.cores import usable_cores
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from tests.launch.conftest import GENEROUS_S, rig_over

BURN = "while True: pass"


@pytest.mark.quiet
@pytest.mark.parametrize("has_neighbours", [True, False])
def test_neighbours_load_a_window_and_its_own_loader_workers_do_not(
    fork_server: LocalLauncher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_neighbours: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = rig_over(fork_server, tmp_path).runner()
    with ExitStack() as held:
        for _ in range(usable_cores() if has_neighbours else 0):
            neighbour = held.enter_context(subprocess.Popen([sys.executable, "-c", BURN]))
            held.callback(neighbour.kill)
        config = TrainingConfig(micro_batch_size=4, num_workers=2)
        window = WindowRules(max_s=1.0, precision=1e-9)
        result = runner.run(config, name="trial", deadline_s=GENEROUS_S, window=window)
    assert result.measurement is not None
    load = result.measurement.host_load
    assert load is not None
    assert load.own_s > 0
    assert load.is_loaded == has_neighbours, load
