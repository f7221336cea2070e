"""What a subcommand is given: a CONFIG, or after `--` the command of a training script, as one Plan.

Comes in: the arguments of `run`, `check`, `diagnose` and `apply`. Goes out: a Plan, or the command's words as they were
typed; wrong usage is click's UsageError. Only click is imported at the top, as in autotune.cli.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from autotune.settings.executor import ExecutorKind
    from autotune.settings.plan import Plan

__all__ = ["EXPORT_TARGETS", "FILE_KINDS", "BeforeCommand", "of_plan"]

EXPORT_TARGETS = (
    *("hf", "accelerate", "lightning", "deepspeed", "torchrun"),
    *("timm", "axolotl", "ultralytics", "composer"),
)
"""As autotune.settings.exports has them, which help must not wait for."""
FILE_KINDS = ("hf", "accelerate", "deepspeed", "axolotl")
"""The same for files that are read."""

_SET_HELP = "Set a value in place of CONFIG's, or of a default; may be repeated."
_FROM_HELP = (
    "Begin with what a framework's own file says: hf (TrainingArguments as JSON), accelerate (YAML), deepspeed (JSON) "
    "or axolotl (YAML). CONFIG's own baseline and --set win over it."
)
_EXECUTOR_HELP = "Run trials on this machine, or on those of a Ray cluster."


class BeforeCommand(click.Command):
    """Gives its function, as `words`, the command after `--`, which click alone would take for arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As of click, with what stands before the `--` alone."""
        here = args.index("--") if "--" in args else len(args)
        ctx.params["words"] = tuple(args[here + 1 :])
        script = next((word for word in args[:here] if word.endswith(".py") and "=" not in word), None)
        if script is not None and not ctx.resilient_parsing:
            raise click.UsageError(
                f"a command must stand after --, but got {script!r} before it; write -- python {script}", ctx
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
        raise click.UsageError(f"CONFIG, or a command after --, must be given: {name} -- python train.py")
    if config is not None and words:
        raise click.UsageError(
            f"CONFIG and a command after -- can't both be given, but got {str(config)!r} and "
            f"{shlex.join(words)!r:.80}; leave CONFIG out, or write the command into it as workload.command"
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
    from autotune.files.framework_file import notes_of, read_today
    from autotune.files.plan_file import read_plan

    found = read_today(*today)
    plan = read_plan(config, overrides, executor=executor, today=found)
    for told in notes_of(found, plan):
        click.echo(told, err=True)
    return plan
