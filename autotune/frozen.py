"""Base class of the models in files, messages and user input: checked once, then frozen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

_FIELD_SETS: dict[frozenset[str], set[str]] = {}
"""Sets of field names that compacted models share."""


class FrozenModel(BaseModel):
    """A pydantic model that is immutable and refuses unknown fields.

    Infinity is written to JSON as a string, so that it can be read back. Docstrings of fields are not
    kept as descriptions, since pydantic would read each class's source at every start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


_Model = TypeVar("_Model", bound=FrozenModel)


@contextmanager
def with_field_copy() -> Iterator[None]:
    """Allow a field `copy`, for which pydantic warns that it hides the deprecated BaseModel.copy."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'Field name "copy"', UserWarning)
        yield


def compacted(model: _Model) -> _Model:
    """Return the model after sharing its set of field names, and those of inner models, with others.

    This saves memory for models kept by the thousand, whose own sets take as much as all values.
    Equal models stay equal, and copies have their own sets again (pydantic's `__copy__`).
    """
    own = model.model_fields_set
    object.__setattr__(
        model, "__pydantic_fields_set__", _FIELD_SETS.setdefault(frozenset(own), own)
    )
    for value in vars(model).values():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, FrozenModel):
                compacted(one)
    return model
