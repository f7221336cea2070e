"""The precision guard in a search: one comparison to float32 for each cheaper precision, before a trial of it may win.

Only a precision that leads is compared. Comes in: a configuration. Goes out: the guard's
figures, or why no trial of its precision may win.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.launch.runner import TrialRunner
from autotune.messages.precision import precision_not_compared, precision_refused
from autotune.records.precision_check import guard_key, needs_guard, objection, shortfall
from autotune.records.trial import TrialRecord, TrialResult
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.training_config import TrainingConfig

__all__ = ["PrecisionGuard"]


@dataclass(slots=True)
class PrecisionGuard:
    """The guard's answers so far, by what they depend on."""

    runner: TrialRunner
    baseline: TrainingConfig
    answers: dict[tuple[str, str], TrialResult] = field(default_factory=dict)
    """Figures of each precision that was compared; of one that may not win also outcome and reason."""

    def recall(self, record: TrialRecord) -> None:
        """Take up the answer that a finished trial holds; where the comparison could not run, there is none."""
        was_compared = record.outcome == "diverged" if record.is_refused else record.result.guard is not None
        if was_compared:
            self.answers.setdefault(guard_key(record.config), record.result)

    def known(self, config: TrainingConfig) -> TrialResult | None:
        """Return the answer on a configuration's precision, "ok" where none is needed; None: it must be compared."""
        return self.answers.get(guard_key(config)) if needs_guard(config, self.baseline) else TrialResult(outcome="ok")

    def ask(self, config: TrainingConfig, deadline_s: float) -> TrialResult:
        """Compare a configuration's precision with float32, and return the answer: "ok", or why it may not win."""
        self.answers[guard_key(config)] = answer = self._answer(config, deadline_s)
        return answer

    def _answer(self, config: TrainingConfig, deadline_s: float) -> TrialResult:
        """Compare at the baseline's micro batch, without loader workers."""
        batch = {"micro_batch_size": self.baseline.micro_batch_size, "max_tokens": self.baseline.max_tokens}
        compared = config.model_copy(
            update={**batch, "grad_accum_steps": 1, "num_workers": 0, **NEUTRAL_WITHOUT_WORKERS}
        )
        name = f"guard-{config.amp_dtype}" + ("-compile" if config.compile else "")
        name += f"-{config.compile_mode}" if config.compile_mode != "default" else ""
        report = self.runner.guard(compared, name=name, deadline_s=deadline_s)
        figures, result = report.guard, report.result
        if result.outcome != "ok" or figures is None:
            outcome = "crashed" if result.outcome == "ok" else result.outcome
            reason = str(precision_not_compared(result.reason, result.log))
            return TrialResult(outcome=outcome, reason=reason)
        too_few = shortfall(figures)
        if too_few is not None:
            reason = str(precision_not_compared(too_few, log=None))
            return TrialResult(outcome="timeout", reason=reason, guard=figures)
        against = objection(figures)
        if against is not None:
            reason = str(precision_refused(against))
            return TrialResult(outcome="diverged", reason=reason, guard=figures)
        return TrialResult(outcome="ok", guard=figures)
