"""Every number that decides something in a search: number of trials, durations, proof, recommendation.

A search reads its numbers from `ResolvedSpace.policy`, which comes from `Plan.policy`. To vary one,
in a test or in a benchmark: `replace(POLICY, proof=replace(POLICY.proof, most_pairs=2))`. Settings
of the user (budget, objective) are no fields here, nor are thresholds within one finding of the
diagnosis, or numbers that only a trial's process reads. The diagnosis, reports, and what merges the
measurements of a trial's ranks, read the defaults.

The line below a field gives its meaning and the source of its value. Without a source, the value is
our own convention: plausible, but not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log

from autotune.frozen import FrozenModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRanges:
    """Values to try of the settings that the user leaves open."""

    least_workers: int = 8
    """Loader workers to try even on few cores; loaders that wait for I/O gain from more workers
    than cores."""
    prefetch_factors: tuple[int, ...] = (2, 4, 8)
    """Batches that each worker prefetches: torch's default, twice and four times as many."""
    accum_steps: tuple[int, ...] = (1, 2, 4)
    """Micro batches per optimizer step."""
    bucket_caps_mb: tuple[float, ...] = (50.0, 100.0)
    """Bucket sizes of DistributedDataParallel, in MiB: twice and four times torch's default."""
    smallest_batch_share: int = 4
    """Divisor of the baseline's micro batch that gives the smallest one to try."""
    slow_tail_fraction: float = 0.2
    """Share of the items' time in slow items from which out-of-order loading is tried. In order, a
    batch with a slow item can hold up all other workers, so that the gain is at most this share
    times the workers: below a fifth it takes more than five workers to gain anything."""
    cores_per_item: float = 1.2
    """Cores that loading one item keeps busy, from which it must run threads that torch does not
    limit: more than its own thread and the system's work for it."""
    guessed_prefetch: int = 4
    """Batches that each worker prefetches in the first guesses: twice torch's default."""
    many_workers_per_core: int = 4
    """Workers per core in the first guess for data that waits for I/O."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Choice of configurations to try, and the end of the search when no trial is worth its time."""

    patience: int = 12
    """Trials in a row without a gain that end a search, if it may stop early. Source:
    benchmarks/regret.py."""
    informed_patience: int = 6
    """The same, counting the model's most promising trials. Source: benchmarks/regret.py."""
    short_search_patience_s: float = 36.0
    """The same in a short search, as seconds of trials."""
    least_patience: int = 3
    """Fewest trials that these seconds may amount to."""
    patient_after: int = 4
    """Trials that do not count towards patience: the baseline and the first guesses."""
    least_gain: float = 0.01
    """Gain, as a share of the throughput, below which no trial and no repeat is worth its time: about
    the run-to-run variation."""
    least_expected: float = 0.02
    """Expected gain, as a share of the throughput, below which a trial is not worth its time. Source:
    benchmarks/regret.py, 84 searches: with 1 % they take 51 s in the median and 11 end beyond 5 % of
    the best; with 2 % 45 s and 10, with 3 % 40 s and 17."""
    least_expected_sds: float = 1 / 3
    """The same, in standard deviations of the run-to-run variation."""
    fewest: int = 3
    """Trials before a search may stop early: the baseline and two that check the model."""
    near_ceiling: float = 0.97
    """Share of the lowest ceiling from which there is no headroom; the run-to-run variation is 1 to
    3 %."""
    near_cores: float = 0.95
    """The same for the bound by the cores. A job that fills two cores gets 1.9 to 1.98 of them; the
    system takes the rest."""
    ceiling_sds: float = 1.0
    """Standard deviations by which a ceiling may exceed its estimate. Both sides are measured for
    longer at the end, so that no stretch of 0.2 s decides."""
    sure_to_fit: float = 0.9
    """Probability of fitting into memory from which a candidate is tried; an out-of-memory error
    costs a whole trial."""
    likely_to_fit: float = 0.5
    """Probability of fitting below which a candidate counts as too large."""
    queue_share: float = 0.5
    """Share of the free RAM that prefetched batches may fill."""
    short_wait_s: float = 3.0
    """Seconds for the workers' first batches up to which a candidate needs no larger gain: about a
    trial."""
    rebuilds: int = 2
    """Builds for a trial in a process of its own: its own, and that of the next shared process."""
    fastest: int = 3
    """Fastest trials whose variants are candidates."""
    same_batch: int = 2
    """Trials at the baseline's global batch that the model proposes: a guess and its correction."""
    closing: int = 3
    """Trials kept for the end: the best at the baseline's batch, at the largest, and one that the
    sampler has begun."""
    hinted: int = 3
    """Best trials of an earlier search to try again, besides its recommendation."""
    same_failures: int = 3
    """Equal failures after which a cause is sought; two may share one by chance."""
    host_bound: float = 0.2
    """Share of the time in which the device waits for the host, from which training is host-bound."""
    cured: int = 2
    """Leading host-bound configurations of which variants with less work for the host are tried."""
    before_cures: int = 2
    """Trials before these variants: the baseline and one more."""
    most_growth: int = 4
    """Largest factor of the micro batch in such a variant. Launches then take a quarter of the time
    per sample."""
    compiling_s: float = 120.0
    """Seconds to compile in a trial. Source: docs/gpu.md, up to 45 s for GPT-2 small on an H100, and
    more for ResNet-50."""
    worth_compiling: float = 10.0
    """Ratio of the seconds that training should save to those of compiling; each start of a training
    compiles again."""
    most_listed: int = 20_000
    """Combinations up to which a space is listed, and method grid allowed: about a second."""
    draws: int = 500
    """Combinations tried to find one trial if the space is drawn from, or all are skipped."""
    all_candidates_up_to: int = 4096
    """Combinations of a space up to which all are candidates, and up to which a space without any is
    refused at the start: about a second to compose them."""
    all_values_up_to: int = 40
    """Values of a range up to which all are tried in variants of the best in a larger space."""
    spread_values: int = 24
    """Values, spread over a longer range, that are tried there besides the nearest."""
    random_candidates: int = 1500
    """Random combinations among the candidates of a larger space."""
    repeats_in_a_row: int = 8
    """Samples in a row without a new configuration before an open combination is picked."""
    most_stressed: int = 3
    """Configurations to try on the largest samples, one after the other, until one fits."""
    sure_room: float = 4.0
    """Ratio of memory limit to peak from which a configuration needs no run on the largest samples."""
    side_sds: float = 2.0
    """Standard deviations by which a side's forecast may be off, either way, in judging whether it
    limits the throughput."""
    ample: float = 1.25
    """Ratio between two sides, uncertainty included, from which the faster one does not limit
    throughput."""
    blamed: float = 0.99
    """Probability that a failure is due to the settings that nothing else ran with, not to the
    machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRules:
    """Curves of loader and device alone: the points that they measure."""

    most_values: int = 6
    """Values of a number that a curve measures."""
    few_workers: int = 4
    """Number of workers for measuring settings whose effect shows when several workers hold each
    other up, if there are enough cores."""
    fastest_precision: float = 8.0
    """Ratio by which half precision on tensor cores may compute faster than float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Repeats, the proof of a gain, and the recommendation."""

    search_error: float = 0.004
    """One-sided error of proofs during the search. Source, of both errors: benchmarks/decisions.py,
    where searches without a possible gain report one in at most 1 %, at variations of 1.5 to
    20 %."""
    settle_error: float = 0.012
    """One-sided error of proofs after the search, of the leader's gain."""
    first_share: float = 0.75
    """Share of the remaining error that a leader may spend."""
    analyses_after: frozenset[int] = frozenset({2, 3, 4, 6, 9, 13, 19, 28})
    """Pairs of runs after which there is an interim analysis, each half as many again: few analyses
    share the error."""
    most_pairs: int = 28
    """Most runs of leader and baseline each, however short: those of the last interim analysis."""
    fewest_runs: int = 2
    """Fewest runs of the baseline, and of a trial that leads, is proven, or is recommended for its
    simplicity. A third run is worth a quarter more."""
    baseline_every: int = 3
    """Runs of other trials after which the baseline runs again. With k others, sqrt(k) of its runs
    for each of theirs are best (Dunnett 1955); a search compares a few at a time."""
    clear: float = 0.005
    """Probability that the best is no faster than the baseline, below which the baseline is not
    repeated during the search: about the error of a proof."""
    most_repeats: int = 3
    """Repeats of trials that may be better than the leader."""
    most_contested: int = 4
    """Runs of the best larger batch, and of the best at the baseline's batch, to decide between
    them."""
    most_lost: int = 2
    """Failed repeats of the baseline after which the proof ends."""
    unlikely: float = 0.05
    """Probability of a worthwhile gain below which the proof ends."""
    worthwhile: float = 0.02
    """Gain, as a share of the throughput, below which it counts as none, and the simpler
    configuration is recommended."""
    precise: float = 0.05
    """Half-width of a proven gain's 95 % interval, on the log scale, at which it needs no further
    runs."""
    precise_share: float = 0.25
    """The same as a share of the gain; the larger of the two counts."""
    large_gain: float = log(1.5)
    """Gain, on the log scale, that few runs decide. Source, of both: benchmarks/regret.py."""
    large_gain_runs: int = 2
    """Further runs that such a gain takes."""
    futile_after: int = 3
    """Pairs of runs before the proof may end because it is out of reach."""
    gain_sds: tuple[float, ...] = (0.01, 0.03, 0.1, 0.4, 1.2)
    """Standard deviations of the prior of a gain's logarithm, a mixture of normal distributions, from
    no gain to a factor of ten. Source: winners of benchmarks/default_search.py and of recorded
    GPU searches gain 1.1 to 22 times."""
    gain_weights: tuple[float, ...] = (0.3, 0.2, 0.2, 0.15, 0.15)
    """Weights of this mixture. Source: benchmarks/decisions.py, where reported gains are right on
    average."""
    usual_gain_sd: float = 0.1
    """Standard deviation of a gain's logarithm: most changes gain little. Source:
    benchmarks/decisions.py."""
    batch_error: float = 0.05
    """One-sided error of preferring a larger batch to the best at the baseline's: more than a
    proof's, since a wrong choice is hardly slower."""
    lead_error: float = 0.05
    """One-sided error of recommending an unproven trial in place of a proven one."""
    most_compared: int = 20
    """Best trials that are compared, besides the baseline, in searches of thousands."""
    sure_sds: float = 3.2
    """Standard errors at which a gain is usually proven, given the errors. Source:
    benchmarks/decisions.py."""
    longest_wait_s: float = 600.0
    """Seconds of further runs up to which more runs are suggested to decide a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Early stopping of a running trial that can't come near the best so far."""

    fewest_blocks: int = 3
    """Blocks of the window before a trial may be stopped."""
    hopeless: float = 0.5
    """Share of the threshold below which a trial is stopped in its warm-up. A clock that rises with
    the load, or a loader that is still starting, does not halve the throughput for long."""
    hopeless_blocks: int = 2
    """Fewest blocks of the warm-up for that."""
    hopeless_s: float = 0.5
    """Fewest seconds of the warm-up for that: ten times a block."""
    lucky_sds: float = 1.64
    """Standard deviations of a difference that one in twenty exceeds: a trial as fast as the best
    is rarely stopped."""
    not_lucky: float = 0.95
    """The same as a quantile of Student's t, on accelerators, where the variation between hosts is
    little known."""
    busy_margin: float = 0.02
    """Share by which a busier device may raise a score: the default of objective.busy_weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Run-to-run variation of the logarithm of the throughput: what is assumed, limits, outliers."""

    cpu_sd: float = 0.1
    """Variation on a CPU. Source: benchmarks/results, where it is 2 to 20 %."""
    host_sd: float = 0.1
    """Variation of host-bound runs on an accelerator. Source:
    benchmarks/results/gpu-nvidia-h200.json and gpu-nvidia-h100-80gb-hbm3.json, where it is 2 to
    20 %."""
    device_sd: float = 0.004
    """Variation of device-bound runs. Source: the same files, where it is 0.03 to 0.3 %."""
    degrees_of_freedom: float = 2.0
    """Degrees of freedom of these assumptions: machines differ by a factor of 2 either way, as a
    standard deviation from three runs does. Source: benchmarks/results, where it is 1.5 to 20 %."""
    least_sd: float = 0.002
    """Least variation of any machine, and least error of a run by its own window, which keep intervals
    from closing."""
    most_window_sd: float = 0.1
    """Largest standard deviation of a run by its own window: with a loader that pauses periodically,
    batches differ far more than windows. Source: benchmarks/surfaces, `bursty`: 26 % by batch
    means, 7 % between repeats."""
    most_second_sd: float = 0.5
    """The same for planning a window's length: a window must contain a pause of its loader."""
    least_factor: float = 1 / 20
    """Smallest variation that evidence considers, as a multiple of the assumed one."""
    most_factor: float = 6.0
    """Largest variation that evidence considers, as a multiple of the assumed one."""
    most_sd: float = 0.5
    """Least upper end of these variations, since other processes can slow a device down by more than it ever varies
    alone."""
    disturbed_sd: float = 1.0
    """Standard deviation added to a disturbed run: other processes slow a machine down by factors."""
    outlier_sds: float = 4.0
    """Robust standard deviations below the other runs from which a run is disturbed: one in 30,000
    normal runs lies there."""
    outlier_factor: float = 1.8
    """Least ratio of the other runs' throughput to such a run's. With 20 % run-to-run variation that
    is three standard deviations; a smaller factor would drop runs that were only unlucky, and bias
    the rest upwards (benchmarks/decisions.py)."""
    agreeing_factor: float = 1.3
    """Ratio within which two of the other runs must agree; runs of the same settings differ by 1 to
    20 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Deadlines, and durations of the parts of a search: long enough for slow ones, short enough for a hang."""

    slow_build_s: float = 10.0
    """Seconds to build a workload from which a search without limits is a short one: about a
    trial."""
    baseline_deadline_s: float = 600.0
    """Deadline of a probe and of a baseline, of which nothing is known; a first download or
    compilation fits in."""
    deadline_factor: float = 10.0
    """Ratio of a deadline to the seconds of the reference, or of the trial itself."""
    least_deadline_s: float = 20.0
    """Shortest deadline of a trial."""
    least_compile_deadline_s: float = 120.0
    """Shortest deadline of a trial that compiles."""
    least_repeat_deadline_s: float = 30.0
    """Shortest deadline of a repeat."""
    build_factor: float = 2.0
    """Builds added to a deadline, since a trial may have to build what the reference had not."""
    shared_from_s: float = 1.0
    """Seconds to build a workload from which trials share a process, and save more than a tenth of
    a search on a CPU. Source: benchmarks/shared_trials.py."""
    grace_s: float = 5.0
    """Seconds by which the last run may exceed a time-out, so that it is not lost for a moment."""
    writing_s: float = 2.0
    """Seconds kept at the end of a time-out to write results: plots take a second or two on a slow
    machine."""
    writing_share: float = 0.06
    """Largest share of the time-out for that."""
    deciding_share: float = 0.25
    """Share of the time-out for the proof of the best's gain."""
    deciding_s: float = 45.0
    """Seconds for the proof without a time-out, so that an answer takes a minute."""
    short_search_deciding_builds: float = 4.0
    """The same in a short search, in builds of the workload."""
    short_search_builds: float = 2.0
    """Builds that the trials of a short search may take."""
    short_search_trials_s: float = 60.0
    """Least seconds for these trials."""
    short_search_end_s: float = 30.0
    """Estimated seconds of a short search's end, without a build."""
    longest_share: float = 0.3
    """Share of the time for trials that one proposed trial may take."""
    sides_s: float = 12.0
    """Seconds to measure loader and device alone: what decides most comes first, in some fifteen
    points."""
    sides_share: float = 0.15
    """The same as a share of the time for trials."""
    most_sides_share: float = 0.3
    """This share if the usual one is less than `telling_sides_s`."""
    telling_sides_s: float = 4.0
    """Seconds for some twenty points of 0.2 s."""
    sides_starts: float = 4.0
    """Starts of the baseline that measuring the sides may take: enough for a workload that is slow
    to build."""
    side_s: float = 0.2
    """Seconds to measure one point of a side; some thirty points take six seconds."""
    settling_side_s: float = 0.5
    """The same for a point that is measured again: the longest stretch of a trial's extras."""
    longest_window_s: float = 6.0
    """Longest window, in seconds; loaders that pause for a second are rare."""
    short_search_window_s: float = 4.0
    """Window in a short search, in seconds: slow starts mostly mean slow steps, and three blocks
    take longer."""
    first_window_s: float = 2.0
    """Window of the baseline, in seconds, of which nothing is known."""
    shortest_window_s: float = 1.5
    """Shortest window, in seconds, however little time is left: seven blocks."""
    ceiling_share: float = 0.1
    """Share of a window's time for one ceiling, so that a trial takes a fifth more at most."""
    shortest_ceiling_s: float = 0.2
    """Shortest stretch of a ceiling, in seconds: some steps of most workloads."""
    longest_ceiling_s: float = 0.5
    """Longest stretch, in seconds: a ceiling needs no more precision."""
    stress_s: float = 12.0
    """Seconds of training on the largest samples, if there is time: longer than a trial's window."""
    shortest_stress_s: float = 1.0
    """The least of these seconds: a shorter run would end before memory has reached its peak."""
    short_search_stress_s: float = 4.0
    """The same in a short search: three steps with each kind of batch mostly take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Estimated durations of trials and of a search, where nothing was measured."""

    trials: int = 9
    """Trials of a search that may stop early. Source: benchmarks/regret.py."""
    unguided_trials: int = 20
    """Trials of a search that only its patience ends, after 16 trials and 12 since the last gain."""
    first_trial_s: float = 4.0
    """Seconds of the baseline with ceilings and profile, without the start of its process."""
    trial_s: float = 2.5
    """Seconds of another trial, likewise."""
    curves_s: float = 8.0
    """Seconds of the curves of loader and device alone."""
    overhead_s: float = 1.5
    """Seconds of a trial outside its window."""
    baseline_factor: float = 1.1
    """Ratio of all trials' seconds to those without the runs of the baseline in between."""
    settling_runs: int = 4
    """Runs after the last trial: leader and baseline, twice each. Source: benchmarks/regret.py."""
    first_batches: int = 2
    """Batches that each worker makes before the window: its first one, and one while steps become
    steady."""
    fewest_steps: int = 6
    """Optimizer steps of the shortest trial: three before its window, and three blocks in it."""
    least_measuring_s: float = 10.0
    """Seconds that measuring takes in a short search, however fast the steps are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Waiting times of a launcher before it ends the rest of a trial."""

    follow_within_s: float = 5.0
    """Seconds for a group's other ranks to follow once one has ended. gloo's ranks notice a closed
    connection at once and report it; NCCL's would wait for minutes."""
    stacks_within_s: float = 2.0
    """Seconds for ranks that hang to write their stacks. All write at about the same time; stacks
    written before the deadline come later than this."""
    block_within_s: float = 20.0
    """Seconds for the current block of a trial that was asked to end early, unless all of it has
    taken longer so far."""


class WindowRules(FrozenModel):
    """Measurement window of a trial: the only group of numbers that is sent to a trial's process."""

    max_s: float = 8.0
    """Seconds after which the window ends, whatever its interval is by then."""
    precision: float = 0.02
    """Half-width of the 95 % interval, as a share of the throughput, at which the window ends:
    smaller differences do not decide a search."""
    block_s: float = 0.2
    """Shortest block, in seconds: long next to a synchronization, short next to the window."""
    warm_up_block_s: float = 0.05
    """Block of the warm-up, in seconds: a quarter of a window's."""
    warm_up_min_s: float = 0.3
    """Shortest warm-up, in seconds: a clock that rises with the load has risen by then."""
    warm_up_max_s: float = 8.0
    """Longest warm-up, in seconds: as long as a window may take."""
    warm_up_windows: float = 2.0
    """Longest warm-up in windows, if these are short."""
    slow_factor: float = 3.0
    """Ratio to the median computing time from which a block lets the queue fill, so that the warm-up
    starts again."""
    whole_epochs_up_to_s: float = 1.0
    """Seconds up to which epochs are measured whole; of longer ones the restart is added in
    proportion."""
    starving_share: float = 0.05
    """Share of the loop's time waiting for data from which the loader limits it. With less, the count
    of made samples is trusted up to that share, which is about its largest effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPrior:
    """Prior of the logarithm of a cost in the throughput model; effects of settings: settings_table."""

    mean: float = 0.0
    """Mean, if the level is not that of the measurements, of the cores or of the softness."""
    if_pinned: float = 0.0
    """Addition to the mean with pinned memory."""
    level_sd: float = 1.5
    """Standard deviation of the level: a factor of 4.5 either way."""
    interaction_sd: float = 0.0
    """Standard deviation of the interaction of all settings."""
    pair_sd: float = 0.0
    """Standard deviation of the interaction of the first two effects, batch and workers: the more
    workers share the items, the more the cost of a batch counts for a loader."""


_COSTS = {
    "items": CostPrior(interaction_sd=0.15, pair_sd=0.4),
    "per_batch": CostPrior(mean=-2.5),
    "most_workers": CostPrior(level_sd=1.0),
    "samples": CostPrior(interaction_sd=0.08),
    "per_micro_batch": CostPrior(mean=-1.0),
    "per_step": CostPrior(mean=-3.0),
    "exchange": CostPrior(mean=-2.0, level_sd=1.0),
    "copies": CostPrior(),
    # An eighth of a blocking copy is hidden, a quarter of another; user code that copies ahead may
    # hide all of it
    "hidden": CostPrior(mean=-2.0, if_pinned=1.0, level_sd=2.5),
    "launching": CostPrior(interaction_sd=0.05),
    # 1.0 to 1.8 times as long as alone. Source: docs/gpu.md, an H100's launching in tight loops and
    # in loops with workers
    "slower": CostPrior(mean=log(1.2), level_sd=0.25),
    # With pinning, a thread takes the batches from the workers: 0.11 ms instead of 1.0 ms on an
    # H200, 0.2 ms instead of 1.6 ms on an H100
    "taking": CostPrior(if_pinned=log(8)),
    "softness": CostPrior(level_sd=1.0),  # its mean is Throughput.softness
    "crowding": CostPrior(mean=log(0.01), level_sd=2.0),  # one per cent as a rule
    "shortfall": CostPrior(level_sd=0.1, interaction_sd=0.08),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The throughput model: its priors, its law, and how far it trusts an observation."""

    costs: Mapping[str, CostPrior] = field(default_factory=lambda: _COSTS, hash=False)
    """Priors of the costs, see models/throughput_law.COSTS."""
    softness: float = 8.0
    """Softness of a minimum of two sides, before runs show it: two equal sides reach 92 % of either
    alone."""
    workers_softness: float = 4.0
    """Softness of the minimum of present and useful workers."""
    unmeasured_factor: float = 2.0
    """Expected ratio of a side that was not measured alone to the throughput of the runs."""
    scatter_factors: tuple[float, ...] = (6.0, 3.5, 2.0, 1.4, 1.0, 0.7, 0.4)
    """Candidate standard deviations of the scatter, relative to the learned run-to-run variation.
    Larger ones are easier to fit: each fit starts the next."""
    cpu_side_sd: float = 0.08
    """Relative standard deviation between a side alone and the same side in a run, by chance and by
    shared cores, on a CPU."""
    device_side_sd: float = 0.02
    """The same on a separate device."""
    host_alone_sd: float = 0.3
    """The same for a host's launching alone, and for its fetching of prefetched batches. Source:
    docs/gpu.md, where an H100's host launched one step in 2.6, 4.1 and 4.5 ms within minutes."""
    stopped_sd: float = 0.05
    """Additional standard deviation of a trial stopped early, before its restarts and its whole queue
    were measured."""
    most_trials: int = 60
    """Trials that the model is fitted to, more than a search makes by itself. A fit's time grows with
    the cube of their number, a forecast's time and memory in proportion."""


@dataclass(frozen=True, slots=True)
class Normal:
    """Mean and standard deviation of a normal prior."""

    mean: float
    sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory model: its priors, as shares of the highest peak, and what exceeds a limit.

    The priors of single settings stand in settings_table.
    """

    spread_sd: float = 0.02
    """Prior standard deviation of a peak."""
    spread_counts: float = 4.0
    """Observations that this prior counts as. Of the surfaces' peaks, 95 to 99 % lie within the 95 %
    interval after three to ten trials with smaller batches."""
    alone_sd: float = 0.06
    """Additional standard deviation of the device alone if memory is the host's: its process keeps
    what earlier points took."""
    fixed: Normal = Normal(0.5, 1.0)
    """Memory without a batch."""
    growth: Normal = Normal(0.5, 0.5)
    """Memory of the largest measured batch. Before a second one is measured, a batch twice as large is
    expected to take 50 % more, with a standard deviation of as much."""
    worker: Normal = Normal(0.03, 0.03)
    """RAM of a loader worker."""
    held_batch: Normal = Normal(0.003, 0.004)
    """RAM of each batch that workers hold."""
    shared_pages_bytes: Normal = Normal(280 * 2**20, 112 * 2**20)
    """RAM of the pages that a trial shares with the process it was forked from, torch's libraries, in
    bytes. Source: 270 MiB on the surfaces of benchmarks/."""
    group: Normal = Normal(0.0, 0.3)
    """Addition of several processes, or of DataParallel, to the fixed part and to the growth."""
    alone_fixed: Normal = Normal(0.03, 0.05)
    """RAM that measuring a device alone takes in addition."""
    alone_growth: Normal = Normal(0.2, 0.3)
    """The same for the largest measured batch."""
    half_fixed_sd: float = 0.1
    """Standard deviation of the change of the fixed part by half precision."""
    half_growth_sd: float = 0.3
    """Standard deviation of the change of the growth by half precision."""
    halves_correlation: float = 0.97
    """Correlation of these changes: until both half precisions are measured, they are expected to be
    similar."""
    most_peaks: int = 240
    """Peaks that the model is fitted to, those of more trials than a search makes by itself; each
    forecast compares with all of them."""
    unknown_excess: float = 0.25
    """Expected excess over the limit, as a share, of a trial that ran out of memory by an unknown
    amount: a guess for the model and the sampler."""
    least_excess: float = 0.01
    """Least excess over the limit of a run that thrashes or was ended for its memory: a lower bound,
    which reports show."""
    leak_within_s: float = 7 * 24 * 3600.0
    """Seconds within which memory growth must reach the limit to be reported, longer than most runs
    between restarts."""
    no_leak_for_s: float = 24 * 3600.0
    """Seconds of training for which a window must exclude that growth reaches the limit, else this is
    reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of a search, grouped by the question that they answer."""

    ranges: DefaultRanges = DefaultRanges()
    curves: CurveRules = CurveRules()
    trials: Trials = Trials()
    proof: Proof = Proof()
    stopping: Stopping = Stopping()
    spread: Spread = Spread()
    time: Time = Time()
    estimates: Estimates = Estimates()
    ending: Ending = Ending()
    window: WindowRules = field(default_factory=WindowRules)
    throughput: Throughput = field(default_factory=Throughput)
    memory: Memory = Memory()


POLICY = Policy()
"""The policy of a search that names no other."""
