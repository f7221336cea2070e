"""The base of the models that the user writes, a file holds or a process sends: checked once, then frozen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

_FIELD_SETS: dict[frozenset[str], set[str]] = {}
"""The sets of field names that compacted models share."""


class FrozenModel(BaseModel):
    """A pydantic model that can't change and takes no unknown field.

    JSON has no infinity: as a string it can be read back. The string below a field is not kept as
    its description, for which pydantic reads each class's source again at every start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


_Model = TypeVar("_Model", bound=FrozenModel)


@contextmanager
def with_field_copy() -> Iterator[None]:
    """Let a model have a field `copy`: pydantic warns that it hides BaseModel.copy, which is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'Field name "copy"', UserWarning)
        yield


def compacted(model: _Model) -> _Model:
    """The model itself, after equal sets of names of its fields, and of all models inside, have become one object.

    For what is kept by the thousand: each model has a set of its own, which takes as much as all of
    its values. Equal models stay equal, and copies have sets of their own again (pydantic's
    `__copy__`).
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
