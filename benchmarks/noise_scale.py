"""Does the gradient noise scale say how many samples a larger batch needs? On digits, against runs that really branch.

An MLP is trained for some epochs at a batch of 32; from there on runs branch, each at a batch of its own, to the same
training loss, with the learning rate that gets there soonest. Recorded: the noise scale at the checkpoint as the
product measures it, and at the loss that was reached; for each batch the samples that it needed over those of 32, by
several seeds, and what the noise scale predicted: (scale + batch) / (scale + 32).

Samples, no seconds: the same numbers come on every machine but for rounding. Some ten minutes; needs scikit-learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from autotune.analysis.noise_scale import noise_scale_of
from autotune.protocol.jobs import NoiseScaleJob, ProcessSetup
from autotune.records.noise_scale import NoiseScale
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Workload
from autotune.space.efficiency import efficiency
from autotune.worker.jobs.noise_scale import measure_gradients
from autotune.worker.setup.device import open_device
from benchmarks.measures.recording import describe_machine, make_parser, print_table, say, start_recording

_OWN = 32
_BATCHES = (64, 128, 256, 512, 1024)
_RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
_EPOCHS_BEFORE = 3
_TARGET = 0.5
"""Share of the checkpoint's loss at which a run has arrived."""
_MOST_SAMPLES = 200_000
_SEEDS = 5


@dataclass(frozen=True, slots=True)
class _Digits:
    """All digits, as tensors."""

    inputs: Tensor
    labels: Tensor

    def loss(self, model: nn.Module) -> float:
        """Of all digits."""
        with torch.no_grad():
            return float(functional.cross_entropy(model(self.inputs), self.labels))

    def batches(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches without end."""
        draw = torch.Generator().manual_seed(seed)
        while True:
            index = torch.randint(len(self.labels), (size,), generator=draw)
            yield self.inputs[index], self.labels[index]


def main() -> None:
    parser = make_parser(__doc__ or "", "two batches, one seed")
    arguments = parser.parse_args()
    recording = start_recording("noise_scale", arguments, describe_machine("cpu"))
    torch.set_num_threads(1)  # more would cost the tiny model more than they bring
    seeds, batches = (1, _BATCHES[:2]) if arguments.quick else (_SEEDS, _BATCHES)
    digits = _load()
    start = _trained(digits)
    target = _TARGET * digits.loss(start)
    at_start = _noise_scale(digits, start)
    recording.add("checkpoint", {"loss": digits.loss(start), "target": target, "noise_scale": at_start.model_dump()})
    own = {seed: _fewest_samples(digits, start, target, _OWN, seed) for seed in range(seeds)}
    arrived = _run(digits, start, target, _OWN, median(rate for _, rate in own.values()), 0)[1]
    at_end = _noise_scale(digits, arrived)
    recording.add("at_target", {"noise_scale": at_end.model_dump()})
    found: list[dict[str, Any]] = []
    for batch in batches:
        best = [_fewest_samples(digits, start, target, batch, seed) for seed in range(seeds)]
        needed = [samples / own[seed][0] for seed, (samples, _) in enumerate(best)]
        predicted = [1 / efficiency(noise.value, _OWN, batch) for noise in (at_start, at_end)]
        found.append({"batch": batch, "needed": needed, "rates": [rate for _, rate in best], "predicted": predicted})
        say(f"{batch}: {median(needed):.2f} times the samples of {_OWN}, predicted {predicted[0]:.2f}")
        recording.add("branches", found)
    _print(found)
    print(f"\n{recording.path}")


def _load() -> _Digits:
    from sklearn.datasets import load_digits

    data = load_digits()
    return _Digits(torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _trained(digits: _Digits) -> nn.Module:
    model = _model()
    steps = _EPOCHS_BEFORE * len(digits.labels) // _OWN
    _train(model, digits.batches(_OWN, seed=1000), 0.1, steps)
    return model


def _train(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], lr: float, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        inputs, labels = next(batches)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call] # torch
        optimizer.step()


def _fewest_samples(digits: _Digits, start: nn.Module, target: float, batch: int, seed: int) -> tuple[float, float]:
    """Samples to the target at the best learning rate, and that rate."""
    return min((_run(digits, start, target, batch, rate, seed)[0], rate) for rate in _RATES)


def _run(digits: _Digits, start: nn.Module, target: float, batch: int, lr: float, seed: int) -> tuple[float, nn.Module]:
    """Samples from the checkpoint to the target; infinite where it never arrives."""
    model, batches, seen, before = deepcopy(start), digits.batches(batch, seed), 0, digits.loss(start)
    while seen < _MOST_SAMPLES:
        _train(model, batches, lr, 1)
        seen += batch
        loss = digits.loss(model)
        if loss <= target:  # between two steps, on a line
            return seen - batch * (target - loss) / (before - loss), model
        if not loss < 1e3:
            break
        before = loss
    return inf, model


def _noise_scale(digits: _Digits, model: nn.Module) -> NoiseScale:
    """As the product measures it at a checkpoint."""
    workload = Workload(
        model=_model, dataset=TensorDataset(digits.inputs, digits.labels), checkpoint=deepcopy(model.state_dict())
    )
    with TemporaryDirectory() as folder:
        process = ProcessSetup(
            device="cpu", seed=0, deadline_s=60.0, sys_path=(), working_directory=Path(folder), python_path=None
        )
        job = NoiseScaleJob(
            process=process, payload=Path(folder), config=TrainingConfig(micro_batch_size=_OWN), seconds=10.0
        )
        norms = measure_gradients(workload, job, open_device("cpu"), Path(folder), perf_counter() + 60.0)
    found = noise_scale_of(norms)
    assert found is not None, "sixteen groups are enough"
    return found


def _print(found: list[dict[str, Any]]) -> None:
    rows = [
        [
            str(one["batch"]),
            f"{median(one['needed']):.2f}",
            f"{min(one['needed']):.2f} to {max(one['needed']):.2f}",
            *(f"{predicted:.2f}" for predicted in one["predicted"]),
        ]
        for one in found
    ]
    head = ["batch", "samples needed", "its seeds", "predicted", "by the scale at the target"]
    print_table(f"Samples to the same loss, over those of a batch of {_OWN}.", head, rows)


if __name__ == "__main__":
    main()
