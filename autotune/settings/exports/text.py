"""The texts of exports: JSON, YAML, and calls in Python.

Comes in: settings by a target's names. Goes out: text that the target reads. YAML is written by the library that the
targets read it with: `1e-05` without a dot is a text to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

__all__ = [
    "Code",
    "as_call",
    "as_comment",
    "as_json",
    "as_options",
    "as_yaml",
    "compile_call",
    "loader_call",
    "loader_remark",
    "nested",
    "optimizer_remark",
]


class Code(str):
    """A piece of Python that is written as it stands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping whose names have dots, as mappings within each other."""
    result: dict[str, Any] = {}
    for dotted, value in flat.items():
        *above, name = dotted.split(".")
        inner = result
        for key in above:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return result


def as_json(settings: Mapping[str, Any]) -> str:
    """A JSON file."""
    return json.dumps(settings, indent=2) + "\n"


def as_yaml(settings: Mapping[str, Any]) -> str:
    """A YAML file."""
    return yaml.safe_dump(dict(settings), sort_keys=False)


def as_call(name: str, arguments: Mapping[str, Any], *before: str) -> str:
    """A call in Python, a line an argument where it would be long; `before` stands first, as it is."""
    written = [*before, *(f"{key}={value!r}" for key, value in arguments.items())]
    line = f"{name}({', '.join(written)})"
    if len(line) <= 100:
        return line
    inner = (each.replace("\n", "\n    ") for each in written)  # of a call within this one
    return f"{name}(\n" + "".join(f"    {each},\n" for each in inner) + ")"


def loader_remark(max_tokens: int | None) -> str:
    """What stands beside the arguments of a DataLoader: it is the user's own, of which only these are known."""
    if max_tokens is not None:
        return f"your own DataLoader takes these, and your batch sampler, made with max_tokens={max_tokens}"
    return "your own DataLoader takes these; its sampler or shuffle, collate_fn and drop_last stay as they are"


def loader_call(loader: Mapping[str, Any], num_workers: int, worker_threads: int | None) -> str:
    """Arguments of a DataLoader as a call of dict; what limits its workers' threads is made by autotune itself."""
    if worker_threads is None:
        return as_call("dict", loader)
    config = as_call("autotune.TrainingConfig", {"num_workers": num_workers, "worker_threads": worker_threads})
    return as_call("dict", {**loader, "worker_init_fn": Code(f'{config}.dataloader_kwargs()["worker_init_fn"]')})


def compile_call(name: str, mode: str) -> str:
    """The call that compiles what has this name."""
    return as_call("torch.compile", {} if mode == "default" else {"mode": mode}, name)


def optimizer_remark(lr: float, *, is_fused: bool) -> str:
    """The arguments of an optimizer, which is the user's own."""
    return f"lr={lr!r}, fused=True" if is_fused else f"lr={lr!r}"


def as_comment(lines: Iterable[str]) -> str:
    """Lines behind #."""
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in text.splitlines())


def as_options(settings: Mapping[str, Any]) -> str:
    """Options of argparse by the names of its namespace: a flag where the value is True, none where it is False."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in settings.items()
        if value is not False
    ]
    return " ".join(words) + "\n"
