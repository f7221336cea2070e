"""The list of licences is what its script writes, for the packages that a user gets."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_lists_what_an_installation_brings_each_with_a_licence() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "licences.py"))
    page = (ROOT / "docs" / "licences.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+) \|$", page, flags=re.MULTILINE))
    of_gpus = re.compile(r"nvidia-(?!ml-py)|cuda-|triton")  # which this page leaves to their maker
    named = {name for name in script["packages"]() if not of_gpus.match(name)}
    assert named - rows.keys() == set()
    assert {name for name, licence in rows.items() if licence == "see its package"} == set()
    assert script["page"]().startswith(page.partition("| Package")[0])
