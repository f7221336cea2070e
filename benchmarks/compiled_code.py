"""What the compiled code that a search has kept saves the training that follows: seconds until its first step is done.

A model is compiled and trained for a step in a new process: with nothing to go by; with what a search has kept, where
torch's own folder is empty, as on another day or in another container; and with torch's folder as the step before has
left it. Medians of three rounds. About five minutes; needs a C++ compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from autotune import TrainingConfig
from autotune.settings.applied.compiled_code import code_file
from autotune.worker.setup.compile_cache import keep_compiled
from benchmarks.measures.recording import describe_machine, make_parser, print_table, say, start_recording

__all__ = ["MODELS", "WAYS", "measure_round"]

WAYS = ("anew", "kept", "torch's own")
_ROUNDS = 3
_CONFIG = TrainingConfig(micro_batch_size=16, compile=True)


def _cnn() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(16, 3, 32, 32)


def _transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(16, 64, 128)


MODELS = {"cnn": _cnn, "transformer": _transformer}


def main() -> int:
    parser = make_parser(__doc__ or "", "one model, one round")
    parser.add_argument("--step", choices=MODELS, help="train this one for a step in this process, and tell the time")
    parser.add_argument("--device", default="cpu", help="with --step: where it is trained")
    parser.add_argument("--keep", action="store_true", help="with --step: keep what was compiled")
    arguments = parser.parse_args()
    if arguments.step is not None:
        print(train_a_step(arguments.step, torch.device(arguments.device), keeps=arguments.keep))
        return 0
    recording = start_recording("compiled_code", arguments, describe_machine("cpu"))
    for name in list(MODELS)[: 1 if arguments.quick else None]:
        rounds = []
        for number in range(1 if arguments.quick else _ROUNDS):
            rounds.append(measure_round(name))
            say(f"{name}, round {number + 1}: " + ", ".join(f"{way} {rounds[-1][way]:.1f} s" for way in WAYS))
            recording.add(name, {"rounds": rounds})
    _print(recording.results)
    print(f"\n{recording.path}")
    return 0


def train_a_step(name: str, device: torch.device, *, keeps: bool) -> float:
    """Seconds from the model on until a step of training is done."""
    model, inputs = MODELS[name]()
    inputs = inputs.to(device)  # an accelerator's context is there before the clock runs
    begun = perf_counter()
    prepared = _CONFIG.prepare(model, device)
    loss = prepared(inputs).sum()
    loss.backward()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    took_s = perf_counter() - begun
    if keeps:
        assert keep_compiled(code_file(_CONFIG, prepared, device))
    return took_s


def measure_round(name: str, device: str = "cpu") -> dict[str, float]:
    """Seconds of each way."""
    with TemporaryDirectory(prefix="autotune-benchmark-") as path:
        home, folder = Path(path) / "home", Path(path)
        anew = _step(name, device, "--keep", cache=folder / "first", home=home)
        own = _step(name, device, cache=folder / "first", home=folder / "nothing")
        return {"anew": anew, "kept": _step(name, device, cache=folder / "second", home=home), "torch's own": own}


def _step(name: str, device: str, *arguments: str, cache: Path, home: Path) -> float:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-m", "benchmarks.compiled_code", "--step", name, "--device", device, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _print(results: Mapping[str, Any]) -> None:
    rows = [
        [name, *(f"{median(one[way] for one in found['rounds']):.1f}" for way in WAYS)]
        for name, found in results.items()
    ]
    print_table("Seconds until a compiled model's first step is done.", ["", *WAYS], rows)


if __name__ == "__main__":
    sys.exit(main())
