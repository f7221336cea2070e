"""Fixtures of the tests that apply settings in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_OF_A_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def _without_a_group_afterwards() -> Iterator[None]:
    """Remove what a group of one leaves in the environment: other tests' processes would join one."""
    before = {name: os.environ.get(name) for name in _OF_A_GROUP}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
