"""A warm start: what an earlier search has found is tried first, and told as stale where its machine was another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

import autotune
from autotune.api.commands import check_plan
from autotune.config.environment import COMPARED, Environment
from autotune.config.plan import Plan, Workload
from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.errors import ConfigError, StudyMismatchError
from autotune.files.recommended import describe_machine
from autotune.files.run_folder import read_summary
from autotune.messages.search import warm_start
from autotune.space.space import ResolvedSpace, compose
from autotune.testing import FakeLauncher, fake_environment
from autotune.tuning.warm_start import (
    Hints,
    differences,
    note_of_hints,
    note_of_stale,
    read_hints,
    seed_params,
)
from tests.factories import make_fake_space
from tests.factories.searches import Interrupting, fake_search

HERE = fake_environment()
FAST = TrainingConfig(
    micro_batch_size=128,
    num_workers=4,
    prefetch_factor=4,
    persistent_workers=True,
    amp_dtype="bfloat16",
)
CHANGES: list[tuple[str, object, str, str, str]] = [
    ("device_name", "NVIDIA H200", "device_name", "Fake GPU", "NVIDIA H200"),
    ("device_count", 2, "device_count", "1", "2"),
    ("driver", "570.86", "driver", "0.0", "570.86"),
    ("driver", None, "driver", "0.0", "none"),
    ("cores", 16, "cores", "4", "16"),
    ("torch", "2.13", "torch", "2", "2.13"),
    ("cuda", "13.0", "cuda", "0", "13.0"),
]
"""A part of the fingerprint, its value here, and the difference that is noted: name, there, here."""


def search(run_dir: Path, **arguments: Any) -> autotune.SearchResult:
    arguments = {"n_trials": 8, "method": "tpe", "space": None, **arguments}
    return fake_search(run_dir.parent, run_dir=run_dir, **arguments)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search."""
    return search(tmp_path_factory.mktemp("earlier") / "there").run_dir


def make_hints(*configs: TrainingConfig, environment: Environment = HERE) -> Hints:
    return Hints(source=Path("runs/there"), configs=configs, machine=describe_machine(environment))


def seed_of(config: TrainingConfig, space: ResolvedSpace) -> TrainingConfig:
    (params,) = seed_params(make_hints(config), space)
    found = compose(params, space)
    assert isinstance(found, TrainingConfig)
    return found


def without_lr(config: TrainingConfig) -> dict[str, object]:
    """Trials keep the baseline's learning rate."""
    return config.model_dump(exclude={"lr"})


# What is tried first


@pytest.mark.parametrize("method", ["model", "tpe", "random", "grid"])
def test_the_best_of_a_run_folder_is_tried_right_after_the_baseline(
    there: Path, tmp_path: Path, method: str
) -> None:
    space: dict[str, Any] = {
        "num_workers": [0, 2, 4],
        "prefetch_factor": 4,
        "micro_batch_size": [32, 64, 128],
    }
    result = search(tmp_path / "here", warm_start=there, method=method, n_trials=3, space=space)
    assert result.trials[0].config == TrainingConfig()
    best = read_summary(there).recommendation
    assert best is not None
    assert without_lr(result.trials[1].config) == without_lr(
        seed_of(best.config, make_fake_space(**space))
    )


def test_hints_of_a_run_folder(there: Path, tmp_path: Path) -> None:
    earlier = read_summary(there)
    assert earlier.recommendation is not None
    assert earlier.recommendation.same_batch is not None
    scored = [one for one in earlier.trials if one.score]
    feasible = sorted(scored, key=lambda one: -one.score.value)  # type: ignore[union-attr]
    wanted = [
        earlier.recommendation.config,
        earlier.recommendation.same_batch,
        *(one.config for one in feasible[:3]),
    ]
    result = search(tmp_path / "here", warm_start=there)
    count = len({str(without_lr(one)) for one in wanted})
    first = [without_lr(trial.config) for trial in result.trials[1 : count + 1]]
    assert first == [
        one
        for n, one in enumerate(map(without_lr, wanted))
        if one not in [*map(without_lr, wanted)][:n]
    ]
    assert (
        warm_start(source=str(there), configurations=count, differences=None)
        in result.summary.notes
    )


def test_a_recommended_yaml_seeds_its_settings(there: Path, tmp_path: Path) -> None:
    path = there / "recommended.yaml"
    result = search(tmp_path / "here", warm_start=str(path), n_trials=2)
    assert without_lr(result.trials[1].config) == without_lr(autotune.load(path))
    assert warm_start(source=str(path), configurations=1, differences=None) in result.summary.notes


def test_relative_path_and_tilde(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(there.parent)
    monkeypatch.setenv("HOME", str(there.parent))
    for name in ("there", "~/there"):
        assert read_hints(Path(name)).configs == read_hints(there).configs
    for name in ("there/recommended.yaml", "~/there/recommended.yaml"):
        assert read_hints(Path(name)).configs == (autotune.load(there / "recommended.yaml"),)


def test_a_home_folder_that_nobody_knows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^warm_start: .*'~nobody-"):
        read_hints(Path("~nobody-has-this-name/run"))


# In another space


def test_a_number_takes_the_nearest_value_of_the_space() -> None:
    space = make_fake_space(
        num_workers=[0, 1, 3], micro_batch_size=[32, 100], prefetch_factor=[2, 8]
    )
    found = seed_of(FAST, space)
    assert (found.num_workers, found.micro_batch_size, found.prefetch_factor) == (3, 100, 2)


@pytest.mark.parametrize("listed", [["float16", "float32"], ["float32", "float16"]])
def test_a_precision_that_is_not_there_becomes_the_baselines(listed: list[str]) -> None:
    assert seed_of(FAST, make_fake_space(amp_dtype=listed)).amp_dtype == "float32"


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (2, 2), (8, 4)])
def test_more_ranks_than_there_are_devices_become_as_many_as_there_are(
    devices: int, ranks: int
) -> None:
    group = FAST.model_copy(
        update={"strategy": "ddp", "world_size": 4, "num_workers": 1, "ddp": DdpConfig()}
    )
    found = seed_of(group, make_fake_space(fake_environment(device_count=devices)))
    assert (found.world_size, found.strategy) == (ranks, "ddp" if ranks > 1 else "single")
    assert found.num_workers == 1


def test_a_batch_above_the_limit_shrinks_to_what_the_limit_allows() -> None:
    hint = FAST.model_copy(update={"micro_batch_size": 512, "grad_accum_steps": 4})
    found = seed_of(hint, make_fake_space(objective={"max_batch_scale": 4}))
    assert (found.micro_batch_size, found.grad_accum_steps) == (128, 1)


def test_gradients_are_accumulated_less_before_the_batch_shrinks() -> None:
    hint = FAST.model_copy(update={"micro_batch_size": 64, "grad_accum_steps": 4})
    found = seed_of(hint, make_fake_space(objective={"max_batch_scale": 4}))
    assert (found.micro_batch_size, found.grad_accum_steps) == (64, 2)


def test_batch_shrinks_to_a_divisor() -> None:
    space = make_fake_space(
        baseline=TrainingConfig(micro_batch_size=48), objective={"global_batch": "keep"}
    )
    found = seed_of(FAST.model_copy(update={"micro_batch_size": 36}), space)
    assert found.global_batch_size == 48
    assert found.micro_batch_size <= 36


def test_hints_that_run_alike_are_left_out() -> None:
    slow = TrainingConfig(num_workers=0, lr=0.5)
    space = make_fake_space(num_workers=[0, 4])
    several = make_hints(slow, FAST, FAST.model_copy(update={"num_workers": 5, "lr": 0.1}))
    assert len(seed_params(several, space)) == 1
    nothing = make_hints(TrainingConfig())
    assert note_of_hints(nothing, space).figures["configurations"] == 0


SPACES = [
    make_fake_space(),
    make_fake_space(fake_environment(device_count=4)),
    make_fake_space(
        fake_environment(device_count=2), ddp={"bucket_cap_mb": {"low": 10, "high": 100}}
    ),
    make_fake_space(
        objective={"global_batch": "keep"}, baseline=TrainingConfig(micro_batch_size=24)
    ),
    make_fake_space(
        num_workers={"low": 1, "high": 3},
        intra_op_threads={"low": 1, "high": 2},
        compile=[True, False],
    ),
    make_fake_space(
        HERE.model_copy(
            update={"device_kind": "cpu", "device": "cpu", "native_amp_dtypes": ("float32",)}
        )
    ),
    make_fake_space(micro_batch_size=8),
]


ELSEWHERE = make_fake_space(
    fake_environment(device_count=8, cores=64),
    micro_batch_size={"low": 1, "high": 4096},
    grad_accum_steps=[1, 2, 3, 8],
    num_workers={"low": 0, "high": 64},
    prefetch_factor=[2, 3, 16],
    intra_op_threads=[None, 1, 64],
    compile=[False, True],
    ddp={"bucket_cap_mb": [None, 7.5, 400]},
    objective={"max_batch_scale": 10**6},
)


@st.composite
def hints(draw: st.DrawFn) -> TrainingConfig:
    """Settings of another machine."""
    domains = ELSEWHERE.parameters.items()
    config = compose({name: draw(st.sampled_from(list(one))) for name, one in domains}, ELSEWHERE)
    assume(isinstance(config, TrainingConfig))
    assert isinstance(config, TrainingConfig)
    return config


@given(config=hints(), space=st.sampled_from(SPACES))
def test_any_hint_fits_the_space(config: TrainingConfig, space: ResolvedSpace) -> None:
    found = [compose(params, space) for params in seed_params(make_hints(config), space)]
    assert len(found) <= 1
    assert all(isinstance(one, TrainingConfig) for one in found)


# An earlier search that is not whole


def test_an_interrupted_search_seeds_what_it_had_found(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "there", launcher=Interrupting(at=lambda _, launched: launched == 4))
    tried = {str(without_lr(trial.config)) for trial in read_summary(tmp_path / "there").trials}
    result = search(tmp_path / "here", warm_start=tmp_path / "there", n_trials=2)
    assert str(without_lr(result.trials[1].config)) in tried


@pytest.mark.parametrize(
    ("content", "said"), [(None, "summary.json"), (b'{"name": 3}', "version"), (b"\xff", "version")]
)
def test_damaged_run_folder_names_the_remedy(
    there: Path, tmp_path: Path, content: bytes | None, said: str
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "recommended.yaml").write_bytes((there / "recommended.yaml").read_bytes())
    if content is not None:
        (folder / "summary.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_hints(folder)
    (problem,) = caught.value.problems
    assert problem.startswith("warm_start: ")
    assert said in problem
    assert str(folder / "recommended.yaml") in problem


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone", None, "No such file"),
        ("empty", b"", "is empty"),
        ("notes.txt", b"just text", "the top level must be a mapping"),
        ("autotune.yaml", b"workload: {model: 'a:b', dataset: 'a:b'}", "is not a recommended.yaml"),
        ("study.db", b"SQLite format 3\x00\xff\xfe", "must be UTF-8 text"),
        ("list.yaml", b"[1, 2", "not valid YAML"),
        ("x" * 5000, None, "can't be read"),
    ],
)
def test_a_file_that_is_neither_is_one_clear_error_before_anything_is_begun(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path, launcher = tmp_path / name, FakeLauncher()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        search(tmp_path / "here", warm_start=path, launcher=launcher)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("warm_start: ")
    assert launcher.jobs == []
    assert not (tmp_path / "here").exists()


def test_no_run_folder(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hints(tmp_path)
    assert "recommended.yaml" not in caught.value.problems[0]


@pytest.mark.parametrize("value", [3, "", ["runs/a"], "a\0b", True])
def test_a_value_that_is_no_path_is_told(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^search\.warm_start: "):
        search(tmp_path / "here", warm_start=value)


def test_an_unknown_method_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^search\.method: .*'model', .*'bayes'"):
        search(tmp_path / "here", method="bayes")


CALL = "!!python/object/apply:os.mkdir ['made']"


def test_foreign_recommended_yaml_is_data(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (there / "recommended.yaml").read_text()
    content = yaml.safe_load(text)
    assert f"driver: '{content['machine']['driver']}'" in text
    path = tmp_path / "recommended.yaml"
    path.write_text(text.replace(f"driver: '{content['machine']['driver']}'", f"driver: {CALL}"))
    assert read_hints(path).configs == (autotune.load(there / "recommended.yaml"),)
    path.write_text(text.replace("pin_memory: ", f"pin_memory: {CALL} #", 1))
    with pytest.raises(ConfigError, match="pin_memory: "):
        read_hints(path)
    assert not (tmp_path / "made").exists()


# Going on


def test_a_search_that_goes_on_tries_nothing_of_a_warm_start_twice(
    there: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(
            tmp_path / "here",
            warm_start=there,
            launcher=Interrupting(at=lambda _, launched: launched == 4),
        )
    begun = [str(without_lr(trial.config)) for trial in read_summary(tmp_path / "here").trials]
    launcher = FakeLauncher()
    result = search(tmp_path / "here", warm_start=there, launcher=launcher)
    tried = [str(without_lr(trial.config)) for trial in result.trials]
    assert tried[: len(begun)] == begun
    assert len(tried) == len(set(tried)) == 8
    seeds = seed_params(read_hints(there), make_fake_space())
    wanted = {
        str(without_lr(config))
        for one in seeds
        if isinstance(config := compose(one, make_fake_space()), TrainingConfig)
    }
    assert wanted <= set(tried[: len(seeds) + 1])


def test_warm_start_named_on_resume(there: Path, tmp_path: Path) -> None:
    best = without_lr(autotune.load(there / "recommended.yaml"))
    before = search(tmp_path / "here", n_trials=3, method="random")
    assert best not in [without_lr(trial.config) for trial in before.trials]
    after = search(tmp_path / "here", n_trials=8, method="random", warm_start=there)
    assert best in [without_lr(trial.config) for trial in after.trials]


def test_a_search_begun_anew_in_its_own_folder_may_start_from_what_was_there(
    tmp_path: Path,
) -> None:
    first = search(tmp_path / "here")
    second = search(tmp_path / "here", warm_start=tmp_path / "here", fresh=True, n_trials=2)
    assert without_lr(second.trials[1].config) == without_lr(first.best)


# Whether it still holds


@pytest.mark.parametrize(("part", "value", "name", "was", "is_now"), CHANGES)
def test_a_part_of_the_machine_that_has_changed_is_named(
    part: str, value: object, name: str, was: str, is_now: str
) -> None:
    here = HERE.model_copy(update={part: value})
    differing = [f"{COMPARED[name]} {was} there, {is_now} here"]
    assert differences(describe_machine(HERE), here) == differing
    figures = {"source": "runs/there", "configurations": 1, "differences": differing}
    assert note_of_hints(make_hints(FAST), make_fake_space(here)).figures == figures


def test_a_change_that_the_file_does_not_tell_is_stale_all_the_same() -> None:
    older = {
        name: one for name, one in describe_machine(HERE).items() if name not in {"devices", "cuda"}
    }
    assert differences(older, HERE.model_copy(update={"cuda": "13"})) == []


@pytest.mark.parametrize(
    "part", [{"python": "3.14"}, {"versions": {"numpy": "3"}}, {"hosts": 4}, {"ram_bytes": 1}]
)
def test_what_the_fingerprint_leaves_out_makes_nothing_stale(part: dict[str, Any]) -> None:
    here = HERE.model_copy(update=part)
    assert differences(describe_machine(HERE), here) is None
    assert note_of_hints(make_hints(FAST), make_fake_space(here)).figures["differences"] is None


def test_a_machine_that_is_not_told_is_not_called_another() -> None:
    assert differences({}, HERE) is None
    assert differences({"driver": "570"}, HERE) is None


def test_what_a_file_tells_of_its_machine_is_cut_and_printable() -> None:
    hostile = {**describe_machine(HERE), "fingerprint": "0", "driver": "\x1b[31m" + "9" * 5000}
    differing = differences(hostile, HERE)
    assert differing == [f"driver ?[31m{'9' * 55} there, 0.0 here"]


# What a check and a second run say of it


def make_plan(run_dir: Path | None, **search: Any) -> Plan:
    plan = Plan(name="x", workload=Workload(model=object, dataset=list), run_dir=run_dir)
    return replace(plan, search=plan.search.model_copy(update=search))


def test_check_of_another_machine(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(there.parent)
    launcher = FakeLauncher(environment=HERE.model_copy(update={"driver": "570.86"}))
    stale = check_plan(make_plan(Path("there")), launcher=launcher).stale
    assert stale is not None
    assert stale.startswith("there/recommended.yaml ")
    assert f"{COMPARED['driver']} 0.0 there, 570.86 here" in stale
    assert "--fresh" in stale


def test_a_check_says_nothing_of_a_recommendation_that_holds_or_is_not_there(
    there: Path, tmp_path: Path
) -> None:
    for run_dir, has_one in (
        (there, True),
        (tmp_path / "none", False),
        (tmp_path / ("x" * 300), False),
        (None, False),
    ):
        found = check_plan(make_plan(run_dir), launcher=FakeLauncher())
        assert (found.stale, found.has_recommendation) == (None, has_one)


@pytest.mark.parametrize(
    "text", ["", "[", "machine: 3", "machine: {fingerprint: null, driver: 3}", "\0"]
)
def test_a_check_leaves_alone_what_it_can_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "recommended.yaml").write_text(text)
    assert note_of_stale(tmp_path / "recommended.yaml", HERE) is None
    assert check_plan(make_plan(tmp_path), launcher=FakeLauncher()).stale is None


def test_a_check_refuses_a_warm_start_as_a_run_does(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^warm_start: .*gone.yaml"):
        check_plan(make_plan(None, warm_start=tmp_path / "gone.yaml"), launcher=FakeLauncher())


def test_a_check_leaves_the_run_folder_as_it_is(there: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in there.iterdir()}
    check_plan(make_plan(there, warm_start=there), launcher=FakeLauncher())
    assert {path: path.stat().st_mtime_ns for path in there.iterdir()} == before


def test_run_on_another_machine_is_refused(there: Path) -> None:
    for part, value, name, was, is_now in CHANGES[:2]:
        launcher = FakeLauncher(environment=HERE.model_copy(update={part: value}))
        with pytest.raises(StudyMismatchError) as caught:
            search(there, launcher=launcher)
        message = str(caught.value)
        assert f" differs in {COMPARED[name]}: {was} there, {is_now} here. " in message
        assert "--fresh" in message
