"""What failures mean: the user's own code is broken, or one value of a setting does not work with it.

Comes in: the records of trials as they end. Goes out: notes of the values that the study leaves out from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.errors import RepeatedFailureError, WorkloadError
from autotune.messages.search import setting_left_out
from autotune.note import Note
from autotune.records.trial import TrialRecord
from autotune.settings.search_space import SettingValue
from autotune.settings.training_config import TrainingConfig
from autotune.space.resolved_space import ResolvedSpace, setting_of
from autotune.study.proposals import explaining_setting
from autotune.study.study import Study

__all__ = ["FailureAttribution"]

_OF_THE_STEP = ("micro_batch_size", "amp_dtype", "channels_last", "intra_op_threads", "num_workers")


@dataclass(slots=True)
class FailureAttribution:
    """The failures of a search so far."""

    failures: dict[str, list[TrialRecord]] = field(default_factory=dict)
    left_out: list[tuple[str, frozenset[SettingValue]]] = field(default_factory=list)
    """Settings with values that were left out for their failures."""

    def learn(self, record: TrialRecord, study: Study) -> list[Note]:
        """Stop at the user's own failure in the baseline, or leave out a value that fails again and again.

        Raises:
            WorkloadError: the user's code fails in the baseline.
            RepeatedFailureError: the same exception ended three configurations, and no one setting explains it.
        """
        failure = record.result.failure
        if record.number == 0 and record.outcome in {"crashed", "invalid"}:
            raise WorkloadError(
                f"the workload must train in your own configuration, but the baseline ended: {record.reason} "
                f"(log: {record.result.log})",
                remote_traceback=failure.traceback if failure is not None else "",
            )
        if record.outcome != "invalid" and (failure is None or record.outcome == "timeout"):
            return []  # to hang is no exception of the user's
        if failure is not None and failure.is_asynchronous:  # its place means nothing, nor does that of another
            return []
        if any(setting_of(record.config, name) in values for name, values in self.left_out):
            return []  # it was under way when that was left out
        same = self.failures.setdefault(record.reason if failure is None else failure.signature, [])
        same.append(record)
        same_failures = study.space.policy.trials.same_failures
        if len(same) < same_failures:
            return []
        succeeded = [other.config for other in study.records if other.measurement is not None]
        explanation = explaining_setting([other.config for other in same], succeeded)
        if explanation is None and study.space.facts.script is not None:
            explanation = _shared_change([other.config for other in same], succeeded, study.space)
        if explanation is None:
            if failure is None:  # no exception: what this workload can't be measured with, in several settings
                return []
            raise RepeatedFailureError(
                f"the same exception at the same place ended {same_failures} configurations: {record.reason} "
                f"(logs: {', '.join(str(other.result.log) for other in same)})\n\n{failure.traceback}"
            )
        setting, values = explanation
        study.leave_out({setting: values})
        self.left_out.append(explanation)
        same.clear()
        listed = sorted(map(str, values))
        return [setting_left_out(setting, values=listed, failures=same_failures, reason=record.reason)]


def _shared_change(
    failed: Sequence[TrainingConfig], succeeded: Sequence[TrainingConfig], space: ResolvedSpace
) -> tuple[str, frozenset[SettingValue]] | None:
    """A setting in which all of some configurations differ from the baseline, with its values.

    A script that breaks under a setting loses that setting, not the search. Of several such settings one is blamed
    whose values no success has; then the one that reaches furthest into the training: what a model computes with, then
    how its batches come.
    """
    good, changed = [space.baseline, *succeeded], list[tuple[str, frozenset[SettingValue]]]()
    for name in dict.fromkeys((*_OF_THE_STEP, *sorted(space.parameters))):
        values = frozenset(setting_of(config, name) for config in failed)
        if setting_of(space.baseline, name) not in values:
            changed.append((name, values))
    alone = (one for one in changed if one[1].isdisjoint({setting_of(config, one[0]) for config in good}))
    return next(alone, changed[0] if changed else None)
