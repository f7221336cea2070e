"""Which search a study belongs to, in texts that can be compared: so that it never goes on with another's results.

Comes in: a Plan, the machine, and a digest of the files behind each part of the workload that is a reference. Goes out:
a StudyIdentity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from autotune.note import Note, note
from autotune.records.object_identity import identify_object
from autotune.settings.environment import COMPARED, Environment
from autotune.settings.plan import Plan
from autotune.settings.workload import PARTS, Ref

__all__ = ["StudyIdentity", "identify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyIdentity:
    """What must be equal for a study to go on."""

    fields: dict[str, str]
    """By the name that a message uses for each; budget and run folder may change."""
    not_compared: tuple[str, ...]
    """What of the workload is in no field, such as "dataset.reader (Connection)"."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """That not all was compared, where this is so."""
        return (note("not_compared", parts=list(self.not_compared)),) if self.not_compared else ()


def identify(plan: Plan, environment: Environment, sources: Mapping[str, str]) -> StudyIdentity:
    """The identity of a plan's study; `sources` holds the digest of a reference's files by the part's name."""
    workload = plan.workload
    parts = {name: getattr(workload, name) for name in PARTS if getattr(workload, name) is not None}
    texts, not_compared = dict[str, str](), list[str]()
    for name, part in parts.items():
        if isinstance(part, Ref):
            texts[name] = "#".join(filter(None, (part.target, sources.get(name))))
        elif isinstance(part, str):
            texts[name] = part
        else:
            found = identify_object(part, name)
            texts[name] = found.text
            not_compared += found.not_compared
    fields = {
        **texts,
        "sampling": f"shuffle={workload.shuffle}, drop_last={workload.drop_last}",
        "space": _digest(repr(sorted((name, repr(domain)) for name, domain in plan.space.given().items()))),
        "baseline": plan.baseline.model_dump_json(exclude_defaults=True),
        "objective": plan.objective.model_dump_json(),
        "seed": str(plan.seed),
        **_machine(environment),
    }
    return StudyIdentity(fields=fields, not_compared=tuple(not_compared))


def _machine(environment: Environment) -> dict[str, str]:
    """What is compared of a machine, by the words that a message uses for it."""
    return {COMPARED[name]: _in_words(value) for name, value in environment.comparable().items()}


def _in_words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]
