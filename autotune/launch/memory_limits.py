"""The memory limits of a trial: the limit that it is judged by, and the ceiling of RAM at which it is ended."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.trial import TrialResult

__all__ = ["NO_LIMITS", "MemoryLimits"]

_FAR_ABOVE = 1.2  # our convention: a peak that is a little too high is measured and judged, not ended
_RAM_SHARE = 0.95  # our convention: ended before the kernel's out-of-memory killer chooses a process
_LEAST_VIOLATION = 0.01  # our convention: a trial that was ended for its memory counts as over the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What a trial may take; unknown until the machine is."""

    limit_bytes: int | None = None
    """Memory limit of a trial."""
    ram_bytes: int | None = None
    """RAM of this machine."""
    limit_is_ram: bool = False
    """The limit is on the machine's RAM, not on a device's own memory."""

    @property
    def ram_ceiling_bytes(self) -> int | None:
        """RAM at which a trial is ended: far above the limit, yet before the kernel acts."""
        if self.ram_bytes is None:
            return None
        most = int(self.ram_bytes * _RAM_SHARE)
        return min(most, int(self.limit_bytes * _FAR_ABOVE)) if self.limit_is_ram and self.limit_bytes else most

    def exceeded_by(self, taken_bytes: int) -> TrialResult:
        """The result of a trial that was ended for its RAM."""
        limit = self.limit_bytes if self.limit_is_ram and self.limit_bytes else self.ram_bytes or taken_bytes
        reason = (
            f"the trial's processes must stay within {limit / 2**20:,.0f} MiB of RAM, but had taken "
            f"{taken_bytes / 2**20:,.0f} MiB, and were ended"
        )
        return TrialResult(outcome="host_oom", reason=reason, violation=max(_LEAST_VIOLATION, taken_bytes / limit - 1))


NO_LIMITS = MemoryLimits()
"""Before the machine is known."""
