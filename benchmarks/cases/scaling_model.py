"""What a step of data-parallel training takes on n GPUs: the law, and how two sizes tell it. Pure.

    step(n)     = compute + exposed(n)
    exchange(n) = 2 (n - 1) / n * bytes / bandwidth + buckets * 2 (n - 1) * latency       (ring all-reduce)
    exposed(n)  = max(exchange / buckets, exchange - backward * (buckets - 1) / buckets)

`fit_law` takes steps that were seen on one node and on two; the Law that it hands on foretells steps on any number of
GPUs beyond one node, as long as the network between them stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, exp, log
from statistics import fmean

__all__ = [
    "DEFAULT_BUCKET_MIB",
    "Exchange",
    "Law",
    "Link",
    "Seen",
    "Setting",
    "exchange_s",
    "exposed_s",
    "fit_law",
    "with_network_of",
]

DEFAULT_BUCKET_MIB = 25.0
"""torch.nn.parallel.distributed, where bucket_cap_mb is None."""
_MIB = 2**20
_ASSUMED_BACKWARD = 2 / 3  # of computing a micro batch: twice the forward pass, as usually reckoned
_BANDWIDTHS = (1e9, 1e12)  # bytes per second, between which a fit looks
_LATENCIES = (1e-7, 1e-4)
_COARSE, _FINE, _REFINEMENTS, _SHRINK = (
    25,
    9,
    4,
    4.0,
)  # points of a grid, further grids, and how each is narrowed

_Group = tuple[object, ...]
"""What of a setting decides its computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of a TrainingConfig decides a step."""

    micro: int
    """Samples of one forward and backward pass on one GPU."""
    steps: int
    """Of these passes for one optimizer step."""
    precision: str
    workers: int
    """Of the loader, for each GPU."""
    bucket_mib: float | None
    """None: torch's own (25)."""
    is_halved: bool
    """Gradients travel in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a ring of GPUs runs over; its slowest part sets the pace."""

    bytes_per_s: float
    latency_s: float
    """Of one hop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What an optimizer step sends, and behind what it may hide."""

    sent_bytes: float
    """Of all gradients, as they travel."""
    buckets: int
    backward_s: float
    """Of the step's last micro batch: the others exchange nothing (no_sync)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A setting and the step that was measured with it."""

    setting: Setting
    step_s: float


def exchange_s(exchange: Exchange, ranks: int, link: Link) -> float:
    """Seconds of a ring all-reduce of all buckets, one after the other.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    hops = 2 * (ranks - 1)
    return (
        hops / ranks * exchange.sent_bytes / link.bytes_per_s
        + exchange.buckets * hops * link.latency_s
    )


def exposed_s(exchange: Exchange, ranks: int, link: Link) -> float:
    """Seconds by which the exchange outlasts the backward pass.

    Equal buckets get ready one after the other through the backward pass, and are sent one after the other. The last
    one is never hidden; where sending is slower than computing, those queue up too that were ready before it.
    """
    total, last = exchange_s(exchange, ranks, link), 1 / exchange.buckets
    return max(total * last, total - exchange.backward_s * (1 - last))


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What two sizes have told of a job; holds for more than one node."""

    gradient_bytes: float
    compute_s: Mapping[_Group, float]
    """Seconds of a step without exchange, by what of a setting decides them."""
    backward_s: Mapping[_Group, float]
    """Seconds of one backward pass."""
    network: Link

    def step_s(self, setting: Setting, ranks: int) -> float:
        """Seconds of an optimizer step on so many GPUs; of a setting whose computing was measured."""
        group = _group(setting)
        return self.compute_s[group] + exposed_s(
            self._exchange(setting, group), ranks, self.network
        )

    def _exchange(self, setting: Setting, group: _Group) -> Exchange:
        bucket_bytes = (setting.bucket_mib or DEFAULT_BUCKET_MIB) * _MIB
        return Exchange(
            sent_bytes=self.gradient_bytes / 2 if setting.is_halved else self.gradient_bytes,
            buckets=max(1, ceil(self.gradient_bytes / bucket_bytes)),
            backward_s=self.backward_s[group],
        )


def fit_law(
    one_node: Sequence[Seen],
    two_nodes: Sequence[Seen],
    *,
    gradient_bytes: float,
    node_gpus: int = 8,
) -> Law:
    """The law from steps seen on one node and on two; each setting of the second needs a kin in the first.

    One node tells what computing takes, once its own exchange is taken off; what two nodes take beyond that is the
    network's. Settings with small batches tell its bandwidth, since they hide little of the exchange; settings with
    tiny buckets tell its latency.
    """
    backward_s = _backward_of(one_node)

    def law_of(node: Link) -> Law:
        nothing = Law(
            gradient_bytes=gradient_bytes,
            compute_s=dict.fromkeys(backward_s, 0.0),
            backward_s=backward_s,
            network=node,
        )
        rests: dict[_Group, list[float]] = {}
        for one in one_node:
            rests.setdefault(_group(one.setting), []).append(
                one.step_s - nothing.step_s(one.setting, node_gpus)
            )
        return replace(nothing, compute_s={group: fmean(own) for group, own in rests.items()})

    node = _best_link(lambda link: _misfit(law_of(link), one_node, node_gpus))
    return with_network_of(law_of(node), two_nodes, 2 * node_gpus)


def with_network_of(law: Law, seen: Sequence[Seen], ranks: int) -> Law:
    """The law with the network that best explains steps seen on so many GPUs."""
    return replace(
        law, network=_best_link(lambda link: _misfit(replace(law, network=link), seen, ranks))
    )


def _misfit(law: Law, seen: Iterable[Seen], ranks: int) -> float:
    return sum((law.step_s(one.setting, ranks) / one.step_s - 1) ** 2 for one in seen)


def _backward_of(seen: Iterable[Seen]) -> dict[_Group, float]:
    """Seconds of a backward pass by group, from the step that waits least for its exchange."""
    steps: dict[_Group, list[float]] = {}
    for one in seen:
        steps.setdefault(_group(one.setting), []).append(one.step_s / one.setting.steps)
    return {group: _ASSUMED_BACKWARD * min(own) for group, own in steps.items()}


def _group(setting: Setting) -> _Group:
    """What decides the computing: all but the buckets."""
    return setting.micro, setting.steps, setting.precision, setting.workers, setting.is_halved


def _best_link(misfit: Callable[[Link], float]) -> Link:
    """The link with the least misfit: a coarse logarithmic grid, then finer ones around the best so far."""
    middles = [log(low * high) / 2 for low, high in (_BANDWIDTHS, _LATENCIES)]
    spans = [log(high / low) for low, high in (_BANDWIDTHS, _LATENCIES)]
    points = _COARSE
    for _ in range(1 + _REFINEMENTS):
        axes = [
            [middle + span * (index / (points - 1) - 0.5) for index in range(points)]
            for middle, span in zip(middles, spans, strict=True)
        ]
        tried = (
            Link(bytes_per_s=exp(bandwidth), latency_s=exp(latency))
            for bandwidth, latency in product(*axes)
        )
        best = min(tried, key=misfit)
        middles, spans = (
            [log(best.bytes_per_s), log(best.latency_s)],
            [span / _SHRINK for span in spans],
        )
        points = _FINE
    return best
