"""Names and values: the machine, the workload, the run's options, the files of the run folder.

Comes in: an Environment, WorkloadFacts, a RunSummary, a folder. Goes out: dicts of short texts.
"""

from __future__ import annotations

import shlex
from collections.abc import Container
from pathlib import Path

from autotune.messages.units import format_count, show
from autotune.records.run_summary import RunSummary
from autotune.report.blocks import known_facts
from autotune.report.wording.names import describe_settings
from autotune.settings.environment import Environment
from autotune.settings.workload import ScriptFacts, WorkloadFacts

__all__ = ["describe_environment", "describe_run", "describe_workload", "list_files", "show_path"]

_FILES = {
    "recommended.yaml": "the settings to use; autotune.load() reads them",
    "recommended.patch": "the loader's settings as a change of the script",
    "report.html": "the report with its plots, for a browser",
    "report.md": "the same in Markdown, its plots as tables",
    "trials.jsonl": "every trial, raw",
    "study.db": "the Optuna study",
    "environment.json": "the machine and its versions",
    "logs": "what each trial printed",
}


def list_files(run_dir: Path, written: Container[str] = ()) -> dict[str, str]:
    """The run folder's files that are there, or will be: {name: what it holds}."""
    return {name: purpose for name, purpose in _FILES.items() if name in written or (run_dir / name).exists()}


def show_path(path: Path) -> str:
    """A path, relative where it lies below the working directory."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def describe_environment(environment: Environment) -> dict[str, str]:
    """The machine, or each of several: {what: its value}."""
    memory, ram = show(environment.device_memory_bytes, "bytes"), show(environment.ram_bytes, "bytes")
    each, on_each = (f"{environment.hosts} hosts, each: ", " on each host") if environment.hosts > 1 else ("", "")
    unlike = f": {', '.join(environment.device_names)}" if environment.device_names else ""
    nodes = f" of {environment.numa_nodes} NUMA nodes" if environment.numa_nodes > 1 else ""
    facts = {
        "device": f"{each}{environment.device_name} ({environment.device}, {memory})",
        "devices": f"{environment.device_count}{on_each}{unlike}" if environment.device_count > 1 else "",
        "driver": environment.driver or "",
        "precisions": ", ".join(environment.native_amp_dtypes),
        "TF32 switches": ", ".join(environment.tf32_overrides),
        "processor": f"{format_count(environment.cores, 'core')}{nodes}, {ram} of RAM{on_each}",
        "malloc": _describe_malloc(environment),
        "platform": environment.platform,
        "python": environment.python,
        "torch": environment.torch + (f", CUDA {environment.cuda}" if environment.cuda is not None else ""),
        "packages": ", ".join(f"{name} {version}" for name, version in sorted(environment.versions.items())),
        "fingerprint": environment.fingerprint,
        "note": " ".join(map(str, environment.remarks)),
    }
    return known_facts(facts).facts


def _describe_malloc(environment: Environment) -> str:
    by = " (set for trials)" if environment.keeps_memory else ""
    return " ".join(environment.malloc) + by


def describe_workload(facts: WorkloadFacts) -> dict[str, str]:
    """What is trained: {what: its value}."""
    kind = "iterable dataset" if facts.is_iterable else "map-style dataset"
    kind = "tf.data pipeline" if facts.is_tf_data else kind
    length = "unknown length" if facts.dataset_length is None else format_count(facts.dataset_length, "sample")
    own = {
        "data": f"{kind}, {length}",
        "model": format_count(facts.parameter_count, "parameter"),
        "optimizer": facts.optimizer.name,
        "loss": facts.step_source,
    }
    return own if facts.script is None else own | _describe_script(facts.script)


def _describe_script(script: ScriptFacts) -> dict[str, str]:
    """Who runs a script's loop, and where its data comes from."""
    if not script.loaders:
        return {"data": "no DataLoader", "loop": script.framework}
    site = script.own_loader or script.loaders[-1]
    return {"loop": script.framework, "loader": f"made in {Path(site.file).name}, line {site.line}"}


def describe_run(summary: RunSummary) -> dict[str, str]:
    """What the search was asked for: {what: its value}."""
    objective, budget = summary.objective, summary.budget
    timeout = "none" if budget.timeout_s is None else show(budget.timeout_s, "duration")
    facts = {
        "command": shlex.join(summary.command),
        "autotune": summary.autotune_version,
        "seed": str(summary.seed),
        "baseline": describe_settings(summary.baseline),
        "memory limit": f"{show(summary.limit_bytes, 'bytes')}, {summary.memory_source}",
        "busy weight": f"{objective.busy_weight:g}",
        "global batch": f"{objective.global_batch}, at most {objective.max_batch_scale:g} times the baseline's",
        "larger batch gain": show(objective.larger_batch_gain, "share"),
        "lr rule": objective.lr_rule,
        "budget": f"at most {budget.max_trials} trials, time-out: {timeout}",
    }
    return known_facts(facts).facts
