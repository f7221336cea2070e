"""scipy takes longer to import than what it is needed for: the parent imports it only for a call that needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["autotune.cli", "autotune.api.search"])
def test_no_start_of_the_product_imports_scipy(module: str) -> None:
    code = f"import sys, {module}; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'scipy'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
