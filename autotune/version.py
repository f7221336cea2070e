"""The version of this package: what the build, reports and files name."""

from __future__ import annotations

__version__ = "0.1.0"
