"""Parameters, gradients and optimizer state divided among ranks instead of kept whole by each: the bytes saved. Pure.

Comes in: an Evidence, or a group's configuration with what was measured of it. Goes out: at most one piece of advice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import JsonValue

from autotune.diagnosis.gains import advise
from autotune.records.diagnosis import Advice, Evidence
from autotune.records.measurement import Measurement
from autotune.settings.environment import Environment
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import WorkloadFacts
from autotune.space.constraints import ranks_on_host

__all__ = ["StateBytes", "shard_group", "shard_parameters", "state_bytes"]

_MUCH = 0.5
"""Of the memory limit, from which on the model's state is what leaves no room: our own convention, its larger part."""
_SOME = 0.1
"""The same where the peak is over the limit: our own convention, less would hardly bring it below."""
_FLOAT32_BYTES = 4.0
_STATES = {
    "SGD": (0, 1),
    "Adam": (2, 3),
    "AdamW": (2, 3),
    "NAdam": (2, 2),
    "RAdam": (2, 2),
    "Adamax": (2, 2),
    "Adagrad": (1, 1),
    "Adadelta": (2, 2),
    "RMSprop": (1, 3),
    "Rprop": (2, 2),
    "ASGD": (1, 1),
    "Muon": (1, 1),
}
"""Tensors of a parameter's size that an optimizer of torch keeps, at least and at most (SGD's with momentum, Adam's
with amsgrad). Source: pytorch.org, torch.optim, the algorithms' state."""
_STATES_OF_OTHERS = (0, 2)
"""Of an optimizer that is not torch's: none, or as many as Adam's."""


class StateBytes(NamedTuple):
    """Bytes that a rank keeps of the model, whatever its batch."""

    least: float
    most: float
    largest_rows: float
    """By so much at most a rank's part is larger than an even one: rows are not divided."""
    is_measured: bool


def state_bytes(run: Measurement, facts: WorkloadFacts) -> StateBytes:
    """As measured, else by the parameters' bytes and the optimizer's name.

    Frozen parameters may be narrower than the gradients, as those of a quantised or a half-precision base are: where
    their bytes are not known, they count at the most alone.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 3.1.
    """
    state = run.model_state
    if state is not None:
        rows = state.row_bytes * state.total_bytes / max(1, state.parameter_bytes)
        return StateBytes(state.total_bytes, state.total_bytes, rows, is_measured=True)
    trained = facts.trainable_parameter_count or facts.parameter_count
    width = facts.gradient_bytes / trained if facts.gradient_bytes and trained else _FLOAT32_BYTES
    few, many = _STATES.get(facts.optimizer.name, _STATES_OF_OTHERS)
    least, most = (facts.parameter_bytes or width * count for count in (trained, facts.parameter_count))
    least, most = (own + (1 + states) * width * trained for own, states in ((least, few), (most, many)))
    return StateBytes(least, most, 0.0, is_measured=False)


def shard_parameters(evidence: Evidence) -> Iterator[Advice]:
    """For a job that runs on several devices, or could: what FSDP2 saves where the model's state leaves no room."""
    config, environment = evidence.config, evidence.environment
    ranks = config.world_size
    if ranks == 1 and environment.device_kind != "cpu":  # on a CPU further ranks share the same memory
        ranks = environment.device_count * environment.hosts
    yield from shard_group(config, ranks, environment, evidence.facts, evidence.measurement, evidence.limit_bytes)


def shard_group(
    config: TrainingConfig,
    ranks: int,
    environment: Environment,
    facts: WorkloadFacts,
    run: Measurement,
    limit_bytes: int,
) -> Iterator[Advice]:
    """The same for a group of so many ranks.

    Each rank keeps its part alone: of N ranks, 1 - 1/N of all is saved (stage 3 of ZeRO), less what rows leave uneven.
    On a CPU the ranks of a host share the memory that the limit is on.
    Source: pytorch.org, torch.distributed.fsdp.fully_shard; Rajbhandari et al. 2020, section 5.
    """
    if ranks < 2:
        return
    state = state_bytes(run, facts)
    sharing = ranks_on_host(config.process_count, environment) if environment.has_only_ram else 1
    is_over = run.peak_memory_bytes > limit_bytes or run.memory.is_thrashing
    if state.least * sharing < (_SOME if is_over else _MUCH) * limit_bytes:
        return
    saved = 1.0 - 1.0 / ranks
    figures: dict[str, JsonValue] = {
        "ranks": ranks,
        "saved_fraction": saved,
        "state_bytes": round((state.least + state.most) / 2),
        "least_saved_bytes": max(0, round(saved * state.least - state.largest_rows)),
        "most_saved_bytes": round(saved * state.most),
        "limit_fraction": state.least * sharing / limit_bytes,
        "is_measured": state.is_measured,
        "is_today": config.world_size > 1,
    }
    yield advise("shard_parameters", run.samples_per_s, None, {}, **figures)
