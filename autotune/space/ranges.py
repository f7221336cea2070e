"""The default range of each setting, from the machine, the dataset and what the probe has found."""

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
    DdpConfig,
    NumaBinding,
    TrainingConfig,
)
from autotune.policy import POLICY, DefaultRanges, Policy
from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS
from autotune.space import constraints as rules
from autotune.space.constraints import bindings_tried
from autotune.space.scaling import global_batch_of, samples_within, token_budgets

# Questions about domains: their whole numbers, a few values that stand for all, and the sizes of
# groups tried.


def whole_numbers(domain: Domain) -> list[int]:
    """The whole numbers among a domain's values, in its order."""
    return [value for value in domain if isinstance(value, int) and not isinstance(value, bool)]


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many (two or more) of some numbers from 0 up, evenly over their powers of two, both ends included."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    low = log2(1 + ordered[0])
    high = log2(1 + ordered[-1])
    wanted = [2 ** (low + (high - low) * place / (most - 1)) - 1 for place in range(most)]
    return sorted({min(ordered, key=lambda number: abs(number - value)) for value in wanted})


def group_sizes(domains: Mapping[str, Domain]) -> tuple[int, ...]:
    """Numbers of ranks, more than one, that a space tries under DistributedDataParallel; none where it does not."""
    sizes = whole_numbers(domains["world_size"]) if "ddp" in domains["strategy"] else []
    return tuple(sorted(size for size in sizes if size > 1))


# What is tried of the settings that only loader workers have, by what the probe has seen of the
# items. Pure.
#
# Comes in: the facts, the machine, the numbers of workers that are tried. Goes out: values beside
# the baseline's own.


def gains_out_of_order(facts: WorkloadFacts, ranges: DefaultRanges) -> bool:
    """Whether batches in the order in which workers finish them may come faster, and may be tried.

    Not where the user's code asks for determinism: runs of one seed are not alike bit for bit then.
    """
    return (
        facts.slow_tail_fraction or 0.0
    ) >= ranges.slow_tail_fraction and not facts.is_deterministic


def worker_threads_tried(
    facts: WorkloadFacts, environment: Environment, ranges: DefaultRanges
) -> list[int]:
    """Threads of each worker that are worth trying, ascending: one, and twice as many as long as they find cores.

    As many as an item keeps busy, and as two workers have cores for.
    """
    busy = facts.cores_per_item or 0.0
    cores = environment.cores
    if busy < ranges.cores_per_item or cores < 2 or facts.is_tf_data:
        return []
    most = min(ceil(busy), cores // 2)
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


# What of a script is within reach: settings that can't be changed from outside stay as the script
# has them.
#
# Comes in: what the user has given for the space, and what the probe has seen of the script. Goes
# out: the same with every setting out of reach fixed to the baseline's value, or a reason against
# what was given. Pure.


_UNSCALED = "float16"
"""Trains only with a GradScaler, which nobody can put into a script from outside."""


def within_reach(
    given: Mapping[str, Domain], script: ScriptFacts, environment: Environment
) -> Mapping[str, Domain] | str:
    """The user's part of the space with what is out of reach fixed; or why it can't be searched so."""
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
    if (
        "amp_dtype" in script.reached
        and "amp_dtype" not in given
        and "amp_dtype" not in script.placeholders
    ):
        out_of_reach = {_UNSCALED, "float32"} if own["amp_dtype"] == "tf32" else {_UNSCALED}
        native = tuple(
            dtype for dtype in environment.native_amp_dtypes if dtype not in out_of_reach
        )
        ranges["amp_dtype"] = Choices(values=native)
    return dict(sorted(ranges.items()))


def _own_values(script: ScriptFacts) -> dict[str, SettingValue]:
    """Return what the script does by itself, by the names that settings have in a space."""
    observed = script.observed
    return {
        name: value
        for name, value in observed.by_name.items()
        if name != "lr" and (observed.strategy == "ddp" or not name.startswith(DDP_PREFIX))
    }


# Default ranges: what is tried of each setting that the user leaves out.
#
# Comes in: a Basis (what the user has given, the baseline, the objective, workload and machine).
# Goes out: a domain for every setting, with the baseline's own value in it, and the caps on
# proposals from these ranges. settings_table names what is tried of each setting by the properties
# of Ranges. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What default ranges depend on, and proposals after them."""

    given: Mapping[str, Domain]
    """The settings that the user has given, by name: `SearchSpace.given`."""
    baseline: TrainingConfig
    objective: Objective
    facts: WorkloadFacts
    environment: Environment
    drop_last: bool = True
    policy: Policy = POLICY

    @property
    def ranges(self) -> DefaultRanges:
        """The numbers that the ranges are made of."""
        return self.policy.ranges

    @property
    def keeps_batch(self) -> bool:
        """The global batch stays as the baseline's."""
        return self.objective.global_batch == "keep"

    @property
    def most_samples(self) -> int:
        """Samples that a global batch may grow to."""
        most = int(self.objective.max_batch_scale * self.baseline.global_batch_size)
        length = self.facts.dataset_length
        return max(1, min(most, length)) if length is not None and self.drop_last else most

    @property
    def most_shares(self) -> float:
        """Ranks that can have a sample each of the largest global batch that is tried."""
        if self.keeps_batch:
            return self.baseline.global_batch_size
        return inf if self.facts.batch_setting in self.given else self.most_samples


class Ranges(dict[str, Domain]):
    """The domains of a space, each made when it is first asked for, since some depend on others.

    The entries of settings_table make them of the properties below, which say what this workload
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
        self[name] = (
            IntRange(low=values[0], high=values[-1])
            if isinstance(values, range)
            else Choices(values=tuple(dict.fromkeys(values)))
        )
        return self[name]

    @property
    def ddp(self) -> DdpConfig:
        """The baseline's arguments of DistributedDataParallel."""
        return self.baseline.ddp or DdpConfig()

    @property
    def thread_counts(self) -> list[int]:
        """Threads of one operation that leave loader workers a core; none where the CPU does not train."""
        return (
            _powers_of_two(self.environment.cores - 1)
            if self.environment.device_kind == "cpu"
            else []
        )

    @property
    def graph_modes(self) -> list[SettingValue]:
        """CUDA graphs, where the model may be compiled: each shape of a batch would be recorded by itself.

        max-autotune compiles for minutes: it is tried where it is listed.
        """
        compiles = True in self.basis.given.get("compile", (self.baseline.compile,))
        is_worthwhile = self.environment.has_cuda_graphs and bool(self.facts.has_fixed_shapes)
        return ["reduce-overhead"] if compiles and is_worthwhile else []

    @property
    def cudnn_benchmarks(self) -> list[SettingValue]:
        """With cuDNN's timing of its algorithms where it can pay: each shape is timed again, and choices may differ.

        The baseline's value alone where no module convolves: whether the model does otherwise,
        nobody knows. Source: pytorch.org, "Performance Tuning Guide", "Enable cuDNN auto-tuner",
        and "Reproducibility".
        """
        facts = self.facts
        own = self.baseline.cudnn_benchmark
        if not self.environment.has_cuda_graphs:
            return [False, own]
        if not facts.has_convolutions:
            return [own]
        return [False, bool(facts.has_fixed_shapes) and not facts.is_deterministic, own]

    @property
    def rank_counts(self) -> Sequence[int]:
        """Every number of devices of a host, and whole hosts; on the CPU, or with a named device, only where asked."""
        asked = frozenset(self.basis.given.get("strategy", ()))
        counts = {1} if asked == {"single"} else set(_counts_here(self.basis, asked))
        if asked and "single" not in asked:
            counts = counts - {1} or {1}
        if not asked or self.baseline.strategy in asked:
            counts.add(self.baseline.world_size)
        return _numbers(counts)

    @property
    def strategies(self) -> list[str]:
        """Strategies that so many ranks leave to be compared."""
        sizes = self["world_size"]
        groups = [size for size in whole_numbers(sizes) if size > 1]
        most = rules.ranks_of_host(self.environment)
        has_dp = self.environment.device_kind in rules.DATA_PARALLEL_KINDS
        is_possible = {
            "single": 1 in sizes,
            "dp": has_dp and any(size <= most for size in groups),
            "ddp": bool(groups),
        }
        return [name for name, holds in is_possible.items() if holds]

    @property
    def most_workers_of_a_rank(self) -> int:
        """Most loader workers that are tried for a rank: those of a host, divided among its ranks."""
        is_one = "single" in self["strategy"] or "dp" in self["strategy"]
        sharing = rules.ranks_on_host(
            1 if is_one else min(group_sizes(self), default=1), self.environment
        )
        return max(
            1,
            most_workers(self.facts, self.environment, self.basis.ranges) // sharing,
            self.baseline.num_workers,
        )

    @property
    def prefetch_factors(self) -> list[int]:
        """Batches that each worker prepares, in order, the baseline's number with them."""
        return sorted(
            {
                *self.basis.ranges.prefetch_factors,
                self.baseline.prefetch_factor or TORCH_PREFETCH_FACTOR,
            }
        )

    @property
    def orders(self) -> list[SettingValue]:
        """Orders of batches; one worker delivers in order whatever is asked of it."""
        is_worthwhile = max(whole_numbers(self["num_workers"])) > 1 and gains_out_of_order(
            self.facts, self.basis.ranges
        )
        return [True, False] if is_worthwhile else []

    @property
    def worker_threads(self) -> list[SettingValue]:
        """Threads of an operation in workers; none where nothing speaks for limiting them."""
        has_workers = max(whole_numbers(self["num_workers"])) > 0
        threads = (
            worker_threads_tried(self.facts, self.environment, self.basis.ranges)
            if has_workers
            else []
        )
        return [None, *threads] if threads else []

    @property
    def bindings(self) -> list[NumaBinding]:
        """What changes something for one of the numbers of ranks that are tried."""
        ranks = (rules.ranks_on_host(count, self.environment) for count in (1, *group_sizes(self)))
        return bindings_tried(ranks, self.environment)

    @property
    def token_budgets(self) -> list[int | None]:
        """Token budgets; the baseline's alone where no batch sampler takes one."""
        own = self.baseline
        if not self.facts.has_token_budget:
            return [own.max_tokens]
        ranks = whole_numbers(self["world_size"])
        cap = self.basis.most_samples
        return [
            *token_budgets(
                own,
                ranks,
                cap,
                keeps_batch=self.basis.keeps_batch,
                share=self.basis.ranges.smallest_batch_share,
            )
        ]

    @property
    def batch_sizes(self) -> list[int]:
        """Samples of a micro batch; with a token budget, those that each budget holds on average."""
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
            powers = [2**power for power in range(wanted.bit_length()) if wanted % 2**power == 0]
            sizes = {*powers, *(wanted // power for power in powers), baseline.micro_batch_size}
            return sorted(size for size in sizes if size <= cap)
        own = baseline.micro_batch_size
        ranks = whole_numbers(self["world_size"])
        low = max(1, own // max(self.basis.ranges.smallest_batch_share, *ranks))
        sizes = {size for size in _powers_of_two(cap) if size >= low}
        shares = {own // count for count in ranks if own % count == 0 and own // count <= cap}
        return sorted(sizes | shares | {min(own, cap)})

    @property
    def accumulations(self) -> list[int]:
        """Micro batches of an optimizer step; where the global batch is kept, those that divide it."""
        setting = self.facts.batch_setting
        steps = set[int]() if setting in self.basis.given else set(self.basis.ranges.accum_steps)
        if self.basis.keeps_batch:
            wanted = global_batch_of(self.baseline, self.facts)
            sizes = whole_numbers(self[setting])
            ranks = whole_numbers(self["world_size"])
            together = {size * count for size in sizes for count in ranks}
            steps = {wanted // samples for samples in together if wanted % samples == 0}
        return sorted(steps | {self.baseline.grad_accum_steps})

    @property
    def bucket_caps(self) -> list[float]:
        """Caps beyond torch's own, up to the first with room for all gradients; all where their size is unknown."""
        mib = self.facts.gradient_bytes / 2**20
        return [
            cap
            for before, cap in pairwise((TORCH_FIRST_BUCKET_MB, *self.basis.ranges.bucket_caps_mb))
            if before < mib or mib == 0
        ]

    @property
    def may_be_static(self) -> bool:
        """Where DistributedDataParallel may be promised a static graph.

        The probe has found whether parameters get no gradient, not whether these are always the
        same, which a static graph requires.
        """
        return 1 in self["grad_accum_steps"] and not self.facts.has_unused_parameters

    @property
    def hooks(self) -> Iterator[str]:
        """Hooks that round to a precision which is computed in as well."""
        for hook, dtype in rules.HOOK_DTYPES.items():
            if dtype in self["amp_dtype"] and rules.hook_obstacle(hook, self.environment) is None:
                yield hook


def default_ranges(basis: Basis) -> dict[str, Domain]:
    """Return a domain for every setting: the user's where given, else a range that suits workload and machine.

    DistributedDataParallel's settings are among them, by names such as "ddp.bucket_cap_mb", where
    it is tried at all.
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
    """Loader workers that are tried by default, of all ranks on a host: twice its cores, and eight on few cores."""
    return max(ranges.least_workers, 2 * environment.cores) if facts.is_sharded else 1


def workers_cap(basis: Basis) -> int | None:
    """Most loader workers of all ranks on a host; None where the user has listed numbers of workers."""
    if "num_workers" in basis.given:
        return None
    sharing = rules.ranks_on_host(basis.baseline.process_count, basis.environment)
    return max(
        most_workers(basis.facts, basis.environment, basis.ranges),
        basis.baseline.num_workers * sharing,
    )


def batch_cap(basis: Basis, domains: Mapping[str, Domain]) -> int | None:
    """Most samples of a global batch, raised where listed accumulation or ranks need it; None without a cap."""
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
    """With "ddp" more ranks than a host has room for may be tried, as long as each has a sample of the batch."""
    environment = basis.environment
    asks = bool(asked)
    spans = not asked or "ddp" in asked
    most = rules.ranks_of_host(environment)
    most_of_all = (
        min(rules.most_ranks(environment), max(most, basis.most_shares)) if spans else most
    )
    if environment.device_kind == "cpu":
        return _powers_of_two(int(most_of_all)) if asks else [1]
    is_named = most < environment.device_count
    if environment.device_kind not in rules.GROUP_BACKENDS or (is_named and not asks):
        return [1]
    whole_hosts = (
        hosts * most for hosts in (*_powers_of_two(environment.hosts), environment.hosts)
    )
    return [*range(1, most + 1), *(count for count in whole_hosts if most < count <= most_of_all)]


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _numbers(values: Iterable[int]) -> Sequence[int]:
    """Return numbers in order: as a range where they are consecutive, so that samplers know which are close."""
    ordered = sorted(set(values))
    is_row = len(ordered) > 2 and len(ordered) == ordered[-1] - ordered[0] + 1
    return range(ordered[0], ordered[-1] + 1) if is_row else ordered
