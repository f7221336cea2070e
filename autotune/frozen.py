"""The base of the models that the user writes, a file holds or a process sends: checked once, then frozen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict

__all__ = ["FrozenModel", "with_field_copy"]


class FrozenModel(BaseModel):
    """A pydantic model that can't change and takes no unknown field.

    The string below a field is its description. JSON has no infinity: as a string it can be read back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings")


@contextmanager
def with_field_copy() -> Iterator[None]:
    """Let a model have a field `copy`: pydantic warns that it hides BaseModel.copy, which is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'Field name "copy"', UserWarning)
        yield
