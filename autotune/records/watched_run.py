"""Record what a script's run looked like while nothing was measured in it: its parts, and what recurs.

Comes in: seconds by part and the occurrences of what recurs, from `worker/script/watch`. Goes out:
`WatchedRun`, from which `diagnosis/run_shares` extrapolates an hour of training, and `RunShare`, a
row of that hour. Data only.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from autotune.frozen import FrozenModel
from autotune.records.stacks import Stacks

RunPart = Literal[
    "startup",
    "waiting",
    "restart",
    "copy",
    "compute",
    "forward",
    "backward",
    "optimizer",
    "synchronise",
    "checkpoint",
    "validation",
    "logging",
    "collection",
    "other",
]
"""Parts of a run's wall time: from the process's start to the end of the first step; waiting for
the training loader; from an epoch's `iter(loader)` to its first batch; copies to the device;
computing on an accelerator, whose three parts of a step are not told apart; on a CPU the three
parts of a step; the host's waits for the device; writing checkpoints; passes over another
loader without training; printing, progress bars, loggers and trackers; garbage collection; all
else that the script does."""
RUN_PARTS: tuple[RunPart, ...] = get_args(RunPart)


class Recurring(FrozenModel):
    """Work of one kind at one place of the script, which recurs every some steps or epochs."""

    part: RunPart
    """Part that it belongs to."""
    what: str
    """The function called, as users write it: "torch.save", "print", "gc.collect"; for a validation
    the dataset's class, of part "other" the script's work between two epochs."""
    place: str = ""
    """File and line of the user's call, such as "train.py:41"; empty if unknown."""
    at_steps: tuple[int, ...]
    """Optimizer steps since the first one, at each occurrence; at most the first 1,000."""
    seconds: tuple[float, ...]
    """Wall seconds of each of these occurrences."""
    count: int
    """All occurrences."""
    total_s: float
    """Wall seconds of all occurrences."""
    written_bytes: int = 0
    """Bytes that this thread wrote to files meanwhile, over all occurrences."""
    is_cut: bool = False
    """The last occurrence had not ended, or was ended early."""
    is_muted: bool = False
    """Calls of a tracker that does nothing in trials: they are counted, their time is not known."""


class Startup(FrozenModel):
    """Seconds before the steady run. torch itself had been imported."""

    before_loader_s: float
    """From the process's start to the first request for a training batch: imports, building."""
    first_batch_s: float
    """Waiting for the first batch, with the start of the workers."""
    first_step_s: float
    """The rest of the first step."""

    @property
    def total_s(self) -> float:
        """Seconds to the end of the first step."""
        return self.before_loader_s + self.first_batch_s + self.first_step_s


class WorkerStart(FrozenModel):
    """Start of one set of loader workers."""

    method: str
    """Start method: "fork", "spawn" or "forkserver"."""
    workers: int
    """Workers started."""
    start_s: float
    """Seconds that starting the processes took in the training process, one after the other."""
    first_batch_s: float
    """Seconds from `iter(loader)` to the first batch."""
    pickled_bytes: int | None = None
    """Bytes pickled for one worker; None for fork."""
    pickle_s: float | None = None
    """Seconds of pickling for one worker; None for fork."""


class MemoryReading(FrozenModel):
    """Memory of the training process and of its loader workers at one moment of a run."""

    steps: int
    """Optimizer steps so far."""
    samples: int
    """Samples that the loader delivered so far in this epoch."""
    process_bytes: int | None = None
    """Anonymous memory of the training process: its heap, without files and shared memory; None if
    the system does not report it."""
    device_bytes: int | None = None
    """Memory of tensors in torch's allocator, all devices together; None without one."""
    worker_private_bytes: tuple[int, ...] = ()
    """Memory of each loader worker that it shares with no other process; () without workers, or if
    the system does not report it."""
    worker_shared_bytes: tuple[int, ...] = ()
    """Anonymous memory that each of them still shares with the process that forked it: the most
    that copy on write can still add."""
    graph_nodes: int | None = None
    """Nodes of autograd graphs that living tensors hold after a step; None if not counted."""


class MemoryUse(FrozenModel):
    """Memory over a watched run: how it grew, and whether validation takes more than training."""

    readings: tuple[MemoryReading, ...] = ()
    """In the order of time, all of the same worker processes."""
    missing: str = ""
    """Reason why memory was not read, or not in the workers; empty if it was."""
    kept_graph: str = ""
    """Variable of the script that holds the largest graph, such as "total"; empty if unknown."""
    kept_graph_place: str = ""
    """File and line of the script where it was found, such as "train.py:41"; empty if unknown."""
    training_peak_bytes: int | None = None
    """Peak memory before the first validation after training had begun: of the device's tensors, on
    a CPU of the process; None if none was observed."""
    validation_peak_bytes: int | None = None
    """Peak with validations; more than the other one only if a validation reached it."""


class Modes(FrozenModel):
    """Modes and grants of the process, read while the script trained."""

    is_anomaly_detected: bool = False
    """torch.autograd.set_detect_anomaly(True), at a backward pass."""
    is_profiled: bool = False
    """A profiler of torch was recording."""
    is_traced: bool = False
    """sys.settrace or sys.setprofile was set: a debugger, coverage, cProfile."""
    is_deterministic: bool = False
    """torch.use_deterministic_algorithms(True)."""
    is_cudnn_benchmark: bool = False
    """torch.backends.cudnn.benchmark, on a device with cuDNN."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables that slow training down, with their values, such as
    CUDA_LAUNCH_BLOCKING."""
    places: dict[str, str] = Field(default_factory=dict)
    """File and line of the user's call that switched a mode on, such as "train.py:41", by the
    mode's name in `SwitchGain`; without modes that were on before the script's first line."""
    process_cores: int | None = None
    """Cores that the training thread may use, by sched_getaffinity."""
    worker_cores: int | None = None
    """The same of the loader worker that may use the fewest; None without workers."""
    machine_cores: int | None = None
    """Cores that this machine has online."""
    start_cores: int | None = None
    """Cores that the process might use when it started; if autotune bound it later, those cores."""
    thread_cores: int | None = None
    """Cores that any thread of the process may use."""
    quota_cores: float | None = None
    """Cores' worth of CPU time that the control groups allow; None without a limit."""
    granted_cores: int | None = None
    """Cores that SLURM granted to a task; None outside of SLURM."""
    grant_source: str = ""
    """Variable that holds the grant, such as SLURM_CPUS_PER_TASK."""
    pinned_by: str = ""
    """File and line that called os.sched_setaffinity after the start, or the variable by which
    OpenMP binds threads, such as OMP_PROC_BIND=true; empty if unknown."""


class Exchange(FrozenModel):
    """Exchange of gradients by DistributedDataParallel, since the first step."""

    backwards: int
    """Backward passes."""
    synchronised: int
    """Those that exchanged gradients."""
    exposed_s: float | None = None
    """Mean seconds of such an exchange that computing did not hide, by DDP's own sampled timers;
    None if it has not sampled any."""
    exchange_s: float | None = None
    """Mean seconds of the whole exchange, of which computing hides a part."""
    searches_unused: bool = False
    """find_unused_parameters=True."""
    has_unused: bool = False
    """DDP has found parameters without a gradient."""


class WatchedRun(FrozenModel):
    """A script's own run, observed from its start until some seconds after its first step."""

    startup: Startup
    steps: int
    """Optimizer steps after the first one."""
    watched_s: float
    """Seconds since the end of the first step, without what a cut epoch left out."""
    parts_s: dict[RunPart, float]
    """Seconds of each part, each moment counted once, since the end of the first step; their sum is
    `watched_s`. What recurs is included."""
    recurring: tuple[Recurring, ...] = ()
    """Checkpoints, validations, logging, collections and restarts, by kind and place."""
    batches: int = 0
    """Batches of the training loader since the first step."""
    epoch_batches: int | None = None
    """Batches of an epoch; None if unknown."""
    epochs_ended: int = 0
    """Epochs that ended while watched."""
    is_epoch_cut: bool = False
    """The last of these epochs was ended early, to see what the script does after one."""
    worker_starts: tuple[WorkerStart, ...] = ()
    """Starts of loader workers, in order."""
    active_workers: int | None = None
    """Workers of a stream that still had samples, in the middle of an epoch; None without workers,
    or if the dataset is no stream."""
    modes: Modes = Modes()
    written_elsewhere: tuple[str, ...] = ()
    """Existing files whose redirected writes went to another file system: they may cost more in
    training."""
    exchange: Exchange | None = None
    """None without DistributedDataParallel."""
    memory: MemoryUse = MemoryUse()
    stacks: Stacks | None = None
    """Sampled stacks of the last seconds; None if there are none."""
    stacks_missing: str = ""
    """Reason why there are none."""


class RunShare(FrozenModel):
    """A part's share of an hour of training."""

    part: RunPart
    """Part of the hour."""
    fraction: float = Field(ge=0, le=1)
    """Share of the hour."""
    low: float = Field(ge=0, le=1)
    """Lower end of the share's 95 % interval."""
    high: float = Field(ge=0, le=1)
    """Upper end."""
    seen: int | None = None
    """Occurrences observed, of what recurs; None for parts of every step."""
    period: str = ""
    """How often it recurs: "every 5 steps", "each epoch"; empty for parts of every step."""
    place: str = ""
    """File and line of the largest contribution; empty if unknown."""
