"""The YAML border, in and out: the only user of pyyaml.

In: a configuration file (with --set overrides) or a Python mapping, parsed and checked once; all that is wrong is told
at once, a sentence each, with its place. Out: a Plan, a model of the core, or the text of a recommended.yaml.
"""

from __future__ import annotations

from autotune.run_config.parsing import parse_model
from autotune.run_config.plan import read_plan
from autotune.run_config.recommended import (
    describe_machine,
    read_recommended,
    read_recommended_machine,
    recommended_yaml,
)
from autotune.run_config.starter import STARTER_YAML

__all__ = [
    "STARTER_YAML",
    "describe_machine",
    "parse_model",
    "read_plan",
    "read_recommended",
    "read_recommended_machine",
    "recommended_yaml",
]
