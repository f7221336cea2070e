"""TrialRunner: TrainingConfig -> TrialResult. Writes the job, launches its ranks, and reads out how they ended.

Only trials run as groups. What is looked at beside them (guard, curves, stress, probe) runs in one process.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from pydantic import ValidationError

from autotune.launch.group_report import one_report
from autotune.launch.launcher import Exit, Launch, Launcher
from autotune.launch.local.exit_codes import end_of
from autotune.launch.repeat import find_place, go_on
from autotune.note import Note
from autotune.protocol.messages import (
    NO_EXTRAS,
    Extras,
    Job,
    RankReport,
    TrialFolder,
    WindowRules,
    read_model,
    write_model,
)
from autotune.records.diagnosis import Curves
from autotune.records.measurement import Block
from autotune.records.trial import TrialResult
from autotune.settings.training_config import TrainingConfig

__all__ = ["ShouldEnd", "TrialRunner"]

ShouldEnd = Callable[[tuple[Block, ...]], Note | str | None]
"""Given the blocks of a trial so far: why it is to be ended, or None."""

_FAR_ABOVE = 1.2
_RAM_SHARE = 0.95
_PART_BYTES = 64 * 1024
_MOST_BLOCKS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Runs trials of one workload on this machine through a launcher."""

    launcher: Launcher
    payload: Path
    scratch: Path
    logs: Path
    device: str
    seed: int
    limit_bytes: int | None = None
    """Memory limit of a trial; None until the device is known."""
    ram_bytes: int | None = None
    """RAM of this machine; None until it is known."""
    limit_is_ram: bool = False
    """The limit is on the machine's RAM, not on a device's own memory."""
    say: Callable[[Note | str], str] = lambda reason: reason if isinstance(reason, str) else reason.code
    """Words the reason to end a trial; without a wording, its code."""

    def run(
        self,
        config: TrainingConfig,
        *,
        name: str,
        deadline_s: float,
        window: WindowRules,
        extras: Extras = NO_EXTRAS,
        should_end: ShouldEnd | None = None,
    ) -> TrialResult:
        """Measure a configuration. Whatever happens to the trial is an outcome, never an exception.

        `should_end` is given the blocks of the window so far whenever one has come (of a group those of rank 0, taken
        for all ranks). Once it has a reason, the trial is ended and told as pruned, with these blocks.
        """
        more = {"window": window, "extras": extras}
        return self._placed("trial", config, name, deadline_s, should_end=should_end, **more).result

    def probe(self, config: TrainingConfig, *, deadline_s: float) -> RankReport:
        """Look at the workload once: environment and facts, or a result that says what is wrong."""
        return self._placed("probe", _alone(config), "probe", deadline_s)

    def describe(self, *, deadline_s: float) -> RankReport:
        """The machine alone, without a workload."""
        return self._run("describe", TrainingConfig(), "describe", deadline_s)

    def guard(self, config: TrainingConfig, *, name: str, deadline_s: float) -> RankReport:
        """Compare a configuration's precision to float32; `config` carries the batch to compare on."""
        return self._run("guard", _alone(config), name, deadline_s)

    def curves(
        self, config: TrainingConfig, variations: Sequence[TrainingConfig], *, deadline_s: float, extras: Extras
    ) -> RankReport:
        """Measure loader and device alone in variations of a configuration, in another process where one ends early."""
        alone = tuple(map(_alone, variations))

        def run(name: str, left_s: float, known: Curves | None) -> RankReport:
            return self._run("curves", _alone(config), name, left_s, extras=extras, variations=alone, known=known)

        return go_on(run, "curves", deadline_s)

    def stress(self, config: TrainingConfig, *, name: str, deadline_s: float, window: WindowRules) -> RankReport:
        """Train on the largest samples for `window.max_s` seconds."""
        return self._run("stress", _alone(config), name, deadline_s, window=window)

    def limited(self, *, limit_bytes: int, ram_bytes: int, limit_is_ram: bool) -> TrialRunner:
        """A runner that holds trials to these limits."""
        return replace(self, limit_bytes=limit_bytes, ram_bytes=ram_bytes, limit_is_ram=limit_is_ram)

    def _placed(
        self,
        kind: str,
        config: TrainingConfig,
        name: str,
        deadline_s: float,
        *,
        should_end: ShouldEnd | None = None,
        **more: object,
    ) -> RankReport:
        """Run a job, and where it ended by a failure without a true place, once more to find that.

        Not with what follows the window: what fails there is no failure of the job's.
        """
        first = self._run(kind, config, name, deadline_s, should_end=should_end, **more)
        return find_place(
            first,
            deadline_s,
            lambda left_s: self._run(
                kind,
                config,
                f"{name}-blocking",
                left_s,
                should_end=None,
                **{**more, "extras": NO_EXTRAS, "blocks_launches": True},
            ),
        )

    def _run(
        self,
        kind: str,
        config: TrainingConfig,
        name: str,
        deadline_s: float,
        *,
        should_end: ShouldEnd | None = None,
        **more: object,
    ) -> RankReport:
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.scratch.absolute())))
        log = self.logs / f"{name}.log"
        more["rendezvous"] = f"file://{folder.rendezvous}" if config.strategy == "ddp" else None
        stream = None if should_end is None else _BlockStream(folder.blocks, config.process_count, should_end)
        launch = Launch(
            folder=folder,
            log=log,
            deadline_s=deadline_s,
            ranks=config.process_count,
            ram_ceiling_bytes=self._ram_ceiling(),
            should_end=None if stream is None else stream.is_lost,
        )
        try:
            write_model(folder.job, self._job(kind, config, deadline_s, {**more, "streams_blocks": stream is not None}))
            exit_ = self.launcher.launch(launch)
            report = self._report(launch, exit_)
            if stream is not None and exit_.ended_for == "called_off" and report.result.outcome == "pruned":
                report = report.model_copy(update={"result": stream.stopped(self.say)})
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)
        result = report.result.model_copy(update={"wall_s": exit_.wall_s, "log": f"{self.logs.name}/{log.name}"})
        return report.model_copy(update={"result": result})

    def _job(self, kind: str, config: TrainingConfig, deadline_s: float, more: dict[str, object]) -> Job:
        return Job.model_validate(
            {
                "kind": kind,
                "payload": self.payload.absolute(),
                "config": config,
                "device": self.device,
                "seed": self.seed,
                "deadline_s": deadline_s,
                "limit_bytes": self.limit_bytes,
                **more,
                "sys_path": tuple(entry for entry in sys.path if isinstance(entry, str)),
                "working_directory": Path.cwd(),
                "python_path": os.environ.get("PYTHONPATH"),
            }
        )

    def _report(self, launch: Launch, exit_: Exit) -> RankReport:
        """What the trial's ranks have answered, or what their silence means."""
        if len(exit_.codes) <= 1:
            answer = _answered(launch.folder.report, exit_.code)
            return answer or RankReport(result=self._unanswered(exit_, launch.deadline_s))
        answers = [_answered(launch.folder.report_of(rank), code) for rank, code in enumerate(exit_.codes)]
        if exit_.ended_for == "called_off" and None in answers:
            return RankReport(result=self._unanswered(exit_, launch.deadline_s))
        return one_report(
            answers,
            exit_,
            stacks=[_text_of(launch.folder.stack_of(rank)) for rank in range(launch.ranks)],
            deadline_s=launch.deadline_s,
            over_memory=self._too_big(exit_.seen_bytes or 0) if exit_.ended_for == "memory" else None,
        )

    def _unanswered(self, exit_: Exit, deadline_s: float) -> TrialResult:
        """What the end of a process means that has left no report."""
        if exit_.ended_for == "deadline":
            return TrialResult(outcome="timeout", reason=f"the trial did not end within {deadline_s:.0f} s")
        if exit_.ended_for == "called_off":
            return TrialResult(outcome="pruned", reason="the trial was called off")
        if exit_.ended_for == "memory":
            return self._too_big(exit_.seen_bytes or 0)
        return end_of(exit_.code or 0, was_oom_killed=exit_.was_oom_killed)

    def _too_big(self, seen_bytes: int) -> TrialResult:
        limit = self.limit_bytes if self.limit_is_ram and self.limit_bytes else self.ram_bytes or seen_bytes
        reason = (
            f"the trial's processes must stay within {limit / 2**20:,.0f} MiB of RAM, but had taken "
            f"{seen_bytes / 2**20:,.0f} MiB, and were ended"
        )
        return TrialResult(outcome="host_oom", reason=reason, violation=max(0.01, seen_bytes / limit - 1))

    def _ram_ceiling(self) -> int | None:
        """What a trial may have in RAM before it is ended: far above the limit, yet before the kernel acts."""
        if self.ram_bytes is None:
            return None
        most = int(self.ram_bytes * _RAM_SHARE)
        return min(most, int(self.limit_bytes * _FAR_ABOVE)) if self.limit_is_ram and self.limit_bytes else most


@dataclass(slots=True)
class _BlockStream:
    """The blocks of a trial under way, as its rank 0 writes them, and the judge of whether it may go on."""

    path: Path
    ranks: int
    should_end: ShouldEnd
    blocks: list[Block] = field(default_factory=list)
    reason: Note | str | None = None
    _read: int = 0

    def is_lost(self) -> bool:
        """Whether the trial is to be ended; asked many times a second."""
        if self.reason is None and self._take():
            self.reason = self.should_end(tuple(self.blocks))
        return self.reason is not None

    def stopped(self, say: Callable[[Note | str], str]) -> TrialResult:
        """The result of a trial that was ended for it."""
        return TrialResult(outcome="pruned", reason=say(self.reason or ""), blocks=tuple(self.blocks))

    def _take(self) -> bool:
        """Read what has been written since; whether there is more.

        A line that is no block is passed over: a full disk may have cut one off, and the next one goes on in it.
        """
        try:
            whole = self._read_lines()
        except FileNotFoundError:  # the window has not begun, or not anew on another host
            self._read = 0
            self.blocks.clear()
            return False
        except OSError:
            return False
        known = len(self.blocks)
        for line in whole.splitlines():
            with suppress(ValidationError):
                block = Block.model_validate_json(line)
                if block.samples > 0 and 0 < block.seconds < inf and known < _MOST_BLOCKS:
                    self.blocks.append(self._of_all_ranks(block))
        return len(self.blocks) > known

    def _read_lines(self) -> bytes:
        """The whole lines that came since, a part at a time: whatever the user's code writes there is not all taken."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not hold up whoever waits
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            file.seek(self._read)
            data = file.read(_PART_BYTES) or b""
        whole, newline, rest = data.rpartition(b"\n")
        self._read += len(rest) if len(rest) == _PART_BYTES else len(whole) + len(newline)
        return whole

    def _of_all_ranks(self, block: Block) -> Block:
        return block.model_copy(update={"samples": block.samples * self.ranks})


def _alone(config: TrainingConfig) -> TrainingConfig:
    """The same settings in a single process on a single device."""
    if config.strategy == "single":
        return config
    return config.model_copy(update={"strategy": "single", "world_size": 1, "ddp": None})


def _answered(report: Path, code: int | None) -> RankReport | None:
    """The rank's report; a report that was written counts, whatever became of the process afterwards."""
    try:
        return read_model(report, RankReport)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = f"the trial's report can't be read ({type(error).__name__}); its process ended with {code}"
        return RankReport(result=TrialResult(outcome="crashed", reason=reason))


def _text_of(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""
