"""What autotune promises on a GPU, a function each: given what a trial has told, it asserts.

test_gpu.py passes them what trials on a real device have measured, test_gpu_promises.py what
other devices can. Thresholds leave room for a device that others use as well.
"""

from __future__ import annotations

from math import isfinite

import pytest

from autotune.config.environment import Environment
from autotune.config.training_config import AmpDtype
from autotune.records.measurement import PROFILER_SOURCE, WAIT_SOURCE, Measurement, source_rank
from autotune.records.result import Diagnosis
from autotune.records.trial import MIN_STEPS, PrecisionFigures, TrialResult

from .gpu_cases import Seen

_FINEST, _COARSEST = 2e-5, 5e-3
"""Of TF32's rounding in a product of 512 rows: it keeps 10 bits of a fraction, float32 keeps 23. Between float32's
1e-6 and what ten bits give at the most, with room on both sides."""
_BUSY_FROM, _STARVED_BELOW = 0.8, 0.3
_PEAKS_WITHIN = 0.05
"""Kernels that load later, and cuBLAS's workspaces of other sizes, stay in a process."""
_LOSSES_WITHIN = 1e-2
"""bfloat16 keeps 8 bits of a fraction, and sums come in any order."""


def measured(result: TrialResult) -> Measurement:
    """A trial ran well: it trained, and its loss is a number."""
    assert result.outcome == "ok", f"{result.outcome}: {result.reason}"
    assert result.measurement is not None
    assert result.measurement.samples_per_s > 0
    assert isfinite(result.measurement.loss)
    return result.measurement


def computes_in(seen: Seen, amp_dtype: AmpDtype) -> None:
    """The step computed in this precision, not only asked for it."""
    wanted = "float32" if amp_dtype == "tf32" else amp_dtype
    assert seen.dtype == f"torch.{wanted}", f"{amp_dtype} was asked for, {seen.dtype} came"
    if amp_dtype == "float32":
        assert seen.rounding < _FINEST, f"float32 rounds as coarsely as TF32: {seen.rounding:.1g}"
    if amp_dtype == "tf32":
        assert _FINEST < seen.rounding < _COARSEST, (
            f"TF32 does not round as it does: {seen.rounding:.1g}"
        )


def arrived_on(seen: Seen, kind: str) -> None:
    """The step got its batch on the device."""
    assert seen.device == kind


def met_over(seen: Seen, backend: str) -> None:
    """The ranks met over this backend."""
    assert seen.backend == backend


def accounts_for_memory(run: Measurement, limit_bytes: int) -> None:
    """The peak is what torch held and what lies outside, within the limit; tensors took no more than was held."""
    memory = run.memory
    assert memory.reserved_bytes
    assert memory.outside_bytes
    assert memory.allocated_bytes
    assert memory.allocated_bytes <= memory.reserved_bytes
    assert (
        run.peak_memory_bytes == memory.peak_bytes == memory.reserved_bytes + memory.outside_bytes
    )
    assert run.peak_memory_bytes <= limit_bytes
    # there was room
    assert memory.alloc_retries == 0


def peaks_as(run: Measurement, alone: Measurement) -> None:
    """What came before a trial in its process is no part of its peak."""
    assert run.memory.allocated_bytes
    assert alone.memory.allocated_bytes
    assert abs(run.memory.allocated_bytes / alone.memory.allocated_bytes - 1) < _PEAKS_WITHIN
    assert abs(run.peak_memory_bytes / alone.peak_memory_bytes - 1) < _PEAKS_WITHIN


def guarded_as(figures: PrecisionFigures | None, alone: PrecisionFigures | None) -> None:
    """A precision check in a shared process tells what one in a process of its own tells."""
    assert figures is not None
    assert alone is not None
    steps = min(len(figures.losses), len(alone.losses))
    assert steps >= MIN_STEPS
    for name in ("reference_losses", "losses"):
        mine, others = getattr(figures, name)[:steps], getattr(alone, name)[:steps]
        assert mine == pytest.approx(others, rel=_LOSSES_WITHIN), name


def ran_out_of_memory(result: TrialResult) -> None:
    """What does not fit is out of memory, told with the device's words, and neither a crash nor the host's doing."""
    assert result.outcome == "oom", f"{result.outcome}: {result.reason}"
    assert result.reason.startswith("the device ran out of memory: ")
    assert result.measurement is None
    # a failure would count as a fault of the workload
    assert result.failure is None


def fits_or_ran_out_of_memory(result: TrialResult) -> None:
    """Whatever a library says where memory is full, it is not told as a crash."""
    if result.outcome != "ok":
        ran_out_of_memory(result)


def is_told_by_the_device(run: Measurement) -> None:
    """How busy the device was comes from the device itself, by each source as a share."""
    assert run.busy_source is not None
    assert source_rank(run.busy_source) < source_rank(WAIT_SOURCE), (
        f"only {run.busy_source} could tell"
    )
    assert run.busy_fraction is not None
    assert all(0 <= one.fraction <= 1 for one in run.busy_readings)
    assert run.busy_fraction in [
        one.fraction for one in run.busy_readings if one.source == run.busy_source
    ]


def was_busy(run: Measurement) -> None:
    """A loop that the device holds reads as busy."""
    is_told_by_the_device(run)
    assert run.busy_fraction is not None
    assert run.busy_fraction > _BUSY_FROM, f"{run.busy_source} says {run.busy_fraction:.2f}"


def was_starved(run: Measurement) -> None:
    """A loop that waits for its loader reads as idle."""
    is_told_by_the_device(run)
    assert run.busy_fraction is not None
    assert run.busy_fraction < _STARVED_BELOW, f"{run.busy_source} says {run.busy_fraction:.2f}"


def broke_its_time_down(run: Measurement) -> None:
    """The profiler saw kernels and copies."""
    assert run.breakdown is not None, run.notes
    shares = {part: share.fraction for part, share in run.breakdown.shares().items()}
    assert shares["compute"] > 0
    # every batch is copied
    assert shares["device_copy"] > 0
    assert run.breakdown.compute.source.startswith("profiler")
    assert any(one.source == PROFILER_SOURCE and one.fraction > 0 for one in run.busy_readings)


def saw_conditions(run: Measurement) -> None:
    """Clocks, power, temperature and energy of the window are known, in their units."""
    seen = run.conditions
    assert seen is not None
    assert seen.sm_clock_mhz is not None
    assert seen.max_sm_clock_mhz is not None
    assert seen.memory_clock_mhz is not None
    assert 0 < min(seen.sm_clock_mhz) <= max(seen.sm_clock_mhz) <= seen.max_sm_clock_mhz
    assert min(seen.memory_clock_mhz) > 0
    assert seen.temperature_c is not None
    # degrees Celsius
    assert 0 < min(seen.temperature_c) <= max(seen.temperature_c) < 120
    assert seen.power_w is not None
    # watts: an idle GPU draws some 10, none draws 2000
    assert 5 < seen.power_w < 2000
    assert seen.energy_j is not None
    assert seen.energy_j > 0
    assert run.joules_per_sample is not None
    assert run.joules_per_sample > 0


def is_copy_bound(found: Diagnosis) -> None:
    """Copies hold it, and page-locked batches are advised."""
    assert found.verdict == "copy", found.headline
    assert found.findings[0].share > 0.5
    assert {"pin_memory": True} in [one.settings for one in found.advice]


def is_launch_bound(found: Diagnosis) -> None:
    """Small operations hold it."""
    assert found.verdict == "launch", found.headline


def refused_the_device(result: TrialResult, kind: str) -> None:
    """A device that there is not is told with those that there are, and is no crash."""
    assert result.outcome == "invalid", f"{result.outcome}: {result.reason}"
    assert f"name one below {kind}:" in result.reason
    assert result.failure is None


def crashed_at(result: TrialResult, place: str) -> None:
    """A kernel's error is a crash at the user's line that launched it."""
    assert result.outcome == "crashed", f"{result.outcome}: {result.reason}"
    assert result.failure is not None
    # it was not run again with launches that block
    assert not result.failure.is_asynchronous
    assert result.failure.signature.endswith(f" at {place}"), result.failure.signature
    assert "device-side assert" in result.reason


def describes_a_gpu(environment: Environment | None, name: str) -> None:
    """The environment is that of the GPU of this name."""
    assert environment is not None
    assert (environment.device, environment.device_kind, environment.device_name) == (
        "cuda:0",
        "cuda",
        name,
    )
    assert environment.driver
    assert environment.cuda
    assert environment.device_memory_bytes > 2**30


def exchanged(run: Measurement, ranks: int) -> None:
    """A group of so many ranks, each on a device of its own, that talked to one another."""
    assert len(run.ranks) == ranks
    assert len({one.device for one in run.ranks}) == ranks
    assert run.communication is not None, run.notes
    assert run.communication.bytes_exchanged > 0
    assert run.communication.exchange_s > 0
