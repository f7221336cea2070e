"""The parts that all exports share: names of settings in other frameworks, texts of files, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from autotune.settings_table import BY_NAME, DDP_PREFIX, SETTINGS, Name, Setting

if TYPE_CHECKING:
    from autotune.config.training_config import TrainingConfig


# The texts of exports: JSON, YAML, and calls in Python.
#
# Comes in: settings by a target's names. Goes out: text that the target reads. YAML is written by
# the library that the targets read it with: `1e-05` without a dot is a text to it.


class Code(str):
    """A piece of Python that is written as it stands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping whose names have dots, as mappings within each other."""
    result: dict[str, Any] = {}
    for dotted, value in flat.items():
        *above, name = dotted.split(".")
        inner = result
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return result


def as_json(settings: Mapping[str, Any]) -> str:
    """A JSON file."""
    return json.dumps(settings, indent=2) + "\n"


def as_yaml(settings: Mapping[str, Any]) -> str:
    """A YAML file."""
    return yaml.safe_dump(dict(settings), sort_keys=False)


def as_call(name: str, arguments: Mapping[str, Any], *before: str) -> str:
    """A call in Python, a line an argument where it would be long; `before` stands first, as it is."""
    written = [*before, *(f"{key}={value!r}" for key, value in arguments.items())]
    line = f"{name}({', '.join(written)})"
    if len(line) <= 100:
        return line
    inner = (each.replace("\n", "\n    ") for each in written)  # of a call within this one
    return f"{name}(\n" + "".join(f"    {each},\n" for each in inner) + ")"


def loader_remark(max_tokens: int | None) -> str:
    """What stands beside the arguments of a DataLoader: it is the user's own, of which only these are known."""
    if max_tokens is not None:
        return f"your own DataLoader takes these, and your batch sampler, made with max_tokens={max_tokens}"
    return "your own DataLoader takes these; its sampler or shuffle, collate_fn and drop_last stay as they are"


def loader_call(loader: Mapping[str, Any], num_workers: int, worker_threads: int | None) -> str:
    """Arguments of a DataLoader as a call of dict; what limits its workers' threads is made by autotune itself."""
    if worker_threads is None:
        return as_call("dict", loader)
    config = as_call(
        "autotune.TrainingConfig", {"num_workers": num_workers, "worker_threads": worker_threads}
    )
    return as_call(
        "dict",
        {**loader, "worker_init_fn": Code(f'{config}.dataloader_kwargs()["worker_init_fn"]')},
    )


def compile_call(name: str, mode: str) -> str:
    """The call that compiles what has this name."""
    return as_call("torch.compile", {} if mode == "default" else {"mode": mode}, name)


def optimizer_remark(lr: float, *, is_fused: bool) -> str:
    """The arguments of an optimizer, which is the user's own."""
    return f"lr={lr!r}, fused=True" if is_fused else f"lr={lr!r}"


def as_comment(lines: Iterable[str]) -> str:
    """Lines behind #."""
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in text.splitlines())


def as_options(settings: Mapping[str, Any]) -> str:
    """Options of argparse by the names of its namespace: a flag where the value is True, none where it is False."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in settings.items()
        if value is not False
    ]
    return " ".join(words) + "\n"


# What a target takes beyond the names of settings, and how a configuration is written by both.
#
# Comes in: a Wanted. Goes out: the target's settings, and what is dropped. What has no name in a
# target is dropped by name, so that a setting that comes later can't be lost in silence.


IN_LOADER_CALL = frozenset(
    {"micro_batch_size", "max_tokens", "worker_threads"}
    | {setting.name for setting in SETTINGS if setting.is_loader_argument}
)
"""Settings that the lines of `loader_call` and `loader_remark` carry."""
_ALWAYS = frozenset({"micro_batch_size", "lr"})
"""Settings that have no value of torch's own: they must be told wherever a target can't take them."""
_MEAN = "{value} is no size of a batch, but what one of max_tokens={budget} holds on average"
_OF_DDP = "DistributedDataParallel takes it: {name}={value!r}"
_OF_THE_LOADER = "your DataLoader takes it: {name}={value!r}"
_ELSEWHERE = "your own loop takes it: {name}={value!r}"
_PRECISIONS_IN_YOUR_CODE = {
    "tf32": 'in your script: torch.set_float32_matmul_precision("high")',
    "bfloat16": "in your script: torch.autocast around forward pass and loss, dtype=torch.bfloat16",
    "float16": "in your script: torch.autocast around forward pass and loss, dtype=torch.float16, and a GradScaler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a target takes, both ways."""

    target: str
    """By which settings have a name and a reason in settings_table."""
    title: str
    """What people call it, such as "transformers' TrainingArguments"."""
    precisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it takes for each amp_dtype, by its own names."""
    cpu_precisions: frozenset[str] = frozenset({"float32", "bfloat16"})
    """Those that it trains in on a CPU."""
    ddp_reason: str | None = None
    """Where an argument of DistributedDataParallel goes that has no reason of its own; None: as
    elsewhere."""
    needs_batch_size: bool = False
    """It demands a number of samples, so that with a token budget it is given their mean."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Names of its file that change how fast it trains, or what, and have no setting here, each
    with what to do."""
    is_silent_on: frozenset[str] = frozenset()
    """Names of its file that change neither."""

    @property
    def names(self) -> dict[str, Name]:
        """Return its names for settings, by setting."""
        return {
            setting.name: setting.names[self.target]
            for setting in SETTINGS
            if self.target in setting.names
        }


def carried(found: Wanted, table: Table) -> dict[str, Any]:
    """The target's settings, by its own names; flat, whatever dots they have."""
    names = table.names
    result = {
        names[setting].name: int(found[setting]) if names[setting].is_whole else found[setting]
        for setting in found.values
        if _is_carried(found, table, setting)
        and (setting in found.changed or not names[setting].is_rare)
    }
    return result | dict(table.precisions.get(_precision(found, table), {}))


def dropped(
    found: Wanted,
    table: Table,
    *,
    also: Mapping[str, str] | None = None,
    but: Collection[str] = (),
) -> tuple[Dropped, ...]:
    """Return the settings that the target can't take, in the order of the settings table.

    Args:
        found: The configuration.
        table: The target's.
        also: Settings that are dropped in any case, with the reason.
        but: Settings that the target's module writes itself.
    """
    also = also or {}
    taken = set(but)
    for setting in found.values:
        if _is_carried(found, table, setting):
            taken.add(setting)
    if found.has_budget and not table.needs_batch_size:
        taken.discard("micro_batch_size")
    if table.precisions and _precision(found, table) == found["amp_dtype"]:
        taken.add("amp_dtype")
    lost = []
    for name in found.values:
        if name in also:
            lost.append(Dropped(name, also[name]))
        elif name not in taken and _is_lost(found, name):
            lost.append(Dropped(name, _reason(found, table, name)))
    return tuple(lost)


def _is_carried(found: Wanted, table: Table, setting: str) -> bool:
    name = table.names.get(setting)
    value = found[setting]
    if name is None:
        return False
    if setting == "micro_batch_size" and found.has_budget:
        return table.needs_batch_size
    if value is None or (setting.startswith(DDP_PREFIX) and not found.is_ddp):
        return False
    if name.among and value not in name.among:
        return False
    return not name.is_whole or value == int(value)


def _is_lost(found: Wanted, name: str) -> bool:
    """Whether something would be lost with a setting, where the target can't take it."""
    if name == "strategy":
        return bool(found["strategy"] == "dp")
    if name == "world_size":
        return found.processes > 1
    return name in found.changed or name in _ALWAYS


def _precision(found: Wanted, table: Table) -> str:
    """The amp_dtype that the target is given: float32 where it can't take the wanted one."""
    wanted_dtype = str(found["amp_dtype"])
    on_cpu = found.device == "cpu" and wanted_dtype not in table.cpu_precisions
    return "float32" if on_cpu or wanted_dtype not in table.precisions else wanted_dtype


def _reason(found: Wanted, table: Table, name: str) -> str:
    value = found[name]
    known = table.names.get(name)
    setting = BY_NAME.get(name)
    if name == "micro_batch_size" and found.has_budget:
        return _MEAN.format(value=value, budget=found["max_tokens"])
    if name == "amp_dtype" and value in table.precisions:
        return f"{table.title} trains in {value} on no CPU; float32 is written"
    if known is not None and known.is_whole:
        return f"{table.title} takes whole numbers alone, but it is {value!r}"
    if known is not None and known.among:
        return f"{table.title} takes {', '.join(map(str, known.among))} alone, but it is {value!r}"
    if name == "amp_dtype":
        reason = _PRECISIONS_IN_YOUR_CODE[value]
    elif setting is None:
        reason = _ELSEWHERE
    else:
        reason = _reason_of(setting, table)
    return f"{table.title} can't take it; {reason.format(value=value, name=name.removeprefix(DDP_PREFIX))}"


def _reason_of(setting: Setting, table: Table) -> str:
    if table.target in setting.reasons:
        return setting.reasons[table.target]
    if setting.is_of_ddp and table.ddp_reason is not None:
        return table.ddp_reason
    if setting.elsewhere is not None:
        return setting.elsewhere
    if setting.is_of_ddp:
        return _OF_DDP
    return _OF_THE_LOADER if setting.is_loader_argument else _ELSEWHERE


# A framework's own file read into the settings of today, by the table that exports are written by.
#
# Comes in: what the file holds, as plain data. Goes out: a Reading: values for the baseline, and by
# name what could not be read.


_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
"""What YAML 1.1, which the frameworks read, takes for a flag, and YAML 1.2 for a text."""

_FUSED_OPTIMIZERS = {"adamw_torch_fused": "AdamW"}
"""What transformers calls torch's AdamW with fused=True, and its class.

Source: transformers/training_args.py, OptimizerNames.
"""


class Unread(NamedTuple):
    """A name of a framework's file that did not become a part of the baseline."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a framework's own file says of the settings of today."""

    baseline: Mapping[str, Any]
    """Values by our names, those of DDP as "ddp.bucket_cap_mb"."""
    origins: Mapping[str, str]
    """The file's own name for each; none for what the file leaves out, and has the target's own
    default."""
    unread: tuple[Unread, ...]
    others: tuple[str, ...]
    """Further names that the file sets and that mean nothing here."""
    optimizer: str | None = None
    """The class of the optimizer that the file's `fused` is of; None: not known."""

    @property
    def assumed(self) -> Mapping[str, Any]:
        """The settings that the file leaves out, with the target's own defaults."""
        return {
            setting: value
            for setting, value in self.baseline.items()
            if setting not in self.origins
        }


def reading(given: Mapping[str, Any], table: Table) -> Reading:
    """What a file of the target says, as plain data with dots in the names of what lies deeper."""
    baseline: dict[str, Any] = {}
    origins: dict[str, str] = {}
    unread: dict[str, str] = {}
    for setting, name in table.names.items():
        value = given.get(name.name)
        if value == "auto":
            unread[name.name] = "auto is decided when training starts; set baseline." + setting
        elif value is not None:
            baseline[setting] = file_value(value, name.kind)
            origins[setting] = name.name
        elif name.own is not None:
            baseline[setting] = name.own
    known = {name.name for name in table.names.values()} | {
        name for own in table.precisions.values() for name in own
    }
    precisions = {
        name: given[name] for name in known if name in given and name in _precision_names(table)
    }
    amp_dtype = _read_precision(precisions, table)
    if amp_dtype is not None:
        baseline["amp_dtype"], origins["amp_dtype"] = amp_dtype, next(iter(precisions))
    unread |= _unread_precisions(precisions, amp_dtype, table)
    rest = {name: value for name, value in given.items() if name not in known and value}
    unread |= {name: table.unread[name] for name in rest if name in table.unread}
    others = tuple(name for name in rest if name not in {*table.unread, *table.is_silent_on})
    found = tuple(Unread(name, reason) for name, reason in unread.items())
    return Reading(baseline=baseline, origins=origins, unread=found, others=others)


def with_fused(found: Reading, name: str, value: object) -> Reading:
    """A reading of which a name says that the optimizer is the fused one, where it does.

    The trials' optimizer is the one of the workload, of which the file's own name for it tells
    nothing else.
    """
    if str(value) not in _FUSED_OPTIMIZERS:
        return found
    baseline = {**found.baseline, "fused": True}
    origins = {**found.origins, "fused": name}
    return replace(
        found, baseline=baseline, origins=origins, optimizer=_FUSED_OPTIMIZERS[str(value)]
    )


def file_value(value: Any, kind: str) -> Any:
    """A value as the framework takes it that reads YAML 1.1: yes is a flag, 1e-5 in quotes a number."""
    if isinstance(value, str) and kind == "flag":
        return _WORDS.get(value.lower(), value)
    if isinstance(value, str) and kind == "number":
        try:
            return float(value)
        except ValueError:
            return value  # refused where the baseline is parsed
    return value


def is_off(value: object) -> bool:
    """Whether a switch is off, or not set."""
    return value is None or file_value(value, "flag") is False


def _precision_names(table: Table) -> set[str]:
    return {name for own in table.precisions.values() for name in own}


def _read_precision(given: Mapping[str, Any], table: Table) -> str | None:
    """The amp_dtype of a file's own names: the one all of whose marks are there; None where that can't be told."""
    if not given:
        return None
    for amp_dtype in ("bfloat16", "float16", "tf32", "float32"):
        marks = {
            name: value
            for name, value in table.precisions.get(amp_dtype, {}).items()
            if value is not False
        }
        if amp_dtype in table.precisions and all(
            _alike(given.get(name), value) for name, value in marks.items()
        ):
            return amp_dtype if marks or all(is_off(value) for value in given.values()) else None
    return None


def _alike(given: object, value: object) -> bool:
    return (
        file_value(given, "flag") == value
        if isinstance(value, bool)
        else str(given).lower() == str(value).lower()
    )


def _unread_precisions(
    given: Mapping[str, Any], amp_dtype: str | None, table: Table
) -> dict[str, str]:
    """Of a file's own names of precisions, what the amp_dtype that was read does not tell."""
    told = table.precisions.get(amp_dtype or "", {})
    left = {name: value for name, value in given.items() if not is_off(value)}
    return {
        name: f"{value!r} has no amp_dtype here; set baseline.amp_dtype"
        if amp_dtype is None
        else f"{value!r} is set beside {amp_dtype}, which is taken"
        for name, value in left.items()
        if amp_dtype is None or not _alike(value, told.get(name, False))
    }


# What an export hands back, and the configuration that it is made from as plain values.
#
# Comes in: a TrainingConfig. Goes out: a Wanted, by which tables write, and the types of an Export.


CLIPS = "gradients are clipped each step; in trials only where your own step or Trainer does"
"""Said of targets that clip by themselves: a Trainer that was searched with clips in its trials
too."""

ADAM_AS_ITS_OWN = "betas, epsilon and weight decay are its own unless you set them; trials had those of your AdamW"
"""Said of targets that are told to make an AdamW."""


class Dropped(NamedTuple):
    """A setting that the text does not carry."""

    setting: str
    """By its name here, such as "channels_last" or "ddp.comm_hook"."""
    reason: str
    """Why, and where it goes instead."""


class Differing(NamedTuple):
    """What the target does by itself and trials did not, or otherwise."""

    name: str
    """The target's own name for it, such as "lr_scheduler_type"."""
    reason: str
    """What it does, and what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A configuration for another framework."""

    target: str
    """The framework, such as "hf"."""
    text: str
    """What is saved or pasted: a file, a command line, or lines of Python, as the target takes it."""
    settings: Mapping[str, Any]
    """The same by the target's own names: `TrainingArguments(**export.settings)`. Where the text is
    Python, the arguments of its Trainer."""
    dropped: tuple[Dropped, ...]
    """Settings that the text does not carry; one that has torch's own value is no loss, and not
    among them."""
    defaults: tuple[Differing, ...]
    """Defaults of the target that the text leaves as they are, and under which it trains otherwise
    than trials did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The values of a TrainingConfig by name, those of DDP as "ddp.bucket_cap_mb"."""

    values: Mapping[str, Any]
    changed: frozenset[str]
    """Names whose values are not those of a default TrainingConfig, which are torch's own."""
    device: str | None
    """The kind of device that it is for, such as "cpu"; None: not known."""
    optimizer: str | None
    """The class of the optimizer that it was found with; None: not known."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def is_ddp(self) -> bool:
        """Whether DistributedDataParallel's arguments have a meaning."""
        return bool(self["strategy"] == "ddp")

    @property
    def processes(self) -> int:
        """Ranks, each a process of its own."""
        return int(self["world_size"]) if self.is_ddp else 1

    @property
    def has_budget(self) -> bool:
        """Whether the user's batch sampler makes batches of so many tokens: their size in samples is a mean then."""
        return self["max_tokens"] is not None

    @property
    def loader(self) -> dict[str, Any]:
        """Arguments of torch's DataLoader that are not its own defaults; the batch size wherever it is fixed."""
        size = {} if self.has_budget else {"batch_size": self["micro_batch_size"]}
        names = [
            name for name in self.values if name in BY_NAME and BY_NAME[name].is_loader_argument
        ]
        return {**size, **{name: self[name] for name in names if name in self.changed}}

    @property
    def ddp(self) -> dict[str, Any]:
        """DistributedDataParallel's arguments that are not its own, but for its first bucket and its hook."""
        names = [name for name in self.changed if name.startswith(DDP_PREFIX)]
        arguments = {
            name.removeprefix(DDP_PREFIX): self[name] for name in self.values if name in names
        }
        arguments.pop("first_bucket_mb", None)
        arguments.pop("comm_hook", None)
        return arguments


def wanted(
    config: TrainingConfig, *, device: str | None = None, optimizer: str | None = None
) -> Wanted:
    """The values of a TrainingConfig for a table."""
    values = config.by_name
    plain = type(config)().by_name
    changed = frozenset(name for name, value in values.items() if value != plain[name])
    return Wanted(
        values=values,
        changed=changed,
        device=device and device.partition(":")[0],
        optimizer=optimizer,
    )
