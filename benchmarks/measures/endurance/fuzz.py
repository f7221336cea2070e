"""Parts "fuzz_configs", "fuzz_calls" and "fuzz_cli": made-up input, by hypothesis from the schema and its neighbours.

A configuration is a plan or is refused in sentences; a call has a result or raises an error of ours; a command ends
with an exit code that is documented. Nothing else; a configuration or a command that is refused writes nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.measures.endurance.fuzz_calls import calls
from benchmarks.measures.endurance.fuzz_commands import commands, try_command
from benchmarks.measures.endurance.fuzz_texts import documents, overrides
from benchmarks.measures.endurance.fuzz_tries import BrokenError, try_call, try_config, user_code
from benchmarks.measures.endurance.part import Part
from benchmarks.measures.part_guard import Figures

__all__ = ["FUZZ_CALLS", "FUZZ_CLI", "FUZZ_CONFIGS", "tried"]

_CONFIGS, _CALLS, _COMMANDS = 24, 12, 12
"""Cases, each of its own seed."""
_PHASES = [Phase.generate, Phase.shrink]


def tried(
    strategy: st.SearchStrategy[Any], try_one: Callable[[Any], str], *, number: int, examples: int
) -> Figures:
    """Try examples of a strategy by a seed; the smallest that breaks a promise is kept with the sentence."""
    ended, last = Counter[str](), list[str]()

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=_PHASES,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(strategy)
    def run(one: Any) -> None:
        last[:] = [repr(one)[:2000]]
        ended[try_one(one)] += 1

    try:
        run()
    except BrokenError as broken:
        return {"ended": dict(ended), "fault": str(broken), "input": last[0]}
    return {"ended": dict(ended)}


def _run_configs(case: str, folder: Path) -> Figures:
    user_code(folder)
    os.chdir(folder)
    inputs = st.tuples(documents(), st.lists(overrides(), max_size=2).map(tuple) | st.just(()))
    return tried(inputs, lambda one: try_config(folder, *one), number=_number(case), examples=100)


def _run_calls(case: str, folder: Path) -> Figures:
    os.chdir(folder)
    return tried(
        calls(folder),
        lambda call: try_call(folder, call, writes=True),
        number=_number(case),
        examples=50,
    )


def _run_commands(case: str, folder: Path) -> Figures:
    user_code(folder)
    return tried(
        commands(folder),
        lambda words: try_command(folder, words),
        number=_number(case),
        examples=10,
    )


def _number(case: str) -> int:
    return int(case.rpartition("_")[2])


def _cases(name: str, count: int) -> Callable[[bool], Sequence[str]]:
    return lambda is_quick: [f"{name}_{number:02}" for number in range(1 if is_quick else count)]


def _judge(promise: str) -> Callable[[Mapping[str, Figures]], Figures]:
    def judge(cases: Mapping[str, Figures]) -> Figures:
        ended = sum((Counter(found["ended"]) for found in cases.values()), Counter[str]())
        is_kept = None if not cases else not any(found.get("fault") for found in cases.values())
        return {"ended": dict(ended), "inputs": ended.total(), "promises": {promise: is_kept}}

    return judge


FUZZ_CONFIGS = Part(
    proves="any configuration is a plan or is refused in sentences, within 10 s, with nothing written",
    cases=_cases("configs", _CONFIGS),
    run=_run_configs,
    judge=_judge("every configuration is a plan or is refused"),
    limit_s=1800.0,
)
FUZZ_CALLS = Part(
    proves="any call of a public function but prepare has a result, or raises an error of ours",
    cases=_cases("calls", _CALLS),
    run=_run_calls,
    judge=_judge("every call has a result or is refused"),
    limit_s=3600.0,
)
FUZZ_CLI = Part(
    proves="any command line ends with a documented exit code, without a traceback of ours, and writes nothing refused",
    cases=_cases("commands", _COMMANDS),
    run=_run_commands,
    judge=_judge("every command ends as documented"),
    limit_s=1800.0,
)
