"""Why is training slow? The evidence of one diagnosis, and what follows from it: findings, verdict and ranked advice.

Data alone.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from autotune.frozen import FrozenModel, with_field_copy
from autotune.note import Note
from autotune.records.ceilings import Ceiling, Headroom
from autotune.records.measurement import Measurement
from autotune.records.run_spread import RunSpread
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts

__all__ = [
    "Advice",
    "Bottleneck",
    "CurvePoint",
    "Curves",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Roofline",
]

Bottleneck = Literal[
    "data_cpu",
    "data_io",
    "data_tail",
    "restart",
    "copy",
    "compute",
    "launch",
    "script",
    "synchronise",
    "memory",
    "threads",
    "unknown",
]
"""What limits the rate: an item's CPU work, its waits for I/O, its slow tail; epochs that are too short; copies;
computing; launching operations; what the script does between them; a host that waits for the device before it launches
more; memory bandwidth; CPU oversubscription."""


class CurvePoint(FrozenModel):
    """The loader, the device or copying alone, in a configuration that differs from the baseline in a few settings.

    A loader's point may differ in its own settings and in the batch.
    """

    changes: dict[str, object]
    """Settings under TrainingConfig's names; empty for the baseline itself."""
    ceiling: Ceiling | None
    """None where it could not be measured."""
    cpu_s_per_sample: float | None = None
    """CPU seconds for a sample, of all threads and loader workers; None where not measured."""
    peak_memory_bytes: int | None = None
    """Peak memory of the device's side; None for the others, and where not measured."""
    took_s: float = 0.0
    """Seconds that the point took in all: start, warm-up and timed stretch."""
    reason: Note | str = ""
    """Why it could not: a note of ours, or the text of an error."""

    @property
    def is_left_out(self) -> bool:
        """Return True where it was not tried, since no time was left."""
        return isinstance(self.reason, Note) and self.reason.code == "no_time_left"


class Roofline(FrozenModel):
    """What one step asks of the device, and what the device can do, each measured.

    Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
    """

    flops: float
    """Floating-point operations of training on one batch, forward and backward, by torch.utils.flop_counter."""
    moved_bytes: float
    """Bytes that the operators of one batch read and write, views left out, the optimizer's step included."""
    operators: int
    """Operators of one batch."""
    peak_flops_per_s: float
    """Of a large matrix product in the same precision: TF32 where float32's convolutions do most, and run in that."""
    peak_bytes_per_s: float
    """Of a large copy, read and written bytes together."""


with with_field_copy():

    class Curves(FrozenModel):
        """Ceilings around the baseline, and a step's roofline."""

        loader: tuple[CurvePoint, ...] = ()
        """The loader alone, a point for each setting tried."""
        device: tuple[CurvePoint, ...] = ()
        """The device alone, a point for each setting tried."""
        copy: tuple[CurvePoint, ...] = ()  # type: ignore[assignment] # hides a method
        """Copying batches to the device alone, from memory that is pinned and that is not; empty on a CPU."""
        roofline: Roofline | None = None
        """None where it was not measured."""
        threads: int | None = None
        """Threads of one operation on the CPU, where the configuration leaves them to torch or sets them."""
        remarks: tuple[Note, ...] = ()
        """What could not be measured, and why."""
        is_cut: bool = False
        """The process that measured them ended early: another process can continue from here."""


class Evidence(FrozenModel):
    """All that a diagnosis rests on."""

    config: TrainingConfig
    """What the user runs today."""
    drop_last: bool = True
    """The loader leaves out an epoch's last, smaller batch."""
    environment: Environment
    run_spread: RunSpread
    """Between runs of the same settings on this machine, as far as it is known."""
    facts: WorkloadFacts
    limit_bytes: int
    """The memory limit."""
    free_ram_bytes: int | None = None
    """RAM that was free before the measurements; None where unknown."""
    measurement: Measurement
    """With breakdown, loader costs and all ceilings."""
    curves: Curves


class Finding(FrozenModel):
    """A bottleneck, with the figures that show it."""

    bottleneck: Bottleneck
    """What holds training up."""
    share: float
    """Of the wall time: what the bottleneck takes, or lengthens the run by; findings are ordered by it."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """The figures that show it, by name."""
    evidence: str
    """The same in a sentence."""


class Advice(FrozenModel):
    """Something that the user can do, and its expected gain."""

    kind: str
    """What to do, as a code: "cache_items"."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """What the text is filled with, and the measured figures that the expectation rests on."""
    settings: dict[str, object] = Field(default_factory=dict)
    """Settings to change, under TrainingConfig's names; empty where no setting helps."""
    expected_samples_per_s: float | None
    """None where no figure can be given."""
    expected_gain: float | None
    """The expected rate over the present rate, less 1."""
    text: str
    """What to do, in a sentence."""
    basis: str
    """Which measured figures the expectation comes from."""


class Diagnosis(FrozenModel):
    """Why training is slow, and what to do about it: what `autotune diagnose --json` writes."""

    format: Literal[1] = 1
    """Of the document: raised when a key goes or changes its meaning."""
    name: str
    """What was diagnosed, in a few words."""
    verdict: Bottleneck
    """The first finding's."""
    headline: str
    """The answer in a sentence or two."""
    headline_notes: tuple[Note, ...]
    """The same as notes."""
    is_healthy: bool
    """Nothing beside computing takes a tenth of the time, and nothing that was measured promises 5 % more."""
    standing: Headroom
    """Where today's rate stands between the ceilings."""
    findings: tuple[Finding, ...]
    """The bottlenecks, the largest share first, but the host before the device that waits for it; at least one."""
    advice: tuple[Advice, ...]
    """What to do: settings first, then what lies outside of them; the largest gain first in each."""
    evidence: Evidence
    remarks: tuple[Note, ...] = ()
    """What should be known about the evidence."""
    wall_s: float = 0.0
    """Seconds that the diagnosis took."""
    autotune_version: str = ""
    """Of autotune, which wrote it."""
