"""The messages for a wrong command: golden/commands.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.config.command import command_fault, command_words
from tests.golden import assert_golden

MISTAKES: dict[str, Any] = {
    "a sign of the shell": "python train.py && rm x",
    "a shell's value in double quotes": 'python train.py --data "$HOME/data"',
    "a second command": "cd src; python train.py",
    "an open quotation": "python 'train.py",
    "a set": {"python"},
    "bytes": b"python",
    "a number": 3,
    "a number among the words": ["python", "train.py", "--epochs", 3],
    "None among the words": ["python", None],
    "bytes among the words": ["python", b"a"],
    "a misspelt placeholder": ["python", "train.py", "--x={num_worker}"],
    "another framework's name": ["python", "train.py", "--x={gradient_accumulation_steps}"],
    "a setting that no option can hold": ["python", "train.py", "{compile}"],
    "no words": [],
    "an empty word first": ["", "x"],
    "NUL": ["python", "a\0b"],
    "a variable first": ["A=1", "python", "train.py"],
    "an isolated Python": ["python", "-uI", "train.py"],
    "a Python without site": ["python3", "-X", "dev", "-S", "-m", "pkg"],
    "code": ["python", "-c", "pass"],
    "standard input": ["python", "-"],
    "a module without its name": ["python", "-m"],
    "nothing after python": ["python"],
    "an option alone": ["python", "--version"],
}


def test_each_mistake_has_its_message() -> None:
    lines = []
    for name, command in MISTAKES.items():
        try:
            message = command_fault(command_words(command))
        except ValueError as error:
            message = str(error)
        assert message
        lines.append(f"{name}\n  {message}\n")
    assert_golden(Path(__file__).parent / "golden" / "commands.txt", "".join(lines))
