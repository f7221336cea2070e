"""Export to timm's train.py: options that follow its own on the command line.

Source: train.py of huggingface/pytorch-image-models, 1.0.29, which is in no package;
timm/data/loader.py and optim/_optim_factory.py.
"""

from __future__ import annotations

from autotune.export.table import Defaults, Export, Table, Wanted, as_options, carried, export

TIMM = Table(
    target="timm",
    title="timm's train.py",
    precisions={
        "float32": {"amp": False},
        "tf32": {"amp": False},  # it allows TF32 in matrix products by itself
        "bfloat16": {"amp": True, "amp_dtype": "bfloat16"},
        "float16": {"amp": True, "amp_dtype": "float16"},
    },
    cpu_precisions=frozenset({"float32", "tf32", "bfloat16"}),
    ddp_reason="it makes DistributedDataParallel itself, with broadcast_buffers alone",
)


def to_timm(found: Wanted) -> Export:
    """Return the options of train.py."""
    settings = carried(found, TIMM)
    if found["compile"]:
        settings["torchcompile"] = "inductor"
    if found.is_ddp and not found["ddp.broadcast_buffers"]:
        settings["no_ddp_bb"] = True
    if found.device == "cpu":
        settings["device"] = "cpu"
    but = ["compile", "ddp.broadcast_buffers"]
    if found["persistent_workers"]:  # as timm has it by itself
        but.append("persistent_workers")
    if found["cudnn_benchmark"] and found.device != "cpu":
        but.append("cudnn_benchmark")
    text = as_options(settings)
    return export(found, TIMM, text=text, settings=settings, defaults=_defaults(found), but=but)


def _defaults(found: Wanted) -> Defaults:
    own = "sgd with momentum 0.9 and weight decay 2e-5"
    yield "opt", f"{own}; trials trained with your own optimizer, or plain SGD"
    yield "sched", "cosine, after 5 warm-up epochs; trials kept the learning rate as it is"
    if found["num_workers"] and not found["persistent_workers"]:
        yield "persistent_workers", "true: workers stay between epochs; in trials they did not"
    if found["amp_dtype"] == "float32" and found.device != "cpu":
        yield (
            "allow_tf32",
            "matrix products on a GPU take TF32 by themselves; trials computed in float32",
        )
    if found.device != "cpu" and not found["cudnn_benchmark"]:
        yield (
            "torch.backends.cudnn.benchmark",
            "true on CUDA: it times cuDNN's algorithms; trials did not",
        )
    if found.device != "cpu":
        yield (
            "no_prefetcher",
            "false: batches are copied and normalised on a CUDA stream of its own",
        )
