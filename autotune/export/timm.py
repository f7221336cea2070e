"""Export to timm's train.py: options that follow its own on the command line.

Source: train.py of huggingface/pytorch-image-models, 1.0.29, which is in no package;
timm/data/loader.py and optim/_optim_factory.py.
"""

from __future__ import annotations

from autotune.export.table import (
    Defaults,
    Export,
    Table,
    Wanted,
    as_options,
    carried,
    export,
    tf32_default,
)

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
    if found.config.compile:
        settings["torchcompile"] = "inductor"
    if not found.config.ddp_settings.broadcast_buffers:
        settings["no_ddp_bb"] = True
    if found.device == "cpu":
        settings["device"] = "cpu"
    return export(
        found, TIMM, text=as_options(settings), settings=settings, defaults=_defaults(found)
    )


def _defaults(found: Wanted) -> Defaults:
    own = "sgd with momentum 0.9 and weight decay 2e-5"
    yield "opt", f"{own}; trials trained with your own optimizer, or plain SGD"
    yield "sched", "cosine, after 5 warm-up epochs; trials kept the learning rate as it is"
    if found.config.has_workers and not found.config.persistent_workers:
        yield "persistent_workers", "true: workers stay between epochs; in trials they did not"
    yield from tf32_default(found, "allow_tf32")
    if found.device != "cpu" and not found.config.cudnn_benchmark:
        yield (
            "torch.backends.cudnn.benchmark",
            "true on CUDA: it times cuDNN's algorithms; trials did not",
        )
    if found.device != "cpu":
        yield (
            "no_prefetcher",
            "false: batches are copied and normalised on a CUDA stream of its own",
        )
