"""The head of a recommended.yaml: how to have what was measured, by a loop, a loader or a trainer of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.config.plan import ObjectFacts
from autotune.config.training_config import TrainingConfig
from autotune.files.recommended import recommended_yaml
from autotune.messages.space import during_training, prepared_by
from autotune.note import Note
from autotune.records.result import RunSummary
from tests.factories import make_recommendation, make_script, make_summary
from tests.golden import assert_golden

GROUP = TrainingConfig(strategy="ddp", world_size=2)
SMALL = TrainingConfig(micro_batch_size=2)
SWITCHED = TrainingConfig(fused=True, cudnn_benchmark=True)
OWN_LOADER = {"has_loader": True, "replaced_arguments": ("collate_fn", "batch_sampler")}
HF = during_training(framework="transformers.Trainer", names=["logging"])
LIGHTNING = during_training(framework="Lightning's Trainer", names=["logging"])
ACCELERATE = prepared_by(framework="accelerate")


def summary(
    config: TrainingConfig,
    *notes: Note,
    objects: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    **changes: Any,
) -> RunSummary:
    """Return a search that found this configuration."""
    found = make_summary(recommendation=make_recommendation(config=config), notes=notes, **changes)
    own = {"objects": ObjectFacts.model_validate(objects or {}), **(facts or {})}
    machine = found.environment.model_copy(update=environment or {})
    return found.model_copy(
        update={"facts": found.facts.model_copy(update=own), "environment": machine}
    )


CASES: dict[str, RunSummary] = {
    "a loop of one's own": summary(TrainingConfig()),
    "a name that no comment can hold": summary(TrainingConfig(), name="a\nformat: 2\u2028\x07"),
    "a loader of one's own": summary(TrainingConfig(), objects={"has_loader": True}),
    "a loader made for a batch size": summary(SMALL, objects=OWN_LOADER),
    "a loader with a batch sampler that is kept": summary(
        SMALL, objects=OWN_LOADER, facts={"fixed_batch_size": 2}
    ),
    "a loader with a budget of tokens": summary(
        TrainingConfig(micro_batch_size=2, max_tokens=9),
        objects=OWN_LOADER,
        facts={"has_token_budget": True},
    ),
    "two ranks": summary(GROUP),
    "two ranks with a loader of one's own": summary(GROUP, objects={"has_loader": True}),
    "two ranks bound to cores": summary(GROUP.model_copy(update={"numa_binding": "exclusive"})),
    "DataParallel over four devices": summary(TrainingConfig(strategy="dp", world_size=4)),
    "memory that trials kept": summary(
        TrainingConfig(), environment={"malloc": ("A=1", "B=2"), "keeps_memory": True}
    ),
    "memory that training keeps anyway": summary(
        TrainingConfig(), environment={"malloc": ("A=1",)}
    ),
    "a switch to take out": summary(TrainingConfig(cudnn_benchmark=True), baseline=SWITCHED),
    "switches that stay": summary(SWITCHED, baseline=SWITCHED),
    "a script": summary(
        TrainingConfig(), facts={"script": make_script()}, command=("python", "my train.py")
    ),
    "transformers": summary(TrainingConfig(), HF, objects={"has_loader": True}),
    "transformers with a fused optimizer": summary(
        TrainingConfig(fused=True), HF, objects={"has_loader": True}
    ),
    "Lightning": summary(TrainingConfig(), LIGHTNING, objects={"has_loader": True}),
    "accelerate with a sampler": summary(
        TrainingConfig(),
        ACCELERATE,
        objects={"has_loader": True, "replaced_arguments": ("sampler",)},
    ),
}


def test_headers() -> None:
    """They are comments alone, whatever a search is called."""
    texts = []
    for name, found in CASES.items():
        header = recommended_yaml(found).partition("format: 1")[0]
        assert all(line.startswith("#") for line in header.splitlines() if line)
        texts.append(f"== {name}\n{header.rstrip()}\n\n")
    assert_golden(Path(__file__).parent / "golden" / "recommended_headers.txt", "".join(texts))
