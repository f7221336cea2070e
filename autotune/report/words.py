"""Words of a report: texts on one line, settings and reasons by name."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from autotune.config.training_config import NEUTRAL_WITHOUT_WORKERS, DdpConfig, TrainingConfig
from autotune.diagnosis.scaling import Cause
from autotune.messages.units import NO_VALUE
from autotune.records.breakdown import Part
from autotune.records.result import RunSpread, changed_settings
from autotune.settings_table import SETTINGS, format_ddp

# Text of any origin made safe to show: without terminal escapes, on one line, no longer than there
# is room.
#
# Comes in: what user code, drivers or file systems have said. Goes out: plain strings, free of
# markup.


def without_controls(text: str) -> str:
    """Foreign text without terminal escapes and other characters that don't print; line ends stay."""
    if text.isprintable():  # as nearly all of a table's thousands of cells
        return text
    lines = text.replace("\r\n", "\n").replace(
        "\r", "\n"
    )  # rich drops what stands before a carriage return
    plain = Text.from_ansi(lines.expandtabs(4)).plain
    return "".join(char for char in plain if char == "\n" or char.isprintable())


def cut_middle(text: str, longest: int) -> str:
    """Foreign text of at most so many characters and a line that says how many of its middle are left out."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def one_line(text: str) -> str:
    """Foreign text on a single line, safe to print."""
    return " ".join(without_controls(text).split())


def shorten(text: str, width: int) -> str:
    """Foreign text on a single line of at most so many terminal cells, cut with an ellipsis."""
    line = Text(one_line(text))
    line.truncate(max(width, 1), overflow="ellipsis")
    return line.plain


# Names for people: settings in a few words, outcomes, strategies, parts of the time.
#
# Comes in: a TrainingConfig, or one of the codes that records hold. Goes out: a few words without
# an end of sentence.


PART_NAMES: dict[Part, str] = {
    "data_wait": "waiting for data",
    "device_copy": "copying",
    "compute": "computing",
    "synchronise": "synchronising",
    "idle": "idle",
}
"""The parts of the wall time, in the order in which they are shown."""
CAUSES: dict[Cause, str] = {
    "communication": "communication",
    "loader": "the loader",
    "uneven_rank": "an uneven rank",
    "small_batch": "too small a batch on each device",
    "settings": "settings that slow the step down",
    "shared_machine": "a machine that the ranks share",
}
"""Each bottleneck of several devices."""
_ALWAYS = {"micro_batch_size", "num_workers", "amp_dtype"}
"""Settings that describe a configuration even where they are torch's own."""


def name_interval(spread: RunSpread, held_by_device: Iterable[bool]) -> str:
    """Return the name of intervals: 95 % of which, nobody knows before runs of the same settings were compared.

    Args:
        spread: Between runs.
        held_by_device: Of what has an interval, whether the device holds it.
    """
    kinds = {spread.of([is_held]) for is_held in held_by_device} or {spread}
    return "usual interval" if any(kind.source == "assumed" for kind in kinds) else "95 % interval"


def format_setting(name: str, config: TrainingConfig) -> str:
    """One setting's value for a table: "on", "0.001", "torch's own"; DDP's own go by "ddp.bucket_cap_mb" as well."""
    whole, _, part = name.partition(".")
    if (whole == "ddp" and config.strategy != "ddp") or (
        name == "prefetch_factor" and config.num_workers == 0
    ):
        return NO_VALUE
    if part:
        return format_value(getattr(config.ddp or DdpConfig(), part))
    return (
        format_ddp(config) or "torch's own"
        if whole == "ddp"
        else format_value(getattr(config, name))
    )


def format_value(value: object) -> str:
    """A plain value of a setting: a switch as on or off, None as torch's own."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "torch's own"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_settings(config: TrainingConfig, baseline: TrainingConfig | None = None) -> str:
    """Settings in a few words: "batch 128, 4 workers, bfloat16, pinned".

    With a baseline only what differs from it; "your settings" where nothing does.
    """
    if baseline is None:
        shown = _ALWAYS | set(changed_settings(config, TrainingConfig())) - {"lr"}
    else:
        shown = set(changed_settings(config, baseline))
    if shown & {"grad_accum_steps", "max_tokens"}:
        shown.add("micro_batch_size")
    if "world_size" in shown:
        shown.add("strategy")
    return (
        ", ".join(word for name, word in _words(config).items() if name in shown) or "your settings"
    )


def _words(config: TrainingConfig) -> dict[str, str]:
    silent = {"ddp"} if config.strategy != "ddp" else set[str]()
    if config.num_workers == 0:  # these say nothing beyond "no workers"
        silent |= NEUTRAL_WITHOUT_WORKERS.keys()
    return {
        setting.name: setting.words(config)
        for setting in SETTINGS
        if setting.words is not None and setting.name not in silent
    }
