"""`autotune apply`: a training script run to its end with recommended settings, put in at the seams that trials used.

Comes in: a recommended.yaml, or the run folder that holds one, and the command that trains. This process becomes the
command. Nothing is measured, redirected or muted: it is the user's own training.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from autotune.api.load import load
from autotune.errors import ConfigError
from autotune.files.recommended_file import read_script
from autotune.files.run_folder import recommended_of
from autotune.protocol.attach import attached_environment, framework_environment, words_to_start
from autotune.settings.applied.compile_cache import compile_cache_variables
from autotune.settings.command import command_fault, placeholders_in

__all__ = ["applied", "apply_command"]


def applied(path: Path, command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words to start, and the variables to start them under, so that a script trains with recommended settings.

    Args:
        path: A recommended.yaml, or the run folder of a search on a command.
        command: What trains, with the placeholders that it was searched with; other arguments may differ.

    Raises:
        ConfigError: the file can't be read, was found for something else, or the command can't be used.
    """
    fault = command_fault(command)
    if fault is not None:
        raise ConfigError(fault)
    file = recommended_of(path)
    config, found = load(file), read_script(file)
    missing = [f"{{{name}}}" for name in found.script.placeholders if name not in placeholders_in(command)]
    if missing:
        raise ConfigError(
            f"the command must carry the placeholders that it was searched with, but {', '.join(missing)} is missing; "
            f"it was searched as: {shlex.join(found.command)}"
        )
    words = words_to_start(command, config)
    told = {"config": config.model_dump(mode="json"), "script": found.script.model_dump(mode="json")}
    switches = dict(switch.split("=", 1) for switch in found.malloc if "=" in switch)
    own = {name: value for name, value in switches.items() if name not in os.environ}
    of_framework = framework_environment(config, found.script)
    return words, {**own, **compile_cache_variables(), **attached_environment(told), **of_framework}


def apply_command(path: Path, command: Sequence[str], *, only_print: bool = False) -> None:
    """Become the command, with the settings put in; with `only_print`, print what would be started instead.

    Raises:
        ConfigError: see `applied`; or the program can't be started.
    """
    words, environment = applied(path, command)
    if only_print:
        names = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        sys.stdout.write(f"env {' '.join(names)} {shlex.join(words)}\n")
        return
    sys.stdout.flush()
    sys.stderr.write(f"autotune: starting {shlex.join(words)} with the recommended settings\n")
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what is started would go on ignoring it
    try:
        os.execvpe(words[0], list(words), {**os.environ, **environment})  # noqa: S606 - no shell: the user's own words
    except OSError as error:
        raise ConfigError(
            f"a command must name a program that can be started, but {words[0]!r} can't be ({error.strerror}); check "
            "its path"
        ) from error
