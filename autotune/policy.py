"""Every number that decides something in a search: how many trials, how long, what is proven and recommended.

A search reads its numbers from `ResolvedSpace.policy`, which comes from `Plan.policy`. To vary one,
in a test or in a benchmark: `replace(POLICY, proof=replace(POLICY.proof, most_pairs=2))`. What a
user can set (budget, objective) is no field here, nor is a threshold within one finding of the
diagnosis or a number that a trial's process alone reads.

The line below a field says what it means and where its value comes from. Where it names no source,
the value is our own convention: plausible, and not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

from autotune.frozen import FrozenModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRanges:
    """Which values are tried of the settings that the user leaves open."""

    least_workers: int = 8
    """Loader workers tried on few cores; loaders that wait for I/O gain from more workers than
    cores."""
    prefetch_factors: tuple[int, ...] = (2, 4, 8)
    """torch's own, and twice and four times as many."""
    accum_steps: tuple[int, ...] = (1, 2, 4)
    """Micro batches of an optimizer step."""
    bucket_caps_mb: tuple[float, ...] = (50.0, 100.0)
    """DistributedDataParallel's buckets: twice and four times torch's own."""
    smallest_batch_share: int = 4
    """The smallest micro batch is this part of the baseline's."""
    slow_tail_fraction: float = 0.2
    """Share of the items' time in slow ones from which other orders are tried. In order, a batch
    with a slow item can hold up all other workers, so that this share, times the workers, is the
    gain at best: below a fifth it takes more than five workers to gain anything."""
    cores_per_item: float = 1.2
    """Cores that an item keeps busy, from which it runs in threads that torch does not limit: more
    than an item's own thread and the system's work for it reach."""
    guessed_prefetch: int = 4
    """Batches that each worker holds ready in the first guesses: twice torch's default."""
    many_workers_per_core: int = 4
    """Workers in the guess for data that waits for I/O."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Which configurations are tried, and when no further trial is worth its time."""

    patience: int = 12
    """Trials in a row without a gain that end a search which may stop. Source:
    benchmarks/regret.py."""
    informed_patience: int = 6
    """The same, of the trials that a model expected most of. Source: benchmarks/regret.py."""
    brief_patience_s: float = 36.0
    """In a short search, seconds of trials that take the place of their number."""
    least_patience: int = 3
    """Fewest trials of such a patience."""
    patient_after: int = 4
    """Trials that do not count towards patience: the baseline and the first guesses."""
    least_gain: float = 0.01
    """Share of the throughput; a smaller gain is worth no further trial and no repeat. Runs differ
    by about as much."""
    least_expected: float = 0.02
    """Expected gain below which a trial is not worth its seconds. Source: benchmarks/regret.py, 84
    searches: with 1 % they take 51 s in the median and 11 end beyond 5 % of the best; with 2 % 45 s
    and 10, with 3 % 40 s and 17."""
    least_expected_sds: float = 1 / 3
    """The same, in standard deviations between runs of the same settings."""
    fewest: int = 3
    """Trials before a search may end by itself: the baseline and two that checked the model."""
    near_ceiling: float = 0.97
    """Share of the lowest ceiling from which nothing is left to win; runs of the same settings
    differ by 1 to 3 %."""
    near_cores: float = 0.95
    """The same of the cores. A job gets 1.9 to 1.98 of two cores when it asks for all; the system
    takes the rest."""
    ceiling_sds: float = 1.0
    """Standard deviations above its estimate at which a ceiling may lie. Both sides are measured
    for longer at the end, so that no stretch of 0.2 s decides."""
    sure_to_fit: float = 0.9
    """Probability to fit into memory from which something is tried; an out-of-memory costs a whole
    trial."""
    likely_to_fit: float = 0.5
    """Probability below which something counts as too large."""
    queue_share: float = 0.5
    """Of the free RAM, what batches that workers hold ready may fill."""
    short_wait_s: float = 3.0
    """Seconds of workers making their first batches up to which a trial promises no less: about a
    trial."""
    rebuilds: int = 2
    """Builds of a trial that needs a process of its own: its own, and that of the shared process
    after it."""
    fastest: int = 3
    """Trials whose neighbours are candidates."""
    same_batch: int = 2
    """Trials at the baseline's global batch that the model asks for: a guess and its correction."""
    closing: int = 3
    """Trials kept for the end: the best at the baseline's batch, at the largest, and one that the
    sampler has begun."""
    hinted: int = 3
    """Best trials of an earlier search that are tried again, in addition to what it recommended."""
    same_failures: int = 3
    """Equal failures after which a cause is looked for; two may share it by chance."""
    cured: int = 2
    """Leading configurations for which cures of a host-bound loop are tried."""
    before_cures: int = 2
    """Trials before them: the baseline and one more."""
    most_growth: int = 4
    """Growth of the micro batch in a cure. Launching then takes a quarter of its time for a sample."""
    compiling_s: float = 120.0
    """Seconds that compiling takes in a trial. Source: docs/gpu.md, up to 45 s for GPT-2 small on
    an H100, and more for ResNet-50."""
    worth_compiling: float = 10.0
    """Times the seconds of compiling that training should win by it; each start of a training
    compiles again."""
    most_listed: int = 20_000
    """Combinations up to which a space is listed, and method grid allowed: a second of listing."""
    draws: int = 500
    """Combinations looked through for one trial where a space is drawn from, or all are skipped."""
    all_candidates_up_to: int = 4096
    """Combinations of a space of which the model weighs every one, in about a second before each
    trial."""
    random_candidates: int = 1500
    """Random combinations that the model weighs of a larger space."""
    repeats_in_a_row: int = 8
    """Samples in a row that bring nothing new before one of the open combinations is taken."""
    most_stressed: int = 3
    """Configurations tried on the largest samples, one after the other, until one stays within the
    limit."""
    sure_room: float = 4.0
    """Times its peak that the limit must be, so that a configuration needs no run on the largest
    samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Which runs are repeated, what is proven by them, and what is recommended."""

    search_error: float = 0.004
    """One-sided error of proofs while it is searched. Source, of both errors:
    benchmarks/decisions.py, where searches with nothing to win report a gain in at most 1 %, at
    variations of 1.5 to 20 %."""
    settle_error: float = 0.012
    """One-sided error of proofs once a leader is settled on."""
    first_share: float = 0.75
    """Of the error that is left, what a leader may spend."""
    analyses_after: frozenset[int] = frozenset({2, 3, 4, 6, 9, 13, 19, 28})
    """Pairs of runs after which a leader is judged, each half as many again: few interim analyses
    share the error."""
    most_pairs: int = 28
    """Runs of leader and baseline each, however short they are: those of the last interim analysis."""
    fewest_runs: int = 2
    """Of the baseline, and of what is settled on, proven, or recommended for its simplicity. A
    third tells a quarter more."""
    baseline_every: int = 3
    """Runs of others after which the baseline runs again. With k others at a time, sqrt(k) of its
    runs for each of theirs are best (Dunnett 1955); a search compares a few at a time."""
    clear: float = 0.005
    """Probability that the best is no faster than the baseline, below which the baseline need not
    run again while it is searched: about what a proof takes."""
    most_challenged: int = 3
    """Repeats of trials that may be better than the leader."""
    most_contested: int = 4
    """Runs of a larger batch, and of the best at the baseline's, to decide whether it is worth it."""
    most_lost: int = 2
    """Failed repeats of the baseline after which nothing more is tried."""
    unlikely: float = 0.05
    """Probability of a worthwhile gain below which nothing more is to be proven."""
    worthwhile: float = 0.02
    """Share of the throughput; a smaller gain counts as none, and the simpler configuration is
    recommended."""
    precise: float = 0.05
    """Half-width of a proven gain's 95 % interval, on the log scale, at which it needs no further
    runs."""
    precise_share: float = 0.25
    """The same as a share of the gain, where that is more."""
    large_gain: float = log(1.5)
    """Gain on the log scale that few runs decide. Source, of both: benchmarks/regret.py."""
    large_gain_runs: int = 2
    """Runs that such a gain still takes."""
    futile_after: int = 3
    """Pairs of runs before settling may be given up because a proof is out of reach."""
    gain_sds: tuple[float, ...] = (0.01, 0.03, 0.1, 0.4, 1.2)
    """Prior of the logarithm of a gain, a mixture of normal distributions: standard deviations,
    from nothing to a factor of ten. Source: winners of benchmarks/default_search.py and of recorded
    GPU searches gain 1.1 to 22 times."""
    gain_weights: tuple[float, ...] = (0.3, 0.2, 0.2, 0.15, 0.15)
    """Their weights. Source: benchmarks/decisions.py, where reported gains are right in the mean."""
    usual_gain_sd: float = 0.1
    """Standard deviation of the logarithm of a gain: most changes bring little. Source:
    benchmarks/decisions.py."""
    batch_error: float = 0.05
    """One-sided error of taking a larger batch for faster than the best at the baseline's: more
    than a proof's, since what is wrongly taken is hardly slower."""
    lead_error: float = 0.05
    """One-sided error of recommending an unproven trial in place of a proven one."""
    most_compared: int = 20
    """Best trials that are compared, in addition to the baseline, in searches of thousands."""
    sure_sds: float = 3.2
    """Standard errors at which a gain is usually proven, given the errors. Source:
    benchmarks/decisions.py."""
    longest_wait_s: float = 600.0
    """Seconds of further runs beyond which none is suggested to decide a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a trial under way is stopped, since it can't come near the best so far."""

    fewest_blocks: int = 3
    """Blocks of its window before that."""
    hopeless: float = 0.5
    """Share of the threshold below which it is stopped in its warm-up. A clock that rises with the
    load, or a loader that is still starting, does not halve the throughput for so long."""
    hopeless_blocks: int = 2
    """Fewest blocks for that."""
    hopeless_s: float = 0.5
    """Fewest seconds of them: ten times a block of the warm-up."""
    lucky_sds: float = 1.64
    """Standard deviations of a difference that one in twenty exceeds: a trial as fast as the best
    is rarely stopped."""
    not_lucky: float = 0.95
    """The same as a quantile of Student's t, on accelerators, where little is known of how hosts
    differ."""
    busy_margin: float = 0.02
    """Share by which a busier device may raise a score: the default of objective.busy_weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Run-to-run variation before any is measured, as standard deviations of the logarithm of the throughput."""

    cpu_sd: float = 0.1
    """On a CPU. Source: benchmarks/results, where runs of the same settings differ by 2 to 20 %."""
    host_sd: float = 0.1
    """On an accelerator, of runs that the host limits. Source:
    benchmarks/results/gpu-nvidia-h200.json and gpu-nvidia-h100-80gb-hbm3.json, where they differ by
    2 to 20 %."""
    device_sd: float = 0.004
    """The same of runs that the device limits, which differ by 0.03 to 0.3 % in these files."""
    degrees_of_freedom: float = 2.0
    """Of the assumption: machines differ by a factor of 2 either way, as a standard deviation from
    three runs does. Those of benchmarks/results lie between 1.5 and 20 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Deadlines, and what the parts of a search may take: long enough for what is slow, short enough to end a hang."""

    slow_build_s: float = 10.0
    """Build of a workload from which a search without limits is a short one: as long as a trial
    usually takes."""
    baseline_deadline_s: float = 600.0
    """For a probe and a baseline, of which nothing is known; a first download or compilation fits
    in."""
    deadline_factor: float = 10.0
    """Times what the reference, or the trial itself, took."""
    least_deadline_s: float = 20.0
    """Of a trial."""
    least_compile_deadline_s: float = 120.0
    """Of a trial that compiles."""
    least_repeat_deadline_s: float = 30.0
    """Of a repeat."""
    build_factor: float = 2.0
    """Builds on top of a deadline: of what a trial may have to build, and the reference had not."""
    shared_from_s: float = 1.0
    """Build of a workload from which trials share a process, and save more than a tenth of a search
    on a CPU. Source: benchmarks/shared_trials.py."""
    grace_s: float = 5.0
    """Past what is left of a time-out, so that the last run is not lost for a moment."""
    writing_s: float = 2.0
    """At the end of a time-out, to judge and to write: plots take a second or two on a slow
    machine."""
    writing_share: float = 0.06
    """The most of the time-out that this takes."""
    deciding_share: float = 0.25
    """Of the time-out, kept to decide what the best gains."""
    deciding_s: float = 45.0
    """Seconds of deciding without a time-out, so that an answer takes a minute."""
    brief_deciding_builds: float = 4.0
    """The same in a short search, in builds of the workload."""
    brief_builds: float = 2.0
    """Builds that the trials of a short search may take."""
    brief_trials_s: float = 60.0
    """Seconds that these may take at least."""
    brief_end_s: float = 30.0
    """Estimated seconds of a short search's end, a build apart."""
    longest_share: float = 0.3
    """Of the time for trials, what a proposed one may need."""
    sides_s: float = 12.0
    """To measure loader and device alone: what decides most comes first, in some fifteen points."""
    sides_share: float = 0.15
    """The same as a share of the time for trials."""
    most_sides_share: float = 0.3
    """The share where the usual one is less than `telling_sides_s`."""
    telling_sides_s: float = 4.0
    """Seconds for some twenty points of 0.2 s."""
    sides_starts: float = 4.0
    """Starts of the baseline that measuring the sides may take: enough where a workload takes long
    to build."""
    side_s: float = 0.2
    """For which one point of a side is measured; some thirty points take six seconds."""
    settling_side_s: float = 0.5
    """The same of what is measured again: the longest stretch of a trial's extras."""
    longest_window_s: float = 6.0
    """Longest window; loaders that pause for a second are rare."""
    brief_window_s: float = 4.0
    """Window in a short search: where starts are slow, steps mostly are, and three blocks take
    longer."""
    first_window_s: float = 2.0
    """Window of the baseline, of which nothing is known."""
    shortest_window_s: float = 1.5
    """Shortest window, however little time is left: seven blocks."""
    ceiling_share: float = 0.1
    """Of a window's time, what a ceiling may take, so that a trial takes a fifth more at most."""
    shortest_ceiling_s: float = 0.2
    """Shortest stretch: some steps of most workloads."""
    longest_ceiling_s: float = 0.5
    """Longest stretch: a ceiling needs no more precision."""
    stress_s: float = 12.0
    """Training on the largest samples where there is time: longer than a trial's window."""
    shortest_stress_s: float = 1.0
    """A shorter run would end before memory has reached its peak."""
    brief_stress_s: float = 4.0
    """In a short search: the three steps with each kind of batch mostly take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How long a launcher waits before it ends what still runs of a trial."""

    follow_within_s: float = 5.0
    """For a group's other ranks, once one has ended. gloo's ranks notice a closed connection at
    once and report it; NCCL's would wait for minutes."""
    stacks_within_s: float = 2.0
    """For the stacks of ranks that stand still. All write theirs at about the same time; those
    before the deadline come later than this."""
    block_within_s: float = 20.0
    """For the block of a trial that was told to end early, unless all of it has taken longer so
    far."""


class WindowRules(FrozenModel):
    """How a trial measures; the one group that a trial's process gets, with its job."""

    max_s: float = 8.0
    """Seconds after which the window ends, whatever its interval is by then."""
    precision: float = 0.02
    """Half-width of the 95 % interval, as a share of the throughput, at which the window ends:
    smaller differences do not decide a search."""
    block_s: float = 0.2
    """Least length of a block: long next to a synchronization, short next to the window."""
    drains_at_edges: bool = False
    """Wait for the device at the end of each block before more is launched, also where it can time
    its own edges: to show what that costs (benchmarks/gpu.py)."""
    warm_up_block_s: float = 0.05
    """Block of the warm-up: a quarter of a window's."""
    warm_up_min_s: float = 0.3
    """Shortest warm-up: a clock that rises with the load has risen."""
    warm_up_max_s: float = 8.0
    """Longest warm-up, as long as a window may take."""
    warm_up_windows: float = 2.0
    """The same in windows, where these are short."""
    slow_factor: float = 3.0
    """Times the median computing time from which a block of the warm-up lets the queue fill, and
    starts it again."""
    whole_epochs_up_to_s: float = 1.0
    """Epochs up to this length are measured whole; of longer ones the restart is added in
    proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of a search, by the question that they answer."""

    ranges: DefaultRanges = DefaultRanges()
    trials: Trials = Trials()
    proof: Proof = Proof()
    stopping: Stopping = Stopping()
    spread: Spread = Spread()
    time: Time = Time()
    ending: Ending = Ending()
    window: WindowRules = field(default_factory=WindowRules)


POLICY = Policy()
"""The policy of a search that names no other."""
