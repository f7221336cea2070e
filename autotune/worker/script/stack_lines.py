"""Sum the samples of py-spy by part of training and by line of the user's code. Pure.

In: py-spy's raw output, and the id of the training thread. Out: `Stacks`. A stack
belongs to a part by torch's own frames on it, and to the deepest line of the user's code.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from autotune.config.plan import INSTALLED
from autotune.records.stacks import StackLine, StackPart, Stacks

_MOST_LINES = 20
"""Lines kept of the training thread, and of all workers. Source: our convention."""
_LEAST_FRACTION = 0.01
"""Share of the samples below which a line is left out. Source: our convention."""
_CALLED_FRACTION = 1 / 3
"""Share of a line's samples from which on a function below the line is worth naming; with a
smaller one, none stands out. Source: our convention."""
_ROOT_FRACTION = 0.02
"""Share of the training thread's samples below which those with the same outermost frame were cut
off: py-spy reads while the process runs. Source: below 1 % in runs of py-spy 0.4.3."""
_MOST_CODE = 200
"""Characters of a line of code that are kept. Source: our convention."""

_AUTOTUNE = str(Path(__file__).resolve().parents[2])
_TORCH = str(Path(torch.__file__).resolve().parent)
_PROGRAMS = str(Path(sys.executable).parent)
_STANDARD_LIBRARY = re.compile(r".*/lib(?:64)?/python3\.\d+t?/(?!.*(?:site|dist)-packages/)")


class Frame(NamedTuple):
    """A frame of a stack."""

    function: str
    """Qualified name, as "Images.__getitem__"."""
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """Samples with the same stack."""

    thread: int
    is_main_thread: bool
    """It is the main thread of its process."""
    frames: tuple[Frame, ...]
    """Outermost first."""
    count: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """Samples with the same stack, at a line of the user's code."""

    part: StackPart
    frame: Frame
    """The line; its number is 0 for a library's file."""
    below: tuple[Frame, ...]
    """Frames of functions that the line has called."""
    count: int


def sum_stacks(raw: str, *, thread: int, seconds: float, folder: Path) -> Stacks:
    """Return the shares of parts and lines.

    Args:
        raw: py-spy's raw output on the training process and its subprocesses.
        thread: Id of the training thread in the system.
        seconds: Seconds that were sampled.
        folder: Working folder: files below it are shown by their path from there.
    """
    found = map(_sample_of, _NEXT_STACK.split(raw))
    samples = [sample for sample in found if sample is not None]
    main = [
        _placed(sample)
        for sample in _complete(sample for sample in samples if sample.thread == thread)
        if not _is_our_work(sample.frames)
    ]
    workers = [
        placed
        for sample in samples
        if sample.is_main_thread and sample.thread != thread
        for placed in [_placed(sample)]
        if placed.part in {"item", "collate"}
    ]
    return Stacks(
        seconds=seconds,
        samples=_count(main),
        main=_lines_of(main, folder),
        main_parts=_parts_of(main),
        worker_samples=_count(workers),
        workers=_lines_of(workers, folder),
        worker_parts=_parts_of(workers),
    )


# Read py-spy's raw output: `process 7:"python train.py";thread (7): MainThread;main (train.py:3) 12`


_NEXT_STACK = re.compile(r'\n(?=process \d+:")')
"""A line feed before a stack; command lines may hold others."""
_THREAD = re.compile(r"(?:^|;)thread \((\d+)\)[^;]*")
_PROCESS = re.compile(r'(?:^|;)process (\d+):"')
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_COMPREHENSION = re.compile(r"(?:\.<(?:listcomp|setcomp|dictcomp|genexpr|lambda)>)+$")


def _sample_of(text: str) -> _Sample | None:
    """Return a stack with its count; None if the text is not one."""
    stack, _, number = text.strip().rpartition(" ")
    if not number.isdecimal():
        return None
    threads = [*_THREAD.finditer(stack)]
    if not threads:
        return None
    thread = threads[-1]  # before it stand the processes' command lines, which may hold anything
    processes = _PROCESS.findall(stack[: thread.start()])
    found = (_FRAME.fullmatch(text) for text in stack[thread.end() :].split(";"))
    frames = tuple(Frame(one[1], one[2], int(one[3])) for one in found if one)
    if not frames:
        return None
    is_main_thread = thread[1] in processes
    return _Sample(int(thread[1]), is_main_thread, frames, int(number))


def _complete(samples: Iterable[_Sample]) -> list[_Sample]:
    """Return a thread's samples without those whose outer frames are missing."""
    found = list(samples)
    roots = Counter[tuple[str, str]]()
    for sample in found:
        roots[sample.frames[0][:2]] += sample.count
    least = _ROOT_FRACTION * roots.total()
    return [sample for sample in found if roots[sample.frames[0][:2]] >= least]


# Owners of files


def _is_ours(file: str) -> bool:
    return file.startswith(f"{_AUTOTUNE}/")


def _is_our_work(frames: Sequence[Frame]) -> bool:
    """Return whether a hook of ours was running; what opens the script's files is the script's work."""
    file = frames[-1].file
    return _is_ours(file) and not file.startswith(f"{_AUTOTUNE}/worker/script/files/")


def _is_users(file: str) -> bool:
    """Return whether a file is neither autotune's, torch's, the standard library's nor installed."""
    if file.startswith(("<", f"{_TORCH}/", f"{_PROGRAMS}/")) or _is_ours(file):
        return False
    return INSTALLED.isdisjoint(Path(file).parts) and not _STANDARD_LIBRARY.match(file)


def _tail(file: str) -> str:
    """Return a library's file by its path from where it is imported: "json/decoder.py"."""
    if file.startswith(f"{_TORCH}/"):
        return f"torch{file.removeprefix(_TORCH)}"
    parts = Path(file).parts
    for place in reversed(range(len(parts))):
        if parts[place] in INSTALLED:
            return "/".join(parts[place + 1 :])
    found = _STANDARD_LIBRARY.match(file)
    return file[found.end() :] if found else Path(file).name


def _package(frame: Frame) -> str:
    return _tail(frame.file).partition("/")[0]


# The part of training that a stack belongs to


_LOADERS = (
    "torch/utils/data/dataloader.py",
    "torchdata/stateful_dataloader/stateful_dataloader.py",
)
_FETCHER = "torch/utils/data/_utils/fetch.py"
_MODULE = "torch/nn/modules/module.py"
_BACKWARD = ("torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")
_NO_OPTIMIZERS = ("torch/optim/lr_scheduler.py", "torch/optim/swa_utils.py")


def _part_of(frames: Sequence[Frame]) -> tuple[StackPart, int]:
    """Return a stack's part of training, and the place of the first frame inside it.

    Forward passes within a backward pass (checkpointing) or an item belong to those, but forward
    and backward passes in an optimizer's closure don't belong to the optimizer.
    """
    part: StackPart = "other"
    for place, frame in enumerate(frames):
        tail = _tail(frame.file)
        name = frame.function.rpartition(".")[2]
        inside = place + 1
        if tail == _FETCHER:
            # Older Pythons have a frame of its own for the comprehension over indices.
            while inside < len(frames) and frames[inside].file == frame.file:
                inside += 1
            is_collating = "collate_fn" in linecache.getline(frame.file, frame.line)
            return "collate" if is_collating else "item", inside
        if tail in _LOADERS:
            if name == "_next_index":
                return "sampler", inside
            part = "waiting"
        elif tail in _BACKWARD and name in {"backward", "grad", "_engine_run_backward"}:
            return "backward", 0
        elif tail == _MODULE and name in {"_wrapped_call_impl", "_call_impl"}:
            part = "forward"
        elif tail.startswith("torch/optim/") and tail not in _NO_OPTIMIZERS:
            part = "optimizer" if name in {"step", "wrapper"} else part
    return part, 0


# The line that a stack belongs to


def _placed(sample: _Sample) -> _Placed:
    """Return a stack at the user's deepest line inside its part; else at a library's file."""
    part, inside = _part_of(sample.frames)
    frames = [frame for frame in sample.frames[inside:] if not _is_ours(frame.file)]
    for place in reversed(range(len(frames))):
        if _is_users(frames[place].file):
            below = tuple(frames[place + 1 :])
            return _Placed(part, frames[place], below, sample.count)

    # The package that is called first owns the work: a dataset's, a trainer's.
    frames = frames or [sample.frames[max(0, inside - 1)]]  # native code makes the item
    outer = next((frame for frame in frames if "/" in _tail(frame.file)), frames[0])
    package = _package(outer)
    place = max(at for at, frame in enumerate(frames) if _package(frame) == package)
    frame = frames[place]._replace(line=0)
    return _Placed(part, frame, tuple(frames[place + 1 :]), sample.count)


def _lines_of(placed: Sequence[_Placed], folder: Path) -> tuple[StackLine, ...]:
    """Return the lines with the largest shares, largest first."""
    total = _count(placed)
    by_line: dict[tuple[StackPart, str, int], list[_Placed]] = {}
    for one in placed:
        by_line.setdefault((one.part, one.frame.file, one.frame.line), []).append(one)
    lines = [_line_of(part, held, total, folder) for (part, _, _), held in by_line.items()]
    heavy = [line for line in lines if line.fraction >= _LEAST_FRACTION]
    return tuple(sorted(heavy, key=lambda line: -line.fraction)[:_MOST_LINES])


def _line_of(part: StackPart, placed: Sequence[_Placed], total: int, folder: Path) -> StackLine:
    """Return a line with its share of all samples, and what it calls."""
    file = placed[0].frame.file
    number = placed[0].frame.line
    functions = Counter[str]()
    for one in placed:
        functions[_plain(one.frame.function)] += one.count
    if number:
        place = f"{_shown(file, folder)}:{number}"
        code = linecache.getline(file, number).strip()[:_MOST_CODE]
    else:
        place = _tail(file)
        code = ""
    calls, called = _hottest_call(placed)
    own = sum(one.count for one in placed if not one.below)
    if not calls and own >= _CALLED_FRACTION * _count(placed):
        calls = _only_call(code)
    return StackLine(
        part=part,
        place=place,
        function=functions.most_common(1)[0][0],
        code=code,
        calls=calls,
        calls_fraction=called / total if called else None,
        fraction=_count(placed) / total,
    )


def _hottest_call(placed: Sequence[_Placed]) -> tuple[str, int]:
    """Return the deepest function that holds enough of a line's samples, and its samples.

    From the line on, follows the callee with the most samples.
    """
    enough = _CALLED_FRACTION * _count(placed)
    held = list(placed)
    name = ""
    samples = 0
    depth = 0
    while True:
        callees = Counter[tuple[str, str]]()
        for one in held:
            if len(one.below) > depth:
                callees[one.below[depth][:2]] += one.count
        if not callees:
            return name, samples
        (callee, count), *_ = callees.most_common(1)
        if count < enough:
            return name, samples
        name = _dotted(*callee)
        samples = count
        held = [
            one for one in held if one.below[depth : depth + 1] and one.below[depth][:2] == callee
        ]
        depth += 1


_ALSO_WORK = (ast.BinOp, ast.comprehension, ast.JoinedStr)
"""Parts of a line that may take as long as its call."""


def _only_call(code: str) -> str:
    """Return a module's or object's function that a line calls, if it does nothing else: "zlib.decompress"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's own escapes and literals
            # The first line of a block needs a body.
            tree = ast.parse(f"{code} pass" if code.endswith(":") else code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # a part of a statement
        return ""
    nodes = [*ast.walk(tree)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    if len(calls) != 1 or any(isinstance(node, _ALSO_WORK) for node in nodes):
        return ""
    name = ast.unparse(calls[0])
    return name if "." in name and not name.startswith("self.") else ""


def _dotted(function: str, file: str) -> str:
    """Return a function's name with its module: "PIL.Image.Image.resize"."""
    module = _tail(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{module}.{_plain(function)}"


def _plain(function: str) -> str:
    """Return a qualified name as people write it: a comprehension's is that of its function."""
    return _COMPREHENSION.sub("", function.replace(".<locals>", ""))


def _shown(file: str, folder: Path) -> str:
    """Return a user's file by its path from the working folder; elsewhere by its name."""
    path = Path(file)
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


def _parts_of(placed: Sequence[_Placed]) -> dict[StackPart, float]:
    counts = Counter[StackPart]()
    for one in placed:
        counts[one.part] += one.count
    return {part: count / counts.total() for part, count in counts.most_common()}


def _count(placed: Sequence[_Placed]) -> int:
    return sum(one.count for one in placed)
