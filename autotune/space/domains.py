"""Domains: the values that a setting may take, and the ways in which a user may write them.

Comes in: a list of choices, {low, high[, log]}, or one value, and the model whose field is meant. Goes out: Choices or
an IntRange whose values that field takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

__all__ = ["Choices", "Domain", "IntRange", "SettingValue", "parse_domain", "spread", "whole_numbers"]

SettingValue = bool | int | float | str | None


class Choices(BaseModel):
    """A list of values to choose from; one value fixes the setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: tuple[SettingValue, ...] = Field(min_length=1)

    def __contains__(self, value: object) -> bool:
        return any(value == own and type(value) is type(own) for own in self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[SettingValue]:  # type: ignore[override] # values, not the model's fields
        return iter(self.values)


class IntRange(BaseModel):
    """Whole numbers from low to high, both included; log: tried evenly on a logarithmic scale."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: Annotated[int, Field(strict=True)]
    high: Annotated[int, Field(strict=True)]
    log: Annotated[bool, Field(strict=True)] = False

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def __len__(self) -> int:
        return self.high - self.low + 1

    def __iter__(self) -> Iterator[int]:  # type: ignore[override] # values, not the model's fields
        return iter(range(self.low, self.high + 1))


Domain = Choices | IntRange


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
    return sorted({min(ordered, key=lambda one: abs(one - value)) for value in wanted})


def parse_domain(model: type[BaseModel], name: str, value: object) -> Domain:
    """The domain that a user has written for a field of a model.

    Raises:
        ValueError: it is none, or holds what the field does not take.
    """
    if isinstance(value, IntRange):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return _parse_range(model, name, value)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    values = value if isinstance(value, Choices | list | tuple | range) else (value,)
    if not values:
        raise ValueError("a list of choices must hold at least one value, but got []")
    return Choices(values=tuple(dict.fromkeys(_checked(model, name, one) for one in values)))


def _parse_range(model: type[BaseModel], name: str, value: Mapping[Any, Any]) -> IntRange:
    try:
        domain = IntRange.model_validate(dict(value))
    except ValidationError as error:
        detail = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        rule = "a range is {low: int, high: int[, log: bool]}"
        raise ValueError(f"{rule}, but got {dict(value)!r} ({detail})") from None
    if domain.low > domain.high:
        raise ValueError(f"`low <= high` must hold, but got (low={domain.low}, high={domain.high})")
    if domain.log and domain.low < 1:
        raise ValueError(f"a logarithmic range must start at 1 or more, but got low={domain.low}")
    for end in (domain.low, domain.high):
        _checked(model, name, end)
    return domain


def _checked(model: type[BaseModel], name: str, value: object) -> Any:
    info = model.model_fields[name]
    annotation: Any = Annotated[info.annotation, info]
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{value!r} can't be a value of {name}: {error.errors()[0]['msg']}") from None
