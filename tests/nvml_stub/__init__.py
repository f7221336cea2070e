"""NVIDIA's libnvidia-ml.so.1, played by a scenario: the real pynvml runs over it, without a GPU.

In this process: the fixture `nvml` loads it into pynvml for one test.

    nvml.play(sm_clock=1980, power_mw=(500_000, 690_000))   # a tuple: the first answer, the next, ...
    nvml.refuse("nvmlDeviceGetClockInfo", NOT_SUPPORTED)

In a child process: start it with `nvml.environment`, whose LD_LIBRARY_PATH has pynvml, and torch, find the library:

    LocalLauncher(log, environment={**os.environ, **nvml.environment})

The scenario is read anew at each call, by whatever process asks: `play` changes what all are told from then on.
Unmentioned figures are refused as not supported. "d" below is a device's number, such as "1.sm_clock", or "mig";
without it a figure is that of all GPUs (not of the MIG device, which has its own alone).

    devices, d.uuid, d.name          GPUs that there are: 1 as the fixture begins, "GPU-0"
    mig.uuid, mig.instance, mig.parent   a MIG device; samples of utilization are then refused
    mig_mode                         1 where MIG has split the GPU, 0 where it could
    driver, cuda                     its version, and the CUDA's that it is for, such as 12020
    memory_used, memory_reserved     bytes
    sm_clock, memory_clock, max_sm_clock   MHz
    temperature, power_mw, energy_mj, persistence
    reasons                          bits of nvmlClocksEventReasons
    field.N                          a field's counter, such as field.74 (ns held down by the power cap)
    samples                          of utilization, as "microseconds:percent" each; or by the clock:
    samples_every_us, busy           such as 200000 (5 Hz) and 70 (per cent)
    gpm, gpm.N                       1 where the GPU has GPM; metric N in per cent, such as gpm.1 (GRAPHICS_UTIL)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from ctypes import CDLL
from pathlib import Path

import pynvml
import pytest

__all__ = ["NOT_FOUND", "NOT_SUPPORTED", "NO_PERMISSION", "NvmlStub", "build_libraries"]

NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
_NAME = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("nvml_stub.c")


class NvmlStub:
    """One test's scenario, and the library that plays it."""

    def __init__(self, folder: Path, scenario: Path) -> None:
        self.folder, self.scenario = folder, scenario
        self.answers: dict[str, str] = {}
        self.play(devices=1, **{"0.uuid": "GPU-0"})

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs beside its own environment."""
        places = [str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(places),
            "NVML_STUB_SCENARIO": str(self.scenario),
        }

    def play(self, **answers: object) -> None:
        """What is answered from now on, beside what was said before; None: refused as not supported."""
        for key, value in answers.items():
            words = value if isinstance(value, tuple | list) else (value,)
            self.answers[key] = " ".join(map(str, words))
            if value is None:
                del self.answers[key]
        beside = self.scenario.with_suffix(".new")
        beside.write_text(
            "".join(f"{key} {words}\n" for key, words in self.answers.items()), encoding="ascii"
        )
        beside.replace(self.scenario)  # at once: a process may be reading

    def refuse(self, function: str, error: int) -> None:
        """Have a function answer with one of NVML's errors."""
        self.play(**{f"refuse.{function}": error})

    def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the library under this process's pynvml, as if it had just been found; nothing was asked of it yet.

        By its path: whoever loads the library by name later does not get it.
        """
        library = CDLL(str(self.folder / _NAME))
        library.nvmlStubReset()
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setenv("NVML_STUB_SCENARIO", str(self.scenario))

    def calls(self, function: str) -> int:
        """How often this process has called a function since `load`."""
        return int(pynvml.nvmlLib.nvmlStubCalls(function.encode()))

    @property
    def live_samples(self) -> int:
        """Samples of GPM that this process has not freed."""
        return int(pynvml.nvmlLib.nvmlStubLiveSamples())

    @property
    def references(self) -> int:
        """How often this process has initialised the library, less how often it has shut it down."""
        return int(pynvml.nvmlLib.nvmlStubReferences())


def build_libraries(folder: Path) -> dict[str, Path]:
    """Folders with the library of a driver of "today", and of an "old" one (before 510: no GPM, no newer names)."""
    compiler = shutil.which("gcc")
    if compiler is None or os.name != "posix":
        pytest.skip("NVML's stub needs gcc")
    found = {}
    for age, options in (("today", []), ("old", ["-DOLD_DRIVER"])):
        (folder / age).mkdir()
        flags = ["-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", *options]
        subprocess.run(
            [compiler, *flags, str(_SOURCE), "-o", str(folder / age / _NAME)], check=True
        )
        found[age] = folder / age
    return found
