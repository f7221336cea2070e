"""A command as the workload: `python train.py --lr {lr}`, with placeholders for settings.

Comes in: the words of a command. Goes out: the command with a configuration's values, what it
starts, or why it can't be a workload. Pure.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import PurePath
from reprlib import repr as short_repr
from typing import Literal

from autotune.config.training_config import TORCH_PREFETCH_FACTOR, TrainingConfig
from autotune.settings_table import BY_NAME

PLACEHOLDERS = tuple(name for name in TrainingConfig.model_fields if BY_NAME[name].is_placeholder)
"""Settings that may be placeholders of a command, such as `--lr {lr}`."""
_PLACE = re.compile(r"(?<!\$)\{([A-Za-z0-9_-]+)\}")  # ${name} is the shell's
_NEAR = 0.7
"""Least similarity of an unknown name to a placeholder's to be taken for one: {batch_size} has 0.77,
{epoch} and {r} have less. Source: our convention."""
_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?(\.exe)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
"""Text that a shell keeps as it is. Source: POSIX.1-2017, Shell Command Language, 2.2 (except for $
in double quotes)."""
_PUT_IN = re.compile(r"`|\$[A-Za-z_{(]")
"""Expansions of a shell, also in double quotes."""
_FOR_A_SHELL = re.compile(r"^(&&|\|\|?|&|[0-9]*[<>].*|&>.*|~(/.*)?)$|;$|`|\$[A-Za-z_{(]")
"""Words that a shell would not pass on: operators, redirections and expansions."""
_OPTIONS = re.compile(r"([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)
"""Options of Python in one word, such as uWignore: those without a value, the one with a value, which
may also be the next word, and the value. Source: python --help."""
_HARMLESS = frozenset("uB")
"""Options of Python that have no effect on a running process."""
_SHUTTING_OUT = ("I", "E", "S")
"""Options that keep Python from importing sitecustomize, through which trials attach. Source: python
--help, and the documentation of module site."""
_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[-_.])(passw(or)?d|passphrase|secret|credentials?|api_?key|((api|access|secret|private)[-_.]key))([-_.]|$)"
    r"|(^-{0,2}|(hf|hub|auth|access|api|bearer|wandb|git|github|gitlab|refresh|session|neptune|comet)[-_.])token$",
    re.IGNORECASE,
)
"""Names of options and variables with secrets; not --max-tokens, --pad_token and --key. Source: our
convention."""
_SECRET_TEXT = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"
    r"|(?<![A-Za-z0-9])(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|AKIA|xox[abp]-)[A-Za-z0-9_-]{16,}"
    r"|(?<=[?&])((?:access_|auth_)?token|sig|signature|api_?key|password|X-Amz-Signature)=[^&#\s]+",
    re.IGNORECASE,
)
"""Credentials in a URL, tokens with known prefixes, and signatures of URLs. Source: our convention."""


@dataclass(frozen=True, slots=True)
class PythonStart:
    """Python's parsed command line."""

    options: frozenset[str]
    """Options: letters, or long ones with their dashes."""
    kind: Literal["script", "module", "code", "nothing"]
    target: str = ""
    """Path of the script, name of the module, or the code."""
    arguments: tuple[str, ...] = ()


def command_words(command: object) -> tuple[str, ...]:
    """Return the words of a command: a list as it is, a string split as a POSIX shell does.

    Raises:
        ValueError: It is neither, or needs a shell.
    """
    if isinstance(command, str):
        return _split(command)
    if not isinstance(command, list | tuple):
        rule = "a command must be a list of words, or one text"
        raise ValueError(f"{rule}, but got {short_repr(command)}; write [python, train.py]")  # noqa: TRY004 - for pydantic
    return tuple(_word(word) for word in command)


def placeholders_in(command: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a command's placeholders, each once."""
    names = itertools.chain.from_iterable(map(_PLACE.findall, command))
    return tuple(dict.fromkeys(name for name in names if name in PLACEHOLDERS))


def filled(command: Sequence[str], config: TrainingConfig) -> tuple[str, ...]:
    """Replace the placeholders of a command by a configuration's values; other braces stay."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name not in PLACEHOLDERS:
            return match[0]
        value = getattr(config, name)
        # Of these, the prefetch factor alone may be None.
        return str(TORCH_PREFETCH_FACTOR if value is None else value)

    return tuple(_PLACE.sub(value_of, word) for word in command)


def is_python(program: str) -> bool:
    """Return True if a command's first word is named like a Python."""
    return _PYTHON.fullmatch(PurePath(program).name) is not None


def python_start(command: Sequence[str]) -> PythonStart | None:
    """Return the script or module that a command makes Python run.

    None for other programs, and for options that a running process can't have.
    """
    if not command or not is_python(command[0]):
        return None
    found = _interpreted(command[1:])
    can_be_run = found.kind in {"script", "module"} and found.options <= _HARMLESS
    return found if can_be_run else None


def command_fault(command: Sequence[str]) -> str | None:
    """Return why a command can't be a workload (rule, value, remedy), or None."""
    if not command or not command[0]:
        return "a command must have at least one word, but got none; write what you type to train"
    torn = next((word for word in command if "\0" in word), None)
    if torn is not None:
        return f"a word of a command must be without NUL, but got {short_repr(torn)}; leave it out"
    if _ASSIGNMENT.fullmatch(command[0]):
        rule = "a command must begin with a program, but got the variable"
        return f"{rule} {short_repr(command[0])}; write env before it"
    return _misspelt(command) or (_python_fault(command[1:]) if is_python(command[0]) else None)


def command_name(command: Sequence[str]) -> str:
    """Return a name for reports: that of the script, the module or the program."""
    scripts = [word for word in command if word.endswith(".py")]
    start = python_start(command)
    if start is not None:
        return PurePath(start.target).name
    return PurePath((scripts[0].split() or scripts)[-1] if scripts else command[0]).name


def _word(word: object) -> str:
    text = fspath(word) if isinstance(word, PathLike) else word
    if not isinstance(text, str):
        rule = "a word of a command must be a text"
        raise ValueError(f"{rule}, but got {short_repr(word)}; write it in quotes")  # noqa: TRY004 - for pydantic
    return text


def _split(text: str) -> tuple[str, ...]:
    """Split one text into words; refuse what needs a shell."""
    # Join lines as a shell does.
    text = _QUOTED.sub(lambda quoted: " " if quoted[0] == "\\\n" else quoted[0], text)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        rule = f"a command must be split into words as by a shell, but got {text!r:.80} ({str(error).lower()})"
        raise ValueError(f"{rule}; write it as a list of words") from None
    bare = _QUOTED.sub(_put_in, text)
    asks = next((word for word in bare.split() if _FOR_A_SHELL.search(word)), None)
    if asks is not None:
        rule = f"a command is started without a shell, but got {asks} in {text!r:.80}"
        raise ValueError(
            f"{rule}; write bash -c and all of it in single quotes, or {asks} in single quotes"
        )
    return words


def _put_in(quoted: re.Match[str]) -> str:
    """Return the parts of a quoted text that a shell would expand."""
    if not quoted[0].startswith('"'):
        return ""
    return " ".join(
        word for word in re.sub(r"\\.", "", quoted[0][1:-1]).split() if _PUT_IN.search(word)
    )


def _misspelt(command: Sequence[str]) -> str | None:
    """Return why a word has a misspelt placeholder, or a setting that can't be one; or None."""
    rule = f"a placeholder must be one of {', '.join(PLACEHOLDERS)}"
    for name in itertools.chain.from_iterable(map(_PLACE.findall, command)):
        if name in PLACEHOLDERS:
            continue
        near = get_close_matches(name.lower().replace("-", "_"), PLACEHOLDERS, n=1, cutoff=_NEAR)
        if near or name in TrainingConfig.model_fields:
            remedy = f"did you mean {{{near[0]}}}?" if near else "write its value, or leave it out"
            return f"{rule}, but got {{{name}}}; {remedy}"
    return None


def _python_fault(words: Sequence[str]) -> str | None:
    """Return why Python can't be started with these arguments, or None."""
    found = _interpreted(words)
    shut = next((letter for letter in _SHUTTING_OUT if letter in found.options), None)
    if shut is not None:
        return f"Python must be started without -{shut}, under which nothing can attach to a script; leave -{shut} out"
    if found.kind in {"code", "nothing"}:
        got = "-c" if found.kind == "code" else " ".join(words) or "nothing after python"
        return f"Python must be given a script or -m and a module, but got {short_repr(got)}; write python train.py"
    return None


def _interpreted(words: Sequence[str]) -> PythonStart:
    """Parse Python's arguments as Python does."""
    left = list(words)
    options = set[str]()
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            options.add(word)
            if word == "--check-hash-based-pycs":
                left = left[1:]
            continue
        plain, option, rest = _OPTIONS.findall(word[1:])[0]
        options.update(plain)
        if not option:
            continue
        value = rest or (left.pop(0) if left else "")
        if option in "WX":
            options.add(option)
        elif value:
            kind: Literal["code", "module"] = "code" if option == "c" else "module"
            return PythonStart(frozenset(options), kind, value, tuple(left))
    if not left or left[0] in {"", "-"}:
        return PythonStart(frozenset(options), "nothing")
    return PythonStart(frozenset(options), "script", left[0], tuple(left[1:]))


def without_secrets(command: Sequence[str]) -> tuple[str, ...]:
    """Replace the values of passwords and tokens in a command by `***`, as far as they are recognised."""
    shown: list[str] = []
    is_value = False
    for word in command:
        name, is_assigned, _ = word.partition("=")
        if is_value and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif is_assigned and _SECRET_NAME.search(name):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(_SECRET_TEXT.sub(_hidden, word))
        is_value = (
            word.startswith("-") and not is_assigned and _SECRET_NAME.search(word) is not None
        )
    return tuple(shown)


def _hidden(found: re.Match[str]) -> str:
    return _HIDDEN if found[1] is None else f"{found[1]}={_HIDDEN}"
