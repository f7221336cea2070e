"""The console's forms: what they say, and that they fit 80 columns and obey no foreign markup."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from autotune.records.recommendation import Ratio
from autotune.records.run_summary import RunSummary
from autotune.records.trial import Outcome
from autotune.report.render.terminal import print_check, print_environment
from autotune.report.wording.units import NO_VALUE
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.objective import Objective
from autotune.settings.search_space import Choices, IntRange, SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.space.default_ranges import Basis
from autotune.space.resolved_space import resolve
from tests.factories import (
    BASELINE,
    FAST,
    RESNET,
    SAME_BATCH,
    SERVER,
    make_facts,
    make_measurement,
    make_recommendation,
    make_rich_summary,
    make_script,
    make_summary,
    make_trial,
    make_trials,
    make_variants,
    said,
)
from tests.report.forms import on_console


def make_console(width: int = 80) -> Console:
    return Console(file=StringIO(), width=width, force_terminal=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def row_of(text: str, label: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(label)).split()


def assert_fits(text: str, width: int = 80) -> None:
    assert [line for line in text.splitlines() if cell_len(line) > width] == []


def test_every_verdict_fits_80_columns(any_summary: RunSummary, tmp_path: Path) -> None:
    assert_fits(on_console(any_summary, tmp_path))


def test_wide_values_and_wide_characters_fit_80_columns(tmp_path: Path) -> None:
    ddp = DdpConfig(bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True, comm_hook="powersgd")
    config = TrainingConfig(world_size=8, strategy="ddp", ddp=ddp, micro_batch_size=16384)
    recommendation = make_recommendation(config=config, reasons=(said("理由" * 60),))
    run_dir = tmp_path / ("folder" * 30)
    text = on_console(make_summary(recommendation=recommendation, notes=(said("x" * 300),)), run_dir)
    assert_fits(text)
    assert "comm_hook=" in text


def test_the_headline_gives_the_speedup_with_its_interval(tmp_path: Path) -> None:
    text = on_console(make_summary(), tmp_path)
    assert "Proven: 2.41 times as fast as your configuration (95 %: 2.35 to 2.47)." in text


def test_the_headroom_follows_the_headline(tmp_path: Path) -> None:
    text = " ".join(on_console(make_rich_summary(), tmp_path).split())
    assert "(95 %: 2.35 to 2.47). You run at 43 % of what this device can do; the loader is the bottleneck." in text


def test_the_parts_of_the_time_take_the_place_of_the_waits_where_they_were_measured(tmp_path: Path) -> None:
    text = on_console(make_rich_summary(), tmp_path)
    assert row_of(text, "waiting for data")[3:] == ["60", "%", "2.0", "%", NO_VALUE]
    assert row_of(text, "computing")[1:] == ["33", "%", "91", "%", NO_VALUE]
    assert "synchronising" not in text
    assert "data wait" not in text
    plain = on_console(make_summary(), tmp_path)
    assert row_of(plain, "data wait")[2:] == ["3.4", "%"] * 3
    assert "computing" not in plain


def test_the_memory_line_of_the_recommended_precision_is_told(tmp_path: Path) -> None:
    text = " ".join(on_console(make_summary(), tmp_path).split())
    assert "Memory of bfloat16: " in text
    assert " a sample, ± " in text
    assert "Memory of bfloat16" not in on_console(
        make_variants()["unconfirmed"].model_copy(update={"trials": ()}), tmp_path
    )


def test_an_unknown_interval_is_said_to_be_unknown(tmp_path: Path) -> None:
    speedup = Ratio(value=2.4, low=0.0, high=float("inf"))
    text = on_console(make_summary(recommendation=make_recommendation(speedup=speedup)), tmp_path)
    assert "(95 %: unknown)" in text
    assert "inf" not in row_of(text, "samples/s")


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("already_best", "already the best found: no measurable gain"),
        ("unconfirmed", "Not confirmed: about 2.41 times as fast"),
        ("baseline_infeasible", "takes 17.2 GiB of memory, above the limit of 16.0 GiB, so no speed-up can be given"),
        ("nothing_feasible", "nearest miss: trial 3 (batch 256, 4 workers"),
    ],
)
def test_each_verdict_is_said_in_the_headline(variant: str, said: str, tmp_path: Path) -> None:
    text = on_console(make_variants()[variant], tmp_path)
    assert said in " ".join(text.split())
    assert "times baseline" not in text


def test_a_baseline_that_ran_out_of_memory_is_said_so(tmp_path: Path) -> None:
    oom = make_trial(0, BASELINE, "oom", reason="CUDA out of memory", violation=0.1)
    infeasible = make_variants()["baseline_infeasible"]
    summary = infeasible.model_copy(update={"trials": (oom, *infeasible.trials[1:])})
    assert "Your configuration runs out of memory" in on_console(summary, tmp_path)


def test_settings_that_thrash_are_said_to_have_no_room(tmp_path: Path) -> None:
    measured = make_measurement(5000.0, gib=15.9)
    measured = measured.model_copy(update={"memory": measured.memory.model_copy(update={"alloc_retries": 4})})
    thrashing = make_trial(0, BASELINE, "over_memory", measurement=measured)
    infeasible = make_variants()["baseline_infeasible"]
    summary = infeasible.model_copy(update={"trials": (thrashing, *infeasible.trials[1:])})
    said = " ".join(on_console(summary, tmp_path).split())
    assert "Your configuration has no room to train within the memory limit of 16.0 GiB, so no" in said
    nothing = make_variants()["nothing_feasible"].model_copy(update={"trials": (thrashing,)})
    assert "had no room: memory was released and requested again" in " ".join(on_console(nothing, tmp_path).split())


def test_a_search_without_trials_is_told(tmp_path: Path) -> None:
    assert "Nothing was measured." in on_console(make_summary(recommendation=None, trials=()), tmp_path)


def test_confirmed_runs_take_the_place_of_the_trials_own(tmp_path: Path) -> None:
    confirmed = on_console(make_summary(), tmp_path)
    assert row_of(confirmed, "samples/s")[1:] == ["5,100", "12,300", "9,850"]
    assert "3 runs each, in turns with the baseline" in confirmed
    unconfirmed = on_console(make_variants()["unconfirmed"], tmp_path)
    assert row_of(unconfirmed, "samples/s")[1:] == ["5,123", "12,346", "9,876"]
    assert "one trial each" in unconfirmed


def test_settings_that_changed_stand_in_the_table_and_others_do_not(tmp_path: Path) -> None:
    text = on_console(make_summary(), tmp_path)
    assert row_of(text, "lr  ")[1:] == ["0.001", "0.004", "0.001"]
    assert row_of(text, "pin_memory")[1:] == ["off", "on", "on"]
    assert "channels_last" not in text


def test_the_same_batch_column_is_left_out_where_it_is_the_recommended_one(tmp_path: Path) -> None:
    same = {"same_batch": SAME_BATCH, "same_batch_number": 2}
    text = on_console(make_summary(recommendation=make_recommendation(config=SAME_BATCH, number=2, **same)), tmp_path)
    assert "recommended" in text
    assert "same batch" not in text


def test_a_same_batch_that_is_the_baseline_is_told_instead_of_shown(tmp_path: Path) -> None:
    same = {"same_batch": BASELINE, "same_batch_number": 0, "same_batch_speedup": None}
    text = on_console(make_summary(recommendation=make_recommendation(**same)), tmp_path)
    assert "same batch" not in text
    assert "nothing faster than the baseline" in text


def test_busy_fractions_of_different_sources_are_told_apart(tmp_path: Path) -> None:
    other = make_measurement(5000.0).model_copy(update={"busy_source": "profiler"})
    trials = (make_trial(0, BASELINE, measurement=other), make_trial(1, FAST, measurement=make_measurement(9000.0)))
    recommendation = make_recommendation(confirmations=(), same_batch=None, same_batch_number=None)
    text = on_console(make_summary(trials=trials, recommendation=recommendation), tmp_path)
    assert "can't be compared" in text
    assert "baseline: profiler" in text


def test_foreign_text_is_never_taken_for_markup_or_escapes(tmp_path: Path) -> None:
    text = " ".join(on_console(make_summary(), tmp_path).split())
    assert "shape [red](3, 4)[/red] | want `x`" in text
    assert "[long]" in text
    assert "\x1b" not in text


def test_failures_are_grouped_and_counted(tmp_path: Path) -> None:
    text = on_console(make_summary(), tmp_path)
    assert "2 over the limit  trials 3, 4: peak memory must stay within" in text
    assert "2 crashed         trials 6, 7: ValueError" in text
    assert "cut short" not in text.partition("Failures")[2]


@pytest.mark.parametrize("outcome", ["oom", "timeout", "diverged"])
def test_a_refusal_by_the_guard_is_told_apart_from_a_trials_own_failure(outcome: Outcome, tmp_path: Path) -> None:
    own = make_trial(1, FAST, outcome, reason="of its own")
    refused = make_trial(2, FAST, outcome, reason="precision guard: so it was", measurement=make_measurement(9000.0))
    text = on_console(make_summary(trials=(make_trials()[0], own, refused)), tmp_path).partition("Failures")[2]
    assert "trial 1: of its own" in text
    assert "trial 2: precision guard: so it was" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"is_outrun": True}, "already the best of those that may be used: no measurable gain."),
        ({"overloaded": (3,)}, "No faster configuration is known to stay within the memory limit on the largest"),
    ],
)
def test_a_baseline_that_stays_though_something_is_faster_is_not_called_the_best_found(
    more: dict[str, object], said: str, tmp_path: Path
) -> None:
    summary = make_variants()["already_best"]
    assert summary.recommendation is not None
    outrun = summary.model_copy(update={"recommendation": summary.recommendation.model_copy(update=more)})
    text = " ".join(on_console(outrun, tmp_path).split())
    assert said in text
    assert "already the best found" not in text


def test_a_same_batch_that_failed_on_the_largest_samples_is_not_said_to_be_slower(tmp_path: Path) -> None:
    found = make_recommendation(same_batch=BASELINE, same_batch_number=0, same_batch_speedup=None, overloaded=(2,))
    text = " ".join(on_console(make_summary(recommendation=found), tmp_path).split())
    assert "nothing faster than the baseline is known to stay within the limit on the largest samples" in text


def test_only_files_that_are_there_are_listed(tmp_path: Path) -> None:
    (tmp_path / "recommended.yaml").touch()
    text = on_console(make_summary(), tmp_path)
    assert "recommended.yaml" in text
    assert "study.db" not in text


def test_the_learning_rates_advice_is_given(tmp_path: Path) -> None:
    text = " ".join(on_console(make_summary(), tmp_path).split())
    assert "Change lr from 0.001 to 0.004" in text
    assert "gradual warm-up" in text


def test_the_environment_fits_and_names_device_and_torch() -> None:
    console = make_console()
    print_environment(SERVER, console)
    text = text_of(console)
    assert_fits(text)
    assert "NVIDIA H200 (cuda:0, 139 GiB)" in text
    assert "2.13.0, CUDA 13.0" in text


def test_a_check_tells_searched_fixed_and_idle_settings_apart() -> None:
    facts = make_facts(has_4d_input=False)
    space = resolve(
        Basis(
            given=SearchSpace(
                num_workers=IntRange(low=0, high=6),
                micro_batch_size=Choices(values=tuple(range(1, 60))),
                amp_dtype=Choices(values=("bfloat16",)),
            ).given(),
            baseline=TrainingConfig(channels_last=True),
            objective=Objective(),
            facts=facts,
            environment=SERVER,
        )
    )
    console = make_console()
    print_check(SERVER, facts, space, console)
    text = text_of(console)
    assert_fits(text)
    assert row_of(text, "num_workers")[2:] == ["0", "to", "6"]
    assert row_of(text, "amp_dtype")[2:] == ["fixed:", "bfloat16"]
    assert "channels_last has no effect here" in text
    assert f"{space.size:,} combinations" in text


@pytest.mark.parametrize("stale", [None, "runs/[x]/recommended.yaml is stale: driver 550 there, 570\x1b[0m here."])
def test_a_check_says_why_a_former_result_is_stale_and_else_nothing_of_it(stale: str | None) -> None:
    space = resolve(Basis(given={}, baseline=BASELINE, objective=Objective(), facts=RESNET, environment=SERVER))
    console = make_console()
    print_check(SERVER, RESNET, space, console, stale=stale)
    text = text_of(console)
    assert_fits(text)
    assert ("stale" in text) == (stale is not None)
    assert stale is None or "runs/[x]/recommended.yaml is stale: driver 550 there, 570 here." in text


def test_a_kept_global_batch_is_said_to_lead_the_accumulation() -> None:
    space = resolve(
        Basis(
            given={},
            baseline=BASELINE,
            objective=Objective(global_batch="keep"),
            facts=RESNET,
            environment=SERVER,
        )
    )
    console = make_console()
    print_check(SERVER, RESNET, space, console)
    assert row_of(text_of(console), "grad_accum_steps")[2:5] == ["follows", "the", "batch:"]


def test_a_script_keeps_its_learning_rate_unless_its_command_takes_one() -> None:
    for placeholders, told in (((), "the script's own; {lr}"), (("lr",), "not searched; follows")):
        facts = make_facts(script=make_script(placeholders=placeholders))
        space = resolve(Basis(given={}, baseline=BASELINE, objective=Objective(), facts=facts, environment=SERVER))
        console = make_console()
        print_check(SERVER, facts, space, console)
        assert_fits(text_of(console))
        assert told in " ".join(row_of(text_of(console), "lr "))
