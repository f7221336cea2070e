"""Diagnosis: the contract over the fake launcher, and each bottleneck triggered by a workload in real processes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autotune
from autotune.api import diagnose as diagnosing
from autotune.api.diagnose import MeasuringTime, diagnose_plan
from autotune.config.plan import (
    Budget,
    Domain,
    Objective,
    OptimizerFacts,
    Plan,
    SearchSpace,
    Workload,
)
from autotune.config.training_config import TrainingConfig
from autotune.diagnosis.advice import list_variations
from autotune.errors import ConfigError, NothingFeasibleError, WorkloadError
from autotune.launch.local import LocalLauncher
from autotune.messages.trials import another_search
from autotune.note import Note
from autotune.protocol.disk import read_model, write_model
from autotune.protocol.messages import RankReport, read_job
from autotune.records.result import Diagnosis, Progress
from autotune.space.ranges import Basis
from autotune.space.space import ResolvedSpace, resolve
from autotune.testing import FakeLauncher, FakeTrial, analytic_cost, fake_environment, fake_facts
from tests.api import bottlenecks as cases
from tests.factories import make_measurement

GIB = 2**30
Look = Callable[..., autotune.DiagnosisResult]
RUN = make_measurement()
"""A run of which neither side was measured alone."""


def diagnose(launcher: FakeLauncher | None = None, **arguments: Any) -> autotune.DiagnosisResult:
    return autotune.diagnose(
        object, list, progress=False, launcher=launcher or FakeLauncher(), **arguments
    )


def space_of(
    config: TrainingConfig,
    *,
    kind: str = "cpu",
    native: tuple[str, ...] = ("float32",),
    given: dict[str, Domain] | None = None,
    **facts: Any,
) -> ResolvedSpace:
    environment = fake_environment().model_copy(
        update={"device_kind": kind, "native_amp_dtypes": native}
    )
    found = fake_facts().model_copy(update=facts)
    return resolve(
        Basis(
            given=given or {},
            baseline=config,
            objective=Objective(),
            facts=found,
            environment=environment,
        )
    )


def test_a_loader_that_holds_the_device_is_found_and_workers_are_advised() -> None:
    found = diagnose()
    assert found.verdict == "data_cpu"
    assert found.findings[0].bottleneck == "data_cpu"
    assert not found.is_healthy
    best = found.advice[0]
    assert best.settings["num_workers"] == 8
    assert best.expected_gain is not None
    assert best.expected_gain > 3
    assert found.headroom.lower == "loader"
    assert [headline.code for headline in found.diagnosis.headline_notes] == [
        "bottleneck",
        "best_setting",
    ]


def held_by_device(_: TrainingConfig) -> FakeTrial:
    return FakeTrial(
        samples_per_s=1000.0, busy_fraction=0.99, loader_ceiling=9000.0, device_ceiling=1005.0
    )


def test_what_runs_at_the_devices_ceiling_is_healthy() -> None:
    found = diagnose(FakeLauncher(held_by_device, noise=0.001))
    assert (found.verdict, found.is_healthy) == ("compute", True)
    (cheaper,) = found.advice
    assert (cheaper.settings, cheaper.expected_gain) == ({}, None)


def notes_of(found: autotune.DiagnosisResult) -> dict[str, dict[str, Any]]:
    """The figures of each remark by its code."""
    return {note.code: note.figures for note in found.diagnosis.notes if isinstance(note, Note)}


def test_answer_in_words() -> None:
    found = diagnose()
    assert all(finding.evidence for finding in found.findings)
    assert all(piece.text and piece.basis for piece in found.advice)
    report = found.report().replace("\\", "")
    assert report.splitlines()[0].endswith(": object")
    assert found.headline
    assert found.headline in report
    assert found.advice[0].text in report


def test_a_diagnosis_survives_its_json() -> None:
    found = diagnose().diagnosis
    assert Diagnosis.model_validate_json(found.model_dump_json()) == found


def test_nothing_is_left_in_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    diagnose()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, None),
        ({"space": SearchSpace(num_workers=[0, 2])}, ["space"]),
        ({"run_dir": Path("runs/x"), "budget": Budget(n_trials=5)}, ["budget", "run_dir"]),
    ],
)
def test_what_only_a_search_obeys_is_named(asked: dict[str, Any], names: list[str] | None) -> None:
    plan = Plan(name="case", workload=Workload(model=object, dataset=list), **asked)
    notes = notes_of(diagnose_plan(plan, progress=False, launcher=FakeLauncher()))
    assert notes.get("no_effect_on_diagnosis") == (None if names is None else {"names": names})


class WithoutBreakdown(FakeLauncher):
    """Its trials could not be profiled."""

    def launch(self, launch: Any) -> Any:
        ended = super().launch(launch)
        report = read_model(launch.folder.report, RankReport)
        if report.result.measurement is not None:
            run = report.result.measurement.model_copy(update={"breakdown": None})
            result = report.result.model_copy(update={"measurement": run})
            write_model(launch.folder.report, report.model_copy(update={"result": result}))
        return ended


def test_a_missing_breakdown_is_noted() -> None:
    found = [notes_of(diagnose(launcher)) for launcher in (FakeLauncher(), WithoutBreakdown())]
    assert ["breakdown_not_measured" in notes for notes in found] == [False, True]


def test_a_job_without_a_breakdown_is_not_healthy() -> None:
    found = diagnose(WithoutBreakdown(held_by_device, noise=0.001))
    assert (found.verdict, found.is_healthy) == ("compute", False)
    assert found.diagnosis.headline_notes[0].code == "time_not_attributed"


def test_the_baseline_is_the_only_trial() -> None:
    launcher = FakeLauncher()
    diagnose(launcher, baseline={"micro_batch_size": 64})
    assert launcher.launched == [TrainingConfig(micro_batch_size=64)]


def test_a_baseline_out_of_memory_is_an_error_of_feasibility() -> None:
    launcher = FakeLauncher(lambda _: FakeTrial(outcome="oom", reason="no room"))
    with pytest.raises(NothingFeasibleError, match=r"no room.*baseline\.micro_batch_size"):
        diagnose(launcher)


def test_a_baseline_that_crashes_is_an_error_of_the_workload() -> None:
    launcher = FakeLauncher(lambda _: FakeTrial(outcome="crashed", reason="ValueError: shapes"))
    with pytest.raises(WorkloadError, match="ValueError: shapes"):
        diagnose(launcher)


def test_a_baseline_over_the_limit_is_diagnosed_with_a_note() -> None:
    found = diagnose(memory_limit=GIB // 2)
    assert "512 MiB" in notes_of(found)["search_would_refuse"]["fault"]


class WithoutCurves(FakeLauncher):
    """Its job of curves does not end."""

    def launch(self, launch: Any) -> Any:
        if read_job(launch.folder.job).kind == "curves":
            self.cost = lambda _: FakeTrial(hangs=True)
        return super().launch(launch)


def test_curves_that_are_lost_leave_the_verdict_and_a_note() -> None:
    found = diagnose(WithoutCurves())
    assert found.verdict == "data_cpu"
    assert [advice.kind for advice in found.advice if advice.settings] == ["add_workers"]
    assert "others_failed" in notes_of(found)


@pytest.mark.parametrize(
    ("startup_s", "is_traced"), [(20.0, True), (34.0, True), (36.0, False), (300.0, False)]
)
def test_other_settings_are_measured_within_45_s_or_not_at_all(
    startup_s: float, is_traced: bool
) -> None:
    def cost(config: TrainingConfig) -> FakeTrial:
        return replace(analytic_cost(config), startup_s=startup_s)

    launcher = FakeLauncher(cost)
    found = diagnose(launcher)
    deadlines = [job.process.deadline_s for job in launcher.jobs if job.kind == "curves"]
    assert [deadline_s <= 45 for deadline_s in deadlines] == [True] * is_traced
    short = notes_of(found).get("no_time_for_others", {})
    assert short.get("startup_s") == (None if is_traced else startup_s)
    assert found.diagnosis.headline_notes[1].code == (
        "best_setting" if is_traced else "computed_setting"
    )


@pytest.mark.parametrize(
    ("cost", "codes"),
    [
        (analytic_cost, ["bottleneck", "computed_setting"]),
        (held_by_device, []),
        (lambda config: replace(analytic_cost(config), startup_s=300.0), None),
    ],
    ids=["a slow loader", "healthy, as far as is known", "no time for others"],
)
def test_headline_before_the_curves(
    monkeypatch: pytest.MonkeyPatch,
    cost: Callable[[TrainingConfig], FakeTrial],
    codes: list[str] | None,
) -> None:
    shown = list[Progress]()
    monkeypatch.setattr(diagnosing, "make_progress", lambda _: nullcontext(shown.append))
    diagnose(FakeLauncher(cost, noise=0.001))
    phases = [progress.phase for progress in shown]
    assert phases == ["probe", "measure", *(["curves"] if codes is not None else [])]
    assert [one.code for one in shown[-1].warnings] == (codes or [])


def test_what_the_run_has_measured_of_todays_settings_is_not_measured_again() -> None:
    launcher = FakeLauncher()
    found = diagnose(launcher)
    (job,) = [job for job in launcher.jobs if job.kind == "curves"]
    own = found.diagnosis.evidence.measurement.ceilings
    assert job.known is not None
    assert own is not None
    assert [point.ceiling for point in job.known.loader] == [own.loader]
    assert [point.ceiling for point in job.known.device] == [own.device]


def test_the_arguments_that_a_search_alone_takes_are_named() -> None:
    of_search, own = (
        inspect.signature(call).parameters.keys() for call in (autotune.search, autotune.diagnose)
    )
    only = list(of_search - own)
    assert own <= of_search
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    paragraph = next(part for part in page.split("\n\n") if part.startswith("`autotune.diagnose("))
    docstring = autotune.diagnose.__doc__ or ""
    assert [name for name in only if name not in docstring or f"`{name}`" not in paragraph] == []


def test_searches_that_run_beside_it_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    other = another_search(pid=7, user="ann", command="autotune run a.yaml")
    monkeypatch.setattr(diagnosing, "Neighbours", lambda: SimpleNamespace(new=lambda: (other,)))
    monkeypatch.setattr(diagnosing, "opened_launcher", lambda *_: nullcontext(FakeLauncher()))
    found = autotune.diagnose(object, list, progress=False)
    assert other in found.diagnosis.notes
    assert str(other) in found.report()


def test_a_wrong_argument_is_refused_before_anything_starts() -> None:
    launcher = FakeLauncher()
    with pytest.raises(ConfigError, match="num_worker"):
        diagnose(launcher, baseline={"num_worker": 2})
    assert launcher.launched == []


def test_variations_change_one_side() -> None:
    config = TrainingConfig(num_workers=2, intra_op_threads=1)
    found = list_variations(space_of(config, has_4d_input=True), RUN)
    assert config not in found
    assert len(found) == len(set(map(repr, found)))
    assert {config.num_workers for config in found} == {0, 1, 2, 4, 8}
    assert {config.micro_batch_size for config in found} == {16, 32, 64, 128}
    assert config.model_copy(update={"persistent_workers": True}) in found
    assert config.model_copy(update={"channels_last": True}) in found
    assert config.model_copy(update={"intra_op_threads": 4}) in found


def test_what_the_workload_forbids_is_not_varied() -> None:
    found = list_variations(space_of(TrainingConfig(), is_sharded=False, fixed_batch_size=32), RUN)
    assert {config.num_workers for config in found} == {0, 1}
    assert {config.micro_batch_size for config in found} == {32}
    assert {
        config.micro_batch_size
        for config in list_variations(space_of(TrainingConfig(), dataset_length=70), RUN)
    } == {
        16,
        32,
        64,
    }


# In real processes: each workload has one bottleneck, far above all else. Further ones are in benchmarks/advice.py.

BRIEF = MeasuringTime(window_s=0.4, stretch_s=0.1)
THROUGH_PAUSES = MeasuringTime(window_s=0.8, stretch_s=0.2)
"""Sees more than one of the slow items or pauses that come every quarter of a second."""


@pytest.fixture
def look(fork_server: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> Look:
    """A short diagnosis of (model, dataset); `varied` are the only settings measured beside the baseline's."""

    def run(
        model: Any,
        dataset: Any,
        *varied: dict[str, Any],
        worker_init_fn: Any = None,
        measuring: MeasuringTime = BRIEF,
        **baseline: Any,
    ) -> autotune.DiagnosisResult:
        config = TrainingConfig(**baseline)
        configs = [
            TrainingConfig.model_validate(config.model_dump() | changes) for changes in varied
        ]
        monkeypatch.setattr(diagnosing, "list_variations", lambda *_: configs)
        workload = Workload(model=model, dataset=dataset, worker_init_fn=worker_init_fn)
        plan = Plan(name="case", workload=workload, baseline=config, device="cpu")
        return diagnose_plan(plan, progress=False, launcher=fork_server, measuring=measuring)

    return run


TWO_WORKERS = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.quiet
@pytest.mark.parametrize("dataset", [cases.SlowTail, cases.BurstyReader])
def test_a_slow_dataset_is_data_bound_by_what_makes_it_slow(look: Look, dataset: Any) -> None:
    found = look(
        cases.small_net,
        dataset,
        {"num_workers": 4, "persistent_workers": True},
        measuring=THROUGH_PAUSES,
    )
    assert found.verdict == "data_tail"
    assert found.findings[0].share > 0.6
    assert found.headroom.share_of_device < 0.4
    assert found.advice
    remedy = next(piece for piece in found.advice if not piece.settings)
    assert remedy.expected_gain is not None
    assert remedy.expected_gain > 1


@pytest.mark.quiet
def test_epochs_of_a_second_with_workers_that_start_slowly_are_restart_bound(
    look: Look,
) -> None:
    found = look(
        cases.small_net,
        cases.Waiting,
        {"persistent_workers": True},
        worker_init_fn=cases.open_slowly,
        num_workers=2,
        intra_op_threads=1,
    )
    run = found.diagnosis.evidence.measurement
    assert run.window.epoch_samples is not None
    assert 0.5 < run.window.epoch_samples / run.samples_per_s < 2
    assert found.verdict == "restart"
    assert found.advice[0].settings == {"persistent_workers": True}


def test_what_holds_workers_up_is_measured_where_the_probe_saw_it_and_workers_load() -> None:
    seen = {"slow_tail_fraction": 0.5, "cores_per_item": 1.9}
    own = TrainingConfig(num_workers=2)

    def varied(config: TrainingConfig, **facts: Any) -> set[str]:
        found = list_variations(space_of(config, **facts), RUN)
        names = {"in_order", "worker_threads"}
        return {
            name for one in found for name in names if getattr(one, name) != getattr(config, name)
        }

    assert varied(own, **seen) == {"in_order", "worker_threads"}
    assert varied(own) == varied(TrainingConfig(), **seen) == set()
    assert varied(TrainingConfig(num_workers=1), **seen) == {"worker_threads"}
    assert varied(own, is_deterministic=True, **seen) == {"worker_threads"}


def test_what_holds_workers_up_is_measured_as_the_space_allows() -> None:
    def varied(**given: Any) -> set[tuple[bool, int | None]]:
        config, domains = TrainingConfig(num_workers=2), SearchSpace.model_validate(given).given()
        found = list_variations(
            space_of(config, given=domains, slow_tail_fraction=0.5, cores_per_item=1.9), RUN
        )
        return {(one.in_order, one.worker_threads) for one in found} - {(True, None)}

    assert varied() == {(False, None), (True, 1)}
    assert varied(in_order=True, worker_threads=[None]) == set()
    assert varied(in_order=True, worker_threads=[None, 4, 2]) == {(True, 2)}


@pytest.mark.quiet
def test_items_in_several_threads_oversubscribe_the_cores(
    look: Look,
) -> None:
    if cases.Products().cores_busy() < 1.7:
        pytest.skip("NumPy's library of matrix products takes one thread here")
    fed = {"num_workers": os.cpu_count() or 1, "persistent_workers": True, "intra_op_threads": 1}
    found = look(cases.small_net, cases.Products, micro_batch_size=8, **fed)
    assert found.verdict == "threads"
    assert "cores_per_item" in found.findings[0].figures
    assert any(piece.settings.get("worker_threads") == 1 for piece in found.advice)


@pytest.mark.quiet
def test_large_elementwise_operations_are_memory_bound(
    look: Look,
) -> None:
    found = look(cases.LargeElementwise, cases.numbers, micro_batch_size=8)
    assert found.verdict == "memory"


@pytest.mark.quiet
def test_a_large_network_on_tensors_in_memory_only_computes(
    look: Look,
) -> None:
    found = look(
        cases.wide_net,
        cases.wide_numbers,
        TWO_WORKERS,
        {"micro_batch_size": 256},
        micro_batch_size=512,
    )
    assert [finding.bottleneck for finding in found.findings] == ["compute"]
    assert found.is_healthy, found.advice


@pytest.mark.quiet
def test_a_large_network_fed_by_a_worker_is_held_by_computing(
    look: Look,
) -> None:
    fed = {"num_workers": 1, "persistent_workers": True, "intra_op_threads": 1}
    none = {"num_workers": 0, "persistent_workers": False}
    longer = MeasuringTime(
        window_s=1.5, stretch_s=0.4
    )  # a short window waits for more than it may where a core stalls
    found = look(
        cases.wide_net,
        cases.wide_numbers,
        TWO_WORKERS,
        none,
        micro_batch_size=256,
        measuring=longer,
        **fed,
    )
    assert found.verdict == "compute"
    assert (
        found.findings[0].share > 0.75
    )  # what taking a worker's batch costs differs: on a virtual machine up to 0.12


def test_a_setting_that_fails_spares_the_others(
    look: Look,
) -> None:
    found = look(cases.small_net, cases.Unruly, TWO_WORKERS, {"micro_batch_size": 64})
    assert "no workers, please" in notes_of(found)["side_not_measured"]["reason"]
    assert any(
        point.changes == {"micro_batch_size": 64}
        for point in found.diagnosis.evidence.curves.device
    )


def test_only_precisions_of_the_space_are_varied() -> None:
    given = SearchSpace.model_validate({"amp_dtype": ["float32", "bfloat16"]}).given()
    native = ("float32", "bfloat16", "float16")
    varied = list_variations(
        space_of(TrainingConfig(), kind="cuda", native=native, given=given), RUN
    )
    assert {one.amp_dtype for one in varied} == {"float32", "bfloat16"}


def test_a_fused_optimizer_is_varied_where_torch_has_it() -> None:
    config = TrainingConfig()
    found = list_variations(
        space_of(config, optimizer=OptimizerFacts(name="Adam", can_fuse=True)), RUN
    )
    assert config.model_copy(update={"fused": True}) in found
    assert not any(one.fused for one in list_variations(space_of(config), RUN))
