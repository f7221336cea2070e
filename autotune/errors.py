"""The exceptions of autotune, and the exit code of the command line for each.

    AutotuneError                     1  the search failed
    ├── InputError                    2  something that the caller gave is wrong
    │   ├── ConfigError                  a YAML file, a mapping or an argument breaks a rule
    │   ├── WorkloadError                the user's code fails, or can't be sent to a trial
    │   ├── StudyMismatchError           the run folder has a study of something else
    │   └── RunFolderError               the run folder can't be written, is full, or is in use
    ├── NothingFeasibleError          3  no configuration meets the memory limit
    ├── RepeatedFailureError          1  the same exception ended three different configurations
    └── LauncherError                 1  trials can't be started on this machine, or can't describe it

A message has the rule, the value seen and the remedy. Nothing above this module is imported.
"""

from __future__ import annotations

_LONGEST = 1000  # characters of a sentence; our convention


class AutotuneError(Exception):
    r"""Base class of all exceptions that autotune raises on purpose.

    Characters that can't be printed become escapes such as \x1b in its message.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message, spared="\n\t"))


class InputError(AutotuneError):
    """Something that the caller gave can't be used; the message has the remedy."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration file, a mapping or an argument breaks a rule.

    Attributes:
        problems: One sentence for each broken rule, on one line of at most about 1,000 characters.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(_cut(_printable(problem)) for problem in problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, ...]]:
        return type(self), self.problems


class WorkloadError(InputError):
    """The user's code fails, or can't be sent to a trial.

    Attributes:
        remote_traceback: The user's frames of the traceback in the trial, or "".
    """

    def __init__(self, message: str, *, remote_traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{remote_traceback}".rstrip())
        self.remote_traceback = remote_traceback


class StudyMismatchError(InputError):
    """The run folder has a study of another workload, space or device."""


class RunFolderError(InputError):
    """The run folder can't be written, its disk is full, or another search uses it."""


class NothingFeasibleError(AutotuneError):
    """All configurations exceed the memory limit or fail; the message names the closest one."""

    exit_code = 3


class RepeatedFailureError(AutotuneError):
    """The same exception at the same place ended three different configurations."""


class LauncherError(AutotuneError):
    """A trial's process can't be started, its server is gone, or it can't describe the machine."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if that is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _printable(text: str, spared: str = "") -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in spared else repr(char)[1:-1] for char in text
    )


def _cut(sentence: str) -> str:
    """Cut the middle out of a sentence with a very long value."""
    left_out = len(sentence) - _LONGEST
    if left_out <= 0:
        return sentence
    half = _LONGEST // 2
    return f"{sentence[:half]} ({left_out:,} characters left out) {sentence[-half:]}"
