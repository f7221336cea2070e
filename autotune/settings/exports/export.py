"""What an export hands back, and the configuration that it is made from as plain values.

Comes in: a TrainingConfig. Goes out: a Wanted, by which tables write, and the
types of an Export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.settings_table import BY_NAME, DDP_PREFIX

if TYPE_CHECKING:
    from autotune.settings.training_config import TrainingConfig

__all__ = ["ADAM_AS_ITS_OWN", "CLIPS", "Differing", "Dropped", "Export", "Wanted", "wanted"]

CLIPS = "gradients are clipped each step; in trials only where your own step or Trainer does"
"""Said of targets that clip by themselves: a Trainer that was searched with clips in its trials too."""

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
    """The same by the target's own names: `TrainingArguments(**export.settings)`. Where the text is Python, the
    arguments of its Trainer."""
    dropped: tuple[Dropped, ...]
    """Settings that the text does not carry; one that has torch's own value is no loss, and not among them."""
    defaults: tuple[Differing, ...]
    """Defaults of the target that the text leaves as they are, and under which it trains otherwise than trials did."""


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
        names = [name for name in self.values if name in BY_NAME and BY_NAME[name].is_loader_argument]
        return {**size, **{name: self[name] for name in names if name in self.changed}}

    @property
    def ddp(self) -> dict[str, Any]:
        """DistributedDataParallel's arguments that are not its own, but for its first bucket and its hook."""
        names = [name for name in self.changed if name.startswith(DDP_PREFIX)]
        arguments = {name.removeprefix(DDP_PREFIX): self[name] for name in self.values if name in names}
        arguments.pop("first_bucket_mb", None)
        arguments.pop("comm_hook", None)
        return arguments


def wanted(config: TrainingConfig, *, device: str | None = None, optimizer: str | None = None) -> Wanted:
    """The values of a TrainingConfig for a table."""
    values, plain = config.by_name, type(config)().by_name
    changed = frozenset(name for name, value in values.items() if value != plain[name])
    return Wanted(values=values, changed=changed, device=device and device.partition(":")[0], optimizer=optimizer)
