"""The texts of every target, and what they say of settings that are not carried: golden/exports.txt."""

from __future__ import annotations

from pathlib import Path

from autotune.config.training_config import TrainingConfig
from autotune.export import TARGETS
from tests.export.configs import BUDGET, EVERYTHING
from tests.golden import assert_golden

RANKS = TrainingConfig(world_size=2, strategy="ddp")
BOUND = RANKS.model_copy(update={"numa_binding": "exclusive"})
NODE = RANKS.model_copy(update={"numa_binding": "node", "compile": True})
HALF = NODE.model_copy(
    update={"amp_dtype": "float16", "compile_mode": "max-autotune-no-cudagraphs"}
)

CASES = {
    "every setting": (EVERYTHING, None, "AdamW"),
    "no setting": (TrainingConfig(), "cuda", "Adam"),
    "a budget of tokens": (BUDGET, None, "SGD"),
    "two ranks bound to cores": (BOUND, "cuda", None),
    "two compiled ranks bound to nodes": (NODE, None, None),
    "two ranks of float16 on a CPU": (HALF, "cpu", "Prodigy"),
}


def test_exports_of_several_configurations() -> None:
    texts = []
    for name, (config, device, optimizer) in CASES.items():
        for target in TARGETS:
            export = config.to(target, device=device, optimizer=optimizer)
            lines = [f"== {target}: {name}", export.text.rstrip()]
            lines += [f"dropped {one.setting}: {one.reason}" for one in export.dropped]
            lines += [f"default {one.name}: {one.reason}" for one in export.defaults]
            texts.append("\n".join(lines) + "\n\n")
    assert_golden(Path(__file__).parent / "golden" / "exports.txt", "".join(texts))
