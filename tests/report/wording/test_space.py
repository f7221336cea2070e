"""The sentences of the space's notes and of the learning rate's."""

from __future__ import annotations

import pytest

from autotune.note import Note, note
from autotune.report.wording.catalogue import load_codes
from autotune.report.wording.say import say

_SENTENCES: list[tuple[Note, str]] = [
    (
        note("malloc", switches=["A=1", "B=2"], is_ours=True),
        "most of all on a CPU, start it so: env A=1 B=2 python train.py",
    ),
    (
        note("reserve", reserve_bytes=4 * 2**30, trial_bytes=12 * 2**30),
        "Trials leave 4.00 GiB of the memory limit free, as objective.reserve asks for, and may take 12.0 GiB.",
    ),
    (note("malloc", switches=["A=1", "B=2"], is_ours=False), "Trials run with what you have set for malloc: A=1, B=2."),
    (
        note("baseline_without_effect", setting="pin_memory", reason="no_copy_to_accelerator", device="cpu"),
        "The baseline's pin_memory has no effect here: pinned memory serves copies to an accelerator, and the device",
    ),
    (
        note("value_without_effect", setting="channels_last", value=True, reason="no_4d_input", device="cpu"),
        "channels_last=True has no effect here: no input of the model has four dimensions.",
    ),
    (
        note("value_without_effect", setting="fused", value=True, reason="no_fused_optimizer", device="cpu"),
        "fused=True has no effect here: torch has no fused implementation of this optimizer for these parameters.",
    ),
    (
        note("baseline_without_effect", setting="cudnn_benchmark", reason="no_cudnn", device="cpu"),
        "The baseline's cudnn_benchmark has no effect here: cuDNN computes on GPUs, and the device is cpu.",
    ),
    (
        note(
            "value_without_effect",
            setting="compile_mode",
            value="reduce-overhead",
            reason="no_cuda_graphs",
            device="cpu",
        ),
        "compile_mode=reduce-overhead has no effect here: it records CUDA graphs, and the device is cpu.",
    ),
    (
        note("precision_not_native", device="Tesla T4", precisions=["bfloat16"]),
        "Tesla T4 does not compute bfloat16 natively: tried as given.",
    ),
    (note("dataset_not_sharded", most_workers=1), "so num_workers stayed within 1; each further worker would repeat"),
    (note("dataset_not_sharded", most_workers=None), "The choices given were kept."),
    (note("tf_data"), "prefetch_factor its prefetch buffer in batches."),
    (
        note("baseline_without_effect", setting="persistent_workers", reason="tf_data", device="cpu"),
        "has no effect here: a tf.data pipeline has threads in place of workers",
    ),
    (
        note("value_without_effect", setting="numa_binding", value="node", reason="one_numa_node", device="cpu"),
        "numa_binding=node has no effect here: the cores here belong to one NUMA node, and no ranks are there",
    ),
    (
        note("baseline_without_effect", setting="numa_binding", reason="no_affinity", device="mps"),
        "The baseline's numa_binding has no effect here: processes are bound to cores on Linux alone",
    ),
    (
        note("out_of_order_tried", slow_tail_fraction=0.4),
        "in_order: false was tried, since 40 % of the time of the items looked at went into items over 8 times the",
    ),
    (
        note("out_of_order_tried", slow_tail_fraction=None),
        "in_order: false was tried. It changes the order of the batches",
    ),
    (
        note("ddp_settings_without_ddp", settings=["ddp.bucket_cap_mb", "ddp.static_graph"]),
        "ddp.bucket_cap_mb, ddp.static_graph had no effect",
    ),
    (note("trials_stay_on_named_device", device="cuda:1"), "cuda:1 was named, so trials stayed on it"),
    (note("unlike_devices", devices=["H200", "T4"]), "The devices differ (H200, T4)"),
    (note("unused_parameters_not_searched"), "only a static graph runs under strategy 'ddp'"),
    (note("hooks_change_gradients", hooks=["fp16", "powersgd"]), "ddp.comm_hook fp16, powersgd changes the gradients"),
    (note("fp16_hook_overflows", precisions=["float32", "bfloat16"]), "in float32, bfloat16 no GradScaler"),
    (note("spread_without_effect", hosts=1), "executor.ranks=spread had no effect: there is one host."),
    (note("spread_without_effect", hosts=3), "executor.ranks=spread had no effect: no trial has several ranks."),
    (
        note("world_size_capped", most=256, devices=1024, hosts=256),
        "world_size stayed within 256 of the 1024 devices of 256 hosts",
    ),
    (note("lr_unchanged"), "The learning rate is left as it is (lr_rule: none)."),
    (note("lr_rule_unknown", optimizer="Muon"), "No scaling rule is known for Muon"),
    (note("lr_warm_up", epochs=5), "over the first 5 epochs"),
    (note("betas_unchanged", betas=[0.9, 0.999], batch_ratio=16.0), "betas (0.9, 0.999) can't follow a batch 16 times"),
]


@pytest.mark.parametrize(("given", "part"), _SENTENCES)
def test_each_note_has_its_sentence(given: Note, part: str) -> None:
    assert part in say(given)


def test_every_sentence_is_tested() -> None:
    assert {given.code for given, _ in _SENTENCES} == load_codes("space")
