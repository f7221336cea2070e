"""The precision guard in a search: one comparison to float32 for each cheaper precision, before a trial of it may win.

Comes in: the result of a trial that ran well. Goes out: the same with the guard's figures, or as one that may not win:
its measurement stays, its outcome and reason are the guard's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from autotune.launch.runner import TrialRunner
from autotune.records.precision_check import guard_key, needs_guard, objection, shortfall
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.search_space import SettingValue
from autotune.settings.training_config import TrainingConfig

__all__ = ["PrecisionGuard", "guarded_settings"]


@dataclass(slots=True)
class PrecisionGuard:
    """The guard's answers so far, by what they depend on. Trials may ask from several threads."""

    runner: TrialRunner
    baseline: TrainingConfig
    passed: set[tuple[str, bool]] = field(default_factory=set)
    refusals: dict[tuple[str, bool], TrialResult] = field(default_factory=dict)
    """Outcome, reason and figures for each precision that may not win."""
    _under_way: dict[tuple[str, bool], Lock] = field(default_factory=dict)
    """Held while a precision is compared: trials of it that end meanwhile wait for the answer."""

    def recall(self, record: TrialRecord) -> None:
        """Take up the answer that a finished trial holds; where the comparison could not run, there is none."""
        if record.is_refused:
            if record.outcome == "diverged":
                self.refusals.setdefault(guard_key(record.config), record.result)
        elif record.result.guard is not None:
            self.passed.add(guard_key(record.config))

    def judge(self, config: TrainingConfig, result: TrialResult, deadline_s: Callable[[], float]) -> TrialResult:
        """A trial's result after the guard; only the first trial of a precision is compared, and keeps the figures.

        The deadline is asked for when a comparison begins.
        """
        if result.outcome != "ok" or not needs_guard(config, self.baseline):
            return result
        key = guard_key(config)
        with self._under_way.setdefault(key, Lock()):
            if key not in self.passed and key not in self.refusals:
                answer = self._answer(config, deadline_s())
                if answer.outcome == "ok":
                    self.passed.add(key)
                    return result.model_copy(update={"guard": answer.guard})
                self.refusals[key] = answer
        if key in self.passed:
            return result
        refusal = self.refusals[key]
        return result.model_copy(update={"outcome": refusal.outcome, "reason": refusal.reason, "guard": refusal.guard})

    def _answer(self, config: TrainingConfig, deadline_s: float) -> TrialResult:
        """Compare at the baseline's micro batch, without loader workers."""
        compared = config.model_copy(
            update={
                "micro_batch_size": self.baseline.micro_batch_size,
                "grad_accum_steps": 1,
                "num_workers": 0,
                **NEUTRAL_WITHOUT_WORKERS,
            }
        )
        name = "-".join(["guard", config.amp_dtype, *(["compile"] if config.compile else [])])
        report = self.runner.guard(compared, name=name, deadline_s=deadline_s)
        figures, result = report.guard, report.result
        if result.outcome != "ok" or figures is None:
            outcome = "crashed" if result.outcome == "ok" else result.outcome
            reason = f"precision guard could not run: {result.reason or 'no figures came'} (log: {result.log})"
            return TrialResult(outcome=outcome, reason=reason)
        too_few = shortfall(figures)
        if too_few is not None:
            return TrialResult(outcome="timeout", reason=f"precision guard could not run: {too_few}", guard=figures)
        against = objection(figures)
        if against is not None:
            return TrialResult(outcome="diverged", reason=f"precision guard: {against}", guard=figures)
        return TrialResult(outcome="ok", guard=figures)


def guarded_settings(config: TrainingConfig) -> dict[str, SettingValue]:
    """The settings that the guard's answer depends on, with their values."""
    dtype, is_compiled = guard_key(config)
    return {"amp_dtype": dtype, "compile": is_compiled}
