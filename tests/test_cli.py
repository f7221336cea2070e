from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml
from click.testing import CliRunner, Result

import autotune
from autotune.api import commands, diagnose, search
from autotune.cli import cli
from autotune.config.environment import Environment
from autotune.config.plan import Executor, ExecutorKind, Plan
from autotune.config.training_config import TrainingConfig
from autotune.errors import ConfigError, LauncherError, NothingFeasibleError, WorkloadError
from autotune.files import run_folder
from autotune.report import console as terminal
from autotune.report import diagnosis, json_document, model

CONFIG = "workload: {model: 'pkg.mod:model', dataset: 'pkg.mod:dataset'}\nrun_dir: out\n"
ENVIRONMENT = Environment(
    device="cpu",
    device_kind="cpu",
    device_name="A processor",
    device_memory_bytes=2**34,
    device_count=1,
    native_amp_dtypes=("float32", "bfloat16"),
    driver=None,
    cores=2,
    ram_bytes=2**34,
    platform="Linux",
    python="3.11.9",
    torch="2.13.0",
    cuda=None,
    versions={},
)


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG, encoding="utf-8")


_FUNCTIONS = {
    "run_plan": search,
    "open_report": commands,
    "rewrite_reports": commands,
    "check_plan": commands,
    "environment": commands,
    "diagnose_plan": diagnose,
    "new_run_dir": run_folder,
}
"""What commands call, and the module that they import it from."""


class FakeApi:
    """An api without machine, trials or torch: a function that a test assigns takes the true one's place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.__dict__["put"] = monkeypatch.setattr

    def __setattr__(self, name: str, function: Callable[..., Any]) -> None:
        self.__dict__["put"](_FUNCTIONS[name], name, function)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    return FakeApi(monkeypatch)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that say what they were given."""

    def print_summary(report: Any, console: Any) -> None:
        console.print("{} in {}".format(*report))

    def print_check(
        environment: Any, facts: Any, space: Any, console: Any, *, stale: str | None
    ) -> None:
        console.print(f"{environment} {facts} {space} {stale}")

    monkeypatch.setattr(model, "build_report", lambda summary, run_dir: (summary, str(run_dir)))
    monkeypatch.setattr(json_document, "summary_json", json.dumps)
    monkeypatch.setattr(terminal, "print_summary", print_summary)
    monkeypatch.setattr(terminal, "print_check", print_check)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="autotune")


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def run_process(
    *arguments: str, code: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The command line (or code) in a process of its own, which imports this tree."""
    environment = {**os.environ, "PYTHONPATH": str(Path(autotune.__file__).parents[1])}
    start = [sys.executable, *(("-c", code) if code else ("-m", "autotune")), *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(start, text=True, env=environment, timeout=60, check=False, **options)


# Starting


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_waits_for_no_heavy_module(arguments: list[str]) -> None:
    code = """
import sys
from autotune.cli import main
try:
    main()
finally:
    print(sorted({"torch", "optuna", "pydantic", "yaml", "numpy", "rich"} & set(sys.modules)), file=sys.stderr)
"""
    done = run_process(*arguments, code=code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "autotune" in done.stdout


def test_python_dash_m_is_the_command() -> None:
    assert run_process("--version").stdout == f"autotune, version {autotune.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["run"], ["no-such-command"], ["run", "x.yaml", "--no-such-option"], ["report"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")


# run


def test_run_hands_the_plan_on_and_shows_the_summary(api: Any, shown: None) -> None:
    calls = []

    def run_plan(plan: Plan, **options: Any) -> SimpleNamespace:
        calls.append((plan, options))
        return SimpleNamespace(summary="summary", run_dir=Path("out"))

    api.run_plan = run_plan
    result = call("run", "x.yaml", "--set", "budget.n_trials=3", "--set", "seed=4", "--fresh")
    assert (result.exit_code, result.stdout) == (0, "summary in out\n")
    ((plan, options),) = calls
    assert (plan.budget.n_trials, plan.seed, plan.run_dir) == (3, 4, Path("out"))
    assert options == {"fresh": True, "progress": "auto"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a: rule", "b: rule"), 2),
        (WorkloadError("the step fails"), 2),
        (NothingFeasibleError("nothing fits"), 3),
        (LauncherError("no process"), 1),
    ],
)
def test_an_error_is_told_on_stderr_with_its_exit_code(
    api: Any, error: Exception, code: int
) -> None:
    api.run_plan = raising(error)
    result = call("run", "x.yaml", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"error: {error}\n")


def test_a_wrong_configuration_exits_with_2_before_anything_is_started() -> None:
    result = call("run", "x.yaml", "--set", "baseline.num_worker=3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'num_workers'" in result.stderr


def test_any_other_exception_is_called_a_bug_with_its_traceback(api: Any) -> None:
    api.run_plan = raising(KeyError("lost"))
    result = call("run", "x.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    first = result.stderr.splitlines()[0]
    assert autotune.__version__ in first
    assert first.endswith("KeyError: 'lost'")
    assert "Traceback" in result.stderr


def test_an_interrupted_run_names_the_best_so_far(api: Any) -> None:
    api.run_plan = raising(KeyboardInterrupt())
    result = call("run", "x.yaml")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.startswith("interrupted")
    assert "recommended.yaml" not in result.stderr
    Path("out").mkdir()
    Path("out/recommended.yaml").touch()
    assert "out/recommended.yaml" in call("run", "x.yaml").stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_as_ctrl_c_does(name: str) -> None:
    code = f"""
import os, signal, sys, types
signal.signal(signal.{name}, signal.SIG_DFL)  # it may be ignored around these tests, as by nohup
from autotune.cli import main

def run_plan(plan, **options):
    plan.run_dir.mkdir()
    (plan.run_dir / "recommended.yaml").touch()
    os.kill(os.getpid(), signal.{name})
    signal.pause()

sys.modules["autotune.api.search"] = types.SimpleNamespace(run_plan=run_plan)
main()
"""
    done = run_process("run", "x.yaml", code=code)
    assert (done.returncode, done.stdout) == (130, "")
    assert "out/recommended.yaml" in done.stderr
    assert "Traceback" not in done.stderr


# diagnose


def test_diagnose_hands_the_plan_on_and_shows_the_answer(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def diagnose_plan(plan: Plan, **options: Any) -> SimpleNamespace:
        calls.append((plan.baseline.num_workers, options))
        return SimpleNamespace(diagnosis=None)

    api.diagnose_plan = diagnose_plan
    monkeypatch.setattr(
        diagnosis,
        "print_diagnosis",
        lambda found, console, is_full: console.print(f"launch-bound, {is_full}"),
    )
    monkeypatch.setattr(json_document, "diagnosis_json", lambda found: '{"verdict": "launch"}')
    assert (
        call("diagnose", "x.yaml", "--set", "baseline.num_workers=3", "--quiet").stdout
        == "launch-bound, False\n"
    )
    assert call("diagnose", "x.yaml", "--full").stdout == "launch-bound, True\n"
    assert json.loads(call("diagnose", "x.yaml", "--json").stdout) == {"verdict": "launch"}
    assert calls == [(3, {"progress": False}), *2 * [(0, {"progress": "auto"})]]


# The executor


@pytest.fixture
def plans(api: Any, shown: None, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What was asked of the api, which answers with nothing; a train.py lies in the working directory."""
    found: list[Plan] = []

    def answer(plan: Plan, **_: Any) -> SimpleNamespace:
        found.append(plan)
        space = SimpleNamespace(environment="", facts="")
        return SimpleNamespace(summary="", run_dir="", space=space, stale=None, diagnosis="")

    api.run_plan = api.check_plan = api.diagnose_plan = answer
    monkeypatch.setattr(diagnosis, "print_diagnosis", lambda found, console, is_full: None)
    Path("train.py").touch()
    return found


@pytest.mark.parametrize("command", ["run", "check", "diagnose"])
def test_executor_reaches_the_plan(plans: list[Plan], command: str) -> None:
    spread = "executor: {kind: ray, address: 'a:1', ranks: spread}"
    for arguments in ([], ["--executor", "ray"], ["--executor", "local"]):
        assert call(command, "x.yaml", *arguments).exit_code == 0
        Path("x.yaml").write_text(CONFIG + spread, encoding="utf-8")
    alone, clustered, last = (plan.executor for plan in plans)
    assert alone == last == Executor()
    assert clustered == Executor(kind="ray", address="a:1", ranks="spread")


def test_only_kinds_of_executor_are_offered() -> None:
    result = call("run", "x.yaml", "--executor", "slurm")
    assert (result.exit_code, result.stdout) == (2, "")
    for kind in get_args(ExecutorKind):
        assert f"'{kind}'" in result.stderr


# A command in place of CONFIG


@pytest.mark.parametrize("name", ["run", "check", "diagnose"])
def test_what_stands_after_two_dashes_is_the_workload_as_it_is(
    plans: list[Plan], name: str
) -> None:
    ours = ["--set", "baseline.lr=0.1", "--set", "budget.timeout_s=60", "--set", "run_dir=runs/x"]
    theirs = ["python", "train.py", "--set", "a=b", "--help", "-h", "--", "x.yaml", "{lr}"]
    assert call(name, *ours, "--", *theirs).exit_code == 0
    (plan,) = plans
    assert plan.workload.command == tuple(theirs)
    assert (plan.name, plan.baseline.lr, plan.budget.timeout_s) == ("train.py", 0.1, 60)
    assert plan.run_dir == Path("runs/x")


@pytest.mark.parametrize("name", ["run", "check", "diagnose"])
def test_framework_file_below_config(plans: list[Plan], name: str) -> None:
    Path("args.json").write_text(
        '{"per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.1}'
    )
    done = call(name, "--from", "hf", "args.json", "--set", "baseline.lr=0.5", "x.yaml")
    assert done.exit_code == 0, done.stderr
    assert (plans[0].baseline.micro_batch_size, plans[0].baseline.lr) == (4, 0.5)
    assert any({"args.json:", "optim:"} <= set(line.split()) for line in done.stderr.splitlines())


def test_a_file_of_a_framework_is_refused_beside_a_command(plans: list[Plan]) -> None:
    Path("args.json").write_text("{}")
    done = call("run", "--from", "hf", "args.json", "--", "python", "train.py")
    assert (done.exit_code, plans) == (2, [])
    assert "--from" in done.stderr


def test_a_file_of_a_framework_that_is_wrong_exits_with_2() -> None:
    Path("args.json").write_text("{")
    done = call("run", "--from", "hf", "args.json", "x.yaml")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: args.json: ")


def test_options_of_ours_stand_before_the_two_dashes(api: Any, plans: list[Plan]) -> None:
    options: list[Any] = []

    def run_plan(plan: Plan, **given: Any) -> SimpleNamespace:
        options.append((plan.workload.command, given))
        return SimpleNamespace(summary="s", run_dir=Path("out"))

    api.run_plan = run_plan
    assert (
        call("run", "--fresh", "--quiet", "--json", "--", "python", "train.py", "--fresh").stdout
        == '["s", "out"]\n'
    )
    assert call("run", "--", "python", "train.py", "--quiet").exit_code == 0
    assert options == [
        (("python", "train.py", "--fresh"), {"fresh": True, "progress": False}),
        (("python", "train.py", "--quiet"), {"fresh": False, "progress": "auto"}),
    ]


@pytest.mark.parametrize("name", ["run", "diagnose"])
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "autotune {name} -- python train.py\n"),
        (["--"], "autotune {name} -- python train.py\n"),
        (["x.yaml", "--", "python", "train.py"], "'x.yaml' and 'python train.py'"),
        (["python", "train.py", "--epochs", "3"], "-- python train.py\n"),
        (["--", "python", "-c", "pass"], "workload.command: "),
        (["--", "python", "lost.py"], "error: -- python lost.py: workload.command: "),
        (["--", "python", "train.py", "{num_worker}"], "{num_workers}"),
        (["--executor", "ray", "--", "python", "train.py"], "executor: "),
        (["--set", "workload.shuffle=false", "--", "python", "train.py"], "workload: "),
    ],
)
def test_wrong_command_exits_with_2(
    plans: list[Plan], name: str, arguments: list[str], told: str
) -> None:
    result = call(name, *arguments)
    assert (result.exit_code, result.stdout, plans) == (2, "", [])
    assert told.replace("{name}", name) in result.stderr


def test_command_in_config(plans: list[Plan]) -> None:
    assert call("run", "x.yaml", "--").exit_code == 0
    Path("x.yaml").write_text("workload: {command: [python, train.py]}", encoding="utf-8")
    assert call("diagnose", "x.yaml").exit_code == 0
    assert [plan.workload.command for plan in plans] == [None, ("python", "train.py")]


def test_interrupted_run_names_its_folder(api: Any, plans: list[Plan]) -> None:
    api.run_plan, api.new_run_dir = raising(KeyboardInterrupt()), lambda: Path("runs/new")
    command = ["--", "python", "train.py"]
    for arguments in (["x.yaml", "--set", "run_dir="], command):
        result = call("run", *arguments)
        assert (result.exit_code, "--set run_dir=runs/new" in result.stderr) == (130, True)
    assert "--set" not in call("run", "--set", "run_dir=runs/x", *command).stderr


@pytest.mark.parametrize("name", ["run", "check", "diagnose", "apply"])
def test_help_shows_where_a_command_stands(name: str) -> None:
    result = call(name, "--help")
    assert (result.exit_code, "[-- COMMAND...]" in result.stdout) == (0, True)


def test_apply_hands_the_command_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def apply_command(path: Path, command: tuple[str, ...], *, only_print: bool) -> None:
        calls.append((path, command, only_print))

    monkeypatch.setitem(
        sys.modules, "autotune.api.commands", SimpleNamespace(apply_command=apply_command)
    )
    assert call("apply", "runs/x", "--", "python", "train.py", "--print").exit_code == 0
    assert (
        call("apply", "--print", "runs/x/recommended.yaml", "--", "torchrun", "a.py").exit_code == 0
    )
    assert calls == [
        (Path("runs/x"), ("python", "train.py", "--print"), False),
        (Path("runs/x/recommended.yaml"), ("torchrun", "a.py"), True),
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["runs/x"], " after --"),
        (["runs/x", "--"], " after --"),
        (["--", "python", "train.py"], "'RECOMMENDED'"),
        (["runs/x", "python", "train.py"], "'train.py'"),
    ],
)
def test_apply_needs_both_settings_and_a_command(arguments: list[str], told: str) -> None:
    result = call("apply", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


# init, check, report, env


def test_export_streams() -> None:
    Path("recommended.yaml").write_text(
        yaml.safe_dump({"format": 1, "settings": TrainingConfig(lr=0.5).model_dump()})
    )
    done = call("export", "recommended.yaml", "--to", "hf")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == TrainingConfig(lr=0.5).to("hf").text
    assert " lr_scheduler_type: " in done.stderr
    document = call("export", "recommended.yaml", "--to", "timm", "--json")
    assert json.loads(document.stdout)["settings"]["lr"] == 0.5
    assert document.stderr == ""


def test_export_offers_the_targets_that_there_are() -> None:
    done = call("export", "recommended.yaml", "--to", "keras")
    assert done.exit_code == 2
    assert "'composer'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "path"), [([], "autotune.yaml"), (["mine.yaml"], "mine.yaml")]
)
def test_init_writes_a_configuration_and_what_to_edit(arguments: list[str], path: str) -> None:
    result = call("init", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "workload.model" in result.stdout
    for text in (result.stdout, Path(path).read_text(encoding="utf-8")):
        assert f"autotune check {path}" in text


@pytest.mark.parametrize(
    ("path", "reason"),
    [("x.yaml", "exists already"), ("no/such/folder/x.yaml", "can't be written")],
)
def test_init_refuses(path: str, reason: str) -> None:
    result = call("init", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}: {reason}" in result.stderr
    assert Path("x.yaml").read_text(encoding="utf-8") == CONFIG


def test_check_shows_what_the_api_found(api: Any, shown: None) -> None:
    class Space(SimpleNamespace):
        def __str__(self) -> str:
            return "space"

    api.check_plan = lambda plan: SimpleNamespace(
        space=Space(environment=plan.name, facts=plan.seed), stale="old"
    )
    result = call("check", "x.yaml", "--set", "seed=5")
    assert (result.exit_code, result.stdout.split()) == (0, ["x", "5", "space", "old"])


@pytest.mark.parametrize(("stale", "code"), [("old", 4), (None, 0)])
def test_check_tells_by_its_exit_code_that_a_recommendation_is_stale(
    stale: str | None, code: int, api: Any, shown: None
) -> None:
    space = SimpleNamespace(environment="", facts="")
    api.check_plan = lambda plan: SimpleNamespace(space=space, stale=stale, has_recommendation=True)
    assert call("check", "x.yaml", "--exit-code").exit_code == code
    api.check_plan = lambda plan: SimpleNamespace(space=space, stale=None, has_recommendation=False)
    missing = call("check", "x.yaml", "--exit-code")
    assert missing.exit_code == 0
    assert missing.stderr.startswith("run_dir ")
    assert call("check", "x.yaml").exit_code == 0


@pytest.mark.parametrize(("verdict", "code"), [("data_cpu", 4), ("launch", 4), ("compute", 0)])
def test_diagnose_exit_code(
    verdict: str, code: int, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(verdict=verdict)
    api.diagnose_plan = lambda plan, **_: SimpleNamespace(diagnosis=found)
    monkeypatch.setattr(
        diagnosis, "print_diagnosis", lambda found, console, is_full: console.print(found.verdict)
    )
    monkeypatch.setattr(json_document, "diagnosis_json", lambda found: "{}")
    assert call("diagnose", "x.yaml", "--exit-code").exit_code == code
    assert call("diagnose", "x.yaml", "--exit-code", "--json").exit_code == code
    assert call("diagnose", "x.yaml").exit_code == 0


def test_report_is_shown_before_its_files_are_written(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    def rewrite(found: Any, run_dir: Path) -> tuple[Any, str]:
        done.append("written")
        return f"{found} without page", "no plots"

    def as_json(report: object) -> str:
        done.append(report)
        return "{}"

    api.open_report = lambda run_dir: f"summary of {run_dir}"
    api.rewrite_reports = rewrite
    monkeypatch.setattr(terminal, "print_summary", lambda report, console: done.append(report))
    monkeypatch.setattr(json_document, "summary_json", as_json)
    assert call("report", "out").stderr == "no plots\n"
    assert call("report", "out", "--json").stdout == "{}\n"
    assert done == ["summary of out", "written", "written", "summary of out without page"]


def test_a_reader_of_a_report_that_went_away_costs_no_file(
    api: Any, shown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def gone(report: Any, console: Any) -> None:
        raise BrokenPipeError

    def rewrite(found: Any, run_dir: Path) -> tuple[Any, str]:
        written.append(run_dir)
        return found, ""

    api.open_report = lambda run_dir: ("summary", str(run_dir))
    api.rewrite_reports = rewrite
    monkeypatch.setattr(terminal, "print_summary", gone)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert call("report", "out").exit_code == 1
    assert written == [Path("out")]


def test_env(api: Any) -> None:
    api.environment = lambda: ENVIRONMENT
    content = json.loads(call("env", "--json").stdout)
    assert content.pop("fingerprint") == ENVIRONMENT.fingerprint
    assert Environment.model_validate(content) == ENVIRONMENT
    result = call("env")
    assert (result.exit_code, "A processor" in result.stdout) == (0, True)


def test_a_reader_that_went_away_gives_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_process("init", "new.yaml", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
