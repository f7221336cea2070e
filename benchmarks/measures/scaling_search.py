"""The product's own search on made-up GPUs: autotune.search over a FakeLauncher that asks scaling_cluster.py.

Each GPU takes 64 samples an optimizer step, on any number of them (weak scaling), and the global batch of a size is
kept. All ranks stand on one made-up machine with as many devices: the search asks for no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import autotune
from autotune import DdpConfig, SearchResult, TrainingConfig
from autotune.testing import CostModel, FakeLauncher, FakeTrial, fake_environment, fake_facts
from benchmarks.cases.scaling_cluster import JOB, Cluster, memory_bytes, step_s
from benchmarks.cases.scaling_model import Seen, Setting
from benchmarks.yardsticks.product_run import only

__all__ = [
    "NOISE",
    "SAMPLES_PER_GPU",
    "TINY_BUCKET_MIB",
    "TRIALS",
    "Search",
    "baseline_setting",
    "best_step_s",
    "search_all",
    "search_exchange",
]

NOISE = 0.01
"""Relative standard deviation of a trial's rate."""
SAMPLES_PER_GPU = 64
"""Of an optimizer step."""
TINY_BUCKET_MIB = 1.0
"""Nobody would train so, but it tells the latency."""
TRIALS = 40
"""Of a search over everything."""

_MICROS = (8, 16, 32, 64)
_PRECISIONS = ("float32", "bfloat16")
_WORKERS = (2, 4, 8, 16)
_BUCKETS_MIB = (None, 100.0, 400.0)
_HOOKS = (None, "fp16")
_DEVICE_BYTES = 80 * 2**30
_CORES = 128
_ITEMS = 10**8
_MOST_OFF = 6 * NOISE
_ENDLESS_WORKERS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search has found and measured."""

    best: Setting
    seen: tuple[Seen, ...]
    runs: int
    """Jobs that it has started: trials, repeats, guards, stress runs."""


def search_all(ranks: int, cluster: Cluster, seed: int) -> Search:
    """Search what each GPU does by itself, and how gradients are exchanged, on so many GPUs."""
    space = _space(
        ranks,
        amp_dtype=list(_PRECISIONS),
        num_workers=list(_WORKERS),
        micro_batch_size=list(_MICROS),
        ddp=_ddp_space(_BUCKETS_MIB),
    )
    return _search(space, _baseline(ranks), cluster, seed=seed, n_trials=TRIALS)


def search_exchange(best: Setting, ranks: int, cluster: Cluster, seed: int) -> Search:
    """Measure every exchange around a setting, with a small batch and tiny buckets as well, on so many GPUs."""
    buckets, small = (
        (*_BUCKETS_MIB, TINY_BUCKET_MIB),
        next(micro for micro in _MICROS if micro != best.micro),
    )
    space = _space(
        ranks,
        amp_dtype=best.precision,
        num_workers=best.workers,
        micro_batch_size=[small, best.micro],
        ddp=_ddp_space(buckets),
    )
    local = {
        "micro_batch_size": best.micro,
        "grad_accum_steps": best.steps,
        "num_workers": best.workers,
    }
    start = _baseline(ranks).model_copy(update={**local, "amp_dtype": best.precision})
    n_trials = 2 * len(buckets) * len(_HOOKS)
    return _search(space, start, cluster, seed=seed, n_trials=n_trials)


def baseline_setting() -> Setting:
    """What is run "today"."""
    return _setting_of(_baseline(1))


@cache
def best_step_s(ranks: int, cluster: Cluster) -> float:
    """The shortest step that any setting of the whole space has on so many GPUs."""
    settings = (
        Setting(
            micro=micro,
            steps=SAMPLES_PER_GPU // micro,
            precision=precision,
            workers=workers,
            bucket_mib=bucket,
            is_halved=hook is not None,
        )
        for micro, precision, workers, bucket, hook in product(
            _MICROS, _PRECISIONS, _WORKERS, _BUCKETS_MIB, _HOOKS
        )
    )
    return min(step_s(setting, ranks, cluster) for setting in settings)


def _search(
    space: Mapping[str, Any],
    baseline: TrainingConfig,
    cluster: Cluster,
    *,
    seed: int,
    n_trials: int,
) -> Search:
    devices = baseline.world_size
    facts = fake_facts(dataset_length=_ITEMS)
    launcher = FakeLauncher(
        cost=_cost_on(cluster),
        noise=NOISE,
        seed=seed,
        environment=fake_environment(
            device_memory_bytes=_DEVICE_BYTES, cores=_CORES, device_count=devices
        ),
        facts=facts.model_copy(update={"gradient_bytes": int(JOB.gradient_bytes)}),
    )
    with TemporaryDirectory(prefix="autotune-benchmark-") as folder:
        result = autotune.search(
            _nothing,
            _nothing,
            launcher=launcher,
            baseline=baseline,
            space=space,
            objective={"global_batch": "keep"},
            n_trials=n_trials,
            run_dir=Path(folder) / "run",
            seed=seed,
            progress=False,
            method="tpe",
        )
    seen = tuple(_seen_in(result, cluster))
    return Search(best=_setting_of(result.best), seen=seen, runs=len(launcher.jobs))


def _seen_in(result: SearchResult, cluster: Cluster) -> list[Seen]:
    """The steps that trials have measured.

    Raises:
        RuntimeError: a trial's rate is not that of its group.
    """
    found = []
    for record in result.trials:
        if record.measurement is None:
            continue
        setting, samples = _setting_of(record.config), record.config.global_batch_size
        seen_s = samples / record.measurement.samples_per_s
        off = step_s(setting, record.config.world_size, cluster) / seen_s
        if abs(off - 1) > _MOST_OFF:
            raise RuntimeError(
                "FakeLauncher must report the rate of the group that the cost model names, but its trial says "
                f"{off:.2f} times as much; see how it answers for several ranks"
            )
        found.append(Seen(setting=setting, step_s=seen_s))
    return found


def _cost_on(cluster: Cluster) -> CostModel:
    """What a configuration comes to on a cluster."""

    def cost(config: TrainingConfig) -> FakeTrial:
        setting, ranks, samples = _setting_of(config), config.world_size, config.global_batch_size
        own_s = step_s(setting, ranks, cluster)
        unfed_s = step_s(replace(setting, workers=_ENDLESS_WORKERS), ranks, cluster)
        return FakeTrial(
            samples_per_s=samples / own_s,
            peak_memory_bytes=memory_bytes(setting),
            busy_fraction=unfed_s / own_s,
            loader_ceiling=ranks * setting.workers / JOB.item_s,
            device_ceiling=samples / unfed_s,
        )

    return cost


def _setting_of(config: TrainingConfig) -> Setting:
    ddp = config.ddp or DdpConfig()
    return Setting(
        micro=config.micro_batch_size,
        steps=config.grad_accum_steps,
        precision=config.amp_dtype,
        workers=max(1, config.num_workers),  # a guard's job may have none
        bucket_mib=ddp.bucket_cap_mb,
        is_halved=ddp.comm_hook is not None,
    )


def _baseline(ranks: int) -> TrainingConfig:
    return TrainingConfig(
        micro_batch_size=16,
        grad_accum_steps=SAMPLES_PER_GPU // 16,
        amp_dtype="bfloat16",
        num_workers=4,
        world_size=ranks,
        strategy="ddp",
    )


def _space(ranks: int, **searched: Any) -> dict[str, Any]:
    """A space in which all that is not named stays as in the baseline, and so does the global batch."""
    fixed = _baseline(ranks).model_dump(exclude={"lr", "world_size", "strategy", "ddp"})
    accumulations = sorted(SAMPLES_PER_GPU // micro for micro in _MICROS)
    return only(fixed, world_size=ranks, strategy="ddp", grad_accum_steps=accumulations, **searched)


def _ddp_space(buckets_mib: Sequence[float | None]) -> dict[str, Any]:
    return {
        **DdpConfig().model_dump(),
        "bucket_cap_mb": list(buckets_mib),
        "comm_hook": list(_HOOKS),
    }


def _nothing() -> None:
    """Stands for a model and a dataset, which a fake launcher never builds."""
