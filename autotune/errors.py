"""The exceptions that autotune raises, and the exit code that the command line gives each.

    AutotuneError                     1  the search failed ├── InputError                    2
    something that the caller gave, or the place it runs in, is wrong │   ├── ConfigError
    a YAML file, a mapping or an argument breaks a rule │   ├── WorkloadError                the
    user's model, dataset or step fails, or can't be carried to a trial │   ├── StudyMismatchError
    the run folder holds a study of something else │   └── RunFolderError               the run
    folder can't be written, is full, or is in use ├── NothingFeasibleError          3  no
    configuration meets the memory limit ├── RepeatedFailureError          1  the same exception
    ended three different configurations └── LauncherError                 1  trials can't be
    started on this machine, or can't describe it

A message states the rule, the value seen and the remedy. Nothing below this file is imported.
"""

from __future__ import annotations

_LONGEST = 1000  # characters of a sentence, our own convention


class AutotuneError(Exception):
    r"""The root of everything that autotune raises on purpose.

    What can't be printed stands in its message as an escape such as \x1b: file names and values may hold anything.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message, spared="\n\t"))


class InputError(AutotuneError):
    """What the caller gave can't be used; the message says what to change."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration file, a mapping or an argument breaks a rule.

    Attributes:
        problems: one sentence for each rule that is broken, all of them, each on one line of at
            most some 1,000 characters.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(_cut(_printable(problem)) for problem in problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, ...]]:
        return type(self), self.problems


class WorkloadError(InputError):
    """The user's own code fails, or can't be carried to a trial.

    Attributes:
        remote_traceback: the user's frames of the traceback in the trial, or "".
    """

    def __init__(self, message: str, *, remote_traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{remote_traceback}".rstrip())
        self.remote_traceback = remote_traceback


class StudyMismatchError(InputError):
    """The run folder holds a study of another workload, space or device."""


class RunFolderError(InputError):
    """The run folder can't be written, its disk is full, or another search holds it."""


class NothingFeasibleError(AutotuneError):
    """Every configuration tried breaks the memory limit or fails; the message names the nearest miss."""

    exit_code = 3


class RepeatedFailureError(AutotuneError):
    """The same exception at the same place has ended three different configurations."""


class LauncherError(AutotuneError):
    """A trial's process can't be started, its server is gone, or it can't describe the machine."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _printable(text: str, spared: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in spared else repr(char)[1:-1] for char in text
    )


def _cut(sentence: str) -> str:
    """A sentence without the middle of a value that is endless."""
    left_out = len(sentence) - _LONGEST
    half = _LONGEST // 2
    return (
        sentence
        if left_out <= 0
        else f"{sentence[:half]} ({left_out:,} characters left out) {sentence[-half:]}"
    )
