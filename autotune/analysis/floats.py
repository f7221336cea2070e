"""The type of the arrays that models calculate with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats"]

Floats = NDArray[np.float64]
"""Numbers in double precision; what a shape stands for is said where it is used."""
