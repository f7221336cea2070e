"""What failures say: the user's own code is broken, or one value of a setting does not work with it.

Takes the records of trials as they end; leaves values out of the study that fail again and again. Composition, like
tune, from which alone it is called.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.errors import RepeatedFailureError, WorkloadError
from autotune.note import Note
from autotune.records.trial import TrialRecord
from autotune.settings.search_space import SettingValue
from autotune.space.resolved_space import setting_of
from autotune.study.proposals import explaining_setting
from autotune.study.study import Study

__all__ = ["Blame"]

_SAME_FAILURES = 3


@dataclass(slots=True)
class Blame:
    """The failures of a search so far."""

    failures: dict[str, list[TrialRecord]] = field(default_factory=dict)
    blamed: list[tuple[str, frozenset[SettingValue]]] = field(default_factory=list)
    """Settings with values that were left out for their failures."""

    def learn(self, record: TrialRecord, study: Study, notes: list[Note | str]) -> None:
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
        is_invalid = failure is None and record.outcome == "invalid"
        if (failure is None and not is_invalid) or record.outcome == "timeout":  # to hang is no exception of the user's
            return
        if failure is not None and failure.is_asynchronous:  # its place tells nothing, nor does that of another
            return
        if any(setting_of(record.config, name) in values for name, values in self.blamed):
            return  # it was under way when that was left out
        same = self.failures.setdefault(record.reason if failure is None else failure.signature, [])
        same.append(record)
        if len(same) < _SAME_FAILURES:
            return
        succeeded = (one.config for one in study.records if one.measurement is not None)
        explanation = explaining_setting([one.config for one in same], succeeded)
        if explanation is None:
            if failure is None:  # no exception: what this workload can't be measured with, in several settings
                return
            raise RepeatedFailureError(
                f"the same exception at the same place ended {_SAME_FAILURES} configurations: {record.reason} "
                f"(logs: {', '.join(str(one.result.log) for one in same)})\n\n{failure.traceback}"
            )
        setting, values = explanation
        study.exclude(setting, values)
        self.blamed.append(explanation)
        same.clear()
        listed = ", ".join(str(value) for value in sorted(values, key=str))
        notes.append(f"{setting} {listed} was left out after {_SAME_FAILURES} failures: {record.reason}")
