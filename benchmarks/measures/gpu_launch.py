"""The part of benchmarks/gpu.py on launching: how long the host takes for a step of 18 narrow layers, by regimes.

Each regime trains the workload `launch_bound`. Of the main thread a step's wall and CPU seconds are read, by forward,
backward and optimizer, and its context switches; of every thread (backward has its own on a GPU) the CPU seconds.

    wall ~ CPU, CPU as in "tight"      nothing holds launching up
    wall ~ CPU, CPU above "tight"      the core is slower: cold caches, clock, hyper-thread
    wall >> CPU                        it waits for the GIL (many voluntary switches) or for a core (involuntary ones)

"tight" regimes drain the device and launch three steps on a batch that lies there, so that a full queue of the device
can't hold the host up; the others run as a training loop does.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import groupby, pairwise, repeat
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep, thread_time
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.measures.gpu_scale import Scale, Task, case_of
from benchmarks.measures.pairs import mean_ratio
from benchmarks.measures.part_guard import Figures, Keep, run_guarded
from benchmarks.measures.recording import say

__all__ = ["REGIMES", "Regime", "measure_launching"]

_WARM_UP_S = 0.7
_BLOCK_S = 0.25
_STEPS_OF_A_BURST = 3
_USUAL_INTERVAL_S, _SHORT_INTERVAL_S = 5e-3, 1e-4  # of the GIL; the first is Python's own
_ALTERNATIONS = 3
_CONSUMED_EVERY_S = 5e-3  # a loop's pace
_OWN_CORES = 4
_LARGER = 4  # times the batch
_PROFILED_STEPS = 10
_REGIME_S = 4.0  # with the start of the workers, before one was seen: a guess
_PROCESS_S = 4.0  # a CUDA context, and the first step


def measure_launching(task: Task) -> Figures:
    """Run the regimes that are asked for, as many as fit."""
    asked = [regime for regime in REGIMES if not task.regimes or regime.name in task.regimes]
    import_module("torch._dynamo")  # by the first optimizer of each process else, for seconds
    found: Figures = {}
    errors: Figures = {}
    # Those that share a process come one after another in the table.
    for alone, group in groupby(asked, key=lambda regime: regime.name if regime.is_alone else None):
        regimes = list(group)
        if task.left_s < _PROCESS_S + _REGIME_S:
            break
        own = run_guarded(
            partial(_run_regimes, regimes, found, task), limit_s=task.left_s + _PROCESS_S
        )
        if "error" in own:
            errors[alone or regimes[0].name] = own["error"]
        found |= own.get("regimes", {})
        task.keep({"regimes": found})
    return {
        "regimes": found,
        "errors": errors,
        "left_out": [regime.name for regime in asked if regime.name not in found],
        "torch": torch.__version__,
    }


def _loader(
    scale: Scale, *, workers: int | None = None, factor: int = 1, **options: Any
) -> DataLoader[Any]:
    """Load the workload's items, in batches that are `factor` times as large as its own."""
    return DataLoader(
        case_of("launch_bound", scale).dataset,
        factor * _batch_size(scale),
        shuffle=True,
        drop_last=True,
        num_workers=_workers(scale) if workers is None else workers,
        **options,
    )


def _batch_size(scale: Scale) -> int:
    return 8 if scale.is_small else 256


def _workers(scale: Scale) -> int:
    return 1 if scale.is_small else 16


class _Bench:
    """Model, optimizer and a batch on the device; times its own steps."""

    def __init__(self, scale: Scale, *, fused: bool | None = None) -> None:
        case = case_of("launch_bound", scale)
        self.scale = scale
        self.device = torch.device(scale.device)
        self.is_gpu = self.device.type == "cuda"
        self.seconds = 0.2 if scale.is_small else 2.0
        self.model = case.model().to(self.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=case.settings["lr"], fused=fused
        )
        inputs, labels = next(iter(_loader(scale, workers=0)))
        self.inputs, self.labels = inputs.to(self.device), labels.to(self.device)
        self.rows: list[list[float]] = []
        for _ in range(2 if scale.is_small else 10):
            self.step((self.inputs, self.labels))
        self.synchronize()

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def step(self, batch: Sequence[Tensor]) -> None:
        """Train on a batch, and note the main thread's wall and CPU seconds and its switches."""
        wall, cpu, before = (
            [perf_counter()],
            [thread_time()],
            resource.getrusage(resource.RUSAGE_THREAD),
        )
        inputs, labels = (one.to(self.device, non_blocking=True) for one in batch)
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        wall.append(perf_counter())
        cpu.append(thread_time())
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        wall.append(perf_counter())
        cpu.append(thread_time())
        self.optimizer.step()
        self.optimizer.zero_grad()
        wall.append(perf_counter())
        cpu.append(thread_time())
        after = resource.getrusage(resource.RUSAGE_THREAD)
        switches = [after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw]
        self.rows.append([*_gaps(wall), *_gaps(cpu), *map(float, switches)])

    def tight(self, before: Callable[[], object] = lambda: None) -> Figures:
        """Launch three steps on an idle device, over and over, each time after `before`."""

        def burst() -> int:
            self.synchronize()
            before()
            for _ in range(_STEPS_OF_A_BURST):
                self.step((self.inputs, self.labels))
            return _STEPS_OF_A_BURST

        return self.watched(burst)

    def loop(
        self, batches: Iterable[Any] | None = None, train: Callable[[Any], object] | None = None
    ) -> Figures:
        """Train as a loop does; without batches on those of the workers, pinned."""
        return self.windows([lambda: None], batches, train)[0]

    def windows(
        self,
        before_each: Iterable[Callable[[], object]],
        batches: Iterable[Any] | None = None,
        train: Callable[[Any], object] | None = None,
        *,
        share: float = 1.0,
    ) -> list[Figures]:
        """Time windows of one loop after a warm-up, each after a call of its own and `share` times as long as usual."""
        taken = iter(self.pinned() if batches is None else batches)
        act = train or self.step
        waited_s = 0.0

        def take_a_step() -> int:
            nonlocal waited_s
            begun = perf_counter()
            batch = next(taken)
            waited_s += perf_counter() - begun
            act(batch)
            return 1

        warm_at = perf_counter() + min(_WARM_UP_S, self.seconds)
        while perf_counter() < warm_at:
            take_a_step()
        found = []
        for prepare in before_each:
            prepare()
            waited_s = 0.0
            figures = self.watched(take_a_step, share)
            found.append({**figures, "take_s": waited_s / figures["steps"]})
        return found

    def pinned(self, **options: Any) -> DataLoader[Any]:
        return _loader(self.scale, pin_memory=self.is_gpu, **options)

    def watched(self, work: Callable[[], int], share: float = 1.0) -> Figures:
        """Repeat what trains some steps; samples/s, and figures of a step."""
        self.synchronize()
        self.rows.clear()
        before, own_cpu_s = _cpu_of_threads(), process_time()
        blocks: list[list[float]] = []
        begun = block_begun = perf_counter()
        steps = of_block = 0
        while (now := perf_counter()) < begun + share * self.seconds:
            if now - block_begun >= _BLOCK_S:
                blocks.append([of_block, now - block_begun])
                block_begun, of_block = now, 0
            done = work()
            steps += done
            of_block += done
        self.synchronize()
        seconds = perf_counter() - begun
        spent = {
            name: (cpu_s - before.get(name, 0.0)) / steps
            for name, cpu_s in _cpu_of_threads().items()
        }
        return {
            "samples_per_s": steps * _batch_size(self.scale) / seconds,
            "steps": steps,
            "seconds": seconds,
            "blocks": blocks,
            "process_cpu_s": (process_time() - own_cpu_s) / steps,
            "threads_cpu_s": {name: cpu_s for name, cpu_s in spent.items() if cpu_s > 0},
            **_of_steps(self.rows),
        }


def _of_steps(rows: list[list[float]]) -> Figures:
    """Summarize a step's seconds by their medians, switches by their means; nothing where steps were not timed."""
    if not rows:
        return {}
    columns = list(zip(*rows, strict=True))
    names = ("forward", "backward", "optimizer")
    middle = [median(column) for column in columns[:6]]
    return {
        "wall_s": dict(zip(names, middle[:3], strict=True)),
        "cpu_s": dict(zip(names, middle[3:], strict=True)),
        "voluntary_switches": sum(columns[6]) / len(rows),
        "involuntary_switches": sum(columns[7]) / len(rows),
    }


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _cpu_of_threads() -> dict[str, float]:
    """CPU seconds of this process's threads, summed by name; torch names those of backward and of pinning.

    Read to a hundredth of a second, which is 0.03 ms a step of a window of 2 s.
    """
    found: dict[str, float] = {}
    for thread in psutil.Process().threads():
        try:
            name = Path(f"/proc/self/task/{thread.id}/comm").read_text().strip()
        except OSError:  # it has ended
            continue
        name = "main" if thread.id == os.getpid() else name
        found[name] = found.get(name, 0.0) + thread.user_time + thread.system_time
    return found


class _Process:
    """What the regimes of a process share; the bench is made when it is first asked for, and with it a CUDA context."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @cached_property
    def bench(self) -> _Bench:
        return _Bench(self.scale)


def _after_short_sleeps(own: _Process) -> Figures:
    """Launch after what a loop without workers does: it waits for 256 items of 0.1 ms."""

    def wait_for_items() -> None:
        for _ in range(256):
            sleep(1e-4)

    return own.bench.tight(wait_for_items)


def _beside_thread(own: _Process) -> Figures:
    """Launch while a thread takes batches, as the pinning thread does: they share the GIL."""
    bench, is_over = own.bench, threading.Event()
    thread = threading.Thread(target=_consume, args=(bench.pinned(), is_over))
    thread.start()
    try:
        sleep(_WARM_UP_S)
        return bench.tight()
    finally:
        is_over.set()
        thread.join()


def _beside_process(own: _Process) -> Figures:
    """Launch while another process takes batches, forked before there is a CUDA context: they share the cores alone."""
    context = multiprocessing.get_context("fork")
    is_over = context.Event()
    process = context.Process(target=_consume, args=(_loader(own.scale), is_over))
    process.start()
    try:
        return own.bench.tight()
    finally:
        is_over.set()
        process.join()


def _consume(loader: Iterable[object], is_over: Any) -> None:
    """Take batches at a loop's pace; nobody trains on them."""
    batches = iter(loader)
    while not is_over.is_set():
        due_at = perf_counter() + _CONSUMED_EVERY_S
        next(batches)
        sleep(max(0.0, due_at - perf_counter()))


def _copies(own: _Process) -> Figures:
    bench = own.bench
    batch = [one.cpu() for one in (bench.inputs, bench.labels)]
    return bench.loop(repeat([one.pin_memory() for one in batch] if bench.is_gpu else batch))


def _switch_interval(own: _Process) -> Figures:
    """Train with Python's own switch interval and with a short one, in turn within one loop."""
    bench = own.bench
    both = [partial(sys.setswitchinterval, one) for one in (_USUAL_INTERVAL_S, _SHORT_INTERVAL_S)]
    try:
        windows = bench.windows(_ALTERNATIONS * both, share=0.5)
    finally:
        sys.setswitchinterval(_USUAL_INTERVAL_S)
    usual, short = windows[::2], windows[1::2]
    ratios = [
        one["samples_per_s"] / other["samples_per_s"]
        for one, other in zip(short, usual, strict=True)
    ]
    return {"usual": usual, "short": short, "short_over_usual": asdict(mean_ratio(ratios))}


def _larger_batch(own: _Process) -> Figures:
    bench = own.bench
    figures = bench.loop(bench.pinned(factor=_LARGER))
    return {**figures, "samples_per_s": _LARGER * figures["samples_per_s"]}


def _cuda_graph(own: _Process) -> Figures:
    """Train by a graph of the whole step. Source: PyTorch, CUDA semantics, "Whole-network capture"."""
    bench = own.bench
    if not bench.is_gpu:
        return {"skipped": "there are no CUDA graphs here"}
    held = (bench.inputs.clone(), bench.labels.clone())
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call] # untyped in torch
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            bench.step(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = nn.functional.cross_entropy(bench.model(held[0]), held[1])
        loss.backward()  # type: ignore[no-untyped-call] # as above
        bench.optimizer.step()
        bench.optimizer.zero_grad()

    def replay(batch: Sequence[Tensor]) -> None:
        for place, one in zip(held, batch, strict=True):
            place.copy_(one, non_blocking=True)
        graph.replay()

    return bench.loop(train=replay)


def _after_profile(own: _Process) -> Figures:
    """Launch before and after a profile: CUPTI stays attached unless TEARDOWN_CUPTI is 1 (kineto, issue 1264)."""
    bench = own.bench
    before = bench.tight()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_gpu else [])]
    with profile(activities=activities):
        for _ in range(_PROFILED_STEPS):
            bench.step((bench.inputs, bench.labels))
        bench.synchronize()
    for _ in range(_PROFILED_STEPS):
        bench.step((bench.inputs, bench.labels))
    after = bench.tight()
    return {
        "before": before,
        "after": after,
        "after_over_before": after["samples_per_s"] / before["samples_per_s"],
    }


def _after_profile_torn_down(own: _Process) -> Figures:
    os.environ["TEARDOWN_CUPTI"] = (
        "1"  # read by kineto in this process, whose first profile comes now
    )
    return _after_profile(own)


def _fewer_workers(own: _Process) -> Figures:
    bench = own.bench
    return bench.loop(bench.pinned(workers=max(1, 3 * _workers(own.scale) // 4), prefetch_factor=8))


def _one_tensor(own: _Process) -> Figures:
    """Train on batches that workers hand over as a single tensor, the labels in its first column."""
    bench = own.bench
    return bench.loop(
        bench.pinned(collate_fn=_as_one), lambda batch: bench.step((batch, batch[:, 0].long()))
    )


def _as_one(items: list[tuple[Tensor, int]]) -> Tensor:
    batch = torch.stack([item for item, _ in items])
    batch[:, 0] = torch.tensor([label for _, label in items])
    return batch


def _by_file_system(own: _Process) -> Figures:
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call] # untyped in torch
    try:
        return own.bench.loop()
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call] # Linux's usual


def _own_cores(own: _Process) -> Figures:
    """Train on four cores while the workers have the others; set before backward's thread begins."""
    cores = os.sched_getaffinity(0)
    kept = set(sorted(cores)[:_OWN_CORES])
    if cores == kept:
        return {"skipped": f"{len(cores)} cores are too few"}
    os.sched_setaffinity(0, kept)
    bench = own.bench
    return bench.loop(bench.pinned(worker_init_fn=lambda _: os.sched_setaffinity(0, cores - kept)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One way to launch the same steps."""

    name: str
    run: Callable[[_Process], Figures]
    is_alone: bool = False
    """It acts before there is a CUDA context, or leaves something behind: it has a process of its own."""


def _regime(name: str, run: Callable[[_Process], Figures], *, is_alone: bool = False) -> Regime:
    return Regime(name=name, run=run, is_alone=is_alone)


REGIMES = (
    _regime("loop", lambda own: own.bench.loop()),
    _regime("switch-interval", _switch_interval),
    _regime("larger-batch", _larger_batch),
    _regime("cuda-graph", _cuda_graph),
    _regime("loop-2", lambda own: own.bench.loop()),
    _regime("profile", _after_profile, is_alone=True),
    _regime("torn-down", _after_profile_torn_down, is_alone=True),
    _regime("profile-2", _after_profile, is_alone=True),
    _regime("torn-down-2", _after_profile_torn_down, is_alone=True),
    _regime("tight", lambda own: own.bench.tight()),
    _regime("tight-by-thread", _beside_thread),
    _regime("resident", lambda own: own.bench.loop(repeat((own.bench.inputs, own.bench.labels)))),
    _regime("copies", _copies),
    _regime("one-tensor", _one_tensor),
    _regime("file-system", _by_file_system),
    _regime("not-pinned", lambda own: own.bench.loop(_loader(own.scale))),
    _regime("fewer-workers", _fewer_workers),
    _regime("fused", lambda own: _Bench(own.scale, fused=True).loop()),
    _regime("after-pause", lambda own: own.bench.tight(lambda: sleep(5e-3))),
    _regime("after-short-sleeps", _after_short_sleeps),
    _regime("loop-3", lambda own: own.bench.loop()),
    _regime("tight-2", lambda own: own.bench.tight()),
    _regime("tight-by-process", _beside_process, is_alone=True),
    _regime("own-cores", _own_cores, is_alone=True),
)
"""In order of what they decide, so that a cut leaves the most telling; a loop and "tight" come again, to show drift."""


def _run_regimes(regimes: Sequence[Regime], so_far: Figures, task: Task, keep: Keep) -> Figures:
    """Run regimes in this process, which has no CUDA context yet."""
    own = _Process(task.scale)
    found: Figures = {}
    for regime in regimes:
        if found and task.left_s < _REGIME_S:
            break
        found[regime.name] = regime.run(own)
        rate = found[regime.name].get("samples_per_s")
        say(
            f"launch: {regime.name}: {'done' if rate is None else format(rate, ',.0f') + ' samples/s'}"
        )
        keep({"regimes": found})
        task.keep({"regimes": so_far | found})  # also where the whole call is ended
    return {"regimes": found}
