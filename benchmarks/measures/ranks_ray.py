"""What Ray costs a trial: the same trial by the fork server of this machine and by a cluster of one node, in turns.

Told of each: seconds from the launch of a trial to its first step, and to its end (windows are equally long). On Ray
once with the hosts still reserved from the trial before, as in a search, and once after they were given back; and how
long it takes to connect: until each host's fork server has told what machine it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune.config.plan import Executor
from autotune.launch.launcher import Launcher
from autotune.launch.local import LocalLauncher
from autotune.policy import WindowRules
from autotune.protocol.messages import NO_EXTRAS
from benchmarks.cases.cpu import nothing_to_do
from benchmarks.yardsticks.product_run import RunTrial, TimedLauncher, open_trials

__all__ = ["measure_ray"]

_WINDOW = WindowRules(max_s=0.5, precision=0.0)  # never ended by its interval: all are equally long
_GIVEN_BACK_S = 2.0  # the launcher keeps its hosts for a second


def measure_ray(count: int) -> dict[str, Any]:
    """Figures of so many triples: on this machine, on Ray, and on Ray with the hosts reserved anew."""
    from autotune.launch.ray_launcher import RayLauncher

    with _cluster() as address:
        begun = time.monotonic()
        ray = RayLauncher.connect(Executor(kind="ray", address=address), device="cpu")
        connect_s = time.monotonic() - begun
        with ExitStack() as held:
            held.callback(ray.close)
            folder = Path(held.enter_context(TemporaryDirectory(prefix="autotune-benchmark-")))
            local = LocalLauncher(folder / "server.log")
            held.callback(local.close)
            launchers: dict[str, Launcher] = {"fork server": local, "ray": ray}
            runs = {
                name: held.enter_context(_trials(launcher, folder / f"{number}-notes"))
                for number, (name, launcher) in enumerate(launchers.items())
            }
            return {
                "connect_s": connect_s,
                "triples": [_triple(runs, number) for number in range(count)],
            }


def _triple(
    runs: dict[str, tuple[RunTrial, TimedLauncher]], number: int
) -> dict[str, dict[str, float]]:
    order = ("fork server", "ray") if number % 2 == 0 else ("ray", "fork server")
    found = {name: _run(*runs[name]) for name in order}
    time.sleep(_GIVEN_BACK_S)
    return {**found, "ray, reserved anew": _run(*runs["ray"])}


def _run(run_trial: RunTrial, launcher: TimedLauncher) -> dict[str, float]:
    result = run_trial({**nothing_to_do(Path()).settings, "intra_op_threads": 1})
    if result.measurement is None:
        raise RuntimeError(f"the trial must end well, but it is {result.outcome}: {result.reason}")
    launch = launcher.launches[-1]
    return {
        "first_step_s": launch.noted["first_step"] - launch.called_s,
        "launch_s": launch.returned_s - launch.called_s,
    }


@contextmanager
def _trials(launcher: Launcher, notes: Path) -> Iterator[tuple[RunTrial, TimedLauncher]]:
    timed = TimedLauncher(launcher, notes)
    with open_trials(
        nothing_to_do(notes), device="cpu", window=_WINDOW, extras=NO_EXTRAS, launcher=timed
    ) as run_trial:
        yield run_trial, timed


@contextmanager
def _cluster() -> Iterator[str]:
    """A cluster of one node on this machine."""
    from ray.cluster_utils import Cluster

    node: Any = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster: Any = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()
