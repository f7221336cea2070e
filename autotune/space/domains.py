"""Questions about domains: their whole numbers, a few values that stand for all, and the sizes of groups tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

from autotune.settings.search_space import Domain

__all__ = ["group_sizes", "spread", "whole_numbers"]


def whole_numbers(domain: Domain) -> list[int]:
    """The whole numbers among a domain's values, in its order."""
    return [value for value in domain if isinstance(value, int) and not isinstance(value, bool)]


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most so many (two or more) of some numbers from 0 up, evenly over their powers of two, both ends included."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    low, high = log2(1 + ordered[0]), log2(1 + ordered[-1])
    wanted = [2 ** (low + (high - low) * place / (most - 1)) - 1 for place in range(most)]
    return sorted({min(ordered, key=lambda number: abs(number - value)) for value in wanted})


def group_sizes(domains: Mapping[str, Domain]) -> tuple[int, ...]:
    """Numbers of ranks, more than one, that a space tries under DistributedDataParallel; none where it does not."""
    sizes = whole_numbers(domains["world_size"]) if "ddp" in domains["strategy"] else []
    return tuple(sorted(size for size in sizes if size > 1))
