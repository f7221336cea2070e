"""Compute the default range of each setting from the machine, the workload and the probe's facts.

Comes in: a Basis (the user's part of the space, baseline, objective, facts, machine). Goes out: a
domain for every setting that includes the baseline's value, and caps on proposals. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, log2, prod

from autotune.config.command import PLACEHOLDERS
from autotune.config.environment import Environment
from autotune.config.plan import (
    Choices,
    Domain,
    IntRange,
    Objective,
    ScriptFacts,
    SettingValue,
    WorkloadFacts,
)
from autotune.config.training_config import (
    TORCH_FIRST_BUCKET_MB,
    TORCH_PREFETCH_FACTOR,
    UNMEASURED,
    DdpConfig,
    NumaBinding,
    TrainingConfig,
)
from autotune.policy import POLICY, DefaultRanges, Policy
from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS
from autotune.space import constraints as rules
from autotune.space.constraints import bindings_tried
from autotune.space.scaling import global_batch_of, samples_within


def whole_numbers(domain: Domain) -> list[int]:
    """Return the whole numbers among a domain's values, in its order."""
    return [value for value in domain if isinstance(value, int) and not isinstance(value, bool)]


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` (2 or more) of some numbers, spread evenly over their logarithms, ends included."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    low = log2(1 + ordered[0])
    high = log2(1 + ordered[-1])
    wanted = [2 ** (low + (high - low) * place / (most - 1)) - 1 for place in range(most)]
    return sorted({min(ordered, key=lambda number: abs(number - value)) for value in wanted})


def group_sizes(domains: Mapping[str, Domain]) -> tuple[int, ...]:
    """Return the numbers of ranks above one that a space tries under DistributedDataParallel."""
    sizes = whole_numbers(domains["world_size"]) if "ddp" in domains["strategy"] else []
    return tuple(sorted(size for size in sizes if size > 1))


# Settings of a script that can be changed from outside


_UNSCALED = "float16"
"""Precision that needs a GradScaler, which can't be added to a script from outside."""


def within_reach(
    given: Mapping[str, Domain], script: ScriptFacts, environment: Environment
) -> Mapping[str, Domain] | str:
    """Fix the settings of a script that can't be changed from outside.

    Returns:
        The user's part of the space with those settings fixed to the script's values, or why the
        user's part can't be searched.
    """
    own = _own_values(script)
    fixed = {
        name: Choices(values=(value,)) for name, value in own.items() if name not in script.reached
    }
    for name, domain in given.items():
        wanted = next((value for value in domain if value != own[name]), own[name])
        if name in fixed and wanted != own[name]:
            option = f", or put {{{name}}} into the command where the script has an option for it"
            return (
                f"space.{name} of a script must be within reach from outside, but got {wanted!r}, "
                f"and the script alone "
                f"sets it, to {own[name]!r}; leave it out of the "
                f"space{option if name in PLACEHOLDERS else ''}"
            )
    is_unscaled = _UNSCALED in given.get("amp_dtype", ()) and own["amp_dtype"] != _UNSCALED
    if is_unscaled and "amp_dtype" not in script.placeholders:
        return (
            f"space.amp_dtype of a script must leave {_UNSCALED} out, which trains only with a "
            f"GradScaler of its own; "
            "leave it out, or put {amp_dtype} into the command where the script has an option for "
            "it"
        )
    is_switched = own["amp_dtype"] == "tf32" and "amp_dtype" not in script.placeholders
    if is_switched and "float32" in given.get("amp_dtype", ()):
        return (
            "space.amp_dtype of a script that allows TF32 must leave float32 out, but has it: the "
            "script sets it for "
            "itself; leave it out, or take the line out of the script that allows TF32"
        )
    ranges: dict[str, Domain] = {**given, **fixed}
    is_chosen = "amp_dtype" in given or "amp_dtype" in script.placeholders
    if "amp_dtype" in script.reached and not is_chosen:
        out_of_reach = {_UNSCALED, "float32"} if own["amp_dtype"] == "tf32" else {_UNSCALED}
        native = tuple(
            dtype for dtype in environment.native_amp_dtypes if dtype not in out_of_reach
        )
        ranges["amp_dtype"] = Choices(values=native)
    return dict(sorted(ranges.items()))


def _own_values(script: ScriptFacts) -> dict[str, SettingValue]:
    """Return the script's own settings, by their names in a space."""
    observed = script.observed
    return {
        name: value
        for name, value in observed.by_name.items()
        if name not in UNMEASURED and (observed.is_ddp or not name.startswith(DDP_PREFIX))
    }


# Default ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The inputs of default ranges and of proposals."""

    given: Mapping[str, Domain]
    """Settings that the user gave, by name: `SearchSpace.given`."""
    baseline: TrainingConfig
    objective: Objective
    facts: WorkloadFacts
    environment: Environment
    drop_last: bool = True
    policy: Policy = POLICY

    @property
    def ranges(self) -> DefaultRanges:
        """Numbers of the policy that ranges are made from."""
        return self.policy.ranges

    @property
    def keeps_batch(self) -> bool:
        """True if the global batch stays that of the baseline."""
        return self.objective.global_batch == "keep"

    @property
    def most_samples(self) -> int:
        """Most samples of a global batch."""
        most = int(self.objective.max_batch_scale * self.baseline.global_batch_size)
        length = self.facts.dataset_length
        return max(1, min(most, length)) if length is not None and self.drop_last else most

    @property
    def most_shares(self) -> float:
        """Most ranks that can each have a sample of the largest global batch."""
        if self.keeps_batch:
            return self.baseline.global_batch_size
        return inf if self.facts.batch_setting in self.given else self.most_samples


class Ranges(dict[str, Domain]):
    """Domains of a space, each computed when first read, since some depend on others.

    The entries of settings_table compute them from the properties below, which hold what workload
    and machine allow.
    """

    def __init__(self, basis: Basis) -> None:
        super().__init__(basis.given)
        self.basis = basis
        self.baseline: TrainingConfig = basis.baseline
        self.facts: WorkloadFacts = basis.facts
        self.environment: Environment = basis.environment

    def __missing__(self, name: str) -> Domain:
        tried = BY_NAME[name].tried
        assert tried is not None, f"{name} is not searched"  # noqa: S101 - a bug of ours
        values = tried(self)
        if isinstance(values, range):
            self[name] = IntRange(low=values[0], high=values[-1])
        else:
            self[name] = Choices(values=tuple(dict.fromkeys(values)))
        return self[name]

    @property
    def ddp(self) -> DdpConfig:
        """The baseline's arguments of DistributedDataParallel."""
        return self.baseline.ddp_settings

    @property
    def thread_counts(self) -> list[int]:
        """Threads per operation that leave loader workers a core; none if the CPU does not train."""
        if self.environment.device_kind != "cpu":
            return []
        return _powers_of_two(self.environment.cores - 1)

    @property
    def graph_modes(self) -> list[SettingValue]:
        """Modes with CUDA graphs, if the model may be compiled and batches have one shape, as each is recorded.

        max-autotune compiles for minutes, so it is tried only if the user lists it.
        """
        compiles = True in self.basis.given.get("compile", (self.baseline.compile,))
        is_worthwhile = self.environment.has_cuda_graphs and bool(self.facts.has_fixed_shapes)
        return ["reduce-overhead"] if compiles and is_worthwhile else []

    @property
    def cudnn_searches(self) -> list[bool]:
        """Values of cudnn_benchmark to try: on if it can pay, as it times each shape and may choose differently.

        None if no module convolves, since the model may do so without one. Source: pytorch.org,
        "Performance Tuning Guide", "Enable cuDNN auto-tuner", and "Reproducibility".
        """
        facts = self.facts
        if not self.environment.has_cuda_graphs:
            return [False]
        if not facts.has_convolutions:
            return []
        return [False, bool(facts.has_fixed_shapes) and not facts.is_deterministic]

    @property
    def rank_counts(self) -> Sequence[int]:
        """Numbers of devices of a host, and of whole hosts; on the CPU or a named device, only if asked for."""
        asked = frozenset(self.basis.given.get("strategy", ()))
        counts = {1} if asked == {"single"} else set(_counts_here(self.basis, asked))
        if asked and "single" not in asked:
            counts = counts - {1} or {1}
        if not asked or self.baseline.strategy in asked:
            counts.add(self.baseline.world_size)
        return _numbers(counts)

    @property
    def ranks(self) -> list[int]:
        """Numbers of ranks that are tried."""
        return whole_numbers(self["world_size"])

    @property
    def strategies(self) -> list[str]:
        """Strategies that the numbers of ranks allow."""
        groups = [size for size in self.ranks if size > 1]
        most = rules.ranks_of_host(self.environment)
        has_dp = self.environment.device_kind in rules.DATA_PARALLEL_KINDS
        is_possible = {
            "single": 1 in self.ranks,
            "dp": has_dp and any(size <= most for size in groups),
            "ddp": bool(groups),
        }
        return [name for name, holds in is_possible.items() if holds]

    @property
    def most_workers_of_a_rank(self) -> int:
        """Most loader workers per rank: those of a host, divided among its ranks."""
        is_one = "single" in self["strategy"] or "dp" in self["strategy"]
        smallest = 1 if is_one else min(group_sizes(self), default=1)
        sharing = rules.ranks_on_host(smallest, self.environment)
        share = most_workers(self.facts, self.environment, self.basis.ranges) // sharing
        return max(1, share, self.baseline.num_workers)

    @property
    def prefetch_factors(self) -> list[int]:
        """Prefetch factors, ascending, the baseline's included."""
        own = self.baseline.batches_per_worker or TORCH_PREFETCH_FACTOR
        return sorted({*self.basis.ranges.prefetch_factors, own})

    @property
    def orders(self) -> list[SettingValue]:
        """Values of in_order to try; a single worker always keeps the order.

        Not False if the user's code asks for determinism, since runs of one seed would differ.
        """
        facts = self.facts
        has_several = max(whole_numbers(self["num_workers"])) > 1
        is_slowed = (facts.slow_tail_fraction or 0.0) >= self.basis.ranges.slow_tail_fraction
        return [True, False] if has_several and is_slowed and not facts.is_deterministic else []

    @property
    def threads_in_workers(self) -> list[SettingValue]:
        """Threads per operation in workers to try: powers of two up to a limit; none without a reason.

        The limit is the cores that an item keeps busy, and half of the cores.
        """
        busy = self.facts.cores_per_item or 0.0
        cores = self.environment.cores
        has_workers = max(whole_numbers(self["num_workers"])) > 0
        is_reason = busy >= self.basis.ranges.cores_per_item and not self.facts.is_tf_data
        if not has_workers or not is_reason or cores < 2:
            return []
        return [None, *_powers_of_two(min(ceil(busy), cores // 2))]

    @property
    def bindings(self) -> list[NumaBinding]:
        """Bindings that have an effect for one of the numbers of ranks tried."""
        ranks = (rules.ranks_on_host(count, self.environment) for count in (1, *group_sizes(self)))
        return bindings_tried(ranks, self.environment)

    @property
    def token_budgets(self) -> Sequence[int | None]:
        """Token budgets: the baseline's times powers of two; only that if no batch sampler takes one."""
        own = self.baseline.max_tokens
        if own is None or not self.facts.has_token_budget:
            return [own]
        least = max(1, own // max(self.basis.ranges.smallest_batch_share, *self.ranks))
        if self.basis.keeps_batch:
            wanted = global_batch_of(self.baseline, self.facts)
            parts = (wanted // power for power in _powers_of_two(wanted) if wanted % power == 0)
            return sorted({own, *(part for part in parts if part >= least)})
        sizes = {size for power in _powers_of_two(own) if (size := own // power) >= least}
        sizes |= {own // count for count in self.ranks if own % count == 0}
        doubled = 2 * own
        while samples_within(doubled, self.baseline) <= self.basis.most_samples:
            sizes.add(doubled)
            doubled *= 2
        return sorted(sizes)

    @property
    def batch_sizes(self) -> list[int]:
        """Samples per micro batch; with token budgets, the average of each."""
        facts = self.facts
        baseline = self.baseline
        cap = self.basis.most_samples
        if facts.has_token_budget:
            return sorted(
                {samples_within(budget, baseline) for budget in whole_numbers(self["max_tokens"])}
            )
        if facts.fixed_batch_size is not None:
            return [facts.fixed_batch_size]
        if self.basis.keeps_batch:
            wanted = baseline.global_batch_size
            powers = [power for power in _powers_of_two(wanted) if wanted % power == 0]
            sizes = {*powers, *(wanted // power for power in powers), baseline.micro_batch_size}
            return sorted(size for size in sizes if size <= cap)
        own = baseline.micro_batch_size
        low = max(1, own // max(self.basis.ranges.smallest_batch_share, *self.ranks))
        sizes = {size for size in _powers_of_two(cap) if size >= low}
        shares = {own // count for count in self.ranks if own % count == 0 and own // count <= cap}
        return sorted(sizes | shares | {min(own, cap)})

    @property
    def accumulations(self) -> list[int]:
        """Micro batches per optimizer step; those that divide the global batch if it is kept."""
        setting = self.facts.batch_setting
        steps = set[int]() if setting in self.basis.given else set(self.basis.ranges.accum_steps)
        if self.basis.keeps_batch:
            wanted = global_batch_of(self.baseline, self.facts)
            sizes = whole_numbers(self[setting])
            together = {size * count for size in sizes for count in self.ranks}
            steps = {wanted // samples for samples in together if wanted % samples == 0}
        return sorted(steps | {self.baseline.grad_accum_steps})

    @property
    def bucket_caps(self) -> list[float]:
        """Bucket caps up to the first that holds all gradients; all if their size is unknown."""
        mib = self.facts.gradient_bytes / 2**20
        return [
            cap
            for before, cap in pairwise((TORCH_FIRST_BUCKET_MB, *self.basis.ranges.bucket_caps_mb))
            if before < mib or mib == 0
        ]

    @property
    def may_be_static(self) -> bool:
        """True if DistributedDataParallel may be promised a static graph.

        Not with unused parameters: the probe does not know if they are always the same, as a static
        graph requires.
        """
        return 1 in self["grad_accum_steps"] and not self.facts.has_unused_parameters

    @property
    def hooks(self) -> Iterator[str]:
        """Yield the hooks that round to a precision that is also computed in."""
        for hook, dtype in rules.HOOK_DTYPES.items():
            if dtype in self["amp_dtype"] and rules.hook_obstacle(hook, self.environment) is None:
                yield hook


def default_ranges(basis: Basis) -> dict[str, Domain]:
    """Return a domain for every setting: the user's, or a range that suits workload and machine.

    Settings of DistributedDataParallel are included if it is tried.
    """
    domains = Ranges(basis)
    has_ddp = bool(group_sizes(domains))
    searched = [
        one.name for one in SETTINGS if one.tried is not None and (has_ddp or not one.is_of_ddp)
    ]
    return {name: domains[name] for name in sorted(searched)}


def most_workers(
    facts: WorkloadFacts, environment: Environment, ranges: DefaultRanges = POLICY.ranges
) -> int:
    """Return the most loader workers of all ranks on a host: twice its cores, and at least eight."""
    return max(ranges.least_workers, 2 * environment.cores) if facts.is_sharded else 1


def workers_cap(basis: Basis) -> int | None:
    """Return the cap on loader workers of all ranks on a host; None if the user has listed num_workers."""
    if "num_workers" in basis.given:
        return None
    sharing = rules.ranks_on_host(basis.baseline.process_count, basis.environment)
    return max(
        most_workers(basis.facts, basis.environment, basis.ranges),
        basis.baseline.num_workers * sharing,
    )


def batch_cap(basis: Basis, domains: Mapping[str, Domain]) -> int | None:
    """Return the cap on the global batch in samples, raised for listed accumulation or ranks; None without one."""
    if basis.keeps_batch or basis.facts.batch_setting in basis.given:
        return None
    listed = [
        max(whole_numbers(domains[name]))
        for name in ("grad_accum_steps", "world_size")
        if name in basis.given
    ]
    smallest = min(whole_numbers(domains["micro_batch_size"]))
    return max(basis.most_samples, basis.baseline.global_batch_size, smallest * prod(listed))


def _counts_here(basis: Basis, asked: frozenset[SettingValue]) -> Iterable[int]:
    """Return the numbers of ranks to try; with "ddp" more than fit on a host, if each has a sample."""
    environment = basis.environment
    most = rules.ranks_of_host(environment)
    most_of_all: float = most
    if not asked or "ddp" in asked:
        most_of_all = min(rules.most_ranks(environment), max(most, basis.most_shares))
    if environment.device_kind == "cpu":
        return _powers_of_two(int(most_of_all)) if asked else [1]
    is_named = most < environment.device_count
    if environment.device_kind not in rules.GROUP_BACKENDS or (is_named and not asked):
        return [1]
    hosts = (*_powers_of_two(environment.hosts), environment.hosts)
    whole_hosts = [count * most for count in hosts if most < count * most <= most_of_all]
    return [*range(1, most + 1), *whole_hosts]


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _numbers(values: Iterable[int]) -> Sequence[int]:
    """Return numbers in order; as a range if they are consecutive, so samplers know which are close."""
    ordered = sorted(set(values))
    is_row = len(ordered) > 2 and len(ordered) == ordered[-1] - ordered[0] + 1
    return range(ordered[0], ordered[-1] + 1) if is_row else ordered
