"""Either side of a script alone: its loader made anew with other settings, its step fed with batches that are held.

A Bench for `jobs/curves`: loaders are copies of the script's own with changed arguments, the device's points go through
the script's own step, whose precision, layout and threads are switched from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from autotune.settings.applied.cores.worker_threads import limited
from autotune.settings.training_config import TrainingConfig
from autotune.worker.attach.loop.conductor import ScriptTrainer
from autotune.worker.attach.loop.scene import Scene
from autotune.worker.attach.seams.precision import SWITCHES, set_layout
from autotune.worker.measure.batch_sizes import unwrapped
from autotune.worker.measure.feed import Feed
from autotune.worker.setup.build import is_stream, kept_weights, put_back

__all__ = ["ScriptBench", "loader_like", "switch"]


@dataclass(slots=True)
class ScriptBench:
    """See jobs.bench.Bench."""

    scene: Scene
    _initial: list[Mapping[str, Tensor]] = field(default_factory=list)

    @property
    def kept_bytes(self) -> int:
        """See Bench."""
        return sum(tensor.nbytes for kept in self._initial for tensor in kept.values())

    def feed(self, config: TrainingConfig) -> Feed:
        """See Bench."""
        loader = self.scene.loader
        assert loader is not None  # noqa: S101 - scenes asks for a bench only where there is one
        return Feed(loader_like(loader, config))

    def prepare(self, batch: Any) -> None:  # noqa: ARG002 - as a Bench has it
        """See Bench: the script has its model already."""
        self._initial = [kept_weights(module) for module in self.scene.sightings.outermost]

    def trainer(self, config: TrainingConfig) -> ScriptTrainer:
        """See Bench."""
        switch(config, self.scene)
        trainer = self.scene.trainer
        trainer.config = config
        return trainer

    def after_point(self, *, is_failed: bool) -> None:
        """See Bench; gradients are the script's to clear."""
        if is_failed:
            for module, kept in zip(self.scene.sightings.outermost, self._initial, strict=False):
                put_back(module, kept)


def switch(config: TrainingConfig, scene: Scene) -> None:
    """Have the script's modules compute in a configuration's precision and layout from here on."""
    is_half = config.amp_dtype in {"bfloat16", "float16"}
    SWITCHES.device_type = scene.device.torch_device.type
    SWITCHES.dtype = getattr(torch, config.amp_dtype) if is_half and scene.sightings.autocast is None else None
    if SWITCHES.channels_last != config.channels_last:
        SWITCHES.channels_last = config.channels_last
        for module in SWITCHES.modules:
            set_layout(module, channels_last=config.channels_last)


def _is_plain(batches: object) -> bool:
    """Whether a batch sampler is torch's own, or torchdata's Stateful one: it can be made anew with another size."""
    return type(batches) is BatchSampler or (
        isinstance(batches, BatchSampler) and type(batches).__module__.startswith("torchdata.")
    )


def loader_like(loader: DataLoader[Any], config: TrainingConfig) -> DataLoader[Any]:
    """A loader of the same data as the script's, in the same manner, with a configuration's settings."""
    own = unwrapped(loader)
    arguments: dict[str, Any] = {**config.dataloader_kwargs(), "collate_fn": own.collate_fn}
    arguments["worker_init_fn"] = limited(loader.worker_init_fn, config.worker_threads)
    if config.num_workers and config.multiprocessing_context is None:
        arguments["multiprocessing_context"] = loader.multiprocessing_context
    if is_stream(loader.dataset):
        arguments["drop_last"] = loader.drop_last
        if loader.batch_size is None:
            arguments["batch_size"] = None
    elif _is_plain(own.batch_sampler):
        arguments |= {"sampler": own.batch_sampler.sampler, "drop_last": own.batch_sampler.drop_last}
    elif own.batch_sampler is not None:
        arguments.pop("batch_size")
        arguments["batch_sampler"] = own.batch_sampler
    else:
        arguments |= {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, **arguments)
