"""Settings that contradict each other on any machine, with any workload.

Comes in: the settings that the rule is about. Goes out: the rule, the values and the remedy, or None. What depends on
the machine or the workload stands in space/constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.settings.ddp_config import DdpConfig
from autotune.settings_table import SETTINGS

__all__ = ["NEUTRAL_WITHOUT_WORKERS", "needs_contradiction", "strategy_contradiction"]

NEUTRAL_WITHOUT_WORKERS = {setting.name: setting.neutral for setting in SETTINGS if setting.needs == "num_workers"}
"""Settings that only loader workers use, and the one value of each without workers."""
_NEEDED = {"num_workers": "loader workers", "compile": "compile: true"}


def needs_contradiction(settings: Mapping[str, object]) -> str | None:
    """Return the reason why a setting can't stand without the one that it needs, or None.

    Args:
        settings: All of a TrainingConfig's, by name.
    """
    for setting in SETTINGS:
        name, needs = setting.name, setting.needs
        if needs is not None and not settings[needs] and settings[name] != setting.neutral:
            return (
                f"{name} needs {_NEEDED[needs]}, but got {needs}={settings[needs]} and {name}={settings[name]!r}; "
                f"leave {name} out or set {needs}"
            )
    return None


def strategy_contradiction(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why a strategy can't have the other settings, all by their names; None where it can.

    Source on compiling under DataParallel: torch compiles the frames of the thread that has entered the compiled
    module (set_eval_frame, torch/csrc/dynamo/eval_frame.c), and replicas run in other threads
    (torch/nn/parallel/parallel_apply.py); "it falls back to the non-compile speed", pytorch/pytorch#94636. A module
    that is compiled first and replicated then runs on the first device's weights: its forward is bound to it
    (Module._replicate_for_data_parallel).
    """
    strategy, world_size, grad_accum_steps = (settings[name] for name in ("strategy", "world_size", "grad_accum_steps"))
    ddp: DdpConfig | None = settings["ddp"]
    if strategy == "single" and world_size != 1:
        return f"strategy 'single' has one rank, but got world_size={world_size}; set strategy: ddp"
    if strategy != "ddp" and ddp is not None:
        return f"ddp settings need strategy 'ddp', but got strategy {strategy!r}; leave ddp out"
    if strategy == "dp" and world_size > 1 and settings["compile"]:
        return (
            "compile can't stand with strategy 'dp', whose replicas run in threads of their own, where torch "
            "compiles nothing, but got compile=True; set strategy: ddp, or compile: false"
        )
    if ddp is not None and ddp.static_graph and grad_accum_steps > 1:
        return (
            "ddp.static_graph can't stand with gradient accumulation (torch ends in an internal assert), but got "
            f"grad_accum_steps={grad_accum_steps}; set static_graph: false"
        )
    return None
