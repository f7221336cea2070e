"""Calls of the public functions and models with made-up arguments, over made-up trials; not prepare, which lasts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from pydantic import ValidationError

import autotune
from autotune.api.commands import export_run
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError
from autotune.launch.launcher import Exit, Launch
from autotune.testing import FakeLauncher
from benchmarks.measures.endurance.fuzz_texts import odd_values, schema, values_of
from benchmarks.measures.endurance.fuzz_tries import BrokenError

__all__ = ["Call", "calls"]

_SPACE = {
    "num_workers": [0, 2],
    "micro_batch_size": [16, 32],
    "prefetch_factor": 2,
    "persistent_workers": True,
}
_CHEAP: Mapping[str, Any] = {"space": _SPACE, "n_trials": 2, "timeout_s": 60.0, "method": "random"}
"""What keeps a search that is not refused short."""
_OF_SEARCH = (
    *(
        "loss",
        "step",
        "optimizer",
        "collate_fn",
        "baseline",
        "space",
        "objective",
        "memory_limit",
        "n_trials",
    ),
    *(
        "timeout_s",
        "device",
        "seed",
        "loader",
        "fresh",
        "method",
        "warm_start",
        "executor",
        "command",
        "nonsense",
    ),
)
_OF_DIAGNOSE = (
    "command",
    "loss",
    "optimizer",
    "baseline",
    "objective",
    "memory_limit",
    "device",
    "seed",
    "loader",
)
_TARGETS = [
    *(
        "hf",
        "accelerate",
        "lightning",
        "deepspeed",
        "torchrun",
        "timm",
        "axolotl",
        "ultralytics",
        "composer",
    ),
    *("HF", "", "../hf"),
]
_MODELS = ("Budget", "DdpConfig", "Objective", "SearchSpace", "Workload")
_PATHS = [
    *("", ".", "..", "/", "/dev/null", "/dev/zero", "/etc/passwd", "nowhere", "~nobody/x"),
    *("a\0b", "x" * 5000, "\udcff"),
]


class _NotingLauncher(FakeLauncher):
    """Knows whether the user's code has run: what that has printed is kept, also of what is refused after it."""

    has_run = False

    def launch(self, launch: Launch) -> Exit:
        self.has_run = True
        return super().launch(launch)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that can be made, and written down."""

    name: str
    folder: Path = field(repr=False)
    keywords: Mapping[str, Any]

    def __call__(self) -> object:
        """Make it."""
        made: object = getattr(self, f"_{self.name}")(**self.keywords)
        return made

    def _search(self, **keywords: Any) -> None:
        run_dir, launcher = Path(tempfile.mkdtemp(dir=self.folder)), _NotingLauncher()
        try:
            arguments = {**_CHEAP, "run_dir": run_dir / "run", **keywords}
            autotune.search(object, list, launcher=launcher, progress=False, **arguments)
        except ConfigError as error:
            if [*run_dir.iterdir()] and not launcher.has_run:
                raise BrokenError(f"written on a refusal: {[*run_dir.iterdir()]}") from error
            raise
        finally:
            shutil.rmtree(run_dir)

    def _diagnose(self, **keywords: Any) -> None:
        found = autotune.diagnose(object, list, launcher=FakeLauncher(), progress=False, **keywords)
        _ = (found.verdict, found.headline, found.findings, found.advice)

    def _load(self, path: Any) -> None:
        autotune.load(path)

    def _open_run(self, path: Any) -> None:
        autotune.open_run(path)

    def _export(self, path: Any, target: str) -> None:
        export_run(Path(path), target)

    def _config(
        self, settings: Mapping[str, Any], target: str, device: Any, optimizer: Any
    ) -> None:
        try:
            config = TrainingConfig(**settings)
        except ValidationError:  # as its docstring says
            return
        config.dataloader_kwargs()
        config.optimizer_kwargs()
        config.global_batch_ratio(TrainingConfig())
        config.autocast("cpu")
        config.grad_scaler("cpu")
        config.to_device(torch.zeros(1, 3, 4, 4), "cpu")
        config.to(target, device=device, optimizer=optimizer)

    def _model(self, name: str, settings: Mapping[str, Any]) -> None:
        with suppress(ValidationError):  # as pydantic's models do
            getattr(autotune, name)(**settings)


def calls(folder: Path) -> st.SearchStrategy[Call]:
    """Most of them are of a search and of a configuration."""
    words = st.text(max_size=8)
    paths = st.sampled_from(_PATHS) | words
    settings = st.one_of(
        values_of(schema()["$defs"]["TrainingConfig"]),
        st.dictionaries(st.sampled_from([*TrainingConfig.model_fields]), odd_values(), max_size=3),
    )
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "search": st.one_of(
            *(
                st.dictionaries(st.sampled_from(_OF_SEARCH), _argument(), min_size=1, max_size=2)
                for _ in range(3)
            ),
            st.fixed_dictionaries({"baseline": settings}),
        ),
        "diagnose": st.dictionaries(st.sampled_from(_OF_DIAGNOSE), _argument(), max_size=2),
        "load": st.fixed_dictionaries({"path": paths}),
        "open_run": st.fixed_dictionaries({"path": paths}),
        "export": st.fixed_dictionaries({"path": paths, "target": st.sampled_from(_TARGETS)}),
        "config": st.fixed_dictionaries(
            {
                "settings": settings,
                "target": st.sampled_from(_TARGETS),
                "device": st.none() | st.sampled_from(["cpu", "cuda:1", "", "\n"]),
                "optimizer": st.none() | words | st.sampled_from(["AdamW", "SGD", "a b", "x\ny"]),
            }
        ),
    }
    keywords["model"] = st.sampled_from(_MODELS).flatmap(
        lambda name: st.fixed_dictionaries({"name": st.just(name), "settings": _settings_of(name)})
    )
    made = {name: each.map(partial(_call, name, folder)) for name, each in keywords.items()}
    return st.one_of(made["search"], made["search"], made["config"], *made.values())


def _call(name: str, folder: Path, keywords: Mapping[str, Any]) -> Call:
    return Call(name=name, folder=folder, keywords=keywords)


def _settings_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    fields = [*getattr(autotune, name).__pydantic_fields__]
    return st.dictionaries(
        st.sampled_from(fields), odd_values() | st.sampled_from([object, len, {1: 2}]), max_size=3
    )


def _argument() -> st.SearchStrategy[Any]:
    odd: st.SearchStrategy[Any] = st.sampled_from(
        [b"bytes", {1, 2}, object, len, range(3), 1j, Path("x"), {1: 2}, [None], ...]
    )
    defs = schema()["$defs"]
    return odd_values() | odd | values_of(defs["Objective"]) | values_of(defs["TrainingConfig"])
