"""The head of a recommended.yaml says how to have what was measured: by a loop, a loader or a trainer of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.files.recommended_file import recommended_yaml
from autotune.note import note
from autotune.records.run_summary import RunSummary
from autotune.report.wording.say import say
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import ObjectFacts
from tests.factories import make_recommendation, make_summary

GROUP = TrainingConfig(strategy="ddp", world_size=2)


def summary(config: TrainingConfig) -> RunSummary:
    """A search that found this configuration."""
    found = make_recommendation().model_copy(update={"config": config})
    return make_summary(recommendation=found)


def head(found: RunSummary, objects: dict[str, Any], **facts: Any) -> str:
    """The head of a recommendation for a workload with these objects and facts."""
    own = found.facts.model_copy(update={"objects": ObjectFacts.model_validate(objects), **facts})
    text = recommended_yaml(found.model_copy(update={"facts": own}), say=say).partition("format: 1")[0]
    assert all(line.startswith("#") for line in text.splitlines() if line)
    return text


def test_the_header_copies_the_users_own_loader_where_nothing_was_given_beside_it() -> None:
    text = head(summary(TrainingConfig()), {"has_loader": True})
    assert "config.loader(loader)  # a copy of your own" in text
    assert "loader = ..." not in text


@pytest.mark.parametrize(
    ("config", "facts", "told"),
    [
        (TrainingConfig(micro_batch_size=2), {}, "collate_fn, batch_sampler (for batch_size=2)"),
        (TrainingConfig(micro_batch_size=2), {"fixed_batch_size": 2}, "collate_fn, batch_sampler\n"),
        (
            TrainingConfig(micro_batch_size=2, max_tokens=9),
            {"has_token_budget": True},
            "collate_fn, batch_sampler (for max_tokens=9)",
        ),
    ],
    ids=["made for a size", "as it is", "token budget"],
)
def test_the_headers_loader_is_made_with_what_was_given_beside_it(
    config: TrainingConfig, facts: dict[str, Any], told: str
) -> None:
    beside = ("collate_fn", "batch_sampler")
    text = head(summary(config), {"has_loader": True, "beside": beside}, **facts)
    assert f"loader = ...  # yours, made with what the search had beside it: {told}" in text
    assert text.index("loader = ...") < text.index("config.loader(loader)  # a copy of it")


@pytest.mark.parametrize("binding", ["node", "exclusive"])
def test_a_binding_is_prepares_and_is_not_to_be_made_twice(binding: Any) -> None:
    text = head(summary(GROUP.model_copy(update={"numa_binding": binding})), {})
    assert f"numa_binding: {binding}). config.prepare binds" in text
    assert "torchrun --nproc-per-node 2.\n" in text, "the command itself binds nothing"
    assert "numa_binding" not in head(summary(GROUP), {})


def test_switches_of_ones_own_code_that_are_not_recommended_are_to_be_taken_out() -> None:
    own = {"baseline": TrainingConfig(fused=True, cudnn_benchmark=True)}
    text = head(summary(TrainingConfig(cudnn_benchmark=True)).model_copy(update=own), {})
    assert "Take out of your own code what it has and this has not: fused=True of the optimizer.\n" in text
    assert "Take out" not in head(summary(TrainingConfig(fused=True, cudnn_benchmark=True)).model_copy(update=own), {})
    assert "Take out" not in head(summary(TrainingConfig()), {})


def test_ranks_are_told_that_a_copied_loader_keeps_its_sampler() -> None:
    assert "DistributedSampler" in head(summary(GROUP), {"has_loader": True})
    assert "DistributedSampler" not in head(summary(TrainingConfig()), {"has_loader": True})


def test_a_trainers_header_names_the_optimizer_where_the_export_needs_it() -> None:
    told = note("beside_training", framework="transformers.Trainer", names=["logging"])
    for fused in (False, True):
        found = summary(TrainingConfig(fused=fused)).model_copy(update={"notes": (told,)})
        assert ('device="cuda", optimizer="SGD")' in head(found, {"has_loader": True})) is fused


@pytest.mark.parametrize(
    ("code", "framework", "target", "use"),
    [
        ("beside_training", "transformers.Trainer", "hf", "TrainingArguments(..., **export.settings)"),
        ("beside_training", "Lightning's Trainer", "lightning", "print(export.text)"),
        ("prepared_by", "accelerate", "accelerate", "print(export.text)"),
    ],
)
def test_a_trainers_header_points_to_the_export_for_it(code: str, framework: str, target: str, use: str) -> None:
    told = (
        note(code, framework=framework) if code == "prepared_by" else note(code, framework=framework, names=["logging"])
    )
    found = summary(TrainingConfig()).model_copy(update={"notes": (told,)})
    text = head(found, {"has_loader": True})
    assert f'export = autotune.load("recommended.yaml").to("{target}", device="cuda")' in text
    assert use in text
    assert f"autotune export <this file, or its folder> --to {target}" in text
    assert "config.loader" not in text
    assert "config.prepare" not in text
    given = head(found, {"has_loader": True, "beside": ("sampler",)})
    assert "# The search had beside your loader, which must be made with it: sampler.\n" in given
