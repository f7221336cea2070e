"""For tests without a device: a launcher that makes up its trials from a cost model, and the model that ships with it.

Comes in: what `launch` hands any launcher. Goes out: reports as a real trial writes them, at no cost.
"""

from __future__ import annotations

from autotune.testing.fake_launcher import (
    CostModel,
    FakeLauncher,
    FakeTrial,
    analytic_cost,
    fake_environment,
    fake_facts,
)

__all__ = ["CostModel", "FakeLauncher", "FakeTrial", "analytic_cost", "fake_environment", "fake_facts"]
