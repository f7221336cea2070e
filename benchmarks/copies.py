"""Is pinned memory tried where it wins, and left alone where it can't? A simulation; nothing is measured.

Runs the product's own search over a FakeLauncher whose device copies its batches: a step takes the device's time and
what it does not hide of the copy: from pageable memory all of it adds to the step, from pinned memory what a cell says.
Cells are a grid: the share of a step that pageable copies take of the baseline, by how much pinned copies are faster,
and how much of them is hidden. Of each: whether pinned memory was tried, after how many trials, and
recommended; and what is lost to the best settings of the space.

Reads no clock: the same numbers come on every machine. Some minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import autotune
from autotune import TrainingConfig
from autotune.testing import FakeLauncher, FakeTrial, fake_environment
from benchmarks.measures.recording import describe_machine, make_parser, say, start_recording

_SHARES = (0.0, 0.002, 0.01, 0.05, 1 / 3)
_PINNED_FACTORS = (1.0, 3.0)
_HIDDEN = (0.0, 0.9)
_SEEDS = 3
_NOISE = 0.01
_DEVICE_S, _BATCH_S, _ITEM_S = (
    1e-3,
    2e-3,
    1e-3,
)  # of a sample in float32, of any batch, of an item in a worker
_SPACE: dict[str, Any] = {
    "micro_batch_size": [16, 32, 64],
    "num_workers": [2, 4, 8],
    "amp_dtype": ["float32", "bfloat16"],
    "pin_memory": [False, True],
    "grad_accum_steps": 1,
    "prefetch_factor": 2,
    "persistent_workers": True,
    "channels_last": False,
}
_BASELINE = TrainingConfig(
    micro_batch_size=32, num_workers=2, prefetch_factor=2, persistent_workers=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A machine."""

    copy_share: float
    """Of the baseline's step, from pageable memory."""
    pinned_factor: float
    """Rate of copies from pinned memory over those from pageable memory."""
    hidden: float
    """Share of a pinned copy that computing hides."""


def _cost_of(cell: _Cell) -> Callable[[TrainingConfig], FakeTrial]:
    copy_s = cell.copy_share / (1 - cell.copy_share) * _device_s(_BASELINE)

    def cost(config: TrainingConfig) -> FakeTrial:
        own_s = copy_s / cell.pinned_factor if config.pin_memory else copy_s
        exposed_s = own_s * (1 - cell.hidden) if config.pin_memory else own_s
        loader, training = config.num_workers / _ITEM_S, 1 / (_device_s(config) + exposed_s)
        rate = min(loader, training)
        return FakeTrial(
            samples_per_s=rate,
            peak_memory_bytes=2**30,
            busy_fraction=rate / training,
            loader_ceiling=loader,
            device_ceiling=1 / _device_s(config),
            copy_ceiling=1 / own_s if own_s else None,
        )

    return cost


def _device_s(config: TrainingConfig) -> float:
    """Seconds of a sample."""
    speed = 2.0 if config.amp_dtype == "bfloat16" else 1.0
    return _DEVICE_S / speed + _BATCH_S / config.micro_batch_size


def main() -> None:
    parser = make_parser(__doc__ or "", "one seed")
    arguments = parser.parse_args()
    recording = start_recording("copies", arguments, describe_machine("cpu"))
    cells = [
        _Cell(copy_share=share, pinned_factor=factor, hidden=hidden)
        for share, factor, hidden in product(_SHARES, _PINNED_FACTORS, _HIDDEN)
        if share
        or (factor, hidden)
        == (_PINNED_FACTORS[0], _HIDDEN[0])  # without a copy there is one machine
    ]
    found: list[dict[str, Any]] = []
    for cell in cells:
        seeds = [_search(cell, seed) for seed in range(1 if arguments.quick else _SEEDS)]
        found.append({**asdict(cell), "could_win": _could_win(cell), "seeds": seeds})
        say(f"{_describe(found[-1])}")
        recording.add("cells", found)
    print(f"\n{recording.path}")


def _search(cell: _Cell, seed: int) -> dict[str, Any]:
    """One search: what it tried of pinned memory, what it recommends, and what that loses."""
    cost = _cost_of(cell)
    launcher = FakeLauncher(cost, noise=_NOISE, seed=seed, environment=fake_environment(cores=8))
    with TemporaryDirectory() as folder:
        result = autotune.search(
            object,
            list,
            baseline=_BASELINE,
            space=_SPACE,
            seed=seed,
            launcher=launcher,
            run_dir=Path(folder) / "run",
            progress=False,
        )
        trials = [record.config for record in result.trials]
    best = cost(result.best or _BASELINE).samples_per_s
    return {
        "trials": len(trials),
        "first_pinned": next(
            (place for place, config in enumerate(trials) if config.pin_memory), None
        ),
        "pinned": sum(config.pin_memory for config in trials),
        "recommends_pinned": bool(result.best and result.best.pin_memory),
        "lost": 1 - best / _best_rate(cell),
    }


def _best_rate(cell: _Cell, *, pin: tuple[bool, ...] = (False, True)) -> float:
    """Of the whole space, or of the part with such memory."""
    choices = product(_SPACE["micro_batch_size"], _SPACE["num_workers"], _SPACE["amp_dtype"], pin)
    names = ("micro_batch_size", "num_workers", "amp_dtype", "pin_memory")
    configs = (
        _BASELINE.model_copy(update=dict(zip(names, values, strict=True))) for values in choices
    )
    return max(_cost_of(cell)(config).samples_per_s for config in configs)


def _could_win(cell: _Cell) -> float:
    """What pinned memory wins at the best other settings, as a share."""
    return _best_rate(cell, pin=(True,)) / _best_rate(cell, pin=(False,)) - 1


def _describe(found: dict[str, Any]) -> str:
    seeds = found["seeds"]
    tried = sum(one["first_pinned"] is not None for one in seeds)
    chosen = sum(one["recommends_pinned"] for one in seeds)
    return (
        f"copies {found['copy_share']:6.1%}, pinned {found['pinned_factor']:.1f} times as fast, "
        f"{found['hidden']:3.0%} hidden: could win {found['could_win']:6.1%}; tried {tried} of {len(seeds)}, "
        f"recommended {chosen}, lost at most {max(one['lost'] for one in seeds):.1%}"
    )


if __name__ == "__main__":
    main()
