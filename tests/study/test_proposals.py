from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.evidence import make_measurement
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.objective import Objective
from autotune.core.search_space import Choices, IntRange, ResolvedSpace, SearchSpace, compose, resolve
from autotune.core.training_config import TrainingConfig
from autotune.core.trial import TrialRecord, TrialResult
from autotune.study.proposals import explaining_setting, first_guesses, largest_batch_variant, nearest, params_of
from autotune.testing import fake_environment, fake_facts

MIB = 2**20


def make_space(baseline: TrainingConfig | None = None, **given_: object) -> ResolvedSpace:
    return resolve(
        SearchSpace.model_validate(given_),
        baseline=baseline or TrainingConfig(),
        objective=Objective(),
        facts=fake_facts(),
        environment=fake_environment(),
    )


def test_first_guesses_are_configurations_of_the_space() -> None:
    space = make_space()
    configs = [compose(guess, space) for guess in first_guesses(space)]
    assert all(isinstance(config, TrainingConfig) for config in configs)
    assert len(set(configs)) == len(configs) >= 3


def test_first_guesses_keep_what_is_fixed() -> None:
    space = make_space(num_workers=3, amp_dtype="float32")
    for guess in first_guesses(space):
        config = compose(guess, space)
        assert isinstance(config, TrainingConfig)
        assert (config.num_workers, config.amp_dtype) == (3, "float32")


def test_the_first_guess_gives_the_loader_a_worker_for_each_core() -> None:
    space = make_space()
    config = compose(first_guesses(space)[0], space)
    assert isinstance(config, TrainingConfig)
    assert config.num_workers == space.environment.cores
    assert config.global_batch_size == space.baseline.global_batch_size


@given(st.integers(-5, 50), st.integers(0, 20), st.integers(0, 20))
def test_the_nearest_value_lies_in_the_range(value: int, low: int, length: int) -> None:
    domain = IntRange(low=low, high=low + length)
    found = nearest(domain, value)
    assert found in domain
    assert isinstance(found, int)
    assert all(abs(found - value) <= abs(other - value) for other in domain)


def test_a_value_that_does_not_compare_gives_the_first_choice() -> None:
    assert nearest(Choices(values=(None, 1)), True) is None


def test_params_say_what_a_default_prefetch_means() -> None:
    params = params_of(TrainingConfig(num_workers=2), make_space())
    assert params["prefetch_factor"] == 2
    assert "prefetch_factor" not in params_of(TrainingConfig(), make_space())


def test_the_setting_that_all_failures_and_no_success_have_explains_them() -> None:
    failed = [TrainingConfig(amp_dtype="float16"), TrainingConfig(amp_dtype="float16", num_workers=2)]
    succeeded = [TrainingConfig(), TrainingConfig(num_workers=2)]
    assert explaining_setting(failed, succeeded) == ("amp_dtype", frozenset({"float16"}))


def test_two_settings_that_could_explain_failures_explain_nothing() -> None:
    failed = [TrainingConfig(amp_dtype="float16", channels_last=True)]
    assert explaining_setting(failed, [TrainingConfig()]) is None


def test_only_switches_explain_failures() -> None:
    failed = [TrainingConfig(micro_batch_size=64), TrainingConfig(micro_batch_size=128)]
    assert explaining_setting(failed, [TrainingConfig()]) is None


def test_failures_that_look_like_successes_are_not_explained() -> None:
    assert explaining_setting([TrainingConfig(num_workers=2)], [TrainingConfig(num_workers=2)]) is None


def memory_trials(peaks_mib: Mapping[int, int | None], **settings: object) -> list[TrialRecord]:
    """A trial of each micro batch; None: it ran out of memory."""
    records = []
    for number, (batch, peak) in enumerate(peaks_mib.items()):
        config = TrainingConfig.model_validate({"micro_batch_size": batch, **settings})
        result = TrialResult(outcome="oom")
        if peak is not None:
            result = TrialResult(outcome="ok", measurement=make_measurement(100.0, peak_memory_bytes=peak * MIB))
        records.append(TrialRecord(number=number, config=config, result=result))
    return records


LINEAR = {32: 132, 64: 164, 128: 228}
BATCHES = [32, 64, 128, 256, 512, 1024]


def largest(records: list[TrialRecord], limit_mib: int, best: int = 0, **space: Any) -> dict[str, object] | None:
    resolved = make_space(micro_batch_size=BATCHES, **space)
    found = largest_batch_variant(records[best], resolved, records, limit_mib * MIB)
    return None if found is None else dict(found)


def test_the_largest_batch_that_the_line_lets_fit_is_proposed_with_the_best_settings() -> None:
    found = largest(memory_trials(LINEAR, num_workers=2), 700)
    assert found is not None
    assert (found["micro_batch_size"], found["num_workers"]) == (512, 2)


def test_a_batch_that_was_run_is_not_proposed_again() -> None:
    assert largest(memory_trials({**LINEAR, 512: 612}), 700) is None


def test_a_batch_that_was_too_big_gives_way_to_the_next() -> None:
    found = largest(memory_trials({**LINEAR, 512: None}), 700)
    assert found is not None
    assert found["micro_batch_size"] == 256


def test_without_a_line_of_its_precision_nothing_is_proposed() -> None:
    records = [*memory_trials(LINEAR), *memory_trials({32: 80}, amp_dtype="bfloat16")]
    assert largest(records, 700, best=3) is None


def test_gradients_are_accumulated_less_where_the_global_batch_would_pass_its_cap() -> None:
    space = make_space(grad_accum_steps=[1, 2])
    records = memory_trials(LINEAR, grad_accum_steps=2)
    found = largest_batch_variant(records[0], space, records, 10_000 * MIB)
    assert found is not None
    assert (found["micro_batch_size"], found["grad_accum_steps"]) == (256, 1)
