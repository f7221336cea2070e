"""The diff of a script sets exactly what is wanted, changes nothing else, and says what it leaves."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.utils.data import DataLoader

from autotune.config.training_config import LOADER_ARGUMENTS, TORCH_PREFETCH_FACTOR, TrainingConfig
from autotune.files.script_patch import _DEFAULTS, _PARAMETERS, _SETTINGS, ScriptPatch, patch_script

Tool = Literal["patch", "git"]

IMPORT = "from torch.utils.data import DataLoader\n"
ALL = ("micro_batch_size", *LOADER_ARGUMENTS)
FAST = TrainingConfig(
    micro_batch_size=64,
    num_workers=4,
    prefetch_factor=8,
    persistent_workers=True,
    pin_memory=True,
    in_order=False,
)
PLAIN = TrainingConfig(micro_batch_size=64)
WORKERS = TrainingConfig(num_workers=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def apply(patch: ScriptPatch, tool: Tool = "patch") -> None:
    """The diff applied to the current folder as a user does it."""
    command = (
        ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch"]
        if tool == "patch"
        else ["git", "apply", "-"]
    )
    if patch.diff:
        subprocess.run(command, input=patch.content, check=True, capture_output=True, timeout=60)


def patched(
    script: str | bytes,
    config: TrainingConfig,
    wanted: Collection[str] = ALL,
    *,
    at: str = "DataLoader(",
    name: str = "train.py",
    tool: Tool = "patch",
) -> tuple[str, ScriptPatch]:
    """The script after its diff, and the diff; the call is that of the last line which has the text `at`."""
    raw = script if isinstance(script, bytes) else script.encode()
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    (*_, line) = (
        number for number, row in enumerate(raw.split(b"\n"), start=1) if at.encode() in row
    )
    patch = patch_script(path, line, config, wanted)
    assert path.read_bytes() == raw, "the script is never written"
    assert {*patch.settings, *patch.left} >= {*wanted}
    assert not {*patch.settings} & {*patch.left}
    apply(patch, tool)
    return path.read_bytes().decode("latin-1" if b"latin-1" in raw else "utf-8"), patch


def call_after(
    call: str, config: TrainingConfig, wanted: Collection[str] = ALL, *, before: str = IMPORT
) -> str:
    """A call of one expression, after its diff."""
    text, patch = patched(f"{before}loader = {call}\n", config, wanted, at="loader = ")
    assert not patch.left
    assert text.startswith(f"{before}loader = ")
    return text.removeprefix(f"{before}loader = ").removesuffix("\n")


def left(
    call: str, config: TrainingConfig, wanted: Collection[str] = ALL, *, before: str = IMPORT
) -> dict[str, str]:
    """What a call can't be given."""
    return dict(patched(f"{before}loader = {call}\n", config, wanted)[1].left)


@pytest.mark.parametrize(
    ("call", "config", "expected"),
    [
        ("DataLoader(ds, num_workers=0)", WORKERS, "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds, num_workers=0,)", WORKERS, "DataLoader(ds, num_workers=4,)"),
        ("DataLoader(ds)", WORKERS, "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds,)", WORKERS, "DataLoader(ds, num_workers=4,)"),
        ("DataLoader(ds , )", WORKERS, "DataLoader(ds , num_workers=4, )"),
        ("DataLoader( (ds) )", WORKERS, "DataLoader( (ds), num_workers=4 )"),
        ("DataLoader(f(ds), num_workers=(0))", WORKERS, "DataLoader(f(ds), num_workers=(4))"),
        (
            "DataLoader(ds, num_workers = 0, shuffle=True)",
            WORKERS,
            "DataLoader(ds, num_workers = 4, shuffle=True)",
        ),
        ("DataLoader(ds, num_workers=-1)", WORKERS, "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds, num_workers=0x2)", WORKERS, "DataLoader(ds, num_workers=4)"),
    ],
)
def test_a_literal_is_replaced_and_a_missing_argument_added(
    call: str, config: TrainingConfig, expected: str
) -> None:
    assert call_after(call, config, ["num_workers"]) == expected


def test_order_and_defaults_of_the_arguments_are_torchs() -> None:
    parameters = [*inspect.signature(DataLoader).parameters.values()]
    assert (
        tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)
        == _PARAMETERS
    )
    assert {one.name: one.default for one in parameters if one.name in _DEFAULTS} == _DEFAULTS
    assert {"batch_size", *LOADER_ARGUMENTS} == _SETTINGS


def test_settings_are_added_in_their_own_order() -> None:
    expected = (
        "DataLoader(ds, batch_size=64, num_workers=4, prefetch_factor=8, persistent_workers=True, pin_memory=True, "
        "in_order=False)"
    )
    assert (
        call_after("DataLoader(ds)", FAST)
        == call_after("DataLoader(ds)", FAST, [*reversed(ALL)])
        == expected
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("DataLoader(ds, 32, True)", "DataLoader(ds, 64, True, num_workers=4)"),
        ("DataLoader(ds, 32, True, None, None, 0)", "DataLoader(ds, 64, True, None, None, 4)"),
        (
            "DataLoader(ds, 32, True, None, None, 0, num_batches)",
            "DataLoader(ds, 64, True, None, None, 4, num_batches)",
        ),
    ],
)
def test_a_positional_literal_is_replaced_in_place(call: str, expected: str) -> None:
    assert call_after(call, FAST, ["micro_batch_size", "num_workers"]) == expected


def test_what_is_equal_already_or_torchs_default_stays() -> None:
    assert call_after("DataLoader(ds, 64)", PLAIN) == "DataLoader(ds, 64)"
    assert (
        call_after("DataLoader(ds, 64, in_order=True)", PLAIN)
        == "DataLoader(ds, 64, in_order=True)"
    )
    two = TrainingConfig(num_workers=4, prefetch_factor=2)
    for call in (
        "DataLoader(ds, num_workers=4)",
        "DataLoader(ds, num_workers=4, prefetch_factor=2)",
    ):
        for config in (two, WORKERS):
            assert call_after(call, config, ["num_workers", "prefetch_factor"]) == call
    patch = patched(f"{IMPORT}DataLoader(ds, 64)\n", PLAIN)[1]
    assert (patch.diff, patch.content, patch.settings) == ("", b"", ALL)


def test_what_is_not_wanted_stays() -> None:
    call = "DataLoader(ds, batch_size=1, num_workers=2, prefetch_factor=3)"
    assert call_after(call, FAST, ["num_workers"]) == call.replace("num_workers=2", "num_workers=4")
    assert call_after(call, FAST, []) == call


def test_without_workers_goes_what_torch_would_refuse() -> None:
    call = "DataLoader(ds, num_workers=4, prefetch_factor=8, persistent_workers=True)"
    expected = "DataLoader(ds, num_workers=0, prefetch_factor=None, persistent_workers=False)"
    assert call_after(call, PLAIN, ["num_workers"]) == expected
    patch = patched(f"{IMPORT}{call}\n", PLAIN, ["num_workers"])[1]
    assert patch.settings == ("num_workers", "prefetch_factor", "persistent_workers")


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ("prefetch_factor=args.prefetch", "beside_prefetch_factor"),
        ("persistent_workers=args.keep", "beside_persistent_workers"),
        ("timeout=30", "beside_timeout"),
        ("multiprocessing_context='spawn'", "beside_multiprocessing_context"),
        ("**more", "starred"),
    ],
)
def test_workers_stay_where_another_argument_needs_them(beside: str, reason: str) -> None:
    call = f"DataLoader(ds, num_workers=4, {beside})"
    assert left(call, PLAIN, ["num_workers"]) == {"num_workers": reason}
    assert left(call, FAST, ["num_workers"]) == {}


@pytest.mark.parametrize("neutral", ["timeout=0", "multiprocessing_context=None", "timeout=0.0"])
def test_workers_go_beside_arguments_that_are_neutral(neutral: str) -> None:
    assert call_after(
        f"DataLoader(ds, num_workers=4, {neutral})", PLAIN, ["num_workers"]
    ).startswith("DataLoader(ds, num_workers=0")


def test_what_needs_workers_is_left_where_they_are_not_known() -> None:
    told = {"prefetch_factor": "needs_num_workers", "persistent_workers": "needs_num_workers"}
    wanted = ["num_workers", "prefetch_factor", "persistent_workers"]
    assert left("DataLoader(ds, num_workers=args.n)", FAST, wanted) == {
        "num_workers": "not_literal",
        **told,
    }
    assert left("DataLoader(ds, num_workers=0)", FAST, wanted[1:]) == told
    assert left("DataLoader(ds)", FAST, wanted[1:]) == told
    two = TrainingConfig(num_workers=4, prefetch_factor=2)
    assert left("DataLoader(ds)", two, wanted[1:]) == {"prefetch_factor": "needs_num_workers"}


def test_workers_that_are_not_wanted_are_taken_to_be_given_by_other_means() -> None:
    """Such as by a placeholder on the command line."""
    assert call_after("DataLoader(ds, num_workers=args.n)", FAST, ["prefetch_factor"]) == (
        "DataLoader(ds, num_workers=args.n, prefetch_factor=8)"
    )


@pytest.mark.parametrize(
    "value", ["n", "args.n", "int('3')", "2 * 2", "4 if fast else 0", "(n := 3)", "os.cpu_count()"]
)
def test_what_is_no_literal_is_left(value: str) -> None:
    before = f"{IMPORT}n = int('3')\n"
    assert left(
        f"DataLoader(ds, num_workers={value})", WORKERS, ["num_workers"], before=before
    ) == {"num_workers": "not_literal"}
    text, _ = patched(f"{before}DataLoader(ds, num_workers={value}, batch_size=1)\n", FAST)
    assert f"DataLoader(ds, num_workers={value}, batch_size=64, pin_memory=True" in text


@pytest.mark.parametrize(
    "assigned", ["N = 1", "N: int = 1", "N: Final[int] = 1  # workers", "M = 2; N = 1; print(M)"]
)
def test_a_constant_of_the_call_alone_is_changed_where_assigned(assigned: str) -> None:
    script = f"{IMPORT}{assigned}\ndef main():\n    return DataLoader(ds, num_workers=N)\n"
    text, patch = patched(script, WORKERS, ["num_workers"])
    assert text == script.replace("= 1", "= 4")
    assert patch.settings == ("num_workers",)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("print(N)\n", "read_elsewhere"),
        ("__all__ = ['N']\n", "read_elsewhere"),
        ("valid = DataLoader(vs, num_workers=N)\n", "read_elsewhere"),
        ("N = 2\n", "not_literal"),
        ("N += 2\n", "not_literal"),
        ("for N in range(3): pass\n", "not_literal"),
        ("def f(N): pass\n", "not_literal"),
        ("def f():\n    global N\n", "not_literal"),
        ("import numpy as N\n", "not_literal"),
        ("exec(open('configurator.py').read())\n", "not_literal"),
        ("globals().update(more)\n", "not_literal"),
    ],
)
def test_a_constant_that_others_read_or_set_is_left(more: str, reason: str) -> None:
    script = f"{IMPORT}N = 1\n{more}loader = DataLoader(ds, num_workers=N)\n"
    text, patch = patched(script, WORKERS, ["num_workers"], at="loader =")
    assert (text, patch.left) == (script, {"num_workers": reason})


def test_a_constant_that_is_equal_already_may_be_read_anywhere() -> None:
    script = f"{IMPORT}N = 4\nprint(N)\nloader = DataLoader(ds, num_workers=N)\n"
    patch = patched(script, WORKERS, ["num_workers"])[1]
    assert (patch.diff, patch.settings) == ("", ("num_workers",))


@pytest.mark.parametrize(
    "assigned",
    ["if fast:\n    N = 1\n", "def main():\n    N = 1\n", "N = M = 1\n", "N, M = 1, 2\n"],
)
def test_a_name_that_is_no_plain_constant_of_the_module_is_left(assigned: str) -> None:
    before = f"{IMPORT}{assigned}"
    assert left("DataLoader(ds, num_workers=N)", WORKERS, ["num_workers"], before=before) == {
        "num_workers": "not_literal"
    }


def test_to_a_call_with_stars_nothing_is_added() -> None:
    for stars in ("**kw", "*rest"):
        call = (
            f"DataLoader(ds, {stars}, num_workers=1)"
            if stars[1] != "*"
            else f"DataLoader(ds, num_workers=1, {stars})"
        )
        text, patch = patched(f"{IMPORT}{call}\n", FAST)
        assert text == f"{IMPORT}{call}\n".replace("num_workers=1", "num_workers=4")
        assert patch.left == {name: "starred" for name in ALL if name != "num_workers"}
    assert left("DataLoader(ds, 1, *rest)", PLAIN, ["micro_batch_size"]) == {}
    assert left("DataLoader(*rest, 1)", PLAIN, ["micro_batch_size"]) == {
        "micro_batch_size": "starred"
    }
    assert left("DataLoader(ds, **kw)", PLAIN, ["pin_memory"]) == {"pin_memory": "starred"}, (
        "though it is the default"
    )


def test_a_loader_without_a_batch_size_of_its_own_keeps_it_so() -> None:
    wanted = ["micro_batch_size"]
    for call in ("DataLoader(ds, batch_sampler=sampler)", "DataLoader(ds, 1, None, None, sampler)"):
        assert left(call, PLAIN, wanted) == {"micro_batch_size": "batch_sampler"}
    assert left("DataLoader(ds, batch_size=None)", PLAIN, wanted) == {
        "micro_batch_size": "batching_off"
    }
    assert left("DataLoader(ds, batch_sampler=None)", PLAIN, wanted) == {}


def test_batch_size_is_that_of_one_process() -> None:
    config = TrainingConfig(micro_batch_size=16, world_size=2, strategy="dp")
    assert call_after("DataLoader(ds, 1)", config, ["micro_batch_size"]) == "DataLoader(ds, 32)"
    config = TrainingConfig(micro_batch_size=16, world_size=2, strategy="ddp")
    assert call_after("DataLoader(ds, 1)", config, ["micro_batch_size"]) == "DataLoader(ds, 16)"


@pytest.mark.parametrize(
    ("before", "callee"),
    [
        ("import torch\n", "torch.utils.data.DataLoader"),
        ("import torch.utils.data\nimport torch.nn as nn\n", "torch.utils.data.DataLoader"),
        ("import torch.utils.data as tud\n", "tud.DataLoader"),
        ("from torch.utils import data\n", "data.DataLoader"),
        ("from torch.utils.data import DataLoader as Batches\n", "Batches"),
        ("from torch.utils.data import *\n", "DataLoader"),
        ("from torch.utils.data.dataloader import DataLoader\n", "DataLoader"),
        ("from torchdata.stateful_dataloader import StatefulDataLoader\n", "StatefulDataLoader"),
        (
            f"try: from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader\nexcept: {IMPORT}",
            "DataLoader",
        ),
        (f"{IMPORT}class TextLoader(DataLoader):\n    def stop(self): pass\n", "TextLoader"),
    ],
)
def test_torchs_own_class_is_known_by_any_name(before: str, callee: str) -> None:
    assert call_after(
        f"{callee}(ds, 1)", FAST, ["micro_batch_size", "num_workers"], before=before
    ) == (f"{callee}(ds, 64, num_workers=4)")


@pytest.mark.parametrize(
    ("before", "callee"),
    [
        ("", "DataLoader"),
        ("from monai.data import DataLoader\n", "DataLoader"),
        ("from .data import DataLoader\n", "DataLoader"),
        (f"{IMPORT}DataLoader = wrapped(DataLoader)\n", "DataLoader"),
        (
            f"{IMPORT}class TextLoader(DataLoader):\n    def __init__(self, *a, **k): pass\n",
            "TextLoader",
        ),
        (f"{IMPORT}class DataLoader(DataLoader): pass\n", "DataLoader"),
        (
            f"{IMPORT}from functools import partial\nmake = partial(DataLoader, shuffle=True)\n",
            "make",
        ),
        ("", "classes[0]"),
    ],
)
def test_of_another_class_only_the_keywords_that_are_given_are_changed(
    before: str, callee: str
) -> None:
    text, patch = patched(f"{before}train = {callee}(ds, 1, num_workers=2)\n", FAST, at="train =")
    assert text == f"{before}train = {callee}(ds, 1, num_workers=4)\n"
    assert patch.settings == ("num_workers",)
    assert patch.left == {name: "unknown_callee" for name in ALL if name != "num_workers"}
    assert patched(
        f"{before}train = {callee}(ds, num_workers=2)\n", PLAIN, ["num_workers"], at="train ="
    )[1].left == {"num_workers": "unknown_callee"}


@pytest.mark.parametrize(
    ("script", "line", "expected"),
    [
        (
            "x = wrap(DataLoader(ds, num_workers=1), num_workers=1)\n",
            2,
            "wrap(DataLoader(ds, num_workers=4), num_",
        ),
        (
            "x = FastLoader(DataLoader(ds, num_workers=1), num_workers=1)\n",
            2,
            "(DataLoader(ds, num_workers=4), num_",
        ),
        (
            "x = DataLoader(\n    DataLoader(ds, num_workers=1),\n    num_workers=1)\n",
            2,
            "    num_workers=4)",
        ),
        (
            "x = DataLoader(\n    DataLoader(ds, num_workers=1),\n    num_workers=1)\n",
            3,
            "(ds, num_workers=4),\n",
        ),
        (
            "x = DataLoader(\n    MyLoader(ds, num_workers=1),\n    num_workers=1)\n",
            3,
            "MyLoader(ds, num_workers=4),\n",
        ),
        ("x = DataLoader(\n    f(ds),\n    num_workers=1)\n", 4, "    num_workers=4)"),
        (
            "x = f(num_workers=1), DataLoader(ds, num_workers=1)\n",
            2,
            "f(num_workers=1), DataLoader(ds, num_workers=4)",
        ),
        ("x = (torch.\n  DataLoader(\n  num_workers=1))\n", 3, "num_workers=4"),
    ],
)
def test_the_call_is_the_innermost_loader_that_begins_at_the_line(
    script: str, line: int, expected: str
) -> None:
    Path("train.py").write_text(IMPORT + script)
    patch = patch_script(Path("train.py"), line, WORKERS, ["num_workers"])
    apply(patch)
    assert expected in Path("train.py").read_text()
    assert patch.diff.count("\n+") == 2, "the header and one line"


def test_a_line_without_its_one_call_is_told() -> None:
    Path("train.py").write_text(
        f"{IMPORT}a, b = DataLoader(x, 1), DataLoader(y, 1)\nfor batch in a: step(batch)\n"
    )
    ambiguous, none, beyond = (
        patch_script(Path("train.py"), line, FAST, ALL) for line in (2, 3, 99)
    )
    assert ambiguous == ScriptPatch(diff="", settings=(), left=dict.fromkeys(ALL, "ambiguous_call"))
    assert none == beyond == ScriptPatch(diff="", settings=(), left=dict.fromkeys(ALL, "no_call"))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "unreadable"),
        (b"# coding: klingon\nDataLoader(ds)\n", "unreadable"),
        (b"x = '\xff'\nDataLoader(ds)\n", "unreadable"),
        (b"DataLoader(ds\n", "unparsable"),
        (b"DataLoader(ds)\0\n", "unparsable"),
        (b"x = " + b"(" * 500 + b")" * 500, "unparsable"),
    ],
)
def test_a_file_that_cannot_be_read_or_parsed_is_told(raw: bytes | None, reason: str) -> None:
    if raw is not None:
        Path("train.py").write_bytes(raw)
    patch = patch_script(Path("train.py"), 1, FAST, ["pin_memory"])
    assert patch == ScriptPatch(diff="", settings=(), left={"pin_memory": reason})


@pytest.mark.parametrize("call", ["DataLoader(x for x in y)", 'f"""{1}\n{DataLoader(ds)}"""'])
def test_what_would_not_parse_to_what_was_meant_is_not_handed_on(call: str) -> None:
    text, patch = patched(f"{IMPORT}{call}\n", WORKERS, ["num_workers"])
    if patch.left:  # from Python 3.12 on a string's inner places are exact
        assert (text, patch.left) == (f"{IMPORT}{call}\n", {"num_workers": "unverified"})
    else:
        assert "{DataLoader(ds, num_workers=4)}" in text


HANGING = """\
    loader = DataLoader(
        ds,
        batch_size=32,  # fits
        num_workers=0  # (slow), yes
        # none behind it
    )
"""
HANGING_AFTER = """\
    loader = DataLoader(
        ds,
        batch_size=64,  # fits
        num_workers=4,  # (slow), yes
        pin_memory=True
        # none behind it
    )
"""
COMMA = """\
    loader = DataLoader(
        ds, batch_size=32,
        shuffle=True, num_workers=0,  # é (
    )
"""
COMMA_AFTER = """\
    loader = DataLoader(
        ds, batch_size=64,
        shuffle=True, num_workers=4,  # é (
        pin_memory=True,
    )
"""
ALIGNED = """\
    loader = DataLoader(ds,
                        batch_size=32,
                        num_workers=(
                            0
                        ))
"""
ALIGNED_AFTER = """\
    loader = DataLoader(ds,
                        batch_size=64,
                        num_workers=(
                            4
                        ),
                        pin_memory=True)
"""
ALIGNED_COMMA = """\
    loader = DataLoader((
        ds), batch_size=32, num_workers=0,
                        shuffle=True,)
"""
ALIGNED_COMMA_AFTER = """\
    loader = DataLoader((
        ds), batch_size=64, num_workers=4,
                        shuffle=True,
                        pin_memory=True,)
"""
ONE_ROW = """\
    loader = DataLoader(Data(
        a,
    ), batch_size=32, num_workers=0)
"""
ONE_ROW_AFTER = """\
    loader = DataLoader(Data(
        a,
    ), batch_size=64, num_workers=4, pin_memory=True)
"""


CALLS = {
    "hanging": (HANGING, HANGING_AFTER),
    "comma": (COMMA, COMMA_AFTER),
    "aligned": (ALIGNED, ALIGNED_AFTER),
    "aligned comma": (ALIGNED_COMMA, ALIGNED_COMMA_AFTER),
    "one row": (ONE_ROW, ONE_ROW_AFTER),
}
FORMS: list[tuple[str, Tool, str, bool, bool]] = [
    ("hanging", "patch", "\n", False, True),
    ("hanging", "git", "\r\n", True, False),
    ("comma", "git", "\n", False, False),
    ("comma", "patch", "\r\n", True, True),
    ("aligned", "git", "\n", True, True),
    ("aligned", "patch", "\r\n", False, False),
    ("aligned comma", "patch", "\n", True, False),
    ("aligned comma", "git", "\r\n", False, True),
    ("one row", "patch", "\n", True, False),
    ("one row", "git", "\r\n", False, True),
]
"""How a call is written: its layout, the tool, the end of a line, whether tabs indent, whether the last line ends.

Each pair of forms stands in some row.
"""


@pytest.mark.parametrize(("name", "tool", "end", "is_tabbed", "has_last_end"), FORMS)
def test_the_form_of_the_call_is_kept(
    name: str, tool: Tool, end: str, is_tabbed: bool, has_last_end: bool
) -> None:
    def written(call: str) -> str:
        text = (
            f"{IMPORT}def main():\n{call}"
            if has_last_end
            else f"{IMPORT}def main():\n{call}".removesuffix("\n")
        )
        return (text.replace("    ", "\t") if is_tabbed else text).replace("\n", end)

    before, after = CALLS[name]
    config = TrainingConfig(micro_batch_size=64, num_workers=4, pin_memory=True)
    text, patch = patched(written(before), config, tool=tool)
    assert text == written(after)
    assert patch.settings == ALL[:2] + tuple(LOADER_ARGUMENTS[1:])


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
@pytest.mark.parametrize(
    "first", ["é = 'ü\u00a0ß'; ", "# é\x0c\x1c\n\x0c", "s = '''é\x85\x0b\n'''\n"]
)
def test_bytes_that_are_no_ascii_stay_as_they_are(encoding: str, first: str, tool: Tool) -> None:
    text = f"# coding: {encoding.removesuffix('-sig')}\n{IMPORT}{first}loader = DataLoader('ß', 1, num_workers=0)  # é"
    raw = text.encode(encoding)
    patched(raw, FAST, ["micro_batch_size", "num_workers"], tool=tool)
    assert Path("train.py").read_bytes() == (
        text.replace("'ß', 1", "'ß', 64").replace("num_workers=0", "num_workers=4").encode(encoding)
    )


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize(
    "name", ["a b/träin me.py", 'q"uo\\te.py', "tab\tname.py", "é\n.py", "src/deep/train.py"]
)
def test_the_diff_finds_a_file_of_any_name(name: str, tool: Tool) -> None:
    text, _ = patched(f"{IMPORT}DataLoader(ds)\n", WORKERS, ["num_workers"], name=name, tool=tool)
    assert text == f"{IMPORT}DataLoader(ds, num_workers=4)\n"


def test_the_paths_are_as_seen_from_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "src" / "train.py"
    _, patch = patched(f"{IMPORT}DataLoader(ds)\n", WORKERS, ["num_workers"], name=str(source))
    assert patch.diff.splitlines()[:2] == ["--- a/src/train.py", "+++ b/src/train.py"]
    source.write_text(f"{IMPORT}DataLoader(ds)\n")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    patch = patch_script(source, 2, WORKERS, ["num_workers"])
    assert patch.diff.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    (folder / "elsewhere" / "link.py").symlink_to(source)
    assert patch_script(Path("link.py"), 2, WORKERS, ["num_workers"]) == patch


def test_git_applies_it_in_any_folder_of_a_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True, timeout=60)
    (folder / "src" / "deep").mkdir(parents=True)
    monkeypatch.chdir(folder / "src")
    text, _ = patched(
        f"{IMPORT}DataLoader(ds)\n", WORKERS, ["num_workers"], tool="git", name="deep/train.py"
    )
    assert text == f"{IMPORT}DataLoader(ds, num_workers=4)\n"


def test_a_script_with_invalid_escapes_warns_nobody() -> None:
    assert (
        call_after("DataLoader('\\d')", WORKERS, ["num_workers"])
        == "DataLoader('\\d', num_workers=4)"
    )


def test_a_long_script_with_deep_expressions_is_changed_in_one_line() -> None:
    rows = "".join(f"x{i} = f({i})\n\n" for i in range(3000))
    deep = "y = " + " + ".join(["'a'"] * 400) + f"\nz = {hex(10**5000)}\n"
    text, patch = patched(f"{IMPORT}{rows}{deep}DataLoader(ds)\n{rows}", WORKERS, ["num_workers"])
    assert text == f"{IMPORT}{rows}{deep}DataLoader(ds, num_workers=4)\n{rows}"
    assert patch.diff.count("\n-") == 1


SCRIPT = '''\
"""A script as people write it, é."""
import argparse
import json
import torch
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 16
PREFETCH = 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    data = TensorDataset(torch.arange(256.0).reshape(128, 2), torch.arange(128.0))
    train = DataLoader(
        data,
        BATCH_SIZE,
        shuffle=True,
        num_workers=2,  # as many as cores
        prefetch_factor=PREFETCH,
        persistent_workers=True
    )
    valid = DataLoader(data, batch_size=8, num_workers=0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for _ in range(args.epochs):
        for inputs, targets in train:
            optimizer.zero_grad()
            (model(inputs).squeeze(1) - targets).pow(2).mean().backward()
            optimizer.step()
    names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order")
    print(json.dumps([{name: getattr(loader, name) for name in names} for loader in (train, valid)]))


if __name__ == "__main__":
    main()
'''


RUN_ALL = """
import runpy, sys
scripts = sys.argv[1:]
for sys.argv[1:] in [[]] * len(scripts):
    runpy.run_path(scripts.pop(0), run_name="__main__")
"""
"""Runs scripts one after the other, so that torch is imported but once."""


@pytest.mark.slow
def test_the_script_runs_with_exactly_the_settings_of_its_diff() -> None:
    configs = [
        TrainingConfig(micro_batch_size=32, num_workers=1, prefetch_factor=5, in_order=False),
        TrainingConfig(micro_batch_size=64, num_workers=0),
    ]
    tools: tuple[Tool, Tool] = ("patch", "git")
    cases = {
        f"{tool}-{number}.py": (tool, config)
        for tool in tools
        for number, config in enumerate(configs)
    }
    for name, (tool, config) in cases.items():
        _, patch = patched(SCRIPT, config, at="train = DataLoader(", name=name, tool=tool)
        assert (patch.settings, patch.left) == (ALL, {})
    command = [sys.executable, "-c", RUN_ALL, *cases]
    done = subprocess.run(command, check=True, capture_output=True, timeout=100, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [train for train, _ in lines] == [
        config.dataloader_kwargs() for _, config in cases.values()
    ]
    assert {(valid["batch_size"], valid["num_workers"]) for _, valid in lines} == {(8, 0)}


def loader_arguments(workers: int) -> st.SearchStrategy[dict[str, object]]:
    """Keyword arguments that torch takes with so many workers."""
    needs_workers = {
        "prefetch_factor": st.integers(1, 9) | st.none() if workers else st.none(),
        "persistent_workers": st.booleans() if workers else st.just(False),
    }
    optional: dict[str, st.SearchStrategy[object]] = {
        "batch_size": st.integers(1, 99),
        "pin_memory": st.booleans(),
        "in_order": st.booleans(),
        "drop_last": st.booleans(),
        "collate_fn": st.none(),
        "shuffle": st.booleans() | st.none(),
        **needs_workers,
    }
    required = {"num_workers": st.just(workers)} if workers else {}
    return st.fixed_dictionaries(
        required, optional=optional if workers else {"num_workers": st.just(0), **optional}
    )


def configs() -> st.SearchStrategy[TrainingConfig]:
    def of(workers: int) -> st.SearchStrategy[TrainingConfig]:
        return st.builds(
            TrainingConfig,
            micro_batch_size=st.integers(1, 99),
            num_workers=st.just(workers),
            prefetch_factor=st.integers(1, 9) | st.none() if workers else st.none(),
            persistent_workers=st.booleans() if workers else st.just(False),
            pin_memory=st.booleans(),
            in_order=st.booleans() if workers else st.just(True),
        )

    return st.integers(0, 4).flatmap(of)


@st.composite
def scripts(draw: st.DrawFn) -> str:
    """A script that makes one loader, in any form that Python takes."""
    arguments = draw(st.integers(0, 4).flatmap(loader_arguments))
    values: dict[str, object] = {
        "shuffle": None,
        "sampler": None,
        "batch_sampler": None,
        "collate_fn": None,
        "batch_size": 1,
    }
    values |= {"num_workers": 0, "pin_memory": False, **arguments}
    order = (
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
    )
    positional = order[: draw(st.integers(0, len(order)))]
    constants = {}

    def text(name: str, value: object) -> str:
        form = draw(st.sampled_from(["{}", "{}", "({})", "(\n{} # )\n)", "constant"]))
        if form != "constant" or name in {"shuffle", "collate_fn", "drop_last"}:
            return form.format(value) if form != "constant" else repr(value)
        constants[name.upper()] = value
        return name.upper()

    words = [name for name in draw(st.permutations(sorted(arguments))) if name not in positional]
    parts = [draw(st.sampled_from(["[0]", "list(range(3))", "['é', ')']", "(\n  [0])"]))]
    parts += [text(name, values[name]) for name in positional]
    equals = draw(st.sampled_from(["=", " = "]))
    parts += [f"{name}{equals}{text(name, arguments[name])}" for name in words]
    gaps = [",", ", ", ",\n", ",\n        ", ",  # (é,\n    ", ",\n\n\t", " , \\\n  "]
    call = draw(st.sampled_from(["", " ", "\n    ", "  # (\n\t"]))
    for part in parts[:-1]:
        call += part + draw(st.sampled_from(gaps))
    call += parts[-1] + draw(
        st.sampled_from(["", ",", " ", "\n", ",\n    ", "  # é)\n", ", # )\n    # (\n"])
    )
    callee = draw(
        st.sampled_from(["DataLoader", "torch.utils.data.DataLoader", "Own", "(DataLoader)"])
    )
    before, after = draw(
        st.sampled_from(
            [
                ("", ""),
                ("é = 'é'; ", "; y = 1"),
                ("y = list([3, ", "])"),
                ("if 1:\n    ", "\n    y = 2"),
            ]
        )
    )
    lines = [f"{name} = {value!r}\n" for name, value in constants.items()]
    keeps = f"{callee}({call})" if "list" in before else f"loader = {callee}({call})"
    script = (
        "import torch\nfrom torch.utils.data import DataLoader\nclass Own(DataLoader): pass\n"
        f"{''.join(lines)}{before}{keeps}{after}{draw(st.sampled_from(['', chr(10)]))}"
    )
    return script.replace("\n", draw(st.sampled_from(["\n", "\n", "\r\n"])))


def run(path: Path) -> tuple[int, Mapping[str, object]]:
    """The line and the settings of the one loader that a script makes, by torch itself."""
    made: list[tuple[int, DataLoader[Any]]] = []
    original = DataLoader.__init__

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append((sys._getframe(1).f_lineno, self))

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(DataLoader, "__init__", init)
        exec(compile(path.read_bytes(), path, "exec"), {"__name__": "__main__"})
    ((line, loader),) = made
    return line, {name: getattr(loader, name) for name in ("batch_size", *LOADER_ARGUMENTS)}


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@given(
    scripts(),
    configs(),
    st.sets(st.sampled_from(ALL)) | st.just(set(ALL)),
    st.sampled_from(["patch", "git"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_literal_call_is_given_what_is_wanted_and_keeps_the_rest(
    script: str, config: TrainingConfig, wanted: set[str], tool: Tool
) -> None:
    path = Path("train.py")
    path.write_bytes(script.encode())
    line, before = run(path)
    patch = patch_script(path, line, config, wanted)
    apply(patch, tool)
    _, after = run(path)
    torchs = TORCH_PREFETCH_FACTOR if after["num_workers"] else None
    expected = {"batch_size": config.loader_batch_size, **config.loader_settings}
    expected["prefetch_factor"] = config.prefetch_factor or torchs
    changed = {"batch_size" if name == "micro_batch_size" else name for name in patch.settings}
    assert {*patch.settings, *patch.left} >= wanted
    assert {*patch.left.values()} <= {"needs_num_workers"}, "nothing else hinders a literal call"
    assert not patch.left or "num_workers" not in wanted
    for name, value in after.items():
        if name in changed:
            assert value == expected[name]
        elif name != "prefetch_factor":  # torch's own number comes and goes with the workers
            assert value == before[name]


def test_threads_of_workers_are_the_scripts_to_hand_on(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text(
        "from torch.utils.data import DataLoader\nloader = DataLoader(range(8), num_workers=1)\n"
    )
    config = TrainingConfig(num_workers=2, worker_threads=1)
    patch = patch_script(source, 2, config, {"num_workers", "worker_threads"})
    assert (patch.settings, dict(patch.left)) == (
        ("num_workers",),
        {"worker_threads": "worker_init_fn"},
    )
    plain = config.model_copy(update={"worker_threads": None})
    assert dict(patch_script(source, 2, plain, {"num_workers", "worker_threads"}).left) == {}
