"""The benchmarks: every figure that README and docs quote comes from a script of this folder.

`python -m benchmarks.NAME --help` says what a script measures. `cases` holds workloads, `yardsticks` the plain loops
and other tools that autotune is compared with, `measures` the parts that measure, `replay` searches over measured
surfaces, `tables` the figures as tables, `results` what was measured, with its machine.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).resolve().parent.parent
"""The checkout: processes of a benchmark start here, so that they find this package."""
