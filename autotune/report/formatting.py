"""Figures, settings and foreign text as short strings for reports; core.phrasing has those of the core's own sentences.

Comes in: seconds, bytes, fractions, samples per second, TrainingConfigs, text of any origin. Goes out: plain strings of
characters that Windows-1252 knows as well. No markup of any kind. A share has the same digits in both; a table shows
more of a rate, a size or a time than a sentence does.
"""

from __future__ import annotations

from math import isfinite

from rich.text import Text

from autotune.phrasing import say_share
from autotune.records.run_summary import changed_settings
from autotune.records.trial import Outcome
from autotune.settings.training_config import DdpConfig, TrainingConfig

__all__ = [
    "NO_VALUE",
    "cut_middle",
    "describe_settings",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_energy",
    "format_fraction",
    "format_interval",
    "format_rate",
    "format_setting",
    "format_short_time",
    "format_times",
    "format_value",
    "name_group",
    "name_outcome",
    "one_line",
    "shorten",
    "without_controls",
]

NO_VALUE = "–"  # noqa: RUF001 - an en dash is the usual sign for "no figure" in a table
"""Stands where nothing was measured."""

_OUTCOMES: dict[Outcome, str] = {
    "ok": "ok",
    "over_memory": "over the limit",
    "oom": "out of memory",
    "host_oom": "out of RAM",
    "timeout": "out of time",
    "crashed": "crashed",
    "diverged": "diverged",
    "pruned": "cut short",
    "invalid": "invalid",
}


def format_bytes(size: int) -> str:
    """Bytes with three digits, as MiB, from 1 GiB on as GiB, below 0.1 MiB as KiB or bytes: "512 MiB", "1.23 GiB"."""
    if 0 < abs(size) < 0.1 * 2**20:
        return f"{size} B" if abs(size) < 1000 else f"{size / 2**10:.3g} KiB"
    value, unit = (size / 2**20, "MiB") if size < 2**30 else (size / 2**30, "GiB")
    decimals = 0 if value >= 100 or size == 0 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f} {unit}"


def format_rate(samples_per_s: float) -> str:
    """A rate's number with at least four digits: "12.35", "1,235", "12.35 M"."""
    if not isfinite(samples_per_s):
        return "unknown"
    if samples_per_s >= 1e7:
        return f"{samples_per_s / 1e6:,.2f} M"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"


def format_times(ratio: float) -> str:
    """A ratio; close to 1 with three decimals, so that a small gain can be told from none: "2.41", "1.034"."""
    if not isfinite(ratio):
        return "unknown"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}" if ratio >= 1.1 else f"{ratio:.3f}"


def format_interval(low: str, high: str) -> str:
    """Two formatted ends: "2.35 to 2.47"; "unknown" where an end is."""
    return "unknown" if "unknown" in {low, high} else f"{low} to {high}"


def format_fraction(fraction: float) -> str:
    """A fraction as per cent, as in the core's sentences: "3.4 %", "97 %"."""
    return say_share(fraction)


def format_duration(seconds: float) -> str:
    """Seconds in the two largest units: "0.4 s", "20 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_s} s"
    if minutes < 60:
        return f"{minutes} min {rest_s} s" if rest_s else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def format_short_time(seconds: float) -> str:
    """Seconds below a minute with three digits, in the unit that fits: "12.3 us", "4.56 ms", "1.23 s"."""
    if not isfinite(seconds):
        return "unknown"
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        value = seconds * scale
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


def format_energy(joules: float) -> str:
    """Energy with three digits, below 1 J in mJ: "0.213 mJ", "84.1 mJ", "1.27 J"."""
    value, unit = (joules, "J") if joules >= 0.9995 else (joules * 1e3, "mJ")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def format_count(number: int, noun: str) -> str:
    """A number with its noun: "1 trial", "1,200 trials"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def name_group(strategy: str, world_size: int) -> str:
    """A strategy with its devices: "one device", "ddp × 2"."""  # noqa: RUF002 - a times sign
    return "one device" if strategy == "single" else f"{strategy} × {world_size}"  # noqa: RUF001 - a times sign


def name_outcome(outcome: Outcome) -> str:
    """How a trial ended, in two or three words."""
    return _OUTCOMES[outcome]


def format_setting(name: str, config: TrainingConfig) -> str:
    """One setting's value for a table: "on", "0.001", "torch's own"; DDP's own go by "ddp.bucket_cap_mb" as well."""
    whole, _, part = name.partition(".")
    if whole == "ddp":
        return _format_ddp(part, config)
    if name == "prefetch_factor" and config.num_workers == 0:
        return NO_VALUE
    return format_value(getattr(config, name))


def _format_ddp(name: str, config: TrainingConfig) -> str:
    """One of DDP's settings, without a name all that differ from torch's own; no value where nothing runs under it."""
    if config.strategy != "ddp":
        return NO_VALUE
    if name:
        return format_value(getattr(config.ddp or DdpConfig(), name))
    return _own_ddp(config) or "torch's own"


def _own_ddp(config: TrainingConfig) -> str:
    own = {} if config.ddp is None else config.ddp.model_dump(exclude_defaults=True)
    return ", ".join(f"{name}={one:g}" if isinstance(one, float) else f"{name}={one}" for name, one in own.items())


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
    told = set(changed_settings(config, baseline)) if baseline is not None else _worth_telling(config)
    if "grad_accum_steps" in told:
        told = told - {"grad_accum_steps"} | {"micro_batch_size"}
    if "world_size" in told:
        told = told - {"world_size"} | {"strategy"}
    words = {name: word for name, word in _words(config).items() if name in told}
    return ", ".join(words.values()) or "your settings"


def _worth_telling(config: TrainingConfig) -> set[str]:
    plain = TrainingConfig()
    always = {"micro_batch_size", "num_workers", "amp_dtype"}
    return always | set(changed_settings(config, plain)) - {"lr"}


def _words(config: TrainingConfig) -> dict[str, str]:
    accumulated = f" × {config.grad_accum_steps}" if config.grad_accum_steps > 1 else ""  # noqa: RUF001 - a times sign
    workers = format_count(config.num_workers, "worker") if config.num_workers else "no workers"
    words = {
        "micro_batch_size": f"batch {config.micro_batch_size}{accumulated}",
        "num_workers": workers,
        "amp_dtype": config.amp_dtype,
        "compile": "compiled" if config.compile else "not compiled",
        "channels_last": "channels last" if config.channels_last else "channels first",
        "pin_memory": "pinned" if config.pin_memory else "not pinned",
        "persistent_workers": "persistent" if config.persistent_workers else "not persistent",
        "prefetch_factor": f"prefetch {config.prefetch_factor or 2}",
        "intra_op_threads": f"{config.intra_op_threads or 'default'} threads",
        "strategy": name_group(config.strategy, config.world_size),
        "ddp": _own_ddp(config) or "torch's own ddp settings",
        "lr": f"lr {config.lr:.4g}",
    }
    if config.num_workers == 0:  # both say nothing beyond "no workers"
        del words["prefetch_factor"], words["persistent_workers"]
    if config.strategy != "ddp":
        del words["ddp"]
    return words


def without_controls(text: str) -> str:
    """Foreign text without terminal escapes and other characters that don't print; line ends stay."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")  # rich drops what stands before a carriage return
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
