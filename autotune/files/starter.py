"""The configuration that `autotune init` writes, to be edited."""

from __future__ import annotations

__all__ = ["STARTER_YAML"]

STARTER_YAML = """\
# A search by autotune. Edit `workload`, then:
#     autotune check autotune.yaml    looks at the model, the data and the space, and trains nothing
#     autotune run autotune.yaml      measures, and writes recommended.yaml into run_dir

# Your code: "package.module:name" or "path/to/file.py:name". A path is looked for beside this file, then in the
# working directory.
workload:
  model: train.py:build_model        # a function without arguments that returns an nn.Module
  dataset: train.py:build_dataset    # a function without arguments that returns a Dataset or an IterableDataset
  # loss: train.py:loss              # loss(outputs, targets); default: from the batch and the model's output
  # step: train.py:step              # step(model, batch) -> scalar loss, for what the default does not cover
  # optimizer: train.py:optimizer    # optimizer(params, lr); default: SGD
  # collate_fn: train.py:collate

# What you train with today: the reference that every trial is compared with.
baseline:
  micro_batch_size: 32
  lr: 1e-3
  num_workers: 0

# What may change: a list of choices, {low, high}, or one value to fix a setting. Whatever is left out takes a range
# that suits this machine.
# space:
#   num_workers: {low: 0, high: 8}
#   amp_dtype: [float32, bfloat16]
#   compile: [false, true]

objective:
  memory_limit: 0.9                  # a fraction of the device, or a size such as 20GiB
  # global_batch: keep               # never change the batch of an optimizer step; default: scale
  # max_batch_scale: 8               # how far the global batch may grow

budget:
  timeout_s: 600                     # seconds for the whole search
  # n_trials: 40

# How trials are proposed, and what is tried first.
# search:
#   method: model                    # a model of this machine; or of Optuna: tpe, gp, random, grid
#   warm_start: runs/other           # an earlier search's run folder or recommended.yaml: its best is tried first

# device: auto                       # or cpu, cuda, cuda:1
# executor: local                    # or ray: trials on the machines of a Ray cluster, several at once
run_dir: runs/autotune
seed: 0
"""
