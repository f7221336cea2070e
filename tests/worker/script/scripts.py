"""A Rig that runs training scripts as trials, and the parts that the scripts of tests are made of."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from autotune.config.plan import ScriptFacts, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.launch.launcher import Launcher
from autotune.launch.runner import TrialRunner
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS, Extras, RankReport
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialResult

__all__ = ["HEAD", "LOADER", "LOOP", "SHORT", "STEP", "Script", "ScriptRig", "cleaned"]

SHORT = WindowRules(max_s=0.4, precision=10.0, block_s=0.01)
"""A window that ends as soon as it may."""
_GENEROUS_S = 100.0
"""A deadline that only a test which is about to fail meets."""

HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(512, 8), torch.arange(512) % 2)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

def step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()

"""
"""A dataset of 512 pairs, a small model, its optimizer and a step."""
STEP = """
for epoch in range(100000):
    for x, y in loader:
        step(x, y)
"""
"""A plain loop over `loader`."""
LOADER = "loader = DataLoader(data, batch_size=16, shuffle=True)\n"
LOOP = HEAD + LOADER + STEP
"""A whole script: a plain loop over batches of 16."""


def cleaned(text: str) -> str:
    """A script as it is to stand in its file."""
    return dedent(text).lstrip("\n")


@dataclass(frozen=True, kw_only=True)
class Script:
    """A command that was probed."""

    words: tuple[str, ...]
    report: RankReport
    log: str = field(repr=False)

    @property
    def facts(self) -> WorkloadFacts:
        """What the probe has found."""
        assert self.report.facts is not None, f"{self.report.result.reason}\n{self.log}"
        return self.report.facts

    @property
    def script(self) -> ScriptFacts:
        """What it has seen of the script."""
        assert self.facts.script is not None
        return self.facts.script

    @property
    def observed(self) -> TrainingConfig:
        """What the script does by itself."""
        return self.script.observed


@dataclass(frozen=True, kw_only=True)
class ScriptRig:
    """Runs commands in a folder, which holds their scripts."""

    launcher: Launcher
    folder: Path

    def write(self, text: str, name: str = "train.py") -> tuple[str, ...]:
        """Write a script; the command that runs it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cleaned(text), encoding="utf-8")
        return (sys.executable, str(path))

    def runner(self, words: tuple[str, ...], script: ScriptFacts | None = None) -> TrialRunner:
        """A runner of a command."""
        return TrialRunner(
            launcher=self.launcher,
            payload=self.folder / "payload",
            scratch=self.folder,
            logs=self.folder,
            device="cpu",
            seed=0,
            command=words,
            script=script,
        )

    def probe(
        self, words: tuple[str, ...], *, deadline_s: float = _GENEROUS_S, **given: Any
    ) -> Script:
        """Take a first look at a command."""
        report = self.runner(words).probe(TrainingConfig(**given), deadline_s=deadline_s)
        return Script(words=words, report=report, log=self.log("probe"))

    def trial(
        self,
        words: tuple[str, ...],
        probed: Script | None = None,
        *,
        window: WindowRules = SHORT,
        extras: Extras = NO_EXTRAS,
        deadline_s: float = _GENEROUS_S,
        **settings: Any,
    ) -> TrialResult:
        """One trial of a command, with settings other than its own."""
        script = None if probed is None else probed.script
        own = {} if script is None else script.observed.model_dump()
        config = TrainingConfig.model_validate(own | settings)
        runner = self.runner(words, script)
        return runner.run(config, name="trial", deadline_s=deadline_s, window=window, extras=extras)

    def measured(
        self, words: tuple[str, ...], probed: Script | None = None, **settings: Any
    ) -> Measurement:
        """The same, which must end well."""
        result = self.trial(words, probed, **settings)
        assert result.measurement is not None, f"{result.reason}\n{self.log()}"
        return result.measurement

    def run(self, text: str, **settings: Any) -> tuple[Script, Measurement]:
        """Probe and measure a script that begins with HEAD and goes on with a text."""
        words = self.write(HEAD + text)
        found = self.probe(words)
        return found, self.measured(words, found, **settings)

    def log(self, name: str = "trial") -> str:
        """What the last process of that name printed."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def printed(self, mark: str = "SEEN ", name: str = "trial") -> Any:
        """The last line of JSON that a script has printed behind a mark."""
        lines = [line for line in self.log(name).splitlines() if line.startswith(mark)]
        assert lines, self.log(name)
        return json.loads(lines[-1].removeprefix(mark))
