"""Configurations as texts: values from the plan's own schema, and their neighbours, which break one rule or another.

Comes in: a path of files that workloads may name. Goes out: hypothesis strategies of bytes and of overrides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from hypothesis import strategies as st
from pydantic import TypeAdapter

from autotune.config.plan import Plan

__all__ = ["SECTIONS", "documents", "odd_values", "overrides", "plans", "values_of"]

WORKLOADS: list[Any] = [
    {"model": "user_code.py:model", "dataset": "user_code.py:dataset"},
    {"model": "user_code:model", "dataset": "user_code:dataset", "loss": "user_code:loss"},
    {"command": "python user_code.py"},
    {"command": ["python", "user_code.py", "--batch", "{micro_batch_size}"]},
]
_SETTINGS = ("space", "baseline")
SECTIONS = (
    *("workload", "baseline", "space", "objective", "budget", "search", "executor"),
    *("device", "run_dir", "seed"),
)
_NUMBERS = [
    *(0, 1, 2, 3, 7, 8, 32, 64, -1, 2**31, 2**63 - 1, 2**64, 10**400),
    *(0.5, 1e-300, 1e308, float("inf"), float("nan")),
]
_TEXTS = [
    *(
        "",
        " ",
        "0",
        "1",
        "08",
        "1e3",
        "0x10",
        "yes",
        "on",
        "null",
        "~",
        ".nan",
        "-.inf",
        "20GiB",
        "90%",
        "auto",
    ),
    *(
        "local",
        "ray",
        "cuda",
        "cuda:0",
        "cuda:-1",
        "cpu:1",
        "meta",
        "bfloat16",
        "float33",
        "ddp",
        "../..",
        "/dev/null",
    ),
    *(
        "a b",
        "a'b",
        'a"b',
        "a\nb",
        "a\tb",
        "\u202eabc",
        "\U0001f600",
        "é" * 300,
        "x" * 5000,
        "{",
        "}",
        "{lr}",
        "%s",
    ),
    *(
        "~nobody/x",
        "$HOME",
        "{{ 1 }}",
        "<script>",
        "\x1b[31m",
        "a:b",
        "a.b:c",
        "file.py:f",
        "os:system",
        "--",
    ),
    *("127.0.0.1:99999", "[::1]:6379"),
]


@cache
def schema() -> dict[str, Any]:
    """The plan's JSON schema."""
    return TypeAdapter(Plan).json_schema()


def values_of(part: Mapping[str, Any], depth: int = 4) -> st.SearchStrategy[Any]:
    """Values that a part of the schema allows, by its words alone: what rules of our own say is not among them."""
    if "$ref" in part:
        return values_of(schema()["$defs"][part["$ref"].rpartition("/")[2]], depth - 1)
    if "enum" in part or "const" in part:
        return st.sampled_from(part.get("enum") or [part["const"]])
    if "anyOf" in part:
        return st.one_of([values_of(one, depth) for one in part["anyOf"]])
    if part.get("type") == "array":
        return st.lists(values_of(part.get("items", {}), depth - 1), max_size=4)
    if depth > 0 and "properties" in part:
        return st.fixed_dictionaries(
            {}, optional={k: values_of(v, depth - 1) for k, v in part["properties"].items()}
        )
    return _plain_of(part)


def _plain_of(part: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low, high = part.get("minimum", 0), part.get("maximum", 100)
    plain: dict[str, st.SearchStrategy[Any]] = {
        "integer": st.integers(low, low + 64) | st.sampled_from([1, 2, 4, 8, 16]),
        "number": st.floats(low, high, allow_nan=False) | st.integers(1, 9),
        "boolean": st.booleans(),
        "null": st.none(),
        "string": st.sampled_from(_TEXTS),
    }
    return plain.get(str(part.get("type")), odd_values())


def odd_values() -> st.SearchStrategy[Any]:
    """Anything that YAML can say."""
    leaves = (
        st.none()
        | st.booleans()
        | st.sampled_from(_NUMBERS)
        | st.sampled_from(_TEXTS)
        | st.text(max_size=12)
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys(), inner, max_size=4),
        max_leaves=8,
    )


def plans() -> st.SearchStrategy[dict[str, Any]]:
    """Plans as plain data: sections by the schema, and up to three neighbours of it."""
    properties = schema()["properties"]
    own = {
        name: values_of(properties[name])
        for name in SECTIONS
        if name not in {"workload", *_SETTINGS}
    }
    settings = values_of(schema()["$defs"]["TrainingConfig"])
    spaces = st.dictionaries(
        st.sampled_from(sorted(schema()["$defs"]["SearchSpace"]["properties"])),
        _domains(),
        max_size=4,
    )
    whole = st.fixed_dictionaries(
        {"workload": st.sampled_from(WORKLOADS)},
        optional={**own, "baseline": settings, "space": spaces},
    )
    changes = st.lists(
        st.tuples(
            st.sampled_from(["value", "key", "drop", "text"]), st.integers(0, 60), odd_values()
        ),
        max_size=3,
    )
    return st.tuples(whole, changes).map(lambda both: _changed(*both))


def documents() -> st.SearchStrategy[bytes]:
    """Plans as files: as JSON, which YAML takes, or with something done to the text."""
    texts = plans().map(_text)
    changed = st.tuples(texts, st.sampled_from(sorted(_DONE)), st.integers(0, 2000)).map(
        lambda all_: _DONE[all_[1]](all_[0], all_[2])
    )
    return (
        texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
        | changed
        | st.binary(max_size=60)
    )


def overrides() -> st.SearchStrategy[str]:
    """Arguments of --set."""
    paths = st.lists(_keys() | st.sampled_from(SECTIONS), min_size=1, max_size=3).map(".".join)
    return st.tuples(paths, odd_values()).map(
        lambda both: f"{both[0]}={json.dumps(both[1])}"
    ) | st.text(max_size=20)


def _keys() -> st.SearchStrategy[str]:
    known = sorted(
        {name for part in schema()["$defs"].values() for name in part.get("properties", {})}
    )
    return st.sampled_from([*known, *SECTIONS, "num_worker", "lr_", "LR", "", "a.b", "\U0001f600"])


def _domains() -> st.SearchStrategy[Any]:
    numbers = st.integers(-1, 300)
    ranges = st.fixed_dictionaries(
        {"low": numbers, "high": numbers}, optional={"log": st.booleans()}
    )
    words = st.sampled_from(
        ["bfloat16", "float16", "ddp", "dp", "single", "node", "tf32", None, True, False]
    )
    return numbers | words | st.lists(numbers | words, max_size=4) | ranges


def _changed(plan: dict[str, Any], changes: list[tuple[str, int, Any]]) -> dict[str, Any]:
    """The plan with one of its values, keys or parts changed at a time."""
    whole: dict[str, Any] = json.loads(json.dumps(plan))
    for how, place, value in changes:
        holders = [*_holders(whole)]
        holder = holders[place % len(holders)]
        if not holder:
            continue
        name = sorted(holder)[place % len(holder)]
        if how == "value":
            holder[name] = value
        elif how == "text":
            holder[name] = str(holder[name])
        elif how == "drop":
            del holder[name]
        else:
            holder[f"{name[:-1]}" or "x"] = holder.pop(name)
    return whole


def _holders(data: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [
        found for value in data.values() if isinstance(value, dict) for found in _holders(value)
    ]
    return [data, *inner]


def _text(plan: dict[str, Any]) -> str:
    """As YAML's flow style, a section a line."""
    lines = [f"{json.dumps(name)}: {_words(value)}" for name, value in plan.items()]
    return "\n".join(lines) + "\n"


def _words(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("NaN", ".nan").replace("-Infinity", "-.inf").replace("Infinity", ".inf")


def _inserted(what: bytes) -> Any:
    def put(text: str, place: int) -> bytes:
        raw = text.encode("utf-8", "surrogatepass")
        at = place % (len(raw) + 1)
        return raw[:at] + what + raw[at:]

    return put


_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
_DONE: Mapping[str, Any] = {
    "cut": lambda text, place: text.encode()[: place % (len(text) + 1)],
    "twice": lambda text, _: (text + text).encode(),
    "NUL": _inserted(b"\0"),
    "no UTF-8": _inserted(b"\xff\xfe"),
    "tab": _inserted(b"\n\t"),
    "tag": _inserted(b" !!python/object/apply:os.mkdir [unpickled] "),
    "alias": _inserted(b" *nobody "),
    "merge": _inserted(b"\n<<: {seed: 1}\n"),
    "mark of order": lambda text, _: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text, _: text.encode("utf-16"),
    "laughs": lambda text, _: (_LAUGHS + text).encode(),
    "deep": lambda text, place: (
        text + "space: " + "[" * (place * 20) + "]" * (place * 20)
    ).encode(),
    "long": lambda text, place: (text + "# " + "x" * (place * 200)).encode(),
    "two documents": lambda text, _: (text + "---\n" + text).encode(),
    "CRLF": lambda text, _: text.replace("\n", "\r\n").encode(),
}
"""What may have happened to a text, at a place."""
