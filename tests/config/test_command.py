"""A command as the workload: its words, its placeholders, what it starts, and what can't be one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.command import (
    PLACEHOLDERS,
    command_fault,
    command_name,
    command_words,
    filled,
    placeholders_in,
    python_start,
    without_secrets,
)
from autotune.config.training_config import TrainingConfig

CONFIG = TrainingConfig(
    micro_batch_size=48,
    grad_accum_steps=2,
    lr=3e-4,
    amp_dtype="bfloat16",
    num_workers=3,
    prefetch_factor=4,
)
WORDS = st.text(st.characters(blacklist_characters="\0{}", blacklist_categories=["Cs"]), max_size=8)


# Words


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("python train.py --lr {lr}", ("python", "train.py", "--lr", "{lr}")),
        ("python 'my train.py'", ("python", "my train.py")),
        (
            "torchrun \\\n  --nproc_per_node 2 \\\n  train.py\n",
            ("torchrun", "--nproc_per_node", "2", "train.py"),
        ),
        ("bash -c 'cd src && python train.py | tee log; echo $HOME'", None),
        ("python train.py --name='a | b' --sep '|' --cost \\$5", None),
        ("python train.py --shape a|b", ("python", "train.py", "--shape", "a|b")),
        (["python", "train.py", "|", "$HOME"], ("python", "train.py", "|", "$HOME")),
        (("python", Path("train.py")), ("python", "train.py")),
        ("", ()),
        ([], ()),
    ],
)
def test_text_is_split_as_by_a_shell(written: Any, words: tuple[str, ...] | None) -> None:
    assert command_words(written) == (tuple(shlex.split(written)) if words is None else words)


@given(words=st.lists(WORDS, max_size=5))
def test_joined_words_split_again(words: list[str]) -> None:
    assert command_words(shlex.join(words)) == tuple(words)


@pytest.mark.parametrize(
    "sign",
    [
        "&&",
        "||",
        "|",
        "&",
        ">",
        "2>&1",
        "<in",
        ">log",
        "&>log",
        "$HOME",
        "${X}",
        "`date`",
        "~",
        "~/x",
    ],
)
def test_shell_syntax_is_refused(sign: str) -> None:
    with pytest.raises(ValueError, match=f"got {re.escape(sign)} in "):
        command_words(f"python train.py {sign} x")


@pytest.mark.parametrize("written", ['"$HOME/data"', '"a `date`"', "'a'\"$X\""])
def test_expansions_in_double_quotes_are_refused(written: str) -> None:
    command = "python train.py --data"
    with pytest.raises(ValueError, match=re.escape(command)):
        command_words(f"{command} {written}")
    assert command_words(f"{command} '{written.replace(chr(39), '')}'")


# Placeholders


def test_placeholders_are_filled() -> None:
    command = ["train.py", "--lr={lr}", "{micro_batch_size}x{grad_accum_steps}", "{amp_dtype}"]
    assert placeholders_in(command) == ("lr", "micro_batch_size", "grad_accum_steps", "amp_dtype")
    assert filled(command, CONFIG) == ("train.py", "--lr=0.0003", "48x2", "bfloat16")


@pytest.mark.parametrize(
    "word",
    ["{epoch}", "{}", "${lr}", '{"lr": 1}', "{lr:.3f}", "{ lr }", "{LR}", "lr", "{seed}", "{r}"],
)
def test_other_braces_stay(word: str) -> None:
    assert placeholders_in([word]) == ()
    assert filled([word], CONFIG) == (word,)


@given(
    parts=st.lists(WORDS | st.sampled_from([f"{{{name}}}" for name in PLACEHOLDERS]), max_size=6)
)
def test_only_placeholders_change(parts: list[str]) -> None:
    """Parts joined to one word: each is there in its order, with its value or as it was."""
    parts = [part.replace("$", "") for part in parts]
    expected = [
        str(getattr(CONFIG, part[1:-1])) if part[1:-1] in PLACEHOLDERS and part[0] == "{" else part
        for part in parts
    ]
    assert filled(["".join(parts)], CONFIG) == ("".join(expected),)
    assert set(placeholders_in(["".join(parts)])) == {
        part[1:-1] for part in parts if part.startswith("{")
    }


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("num_worker", "num_workers"),
        ("num-workers", "num_workers"),
        ("LR", "lr"),
        ("lr0", "lr"),
        ("batch_size", "micro_batch_size"),
        ("gradient_accumulation_steps", "grad_accum_steps"),
    ],
)
def test_misspelt_placeholder_names_the_nearest(written: str, meant: str) -> None:
    fault = command_fault(["python", "train.py", f"--x={{{written}}}"])
    assert fault is not None
    assert fault.endswith(f"{{{meant}}}?")


# What it starts


@pytest.mark.parametrize(
    ("command", "start"),
    [
        ("python train.py --lr 1", ("script", "train.py", ("--lr", "1"))),
        ("/opt/env/bin/python3.11 -u train.py -u", ("script", "train.py", ("-u",))),
        ("python3.13t -uB -m pkg.train -m x", ("module", "pkg.train", ("-m", "x"))),
        ("python -umpkg.train x", ("module", "pkg.train", ("x",))),
        ("python -- train.py", ("script", "train.py", ())),
        ("python folder", ("script", "folder", ())),
    ],
)
def test_python_start(command: str, start: tuple[Any, ...]) -> None:
    found = python_start(command.split())
    assert found is not None
    assert (found.kind, found.target, found.arguments) == start


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py",
        "accelerate launch train.py",
        "bash train.sh",
        "pythonic train.py",
        "python -O train.py",
        "python -X dev train.py",
        "python -Wignore train.py",
        "python -W ignore -m pkg",
        "python --check-hash-based-pycs always train.py",
        "python -c pass",
        "python -m",
        "python -",
        "python",
        "",
    ],
)
def test_no_python_start(command: str) -> None:
    assert python_start(command.split()) is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python src/train.py --config a.py", "train.py"),
        ("python -m pkg.train", "pkg.train"),
        ("torchrun --nproc_per_node 2 src/train.py --x b.py", "train.py"),
        ("/bin/bash run.sh", "bash"),
        ("bash -c 'cd a/b && python train.py'", "train.py"),
    ],
)
def test_command_name_is_the_scripts(command: str, name: str) -> None:
    assert command_name(shlex.split(command)) == name


# Faults


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python -O -X dev train.py -I -c",
        "python -m pkg.train -E",
        "python -W ignore -m pkg",
        "torchrun -I train.py",
        "env OMP_NUM_THREADS=1 python train.py",
        "./train.sh a=b",
        "python train.py --name {epoch}-{val_loss} --lr {lr}",
    ],
)
def test_no_fault_in_usual_commands(command: str) -> None:
    assert command_fault(command.split()) is None


@given(
    command=st.lists(
        st.text(max_size=6) | st.sampled_from(["python", "-c", "-m", "-uX", "-W", "--", "-"]),
        max_size=6,
    )
)
def test_any_words_have_a_verdict(command: list[str]) -> None:
    fault = command_fault(command)
    if fault is None:
        assert command_name(command) or not command[0].strip("./")
        filled(command, CONFIG)
    start = python_start(command)
    assert start is None or start.target


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("--hf-token abc --lr 3", "--hf-token *** --lr 3"),
        (
            "--api_key=abc wandb.api_key=abc DB_PASSWORD=abc",
            "--api_key=*** wandb.api_key=*** DB_PASSWORD=***",
        ),
        ("https://me:abc@host/x s3://x?sig=abc&u=1", "https://***@host/x s3://x?sig=***&u=1"),
        ("hf_0123456789abcdefABCD", "***"),
        ("--token --epochs 3", "--token --epochs 3"),
        *[
            (one, one)
            for one in ("--max-tokens 512 --tokenizer bert", "--pad_token=x --key k me@h:x")
        ],
    ],
)
def test_secrets_are_not_written_down(given: str, written: str) -> None:
    assert without_secrets(given.split()) == tuple(written.split())
