"""A Case as the product takes it. Imports little: a process that is measured imports it as well."""

from __future__ import annotations

from autotune.config.plan import Workload
from benchmarks.cases.cpu import Case

__all__ = ["workload_of"]


def workload_of(case: Case) -> Workload:
    """The workload that a case describes."""
    return Workload(
        model=case.model,
        dataset=case.dataset,
        step=case.step,
        optimizer=case.optimizer,
        collate_fn=case.collate_fn,
        batch_sampler=case.batch_sampler,
        shuffle=case.shuffle,
    )
