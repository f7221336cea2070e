"""benchmarks/endurance.py, a real search from outside: killed, and gone on with by the same command."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from benchmarks.measures.endurance.live_search import (
    fault_of_folder,
    fault_of_result,
    left_of,
    segments_now,
    send,
    start_search,
)
from benchmarks.measures.endurance.short_windows import SHORT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")


@pytest.mark.timeout(300)  # two searches of a command line, each with a server of its own
def test_a_search_that_was_killed_goes_on_by_the_same_command(tmp_path: Path) -> None:
    segments = segments_now()
    search = start_search(tmp_path, script=SHORT)
    assert search.wait_for(lambda: search.is_at("trials")), search.said
    assert len(send(search.processes("parent"), signal.SIGKILL)) == 1
    assert search.end() == -signal.SIGKILL
    assert left_of(tmp_path, segments) is None
    search = start_search(tmp_path, script=SHORT)
    assert search.end() == 0, search.said
    assert [left_of(tmp_path, segments), fault_of_folder(search), fault_of_result(search)] == [
        None
    ] * 3
