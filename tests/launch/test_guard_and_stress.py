"""The precision guard and the stress run in processes of their own: figures come back, faults are outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.apply.cores import compile_cache_variables
from autotune.config.plan import Ref
from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from autotune.protocol.messages import RankReport
from autotune.records.trial import objection
from tests.launch.conftest import GENEROUS_S, Rig, rig_over

USER_CODE = Path(__file__).with_name("user_sizes.py")
TEXTS = {"model": "averaging", "dataset": "texts", "collate_fn": "padded", "step": "averaged"}


def named(**parts: str) -> dict[str, Ref]:
    """References to what user_sizes.py holds."""
    return {part: Ref(target=f"{USER_CODE}:{name}") for part, name in parts.items()}


def guarded(rig: Rig, dtype: str, **parts: Ref) -> RankReport:
    config = TrainingConfig.model_validate({"micro_batch_size": 8, "amp_dtype": dtype, "lr": 0.1})
    return rig.runner(**parts).guard(config, name="guard", deadline_s=GENEROUS_S)


@pytest.mark.parametrize(
    ("model", "dtype", "code"),
    [
        (None, "bfloat16", None),
        pytest.param("beyond_float16", "float16", "loss_not_finite", marks=pytest.mark.slow),
        pytest.param("losing_digits", "bfloat16", "losses_deviate", marks=pytest.mark.slow),
    ],
)
def test_a_precision_is_judged_in_a_process_of_its_own(
    rig: Rig, model: str | None, dtype: str, code: str | None
) -> None:
    report = guarded(rig, dtype, **({} if model is None else named(model=model)))
    assert report.result.outcome == "ok", report.result.reason
    assert report.guard is not None
    against = objection(report.guard)
    assert (against and against.code) == code


@pytest.mark.slow
def test_a_fault_of_the_model_in_the_guard_is_an_outcome(rig: Rig) -> None:
    report = guarded(rig, "bfloat16", **named(model="raising_under_autocast"))
    assert report.result.outcome == "crashed"
    assert report.guard is None
    assert report.result.failure is not None
    assert report.result.failure.signature.startswith("ValueError at user_sizes.py:")


@pytest.mark.slow
def test_a_hang_in_the_guard_ends_at_the_deadline(rig: Rig) -> None:
    config = TrainingConfig(micro_batch_size=8, amp_dtype="bfloat16")
    report = rig.runner(model="hanging").guard(config, name="guard", deadline_s=2.0)
    assert report.result.outcome == "timeout"
    rig.assert_next_trial_works()


def test_a_stress_run_sees_the_largest_samples_with_workers_too(rig: Rig) -> None:
    runner = rig.runner(**named(**TEXTS))
    config = TrainingConfig(micro_batch_size=4, num_workers=2, grad_accum_steps=2)
    report = runner.stress(config, name="stress", deadline_s=GENEROUS_S, train_s=0.1)
    assert report.result.outcome == "ok", report.result.reason
    figures = report.stress
    assert figures is not None
    assert figures.items_seen == 64
    assert figures.largest_item_bytes == 64 * 4
    assert figures.largest_batch_bytes == 4 * 64 * 4
    assert figures.steps >= 3
    assert figures.memory.peak_bytes > 2**20


@pytest.mark.slow
def test_a_compiled_model_keeps_its_code_where_the_training_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    runner = rig_over(LocalLauncher(None), tmp_path).runner(model="naming_its_compile_cache")
    config = TrainingConfig(micro_batch_size=4, compile=True)
    reason = runner.stress(config, name="stress", deadline_s=GENEROUS_S, train_s=0.1).result.reason
    assert reason.endswith(f" {compile_cache_variables()['TORCHINDUCTOR_CACHE_DIR']}")


@pytest.mark.slow
def test_memory_that_the_largest_samples_take_is_an_outcome(rig: Rig) -> None:
    runner = rig.runner(**named(**(TEXTS | {"step": "running_out_at_64"})))
    config = TrainingConfig(micro_batch_size=4)
    report = runner.stress(config, name="stress", deadline_s=GENEROUS_S, train_s=0.1)
    assert report.result.outcome == "host_oom"


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "outcome"), [(64, "ok"), (100, "ok"), (128, "host_oom")])
def test_memory_is_judged_on_the_largest_bucket_of_a_token_budget(
    rig: Rig, max_tokens: int, outcome: str
) -> None:
    parts = TEXTS | {"step": "out_of_memory_in_the_largest_bucket", "batch_sampler": "Buckets"}
    report = rig.runner(**named(**parts)).stress(
        TrainingConfig(micro_batch_size=3, max_tokens=max_tokens),
        name="stress",
        deadline_s=GENEROUS_S,
        train_s=0.1,
    )
    assert report.result.outcome == outcome, report.result.reason
    if report.stress is not None:
        assert report.stress.largest_batch_bytes <= 4 * max_tokens
