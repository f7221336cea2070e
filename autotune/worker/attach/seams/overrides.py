"""A configuration's settings put into a script, each by the mildest means: a framework's variable, an argument, a hook.

Comes in: a configuration, and what was seen of the script (ScriptFacts). Only settings that differ from what the script
does, and that were found to be within reach, are touched.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.protocol.attach import ACCELERATE_NAMES, changed_settings
from autotune.settings.applied.cores.numa import CoresError
from autotune.settings.applied.cores.worker_threads import limited
from autotune.settings.applied.float32_precision import tf32_products
from autotune.settings.applied.parallel import comm_hook, ddp_arguments
from autotune.settings.contradictions import NEUTRAL_WITHOUT_WORKERS
from autotune.settings.ddp_config import DdpConfig
from autotune.settings.training_config import LOADER_SETTINGS, TrainingConfig
from autotune.settings.workload import LoaderSite, ScriptFacts
from autotune.worker.attach.seams.cores import bind_script
from autotune.worker.attach.seams.precision import SWITCHES, accelerate_state, attach_to
from autotune.worker.setup.device_choice import DeviceError

__all__ = ["Overrides"]


class Overrides:
    """The settings of a configuration that a script is to have and does not have by itself.

    Args:
        config: What the script is to run with.
        facts: What was seen of it; None: it is only looked at, and nothing is changed.
        is_trial: As in TrainingConfig.arrange.
        is_switched: Precision and layout are to be switched while the script runs, whatever it begins with.
    """

    def __init__(
        self,
        config: TrainingConfig,
        facts: ScriptFacts | None,
        *,
        is_trial: bool = True,
        is_switched: bool = False,
    ) -> None:
        self.config, self.facts, self._is_trial, self._is_switched = config, facts, is_trial, is_switched
        self.changed = frozenset[str]() if facts is None else changed_settings(config, facts)

    def in_process(self) -> None:
        """What is set in each process that trains, before its first line.

        Raises:
            DeviceError: a trial's process can't be bound to cores, and must not be measured as if it were.
        """
        config = self.config
        if "numa_binding" in self.changed and config.numa_binding is not None:
            self._bind(config.numa_binding)
        if "intra_op_threads" in self.changed and config.intra_op_threads is not None:
            torch.set_num_threads(config.intra_op_threads)
        if "amp_dtype" in self.changed and config.amp_dtype == "tf32":
            tf32_products().__enter__()  # for the whole life of this process
        self.before_step()  # the first forward pass comes before it, and what that has chosen for a shape is kept

    def _bind(self, binding: str) -> None:
        assert self.facts is not None  # noqa: S101 - else nothing is changed
        try:
            bind_script(binding, self.config.world_size, torch.device(self.facts.device))
        except CoresError as error:
            if self._is_trial:
                raise DeviceError(str(error)) from error
            sys.stderr.write(f"autotune: this process runs unbound: {error}\n")

    def loader(self, site: LoaderSite, arguments: dict[str, Any]) -> bool:
        """Change the arguments of a DataLoader that is about to be made at a place.

        Returns:
            Whether it is one of those that are searched; before the probe any may be.
        """
        if self.facts is None:
            return True
        if not self._is_searched(site):
            return False
        has_own_batches = arguments.get("batch_sampler") is not None or arguments.get("batch_size", 1) is None
        if "micro_batch_size" in self.changed and not has_own_batches:
            arguments["batch_size"] = self.config.loader_batch_size
        if not self.changed & set(LOADER_SETTINGS):
            return True
        settings = {name: value for name, value in self.config.loader_settings.items() if name in self.facts.reached}
        arguments |= settings
        if "worker_threads" in self.changed:
            arguments["worker_init_fn"] = limited(arguments.get("worker_init_fn"), self.config.worker_threads)
        if not arguments.get("num_workers"):  # what only workers use; torch refuses it without any
            for name in (*NEUTRAL_WITHOUT_WORKERS, "multiprocessing_context", "timeout"):
                arguments.pop(name, None)
        return True

    def _is_searched(self, site: LoaderSite) -> bool:
        """Return whether a loader is one of those that were searched, or such a one made again.

        The dataset of one made again may have another length where samples are drawn, as for a training: a function
        that makes all loaders makes those of an evaluation in order, or of other data.
        """
        assert self.facts is not None  # noqa: S101 - asked for by `loader` alone
        own = self.facts.observed.micro_batch_size if site.batch_size else None
        manner = {"dataset": site.dataset, "order": site.order, "length": site.length, "batch_size": own}
        is_free = "micro_batch_size" in self.facts.placeholders
        for place in self.facts.loaders:
            known = place if place.dataset else place.model_copy(update=manner)  # a file may name the place alone
            if not place.dataset and place.nth != site.nth:
                continue
            if known.is_like(site, ignores_batch_size=is_free) and (known.length == site.length or site.is_drawn):
                return True
        return False

    @property
    def follows_modules(self) -> bool:
        """Whether modules are to compute otherwise than by themselves."""
        return self._is_switched or not self.changed.isdisjoint({"amp_dtype", "channels_last"})

    def module(self, module: nn.Module) -> None:
        """Have an outermost module follow the configuration's precision and layout."""
        dtype = self.config.amp_dtype
        if "channels_last" in self.changed:
            SWITCHES.channels_last = self.config.channels_last
        if "amp_dtype" in self.changed and dtype in ACCELERATE_NAMES and not _is_mixed(dtype):
            SWITCHES.device_type = next((own.device.type for own in module.parameters()), "cpu")
            SWITCHES.dtype = getattr(torch, dtype)
        if self._is_switched or SWITCHES.dtype is not None or "channels_last" in self.changed:
            attach_to(module)

    def before_step(self) -> None:
        """What a script may have set for itself on its way to its first step."""
        if "cudnn_benchmark" in self.changed:
            torch.backends.cudnn.benchmark = self.config.cudnn_benchmark

    def ddp(self, arguments: dict[str, Any]) -> None:
        """Change the arguments of a DistributedDataParallel that is about to be made."""
        if "ddp" in self.changed and self.config.ddp is not None:
            arguments |= ddp_arguments(self.config.ddp)
            if self.config.ddp.bucket_cap_mb is None:
                arguments.setdefault("bucket_cap_mb", None)

    def ddp_made(self, model: DistributedDataParallel) -> None:
        """Compress gradients on their way, where that is asked for."""
        hook = (self.config.ddp or DdpConfig()).comm_hook
        if "ddp" in self.changed and hook is not None:
            model.register_comm_hook(*comm_hook(hook, is_trial=self._is_trial))


def _is_mixed(dtype: str) -> bool:
    """Whether accelerate computes in this precision by itself, as its environment variable has told it to."""
    own = str(accelerate_state().get("_mixed_precision"))
    return own == ACCELERATE_NAMES[dtype] and "ACCELERATE_MIXED_PRECISION" in os.environ
