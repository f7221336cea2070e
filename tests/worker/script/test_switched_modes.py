"""A script's modes are switched in its own loop, with or without a loader."""

from __future__ import annotations

import pytest

from autotune.protocol.messages import Extras
from tests.worker.script.scripts import HEAD, LOADER, ScriptRig, cleaned

WITHOUT_LOADER = """
while True:
    with torch.autograd.detect_anomaly(check_nan=False):
        step(data.tensors[0][:16], data.tensors[1][:16])
"""
WITH_LOADER = """
torch.autograd.set_detect_anomaly(True)
for epoch in range(100000):
    for x, y in loader:
        step(x, y)
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [WITHOUT_LOADER, LOADER + WITH_LOADER])
def test_script_runs_with_and_without_its_mode(rig: ScriptRig, text: str) -> None:
    words = rig.write(HEAD + text)
    probed = rig.probe(words)
    run = rig.measured(words, probed, extras=Extras(what_if=True, stretch_s=0.2))
    line = 1 + cleaned(HEAD + text).split("anomaly")[0].count("\n")
    assert [note.text for note in run.notes] == []
    assert run.modes is not None
    assert run.modes.places == {"anomaly": f"train.py:{line}"}
    (switch,) = run.switches
    assert switch.name == "anomaly"
    assert switch.ratio.value > 1
