"""The messages for a wrong configuration: one table of mistakes, rendered into golden/plan_errors.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import ConfigError
from autotune.files.plan_file import command_plan, parse_plan, read_plan
from tests.golden import assert_golden

WORKLOAD = "workload: {model: 'pkg.mod:model', dataset: 'pkg.mod:dataset'}\n"
COMMAND = "workload: {command: [python, train.py, --lr, '{lr}']}\n"

LAUGHS = "\n".join(
    [
        "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)),
    ]
)

# Texts below without a workload of their own stand after WORKLOAD.
IN_THE_FILE: dict[str, str] = {
    "nothing": "",
    "a comment alone": "# only a comment\n",
    "a list at the top": "- a\n- b\n",
    "an open mapping": "seed: 0\nspace: {a: 1\n",
    "a tab": "space:\n\tnum_workers: 1\n",
    "a control character": "seed: 0\ndevice: \x07\n",
    "an escape beyond Unicode": 'device: "\\UFFFFFFFF"',
    "a billion laughs": LAUGHS,
    "an alias to its own parent": "space: &a {num_workers: *a}",
    "deep lists": f"space:\n  {'[' * 100}",
    "deep items": f"space:\n  {'- ' * 100}",
    "no workload": "seed: 0",
    "a workload of options alone": "workload: {shuffle: true}",
    "a workload of nothing": "workload: {model: , dataset: , command: }",
    "a model alone": "workload: {model: 'a:b'}",
    "a dataset alone": "workload: {dataset: 'a:b'}",
    "a workload that is a list": "workload: [1]\n",
}
"""Whole files."""

BESIDE_A_WORKLOAD: dict[str, str] = {
    "a tag of Python": "device: !!python/object/apply:os.system ['true']",
    "a tag of one's own": "device: !mine 3",
    "a tag that does not fit": "device: !!int abc",
    "a number beyond 64 bits": f"seed: {'9' * 5000}",
    "keys of other sections": "n_trials: 4\nspace: {lr: [1, 2]}",
    "a key of the search": "method: tpe",
    "a key of DDP in the baseline": "baseline: {comm_hook: fp16}",
    "a misspelt key of DDP": "baseline: {strategy: ddp, ddp: {bucket_cap: 3}}",
    "a name of the plan": "name: mine",
    "a wrong space of DDP": """\
space:
  bucket_cap_mb: [25]
  ddp:
    bucket_cap_mb: [0]
    static_graph: maybe
    bucket_cap: 3
    comm_hook: {low: 1, high: 2}
    world_size: 2
""",
    "a space of DDP that is a list": "space: {ddp: [25]}",
    "prefetching without workers": "baseline:\n  prefetch_factor: 4\n",
    "compiling under dp": "baseline: {strategy: dp, world_size: 2, compile: true}",
    "yes for true": "baseline: {pin_memory: yes}",
    "off for false": "baseline: {pin_memory: off}",
    "a quoted number": "baseline: {num_workers: '4'}",
    "a text for a number": "baseline: {lr: fast}",
    "a range without an end": "space: {num_workers: {low: 1}}",
    "a misspelt choice": "space: {amp_dtype: [bf16]}",
    "all of the device in reserve": "objective: {reserve: 1}",
    "a key that is a number": "1: 1",
    "a key that is null": "~: 1",
    "a key that is a boolean": "true: 1",
    "a key that is a list": "[a]: 1",
    "a baseline that is a list": "baseline: [1]",
    "a search that is a list": "search: [1]",
    "a device that torch does not know": "device: 'gpu'",
    "a device without its number": "device: 'cuda:'",
    "a device with a letter for its number": "device: 'cuda:x'",
    "a CPU with a number": "device: 'cpu:0'",
    "a negative seed": "seed: -1",
    "a seed of 33 bits": "seed: 4294967296",
    "a boolean seed": "seed: true",
    "a misspelt method": "search: {method: grids}",
    "a misspelt key of the search": "search: {metod: tpe}",
    "a key of the workload in the search": "search: {sampler: tpe}",
    "a warm start that is a number": "search: {warm_start: 3}",
    "an empty warm start": "search: {warm_start: ''}",
    "a warm start with NUL": 'search: {warm_start: "a\\0"}',
    "a search that is a text": "search: tpe",
    "a misspelt executor": "executor: rai",
    "an executor that is a list": "executor: [ray]",
    "a misspelt key in the executor": "executor: {kind: ray, adress: a}",
    "an unknown layout of ranks": "executor: {kind: ray, ranks: even}",
    "an address that is a number": "executor: {kind: ray, address: 6379}",
    "an address without a port": "executor: {kind: ray, address: head}",
    "a layout of ranks on one machine": "executor: {ranks: spread}",
    "a device by its number on a cluster": "device: cuda:1\nexecutor: ray",
    "a device by its number and a misspelt executor": "device: cuda:1\nexecutor: rai",
}
"""Lines after WORKLOAD."""

REFERENCES = ("pkg.mod", "pkg.mod:", ":fn", "pkg:mod:fn", "pkg/mod:fn", "pkg.mod:fn()", ".py")
LOST = {"a file that is not there": "c.py:fn", "a file named by NUL": "\\0.py:fn"}

COMMANDS: dict[str, str] = {
    "a number among the words": "[python, train.py, --epochs, 3]",
    "a number": "3",
    "a script that is not there": "python lost.py",
    "a program that is not there": "./lost.sh",
    "a command line in one word": "['python train.py']",
}
"""Values of workload.command; tests/config/test_command.py has all other mistakes."""

OVERRIDES = (
    "a",
    "=3",
    "a..b=3",
    "seed.x=3",
    "seed=[",
    "seed=!!binary aGk=",
    "seed=-1",
    "baseline.num_worker=3",
)

EVERYTHING_AT_ONCE = """\
workload:
  modle: pkg.mod:model
  dataset: pkg.mod:dataset
baseline: {micro_batch_size: 0, amp_dtype: bf16}
space:
  num_worker: 3
  num_workers: {low: 5, high: 2}
budget: {n_trials: 2.0}
baseline: {}
zzz: 1
"""

WITH_A_COMMAND = """\
workload:
  command: python train.py
  model: pkg.mod:model
  loss:
  shuffle: true
  multiprocessing_context: spawn
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for x.yaml; the working directory is another, with a train.py."""
    working = tmp_path / "working"
    working.mkdir()
    (working / "train.py").touch()
    monkeypatch.chdir(working)
    return tmp_path


def problems_of(folder: Path, text: str, *overrides: str) -> list[str]:
    path = folder / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_plan(path, overrides)
    return list(caught.value.problems)


def test_each_mistake_has_its_message(folder: Path) -> None:
    """Each is found at its place, and a message is rule, value and remedy."""
    found: dict[str, list[str]] = {
        name: problems_of(folder, text) for name, text in IN_THE_FILE.items()
    }
    for name, text in BESIDE_A_WORKLOAD.items():
        found[name] = problems_of(folder, f"{WORKLOAD}{text}")
    for target in REFERENCES:
        text = f"workload: {{dataset: 'pkg.mod:fn', model: '{target}'}}"
        found[f"a reference of another form: {target}"] = problems_of(folder, text)
    for name, target in LOST.items():
        found[f"a reference to {name}"] = problems_of(
            folder, f'workload: {{dataset: "a:b", model: "{target}"}}'
        )
    for name, command in COMMANDS.items():
        found[f"a command: {name}"] = problems_of(folder, f"workload:\n  command: {command}")
    found["a command with a workload's parts"] = problems_of(
        folder, WITH_A_COMMAND, "workload.drop_last=true"
    )
    found["a command on a cluster"] = problems_of(folder, f"{COMMAND}executor: ray")
    for override in OVERRIDES:
        found[f"--set {override}"] = problems_of(folder, f"{WORKLOAD}seed: 1", override)
    found["a file and overrides with many mistakes"] = problems_of(
        folder, EVERYTHING_AT_ONCE, "budget.timeout=3", "nonsense"
    )
    with pytest.raises(ConfigError) as typed:
        command_plan(["python", "lost it.py", "x" * 100], ["workload.loss=a:b", "zzz"])
    (folder / "bytes.yaml").write_bytes(b"seed: \xff\xfe")
    for name in ("none.yaml", "working", "bytes.yaml"):
        with pytest.raises(ConfigError) as unread:
            read_plan(folder / name)
        found[f"the path {name}"] = list(unread.value.problems)
    found["a typed command"] = list(typed.value.problems)
    with pytest.raises(ConfigError) as called:
        parse_plan(
            {"workload": {"model": object, "dataset": list}, "space": {"comm_hook": ["fp16"]}},
            name="x",
        )
    found["a key of DDP in a call's space"] = list(called.value.problems)

    lines = []
    for name, problems in found.items():
        assert problems
        assert all(problem and problem.isprintable() for problem in problems)
        lines.append(f"{name}\n")
        lines += [
            f"  {problem.replace(f'{folder}/', '').replace(str(folder), '.')}\n"
            for problem in problems
        ]
    assert_golden(Path(__file__).parent / "golden" / "plan_errors.txt", "".join(lines))
