"""Name the lines of the user's code that take the most time, from sampled stacks. Pure.

Each function takes the `Stacks` of a run and returns a note with function, file and line; None if
no line stands out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from autotune.messages import stacks as messages
from autotune.note import Note
from autotune.records.stacks import StackLine, StackPart, Stacks

_FEWEST_SAMPLES = 20
"""Samples of a part below which no line is named: at 20, a share of one half has a standard error
of 11 %. Source: the binomial distribution."""
_LEAST_FRACTION = 0.10
"""Share of its part's time below which a line does not stand out. Source: our convention."""
_SYNCHRONISES = re.compile(
    r"\.(?:item|cpu|tolist|numpy|nonzero|synchronize|to|cuda)\(|\b(?:float|int|bool|print)\("
)
"""Calls that wait for the device, or may. Source: PyTorch's performance tuning guide, "Avoid
unnecessary CPU-GPU synchronization"."""


def hottest_item_line(stacks: Stacks) -> Note | None:
    """Return the line that takes the most of an item's time."""
    return _hottest_of_part(stacks, "item", messages.hot_item_line)


def hottest_collate_line(stacks: Stacks) -> Note | None:
    """Return the line that takes the most of collating."""
    return _hottest_of_part(stacks, "collate", messages.hot_collate_line)


def hottest_forward_line(stacks: Stacks) -> Note | None:
    """Return the line of the model's code that takes the most of the forward pass."""
    return _hottest_of_part(stacks, "forward", messages.hot_forward_line)


def hottest_sampler_line(stacks: Stacks) -> Note | None:
    """Return the sampler's line with the largest share of the training thread's time."""
    return _hottest_of_thread(stacks, "sampler", messages.hot_sampler_line)


def hottest_script_line(stacks: Stacks) -> Note | None:
    """Return the script's own code with the largest share of the training thread's time."""
    line = costly_code(stacks)
    return None if line is None else _note_on(line, 1.0, messages.hot_script_line)


def costly_code(
    stacks: Stacks,
    part: StackPart = "other",
    *,
    waits: bool = True,
    known: Collection[str] = (),
    saving: Collection[str] = (),
) -> StackLine | None:
    """Return the user's code with the largest share of the time, of one part of the training thread.

    A helper function counts with all of its lines, and is shown by the hottest of them: a loop over
    parameters spreads over several. The function that trains, which calls the model as well, and
    the model's forward count line by line. A loss of torch, or its profiler, is no such code.

    Args:
        stacks: The stacks.
        part: "other" for the code outside of loading, model and optimizer, "forward" for the
            model's.
        waits: Count lines that may wait for the device: on a CPU they compute.
        known: Places that belong to other parts of the run: checkpoints, logging.
        saving: Those whose functions do nothing else: of checkpoints, of validations.
    """
    own = [
        line
        for line in stacks.main
        if line.part == part and line.place not in known and not _is_torchs(line)
    ]
    if not waits:
        own = [line for line in own if not _SYNCHRONISES.search(line.code)]
    of_step = [line for line in stacks.main if line.part in _STEP_PARTS - {part}]
    trains = {_function_of(line) for line in of_step}
    # A line that calls the model, or steps, is more than the script's own code.
    calling = {line.place for line in of_step}
    own = [line for line in own if line.place not in calling]
    saves = {_function_of(line) for line in stacks.main if line.place in saving} - trains
    joined = dict[tuple[str, str], list[StackLine]]()
    for line in own:
        function = _function_of(line)
        if function in saves:
            continue
        is_by_line = function in trains or line.function.endswith("forward")
        joined.setdefault((line.place, "") if is_by_line else function, []).append(line)
    summed = []
    for lines in joined.values():
        hottest = max(lines, key=lambda line: line.fraction)
        whole = sum(line.fraction for line in lines)
        summed.append(
            hottest.model_copy(update={"fraction": min(1.0, whole), "calls_fraction": None})
        )
    return _standing_out(summed, 1.0, stacks.samples)


_STEP_PARTS = frozenset[StackPart]({"forward", "backward", "optimizer"})


def _function_of(line: StackLine) -> tuple[str, str]:
    """Return file and function of a line."""
    return line.place.rpartition(":")[0], line.function


_TORCHS = re.compile(r"torch[./](?:nn[./]functional|profiler|autograd[./]profiler)")


def _is_torchs(line: StackLine) -> bool:
    """Return whether a line spends its time in a loss of torch, or in its profiler."""
    return _TORCHS.match(line.calls) is not None


def hottest_wait(stacks: Stacks) -> Note | None:
    """Return the line that waits longest for the device, by its share of the training thread's time."""
    waiting = [
        line
        for line in stacks.main
        if line.part in {"other", "forward", "optimizer"} and _SYNCHRONISES.search(line.code)
    ]
    line = _standing_out(waiting, 1.0, stacks.samples)
    if line is None:
        return None
    return messages.waiting_line(
        fraction=line.fraction, place=line.place, function=line.function, code=line.code
    )


def _hottest_of_part(stacks: Stacks, part: StackPart, write: Callable[..., Note]) -> Note | None:
    """Return a part's line with the largest share of that part: of workers, if they do that work."""
    lines: Sequence[StackLine] = stacks.main
    parts = stacks.main_parts
    samples = stacks.samples
    if part in {"item", "collate"}:
        if stacks.worker_samples:
            lines = stacks.workers
            parts = stacks.worker_parts
            samples = stacks.worker_samples
        work = parts.get("item", 0.0) + parts.get("collate", 0.0)
        if parts.get(part, 0.0) < _LEAST_FRACTION * work:
            return None
    whole = parts.get(part, 0.0)
    line = _standing_out([line for line in lines if line.part == part], whole, samples)
    return None if line is None else _note_on(line, whole, write)


def _hottest_of_thread(stacks: Stacks, part: StackPart, write: Callable[..., Note]) -> Note | None:
    """Return a part's line with the largest share of the training thread's time."""
    lines = [line for line in stacks.main if line.part == part]
    line = _standing_out(lines, 1.0, stacks.samples)
    return None if line is None else _note_on(line, 1.0, write)


def _standing_out(lines: Sequence[StackLine], whole: float, samples: int) -> StackLine | None:
    """Return the line with the largest share, if that is known well enough and large enough.

    Args:
        lines: The lines.
        whole: Share of the samples that the lines are compared with.
        samples: All samples.
    """
    hottest = max(lines, key=lambda line: line.fraction, default=None)
    if hottest is None or whole * samples < _FEWEST_SAMPLES:
        return None
    return hottest if hottest.fraction >= _LEAST_FRACTION * whole else None


def _note_on(line: StackLine, whole: float, write: Callable[..., Note]) -> Note:
    """Write a note on a line, with the share of what it calls if that is known."""
    fraction = line.calls_fraction or line.fraction
    return write(
        fraction=min(1.0, fraction / whole),
        place=line.place,
        function=line.function,
        code=line.code,
        calls=line.calls,
    )
