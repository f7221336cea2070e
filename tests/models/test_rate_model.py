"""Forecast throughput: sure near measurements, unsure far from them."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp, hypot, log
from statistics import median
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.config.environment import Environment
from autotune.config.training_config import TrainingConfig
from autotune.models.throughput import Forecast, Observation, RateModel, most_gain
from autotune.policy import POLICY
from autotune.records.result import RunVariation
from tests.factories import CPU, GPU

MANY_CORES = CPU.model_copy(update={"cores": 64})
FOUR_GPUS = GPU.model_copy(update={"device_count": 4, "cores": 64})
RATES = st.floats(1.0, 1e6)
STEADY = RunVariation(sd=0.003, degrees_of_freedom=10.0, source="workload")
UNKNOWN = RunVariation(sd=0.02, degrees_of_freedom=1.0)


def config(workers: int = 0, batch: int = 32, **more: object) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {"num_workers": workers, "micro_batch_size": batch, "intra_op_threads": 1, **more}
    )


def loader(
    rate: float, one: TrainingConfig, sd: float = 0.08, cpu_s: float | None = 0.0
) -> Observation:
    return Observation(
        kind="loader", config=one, samples_per_s=rate, relative_sd=sd, cpu_s_per_sample=cpu_s
    )


def device(rate: float, one: TrainingConfig, sd: float = 0.08, cores: float = 1.0) -> Observation:
    return Observation(
        kind="device", config=one, samples_per_s=rate, relative_sd=sd, cpu_s_per_sample=cores / rate
    )


def run(rate: float, one: TrainingConfig, sd: float = 0.015) -> Observation:
    return Observation(kind="run", config=one, samples_per_s=rate, relative_sd=sd)


def forecast(
    observations: Sequence[Observation],
    *configs: TrainingConfig,
    environment: Environment = MANY_CORES,
    spread: RunVariation = STEADY,
) -> Forecast:
    return RateModel(observations, environment, spread).forecast(configs)


def rates(known: Forecast) -> list[float]:
    return [float(rate) for rate in np.exp(known.log_rate)]


CONFIGS = st.builds(
    lambda workers, batch, dtype: config(workers, batch, amp_dtype=dtype),
    st.sampled_from([0, 1, 2, 4, 8]),
    st.sampled_from([8, 32, 128, 512]),
    st.sampled_from(["float32", "bfloat16"]),
)
OBSERVATIONS = st.lists(
    st.builds(
        lambda kind, one, rate, sd: Observation(
            kind=kind, config=one, samples_per_s=rate, relative_sd=sd
        ),
        st.sampled_from(["loader", "device", "run", "copy"]),
        CONFIGS,
        RATES,
        st.floats(0.01, 0.5),
    ),
    max_size=6,
)
"""Any measurements, contradictory ones included."""


@given(OBSERVATIONS, RATES, st.sampled_from([MANY_CORES, FOUR_GPUS]))
def test_forecasts_are_finite(
    observations: list[Observation], rate: float, environment: Environment
) -> None:
    asked = [config(workers, batch) for workers, batch in product((0, 2, 16), (1, 64, 4096))]
    known = forecast([run(rate, config()), *observations], *asked, environment=environment)
    for values in (
        known.log_rate,
        known.sd,
        known.loader,
        known.device,
        known.loader_sd,
        known.device_sd,
    ):
        assert np.isfinite(values).all()
    assert (known.sd > 0).all()
    assert np.isfinite(known.copy_sd).all()
    assert np.isfinite(known.copy).all() == any(seen.kind == "copy" for seen in observations)
    assert max(known.loader_sd.max(), known.device_sd.max()) < 2.5


@given(OBSERVATIONS, RATES, st.integers(0, 6))
def test_the_order_of_observations_changes_nothing(
    observations: list[Observation], rate: float, cut: int
) -> None:
    seen = [run(rate, config()), *observations]
    turned = [*seen[cut:], *seen[:cut]]
    asked = config(3, 64)
    one, other = forecast(seen, asked), forecast(turned, asked)
    assert one.log_rate == pytest.approx(other.log_rate, abs=1e-3)
    assert one.sd == pytest.approx(other.sd, abs=1e-3)


@given(RATES, RATES, RATES, st.floats(0.01, 100.0))
def test_forecasts_scale_with_the_machine(
    loads: float, trains: float, runs: float, factor: float
) -> None:
    asked = [config(4), config(0, 128), config(8, 256)]

    def seen(by: float) -> list[Observation]:
        return [
            loader(loads * by, config(1), cpu_s=0.5 / (loads * by)),
            device(trains * by, config()),
            run(runs * by, config(2)),
        ]

    slow, fast = forecast(seen(1.0), *asked), forecast(seen(factor), *asked)
    assert fast.log_rate - slow.log_rate == pytest.approx(np.full(3, np.log(factor)), abs=1e-3)
    assert fast.sd == pytest.approx(slow.sd, abs=1e-3)


def scattered(sd: float, seed: int) -> list[Observation]:
    """Runs of a machine whose loader scales, each measured with a chance error of this size, given as if of 1 %."""
    chance = random.Random(seed)
    configs = [config(workers, batch) for workers in (1, 2, 4, 8) for batch in (16, 32, 64, 128)]
    looks = [loader(400.0 * one.num_workers, one) for one in configs[::4]] + [
        device(1e5, one) for one in configs[:4]
    ]
    return [
        *looks,
        *(run(400.0 * one.num_workers * exp(chance.gauss(0, sd)), one, sd=0.01) for one in configs),
    ]


def test_scatter_is_learned() -> None:
    steady, unsteady = (
        [forecast(scattered(sd, seed), config(4), spread=UNKNOWN) for seed in range(6)]
        for sd in (0.005, 0.12)
    )
    assert max(one.scatter_sd for one in steady) <= 0.02
    assert median(one.scatter_sd for one in unsteady) >= 0.07
    assert min(one.sd[0] for one in unsteady) > 2 * max(one.sd[0] for one in steady)


def test_priors_of_costs_may_vary() -> None:
    costs = POLICY.throughput.costs
    vague = {**costs, "samples": replace(costs["samples"], level_sd=5.0)}
    usual, wide = (
        RateModel([run(1_000, config())], MANY_CORES, STEADY, model).forecast([config(4)])
        for model in (POLICY.throughput, replace(POLICY.throughput, costs=vague))
    )
    assert wide.device_sd[0] > usual.device_sd[0]


def test_softness_is_that_of_the_policy() -> None:
    seen = [loader(1_000.0, config(4)), device(1_000.0, config(4))]
    soft, hard = (
        RateModel(seen, MANY_CORES, STEADY, replace(POLICY.throughput, softness=softness))
        .forecast([config(4)])
        .log_rate[0]
        for softness in (1.5, 20.0)
    )
    assert hard > soft + 0.2


def test_one_run_leaves_others_open() -> None:
    known = forecast([run(1_000, config())], config(), config(4), config(0, 256), config(8, 256))
    assert known.sd[0] < 0.03
    assert min(known.sd[1:]) > 0.3
    assert min(known.device_sd) > 0.5


@given(st.lists(CONFIGS, max_size=4), CONFIGS, RATES, st.sampled_from(["loader", "device"]))
def test_measurement_of_a_side_informs_it(
    others: list[TrainingConfig], one: TrainingConfig, rate: float, side: str
) -> None:
    seen = [loader(rate, config()), device(rate, config())]
    for other in others:
        seen += [loader(rate, other), device(rate, other)]
    look = (loader if side == "loader" else device)(rate, one)
    before, after = (forecast(observations, one) for observations in (seen, [*seen, look]))
    uncertainties = [
        known.loader_sd[0] if side == "loader" else known.device_sd[0] for known in (before, after)
    ]
    assert uncertainties[1] < min(uncertainties[0], hypot(look.relative_sd, after.scatter_sd))


@pytest.mark.parametrize("one", [config(), config(8, 128, amp_dtype="bfloat16")])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_run_settles_what_its_settings_reach(one: TrainingConfig, share: float) -> None:
    looks = [loader(1_000, config(2)), loader(500, config()), device(2_000, config())]
    before = forecast(looks, one)
    reached = share * rates(before)[0]
    after = forecast([*looks, run(reached, one)], one)
    assert after.sd[0] < min(before.sd[0], 0.02)
    assert rates(after)[0] == pytest.approx(reached, rel=0.03)


@pytest.mark.parametrize(
    ("looks", "runs"),
    [
        ([], {config(): 100, config(8): 1_000, config(8, 256): 2_000}),
        (
            [loader(1_000, config(1)), device(1_100, config())],
            {config(): 500, config(8, 256): 4_000},
        ),
        (
            [loader(100, config(2)), device(100, config())],
            {config(2): 90, config(8): 10_000, config(8, 512): 20_000},
        ),
    ],
)
def test_runs_outweigh_curves(looks: list[Observation], runs: dict[TrainingConfig, float]) -> None:
    known = forecast([*looks, *(run(rate, one) for one, rate in runs.items())], *runs)
    assert rates(known) == pytest.approx(
        list(runs.values()), rel=0.15
    )  # the curves said many times less
    assert max(known.sd) < 0.03


def test_near_configurations_are_surer() -> None:
    looks = [loader(1_000, config(2)), device(2_000, config())]
    asked = [
        config(4),
        config(5),
        config(16),
        config(16, 1024, amp_dtype="bfloat16", channels_last=True),
    ]
    known = forecast([*looks, run(1_500, config(4))], *asked)
    assert known.sd.tolist() == sorted(known.sd)


def test_repeated_looks_are_averaged() -> None:
    one = [loader(1_000, config(2)), device(50_000, config())]
    many = [*one, *(loader(1_000 * factor, config(2)) for factor in (1.2, 1.2, 1.2, 1.2))]
    once, often = (forecast(seen, config(2)) for seen in (one, many))
    assert often.loader[0] == pytest.approx(1_000 * 1.2**0.8, rel=0.02)
    assert often.loader_sd[0] < once.loader_sd[0] / 1.5


@pytest.mark.parametrize(
    ("loads", "trains", "workers", "environment", "joint"),
    [
        (1_000, 20_000, 2, MANY_CORES, 1_000),
        (20_000, 1_000, 2, MANY_CORES, 1_000),
        (1_000, 1_000, 2, MANY_CORES, 920),  # equal sides hold each other up
        (1_000, 3_000, 0, MANY_CORES, 750),  # in turn
        (1_000, 5_000, 0, FOUR_GPUS, 1_000),  # an accelerator trains meanwhile
    ],
)
def test_loader_and_device_together(
    loads: float, trains: float, workers: int, environment: Environment, joint: float
) -> None:
    seen = [loader(loads, config(workers)), device(trains, config(workers))]
    known = forecast(seen, config(workers), environment=environment)
    assert rates(known)[0] == pytest.approx(joint, rel=0.02)


@given(RATES, RATES, st.floats(0.3, 1.0), st.sampled_from([0, 1, 4]))
def test_nothing_is_forecast_above_the_lower_side(
    loads: float, trains: float, share: float, workers: int
) -> None:
    seen = [loader(loads, config(workers)), device(trains, config())]
    (joint,) = rates(forecast(seen, config(workers)))
    reached = run(share * joint, config(workers))
    asked = [config(count, batch) for count, batch in product((workers, 2, 8), (32, 128))]
    known = forecast([*seen, reached], *asked)
    assert (np.exp(known.log_rate) <= np.minimum(known.loader, known.device) * 1.02).all()


def test_loader_and_training_share_the_cores() -> None:
    two = CPU.model_copy(update={"cores": 2})
    seen = [loader(4_000, config(2), cpu_s=0.5e-3), device(2_000, config())]
    known, free = (
        forecast(seen, config(2), environment=environment) for environment in (two, MANY_CORES)
    )
    # 0.5 ms of loading and 0.5 ms of training for each sample, on two cores: as fast as training alone, but for the
    # per cent that more threads than cores are expected to cost
    assert rates(free)[0] == pytest.approx(2_000, rel=0.01)
    assert rates(known)[0] == pytest.approx(0.99 * 2_000 * 2 ** (-1 / 8), rel=0.01)
    one = CPU.model_copy(update={"cores": 1})
    assert rates(forecast(seen, config(2), environment=one))[0] == pytest.approx(990, rel=0.01)


def test_unmeasured_threads_keep_cores_busy() -> None:
    four = CPU.model_copy(update={"cores": 4})
    seen = [loader(4_000, config(4), cpu_s=1e-3), device(2_000, config())]
    asked = [config(4, intra_op_threads=threads) for threads in (1, 2, 4, 16)]
    found = rates(forecast(seen, *asked, environment=four))
    assert found[0] > found[1] > found[2] == pytest.approx(found[3])


def test_untried_binding_is_open() -> None:
    bound = config(2, numa_binding="exclusive", strategy="ddp", world_size=2)
    plain = bound.model_copy(update={"numa_binding": None})
    known = forecast([run(1_000, plain)], plain, bound)
    assert rates(known)[1] == pytest.approx(rates(known)[0], rel=0.1)
    assert known.sd[1] > 2 * known.sd[0]
    seen = forecast([run(1_000, plain), run(1_100, bound)], bound)
    assert rates(seen)[0] == pytest.approx(1_100, rel=0.03)


def test_bound_process_has_its_nodes_cores() -> None:
    sockets = CPU.model_copy(update={"cores": 4, "numa_nodes": 2, "node_cores": (2, 2)})
    seen = [loader(4_000, config(4), cpu_s=1e-3), device(2_000, config())]
    whole, half = rates(
        forecast(seen, config(4), config(4, numa_binding="node"), environment=sockets)
    )
    assert half < 0.75 * whole


def ranks(count: int) -> TrainingConfig:
    return config(4, strategy="ddp" if count > 1 else "single", world_size=count)


def test_untried_groups_grow_with_ranks() -> None:
    seen = [loader(1_000, ranks(1)), device(2_000, ranks(1)), run(900, ranks(1))]
    known = forecast(seen, ranks(1), ranks(2), ranks(4), environment=FOUR_GPUS)
    found = rates(known)
    assert found == sorted(found)
    assert found[2] == pytest.approx(4 * found[0], rel=0.3)
    assert known.sd.tolist() == sorted(known.sd)
    assert known.sd[2] > 0.3


def test_groups_inform_each_other() -> None:
    alone = [loader(1_000, ranks(1)), device(2_000, ranks(1)), run(900, ranks(1))]
    poor = [*alone, run(1_000, ranks(2))]
    before, after = (forecast(seen, ranks(4), environment=FOUR_GPUS) for seen in (alone, poor))
    assert rates(after)[0] < 0.7 * rates(before)[0]
    assert after.sd[0] < before.sd[0]


def test_unmeasured_side_is_learned_from_runs() -> None:
    seen = [
        device(50_000, config()),
        *(run(500 * workers, config(workers)) for workers in (1, 2, 4)),
    ]
    known = forecast(seen, config(2), config(3), config(8))
    assert known.loader[0] == pytest.approx(1_000, rel=0.15)
    assert known.loader[1] == pytest.approx(1_500, rel=0.15)
    assert known.loader[2] > 2_000


def test_shortfall_is_expected_of_others() -> None:
    looks = [loader(rate, config(workers)) for workers, rate in ((1, 500), (2, 1_000), (4, 2_000))]
    looks.append(device(50_000, config()))
    short = [run(0.7 * rate, config(workers)) for workers, rate in ((1, 500), (2, 1_000))]
    before, after = (forecast(seen, config(4)) for seen in (looks, [*looks, *short]))
    assert rates(after)[0] < 0.85 * rates(before)[0]


def test_a_forecast_of_thousands_is_that_of_each() -> None:
    model: RateModel = RateModel(
        [loader(1_000, config(2)), device(2_000, config()), run(700, config())], MANY_CORES, STEADY
    )
    asked = [config(workers, batch) for workers, batch in product(range(40), range(1, 60))]
    together = model.forecast(asked)
    for place in (0, 777, len(asked) - 1):
        alone = model.forecast([asked[place]])
        assert alone.log_rate[0] == pytest.approx(together.log_rate[place])
        assert alone.sd[0] == pytest.approx(together.sd[place])


def test_running_trials_count_as_expected() -> None:
    seen = [
        loader(1_000, config(2)),
        device(2_000, config()),
        run(700, config()),
        run(950, config(2)),
    ]
    model = RateModel(seen, MANY_CORES, STEADY)
    running, asked = config(4), [config(4), config(8), config(4, 64)]
    expected = rates(model.forecast([running]))[0]
    ended = RateModel([*seen, run(expected, running, sd=0.0)], MANY_CORES, STEADY).forecast(asked)
    believed = model.forecast(asked, [running])
    assert believed.log_rate == pytest.approx(ended.log_rate, abs=0.02)
    assert believed.sd == pytest.approx(ended.sd, rel=0.1)


def test_warm_fit_equals_a_fresh_one() -> None:
    chance = random.Random(0)
    looks = [loader(500.0 * workers, config(workers)) for workers in (1, 2, 4, 8)]
    looks += [device(3_000 + 10 * batch, config(batch=batch)) for batch in (8, 16, 32, 64)]
    points = [
        config(workers, batch) for workers in (1, 2, 4, 8) for batch in (8, 16, 32, 64, 128, 256)
    ]
    runs = [
        run(min(450.0 * one.num_workers, 2_500) * exp(chance.gauss(0, 0.01)), one) for one in points
    ]
    model = RateModel([*looks, *runs[:-1]], MANY_CORES, STEADY)
    asked = [config(workers, batch) for workers in (1, 3, 6, 16) for batch in (8, 48, 512)]
    ours, whole = (
        one.forecast(asked)
        for one in (
            model.with_observations([*looks, *runs], STEADY),
            RateModel([*looks, *runs], MANY_CORES, STEADY),
        )
    )
    assert ours.log_rate == pytest.approx(whole.log_rate, abs=0.02)
    assert ours.sd == pytest.approx(whole.sd, rel=0.1)
    assert ours.scatter_sd == whole.scatter_sd


def test_few_batches_inform_others() -> None:
    # 4 ms for any batch and 0.1 ms a sample: 32 samples take 7.2 ms, 512 take 55 ms
    def rate(batch: int) -> float:
        return batch / (4e-3 + 1e-4 * batch)

    looks = [device(rate(batch), config(batch=batch), sd=0.02) for batch in (16, 32, 64)]
    known = forecast(
        [*looks, loader(1e6, config(4)), run(rate(32), config(4))], config(4, 256), config(4, 8)
    )
    assert known.device == pytest.approx([rate(256), rate(8)], rel=0.1)


@pytest.mark.parametrize("factor", [1 / 9, 3.0])
def test_half_precisions_inform_each_other(factor: float) -> None:
    full, bfloat16, float16 = (
        config(4, amp_dtype=dtype) for dtype in ("float32", "bfloat16", "float16")
    )
    seen = [loader(50_000, config(4)), device(1_000, full), run(950, full)]
    before, after = (
        forecast(looks, float16) for looks in (seen, [*seen, device(factor * 1_000, bfloat16)])
    )
    assert rates(before)[0] == pytest.approx(950, rel=0.15)
    # as good as certain where a half is nine times slower, likely where it is three times as fast
    apart = (after.log_rate[0] - log(950)) / after.sd[0]
    assert (apart < -2.5) if factor < 1 else (apart > 1)
    assert after.sd[0] < before.sd[0]


def test_accumulation_helps_slow_exchange() -> None:
    looks = [loader(1e6, config(4)), device(1_000, config()), device(1_100, config(batch=64))]
    looks += [device(2_000, ranks(2)), run(950, ranks(1))]
    asked = [ranks(2), ranks(2).model_copy(update={"grad_accum_steps": 4})]
    slow, fast = (
        rates(forecast([*looks, run(rate, ranks(2))], *asked, environment=FOUR_GPUS))
        for rate in (900, 1_850)
    )
    assert slow[1] > 1.3 * slow[0]
    assert fast[1] < 1.15 * fast[0]


def test_softness_is_learned() -> None:
    counts = (1, 2, 4, 8)
    looks = [loader(1_000.0 * count, config(count), sd=0.02) for count in counts]
    looks += [
        device(1_000.0 * batch / 32, config(batch=batch), sd=0.02) for batch in (32, 64, 128, 256)
    ]
    pairs = [config(count, 32 * count) for count in counts]
    asked = config(2, 64, amp_dtype="bfloat16")
    seen = [*looks, device(2_000, asked)]
    gentle, hard = (
        rates(
            forecast([*seen, *(run(part * 1_000 * one.num_workers, one) for one in pairs)], asked)
        )
        for part in (0.75, 0.98)
    )
    assert hard[0] > 1.1 * gentle[0]


def test_gain_is_expected_with_other_workers() -> None:
    for changes in ({"worker_threads": 1}, {"in_order": False}):
        seen = [
            run(100.0, config(4, prefetch_factor=2)),
            loader(100.0, config(4, prefetch_factor=2)),
            loader(200.0, config(4, prefetch_factor=2, **changes)),
            device(5000.0, config(4, prefetch_factor=2)),
        ]
        plain, changed = rates(
            forecast(seen, config(6, prefetch_factor=2), config(6, prefetch_factor=2, **changes))
        )
        assert 1.6 < changed / plain < 2.2
    *_, alone, changed = rates(forecast(seen, config(1), config(1, in_order=False)))
    assert changed == pytest.approx(alone), "a single worker keeps the order"


def test_spinning_threads_are_told_apart() -> None:
    spinning, one = config(2), config(2, worker_threads=1)
    seen = [
        run(100.0, spinning),
        loader(100.0, spinning, cpu_s=0.02),  # both cores, most of it waiting
        loader(95.0, config(1), cpu_s=0.02),
        loader(400.0, one, cpu_s=0.004),
        device(5000.0, spinning, cores=0.5),
    ]
    (rate,) = rates(forecast(seen, one, environment=CPU.model_copy(update={"cores": 2})))
    assert rate > 200.0


def test_fused_gain_carries_over_to_runs() -> None:
    usual, fused = config(), config(fused=True)

    def gain(seen: float) -> float:
        known = [
            run(1000.0, usual),
            device(1100.0, usual),
            loader(50_000.0, usual),
            device(seen * 1100.0, fused),
        ]
        one, other = rates(forecast(known, usual, fused, environment=CPU, spread=UNKNOWN))
        return other / one

    assert gain(1.0) == pytest.approx(1.0, abs=0.02)
    assert gain(1.3) > 1.15
    assert gain(3.0) > 2.0


def copies(rate: float, *, pinned: bool) -> Observation:
    return Observation(
        kind="copy", config=config(8, pin_memory=pinned), samples_per_s=rate, relative_sd=0.02
    )


def seen_without_pinning(run_rate: float) -> list[Observation]:
    """Observe an ample loader, a device of 1,000 samples/s, copies of 2,000, and pinned ones of 6,000."""
    own = config(8)
    sides = [loader(20_000.0, own, sd=0.02), device(1000.0, own, sd=0.02, cores=1.0)]
    return [
        *sides,
        copies(2000.0, pinned=False),
        copies(6000.0, pinned=True),
        run(run_rate, own, sd=0.005),
    ]


def test_pinning_saves_copy_time() -> None:
    own, pinned = config(8), config(8, pin_memory=True)
    known = forecast(seen_without_pinning(667.0), own, pinned, environment=GPU)
    assert rates(known)[0] == pytest.approx(667.0, rel=0.01)
    exposed, hidden = 1 / (1 / 1000 + 1 / 6000), 1000.0
    assert exposed * 0.97 < rates(known)[1] < hidden
    assert known.copy == pytest.approx([2000.0, 6000.0], rel=0.02)
    assert known.sd[1] < 0.15


def test_hidden_copies_gain_nothing_by_pinning() -> None:
    known = forecast(
        seen_without_pinning(990.0), config(8), config(8, pin_memory=True), environment=GPU
    )
    assert rates(known)[0] == pytest.approx(990.0, rel=0.015)
    assert (most_gain(known, 990.0, POLICY.trials.side_sds) < 0.06).all()


def test_hidden_share_of_pinned_copies() -> None:
    half = config(8, pin_memory=True, amp_dtype="bfloat16")
    expected = []
    for hidden in (0.0, 0.9):
        pinned_run = run(1 / (1 / 1000 + (1 - hidden) / 6000), config(8, pin_memory=True), sd=0.005)
        seen = [
            *seen_without_pinning(667.0),
            pinned_run,
            device(3000.0, config(8, amp_dtype="bfloat16"), sd=0.02),
        ]
        expected += rates(forecast(seen, half, environment=GPU))
    exposed, mostly_hidden = expected
    assert exposed < 1.1 / (1 / 3000 + 1 / 6000) < mostly_hidden


def test_unmeasured_copies_and_host() -> None:
    seen = [one for one in seen_without_pinning(667.0) if one.kind != "copy"]
    known = forecast(seen, config(8), config(8, pin_memory=True), environment=GPU)
    assert np.isinf([known.copy, known.host]).all()
    assert (known.copy_sd == 0).all()
    assert rates(known)[0] == pytest.approx(rates(known)[1], rel=0.02)


def test_forecast_memory_is_bounded() -> None:
    seen = [
        run(1000.0 + workers, config(workers, batch))
        for workers in range(8)
        for batch in (8, 16, 32, 64)
    ]
    asked = [config(workers, batch) for workers in range(16) for batch in range(1, 257)]
    model = RateModel(seen, MANY_CORES, STEADY)
    model.forecast(asked)  # the fit, and what is cached of each

    def peak_bytes(count: int) -> int:
        tracemalloc.start()
        model.forecast(asked[:count])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(len(asked)) < 2 * peak_bytes(len(asked) // 8)


def of_host(kind: Literal["launch", "take"], rate: float, one: TrainingConfig) -> Observation:
    return Observation(kind=kind, config=one, samples_per_s=rate, relative_sd=0.1)


def test_larger_batch_cures_a_slow_host() -> None:
    """As an H200 was with 18 narrow layers: 4 ms of kernels a batch of 256, which a loop launches in more than that."""
    usual, batches = config(workers=16, batch=256, pin_memory=True), (64, 128, 256, 512, 1024)
    seen = [loader(88_000, usual), run(50_000, usual), of_host("take", 256 / 0.1e-3, usual)]
    for batch in batches:
        one = config(batch=batch)
        kernels, launching = 63_500.0, batch / 3.4e-3
        seen += [
            device((kernels**-8 + launching**-8) ** (-1 / 8), one, sd=0.02),
            of_host("launch", launching, one),
        ]
    known = forecast(
        seen, usual, usual.model_copy(update={"micro_batch_size": 1024}), environment=FOUR_GPUS
    )
    assert 50_000 <= known.host[0] <= 65_000, "slower than its launching alone, 73,000"
    assert known.host[1] == pytest.approx(4 * known.host[0], rel=0.1)
    assert rates(known)[1] > 1.1 * rates(known)[0]
