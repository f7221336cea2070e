"""Default ranges: what is tried of each setting that the user leaves out.

Comes in: a Basis (what the user has given, the baseline, the objective, workload and machine). Goes out: a domain for
every setting, with the baseline's own value in it, and the caps on proposals from these ranges. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod

from autotune.policy import POLICY, Policy, Ranges
from autotune.settings.ddp_config import TORCH_FIRST_BUCKET_MB, DdpConfig
from autotune.settings.environment import Environment
from autotune.settings.objective import Objective
from autotune.settings.search_space import DDP_PREFIX, Choices, Domain, IntRange, SettingValue
from autotune.settings.training_config import TORCH_PREFETCH_FACTOR, TrainingConfig
from autotune.settings.workload import WorkloadFacts
from autotune.space import constraints as rules
from autotune.space.binding import bindings_tried
from autotune.space.domains import group_sizes, whole_numbers
from autotune.space.token_budget import global_batch_of, samples_within, token_budgets
from autotune.space.worker_ranges import gains_out_of_order, worker_threads_tried

__all__ = ["Basis", "batch_cap", "default_ranges", "most_workers", "workers_cap"]


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
    def ranges(self) -> Ranges:
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


def default_ranges(basis: Basis) -> dict[str, Domain]:
    """A domain for every setting: the user's where given, else a range that suits the workload and this machine.

    DistributedDataParallel's settings are among them, by names such as "ddp.bucket_cap_mb", where it is tried at all.
    """
    domains = {**_device_ranges(basis), **_rank_ranges(basis), **basis.given}
    domains = {**_loader_ranges(basis, domains), "numa_binding": _binding_range(basis, domains), **domains}
    domains.update({name: domain for name, domain in _batch_ranges(basis, domains).items() if name not in basis.given})
    domains.setdefault("grad_accum_steps", _accum_range(basis, domains))
    if group_sizes(domains):
        domains = {**_ddp_ranges(basis, domains), **domains}
    else:
        domains = {name: domain for name, domain in domains.items() if not name.startswith(DDP_PREFIX)}
    return dict(sorted(domains.items()))


def most_workers(facts: WorkloadFacts, environment: Environment, ranges: Ranges = POLICY.ranges) -> int:
    """Loader workers that are tried by default, of all ranks on a host: twice its cores, and eight on few cores."""
    return max(ranges.least_workers, 2 * environment.cores) if facts.is_sharded else 1


def workers_cap(basis: Basis) -> int | None:
    """Most loader workers of all ranks on a host; None where the user has listed numbers of workers."""
    if "num_workers" in basis.given:
        return None
    sharing = rules.ranks_on_host(basis.baseline.process_count, basis.environment)
    return max(most_workers(basis.facts, basis.environment, basis.ranges), basis.baseline.num_workers * sharing)


def batch_cap(basis: Basis, domains: Mapping[str, Domain]) -> int | None:
    """Most samples of a global batch, raised where listed accumulation or ranks need it; None without a cap."""
    if basis.keeps_batch or basis.facts.batch_setting in basis.given:
        return None
    listed = [max(whole_numbers(domains[name])) for name in ("grad_accum_steps", "world_size") if name in basis.given]
    smallest = min(whole_numbers(domains["micro_batch_size"]))
    return max(basis.most_samples, basis.baseline.global_batch_size, smallest * prod(listed))


def _device_ranges(basis: Basis) -> dict[str, Domain]:
    baseline, environment = basis.baseline, basis.environment
    threads = _powers_of_two(environment.cores - 1) if environment.device_kind == "cpu" else []
    return {
        "amp_dtype": Choices(values=environment.native_amp_dtypes),
        "channels_last": _choices(False, basis.facts.has_4d_input),
        "compile": _choices(False, baseline.compile),
        "compile_mode": _choices("default", *_graph_modes(basis), baseline.compile_mode),
        "cudnn_benchmark": _benchmark_range(basis),
        "fused": _choices(False, basis.facts.optimizer.can_fuse, baseline.fused),
        "intra_op_threads": _choices(None, *threads, baseline.intra_op_threads),
    }


def _graph_modes(basis: Basis) -> list[SettingValue]:
    """CUDA graphs, where the model may be compiled: each shape of a batch would be recorded by itself.

    max-autotune compiles for minutes: it is tried where it is listed.
    """
    compiles = True in basis.given.get("compile", (basis.baseline.compile,))
    is_worthwhile = basis.environment.device_kind in rules.GRAPH_KINDS and bool(basis.facts.has_fixed_shapes)
    return ["reduce-overhead"] if compiles and is_worthwhile else []


def _benchmark_range(basis: Basis) -> Domain:
    """With cuDNN's timing of its algorithms where it can pay: each shape is timed anew, and choices may differ.

    Today's value alone where no module convolves: whether the model does otherwise, nobody knows. Source: pytorch.org,
    "Performance Tuning Guide", "Enable cuDNN auto-tuner", and "Reproducibility".
    """
    facts, own = basis.facts, basis.baseline.cudnn_benchmark
    if basis.environment.device_kind not in rules.GRAPH_KINDS:
        return _choices(False, own)
    if not facts.has_convolutions:
        return _choices(own)
    return _choices(False, bool(facts.has_fixed_shapes) and not facts.is_deterministic, own)


def _rank_ranges(basis: Basis) -> dict[str, Domain]:
    """Ranks, and the strategies that so many of them leave to be compared."""
    sizes = basis.given.get("world_size") or _numbers(_rank_counts(basis))
    groups, most = [size for size in whole_numbers(sizes) if size > 1], rules.ranks_of_host(basis.environment)
    has_dp = basis.environment.device_kind in rules.DATA_PARALLEL_KINDS
    is_possible = {
        "single": 1 in sizes,
        "dp": has_dp and any(size <= most for size in groups),
        "ddp": bool(groups),
    }
    return {"world_size": sizes, "strategy": _choices(*(name for name, holds in is_possible.items() if holds))}


def _rank_counts(basis: Basis) -> set[int]:
    """Every number of devices of a host, and whole hosts; on the CPU, or beside a named device, only where asked."""
    asked = frozenset(basis.given.get("strategy", ()))
    counts = {1} if asked == {"single"} else set(_counts_here(basis, asked))
    if asked and "single" not in asked:
        counts = counts - {1} or {1}
    return counts | {basis.baseline.world_size} if not asked or basis.baseline.strategy in asked else counts


def _counts_here(basis: Basis, asked: frozenset[SettingValue]) -> Iterable[int]:
    """With "ddp" more ranks than a host has room for may be tried, as long as each has a sample of the batch."""
    environment, asks, spans = basis.environment, bool(asked), not asked or "ddp" in asked
    most = rules.ranks_of_host(environment)
    most_of_all = min(rules.most_ranks(environment), max(most, basis.most_shares)) if spans else most
    if environment.device_kind == "cpu":
        return _powers_of_two(int(most_of_all)) if asks else [1]
    is_named = most < environment.device_count
    if environment.device_kind not in rules.GROUP_BACKENDS or (is_named and not asks):
        return [1]
    whole_hosts = (hosts * most for hosts in (*_powers_of_two(environment.hosts), environment.hosts))
    return [*range(1, most + 1), *(count for count in whole_hosts if most < count <= most_of_all)]


def _loader_ranges(basis: Basis, domains: Mapping[str, Domain]) -> dict[str, Domain]:
    baseline = basis.baseline
    is_one = "single" in domains["strategy"] or "dp" in domains["strategy"]
    sharing = rules.ranks_on_host(1 if is_one else min(group_sizes(domains), default=1), basis.environment)
    most = max(1, most_workers(basis.facts, basis.environment, basis.ranges) // sharing)
    prefetch_factors = {*basis.ranges.prefetch_factors, baseline.prefetch_factor or TORCH_PREFETCH_FACTOR}
    is_copied = basis.environment.device_kind not in {"cpu", "mps"}
    workers = IntRange(low=0, high=max(most, baseline.num_workers))
    return {
        "num_workers": workers,
        "prefetch_factor": Choices(values=tuple(sorted(prefetch_factors))),
        "persistent_workers": _choices(False, not basis.facts.is_tf_data),
        "pin_memory": _choices(False, is_copied),
        **_worker_ranges(basis, domains.get("num_workers") or workers),
    }


def _worker_ranges(basis: Basis, counts: Domain) -> dict[str, Domain]:
    """Of what workers alone have; one worker delivers in order whatever is asked of it."""
    baseline, most = basis.baseline, max(whole_numbers(counts))
    orders = [True, False] if most > 1 and gains_out_of_order(basis.facts, basis.ranges) else []
    threads = worker_threads_tried(basis.facts, basis.environment, basis.ranges) if most else []
    return {
        "in_order": _choices(*orders, baseline.in_order),
        "worker_threads": _choices(*([None, *threads] if threads else []), baseline.worker_threads),
    }


def _binding_range(basis: Basis, domains: Mapping[str, Domain]) -> Domain:
    """None, and what changes something for one of the numbers of ranks that are tried."""
    ranks = (rules.ranks_on_host(count, basis.environment) for count in (1, *group_sizes(domains)))
    return _choices(None, *bindings_tried(ranks, basis.environment), basis.baseline.numa_binding)


def _batch_ranges(basis: Basis, domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """Of the micro batch and of the token budget, one of which follows the other or is not used."""
    if not basis.facts.has_token_budget:
        return {"micro_batch_size": _batch_range(basis, domains), "max_tokens": _choices(basis.baseline.max_tokens)}
    ranks, cap = whole_numbers(domains["world_size"]), basis.most_samples
    budgets = basis.given.get("max_tokens") or _choices(
        *token_budgets(
            basis.baseline, ranks, cap, keeps_batch=basis.keeps_batch, share=basis.ranges.smallest_batch_share
        )
    )
    samples = {samples_within(budget, basis.baseline) for budget in whole_numbers(budgets)}
    return {"max_tokens": budgets, "micro_batch_size": _choices(*sorted(samples))}


def _batch_range(basis: Basis, domains: Mapping[str, Domain]) -> Domain:
    facts, baseline, cap = basis.facts, basis.baseline, basis.most_samples
    if facts.fixed_batch_size is not None:
        return Choices(values=(facts.fixed_batch_size,))
    if basis.keeps_batch:
        wanted = baseline.global_batch_size
        powers = [2**power for power in range(wanted.bit_length()) if wanted % 2**power == 0]
        sizes = {*powers, *(wanted // power for power in powers), baseline.micro_batch_size}
        return Choices(values=tuple(sorted(size for size in sizes if size <= cap)))
    own, ranks = baseline.micro_batch_size, whole_numbers(domains["world_size"])
    low = max(1, own // max(basis.ranges.smallest_batch_share, *ranks))
    sizes = {size for size in _powers_of_two(cap) if size >= low}
    shares = {own // count for count in ranks if own % count == 0 and own // count <= cap}
    return Choices(values=tuple(sorted(sizes | shares | {min(own, cap)})))


def _accum_range(basis: Basis, domains: Mapping[str, Domain]) -> Domain:
    setting = basis.facts.batch_setting
    steps = set[int]() if setting in basis.given else set(basis.ranges.accum_steps)
    if basis.keeps_batch:
        wanted = global_batch_of(basis.baseline, basis.facts)
        sizes, ranks = whole_numbers(domains[setting]), whole_numbers(domains["world_size"])
        together = {size * count for size in sizes for count in ranks}
        steps = {wanted // samples for samples in together if wanted % samples == 0}
    return _choices(*sorted(steps | {basis.baseline.grad_accum_steps}))


def _ddp_ranges(basis: Basis, domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """DistributedDataParallel's settings.

    The probe has found whether parameters get no gradient, not whether these are always the same, which a static graph
    requires. Buffers are shared as in the baseline: anything else would change what is learned.
    """
    facts, own = basis.facts, basis.baseline.ddp or DdpConfig()
    has_unused = facts.has_unused_parameters
    may_be_static = 1 in domains["grad_accum_steps"] and not has_unused
    ranges = {
        "bucket_cap_mb": _choices(None, *_bucket_caps(facts, basis.ranges), own.bucket_cap_mb),
        "first_bucket_mb": _choices(None, own.first_bucket_mb),
        "gradient_as_bucket_view": _choices(False, True),
        "static_graph": _choices(False, may_be_static or own.static_graph),
        "find_unused_parameters": _choices(has_unused, has_unused or own.find_unused_parameters),
        "broadcast_buffers": _choices(own.broadcast_buffers),
        "comm_hook": _choices(None, *_hooks(basis.environment, domains), own.comm_hook),
    }
    return {f"{DDP_PREFIX}{name}": domain for name, domain in ranges.items()}


def _bucket_caps(facts: WorkloadFacts, ranges: Ranges) -> list[float]:
    """Caps beyond torch's own, up to the first with room for all gradients; all caps where their size is unknown."""
    mib = facts.gradient_bytes / 2**20
    return [
        cap for before, cap in pairwise((TORCH_FIRST_BUCKET_MB, *ranges.bucket_caps_mb)) if before < mib or mib == 0
    ]


def _hooks(environment: Environment, domains: Mapping[str, Domain]) -> Iterator[str]:
    """The hooks that round to a precision which is computed in as well."""
    for hook, dtype in rules.HOOK_DTYPES.items():
        if dtype in domains["amp_dtype"] and rules.hook_obstacle(hook, environment) is None:
            yield hook


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _choices(*values: SettingValue) -> Choices:
    return Choices(values=tuple(dict.fromkeys(values)))


def _numbers(values: Iterable[int]) -> Domain:
    """Numbers in order: as a range where they are consecutive, so that samplers know which are close."""
    ordered = sorted(set(values))
    is_row = len(ordered) > 2 and len(ordered) == ordered[-1] - ordered[0] + 1
    return IntRange(low=ordered[0], high=ordered[-1]) if is_row else Choices(values=tuple(ordered))
