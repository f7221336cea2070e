"""The caller's random generators are restored: even an import may draw from them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_random_state"]


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore Python's and NumPy's global generators. Nothing in this process draws from torch's."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
