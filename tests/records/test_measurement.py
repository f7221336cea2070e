"""The share of a loop's time in which the device waits for its host."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.records.measurement import GPM_SOURCE, WAIT_SOURCE
from tests.factories import make_breakdown, make_measurement, make_window


@pytest.mark.parametrize(
    ("ahead_s", "changes", "fraction"),
    [
        (None, {"breakdown": make_breakdown(idle=0.4)}, None),
        (0.05, {"breakdown": make_breakdown(idle=0.4)}, 0.0),
        (0.02, {"breakdown": make_breakdown(idle=0.4)}, 0.4),
        (0.02, {"device_ceiling": 200.0}, 0.4),
        (0.02, {"device_ceiling": 90.0}, 0.0),
        (0.02, {"device_ceiling": None}, None),
        (0.02, {"device_ceiling": None, "busy_fraction": 0.7, "busy_source": WAIT_SOURCE}, None),
        (0.02, {"device_ceiling": 110.0, "busy_fraction": 0.6, "busy_source": GPM_SOURCE}, 0.3),
        (0.02, {"device_ceiling": 200.0, "data_wait_fraction": None}, None),
    ],
)
def test_the_host_has_what_waits_and_the_devices_work_leave_unless_the_device_is_always_behind(
    ahead_s: float | None, changes: dict[str, Any], fraction: float | None
) -> None:
    # 100 samples/s in batches of 0.1 s, of which the loop waits for data a tenth
    window = make_window(100.0, host_ahead_s=ahead_s)
    usual = {
        "data_wait_fraction": 0.1,
        "breakdown": None,
        "busy_fraction": None,
        "busy_source": None,
    }
    measured = make_measurement(100.0, window=window, **usual | changes)
    assert measured.host_fraction == (None if fraction is None else pytest.approx(fraction))
