"""A short search over the fork server that all tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.launch.local import LocalLauncher
from tests.hurried import Hurried
from tests.integrations.searches import Search


@pytest.fixture
def search(fork_server: LocalLauncher) -> Search:
    """One trial in a short window, of what the objects say; another number of workers would be tried after it."""

    def run(model: Any, data: Any, folder: Path, **options: Any) -> autotune.SearchResult:
        space = {
            "num_workers": [1, 2],
            "amp_dtype": "float32",
            "intra_op_threads": None,
            "grad_accum_steps": 1,
        }
        rest = {"prefetch_factor": [None], "persistent_workers": True, "pin_memory": False}
        return autotune.search(
            model,
            data,
            space={**space, **rest, **options.pop("space", {})},
            n_trials=1,
            timeout_s=25,
            run_dir=folder,
            progress=False,
            launcher=Hurried(fork_server),
            **options,
        )

    return run
