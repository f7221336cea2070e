"""What every renderer makes of known input, and every sentence of the catalogue, as golden files.

`pytest tests/report --update` rewrites the files; `git diff` shows what has changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import pytest

from autotune.config.plan import Choices, IntRange, Objective, SearchSpace
from autotune.config.training_config import TrainingConfig
from autotune.files.recommended import recommended_yaml
from autotune.messages.space import lr_unchanged
from autotune.records.result import RunSummary
from autotune.report import html
from autotune.report.blocks import Plot
from autotune.report.console import print_check
from autotune.report.diagnosis import render_diagnosis
from autotune.report.html import render_diagnosis_notebook
from autotune.report.sections import describe_environment, describe_run, describe_workload
from autotune.report.words import describe_settings
from autotune.space.ranges import Basis
from autotune.space.space import resolve
from tests.factories import (
    BASELINE,
    FAST,
    GROUP,
    SERVER,
    make_facts,
    make_script,
    make_summary,
    make_variants,
)
from tests.golden import GOLDEN, assert_golden
from tests.report import cases, forms

pytestmark = pytest.mark.usefixtures("plain_terminal")


def say_cases(summaries: Mapping[str, RunSummary]) -> str:
    """Write the sentences of each search's report that a plain search's lacks."""
    sentences = {name: report_sentences(summary) for name, summary in summaries.items()}
    return list_news(sentences, known=report_sentences(make_summary()))


def list_news(lines: Mapping[str, Iterable[str]], known: Iterable[str] = ()) -> str:
    """Write each case's lines that no case before it has."""
    seen, texts = set(known), []
    for name, own in lines.items():
        texts.append(
            "\n".join([f"# {name}", *(line for line in dict.fromkeys(own) if line not in seen)])
        )
        seen.update(own)
    return "\n\n".join(texts) + "\n"


def report_sentences(summary: RunSummary) -> list[str]:
    report = forms.report_of(summary)
    blocks = [*report.lead, *(block for section in report.sections for block in section.blocks)]
    return list(filter(None, [report.headline, *forms.sentences_of(blocks)]))


def page_of(summary: RunSummary) -> str:
    """Render the page without its styles and drawings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "draw", title_of)
        page = forms.as_page(summary).html
    return re.sub(r"<style>.*?</style>", "<style></style>", page, flags=re.DOTALL)


def title_of(plot: Plot) -> str:
    return f'<svg aria-label="{plot.title}"></svg>'


def rich_document() -> str:
    """Render the JSON document, its figures to six digits: the last ones differ between processors."""
    document = json.loads(
        forms.as_json(make_variants()["rich"]),
        parse_float=lambda digits: float(f"{float(digits):.6g}"),
    )
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def check_of(*, is_script: bool) -> str:
    """Print what `autotune check` does."""
    facts = make_facts(has_4d_input=False, script=make_script() if is_script else None)
    given = SearchSpace(
        num_workers=IntRange(low=0, high=6),
        micro_batch_size=Choices(values=tuple(range(1, 60))),
        amp_dtype=Choices(values=("bfloat16",)),
    )
    basis = Basis(
        given={} if is_script else given.given(),
        baseline=BASELINE if is_script else TrainingConfig(channels_last=True),
        objective=Objective(global_batch="keep" if is_script else "scale"),
        facts=facts,
        environment=SERVER,
    )
    stale = "runs/a/recommended.yaml is stale: driver 550 there, 570 here." if is_script else None
    show = partial(print_check, SERVER, facts, resolve(basis))
    return forms.on_console_of(lambda console: show(console, stale=stale))


def plain_lines() -> str:
    return forms.show_progress("auto", forms.make_steps())[1]


def facts_in_words() -> str:
    """Describe machines, workloads and what was asked for."""
    odd = {
        "device_count": 2,
        "device_names": ("A", "B"),
        "tf32_overrides": ("X=1",),
        "notes": (lr_unchanged(),),
    }
    machines: dict[str, dict[str, Any]] = {
        "one host": {},
        "three hosts": {"hosts": 3, "device_count": 8},
        "two nodes": {"numa_nodes": 2},
        "unlike devices": odd,
        "own malloc": {"malloc": ("A=1", "B=2")},
        "malloc of trials": {"malloc": ("A=1", "B=2"), "keeps_memory": True},
    }
    facts = {
        name: describe_environment(SERVER.model_copy(update=own)) for name, own in machines.items()
    }
    facts["map-style dataset"] = describe_workload(make_facts())
    facts["stream"] = describe_workload(make_facts(is_iterable=True, dataset_length=None))
    facts["tf.data"] = describe_workload(make_facts(is_iterable=True, is_tf_data=True))
    facts["script of a framework"] = describe_workload(
        make_facts(script=make_script(framework="transformers"))
    )
    facts["script without a loader"] = describe_workload(make_facts(script=make_script(loaders=())))
    facts["search"] = describe_run(make_summary())
    facts["search of a script"] = describe_run(
        make_summary(command=("python", "my train.py", "--lr={lr}"))
    )
    return list_news(
        {name: [f"{key}: {value}" for key, value in own.items()] for name, own in facts.items()}
    )


def live_lines() -> str:
    steps = [step.model_copy(update={"can_win": 0.12}) for step in forms.make_steps()]
    return "\n".join(map(forms.live_line, steps)) + "\n"


def recommended_heads() -> str:
    texts = (
        f"## {name}\n{recommended_yaml(summary).partition('format: 1')[0].strip()}\n"
        for name, summary in cases.recommended_cases().items()
    )
    return "\n".join(texts)


def settings_in_words() -> str:
    """Describe settings by themselves, and next to a baseline."""
    tokens = FAST.model_copy(update={"max_tokens": 4096})
    alone = [
        BASELINE,
        FAST,
        GROUP,
        tokens,
        GROUP.model_copy(update={"ddp": None, "numa_binding": "node"}),
    ]
    pairs = [
        (FAST, FAST),
        (
            FAST.model_copy(update={"pin_memory": False, "grad_accum_steps": 2, "in_order": False}),
            FAST,
        ),
        (tokens.model_copy(update={"max_tokens": 8192, "micro_batch_size": 256}), tokens),
        (GROUP, FAST),
        (FAST, GROUP),
        (GROUP.model_copy(update={"ddp": None}), GROUP),
        (FAST.model_copy(update={"strategy": "dp", "world_size": 4}), FAST),
        (
            TrainingConfig(compile=True, fused=True, channels_last=True, cudnn_benchmark=True),
            BASELINE,
        ),
    ]
    return (
        "\n".join([*map(describe_settings, alone), *(describe_settings(*pair) for pair in pairs)])
        + "\n"
    )


def make_golden() -> dict[str, Callable[[], str]]:
    """Return every golden file's name, and what makes its text."""
    variants, diagnoses = make_variants(), cases.diagnosis_cases()
    made: dict[str, Callable[[], str]] = {
        f"sentences/{name}.txt": partial(say_cases, group)
        for name, group in cases.every_case().items()
    }
    made |= {
        f"terminal/{name}.txt": partial(forms.on_console, summary)
        for name, summary in variants.items()
    }
    made |= {
        f"comparison/{name}.txt": partial(forms.comparison_on_console, found)
        for name, found in cases.comparison_cases().items()
    }
    made |= {
        f"diagnosis/{name}.txt": partial(forms.diagnosis_on_console, found)
        for name, found in diagnoses.items()
    }
    made |= {
        f"diagnosis-full/{name}.txt": partial(forms.diagnosis_on_console, found, is_full=True)
        for name, found in diagnoses.items()
    }
    return made | {
        "terminal/check.txt": partial(check_of, is_script=False),
        "terminal/check-of-a-script.txt": partial(check_of, is_script=True),
        "facts.txt": facts_in_words,
        "markdown/rich.md": partial(forms.as_markdown, variants["rich"]),
        "markdown/group.md": partial(forms.as_markdown, variants["group"]),
        "markdown/diagnosis.md": partial(render_diagnosis, diagnoses["loader-holds"]),
        "markdown/diagnosis-of-a-script.md": partial(
            render_diagnosis, diagnoses["validation-seen-once"]
        ),
        "html/rich.html": partial(page_of, variants["rich"]),
        "notebook/rich.html": partial(forms.as_notebook, variants["rich"]),
        "notebook/diagnosis.html": partial(render_diagnosis_notebook, diagnoses["loader-holds"]),
        "notebook/diagnosis-of-a-script.html": partial(
            render_diagnosis_notebook, diagnoses["validation-seen-once"]
        ),
        "json/rich.json": rich_document,
        "progress/plain.txt": plain_lines,
        "progress/live.txt": live_lines,
        "recommended/heads.txt": recommended_heads,
        "settings.txt": settings_in_words,
    }


MADE = make_golden()


@cache
def text_of(name: str) -> str:
    return MADE[name]()


@pytest.mark.parametrize("name", MADE)
def test_each_renderer_writes_its_golden_file(name: str) -> None:
    assert_golden(name, text_of(name))


def test_no_golden_file_is_left_over() -> None:
    assert {
        path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()
    } <= MADE.keys()
