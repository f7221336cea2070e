"""Make foreign text safe to show, and name settings, parts of the time, and bottlenecks."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.scaling import Cause
from autotune.messages.units import NO_VALUE
from autotune.records.breakdown import Part
from autotune.records.result import changed_settings
from autotune.settings_table import BY_NAME, SETTINGS, format_ddp, must_be_neutral

# Text from user code, drivers or file systems, made safe to show.


def without_controls(text: str) -> str:
    """Remove terminal escapes and other characters that don't print; keep line ends."""
    if text.isprintable():  # as nearly all of a table's thousands of cells
        return text
    # rich drops everything before a carriage return
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    plain = Text.from_ansi(lines.expandtabs(4)).plain
    return "".join(char for char in plain if char == "\n" or char.isprintable())


def cut_middle(text: str, longest: int) -> str:
    """Replace the middle of a text of more than `longest` characters by a line that counts them."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def one_line(text: str) -> str:
    """Put foreign text on a single line, safe to print."""
    return " ".join(without_controls(text).split())


def shorten(text: str, width: int) -> str:
    """Put foreign text on a single line of at most `width` terminal cells, cut with an ellipsis."""
    line = Text(one_line(text))
    line.truncate(max(width, 1), overflow="ellipsis")
    return line.plain


_LEAST_FOR_START = 24
"""Terminal cells from which a shortened path keeps its start. Source: our convention."""


def shorten_path(path: str, width: int) -> str:
    """Put a path on a single line of at most `width` terminal cells: an ellipsis for its middle.

    Its end, with the file's name, keeps two thirds, or all if there is little space.
    """
    line = one_line(path)
    if cell_len(line) <= width:
        return line
    start_width = (width - 1) // 3 if width >= _LEAST_FOR_START else 0
    start = set_cell_size(line, start_width)
    end = set_cell_size(line[::-1], width - 1 - start_width)[::-1]
    return f"{start.rstrip()}…{end.lstrip()}"


# Names of settings and of the codes in records: a few words without a full stop.


PART_NAMES: dict[Part, str] = {
    "data_wait": "waiting for data",
    "device_copy": "copying",
    "compute": "computing",
    "synchronise": "synchronising",
    "idle": "idle",
}
"""Name of each part of the wall time, in the order shown."""
CAUSES: dict[Cause, str] = {
    "communication": "communication",
    "loader": "the loader",
    "uneven_rank": "an uneven rank",
    "small_batch": "too small a batch on each device",
    "settings": "settings that slow the step down",
    "shared_machine": "a machine that the ranks share",
}
"""Name of each bottleneck of several devices."""
INTERVAL = "95 % interval"
"""Head of a column or row of intervals."""


def format_setting(name: str, config: TrainingConfig) -> str:
    """Return a setting's value for a table: "on", "0.001", "torch's own".

    Args:
        name: A field of the configuration, or of its DDP settings, such as "ddp.bucket_cap_mb".
        config: The configuration.
    """
    whole, _, part = name.partition(".")
    if whole == "ddp" and not config.is_ddp:
        return NO_VALUE
    if part:
        return format_value(getattr(config.ddp_settings, part))
    if whole == "ddp":
        return format_ddp(config) or "torch's own"
    if name == "prefetch_factor" and not config.has_workers:
        return NO_VALUE
    return format_value(getattr(config, name))


def format_value(value: object) -> str:
    """Return a value of a setting: a switch as "on" or "off", None as "torch's own"."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "torch's own"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def describe_settings(config: TrainingConfig, baseline: TrainingConfig | None = None) -> str:
    """Return settings in a few words: "batch 128, 4 workers, bfloat16, pinned".

    With a baseline, only what differs from it; "your settings" if nothing does.
    """
    if baseline is None:
        changed = changed_settings(config, TrainingConfig())
        settings = [one for one in SETTINGS if one.is_always_named or one.name in changed]
        shown = {one.worded_by or one.name for one in settings if one.sides}
    else:
        shown = {BY_NAME[name].worded_by or name for name in changed_settings(config, baseline)}
    shown -= must_be_neutral(config.model_dump())  # "no workers" implies these
    if not config.is_ddp:
        shown.discard("ddp")
    words = [
        setting.words(config)
        for setting in SETTINGS
        if setting.words is not None and setting.name in shown
    ]
    return ", ".join(words) or "your settings"
