"""The `autotune` command: parse arguments, call `autotune.api`, and show what it returns.

Results go to stdout as text or JSON, progress and errors to stderr. Only click and the exceptions
are imported at the top, so that `--help` answers at once; each command imports what it needs.
"""

from __future__ import annotations

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


# Output and exit codes


FAILED = 1
"""Exit code of a command that failed."""
_NOT_WELL = 4  # the exit code of --exit-code
_INTERRUPTED = 130  # 128 + SIGINT, as a shell counts it


def end_if(is_not_well: bool) -> None:
    """Exit with the code of --exit-code if the answer is the one that it reports."""
    if is_not_well:
        raise click.exceptions.Exit(_NOT_WELL)


def write(text: str) -> None:
    """Write text to stdout."""
    show(lambda _: click.echo(text))


def show(draw: Callable[[Console], None]) -> None:
    """Draw on stdout; if the reader has gone (`| head`), exit without a traceback."""
    from rich.console import Console

    try:
        draw(Console())
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again when it exits: send that to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(FAILED) from None


def echo(text: str) -> None:
    """Write text to stderr, without control characters from files or the user's code."""
    from autotune.report.words import without_controls

    click.echo(without_controls(text), err=True)


# Arguments: a CONFIG, or the command of a training script after `--`, becomes a Plan


EXPORT_TARGETS = (
    *("hf", "accelerate", "lightning", "deepspeed", "torchrun"),
    *("timm", "axolotl", "ultralytics", "composer"),
)
"""Frameworks to export to; a copy of autotune.export's, whose import would slow down --help."""
FILE_KINDS = ("hf", "accelerate", "deepspeed", "axolotl")
"""Frameworks whose files --from reads; a copy too."""

_SET_HELP = "Override a value of CONFIG, e.g. budget.timeout_s=300. Repeatable."
_FROM_HELP = (
    "Take the baseline from a framework's file: hf or deepspeed (JSON), accelerate or axolotl "
    "(YAML). CONFIG and --set override it."
)
_EXECUTOR_HELP = "Run trials on this machine or on a Ray cluster."


class BeforeCommand(click.Command):
    """A click command that passes what follows `--` to its function unparsed, as `words`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments before `--`; keep those after it as they are."""
        here = args.index("--") if "--" in args else len(args)
        ctx.params["words"] = tuple(args[here + 1 :])
        for word in args[:here]:
            if word.endswith(".py") and "=" not in word and not ctx.resilient_parsing:
                raise click.UsageError(
                    f"a command must stand after --, but got {word!r} before it; write -- python "
                    f"{word}",
                    ctx,
                )
        return super().parse_args(ctx, args[:here])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return click's usage with the place of the command added."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def of_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a subcommand: parse CONFIG, or a command after `--`, and the overrides into its Plan."""

    @click.argument("config", required=False, type=click.Path(path_type=Path))
    @click.option("--set", "overrides", multiple=True, metavar="KEY.KEY=VALUE", help=_SET_HELP)
    @click.option(
        "--from",
        "current",
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
        current: tuple[str, Path] | None,
        **options: Any,
    ) -> None:
        command(_plan(config, words, overrides, executor, current), **options)

    return with_plan


def _plan(
    config: Path | None,
    words: tuple[str, ...],
    overrides: tuple[str, ...],
    executor: ExecutorKind | None,
    current: tuple[str, Path] | None,
) -> Plan:
    """Return the Plan of CONFIG, or else of a command.

    Raises:
        click.UsageError: Neither is given, or both are.
    """
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
    from autotune.files.plan_file import (
        FROM_NEEDS_NO_COMMAND,
        command_plan,
        notes_of,
        read_current,
        read_plan,
    )

    if config is None:
        if current is not None:
            raise click.UsageError(f"{FROM_NEEDS_NO_COMMAND}; leave --from out")
        return command_plan(words, overrides, executor=executor)
    if current is None:
        return read_plan(config, overrides, executor=executor)
    # on top of a framework's file, with notes of what was not read
    found = read_current(*current)
    plan = read_plan(config, overrides, executor=executor, current=found)
    for note in notes_of(found, plan):
        click.echo(note, err=True)
    return plan


# Subcommands: what they do is in autotune.api, what they show in autotune.report


_INTERRUPT_NOTE = "autotune.interrupt_note"
"""Key in click's context of a function that returns the message for an interrupted run."""


class _Cli(click.Group):
    """Turn the exceptions of every command into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except AutotuneError as error:
            echo(f"error: {error}")
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            note = ctx.meta.get(_INTERRUPT_NOTE)
            echo(note() if note else "interrupted")
            ctx.exit(_INTERRUPTED)
        except Exception as error:  # noqa: BLE001 -- the last place that can report a bug of ours as one
            echo(
                f"this is a bug in autotune {__version__}, please report it: "
                f"{type(error).__name__}: {error}"
            )
            echo(traceback.format_exc().rstrip())
            ctx.exit(FAILED)


_as_json = click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
_exit_code = click.option(
    "--exit-code", "by_exit_code", is_flag=True, help="Exit with 4 as described above, for CI."
)
_quiet = click.option("--quiet", is_flag=True, help="Show no progress.")


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Make PyTorch training faster: diagnose what is slow, and find the fastest settings by measuring.

    Start with: autotune diagnose -- python train.py

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 nothing fits in memory, 4 see --exit-code,
    130 interrupted.
    """


@cli.command(cls=BeforeCommand)
@of_plan
@click.option(
    "--fresh",
    is_flag=True,
    help="Delete the earlier search in the run folder and start again.",
)
@_as_json
@_quiet
def run(plan: Plan, fresh: bool, as_json: bool, quiet: bool) -> None:
    """Find the settings that train your model fastest.

    Give a CONFIG (see autotune init) or the command that trains:

    autotune run --set budget.timeout_s=300 -- python train.py

    Your settings and each candidate are measured in short, real training runs. The recommended
    settings are saved in run_dir; given again, it continues an interrupted search.
    """
    from autotune.api.search import run_plan
    from autotune.files.run_folder import new_run_dir
    from autotune.report.model import build_report

    run_dir = plan.run_dir or new_run_dir()
    go_on = "run the same command" if plan.run_dir else f"run it again with --set run_dir={run_dir}"
    if plan.run_dir is None and plan.workload.command is not None:
        go_on += " (before any --)"

    def interrupt_note() -> str:
        best = run_dir / "recommended.yaml"
        if best.is_file():
            return f"interrupted; the best so far is in {best}; {go_on} to go on"
        return f"interrupted before anything could be recommended; {go_on} to go on"

    click.get_current_context().meta[_INTERRUPT_NOTE] = interrupt_note
    result = run_plan(
        replace(plan, run_dir=run_dir), fresh=fresh, progress=False if quiet else "auto"
    )
    _show_report(build_report(result.summary, result.run_dir), as_json)


@cli.command(cls=BeforeCommand)
@of_plan
@_exit_code
def check(plan: Plan, by_exit_code: bool) -> None:
    """Test a CONFIG or a command with one training step.

    Also shows the machine and the settings that would be searched.

    --exit-code: exit with 4 if the recommendation in run_dir is stale, because the machine, its
    driver, torch or its cores changed.
    """
    from autotune.api.commands import check_plan
    from autotune.report.console import print_check

    found = check_plan(plan)
    space = found.space
    stale = found.stale
    show(lambda console: print_check(space.environment, space.facts, space, console, stale=stale))
    if by_exit_code and not found.has_recommendation:
        echo("run_dir holds no recommendation that could be stale")
    end_if(by_exit_code and stale is not None)


@cli.command(cls=BeforeCommand)
@of_plan
@click.option("--full", "is_full", is_flag=True, help="Show all evidence, advice and notes.")
@_as_json
@_quiet
@_exit_code
def diagnose(plan: Plan, is_full: bool, as_json: bool, quiet: bool, by_exit_code: bool) -> None:
    """Find out why training is slow and what to change.

    Give a CONFIG (see autotune init) or the command that trains:

    autotune diagnose -- python train.py

    Takes about 45 s, longer if your own code is slow to start or to make a step.

    --exit-code: exit with 4 if anything but computing limits the throughput.
    """
    from autotune.api.diagnose import diagnose_plan

    found = diagnose_plan(plan, progress=False if quiet else "auto").diagnosis
    if as_json:
        from autotune.report.json_document import diagnosis_json

        write(diagnosis_json(found))
    else:
        from autotune.report.diagnosis import print_diagnosis

        show(lambda console: print_diagnosis(found, console, is_full=is_full))
    end_if(by_exit_code and found.verdict not in {"compute", "unknown"})


@cli.command(cls=BeforeCommand)
@click.argument("recommended", type=click.Path(path_type=Path))
@click.option("--print", "only_print", is_flag=True, help="Only show what would be run.")
def apply(recommended: Path, words: tuple[str, ...], only_print: bool) -> None:
    """Train with the settings that a search found.

    RECOMMENDED is a run folder or a recommended.yaml. Your script runs to its end, unchanged:

    autotune apply runs/mine -- python train.py
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
    """Convert the settings that a search found for a framework.

    RECOMMENDED is a run folder or a recommended.yaml. Settings that the framework can't take, and
    its defaults that differ from the trials, are listed on stderr:

    autotune export runs/mine --to hf > training_args.json
    """
    from autotune.api.commands import export_json, export_notes, export_run

    found = export_run(recommended, target)
    if as_json:
        write(export_json(found))
        return
    write(found.text.removesuffix("\n"))
    for note in export_notes(found):
        echo(note)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("autotune.yaml"))
def init(path: Path) -> None:
    """Write a commented configuration to start from.

    PATH defaults to autotune.yaml.
    """
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
    """Show the result of a search again.

    Also rewrites its report.md and report.html.
    """
    from autotune.api.commands import open_report, rewrite_reports

    found = open_report(run_dir)
    try:
        if not as_json:
            _show_report(found, as_json)
    finally:  # also if the reader of stdout has gone
        found, note = rewrite_reports(found, run_dir)
    if as_json:  # after writing, since it lists the files
        _show_report(found, as_json)
    if note:
        echo(note)


@cli.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@_as_json
@_exit_code
def compare(first: Path, second: Path, as_json: bool, by_exit_code: bool) -> None:
    """Compare two searches and show what changed by more than noise.

    FIRST and SECOND are run folders: of two machines, or from before and after an upgrade.

    --exit-code: exit with 4 if the throughput of the baseline or of the recommended settings
    differs by more than noise, or is missing in one search.
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
    """Show the hardware and software that trials run on."""
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
    """Run the `autotune` command. SIGTERM and a closed terminal act like Ctrl-C: the best so far is saved."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    cli(prog_name="autotune")


def _show_report(report: ReportModel, as_json: bool) -> None:
    if as_json:
        from autotune.report.json_document import summary_json

        write(summary_json(report))
        return
    from autotune.report.console import print_summary

    show(lambda console: print_summary(report, console))
