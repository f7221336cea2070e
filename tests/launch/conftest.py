"""The launchers, and a Rig that runs user code through one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.config.plan import Ref, Workload
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.launch.runner import ShouldEnd, TrialRunner
from autotune.policy import POLICY, Policy, WindowRules
from autotune.protocol.messages import NO_EXTRAS, Extras
from autotune.protocol.payload import write_payload
from autotune.records.measurement import MemoryLimits
from autotune.records.trial import TrialResult
from tests.processes import marked

USER_CODE = Path(__file__).with_name("user_code.py")
USER_RANKS = Path(__file__).with_name("user_ranks.py")
SHORT = WindowRules(max_s=0.2, precision=10.0, block_s=0.01)
"""A window that ends as soon as it may."""
GENEROUS_S = 100.0
"""A deadline that only a test which is about to fail meets."""
TWO_RANKS: dict[str, Any] = {"strategy": "ddp", "world_size": 2}

forked_first = pytest.mark.parametrize(
    "any_launcher",
    ["fork server", pytest.param("fresh interpreter", marks=pytest.mark.slow)],
    indirect=True,
)
"""Marks a test of each launcher in turn whose second half, which starts interpreters for seconds, is slow."""


@dataclass(frozen=True, kw_only=True)
class Rig:
    """Runs trials of workloads from user_code.py."""

    launcher: LocalLauncher
    folder: Path
    policy: Policy = POLICY

    def runner(self, **parts: Any) -> TrialRunner:
        """A runner of a workload; a part given as a string names something in user_code.py."""
        named = {"model": "linear", "dataset": "pairs"} | parts
        resolved: dict[str, Any] = {
            name: in_user_code(part) if isinstance(part, str) else part
            for name, part in named.items()
        }
        write_payload(Workload(**resolved), self.folder / "payload")
        return TrialRunner(
            launcher=self.launcher,
            payload=self.folder / "payload",
            scratch=self.folder,
            logs=self.folder,
            device="cpu",
            seed=0,
            policy=self.policy,
        )

    def with_ending(self, **changes: float) -> Rig:
        """The same, with other patience before what still runs of a trial is ended."""
        return replace(self, policy=replace(POLICY, ending=replace(POLICY.ending, **changes)))

    def run(
        self,
        *,
        deadline_s: float = GENEROUS_S,
        settings: dict[str, Any] | None = None,
        **parts: Any,
    ) -> TrialResult:
        """One trial of a workload, of batches of four."""
        config = TrainingConfig(**({"micro_batch_size": 4} | (settings or {})))
        return self.runner(**parts).run(config, name="trial", deadline_s=deadline_s, window=SHORT)

    def run_limited(
        self, limit_bytes: int, *, settings: dict[str, Any] | None = None, **parts: Any
    ) -> TrialResult:
        """One trial that may not have much more RAM than that."""
        limits = MemoryLimits(limit_bytes=limit_bytes, ram_bytes=2**36, limit_is_ram=True)
        runner = replace(self.runner(**parts), limits=limits)
        config = TrainingConfig(**({"micro_batch_size": 4} | (settings or {})))
        return runner.run(config, name="trial", deadline_s=GENEROUS_S, window=SHORT)

    def run_group(
        self,
        model: str,
        *,
        dataset: str | None = None,
        deadline_s: float = GENEROUS_S,
        window: WindowRules = SHORT,
        extras: Extras = NO_EXTRAS,
        should_end: ShouldEnd | None = None,
        **settings: Any,
    ) -> TrialResult:
        """One trial of two ranks that train a model of user_ranks.py, on pairs or on a dataset from there."""
        parts = {"model": in_user_ranks(model)} | (
            {} if dataset is None else {"dataset": in_user_ranks(dataset)}
        )
        return self.runner(**parts).run(
            TrainingConfig(**({"micro_batch_size": 4} | TWO_RANKS | settings)),
            name="trial",
            deadline_s=deadline_s,
            window=window,
            extras=extras,
            should_end=should_end,
        )

    @property
    def log(self) -> bytes:
        """What the last trial printed."""
        return (self.folder / "trial.log").read_bytes()

    def note(self, name: str = "note") -> str:
        """What the user's code has written down about itself, in the file that `NOTE` names."""
        return (self.folder / name).read_text()

    def assert_next_trial_works(self) -> None:
        """An ordinary model trains a step in a new process, and nothing but a fork server is left of any."""
        report = self.runner().probe(TrainingConfig(micro_batch_size=4), deadline_s=GENEROUS_S)
        assert report.result.outcome == "ok", report.result.reason
        assert report.facts is not None
        assert not self.left_over()

    def left_over(self) -> list[str]:
        """Command lines of living processes that carry the launcher's token, its server apart."""
        server = self.server_pid
        return [
            " ".join(one.cmdline()) for one in marked(self.launcher._token) if one.pid != server
        ]

    @property
    def server_pid(self) -> int | None:
        """The fork server's process; None where there is none."""
        server = getattr(self.launcher, "_server", None)
        return None if server is None else int(server.process.pid)


@contextmanager
def sharing(launcher: LocalLauncher, from_s: float = 0.0) -> Iterator[None]:
    """Have a launcher's trials share a process meanwhile; nothing of it may be left."""
    launcher._shared_from_s = from_s
    launcher._is_decided = False
    launcher._tries_again = True
    launcher._false_failures = 0
    launcher.is_sharing = True
    yield
    launcher.end_shared()
    server = launcher._server
    spared = None if server is None else server.process.pid
    assert [one.pid for one in marked(launcher._token) if one.pid != spared] == []
    launcher.is_sharing = False
    launcher.notes = ()


def in_user_code(name: str) -> Ref:
    """A reference to something in user_code.py."""
    return Ref(target=f"{USER_CODE}:{name}")


def in_user_ranks(name: str) -> Ref:
    """A reference to something in user_ranks.py."""
    return Ref(target=f"{USER_RANKS}:{name}")


def rig_over(launcher: LocalLauncher, folder: Path) -> Rig:
    """A rig whose trials write to a folder."""
    (folder / "payload").mkdir(parents=True)
    return Rig(launcher=launcher, folder=folder)


@pytest.fixture(scope="session", params=["fork server", "fresh interpreter"])
def any_launcher(request: pytest.FixtureRequest) -> LocalLauncher:
    """Each launcher in turn."""
    if request.param == "fork server":
        launcher: LocalLauncher = request.getfixturevalue("fork_server")
        return launcher
    return LocalLauncher(None)


@pytest.fixture
def rig(fork_server: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig over the fork server, for what does not depend on the launcher."""
    monkeypatch.chdir(tmp_path)  # where user code leaves its notes
    return rig_over(fork_server, tmp_path)


@pytest.fixture
def any_rig(any_launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig over each launcher in turn."""
    monkeypatch.chdir(tmp_path)
    return rig_over(any_launcher, tmp_path)
