"""A process whose torch nobody has set: each line tells it what to set, and a child forked for that tells what it saw.

What torch begins with can't be had back once it is set: so each look needs a process of its own. Reads lines of
{"sets": [[name, value], ...], "enter": [context, ...]} and answers each with {"inside": ..., "after": ...}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch

from autotune.apply.precision import exact_matmuls, tf32_products

NODES = tuple(
    (backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")
)
CONTEXTS = {"tf32": tf32_products, "exact": exact_matmuls}


def readings() -> dict[str, Any]:
    """All that torch tells, by either interface."""
    private: Any = torch._C
    backends: Any = torch.backends
    found = {
        "/".join(node): private._get_fp32_precision_getter(*node)
        for node in (("generic", "all"), *NODES)
    }
    told: dict[str, Callable[[], object]] = {
        "get_float32_matmul_precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
        "cuda.matmul.fp32_precision": lambda: backends.cuda.matmul.fp32_precision,
        "cudnn.conv.fp32_precision": lambda: backends.cudnn.conv.fp32_precision,
    }
    return found | {name: _told(tell) for name, tell in told.items()}


def everything() -> list[dict[str, Any]]:
    """All that torch tells, now and whatever is set above: what a node holds itself shows so. Spoils the process."""
    private: Any = torch._C
    seen = [readings()]
    for everywhere in ("ieee", "tf32", "bf16"):
        private._set_fp32_precision_setter("generic", "all", everywhere)
        seen.append(readings())
    for cuda, mkldnn in product(("ieee", "tf32", "none"), ("ieee", "bf16")):
        private._set_fp32_precision_setter("cuda", "all", cuda)
        private._set_fp32_precision_setter("mkldnn", "all", mkldnn)
        seen.append(readings())
    for node in NODES:  # and the older settings by themselves
        private._set_fp32_precision_setter(*node, "ieee")
    seen.append(readings())
    return seen


def apply(name: str, value: Any) -> None:
    """Set something as a user would: a function's name, an attribute of torch.backends, or a node of the tree."""
    if name == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision(value)
    elif name.endswith("allow_tf32"):
        owner: Any = torch.backends
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    else:
        private: Any = torch._C
        private._set_fp32_precision_setter(*name.split("/"), value)


def answer(sets: list[tuple[str, Any]], enter: list[str]) -> dict[str, Any]:
    """What torch tells within the contexts and after them."""
    for name, value in sets:
        apply(name, value)
    with ExitStack() as stack:
        again = {name: CONTEXTS[name]() for name in enter}
        for name in enter:
            stack.enter_context(again[name])
        inside = readings()
    return {"inside": inside, "after": everything()}


def _told(tell: Callable[[], object]) -> object:
    try:
        return tell()
    except RuntimeError:
        return "raises"


def tell(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            tell(answer(**json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            tell({"status": status})


if __name__ == "__main__":
    main()
