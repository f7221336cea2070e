"""The command line: subcommands and their arguments, results on stdout, progress and errors on stderr, exit codes.

Comes in: arguments. Goes out: calls of `autotune.api`, and what they return in words or as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.errors import AutotuneError, ConfigError, RunFolderError
from autotune.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.config.plan import ExecutorKind, Plan
    from autotune.report.model import ReportModel


# What commands show: results on stdout, all else on stderr, and how they end.
#
# Comes in: text, or what draws on a console. Only click is imported at the top, as in autotune.cli.


FAILED = 1
"""Exit code of a command that has failed."""
_NOT_WELL = 4


def end_if(is_told: bool) -> None:
    """End with the code that --exit-code asks for, where there is something to tell."""
    if is_told:
        raise click.exceptions.Exit(_NOT_WELL)


def write(text: str) -> None:
    """Text on stdout."""
    show(lambda _: click.echo(text))


def show(draw: Callable[[Console], None]) -> None:
    """Draw on stdout; a reader that went away (`| head`) ends the command without a traceback."""
    from rich.console import Console

    try:
        draw(Console())
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at its end: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(FAILED) from None


def say(text: str) -> None:
    """Text on stderr; what a file or the user's code has put into it can't steer the terminal."""
    from autotune.report.words import without_controls

    click.echo(without_controls(text), err=True)


# What a subcommand is given: a CONFIG, or after `--` the command of a training script, as one Plan.
#
# Comes in: the arguments of `run`, `check`, `diagnose` and `apply`. Goes out: a Plan, or the
# command's words as they were typed; wrong usage is click's UsageError. Only click is imported at
# the top, as in autotune.cli.


EXPORT_TARGETS = (
    *("hf", "accelerate", "lightning", "deepspeed", "torchrun"),
    *("timm", "axolotl", "ultralytics", "composer"),
)
"""As autotune.export has them, which help must not wait for."""
FILE_KINDS = ("hf", "accelerate", "deepspeed", "axolotl")
"""The same for files that are read."""

_SET_HELP = "Set a value in place of CONFIG's, or of a default; may be repeated."
_FROM_HELP = (
    "Begin with what a framework's own file says: hf (TrainingArguments as JSON), accelerate "
    "(YAML), deepspeed (JSON) "
    "or axolotl (YAML). CONFIG's own baseline and --set win over it."
)
_EXECUTOR_HELP = "Run trials on this machine, or on those of a Ray cluster."


class BeforeCommand(click.Command):
    """Gives its function, as `words`, the command after `--`, which click alone would take for arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of click, with what stands before the `--` alone."""
        here = args.index("--") if "--" in args else len(args)
        ctx.params["words"] = tuple(args[here + 1 :])
        script = next(
            (word for word in args[:here] if word.endswith(".py") and "=" not in word), None
        )
        if script is not None and not ctx.resilient_parsing:
            raise click.UsageError(
                f"a command must stand after --, but got {script!r} before it; write -- python "
                f"{script}",
                ctx,
            )
        return super().parse_args(ctx, args[:here])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """As of click, and where the command stands."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def of_plan(command: Callable[..., None]) -> Callable[..., None]:
    """CONFIG or a command after `--`, and what overrides defaults, given to a function as a Plan."""

    @click.argument("config", required=False, type=click.Path(path_type=Path))
    @click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help=_SET_HELP)
    @click.option(
        "--from",
        "today",
        type=(click.Choice(FILE_KINDS), click.Path(path_type=Path)),
        metavar="KIND FILE",
        help=_FROM_HELP,
    )
    @click.option("--executor", type=click.Choice(["local", "ray"]), help=_EXECUTOR_HELP)
    @wraps(command)
    def with_plan(
        config: Path | None,
        words: tuple[str, ...],
        overrides: tuple[str, ...],
        executor: ExecutorKind | None,
        today: tuple[str, Path] | None,
        **options: Any,
    ) -> None:
        command(_plan(config, words, overrides, executor, today), **options)

    return with_plan


def _plan(
    config: Path | None,
    words: tuple[str, ...],
    overrides: tuple[str, ...],
    executor: ExecutorKind | None,
    today: tuple[str, Path] | None,
) -> Plan:
    """The Plan of CONFIG, or else of a command's words."""
    if config is None and not words:
        name = click.get_current_context().command_path
        raise click.UsageError(
            f"CONFIG, or a command after --, must be given: {name} -- python train.py"
        )
    if config is not None and words:
        raise click.UsageError(
            f"CONFIG and a command after -- can't both be given, but got {str(config)!r} and "
            f"{shlex.join(words)!r:.80}; leave CONFIG out, or write the command into it as "
            f"workload.command"
        )
    from autotune.files.plan_file import FROM_BESIDE_A_COMMAND, command_plan, read_plan

    if config is None:
        if today is not None:
            raise click.UsageError(f"{FROM_BESIDE_A_COMMAND}; leave --from out")
        return command_plan(words, overrides, executor=executor)
    if today is None:
        return read_plan(config, overrides, executor=executor)
    return _plan_from(config, overrides, executor, today)


def _plan_from(
    config: Path, overrides: tuple[str, ...], executor: ExecutorKind | None, today: tuple[str, Path]
) -> Plan:
    """The Plan of CONFIG over a framework's own file; what could not be read is told on stderr."""
    from autotune.files.plan_file import notes_of, read_plan, read_today

    found = read_today(*today)
    plan = read_plan(config, overrides, executor=executor, today=found)
    for told in notes_of(found, plan):
        click.echo(told, err=True)
    return plan


# The command line: arguments in, results on stdout, progress and errors on stderr, an exit code
# out.
#
# Only click and the exceptions are imported at the top, so that `--help` answers at once; each
# command imports what it needs. What a command does stands in autotune.api, and what it shows in
# autotune.report.


_INTERRUPT_NOTE = (
    "autotune.interrupt_note"  # key in click's context: what to say about an interrupted run
)


class _Cli(click.Group):
    """Turns the exceptions of every command into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except AutotuneError as error:
            say(f"error: {error}")
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            note = ctx.meta.get(_INTERRUPT_NOTE)
            say(note() if note else "interrupted")
            ctx.exit(130)  # 128 + SIGINT, as a shell counts it
        except Exception as error:  # noqa: BLE001 -- the last place that can tell a bug from an error of the user
            say(
                f"this is a bug in autotune {__version__}, please report it: "
                f"{type(error).__name__}: {error}"
            )
            say(traceback.format_exc().rstrip())
            ctx.exit(FAILED)


_as_json = click.option(
    "--json", "as_json", is_flag=True, help="Write a single JSON document to stdout."
)
_exit_code = click.option(
    "--exit-code", "by_exit_code", is_flag=True, help="Tell the answer by the exit code too."
)
_quiet = click.option("--quiet", is_flag=True, help="Show no progress.")


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find the training settings that train your PyTorch model fastest on this machine, by measuring.

    Exit codes: 0 done; 1 failed; 2 wrong usage or configuration; 3 nothing feasible; 4 what
    --exit-code asks for; 130 interrupted.
    """


@cli.command(cls=BeforeCommand)
@of_plan
@click.option(
    "--fresh",
    is_flag=True,
    help="Remove what an earlier search left in the run folder, and start anew.",
)
@_as_json
@_quiet
def run(plan: Plan, fresh: bool, as_json: bool, quiet: bool) -> None:
    """Search for the fastest settings as CONFIG says, and recommend them.

    In place of CONFIG, the command of a training script may be given as it is, after our own
    options: autotune run --set budget.timeout_s=300 -- python train.py --epochs 3
    """
    from autotune.api.search import run_plan
    from autotune.files.run_folder import new_run_dir
    from autotune.report.model import build_report

    run_dir = plan.run_dir or new_run_dir()
    go_on = "run the same command" if plan.run_dir else f"run it again with --set run_dir={run_dir}"
    if plan.run_dir is None and plan.workload.command is not None:
        go_on += " (before any --)"
    click.get_current_context().meta[_INTERRUPT_NOTE] = lambda: _interrupt_note(run_dir, go_on)
    result = run_plan(
        replace(plan, run_dir=run_dir), fresh=fresh, progress=False if quiet else "auto"
    )
    _show_report(build_report(result.summary, result.run_dir), as_json)


@cli.command(cls=BeforeCommand)
@of_plan
@_exit_code
def check(plan: Plan, by_exit_code: bool) -> None:
    """Train one step of CONFIG's workload, and show the machine and what would be searched.

    In place of CONFIG, the command of a training script may be given after --.

    With --exit-code it ends with 4 where the recommendation in run_dir is stale: found on another
    machine, or on this one before its driver, torch or cores changed.
    """
    from autotune.api.commands import check_plan
    from autotune.report.console import print_check

    found = check_plan(plan)
    space = found.space
    stale = found.stale
    show(lambda console: print_check(space.environment, space.facts, space, console, stale=stale))
    if by_exit_code and not found.has_recommendation:
        say("run_dir holds no recommendation that could be stale")
    end_if(by_exit_code and stale is not None)


@cli.command(cls=BeforeCommand)
@of_plan
@_as_json
@_quiet
@_exit_code
def diagnose(plan: Plan, as_json: bool, quiet: bool, by_exit_code: bool) -> None:
    """Say why the baseline of CONFIG is slow and what to do about it. Keeps no run folder.

    In place of CONFIG, the command of a training script may be given as it is, after our own
    options: autotune diagnose -- python train.py --epochs 3

    Takes under a minute, unless your own code takes long to build or to make a step: then it takes
    as long as measuring the baseline does, and other settings are not measured. With --exit-code it
    ends with 4 where anything but computing holds training up.
    """
    from autotune.api.diagnose import diagnose_plan

    found = diagnose_plan(plan, progress=False if quiet else "auto").diagnosis
    if as_json:
        write(found.model_dump_json(indent=2))
    else:
        from autotune.report.diagnosis import print_diagnosis

        show(lambda console: print_diagnosis(found, console))
    end_if(by_exit_code and found.verdict not in {"compute", "unknown"})


@cli.command(cls=BeforeCommand)
@click.argument("recommended", type=click.Path(path_type=Path))
@click.option(
    "--print", "only_print", is_flag=True, help="Show what would be run, and run nothing."
)
def apply(recommended: Path, words: tuple[str, ...], only_print: bool) -> None:
    """Run a training script to its end with the settings in RECOMMENDED: a recommended.yaml or a run folder.

    The command stands after our own options: autotune apply runs/mine -- python train.py --epochs 3
    """
    if not words:
        raise click.UsageError(
            "the command that trains must be given after --: autotune apply runs/mine -- python "
            "train.py"
        )
    from autotune.api.commands import apply_command

    apply_command(recommended, words, only_print=only_print)


@cli.command()
@click.argument("recommended", type=click.Path(path_type=Path))
@click.option(
    "--to", "target", required=True, type=click.Choice(EXPORT_TARGETS), help="The framework."
)
@_as_json
def export(recommended: Path, target: str, as_json: bool) -> None:
    """Write the settings in RECOMMENDED, a recommended.yaml or a run folder, as another framework takes them.

    The text goes to stdout, what it does not carry and where the framework differs by itself to
    stderr: autotune export runs/mine --to hf > training_args.json
    """
    from autotune.api.commands import export_json, export_remarks, export_run

    found = export_run(recommended, target)
    if as_json:
        write(export_json(found))
        return
    write(found.text.removesuffix("\n"))
    for remark in export_remarks(found):
        say(remark)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("autotune.yaml"))
def init(path: Path) -> None:
    """Write a commented configuration to start from (PATH: autotune.yaml)."""
    starter = resources.files("autotune.files").joinpath("starter.yaml").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter.replace("autotune.yaml", str(path)))
    except FileExistsError:
        raise ConfigError(
            f"{path}: exists already and is not overwritten; give another path"
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path}: can't be written ({getattr(error, 'strerror', None) or error})"
        ) from None
    write(
        f"Wrote {path}. Next:\n"
        "  1. set workload.model and workload.dataset to your own functions, or workload.command "
        "to what you type\n"
        "  2. set baseline to what you train with today\n"
        f"  3. autotune check {path}\n"
        f"  4. autotune run {path}"
    )


@cli.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@_as_json
def report(run_dir: Path, as_json: bool) -> None:
    """Show the result of the search in RUN_DIR once more, and write its report.md and report.html anew."""
    was_collecting = gc.isenabled()
    # Nothing of 2,000 trials can be let go before the end; looking for what can takes a tenth of
    # the time.
    gc.disable()
    try:
        from autotune.api.commands import open_report, rewrite_reports

        found = open_report(run_dir)
        try:
            if not as_json:
                _show_report(found, as_json)
        finally:  # also where the reader went away
            found, remark = rewrite_reports(found, run_dir)
        if as_json:  # which says what files there are
            _show_report(found, as_json)
    finally:
        if was_collecting:
            gc.enable()
    if remark:
        say(remark)


@cli.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@_as_json
@_exit_code
def compare(first: Path, second: Path, as_json: bool, by_exit_code: bool) -> None:
    """Show what differs between the searches in the run folders FIRST and SECOND, and whether by more than noise.

    They may be from two machines, from two versions of anything, or from before and after a change
    of the dataset. With --exit-code it ends with 4 where the rate of the baseline or of what is
    recommended differs by more than noise, or only one of them has it.
    """
    from autotune.api.commands import compare_runs

    found = compare_runs(first, second)
    if as_json:
        write(found.model_dump_json(indent=2))
    else:
        from autotune.report.comparison import print_comparison

        show(lambda console: print_comparison(found, console))
    end_if(by_exit_code and found.is_changed)


@cli.command()
@_as_json
def env(as_json: bool) -> None:
    """Show the machine as trials see it."""
    from autotune.api.commands import environment

    here = environment()
    if as_json:
        write(
            json.dumps({**here.model_dump(mode="json"), "fingerprint": here.fingerprint}, indent=2)
        )
        return
    from autotune.report.console import print_environment

    show(lambda console: print_environment(here, console))


def main() -> None:
    """Run the `autotune` command; SIGTERM and a closed terminal end a search as Ctrl-C does, the best so far saved."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    cli(prog_name="autotune")


def _interrupt_note(run_dir: Path, go_on: str) -> str:
    if (run_dir / "recommended.yaml").is_file():
        return (
            f"interrupted; the best so far is in {run_dir / 'recommended.yaml'}; {go_on} to go on"
        )
    return f"interrupted before anything could be recommended; {go_on} to go on"


def _show_report(report: ReportModel, as_json: bool) -> None:
    if as_json:
        from autotune.report.json_document import summary_json

        write(summary_json(report))
        return
    from autotune.report.console import print_summary

    show(lambda console: print_summary(report, console))
