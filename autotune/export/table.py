"""Write and read settings of other frameworks: the parts that all exports share.

Comes in: a TrainingConfig as a Wanted, or a framework's file as plain data. Goes out: the parts of an
Export, or a Reading for the baseline. A setting without a name in a target is dropped by name, so a
new setting is never lost silently.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS, Name, Setting

if TYPE_CHECKING:
    from autotune.config.training_config import TrainingConfig


# Texts: JSON, YAML, calls in Python. YAML is written by the library that the targets read it with,
# since `1e-05` without a dot is text to it.


class Code(str):
    """Python code that is written without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a mapping with dotted names into nested mappings."""
    result: dict[str, Any] = {}
    for dotted, value in flat.items():
        *above, name = dotted.split(".")
        inner = result
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return result


def flattened(given: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted names."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            result |= flattened(value, f"{above}{name}.")
        else:
            result[f"{above}{name}"] = value
    return result


def as_json(settings: Mapping[str, Any]) -> str:
    """Return settings as a JSON file."""
    return json.dumps(settings, indent=2) + "\n"


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as a YAML file."""
    return yaml.safe_dump(dict(settings), sort_keys=False)


def as_call(name: str, arguments: Mapping[str, Any], *before: str) -> str:
    """Return a Python call, with one argument per line if it is long; `before` comes first, as it is."""
    written = [*before, *(f"{key}={value!r}" for key, value in arguments.items())]
    line = f"{name}({', '.join(written)})"
    if len(line) <= 100:
        return line
    inner = (each.replace("\n", "\n    ") for each in written)  # of a call within this one
    return f"{name}(\n" + "".join(f"    {each},\n" for each in inner) + ")"


def loader_note(found: Wanted) -> str:
    """Return the comment on the arguments of the user's own DataLoader."""
    if found.has_budget:
        budget = found.config.max_tokens
        return f"your own DataLoader takes these, and your batch sampler, made with max_tokens={budget}"
    return "your own DataLoader takes these; its sampler or shuffle, collate_fn and drop_last stay as they are"


def loader_imports(found: Wanted) -> list[str]:
    """Return the imports that `loader_call` needs."""
    return [] if found.config.worker_threads is None else ["import autotune"]


def loader_call(found: Wanted, *, batches: int = 1) -> str:
    """Return the arguments of a DataLoader as a call of dict, with autotune's worker_init_fn if needed.

    Args:
        found: The configuration.
        batches: Micro-batches that the loader returns as one batch.
    """
    loader = found.loader
    config = found.config
    if "batch_size" in loader:
        loader["batch_size"] *= batches
    if config.worker_threads is not None:
        threads = {"num_workers": config.num_workers, "worker_threads": config.worker_threads}
        call = as_call("autotune.TrainingConfig", threads)
        loader["worker_init_fn"] = Code(f'{call}.dataloader_kwargs()["worker_init_fn"]')
    return as_call("dict", loader)


def optimizer_note(found: Wanted) -> str:
    """Return the arguments of the user's optimizer, in words."""
    return ", ".join(f"{name}={value!r}" for name, value in found.config.optimizer_kwargs().items())


def script_head(
    found: Wanted, table: Table, imports: Iterable[str], *, batches: int = 1
) -> Iterator[str]:
    """Yield the lines before a Trainer: imports, settings of the process, and the loader's arguments.

    Args:
        found: The configuration.
        table: The target's.
        imports: The imports of the target.
        batches: As for `loader_call`.
    """
    yield from loader_imports(found)
    yield "import torch"
    yield from imports
    yield ""
    yield from process_lines(found, table)
    yield f"# {loader_note(found)}:"
    is_whole = batches > 1 and not found.has_budget
    note = "  # batch_size: that of a whole optimizer step" if is_whole else ""
    yield f"loader_arguments = {loader_call(found, batches=batches)}{note}"


def process_lines(found: Wanted, table: Table) -> Iterator[str]:
    """Yield the lines of Python that set a target's `process_settings`, where they differ from torch's."""
    for name in table.process_settings:
        process_line = BY_NAME[name].process_line
        if process_line is not None and name in found.changed:
            line = process_line(found.values[name])
            if line:
                yield line


def as_comment(lines: Iterable[str]) -> str:
    """Return lines as comments."""
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in text.splitlines())


def as_options(settings: Mapping[str, Any]) -> str:
    """Return options for argparse by their names in its namespace; True is a flag, False is left out."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in settings.items()
        if value is not False
    ]
    return " ".join(words) + "\n"


# Writing by a table


_IN_LOADER_CALL = frozenset(
    {"micro_batch_size", "max_tokens", "worker_threads"}
    | {setting.name for setting in SETTINGS if setting.is_loader_argument}
)
"""Settings that the lines of `loader_call` and `loader_note` carry."""
_ALWAYS = frozenset({"micro_batch_size", "lr"})
"""Settings without a default of torch, which are reported wherever a target can't take them."""
_ELSEWHERE = "your own loop takes it: {name}={value!r}"
_PRECISIONS_IN_YOUR_CODE = {
    "bfloat16": "in your script: torch.autocast around forward pass and loss, dtype=torch.bfloat16",
    "float16": "in your script: torch.autocast around forward pass and loss, dtype=torch.float16, and a GradScaler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The settings that a target has, for writing and reading."""

    target: str
    """Key of the target in settings_table."""
    title: str
    """Name for messages, such as "transformers' TrainingArguments"."""
    precisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of the target for each amp_dtype."""
    cpu_precisions: frozenset[str] = frozenset({"float32", "bfloat16"})
    """Precisions that it supports on a CPU."""
    ddp_reason: str | None = None
    """Remedy for arguments of DistributedDataParallel without their own; None: the general one."""
    needs_batch_size: bool = False
    """True if it requires a batch size, so that a token budget is written as the average."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Names in its file that change the training but have no setting here, each with the remedy."""
    is_silent_on: frozenset[str] = frozenset()
    """Names in its file that don't change the training."""
    has_loader_call: bool = False
    """True if its text has `loader_call` for what the user's script passes on."""
    process_settings: tuple[str, ...] = ()
    """Settings that lines of Python in its text set for the process, in this order."""
    has_ddp: bool = False
    """True if it takes the arguments of DistributedDataParallel, but for `lacks`."""
    lacks: frozenset[str] = frozenset()
    """Settings of DistributedDataParallel that it can't take."""
    optimizer: str | None = None
    """Name of the optimizer in its file, if that may be FUSED_ADAMW; None: it has no such name."""

    @property
    def names(self) -> dict[str, Name]:
        """Names of the target by setting."""
        return {
            setting.name: setting.names[self.target]
            for setting in SETTINGS
            if self.target in setting.names
        }


def carried(found: Wanted, table: Table) -> dict[str, Any]:
    """Return the target's settings by its own names, not nested."""
    names = table.names
    result: dict[str, Any] = {}
    for setting, value in found.values.items():
        name = names.get(setting)
        if name is None or name.is_own or not _is_taken(found, table, setting, name):
            continue
        if setting in found.changed or not name.is_rare:
            result[name.name] = int(value) if name.is_whole else value
    if _is_fused_adamw(found, table):
        result[str(table.optimizer)] = FUSED_ADAMW
    return result | dict(table.precisions.get(_precision(found, table), {}))


def export(
    found: Wanted,
    table: Table,
    *,
    text: str,
    settings: Mapping[str, Any],
    defaults: Defaults,
    but: Collection[str] = (),
) -> Export:
    """Return an Export, with the settings that the target can't take in the order of the settings table.

    Args:
        found: The configuration.
        table: The target's.
        text: The text for the target.
        settings: The same as a mapping.
        defaults: Names of the target's defaults that differ from trials, with the reasons.
        but: Other settings that the target takes with this configuration.
    """
    written = {**settings, **flattened(settings)}  # flat names too, but not only: {} has none
    taken = {*but, *(setting for setting, name in table.names.items() if name.name in written)}
    taken |= {one.name for one in SETTINGS if _is_unnamed(found, table, one)}
    if found.has_budget and not table.needs_batch_size:
        taken.discard("micro_batch_size")
    if table.precisions and _precision(found, table) == found.config.amp_dtype:
        taken.add("amp_dtype")
    if _is_fused_adamw(found, table):
        taken.add("fused")
    lost = [name for name in found.values if name not in taken and _is_lost(found, name)]
    return Export(
        target=table.target,
        text=text,
        settings=settings,
        dropped=tuple(Dropped(name, _reason(found, table, name)) for name in lost),
        defaults=tuple(Differing(name, reason) for name, reason in defaults),
    )


def optimizer_default(found: Wanted, table: Table) -> tuple[str, str]:
    """Return how the optimizer of a target that makes an AdamW by default differs from trials."""
    if _is_fused_adamw(found, table):
        reason = "betas, epsilon and weight decay are its own unless you set them; trials had those of your AdamW"
        return "adam_beta1", reason
    return str(table.optimizer), f"{FUSED_ADAMW}; trials trained with your own optimizer, or SGD"


def tf32_default(found: Wanted, name: str) -> Defaults:
    """Yield that a target allows TF32 by default, if float32 is wanted on a GPU."""
    if found.config.amp_dtype == "float32" and found.device != "cpu":
        yield name, "true: matrix products take TF32; trials computed in float32"


def _is_fused_adamw(found: Wanted, table: Table) -> bool:
    return bool(table.optimizer and found.config.fused and found.optimizer == "AdamW")


def _is_unnamed(found: Wanted, table: Table, setting: Setting) -> bool:
    """Return True if the target takes a setting without a name in its settings."""
    if setting.is_of_ddp and table.has_ddp:
        return setting.name not in table.lacks
    if setting.name in _IN_LOADER_CALL and table.has_loader_call:
        return True
    return table.target in setting.unnamed and setting.unnamed[table.target](found)


def _is_taken(found: Wanted, table: Table, setting: str, name: Name) -> bool:
    """Return True if the target takes a setting's value under this name."""
    value = found.values[setting]
    if setting == "micro_batch_size" and found.has_budget:
        return table.needs_batch_size
    if value is None or (setting.startswith(DDP_PREFIX) and not found.config.is_ddp):
        return False
    if name.among and value not in name.among:
        return False
    return not name.is_whole or value == int(value)


def _is_lost(found: Wanted, name: str) -> bool:
    """Return True if a setting matters when the target can't take it."""
    if name == "strategy":
        return found.config.is_dp
    if name == "world_size":
        return found.processes > 1
    return name in found.changed or name in _ALWAYS


def _precision(found: Wanted, table: Table) -> str:
    """Return the amp_dtype to write: float32 if the target can't take the wanted one."""
    wanted_dtype = found.config.amp_dtype
    on_cpu = found.device == "cpu" and wanted_dtype not in table.cpu_precisions
    return "float32" if on_cpu or wanted_dtype not in table.precisions else wanted_dtype


def _reason(found: Wanted, table: Table, name: str) -> str:
    value = found.values[name]
    known = table.names.get(name)
    setting = BY_NAME.get(name)
    if name == "micro_batch_size" and found.has_budget:
        return f"{value} is no size of a batch, but what one of max_tokens={found.config.max_tokens} holds on average"
    if name == "amp_dtype" and value in table.precisions:
        return f"{table.title} trains in {value} on no CPU; float32 is written"
    if known is not None and known.is_whole:
        return f"{table.title} takes whole numbers alone, but it is {value!r}"
    if known is not None and known.among:
        return f"{table.title} takes {', '.join(map(str, known.among))} alone, but it is {value!r}"
    if name == "amp_dtype" and value in _PRECISIONS_IN_YOUR_CODE:
        reason = _PRECISIONS_IN_YOUR_CODE[value]
    elif setting is None:
        reason = _ELSEWHERE
    else:
        reason = _reason_of(setting, table, value)
    return f"{table.title} can't take it; {reason.format(value=value, name=name.removeprefix(DDP_PREFIX))}"


def _reason_of(setting: Setting, table: Table, value: object) -> str:
    if table.target in setting.reasons:
        return setting.reasons[table.target]
    if setting.is_of_ddp and table.ddp_reason is not None:
        return table.ddp_reason
    if setting.elsewhere is not None:
        return setting.elsewhere
    if setting.process_line is not None:
        return f"in your script: {setting.process_line(value)}"
    if setting.is_of_ddp:
        return "DistributedDataParallel takes it: {name}={value!r}"
    if setting.is_loader_argument:
        return "your DataLoader takes it: {name}={value!r}"
    return _ELSEWHERE


# Reading by a table


_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""Flags in YAML 1.1, which the frameworks read, that are text in YAML 1.2."""

FUSED_ADAMW = "adamw_torch_fused"
"""The fused optimizer, by transformers' name. Source: transformers/training_args.py, OptimizerNames."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """Settings read from a framework's file."""

    baseline: dict[str, Any] = field(default_factory=dict)
    """Values by setting, by its name in settings_table."""
    origins: dict[str, str] = field(default_factory=dict)
    """Name in the file by setting; settings with a default of the target have none."""
    unread: dict[str, str] = field(default_factory=dict)
    """Names in the file that could not be read, with the reason."""
    others: tuple[str, ...] = ()
    """Other names in the file, which have no meaning here."""
    optimizer: str | None = None
    """Class of the optimizer that `fused` belongs to; None: not known."""

    def take(self, setting: str, name: str, value: object) -> None:
        """Set a setting to a value from the file, or note that the file leaves it to the framework."""
        if value == "auto":
            self.unread[name] = f"auto is decided when training starts; set baseline.{setting}"
        else:
            self.baseline[setting] = value
            self.origins[setting] = name

    def take_ranks(self, name: str, ranks: object, *, launcher: str) -> None:
        """Set the number of ranks under DistributedDataParallel.

        Args:
            name: Name of their number in the file.
            ranks: The number.
            launcher: Name in the file that says how they train.
        """
        self.take("world_size", name, ranks)
        self.take("strategy", launcher, "ddp")

    @property
    def assumed(self) -> Mapping[str, Any]:
        """Settings that the file leaves out, with the target's defaults."""
        return {
            setting: value
            for setting, value in self.baseline.items()
            if setting not in self.origins
        }


def reading(given: Mapping[str, Any], table: Table) -> Reading:
    """Read a target's file, given as plain data with dotted names."""
    found = Reading()
    names = table.names
    for setting, name in names.items():
        value = given.get(name.name)
        if value is not None:
            found.take(setting, name.name, file_value(value, name.kind))
        elif name.own is not None:
            found.baseline[setting] = name.own
    switches = {name for own in table.precisions.values() for name in own}
    precisions = {name: value for name, value in given.items() if name in switches}
    amp_dtype = _read_precision(precisions, table)
    if amp_dtype is not None:
        found.take("amp_dtype", next(iter(precisions)), amp_dtype)
    # Nothing else is taken from the file's optimizer, since trials use that of the workload.
    if table.optimizer is not None and given.get(table.optimizer) == FUSED_ADAMW:
        found.take("fused", table.optimizer, True)
        found.optimizer = "AdamW"
    found.unread |= _unread_precisions(precisions, amp_dtype, table)
    known = switches | {name.name for name in names.values()}
    rest = [name for name, value in given.items() if name not in known and value]
    found.unread |= {name: table.unread[name] for name in rest if name in table.unread}
    found.others = tuple(name for name in rest if name not in {*table.unread, *table.is_silent_on})
    return found


def file_value(value: Any, kind: str) -> Any:
    """Return a value as YAML 1.1 reads it: yes is a flag, and "1e-5" is a number."""
    if isinstance(value, str) and kind == "flag":
        return _WORDS.get(value.lower(), value)
    if isinstance(value, str) and kind == "number":
        try:
            return float(value)
        except ValueError:
            return value  # refused where the baseline is parsed
    return value


def is_off(value: object) -> bool:
    """Return True if a switch is off or not set."""
    return value is None or file_value(value, "flag") is False


def _read_precision(given: Mapping[str, Any], table: Table) -> str | None:
    """Return the amp_dtype that matches a file's precision settings; None if none does."""
    if not given:
        return None
    for amp_dtype in ("bfloat16", "float16", "tf32", "float32"):
        own = table.precisions.get(amp_dtype, {})
        marks = {name: value for name, value in own.items() if value is not False}
        if own and all(_alike(given.get(name), value) for name, value in marks.items()):
            return amp_dtype if marks or all(is_off(value) for value in given.values()) else None
    return None


def _alike(given: object, value: object) -> bool:
    if isinstance(value, bool):
        return bool(file_value(given, "flag") == value)
    return str(given).lower() == str(value).lower()


def _unread_precisions(
    given: Mapping[str, Any], amp_dtype: str | None, table: Table
) -> Iterator[tuple[str, str]]:
    """Yield the precision settings of a file that the amp_dtype does not cover, with the reasons."""
    own = table.precisions.get(amp_dtype or "", {})
    for name, value in given.items():
        if is_off(value):
            continue
        if amp_dtype is None:
            yield name, f"{value!r} has no amp_dtype here; set baseline.amp_dtype"
        elif not _alike(value, own.get(name, False)):
            yield name, f"{value!r} is set as well as {amp_dtype}, which is taken"


# The types of an export


CLIPS = "gradients are clipped each step; in trials only where your own step or Trainer does"
"""Reason for targets that clip gradients by default; a Trainer that was searched clips in trials too."""

COMMON_UNREAD = {
    "warmup_steps": "trials keep the learning rate as it is",
    "warmup_ratio": "trials keep the learning rate as it is",
    "max_grad_norm": "gradients are clipped only where your own workload.step does",
    "gradient_checkpointing": "make the model so in workload.model",
    "group_by_length": "give workload.sampler",
    "deepspeed": "DeepSpeed does not run in trials; --from deepspeed reads its file",
    "fsdp": "FSDP does not run in trials",
    "torch_compile_backend": "trials compile with torch's default backend",
}
"""Names that transformers and axolotl share, for `Table.unread`."""

Defaults = Iterator[tuple[str, str]]
"""Names of a target's defaults that differ from trials, each with its effect and what trials did."""


class Dropped(NamedTuple):
    """A setting that the export can't carry."""

    setting: str
    """Name of the setting in settings_table."""
    reason: str
    """Reason, and where to set it instead."""


class Differing(NamedTuple):
    """A default of the target that differs from trials."""

    name: str
    """Name in the target, such as "lr_scheduler_type"."""
    reason: str
    """Effect of the default, and what trials did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A configuration written for another framework."""

    target: str
    """Name of the framework, such as "hf"."""
    text: str
    """Text to save or paste: a file, a command line, or lines of Python."""
    settings: Mapping[str, Any]
    """The same as a mapping: `TrainingArguments(**export.settings)`. If the text is Python, the
    arguments of its Trainer."""
    dropped: tuple[Dropped, ...]
    """Settings that the text does not carry, without those at torch's default."""
    defaults: tuple[Differing, ...]
    """Defaults of the target that differ from trials and that the text does not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A TrainingConfig to export, and what is known of its training."""

    config: TrainingConfig
    values: Mapping[str, Any]
    """Its values by their names in settings_table."""
    changed: frozenset[str]
    """Names of values that differ from a default TrainingConfig, whose values are torch's defaults."""
    device: str | None
    """Kind of the training device, such as "cpu"; None: not known."""
    optimizer: str | None
    """Class of the optimizer in trials; None: not known."""

    @property
    def processes(self) -> int:
        """Number of training processes."""
        return self.config.process_count

    @property
    def has_budget(self) -> bool:
        """True with a token budget; micro_batch_size is then an average."""
        return self.config.max_tokens is not None

    @property
    def compiler(self) -> dict[str, Any] | None:
        """Arguments of torch.compile that differ from its defaults; None: the model is not compiled."""
        if not self.config.compile:
            return None
        return {"mode": self.config.compile_mode} if "compile_mode" in self.changed else {}

    @property
    def loader(self) -> dict[str, Any]:
        """Arguments of torch's DataLoader that differ from its defaults, and a fixed batch size."""
        size = {} if self.has_budget else {"batch_size": self.config.micro_batch_size}
        return size | {
            setting.name: self.values[setting.name]
            for setting in SETTINGS
            if setting.is_loader_argument and setting.name in self.changed
        }

    @property
    def ddp(self) -> dict[str, Any]:
        """Arguments of DistributedDataParallel that differ from its defaults."""
        return self.config.ddp_settings.model_dump(
            exclude_defaults=True, exclude={"first_bucket_mb", "comm_hook"}
        )


def wanted(
    config: TrainingConfig, *, device: str | None = None, optimizer: str | None = None
) -> Wanted:
    """Return a TrainingConfig as a Wanted."""
    values = config.by_name
    plain = type(config)().by_name
    changed = frozenset(name for name, value in values.items() if value != plain[name])
    return Wanted(
        config=config,
        values=values,
        changed=changed,
        device=device and device.partition(":")[0],
        optimizer=optimizer,
    )
