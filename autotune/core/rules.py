"""The rules between settings, all of them.

`contradiction` holds everywhere and is checked when a TrainingConfig is made; `obstacle`, `without_effect` and
`normalised` need the machine and the workload. Each gives a reason or None, so that raising, skipping and telling share
one check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.core.environment import Environment
    from autotune.core.training_config import TrainingConfig
    from autotune.core.workload import WorkloadFacts

__all__ = ["TORCH_PREFETCH_FACTOR", "contradiction", "normalised", "obstacle", "same_behaviour_key", "without_effect"]

TORCH_PREFETCH_FACTOR = 2
"""torch.utils.data.DataLoader's own, where workers load and None is given."""


def contradiction(config: TrainingConfig) -> str | None:
    """Why these settings can't stand together on any machine, or None."""
    if config.num_workers == 0 and config.prefetch_factor is not None:
        return (
            "prefetch_factor needs loader workers, but got "
            f"num_workers=0 and prefetch_factor={config.prefetch_factor}; leave prefetch_factor out or set num_workers"
        )
    if config.num_workers == 0 and config.persistent_workers:
        return "persistent_workers needs loader workers, but got num_workers=0; leave it out or set num_workers"
    if config.strategy == "single" and config.world_size != 1:
        return f"strategy 'single' has one rank, but got world_size={config.world_size}; set strategy: ddp"
    if config.strategy != "ddp" and config.ddp is not None:
        return f"ddp settings need strategy 'ddp', but got strategy {config.strategy!r}; leave ddp out"
    if config.ddp is not None and config.ddp.static_graph and config.grad_accum_steps > 1:
        return (
            "ddp.static_graph can't stand with gradient accumulation (torch ends in an internal assert), but got "
            f"grad_accum_steps={config.grad_accum_steps}; set static_graph: false"
        )
    return None


def obstacle(config: TrainingConfig, facts: WorkloadFacts, *, drop_last: bool) -> str | None:
    """Why a configuration can't be measured with this workload on this machine, or None."""
    length = facts.dataset_length
    if length is not None and drop_last and config.micro_batch_size > length:
        size = config.micro_batch_size
        return f"a batch must fit into the dataset of {length} samples, but got micro_batch_size={size}"
    if config.strategy != "single":
        return f"this version runs trials on one device, but got strategy={config.strategy}; set strategy: single"
    fixed = facts.fixed_batch_size
    if fixed is not None and config.micro_batch_size != fixed:
        return (
            f"the batch sampler yields batches of {fixed}, but got micro_batch_size={config.micro_batch_size}; "
            "pass batch_sampler as a callable (dataset, batch_size) to have it tuned"
        )
    return None


def without_effect(config: TrainingConfig, facts: WorkloadFacts, environment: Environment) -> dict[str, str]:
    """Settings that are on but do nothing here, each with the reason."""
    found = {}
    if config.pin_memory and environment.device_kind in {"cpu", "mps"}:
        found["pin_memory"] = f"pinned memory serves copies to an accelerator, and the device is {environment.device}"
    if config.amp_dtype == "tf32" and environment.device_kind != "cuda":
        found["amp_dtype"] = f"TF32 is computed by NVIDIA GPUs, and the device is {environment.device}"
    if config.channels_last and not facts.has_4d_input:
        found["channels_last"] = "no input of the model has four dimensions"
    return found


def normalised(settings: dict[str, object], facts: WorkloadFacts, environment: Environment) -> dict[str, object]:
    """Proposed settings with everything that has no effect put to its neutral value, so that equals are equal."""
    result = dict(settings)
    if result.get("num_workers") == 0:
        result.update(prefetch_factor=None, persistent_workers=False)
    if environment.device_kind in {"cpu", "mps"}:
        result["pin_memory"] = False
    if environment.device_kind != "cuda" and result.get("amp_dtype") == "tf32":
        result["amp_dtype"] = "float32"
    if not facts.has_4d_input:
        result["channels_last"] = False
    return result


def same_behaviour_key(config: TrainingConfig, facts: WorkloadFacts, environment: Environment) -> str:
    """A text that is equal for configurations that run alike: what one measured answers for the other."""
    settings = normalised(config.model_dump(exclude={"lr"}), facts, environment)
    if config.num_workers > 0 and config.prefetch_factor is None:
        settings["prefetch_factor"] = TORCH_PREFETCH_FACTOR
    return repr(sorted(settings.items()))
