from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.plan import (
    Budget,
    Choices,
    Executor,
    ExecutorKind,
    IntRange,
    Method,
    Objective,
    Plan,
    Ref,
    SearchOptions,
)
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import ConfigError
from autotune.files import yaml_document
from autotune.files.plan_file import command_plan, parse_plan, read_plan

STARTER_YAML = resources.files("autotune.files").joinpath("starter.yaml").read_text("utf-8")
WORKLOAD = "workload: {model: 'pkg.mod:model', dataset: 'pkg.mod:dataset'}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """What is wrong with a text, the folder's name taken off."""
    with pytest.raises(ConfigError) as caught:
        read_plan(write(folder, text), overrides)
    assert all(problem and "\n" not in problem for problem in caught.value.problems)
    return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]


def only_problem(folder: Path, text: str, *overrides: str) -> str:
    (found,) = problems(folder, text, *overrides)
    return found


# A plan from a file


def test_defaults(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, WORKLOAD))
    folders = (str(tmp_path), str(Path.cwd()))
    assert (plan.name, plan.workload.model) == ("x", Ref(target="pkg.mod:model", folders=folders))
    assert plan == call(workload=plan.workload)


def test_every_key(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    plan = read_plan(
        write(
            tmp_path,
            """
workload:
  model: train.py:Net.build
  dataset: pkg.mod:fn
  loss: train.py:loss
  step: train.py:step
  optimizer: train.py:optimizer
  collate_fn: train.py:collate
  sampler: train.py:sampler
  batch_sampler: train.py:batch_sampler
  worker_init_fn: train.py:init
  shuffle: false
  drop_last: false
  multiprocessing_context: spawn
baseline: {micro_batch_size: 32, lr: 1.0e-3, num_workers: 2}
space:
  num_workers: {low: 0, high: 16}
  amp_dtype: [float32, bfloat16]
  compile: true
  world_size: [1, 2]
  strategy: [single, ddp]
  ddp: {bucket_cap_mb: [null, 50], gradient_as_bucket_view: true}
objective: {memory_limit: 20GiB, busy_weight: 0.02, global_batch: keep, max_batch_scale: 8, lr_rule: auto}
budget: {n_trials: 40, timeout_s: 300}
search: {method: tpe, warm_start: ~/runs/last}
device: cuda:1
run_dir: runs/quickstart
seed: 7
""",
        )
    )
    refs = [
        getattr(plan.workload, part)
        for part in ("model", "loss", "step", "optimizer", "collate_fn", "sampler")
    ]
    assert all(isinstance(ref, Ref) for ref in refs)
    assert plan.workload.multiprocessing_context == "spawn"
    assert (plan.workload.shuffle, plan.workload.drop_last) == (False, False)
    assert plan.baseline == TrainingConfig(micro_batch_size=32, lr=1e-3, num_workers=2)
    assert plan.space.given() == {
        "amp_dtype": Choices(values=("float32", "bfloat16")),
        "compile": Choices(values=(True,)),
        "ddp.bucket_cap_mb": Choices(values=(None, 50.0)),
        "ddp.gradient_as_bucket_view": Choices(values=(True,)),
        "num_workers": IntRange(low=0, high=16),
        "strategy": Choices(values=("single", "ddp")),
        "world_size": Choices(values=(1, 2)),
    }
    assert plan.objective.memory_limit == 20 * 2**30
    assert plan.budget == Budget(n_trials=40, timeout_s=300)
    assert plan.search == SearchOptions(method="tpe", warm_start=Path("~/runs/last"))
    assert (plan.device, plan.run_dir, plan.seed) == ("cuda:1", Path("runs/quickstart"), 7)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "1.e-3", "+1.0e-03"])
def test_numbers(tmp_path: Path, text: str) -> None:
    plan = read_plan(write(tmp_path, f"{WORKLOAD}baseline: {{lr: {text}}}\nseed: 010"))
    assert (plan.baseline.lr, plan.seed) == (1e-3, 10)


def test_empty_section(tmp_path: Path) -> None:
    path = write(tmp_path, f"{WORKLOAD}space:\nbudget:\n  # n_trials: 3\n")
    assert read_plan(path).budget == Budget()


def test_byte_order_mark(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, f"\ufeff{WORKLOAD}")).name == "x"


def test_anchors(tmp_path: Path) -> None:
    text = f"{WORKLOAD}space: {{num_workers: &few [0, 2], prefetch_factor: &more [2, 4], grad_accum_steps: *more}}"
    assert read_plan(write(tmp_path, text)).space.given()["grad_accum_steps"] == Choices(
        values=(2, 4)
    )


# Problems with the file


def test_pipe() -> None:
    read, write = os.pipe()
    os.write(write, WORKLOAD.encode())
    os.close(write)
    try:
        assert read_plan(Path(f"/dev/fd/{read}")).workload.model is not None
    finally:
        os.close(read)


def test_silent_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_document, "_LONGEST_WAIT_S", 0.01)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml.* 0 s"):
        read_plan(tmp_path / "pipe.yaml")


def test_endless_file() -> None:
    with pytest.raises(ConfigError, match="256 KiB"):
        read_plan(Path("/dev/zero"))


# References


def test_relative_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced_arguments, working = tmp_path / "configs", tmp_path / "work"
    (replaced_arguments / "sub").mkdir(parents=True)
    working.mkdir()
    (replaced_arguments / "sub" / "a.py").touch()
    (working / "b.py").touch()
    monkeypatch.chdir(working)
    path = write(replaced_arguments, "workload: {model: 'sub/a.py:fn', dataset: 'b.py:fn'}")
    assert read_plan(path).workload.dataset == Ref(
        target="b.py:fn", folders=(str(replaced_arguments), str(working))
    )
    path = write(replaced_arguments, "workload: {model: 'pkg.mod:fn', dataset: 'c.py:fn'}")
    with pytest.raises(ConfigError, match=f"'c.py' .* {replaced_arguments} or {working}"):
        read_plan(path)


def test_reference_too_long_for_a_path(tmp_path: Path) -> None:
    text = f"workload: {{dataset: 'pkg.mod:fn', model: '{'a' * 5000}.py:fn'}}"
    assert only_problem(tmp_path, text).startswith("x.yaml:1:35: workload.model: ")


# Overrides


def test_override_replaces_value(tmp_path: Path) -> None:
    path = write(tmp_path, f"{WORKLOAD}budget: {{n_trials: 4, timeout_s: 9}}")
    assert read_plan(path, ["budget.n_trials=7"]).budget == Budget(n_trials=7, timeout_s=9)


def test_override_makes_mappings(tmp_path: Path) -> None:
    overrides = [
        "space.num_workers={low: 0, high: 4}",
        "space.amp_dtype=[float32]",
        "baseline.lr=1e-4",
        "run_dir=a=b",
        "baseline.strategy=ddp",
        "baseline.ddp.static_graph=true",
        "space.ddp.bucket_cap_mb=[null, 50]",
    ]
    plan = read_plan(write(tmp_path, f"{WORKLOAD}space:\n"), overrides)
    assert plan.space.given()["num_workers"] == IntRange(low=0, high=4)
    assert (plan.baseline.lr, plan.run_dir) == (1e-4, Path("a=b"))
    assert plan.baseline.ddp == DdpConfig(static_graph=True)
    assert plan.space.given()["ddp.bucket_cap_mb"] == Choices(values=(None, 50.0))


def test_empty_override(tmp_path: Path) -> None:
    assert read_plan(write(tmp_path, f"{WORKLOAD}run_dir: a"), ["run_dir="]).run_dir is None


# A command


COMMAND = "workload: {command: [python, train.py, --lr, '{lr}']}\n"


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a train.py; configurations lie elsewhere."""
    folder = tmp_path / "working"
    folder.mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "[python, train.py, --lr, '{lr}']",
        "python train.py --lr {lr}",
        "|\n    python train.py \\\n      --lr {lr}\n",
    ],
)
def test_command(tmp_path: Path, working: Path, text: str) -> None:
    plan = read_plan(write(tmp_path, f"workload:\n  command: {text}"))
    assert plan.workload.command == ("python", "train.py", "--lr", "{lr}")
    assert plan.name == "x"
    assert (plan.workload.model, plan.workload.dataset, plan.workload.shuffle) == (None, None, True)


def test_placeholders(tmp_path: Path, working: Path) -> None:
    text = f"{COMMAND}baseline: {{lr: 0.1, num_workers: 2}}\nspace: {{num_workers: [0, 2]}}\n"
    plan = read_plan(write(tmp_path, text), ["workload.command=python train.py -j {num_workers}"])
    assert plan.workload.command == ("python", "train.py", "-j", "{num_workers}")
    assert plan.baseline.lr == 0.1


@pytest.mark.parametrize(
    "command",
    ["python train.py", "python -m lost", "python '{lr}.py'", "python -O lost.py", "sh x"],
)
def test_command_that_may_exist(tmp_path: Path, working: Path, command: str) -> None:
    assert read_plan(write(tmp_path, f'workload: {{command: "{command}"}}')).workload.command


def test_command_is_local(tmp_path: Path, working: Path) -> None:
    assert (
        read_plan(write(tmp_path, f"{COMMAND}executor: ray"), executor="local").executor
        == Executor()
    )
    with pytest.raises(ConfigError, match=r"executor: .*'ray'"):
        command_plan(["python", "train.py"], executor="ray")


def test_typed_command(working: Path) -> None:
    overrides = [
        "baseline.lr=0.1",
        "budget.timeout_s=60",
        "run_dir=runs/x",
        "search.warm_start=runs/y",
    ]
    plan = command_plan(("python", "train.py", "--a", "b c"), overrides)
    assert plan.workload.command == ("python", "train.py", "--a", "b c")
    assert (plan.name, plan.run_dir, plan.search.warm_start) == (
        "train.py",
        Path("runs/x"),
        Path("runs/y"),
    )
    assert (plan.baseline.lr, plan.budget.timeout_s) == (0.1, 60)
    assert command_plan(("python", "train.py")).baseline == TrainingConfig()


# The search


def test_starter_lists_methods() -> None:
    (line,) = [line for line in STARTER_YAML.splitlines() if "method:" in line]
    assert all(method in line for method in get_args(Method))


# The executor


def test_cluster_refuses_device_number(tmp_path: Path) -> None:
    text = f"{WORKLOAD}device: cuda:1\nexecutor: ray"
    assert only_problem(tmp_path, text).startswith("x.yaml:2:1: device: ")
    assert read_plan(write(tmp_path, text), ["device=cuda"]).device == "cuda"
    assert read_plan(write(tmp_path, text), executor="local").device == "cuda:1"


@pytest.mark.parametrize(
    ("text", "kind", "overrides", "executor"),
    [
        ("", "ray", [], Executor(kind="ray")),
        ("executor: {kind: ray, address: 'a:1', ranks: spread}", "local", [], Executor()),
        (
            "executor: {kind: ray, address: 'a:1', ranks: spread}",
            "ray",
            [],
            Executor(kind="ray", address="a:1", ranks="spread"),
        ),
        ("executor: {address: 'a:1'}", "ray", [], Executor(kind="ray", address="a:1")),
        ("", "ray", ["executor=local"], Executor()),
    ],
)
def test_executor_option(
    tmp_path: Path, text: str, kind: ExecutorKind | None, overrides: list[str], executor: Executor
) -> None:
    assert (
        read_plan(write(tmp_path, f"{WORKLOAD}{text}"), overrides, executor=kind).executor
        == executor
    )


# Whatever is written

_MODELS = (TrainingConfig, Objective, Budget, DdpConfig, Executor, SearchOptions)
_NAMES = sorted({name for model in _MODELS for name in model.model_fields})
_SECTION_NAMES = [*(field.name for field in fields(Plan)), "other"]
_MARKS = [": ", "\n", "  ", "- ", "|\n", ">\n", "---\n", "? ", "<<: ", "\t", "\\U", *"[]{}'\"#"]
_TAGS = ["&a ", "*a", "!!int ", "!!set ", "!x ", "%YAML 1.1\n"]
_WORDS = f"1 -0 1e999 .inf -.inf .nan true yes null ~ 0x 0o8 20GiB {'9' * 400}".split()
_TOKENS = st.sampled_from([*_NAMES, *_SECTION_NAMES, *_MARKS, *_TAGS, *_WORDS])
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [*f"inf nan 1e999 {'9' * 400}GiB bf16 a.py:b a:1 float32 ray".split(), 10**400]
    )
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*_NAMES, "low", "high", "log", "ddp"]) | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
_SECTIONS = st.dictionaries(
    st.sampled_from(_SECTION_NAMES),
    _VALUES | st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any")


def errors_in(call: Callable[[], object]) -> tuple[str, ...]:
    try:
        call()
    except ConfigError as error:
        assert error.problems  # noqa: PT017 -- most calls raise nothing
        return error.problems
    return ()


def read_whatever(path: Path, *overrides: str) -> None:
    for problem in errors_in(lambda: read_plan(path, overrides)):
        assert problem.isprintable()
        assert "Value error" not in problem
        assert "pydantic.dev" not in problem


@given(raw=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(folder: Path, raw: bytes) -> None:
    (folder / "x.yaml").write_bytes(raw)
    read_whatever(folder / "x.yaml")


@given(tokens=st.lists(_TOKENS, max_size=25))
def test_any_yaml(folder: Path, tokens: list[str]) -> None:
    read_whatever(write(folder, "".join(tokens)))
    read_whatever(write(folder, f"{WORKLOAD}{''.join(tokens)}"))


@given(sections=_SECTIONS)
def test_any_data(folder: Path, sections: dict[str, Any]) -> None:
    text = yaml.safe_dump(
        {"workload": {"model": "a:b", "dataset": "a:b"}, **sections}, sort_keys=False
    )
    read_whatever(write(folder, text))


@given(
    override=st.text()
    | st.lists(_TOKENS, max_size=8).map("".join).map(lambda text: f"space.num_workers={text}")
)
def test_any_override(folder: Path, override: str) -> None:
    read_whatever(write(folder, WORKLOAD), override)


@given(value=_VALUES, key=st.sampled_from(_SECTION_NAMES))
def test_any_call(value: Any, key: str) -> None:
    assert all(problem.startswith(key) for problem in errors_in(lambda: call(**{key: value})))


@given(command=_VALUES | st.lists(st.text(max_size=5)) | st.text())
def test_any_command(command: Any) -> None:
    told = errors_in(lambda: parse_plan({"workload": {"command": command}}, name="x"))
    assert all(problem.startswith("workload.") for problem in told)
    if isinstance(command, list):
        errors_in(lambda: command_plan([str(word) for word in command]))


# Python calls


def call(**arguments: Any) -> Plan:
    """The plan of a Python call."""
    return parse_plan({"workload": {"model": object, "dataset": list}, **arguments}, name="x")


def test_live_objects() -> None:
    model, dataset = object(), [1, 2]
    workload = parse_plan(
        {"workload": {"model": model, "dataset": dataset, "loss": None}}, name="x"
    ).workload
    assert workload.model is model
    assert workload.dataset is dataset
    assert workload.loss is None


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("device", "gpu", "gpu"),
        ("run_dir", "''", ""),
        ("workload", "{command: 'python -'}", {"command": "python -"}),
        ("workload", "{model: 'a:b'}", {"model": 1}),
        ("objective", "{memory_limit: 20 parsecs}", {"memory_limit": "20 parsecs"}),
        ("baseline", "{num_wokers: 2}", {"num_wokers": 2}),
        (
            "workload",
            "{model: 'a:b', dataset: 'a:b', shuffle: 1}",
            {"model": 1, "dataset": 1, "shuffle": 1},
        ),
    ],
)
def test_file_and_call_refuse_alike(tmp_path: Path, key: str, written: str, value: object) -> None:
    text = f"{key}: {written}\n" + ("" if key == "workload" else WORKLOAD)
    (in_call,) = errors_in(lambda: call(**{key: value}))
    place, _, in_file = only_problem(tmp_path, text).partition(" ")
    assert place.startswith("x.yaml:1:")
    assert in_file == in_call


@pytest.mark.parametrize("device", ["cuda:1", "xpu", "mps", "npu:1"])
def test_device(device: str) -> None:
    assert call(device=device).device == device


def test_any_mapping_is_a_model() -> None:
    assert call(baseline=MappingProxyType({"num_workers": 2})).baseline == TrainingConfig(
        num_workers=2
    )


def test_model_is_kept() -> None:
    config = TrainingConfig(num_workers=2)
    assert call(baseline=config).baseline is config


# The starter


def test_starter(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert read_plan(write(tmp_path, STARTER_YAML)).baseline == TrainingConfig()


def test_starter_command(tmp_path: Path, working: Path) -> None:
    (line,) = [line for line in STARTER_YAML.splitlines() if line.strip().startswith("# command:")]
    plan = read_plan(write(tmp_path, f"workload:\n{line.replace('# ', '', 1)}"))
    assert plan.workload.command == ("python", "train.py", "--lr", "{lr}")


def test_starter_uncommented(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    lines = [
        line.replace("# ", "", 1) if is_offer(line) else line for line in STARTER_YAML.splitlines()
    ]
    plan = read_plan(write(tmp_path, "\n".join(lines)))
    assert plan.workload.step is not None
    assert plan.space.given().keys() == {"num_workers", "amp_dtype", "compile"}
    assert (plan.objective.global_batch, plan.budget.n_trials) == ("keep", 40)
    assert plan.search == SearchOptions(method="model", warm_start=Path("runs/other"))


def is_offer(line: str) -> bool:
    word = line.strip().removeprefix("#").strip().partition(":")[0]
    known = {"space", "search", "device", *_NAMES, "loss", "step", "optimizer", "collate_fn"}
    return line.strip().startswith("# ") and word in known
