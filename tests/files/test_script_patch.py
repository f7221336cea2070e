"""The diff of a script sets exactly what is wanted, and changes nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.utils.data import DataLoader

from autotune.config.training_config import (
    LOADER_ARGUMENTS,
    LOADER_SETTINGS,
    TORCH_PREFETCH_FACTOR,
    TrainingConfig,
)
from autotune.files.script_patch import _DEFAULTS, _PARAMETERS, _WORKERS_ALONE, patch_script

Tool = Literal["patch", "git"]

IMPORT = "from torch.utils.data import DataLoader\n"
ALL = ("micro_batch_size", *LOADER_SETTINGS)
FAST = TrainingConfig(
    micro_batch_size=64,
    num_workers=4,
    prefetch_factor=8,
    persistent_workers=True,
    pin_memory=True,
    in_order=False,
    worker_threads=1,
)
PLAIN = TrainingConfig(micro_batch_size=64)
WORKERS = TrainingConfig(num_workers=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def apply(patch: bytes, tool: Tool = "patch") -> None:
    """The diff applied to the current folder as a user does it."""
    command = ["git", "apply", "-"]
    if tool == "patch":
        command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch"]
    if patch:
        subprocess.run(command, input=patch, check=True, capture_output=True, timeout=60)


def patched(
    script: str,
    config: TrainingConfig,
    wanted: Collection[str] = ALL,
    *,
    at: str = "DataLoader(",
    name: str = "train.py",
    tool: Tool = "patch",
    encoding: str = "utf-8",
) -> str:
    """The script after its diff; the call is that of the last line which has the text `at`."""
    raw = script.encode(encoding)
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    rows = raw.split(b"\n")
    line = max(number for number, row in enumerate(rows, start=1) if at.encode() in row)
    patch = patch_script(path, line, config, wanted)
    assert path.read_bytes() == raw, "the script is never written"
    apply(patch, tool)
    return path.read_bytes().decode(encoding)


def call_after(
    call: str, config: TrainingConfig, wanted: Collection[str] = ALL, *, before: str = IMPORT
) -> str:
    """A call of one expression, after its diff."""
    text = patched(f"{before}loader = {call}\n", config, wanted, at="loader = ")
    assert text.startswith(f"{before}loader = ")
    return text.removeprefix(f"{before}loader = ").removesuffix("\n")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("DataLoader(ds, num_workers=0)", "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds, num_workers=0,)", "DataLoader(ds, num_workers=4,)"),
        ("DataLoader(ds)", "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds,)", "DataLoader(ds, num_workers=4,)"),
        ("DataLoader(ds , )", "DataLoader(ds , num_workers=4, )"),
        ("DataLoader( (ds) )", "DataLoader( (ds), num_workers=4 )"),
        ("DataLoader(f(ds), num_workers=(0))", "DataLoader(f(ds), num_workers=(4))"),
        ("DataLoader(ds, num_workers = 0, n=1)", "DataLoader(ds, num_workers = 4, n=1)"),
        ("DataLoader(ds, num_workers=-1)", "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds, num_workers=0x2)", "DataLoader(ds, num_workers=4)"),
        ("DataLoader(ds, 32, True)", "DataLoader(ds, 32, True, num_workers=4)"),
        ("DataLoader(ds, 1, True, a, b, 0, n)", "DataLoader(ds, 1, True, a, b, 4, n)"),
        ("DataLoader('\\d')", "DataLoader('\\d', num_workers=4)"),
    ],
)
def test_literal_is_replaced_or_added(call: str, expected: str) -> None:
    assert call_after(call, WORKERS, ["num_workers"]) == expected


def test_order_and_defaults_are_torchs() -> None:
    parameters = [*inspect.signature(DataLoader).parameters.values()]
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert tuple(names) == _PARAMETERS
    assert {one.name: one.default for one in parameters if one.name in _DEFAULTS} == _DEFAULTS


@pytest.mark.parametrize("wanted", [ALL, [*reversed(ALL)]])
def test_settings_are_added_in_their_own_order(wanted: Collection[str]) -> None:
    expected = (
        "DataLoader(ds, batch_size=64, num_workers=4, prefetch_factor=8, persistent_workers=True, "
        "pin_memory=True, in_order=False)"
    )
    assert call_after("DataLoader(ds)", FAST, wanted) == expected


@pytest.mark.parametrize("prefetch", [2, None])
@pytest.mark.parametrize(
    "call", ["DataLoader(ds, num_workers=4)", "DataLoader(ds, num_workers=4, prefetch_factor=2)"]
)
def test_equal_values_stay(call: str, prefetch: int | None) -> None:
    config = TrainingConfig(num_workers=4, prefetch_factor=prefetch)
    assert call_after(call, config, LOADER_SETTINGS) == call


def test_unwanted_settings_stay() -> None:
    call = "DataLoader(ds, batch_size=1, num_workers=2, prefetch_factor=3)"
    assert call_after(call, FAST, ["num_workers"]) == call.replace("num_workers=2", "num_workers=4")
    assert call_after(call, FAST, []) == call


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "prefetch_factor=8, persistent_workers=True",
            "prefetch_factor=None, persistent_workers=False",
        ),
        ("multiprocessing_context='spawn'", "multiprocessing_context=None"),
        ("timeout=0", "timeout=0"),
        ("timeout=0.0", "timeout=0.0"),
    ],
)
def test_workers_go_with_what_needs_them(given: str, expected: str) -> None:
    call = f"DataLoader(ds, num_workers=4, {given})"
    assert call_after(call, PLAIN, ["num_workers"]) == f"DataLoader(ds, num_workers=0, {expected})"


@pytest.mark.parametrize(
    "needing",
    [
        "prefetch_factor=args.prefetch",
        "persistent_workers=args.keep",
        "multiprocessing_context=context",
        "timeout=30",
        "**more",
    ],
)
def test_workers_stay_if_another_argument_needs_them(needing: str) -> None:
    call = f"DataLoader(ds, num_workers=4, {needing})"
    assert call_after(call, PLAIN, ["num_workers"]) == call
    assert call_after(call, TrainingConfig(num_workers=8), ["num_workers"]) != call


@pytest.mark.parametrize("given", ["", ", num_workers=0", ", num_workers=args.n"])
def test_what_needs_workers_is_not_added_without(given: str) -> None:
    call = f"DataLoader(ds{given})"
    assert call_after(call, FAST, ["prefetch_factor", "persistent_workers"]) == call


@pytest.mark.parametrize(
    "value", ["n", "args.n", "int('3')", "2 * 2", "4 if fast else 0", "(n := 3)", "os.cpu_count()"]
)
def test_expressions_are_left(value: str) -> None:
    before = f"{IMPORT}n = int('3')\n"
    call = f"DataLoader(ds, num_workers={value}"
    assert call_after(f"{call}, batch_size=1)", PLAIN, before=before) == f"{call}, batch_size=64)"
    assert call_after(f"{call})", WORKERS, ["num_workers"], before=before) == f"{call})"


@pytest.mark.parametrize(
    "assigned", ["N = 1", "N: int = 1", "N: Final[int] = 1  # workers", "M = 2; N = 1; print(M)"]
)
def test_constant_of_one_call_is_changed_where_assigned(assigned: str) -> None:
    script = f"{IMPORT}{assigned}\ndef main():\n    return DataLoader(ds, num_workers=N)\n"
    assert patched(script, WORKERS, ["num_workers"]) == script.replace("= 1", "= 4")


@pytest.mark.parametrize(
    "assigned",
    [
        # read elsewhere
        "N = 1\nprint(N)\n",
        "N = 1\n__all__ = ['N']\n",
        "N = 1\nvalid = DataLoader(vs, num_workers=N)\n",
        # set elsewhere
        "N = 1\nN = 2\n",
        "N = 1\nN += 2\n",
        "N = 1\nfor N in range(3): pass\n",
        "N = 1\ndef f(N): pass\n",
        "N = 1\ndef f():\n    global N\n",
        "N = 1\nimport numpy as N\n",
        "N = 1\nexec(open('configurator.py').read())\n",
        "N = 1\nglobals().update(more)\n",
        # no plain constant of the module
        "if fast:\n    N = 1\n",
        "def main():\n    N = 1\n",
        "N = M = 1\n",
        "N, M = 1, 2\n",
    ],
)
def test_other_constants_are_left(assigned: str) -> None:
    call = "DataLoader(ds, num_workers=N)"
    assert call_after(call, WORKERS, ["num_workers"], before=IMPORT + assigned) == call


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("DataLoader(ds, **kw, num_workers=1)", "DataLoader(ds, **kw, num_workers=4)"),
        ("DataLoader(ds, num_workers=1, *rest)", "DataLoader(ds, num_workers=4, *rest)"),
        ("DataLoader(ds, 1, *rest)", "DataLoader(ds, 64, *rest)"),
        ("DataLoader(*rest, 1)", "DataLoader(*rest, 1)"),
        ("DataLoader(ds, **kw)", "DataLoader(ds, **kw)"),
    ],
)
def test_nothing_is_added_to_a_call_with_stars(call: str, expected: str) -> None:
    assert call_after(call, FAST) == expected


@pytest.mark.parametrize(
    "given", ["batch_sampler=sampler", "1, None, None, sampler", "batch_size=None"]
)
def test_loader_without_a_batch_size_keeps_it_so(given: str) -> None:
    call = f"DataLoader(ds, {given})"
    assert call_after(call, PLAIN, ["micro_batch_size"]) == call


@pytest.mark.parametrize(("strategy", "size"), [("dp", 32), ("ddp", 16)])
def test_batch_size_is_that_of_one_process(strategy: Literal["dp", "ddp"], size: int) -> None:
    config = TrainingConfig(micro_batch_size=16, world_size=2, strategy=strategy)
    call = "DataLoader(ds, 1, batch_sampler=None)"
    assert call_after(call, config, ["micro_batch_size"]) == call.replace("1", str(size))


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
def test_torchs_class_is_known_by_any_name(before: str, callee: str) -> None:
    wanted = ["micro_batch_size", "num_workers"]
    after = call_after(f"{callee}(ds, 1)", FAST, wanted, before=before)
    assert after == f"{callee}(ds, 64, num_workers=4)"


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
def test_only_given_keywords_of_another_class_change(before: str, callee: str) -> None:
    call = f"{callee}(ds, 1, num_workers=2)"
    assert call_after(call, FAST, before=before) == call.replace("=2", "=4")
    assert call_after(call, PLAIN, before=before) == call


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
def test_innermost_loader_at_the_line(script: str, line: int, expected: str) -> None:
    Path("train.py").write_text(IMPORT + script)
    patch = patch_script(Path("train.py"), line, WORKERS, ["num_workers"])
    apply(patch)
    assert expected in Path("train.py").read_text()
    assert patch.count(b"\n+") == 2, "the header and one line"


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        (None, 1),
        (b"# coding: klingon\nDataLoader(ds, 1)\n", 2),
        (b"x = '\xff'\nDataLoader(ds, 1)\n", 2),
        (b"DataLoader(ds, 1\n", 1),
        (b"DataLoader(ds, 1)\0\n", 1),
        (b"x = " + b"(" * 500 + b")" * 500, 1),
        (b"a, b = DataLoader(x, 1), DataLoader(y, 1)\n", 1),  # ambiguous
        (b"DataLoader(ds, 1)\nfor batch in a: step(batch)\n", 2),
        (b"DataLoader(ds, 1)\n", 99),
    ],
)
def test_no_patch_without_one_readable_call(raw: bytes | None, line: int) -> None:
    if raw is not None:
        Path("train.py").write_bytes(raw)
    assert patch_script(Path("train.py"), line, FAST, ALL) == b""


@pytest.mark.parametrize("call", ["DataLoader(x for x in y)", 'f"""{1}\n{DataLoader(ds)}"""'])
def test_no_patch_that_parses_otherwise(call: str) -> None:
    text = patched(f"{IMPORT}{call}\n", WORKERS, ["num_workers"])
    # From Python 3.12 on a string's inner places are exact.
    assert text == f"{IMPORT}{call}\n" or "{DataLoader(ds, num_workers=4)}" in text


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
def test_form_of_the_call_is_kept(
    name: str, tool: Tool, end: str, is_tabbed: bool, has_last_end: bool
) -> None:
    def written(call: str) -> str:
        text = f"{IMPORT}def main():\n{call if has_last_end else call.removesuffix(chr(10))}"
        return (text.replace("    ", "\t") if is_tabbed else text).replace("\n", end)

    before, after = CALLS[name]
    config = TrainingConfig(micro_batch_size=64, num_workers=4, pin_memory=True)
    Path("train.py").write_bytes(written(before).encode())
    line = 1 + before[: before.index("DataLoader")].count("\n") + 2
    apply(patch_script(Path("train.py"), line, config, ALL), tool)
    assert Path("train.py").read_bytes() == written(after).encode()


@pytest.mark.parametrize(
    ("encoding", "tool"), [("utf-8", "patch"), ("utf-8-sig", "git"), ("latin-1", "patch")]
)
@pytest.mark.parametrize(
    "first", ["é = 'ü\u00a0ß'; ", "# é\x0c\x1c\n\x0c", "s = '''é\x85\x0b\n'''\n"]
)
def test_non_ascii_bytes_stay(encoding: str, first: str, tool: Tool) -> None:
    text = f"# coding: {encoding.removesuffix('-sig')}\n{IMPORT}{first}loader = DataLoader('ß', 1, num_workers=0)  # é"
    after = patched(text, FAST, ["micro_batch_size", "num_workers"], tool=tool, encoding=encoding)
    assert after == text.replace("'ß', 1", "'ß', 64").replace("num_workers=0", "num_workers=4")


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize(
    "name", ["a b/träin me.py", 'q"uo\\te.py', "tab\tname.py", "é\n.py", "src/deep/train.py"]
)
def test_diff_finds_a_file_of_any_name(name: str, tool: Tool) -> None:
    text = patched(f"{IMPORT}DataLoader(ds)\n", WORKERS, ["num_workers"], name=name, tool=tool)
    assert text == f"{IMPORT}DataLoader(ds, num_workers=4)\n"


def test_paths_are_relative_to_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "src" / "train.py"
    source.parent.mkdir()
    source.write_text(f"{IMPORT}DataLoader(ds)\n")
    patch = patch_script(source, 2, WORKERS, ["num_workers"])
    assert patch.splitlines()[:2] == [b"--- a/src/train.py", b"+++ b/src/train.py"]
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    patch = patch_script(source, 2, WORKERS, ["num_workers"])
    assert patch.splitlines()[:2] == [b"--- a/train.py", b"+++ b/train.py"]
    (folder / "elsewhere" / "link.py").symlink_to(source)
    assert patch_script(Path("link.py"), 2, WORKERS, ["num_workers"]) == patch


def test_git_applies_it_in_any_folder_of_a_repository(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True, timeout=60)
    (folder / "src" / "deep").mkdir(parents=True)
    monkeypatch.chdir(folder / "src")
    script = f"{IMPORT}DataLoader(ds)\n"
    text = patched(script, WORKERS, ["num_workers"], tool="git", name="deep/train.py")
    assert text == f"{IMPORT}DataLoader(ds, num_workers=4)\n"


def test_long_script_with_deep_expressions() -> None:
    rows = "".join(f"x{i} = f({i})\n\n" for i in range(3000))
    deep = "y = " + " + ".join(["'a'"] * 400) + f"\nz = {hex(10**5000)}\n"
    text = patched(f"{IMPORT}{rows}{deep}DataLoader(ds)\n{rows}", WORKERS, ["num_workers"])
    assert text == f"{IMPORT}{rows}{deep}DataLoader(ds, num_workers=4)\n{rows}"


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
def test_any_literal_call_is_given_what_is_wanted(
    script: str, config: TrainingConfig, wanted: set[str], tool: Tool
) -> None:
    path = Path("train.py")
    path.write_bytes(script.encode())
    line, before = run(path)
    apply(patch_script(path, line, config, wanted), tool)
    _, after = run(path)
    expected = {"batch_size": config.loader_batch_size, **config.loader_settings}
    if config.prefetch_factor is None:
        expected["prefetch_factor"] = TORCH_PREFETCH_FACTOR
    for name, value in after.items():
        is_wanted = ("micro_batch_size" if name == "batch_size" else name) in wanted
        if name in _WORKERS_ALONE and not after["num_workers"]:
            assert not value
        elif is_wanted:
            assert value == expected[name]
        elif name != "prefetch_factor":  # torch's own number comes and goes with the workers
            assert value == before[name]
