"""What of a script is within reach: settings that can't be changed from outside stay as the script has them.

Comes in: what the user has given for the space, and what the probe has seen of the script. Goes out: the same with
every setting out of reach fixed to the baseline's value, or a reason against what was given. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.settings.command import PLACEHOLDERS
from autotune.settings.environment import Environment
from autotune.settings.search_space import DDP_PREFIX, Choices, Domain, SettingValue
from autotune.settings.workload import ScriptFacts

__all__ = ["within_reach"]

_UNSCALED = "float16"
"""Trains only with a GradScaler, which nobody can put into a script from outside."""


def within_reach(
    given: Mapping[str, Domain], script: ScriptFacts, environment: Environment
) -> Mapping[str, Domain] | str:
    """The user's part of the space with what is out of reach fixed; or why it can't be searched so."""
    own = _own_values(script)
    fixed = {name: Choices(values=(value,)) for name, value in own.items() if name not in script.reached}
    for name, domain in given.items():
        wanted = next((value for value in domain if value != own[name]), own[name])
        if name in fixed and wanted != own[name]:
            option = f", or put {{{name}}} into the command where the script has an option for it"
            return (
                f"space.{name} of a script must be within reach from outside, but got {wanted!r}, and the script alone "
                f"sets it, to {own[name]!r}; leave it out of the space{option if name in PLACEHOLDERS else ''}"
            )
    is_unscaled = _UNSCALED in given.get("amp_dtype", ()) and own["amp_dtype"] != _UNSCALED
    if is_unscaled and "amp_dtype" not in script.placeholders:
        return (
            f"space.amp_dtype of a script must leave {_UNSCALED} out, which trains only with a GradScaler of its own; "
            "leave it out, or put {amp_dtype} into the command where the script has an option for it"
        )
    is_switched = own["amp_dtype"] == "tf32" and "amp_dtype" not in script.placeholders
    if is_switched and "float32" in given.get("amp_dtype", ()):
        return (
            "space.amp_dtype of a script that allows TF32 must leave float32 out, but has it: the script sets it for "
            "itself; leave it out, or take the line out of the script that allows TF32"
        )
    ranges: dict[str, Domain] = {**given, **fixed}
    if "amp_dtype" in script.reached and "amp_dtype" not in given and "amp_dtype" not in script.placeholders:
        out_of_reach = {_UNSCALED, "float32"} if own["amp_dtype"] == "tf32" else {_UNSCALED}
        native = tuple(dtype for dtype in environment.native_amp_dtypes if dtype not in out_of_reach)
        ranges["amp_dtype"] = Choices(values=native)
    return dict(sorted(ranges.items()))


def _own_values(script: ScriptFacts) -> dict[str, SettingValue]:
    """Return what the script does by itself, by the names that settings have in a space."""
    observed = script.observed
    return {
        name: value
        for name, value in observed.by_name.items()
        if name != "lr" and (observed.strategy == "ddp" or not name.startswith(DDP_PREFIX))
    }
