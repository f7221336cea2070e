"""For tests without a device: a launcher that makes up its trials from a cost model, and the model that ships with it.

Comes in: what `launch` receives from any runner. Goes out: reports as a real trial writes them, at no cost.
"""

from __future__ import annotations

from autotune.testing.cost_model import CostModel, FakeTrial, analytic_cost
from autotune.testing.fake_figures import fake_environment, fake_facts
from autotune.testing.fake_launcher import FakeLauncher

__all__ = ["CostModel", "FakeLauncher", "FakeTrial", "analytic_cost", "fake_environment", "fake_facts"]
