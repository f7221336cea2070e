"""Cures for a loop that its host holds: configurations that may cure it, and a note for the report. Pure.

A loop is held by its host where the device waits for launches, or for the training process to take batches that lie
ready. Larger micro batches, fused optimizers, pinned memory and CUDA graphs ask less of the host for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autotune.messages.search import host_bound
from autotune.note import Note
from autotune.records.measurement import Measurement
from autotune.records.recommendation import Recommendation
from autotune.records.utilization import best_direct_reading
from autotune.settings.budget import Budget
from autotune.settings.environment import GRAPH_KINDS
from autotune.settings.search_space import Choices, Domain
from autotune.settings.training_config import TrainingConfig
from autotune.space.domains import whole_numbers
from autotune.space.resolved_space import ResolvedSpace
from autotune.study.proposals import Params, compose_allowed, params_of
from autotune.tuning.outcomes import SearchOutcome

__all__ = [
    "busy_while_host_bound",
    "compilation_domains",
    "host_notes",
    "is_host_bound",
    "list_cures",
    "waits_most_for_host",
]

_HOST_BOUND_FROM = 0.20
"""Share of the time in which the device waits for the host, from which it limits: for cures and for the diagnosis."""


def is_host_bound(run: Measurement | None) -> bool:
    """Return True where the device waits a fifth of a run's time or more for its host."""
    return run is not None and (run.host_fraction or 0.0) >= _HOST_BOUND_FROM


def waits_most_for_host(run: Measurement | None) -> bool:
    """Return True where the device waits for its host by `is_host_bound`, and no longer for data than for that."""
    return is_host_bound(run) and run is not None and (run.host_fraction or 0.0) >= (run.data_wait_fraction or 0.0)


def busy_while_host_bound(run: Measurement) -> float | None:
    """Return the share of time in which the device is busy, of a run that waits most for its host; None for others."""
    reading = best_direct_reading(run.busy_readings) if waits_most_for_host(run) else None
    return None if reading is None else reading.fraction


def compilation_domains(run: Measurement, space: ResolvedSpace, budget: Budget) -> Mapping[str, Domain]:
    """Return the values of torch.compile's settings that become worth searching; none where they are not.

    Not where the user has named values of them, where shapes vary (each would be recorded as a graph of its own), or
    where the training to come is too short to pay for compiling.

    Args:
        run: Of the best configuration, whose host holds it.
        space: What is searched so far.
        budget: Holds the hours of training that are still to come.
    """
    trials = space.policy.trials
    is_listed = {"compile", "compile_mode"} & {*space.given} or len(space.domains["compile"]) > 1
    saved_s = (run.host_fraction or 0.0) * budget.training_s
    has_graphs = space.environment.device_kind in GRAPH_KINDS and space.facts.has_fixed_shapes
    if is_listed or not has_graphs or saved_s < trials.worth_compiling * trials.compiling_s:
        return {}
    return {"compile": Choices(values=(False, True)), "compile_mode": Choices(values=("default", "reduce-overhead"))}


def list_cures(
    best: TrainingConfig, space: ResolvedSpace, *, fits: Callable[[TrainingConfig], bool]
) -> Iterator[Params]:
    """Yield the best configuration with less work for its host, each with pinned memory and a fused optimizer's step.

    First comes a larger micro batch, where possible at the same global batch; then CUDA graphs, where these are
    searched; then nothing else.

    Args:
        best: The best configuration.
        space: What is searched.
        fits: Whether a configuration is likely to fit into memory.
    """
    own = params_of(best, space)
    own |= {name: True for name in ("pin_memory", "fused") if name in own and True in space.domains[name]}
    setting, steps = space.batch_setting, best.grad_accum_steps
    batch, same, larger = own.get(setting), list[Params](), list[Params]()
    if isinstance(batch, int):
        most = space.policy.trials.most_growth * batch
        sizes = [size for size in whole_numbers(space.domains[setting]) if batch < size <= most]
        larger = [{setting: size} for size in sorted(sizes, reverse=True)]
        if "grad_accum_steps" in own:
            same = [
                {**one, "grad_accum_steps": steps * batch // size}
                for one in larger
                if isinstance(size := one[setting], int) and steps * batch % size == 0
            ]
    graphs: list[Params] = [{"compile": True, "compile_mode": "reduce-overhead"}] if "compile_mode" in own else []
    alternatives: tuple[list[Params], ...] = ([*same, *larger], graphs, [{}])
    for options in alternatives:
        for wish in options:
            config = compose_allowed({**own, **wish}, space)
            if config is not None and fits(config):
                yield {**own, **wish}
                break


def host_notes(found: SearchOutcome, chosen: Recommendation | None) -> Iterator[Note]:
    """Yield a note where the host holds what is recommended, with what was measured of it."""
    if chosen is None:
        return
    runs = [run for record in found.records if record.number == chosen.number for run in record.runs]
    known = [run for run in reversed(runs) if run.host_fraction is not None]
    run = next((one for one in known if one.breakdown is not None), known[0] if known else None)
    if run is None or run.host_fraction is None or not is_host_bound(run):
        return
    device = found.ceilings.ceiling_of("device", chosen.config)
    yield host_bound(
        host_fraction=run.host_fraction,
        batch_s=run.window.batch_s,
        launch_s=None if device is None else device.host_s,
        take_s=run.window.take_s,
        has_compiled=any(record.config.compile for record in found.records),
        is_pinned=chosen.config.pin_memory,
    )
