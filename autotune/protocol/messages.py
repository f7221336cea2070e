"""The messages between the parent and a trial: jobs in, one report for each rank out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, TypeAdapter

from autotune.config.environment import Environment
from autotune.config.plan import ScriptFacts, WorkloadFacts
from autotune.config.training_config import TrainingConfig
from autotune.frozen import FrozenModel
from autotune.policy import WindowRules
from autotune.records.measurement import DeviceConditions
from autotune.records.result import Curves
from autotune.records.trial import PrecisionFigures, StressFigures, TrialResult
from autotune.records.watched_run import WatchedRun

# What a trial's processes are to do: one job type for each kind of work, with `kind` as its mark on
# disk.


class Extras(FrozenModel):
    """What a trial measures after its window, for as long as the deadline is far. The window's result is kept first."""

    loader_ceiling: bool = False
    """The loader alone."""
    device_ceiling: bool = False
    """The device alone, on batches that are already on it."""
    copy_ceiling: bool = False
    """Moving batches to the device alone, where that has memory of its own."""
    breakdown: bool = False
    """Where the time goes, by extra steps under a profiler, and what an item costs."""
    activations: bool = False
    """Measure the activations kept for the backward pass, in some further steps."""
    what_if: bool = False
    """Debugging modes, and steps without each of those that can be switched from outside."""
    stretch_s: float = 0.5
    """Length of each of these. Our convention."""


NO_EXTRAS = Extras()
"""The window alone."""


class GroupPart(FrozenModel):
    """Those ranks of a group that run on one of several hosts."""

    host: int
    """Number of this host among those of the group, from 0."""
    first_rank: int
    """The lowest rank here; the others follow it."""
    ranks: int
    interface: str | None = None
    """Network interface by which the other hosts are reached; None: torch finds one."""


class ProcessSetup(FrozenModel):
    """What every process of a trial needs, whatever its job is."""

    device: str
    """torch's name, or "auto"."""
    seed: int
    deadline_s: float
    limit_bytes: int | None = None
    """Memory limit, enforced where the device can; None: not known yet."""
    blocks_launches: bool = False
    """Each launch waits for its kernel (CUDA_LAUNCH_BLOCKING), so that an error shows where it
    happens. For a job that is run once more to find that place; what it measures is worth
    nothing."""
    sys_path: tuple[str, ...]
    working_directory: Path
    python_path: str | None
    """PYTHONPATH of the caller, restored before user code runs."""


class _Job(FrozenModel):
    version: Literal[1] = 1
    process: ProcessSetup

    def within(self, deadline_s: float, *, blocks_launches: bool = False) -> Self:
        """Return the same job with another deadline, and launches that wait for their kernels if asked or if its do."""
        blocks = blocks_launches or self.process.blocks_launches
        process = self.process.model_copy(
            update={"deadline_s": deadline_s, "blocks_launches": blocks}
        )
        return self.model_copy(update={"process": process})


class DescribeJob(_Job):
    """Describe the machine, without a workload."""

    kind: Literal["describe"] = "describe"


class _WorkloadJob(_Job):
    payload: Path
    config: TrainingConfig
    command: tuple[str, ...] | None = None
    """The command that is the workload, its placeholders not filled; None where the payload is."""
    script: ScriptFacts | None = None
    """What the probe of the command has seen."""


class ProbeJob(_WorkloadJob):
    """Take a first look at the workload and the machine."""

    kind: Literal["probe"] = "probe"
    watch_s: float = 0.0
    """Seconds after its first step in which a script runs on its own, observed; 0 to not watch."""


class TrialJob(_WorkloadJob):
    """Measure a configuration: the only job that a group of ranks may run."""

    kind: Literal["trial"] = "trial"
    rendezvous: str | None = None
    """Where the ranks of strategy ddp meet, as init_method of torch.distributed.init_process_group:
    "file://" with the path as it is, or "tcp://host:port"; None where there is no other rank to
    meet."""
    part: GroupPart | None = None
    """Which of the ranks are on this host; None: all of them."""
    window: WindowRules = WindowRules()
    extras: Extras = NO_EXTRAS
    streams_blocks: bool = False
    """Rank 0 writes each block of its window as soon as it has ended."""


class PrecisionJob(_WorkloadJob):
    """Compare 20 steps in the configuration's precision to float32 (the precision guard)."""

    kind: Literal["guard"] = "guard"
    is_short_search: bool = False
    """Where steps are slow, they are fewer."""


class CurvesJob(_WorkloadJob):
    """Measure loader, device and the copy between them alone, at the configuration and at variations of it."""

    kind: Literal["curves"] = "curves"
    variations: tuple[TrainingConfig, ...] = ()
    """What differs from `config` decides whether the loader or the device is measured."""
    stretch_s: float = 0.5
    """Length of each measurement. Our convention."""
    is_short_search: bool = False
    """A larger batch whose steps take long is left to what smaller ones tell."""
    ends_early: bool = False
    """Workers are added only while the loader grows with them."""
    roofline: bool = False
    """Also count what a batch's operators compute and move, and measure what the device can do."""
    known: Curves | None = None
    """Points that an earlier process has measured, or ended at; they are reported unchanged."""


class StressJob(_WorkloadJob):
    """Train on the largest samples."""

    kind: Literal["stress"] = "stress"
    train_s: float
    """Length of the training."""


WorkloadJob: TypeAlias = ProbeJob | TrialJob | PrecisionJob | CurvesJob | StressJob
"""A job that builds the user's workload."""
Job: TypeAlias = Annotated[DescribeJob | WorkloadJob, Field(discriminator="kind")]
_JOB: TypeAdapter[Job] = TypeAdapter(Job)


def read_job(path: Path) -> Job:
    """Read the job that `write_model` wrote.

    Raises:
        OSError, pydantic.ValidationError: the file is missing, or not a job of this version.
    """
    return _JOB.validate_json(path.read_bytes())


# What a rank answers to any job.
#
# One type for all kinds of job: most reports are failures, which are the same for every kind and
# are also written by those that do not know the kind (a launcher, the group's report). A body for
# each kind would replace one check for None, which every reader needs anyway since any job may
# fail, by a check of the body's type.


REPORT_UNWRITTEN = 74
"""Exit code of a rank whose report could not be written. Source: sysexits.h (EX_IOERR)."""


class RankReport(FrozenModel):
    """A result, and the figures of the one kind of job that was run."""

    version: Literal[1] = 1
    result: TrialResult
    environment: Environment | None = None
    """Of a description or a probe."""
    facts: WorkloadFacts | None = None
    """Of a probe."""
    variables: Mapping[str, str] = Field(default={})
    """Of a probe of a script: environment variables that it has set. They may be secret: the
    trial's folder alone holds them, until it is removed."""
    conditions: DeviceConditions | None = None
    """Of a probe: what used the device before this process opened it."""
    watched: WatchedRun | None = None
    """Of a probe that watches a script."""
    guard: PrecisionFigures | None = None
    curves: Curves | None = None
    stress: StressFigures | None = None
    workload_build_s: float | None = None
    """Of a series: seconds that reading the workload and building its model and dataset took, so
    far as it is built."""
    kept_bytes: int = 0
    """Of a series: RAM that it takes next to what its jobs take, for the weights that each begins
    with."""
    is_workload_fault: bool = False
    """The reason is a sentence about the user's workload, complete as it stands."""
    is_collateral: bool = False
    """This rank failed only because another rank was gone: its connection was closed, or a
    collective timed out."""

    def with_result(self, **changes: object) -> RankReport:
        """Return the report with these fields of its result changed."""
        return self.model_copy(update={"result": self.result.model_copy(update=changes)})


class PreloadResult(FrozenModel):
    """How far a preload came; one with a reason leaves a server that must not be forked into trials."""

    preloaded: int = 0
    """Names, from the first on, after which the process was still fit."""
    reason: Literal["threads", "device", "processes", "hang", "end"] | None = None
    """Fault found: what the process has now, or that an import hangs or has ended it. None: it is fit.
    processes: children, which the end of a trial would end too."""
    culprit: str | None = None
    """The top-level package whose import brought that; None if it hangs or ends before any."""
    chain: tuple[str, ...] = ()
    """Modules that were being imported meanwhile, the outermost first: to import one of them brings
    it again."""
