"""The sentences of a search, by code and figures."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.note import Note, note
from autotune.report.wording import say

GIB = 2**30
LOAD: dict[str, Any] = {"trial": 7, "limit_bytes": 14 * GIB, "steps": 10, "items_seen": 100}
LOAD |= {"median_item_bytes": 1500.0, "largest_item_bytes": 2_000_000}
ALONE: dict[str, Any] = LOAD | {"strategy": "single", "own_bytes": 13 * GIB, "peak_bytes": 13 * GIB}
ALONE |= {"ranks": 1, "bucket_bytes": 0}
GROUP: dict[str, Any] = LOAD | {"strategy": "ddp", "own_bytes": 5 * GIB, "peak_bytes": 12 * GIB, "ranks": 2}
GROUP |= {"bucket_bytes": GIB}
DIFFERING = [{"name": "cuda", "there": "12", "here": "13"}, {"name": "cores", "there": "4", "here": "8"}]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            note("noise_scale", has_checkpoint=True, value=640.0, low=500.0, high=830.0, samples=4096),
            (
                "The gradient noise scale at your checkpoint is 640 samples (95 %: 500 to 830); configurations "
                "are ranked by what a sample is worth by it, in a batch of their size."
            ),
        ),
        (
            note("noise_scale", has_checkpoint=False, value=None, low=30.0, high=None, samples=4096),
            (
                "The gradient noise scale at the weights your model came with is above 30 samples: in the 4,096 "
                "samples "
                "measured, noise hides the gradient; at initialisation it says little of training, so batches "
                "are ranked by their rates alone: give workload.checkpoint, from the middle of training."
            ),
        ),
        (
            note("noise_scale_not_measured", reason="timeout", log="logs/noise-scale.log"),
            (
                "The gradient noise scale could not be measured (timeout, see logs/noise-scale.log). So batches "
                "are ranked by their rates alone."
            ),
        ),
        (
            note("noise_scale_unknown", groups=3, log=None),
            (
                "The gradient noise scale could not be told from 3 groups of gradients. So batches are ranked by "
                "their rates alone."
            ),
        ),
        (
            note("noise_scale_too_late"),
            (
                "This search was begun without a gradient noise scale at a checkpoint, so its trials stay ranked "
                "by their rates alone. Search anew (fresh) to measure one."
            ),
        ),
        (note("nothing_new_drawn", draws=500), "nothing new was found among 500 configurations drawn from the space"),
        (note("no_time_for_a_trial", timeout_s=60.0), "the time-out of 60 s leaves no room for another trial"),
        (note("no_recent_gain", trials=12, is_promising=False), "the last 12 trials brought less than 1 %"),
        (
            note("no_recent_gain", trials=6, is_promising=True),
            "the last 6 of those that promised most brought less than 1 %",
        ),
        (
            note("near_ceiling", ceiling_fraction=0.98),
            "the best found reaches 98 % of the lowest ceiling",
        ),
        (
            note("prepared_by", framework="accelerate"),
            (
                "Model, optimizer and loader were taken out of what accelerate had put around them: trials run without "
                "that."
            ),
        ),
        (note("little_expected", gain_fraction=0.003), "another trial is expected to bring 0.3 %"),
        (
            note("precision_left_out", amp_dtype="bfloat16", compile_mode="default", reason="the loss became nan"),
            "bfloat16 with compile was left out: the loss became nan",
        ),
        (
            note("precision_left_out", amp_dtype="float32", compile_mode="max-autotune", reason="the loss became nan"),
            "float32 with compile in mode max-autotune was left out: the loss became nan",
        ),
        (note("precision_left_out", amp_dtype="float16", compile_mode="", reason="x"), "float16 was left out: x"),
        (
            note("baseline_from_objects", settings=["num_workers", "fused"], has_loader=True),
            "The baseline is what your loader and optimizer are set to (num_workers, fused).",
        ),
        (
            note("baseline_from_objects", settings=["num_workers"], has_loader=True),
            "The baseline is what your loader is set to (num_workers).",
        ),
        (
            note("baseline_from_objects", settings=["fused", "cudnn_benchmark"], has_loader=False),
            "The baseline is what your optimizer and code are set to (fused, cudnn_benchmark).",
        ),
        (
            note("baseline_from_objects", settings=["cudnn_benchmark"], has_loader=False),
            "The baseline is what your code is set to (cudnn_benchmark).",
        ),
        (
            note("setting_left_out", setting="amp_dtype", values=["bfloat16"], failures=3, reason="no kernel"),
            "amp_dtype bfloat16 was left out after 3 failures: no kernel",
        ),
        (
            note("warm_start", source="runs/a", configurations=2, differences=None),
            "Warm start: 2 configurations of runs/a are tried before others.",
        ),
        (
            note("warm_start", source="runs/a", configurations=1, differences=[]),
            (
                "Warm start: 1 configuration of runs/a is tried before others; its rates are stale here (devices or "
                "their runtime differ)."
            ),
        ),
        (
            note("warm_start", source="runs/a", configurations=0, differences=None),
            "Warm start: runs/a holds nothing that this space allows beside your own settings.",
        ),
        (
            Note(code="stale", figures={"path": "a.yaml", "differences": DIFFERING}),
            "a.yaml is stale: CUDA 12 there, 13 here; cores 4 there, 8 here; run again with --fresh.",
        ),
        (
            note("stress_not_tried", trial=3, is_recommended=True),
            "Trial 3 was not run on the largest samples: others failed there before it.",
        ),
        (
            note("stress_not_tried", trial=3, is_recommended=False),
            "Trial 3 is not recommended, since it was not run on the largest samples: others failed there before it.",
        ),
        (
            Note(code="stress_over_limit", figures=ALONE | {"own_bytes": 15 * GIB, "peak_bytes": 15 * GIB}),
            (
                "Trial 7 is not recommended, since it failed on the largest samples: peak memory must stay within "
                "14.0 GiB, but was 15.0 GiB in 10 steps with samples of up to 2,000,000 bytes (median 1,500, of "
                "100 measured)"
            ),
        ),
        (
            Note(code="stress_over_limit", figures=GROUP | {"peak_bytes": 32 * GIB, "own_bytes": 15 * GIB}),
            (
                "Trial 7 is not recommended, since it failed on the largest samples: peak memory must stay within "
                "14.0 GiB, but was 15.0 GiB in one process, that is up to 32.0 GiB for 2 ranks with 1.00 GiB of "
                "gradient buckets each, in 10 steps with samples of up to 2,000,000 bytes (median 1,500, of 100 "
                "measured)"
            ),
        ),
        (
            Note(code="stress_near_limit", figures=GROUP | {"peak_bytes": 15 * GIB}),
            (
                "Trial 7 may take up to 15.0 GiB of 14.0 GiB on the largest samples, less where its 2 ranks share "
                "memory: watch it in its first epoch."
            ),
        ),
        (
            note("confirmed", rounds=1, configurations=1),
            "Confirmed in 1 round of 1 configuration measured in turns.",
        ),
        (
            note("simplest_of_the_best", best_trial=4, rate_fraction=0.993),
            "Simplest of those that are as good as the best (trial 4): it is believed to reach 99.3 % of its rate.",
        ),
        (
            note(
                "nothing_beats_baseline", configurations=5, is_outrun=True, leaves_out_larger=False, most_fraction=None
            ),
            "None of those that may be used is believed to beat yours by 2 % or more.",
        ),
        (
            note(
                "nothing_beats_baseline", configurations=5, is_outrun=False, leaves_out_larger=False, most_fraction=0.08
            ),
            (
                "None of the 5 configurations measured is believed to beat yours by 2 % or more; what was measured "
                "allows up to 8.0 %."
            ),
        ),
        (
            note("best_believed", configurations=5, is_outrun=True, leaves_out_larger=False),
            "Best, by all their runs together, of those that may be used, of the 5 configurations measured.",
        ),
        (
            note("not_proven", gain_fraction=0.999),
            "Recommended, not proven: with a probability of 99 % it is faster than yours at all.",
        ),
        (
            note("precision_refused", reason=note("loss_not_finite", loss="inf", step=3, steps=20)),
            "precision guard: the loss became inf at step 3 of 20; float32's stayed finite",
        ),
        (
            note("precision_not_compared", reason="", log="logs/guard.log"),
            "precision guard could not run: no figures came (log: logs/guard.log)",
        ),
        (
            note("precision_not_compared", reason=note("too_few_steps_compared", steps=3, least_steps=5), log=None),
            (
                "precision guard could not run: 3 steps could be compared before the deadline, where at least 5 are "
                "asked for"
            ),
        ),
        (
            note("steps_skipped", last_skipped=1, last=5, skipped=3, attempts=23),
            "the GradScaler still skipped 1 of the last 5 steps for gradients that were not finite (3 of 23 in all)",
        ),
        (
            note("losses_deviate", steps=20, deviation_fraction=0.08, allowed_fraction=0.05),
            (
                "over 20 steps from the same weights and batches the losses deviate from float32's by 8.0 % of their "
                "mean, where 5.0 % is tolerated"
            ),
        ),
        (
            note("gradients_differ", cosine=0.5, least_cosine=0.95),
            "the first step's gradient has a cosine of 0.500 with float32's, where at least 0.95 is asked for",
        ),
        (note("changed_settings", settings=["lr", "num_workers"]), "Changed: lr, num_workers."),
        (
            note("baseline_is_what_it_does", settings=["lr", "num_workers"]),
            (
                "The baseline is what the script does by itself: what was given of lr, num_workers has no effect. Put "
                "a setting into the command as a placeholder, such as {lr}, to give its value."
            ),
        ),
        (
            note("placeholders_by_default", values=["micro_batch_size=32", "lr=0.001"]),
            (
                "No value was given for micro_batch_size=32, lr=0.001: autotune's defaults were taken; set them by "
                "baseline."
            ),
        ),
        (
            note("files_made", files=["out/last.pt"], count=1),
            "A trial of the script makes 1 new file, which are left where they are: out/last.pt.",
        ),
        (
            note("files_made", files=["a", "b"], count=5),
            "A trial of the script makes 5 new files, which are left where they are: a, b, ....",
        ),
    ],
    ids=lambda value: value.code if isinstance(value, Note) else "",
)
def test_a_note_of_a_search_has_its_sentence(said: Note, sentence: str) -> None:
    assert say(said) == sentence


def test_a_search_whose_starts_are_slow_says_why_it_has_ended_and_what_it_has_assumed() -> None:
    ended = say(note("starts_are_slow", trials_s=150.0, build_s=60.0))
    assert ended == (
        "building the workload takes 1 min, and without a number of trials or a time-out they go on for 2 min 30 s"
    )
    dear = say(note("costs_more_than_it_brings", trial_s=15.0, gain_s=3.6, training_s=360.0))
    assert dear == "another trial takes 15 s, and is expected to save 3.6 s of 6 min of training that are still to come"
    shared = say(note("trials_shared", build_s=60.0, is_brief=True, assumed_hours=24.0))
    assert shared.startswith("Building the workload takes 1 min: trials shared a process that has built it once")
    assert "kept short" in shared
    assert shared.endswith("24 hours of training were assumed to be still to come (budget: {training_hours: 24}).")
    asked_for = say(note("trials_shared", build_s=60.0, is_brief=False, assumed_hours=None))
    assert asked_for.endswith("finalists had processes of their own.")
    assert "8.0" in say(note("training_hours_unused", training_hours=8.0))
