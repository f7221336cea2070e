"""The English of what a public function says about the workload as a whole."""

from __future__ import annotations

from autotune.report.wording.template import Wording

__all__ = ["API"]

API: dict[str, Wording] = {
    "default_optimizer": (
        "No optimizer was given: trials train with SGD, which keeps no state. Adam and AdamW need {adam_bytes:bytes} "
        "more memory on each device (8 bytes for each of {trainable_parameters:,} trainable parameters): what is "
        "recommended here may run out of memory with them. Give your own as workload.optimizer or optimizer=."
    ),
    "goes_on": (
        "This search goes on from an earlier one in its folder: workload, settings and machine are equal. The content "
        "of the data, weights and installed packages were not compared; after a change there, begin anew with --fresh "
        "(fresh=True)."
    ),
}
