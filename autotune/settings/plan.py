"""A search or a diagnosis, parsed and checked once: what the YAML border and the Python call both make.

Comes in: a file's sections or a call's arguments, by the same names. Goes out: a Plan, which everything after trusts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, SkipValidation, ValidationInfo
from pydantic.dataclasses import dataclass

from autotune.note import Note
from autotune.policy import POLICY, Policy
from autotune.settings.budget import Budget
from autotune.settings.executor import Executor
from autotune.settings.objective import Objective
from autotune.settings.search_options import SearchOptions, checked_path
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload

__all__ = ["Plan", "ReadOver"]

_COUNTED_DEVICES = frozenset({"cuda", "xpu", "hpu", "mlu", "mtia", "musa", "npu", "privateuseone"})
"""Kinds of device of which a machine may have several: torch's own (torch.device) and those of its plug-ins."""


def _check_device(value: str, info: ValidationInfo) -> str:
    kind, colon, index = value.partition(":")
    if value not in {"auto", "cpu", "mps"} and not (kind in _COUNTED_DEVICES and (index.isdecimal() or not colon)):
        raise ValueError(f"must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, but got {value!r}")
    executor = info.data.get("executor")  # missing where it is wrong itself
    if executor is not None and executor.kind == "ray" and colon:
        rule = "must name a kind of device with executor ray, which gives each rank a device of its host"
        raise ValueError(f"{rule}, but got {value!r}; write {kind}")
    return value


def _check_run_dir(value: object) -> object:
    try:
        return None if value is None else Path(checked_path(value, "a folder's path")).expanduser()
    except RuntimeError:
        raise ValueError(f"'~' must stand for a known home folder, but got {value!r}; write the path out") from None


class ReadOver(NamedTuple):
    """Where a setting comes from that was read over from a framework's own file."""

    name: str
    """The file's own name for it."""
    optimizer: str | None = None
    """The class of the optimizer that `fused` is of there; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class Plan:
    """Everything that a search is asked for."""

    name: Annotated[str, Field(exclude=True)]  # no key of the YAML file
    """A few words for reports: the configuration file's name, the model's class, or the command's script."""
    workload: Workload
    """the functions that make the model and the dataset, as workload.model and workload.dataset; or the command that
    trains, as workload.command"""
    baseline: TrainingConfig = Field(default_factory=TrainingConfig)
    space: SearchSpace = Field(default_factory=SearchSpace)
    objective: Objective = Field(default_factory=Objective)
    budget: Budget = Field(default_factory=Budget)
    search: SearchOptions = Field(default_factory=SearchOptions)
    executor: Executor = Field(default_factory=Executor)
    device: Annotated[str, Field(strict=True), AfterValidator(_check_device)] = "auto"
    """torch's name for the device; "auto": the accelerator where there is one, else the CPU."""
    run_dir: Annotated[Path | None, BeforeValidator(_check_run_dir)] = None
    """None: a new folder below ./runs."""
    notes: Annotated[tuple[Note, ...], Field(exclude=True)] = ()  # no key of the YAML file
    """What could not be taken over from a caller's own objects."""
    read_over: Annotated[Mapping[str, ReadOver], Field(exclude=True)] = Field(default_factory=dict)
    """Settings of the baseline that a framework's own file says, and its user may never have chosen; no key of the
    YAML file."""
    policy: Annotated[Policy, SkipValidation, Field(exclude=True)] = POLICY  # no key of the YAML file
    """Thresholds and shares of the search; tests and benchmarks vary them."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0  # numpy.random.seed takes no larger one
    """Of the search's proposals, and of every trial."""
