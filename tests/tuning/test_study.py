from __future__ import annotations

import gc
import sqlite3
import stat
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages._rdb.models import BaseModel

from autotune.config.plan import Choices, SettingValue
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import RunFolderError
from autotune.messages.search import (
    nothing_new_drawn,
    space_exhausted,
    would_add_nothing,
    would_not_fit,
)
from autotune.note import Note
from autotune.policy import POLICY
from autotune.records.trial import Score, TrialRecord, TrialResult
from autotune.space.space import ResolvedSpace
from autotune.testing import fake_environment
from autotune.tuning.proposals import Skip, params_of
from autotune.tuning.study import Study, read_records
from tests.factories import make_environment, make_fake_space, make_measurement, make_space
from tests.factories.searches import FIXED

IDENTITY = {"model": "Net", "space": "abc"}
OOM = TrialResult(outcome="oom", reason="no memory", violation=0.3)
CRASH = TrialResult(outcome="crashed", reason="boom")
TIMEOUT = TrialResult(outcome="timeout", reason="too slow")
OpenStudy = Callable[..., Study]
UNFIT, REDUNDANT = would_not_fit(chance_fraction=0.1), would_add_nothing()


TWO_DEVICES = fake_environment(device_count=2)
SMALL: dict[str, Any] = {**FIXED, "micro_batch_size": [32, 64], "num_workers": [0, 2]}


@pytest.fixture
def open_study(tmp_path: Path) -> OpenStudy:
    def opened(space: ResolvedSpace | None = None, **identity: str) -> Study:
        return Study.open(
            tmp_path / "study.db",
            space or make_fake_space(),
            identity={**IDENTITY, **identity},
            seed=0,
        )

    return opened


def next_of(study: Study, skip: Skip = lambda _: None) -> TrialRecord:
    """The next trial."""
    trial = study.ask(skip)
    assert trial is not None
    return trial


def run_next(
    study: Study, result: TrialResult = TIMEOUT, skip: Skip = lambda _: None
) -> TrialRecord:
    """The next trial, which has ended."""
    trial = next_of(study, skip)
    study.tell(trial, result, None)
    return trial


def configs_of(study: Study) -> list[TrainingConfig]:
    """Every configuration that a study asks for, each of which times out."""
    seen = []
    while (trial := study.ask()) is not None:
        seen.append(trial.config)
        study.tell(trial, TIMEOUT, None)
    return seen


def test_baseline_outside_the_space_is_first(open_study: OpenStudy) -> None:
    study = open_study(
        make_fake_space(num_workers=[2, 4], micro_batch_size={"low": 64, "high": 128})
    )
    first, *others = [run_next(study, CRASH).config for _ in range(6)]
    assert first == TrainingConfig()
    assert all(one.num_workers in {2, 4} and one.micro_batch_size >= 64 for one in others)


def test_each_configuration_is_asked_for_once(open_study: OpenStudy) -> None:
    study = open_study(make_fake_space(**SMALL))
    seen = configs_of(study)
    assert len(seen) == len(set(seen)) == len(study.records) == 4
    assert study.none_left == space_exhausted()
    outcomes = [trial.user_attrs["outcome"] for trial in study.optuna_study.trials]
    assert any(outcome.startswith("repeat of") for outcome in outcomes)


def skipped(study: Study, reason: Note) -> list[optuna.trial.FrozenTrial]:
    """Optuna's trials of samples that were skipped, while batches above 64 are."""
    for _ in range(12):
        trial = run_next(
            study, skip=lambda config: reason if config.micro_batch_size > 64 else None
        )
        assert trial.config.micro_batch_size <= 64
    trials = study.optuna_study.trials
    return [trial for trial in trials if trial.user_attrs["outcome"] == reason.code]


def test_sample_that_would_not_fit_is_not_run(open_study: OpenStudy) -> None:
    space = make_fake_space(micro_batch_size=[32, 64, 128, 512])
    study, large = open_study(space), TrainingConfig(micro_batch_size=512)
    unfit = skipped(study, UNFIT)
    assert unfit
    for trial in unfit:
        assert trial.state is optuna.trial.TrialState.PRUNED
        assert trial.constraints["memory"] > 0
        assert trial.user_attrs["figures"] == UNFIT.figures
    assert study.is_open(large), "it was not measured: whoever proposes it has it tried"
    assert study.propose(params_of(large, space))
    assert next_of(study, lambda _: UNFIT).config.micro_batch_size == 512


def test_uninformative_sample_is_neither_run_nor_learned(open_study: OpenStudy) -> None:
    study = open_study(make_fake_space(micro_batch_size=[32, 64, 128, 512]))
    idle = skipped(study, REDUNDANT)
    assert idle
    assert all(one.state is optuna.trial.TrialState.FAIL and not one.constraints for one in idle)
    # where nothing else is left it is tried after all, before what would not fit
    last = next_of(study, lambda config: UNFIT if config.micro_batch_size == 512 else REDUNDANT)
    assert last.config.micro_batch_size != 512


@pytest.mark.parametrize(
    ("result", "state", "constraints"),
    [
        (CRASH, optuna.trial.TrialState.FAIL, {}),
        (TIMEOUT, optuna.trial.TrialState.PRUNED, {}),
        (OOM, optuna.trial.TrialState.PRUNED, {"memory": 0.3}),
        # the guard ran out of memory, not the trial
        (
            OOM.model_copy(update={"measurement": make_measurement(100.0)}),
            optuna.trial.TrialState.PRUNED,
            {},
        ),
    ],
)
def test_outcome_in_optuna(
    open_study: OpenStudy,
    result: TrialResult,
    state: optuna.trial.TrialState,
    constraints: dict[str, float],
) -> None:
    study = open_study()
    run_next(study, result)
    (trial,) = study.optuna_study.trials
    assert (trial.state, trial.constraints) == (state, constraints)


@pytest.mark.parametrize(
    ("left_out", "loaders"),
    [
        ({"num_workers": frozenset({2})}, [(32, 0), (64, 0)]),
        (
            {"micro_batch_size": frozenset({64}), "num_workers": frozenset({2})},
            [(32, 0), (32, 2), (64, 0)],
        ),
    ],
)
def test_left_out_is_not_asked_for(
    open_study: OpenStudy,
    left_out: dict[str, frozenset[SettingValue]],
    loaders: list[tuple[int, int]],
) -> None:
    study = open_study(make_fake_space(**SMALL))
    study.leave_out(left_out)
    seen = configs_of(study)
    assert sorted((one.micro_batch_size, one.num_workers) for one in seen) == loaders
    assert not study.propose({"micro_batch_size": 64, "num_workers": 2})


RANKS: dict[str, Any] = {
    **SMALL,
    "micro_batch_size": 32,
    "num_workers": 0,
    "world_size": [1, 2],
    "strategy": ["single", "ddp"],
    "ddp": {
        "static_graph": [False, True],
        "gradient_as_bucket_view": False,
        "bucket_cap_mb": None,
        "comm_hook": None,
    },
}


def test_one_rank_is_asked_for_once_whatever_else_is_drawn(
    open_study: OpenStudy,
) -> None:
    seen = configs_of(open_study(make_fake_space(TWO_DEVICES, **RANKS)))
    group = TrainingConfig(strategy="ddp", world_size=2)
    static = group.model_copy(update={"ddp": DdpConfig(static_graph=True)})
    assert seen[0] == TrainingConfig()
    assert set(seen) == {TrainingConfig(), group, static}
    assert len(seen) == 3


def test_an_excluded_setting_of_ddp_leaves_the_rest_of_it(open_study: OpenStudy) -> None:
    study = open_study(make_fake_space(TWO_DEVICES, **RANKS))
    study.leave_out({"ddp.static_graph": frozenset({True})})
    assert set(configs_of(study)) == {
        TrainingConfig(),
        TrainingConfig(strategy="ddp", world_size=2),
    }


def test_a_group_that_is_the_baseline_is_the_first_trial_as_it_is(
    open_study: OpenStudy,
) -> None:
    ddp = DdpConfig(bucket_cap_mb=12.5, comm_hook="powersgd")
    baseline = TrainingConfig(strategy="ddp", world_size=2, ddp=ddp)
    trial = open_study(make_fake_space(TWO_DEVICES, baseline=baseline)).ask()
    assert trial is not None
    assert (trial.number, trial.config) == (0, baseline)


def test_a_trial_that_was_running_is_not_retried_once_it_is_refused(
    open_study: OpenStudy,
) -> None:
    space = make_fake_space(**{**SMALL, "amp_dtype": ["float32", "bfloat16"]})
    study = open_study(space)
    run_next(study)
    study.propose({"amp_dtype": "bfloat16", "num_workers": 2, "micro_batch_size": 32})
    running = next_of(study)
    assert running.config.amp_dtype == "bfloat16"
    study.close()
    again = open_study(space)
    again.leave_out({"amp_dtype": frozenset({"bfloat16"}), "compile": frozenset({False})})
    while (trial := again.ask()) is not None:
        assert trial.config.amp_dtype == "float32"
        again.tell(trial, TIMEOUT, None)


def test_a_reopened_study_knows_its_records(open_study: OpenStudy) -> None:
    study = open_study()
    for result in (TIMEOUT, OOM, CRASH):
        run_next(study, result)
    assert open_study().records == study.records
    assert read_records(study.optuna_study) == [*study.records]


def test_records_by_number_and_by_end(open_study: OpenStudy) -> None:
    study = open_study(make_fake_space(**SMALL))
    trials = [next_of(study) for _ in range(3)]
    for place in (0, 2, 1):
        score = Score(value=1.0 + place, feasible=True)
        result = TrialResult(outcome="ok", measurement=make_measurement())
        study.tell(trials[place], result, score)
    for one in (study, open_study(make_fake_space(**SMALL))):
        assert [record.number for record in one.records] == [0, 1, 2]
        assert [record.number for record in one.ended] == [0, 2, 1]
    ended = study.ended
    assert ended is study.ended
    assert study.best == ended[1]
    study.add_run(2, TrialResult(outcome="crashed"))
    assert [record.number for record in study.ended] == [0, 2, 1]
    assert study.best == ended[2]


def test_a_promising_proposal_stays_promising_when_retried(
    open_study: OpenStudy,
) -> None:
    study = open_study(make_fake_space(**SMALL))
    run_next(study)
    study.propose({"micro_batch_size": 64, "num_workers": 2}, is_promising=True)
    study.propose({"micro_batch_size": 64, "num_workers": 0})
    study.ask()  # and is cut off
    study.close()
    reopened = open_study(make_fake_space(**SMALL))
    for _ in range(2):
        run_next(reopened)
    (promising,) = reopened.promising
    assert (promising.config.micro_batch_size, promising.config.num_workers) == (64, 2)
    assert open_study(make_fake_space(**SMALL)).promising == [promising]


def test_a_baseline_that_was_running_is_retried_as_the_baseline(
    open_study: OpenStudy,
) -> None:
    open_study().ask()
    retried = open_study().ask()
    assert retried is not None
    assert (retried.number, retried.config) == (0, TrainingConfig())


@pytest.mark.parametrize("result", [CRASH, TrialResult(outcome="invalid", reason="no tensor")])
def test_after_a_failed_baseline_the_study_begins_anew(
    open_study: OpenStudy, result: TrialResult
) -> None:
    study = open_study()
    run_next(study, result)
    again = open_study().ask()
    assert again is not None
    assert (again.number, again.config) == (0, TrainingConfig())


def test_what_is_running_is_not_asked_for_again(open_study: OpenStudy) -> None:
    study = open_study(make_fake_space(**SMALL))
    running = list(iter(study.ask, None))
    assert study.running == running
    assert len(running) == len({trial.config for trial in running}) == 4
    assert not study.is_exhausted
    repeats = [trial for trial in study.optuna_study.trials if "outcome" in trial.user_attrs]
    assert repeats
    numbers = {trial.number for trial in running}
    for repeat in repeats:
        assert repeat.state is optuna.trial.TrialState.FAIL, "samplers learn nothing from it"
        assert int(repeat.user_attrs["outcome"].removeprefix("repeat of running ")) in numbers
    for trial in reversed(running):
        study.tell(trial, TIMEOUT, None)
    assert study.running == []
    assert study.is_exhausted


def test_a_space_without_anything_left_is_not_drawn_from_again(
    open_study: OpenStudy,
) -> None:
    study = open_study(make_fake_space(**SMALL))
    last = [trial for trial in iter(study.ask, None) if trial is not None][-1]
    drawn = len(study.optuna_study.trials)
    assert study.ask() is None
    study.tell(last, TIMEOUT, None)
    assert study.ask() is None
    assert len(study.optuna_study.trials) == drawn


def test_proposal_is_taken_once(open_study: OpenStudy) -> None:
    study, params = open_study(make_fake_space(**SMALL)), {"micro_batch_size": 64, "num_workers": 2}
    study.ask()
    assert [study.propose(params), study.propose(params)] == [True, False]
    assert study.has_waiting
    running = next_of(study)
    assert running.config == TrainingConfig(micro_batch_size=64, num_workers=2, prefetch_factor=2)
    assert not study.has_waiting
    assert next_of(study).config != running.config
    assert not study.propose(params)
    study.tell(running, TIMEOUT, None)
    assert not study.propose(params)


def test_all_that_were_running_are_retried_once_each(open_study: OpenStudy) -> None:
    study = open_study()
    asked = [study.ask() for _ in range(4)]
    assert asked[0] is not None
    study.tell(asked[0], TIMEOUT, None)
    study.close()
    again = open_study()
    retried = [again.ask() for _ in range(3)]
    assert [trial.config for trial in retried if trial] == [
        trial.config for trial in asked[1:] if trial
    ]
    states = [trial.state.name for trial in again.optuna_study.trials]
    assert states == ["PRUNED", *["FAIL"] * 3, *["RUNNING"] * 3]


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.write_bytes(b"no database at all, but long enough to be read as one" * 100)
    with pytest.raises(RunFolderError, match=r"study\.db"):
        Study.open(path, make_fake_space(), identity=IDENTITY, seed=0)


def test_record_of_another_version_is_refused(open_study: OpenStudy, tmp_path: Path) -> None:
    study = open_study()
    run_next(study)
    study.close()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection, connection:
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = "
            r"""replace(value_json, '\"outcome\"', '\"unknown\": 1, \"outcome\"')"""
        )
    with pytest.raises(RunFolderError, match=r"study\.db.*TrialRecord"):
        open_study()


def test_the_study_is_an_ordinary_optuna_study(open_study: OpenStudy, tmp_path: Path) -> None:
    study = open_study()
    run_next(study, CRASH)
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    (name,) = optuna.get_all_study_names(storage)
    assert len(optuna.load_study(study_name=name, storage=storage).trials) >= 1
    storage.engine.dispose()
    with closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_optunas_verbosity_is_the_users_afterwards(open_study: OpenStudy) -> None:
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        open_study().ask()
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)


def test_file_modes_are_kept_from_others(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.touch(mode=0o600)
    Study.open(path, make_fake_space(), identity=IDENTITY, seed=0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_an_earlier_sitting_has_left_waiting_is_not_proposed_again(
    open_study: OpenStudy,
) -> None:
    study, params = open_study(make_fake_space(**SMALL)), {"micro_batch_size": 64, "num_workers": 2}
    run_next(study)
    study.propose(params)
    study.close()
    again = open_study(make_fake_space(**SMALL))
    assert again.has_waiting
    assert not again.propose(params)
    assert again.propose({"micro_batch_size": 64, "num_workers": 0})


def test_running_or_left_out_configurations_are_not_tried_again(
    open_study: OpenStudy,
) -> None:
    study = open_study(make_fake_space(**SMALL))
    study.propose({"micro_batch_size": 64, "num_workers": 2})
    waiting, other = (
        TrainingConfig(micro_batch_size=64, num_workers=2),
        TrainingConfig(micro_batch_size=64),
    )
    study.ask()
    assert not study.is_open(TrainingConfig())
    assert study.is_open(waiting)
    assert study.is_open(other)
    study.leave_out({"micro_batch_size": frozenset({64})})
    assert not study.is_open(other)


def test_asking_whether_anything_is_left_changes_nothing(tmp_path: Path) -> None:
    def asked(path: Path, *, is_curious: bool) -> list[TrainingConfig]:
        study, found = Study.open(path, make_fake_space(**SMALL), identity=IDENTITY, seed=3), []
        while (trial := study.ask()) is not None:
            found.append(trial.config)
            study.tell(trial, TIMEOUT, None)
            assert not is_curious or study.is_exhausted == study.is_exhausted == (len(found) == 4)
        return found

    assert asked(tmp_path / "a.db", is_curious=True) == asked(tmp_path / "b.db", is_curious=False)


def test_a_resumed_study_keeps_its_choices_despite_another_probe(
    open_study: OpenStudy,
) -> None:
    def space_seen(slow_tail_fraction: float, cores_per_item: float) -> ResolvedSpace:
        return make_space(
            SMALL | {"num_workers": [0, 2]},
            environment=make_environment(cores=8),
            slow_tail_fraction=slow_tail_fraction,
            cores_per_item=cores_per_item,
        )

    def choices(study: Study) -> dict[str, set[SettingValue]]:
        return {name: {*study.space.domains[name]} for name in ("in_order", "worker_threads")}

    first = open_study(space_seen(0.21, 2.0))
    run_next(first)
    begun = choices(first)
    assert begun == {"in_order": {True, False}, "worker_threads": {None, 1, 2}}
    for seen in ((0.19, 3.1), (0.21, 1.0)):
        resumed = open_study(space_seen(*seen))
        assert choices(resumed) == begun
        run_next(resumed)
    assert [record.number for record in resumed.records] == [0, 1, 2]


def test_of_a_space_that_is_drawn_from_only_what_was_drawn_is_said(
    open_study: OpenStudy,
) -> None:
    policy = replace(POLICY, trials=replace(POLICY.trials, most_listed=3))
    study = open_study(make_fake_space(policy=policy, **SMALL))
    assert len(configs_of(study)) == 4
    assert study.none_left == nothing_new_drawn(draws=500)
    assert study.is_exhausted, "as far as so many draws can tell"


def test_a_recorded_trial_is_not_run_again_after_a_kill(
    open_study: OpenStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study()
    for _ in range(2):
        run_next(study)
    killed = next_of(study)
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "tell", interrupt)
        with pytest.raises(KeyboardInterrupt):
            study.tell(killed, OOM, None)
    for _ in range(2):
        again = open_study()
        assert [record.number for record in again.records] == [0, 1, 2]
        assert again.ended[-1].config == killed.config
        assert not again.has_waiting


def test_a_trial_killed_while_asked_for_is_retried_whole(
    open_study: OpenStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = open_study()
    run_next(study)
    wanted = params_of(TrainingConfig(num_workers=2, micro_batch_size=64), study.space)
    assert study.propose(wanted)
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Trial, "_suggest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            study.ask()
    trial = open_study().ask()
    assert trial is not None
    assert params_of(trial.config, study.space) == wanted


def test_a_study_that_was_killed_before_it_knew_its_search_is_begun_anew(
    open_study: OpenStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "set_user_attr", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_study()
    trial = open_study().ask()
    assert trial is not None
    assert trial.number == 0


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_trial_adds_at_most_30_kib_to_the_memory_of_the_parent() -> None:
    space = make_fake_space(micro_batch_size=list(range(1, 65)), num_workers=[0, 1, 2, 4])
    study = Study.open(None, space, identity=IDENTITY, seed=0, method="random")
    written = TrialResult(outcome="ok", measurement=make_measurement()).model_dump_json()
    count = 40

    def held_bytes_after_trials() -> int:
        for _ in range(count):
            trial = next_of(study)
            study.tell(
                trial, TrialResult.model_validate_json(written), Score(value=1.0, feasible=True)
            )
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    before, after = (
        held_bytes_after_trials(),
        held_bytes_after_trials(),
    )  # the first hold what is held once
    tracemalloc.stop()
    assert (after - before) / count < 30 * 2**10


def test_a_study_that_is_closed_leaves_no_statements_behind(tmp_path: Path) -> None:
    gc.collect()  # else a study of another test, let go of meanwhile, may have all forgotten
    study = Study.open(tmp_path / "study.db", make_fake_space(), identity={}, seed=0)
    assert study.ask() is not None
    held = [mapper for mapper in BaseModel.registry.mappers if vars(mapper).get("_compiled_cache")]
    assert held, "SQLAlchemy keeps statements elsewhere: _let_go has to forget them there"
    study.close()
    assert not any(vars(mapper).get("_compiled_cache") for mapper in BaseModel.registry.mappers)


def test_widened_study_is_reopened(
    open_study: OpenStudy,
) -> None:
    study = open_study(make_fake_space(**SMALL | {"num_workers": 2, "micro_batch_size": 32}))
    first = next_of(study)
    study.tell(first, TrialResult(outcome="ok", measurement=make_measurement()), None)
    study.widen({"compile": Choices(values=(False, True))})
    assert study.propose({**params_of(first.config, study.space), "compile": True})
    study.close()
    study = open_study(make_fake_space(**SMALL | {"num_workers": 2, "micro_batch_size": 32}))
    second = next_of(study)
    assert second.config.compile
    study.tell(second, CRASH, None)
    study.close()
    again = open_study(make_fake_space(**SMALL | {"num_workers": 2, "micro_batch_size": 32}))
    assert set(again.space.domains["compile"]) == {False, True}
    assert [record.config.compile for record in again.records] == [False, True]
