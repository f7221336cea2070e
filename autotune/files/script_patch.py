"""A diff of a training script that sets the recommended loader settings in its own call, for the user to review.

Comes in: the script, the line that makes its training loader, the settings that are wanted. Goes out: a unified diff,
what it sets, and why the rest was left. The script is read and never written.

Only what stands literally is changed: a literal argument, a missing one whose default is known, a module's constant
that the call alone reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.files.script_call import UNKNOWN, LoaderCall, find_call, is_read_elsewhere, value_of
from autotune.files.script_text import read_script, script_diff, with_arguments
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.training_config import LOADER_ARGUMENTS, TORCH_PREFETCH_FACTOR, TrainingConfig

__all__ = ["ScriptPatch", "patch_script"]

_KEYWORDS = {"micro_batch_size": "batch_size", **{name: name for name in LOADER_ARGUMENTS}}
"""Settings that a loader's call can carry, in the order in which they are added, and their keywords."""
_WORKERS_ALONE = [name for name in LOADER_ARGUMENTS if name in NEUTRAL_WITHOUT_WORKERS and name != "in_order"]
"""Settings that torch refuses without workers, unless they are neutral (DataLoader.__init__); in_order it ignores."""
_REFUSED_ARGUMENTS = {"timeout": 0, "multiprocessing_context": None}
"""Other arguments that torch then takes at these values alone (DataLoader and its single-process iterator)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPatch:
    """What can be written into a script, and what can't."""

    diff: str
    """A unified diff for `patch -p1` and `git apply`; "" where nothing can be changed, or nothing need be. Bytes that
    are no UTF-8 stand in it as surrogates: a file must hold `content`."""
    settings: tuple[str, ...]
    """Settings that the diff gives the call, or that it had already."""
    left: Mapping[str, str]
    """Wanted settings that the call can't be given, each with a code that says why."""

    @property
    def content(self) -> bytes:
        """The diff as a file must hold it, in the script's own encoding and line ends."""
        return self.diff.encode("utf-8", "surrogateescape")


def patch_script(source: Path, line: int, config: TrainingConfig, wanted: Collection[str]) -> ScriptPatch:
    """The change to a script that gives its training loader these settings.

    The codes in `left`: "not_literal", a name or an expression gives it; "read_elsewhere", a constant gives it that is
    read in other places too; "starred", `*` or `**` in the call may carry it; "unknown_callee", it is no keyword of a
    call that isn't known to be torch's own class; "batch_sampler" and "batching_off" (`batch_size=None`), the loader
    has no batch size; "needs_num_workers", torch refuses it without workers, which aren't known to be set;
    "beside_<keyword>", no workers are wanted, and that argument, which torch then refuses, can't be changed;
    "worker_init_fn", the script must hand it the one of `config.dataloader_kwargs()`, which is no literal. For all
    settings at once: "unreadable" and "unparsable", the file; "no_call" and "ambiguous_call", the line; "unverified",
    the result did not parse to what was meant.

    Args:
        source: The script.
        line: The line, from 1, that Python gives of the frame that makes the loader; any line of the call will do.
        config: The settings.
        wanted: Those to set, of LOADER_SETTINGS and micro_batch_size. What is not wanted is taken to be as in `config`
            unless the call tells otherwise; it is changed only where torch would refuse it without workers.
    """
    script = read_script(source)
    call = script if isinstance(script, str) else find_call(script.tree, line)
    if isinstance(script, str) or isinstance(call, str):
        return _nothing(wanted, str(call))
    targets, left = _targets(call, config, wanted)
    if "worker_threads" in wanted and config.worker_threads is not None:
        left["worker_threads"] = "worker_init_fn"
    changes = {keyword: value for keyword, value in targets.items() if not _has(call, keyword, value, config)}
    text = with_arguments(script, call, changes)
    if text is None:
        return _nothing(wanted, "unverified")
    return ScriptPatch(
        diff=script_diff(script, text) if changes else "",
        settings=tuple(
            name for name, word in _KEYWORDS.items() if word in changes or (name in wanted and word in targets)
        ),
        left=left,
    )


def _nothing(wanted: Collection[str], reason: str) -> ScriptPatch:
    return ScriptPatch(diff="", settings=(), left={name: reason for name in _KEYWORDS if name in wanted})


def _is_same(one: object, other: object) -> bool:
    return one == other and not isinstance(one, float)


def _has(call: LoaderCall, keyword: str, value: object, config: TrainingConfig) -> bool:
    """Whether the loader gets this value as it is; where workers load, torch's own prefetch_factor has a number."""
    known = value_of(call, keyword)
    if keyword == "prefetch_factor" and config.num_workers:
        known, value = (TORCH_PREFETCH_FACTOR if one is None else one for one in (known, value))
    return _is_same(known, value)


def _targets(
    call: LoaderCall, config: TrainingConfig, wanted: Collection[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """The values that the call shall have, by keyword, and the settings that are left, with their codes."""
    values: dict[str, object] = {"batch_size": config.loader_batch_size, **config.loader_settings}
    reasons = {name: _hindrance(call, word, values[word], config) for name, word in _KEYWORDS.items() if name in wanted}
    left = {name: reason for name, reason in reasons.items() if reason is not None}
    targets = {word: values[word] for name, word in _KEYWORDS.items() if name in reasons.keys() - left.keys()}
    if targets.get("num_workers") == 0 and value_of(call, "num_workers") != 0:
        if reason := _hindrance_to_none(call, config):
            left["num_workers"] = reason
            del targets["num_workers"]
        else:
            targets |= {word: NEUTRAL_WITHOUT_WORKERS[word] for word in _WORKERS_ALONE}
    if not _has_workers(call, config, is_wanted="num_workers" in wanted, is_set="num_workers" in targets):
        for word in _WORKERS_ALONE:
            if targets.get(word) and not _is_same(value_of(call, word), targets[word]):
                left[word] = "needs_num_workers"
                del targets[word]
    return targets, left


def _hindrance(call: LoaderCall, keyword: str, value: object, config: TrainingConfig) -> str | None:
    """Why the call can't be given this value, by its own text."""
    if keyword == "batch_size" and "batch_sampler" in call.given and value_of(call, "batch_sampler") is not None:
        return "batch_sampler"
    if keyword == "batch_size" and value_of(call, keyword) is None:
        return "batching_off"
    if _has(call, keyword, value, config):
        return None
    if keyword not in call.given:
        return "starred" if call.is_starred else None if call.is_torch else "unknown_callee"
    if value_of(call, keyword) is UNKNOWN:
        return "not_literal"
    return "read_elsewhere" if is_read_elsewhere(call, keyword) else None


def _hindrance_to_none(call: LoaderCall, config: TrainingConfig) -> str | None:
    """Why the call can't do without workers, for the other arguments that it has."""
    if call.is_starred or not call.is_torch:
        return "starred" if call.is_starred else "unknown_callee"
    for keyword in _WORKERS_ALONE:
        if _hindrance(call, keyword, NEUTRAL_WITHOUT_WORKERS[keyword], config) is not None:
            return f"beside_{keyword}"
    for keyword, neutral in _REFUSED_ARGUMENTS.items():
        if value_of(call, keyword) != neutral:
            return f"beside_{keyword}"
    return None


def _has_workers(call: LoaderCall, config: TrainingConfig, *, is_wanted: bool, is_set: bool) -> bool:
    """Whether the changed script is known to load in workers."""
    known = value_of(call, "num_workers")
    if is_set or (known is UNKNOWN and not is_wanted):
        return config.num_workers > 0
    return known is not UNKNOWN and bool(known)
