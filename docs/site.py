"""What the site has beyond the pages in docs/: pages that stand elsewhere, files that pages link to, tables of schemas.

A hook of mkdocs (mkdocs.yml). A link is written as it leads in the repository; here it is turned to where its target
lies in the site: a page, or a file below repository/, which is copied there. A line

    <!-- schema: autotune.records.trial.TrialRecord -->

becomes a table of the keys that the class has in YAML or JSON, from its annotations and docstrings; with `and parts`
behind the name the classes that it holds follow, each once a page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from posixpath import normpath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

__all__ = ["described_schema", "on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[1]
TAKEN_IN = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Pages outside docs/, each with its name in the site."""
_CODE_OR_LINK = re.compile(
    r"^```.*?^```|\]\((?P<place>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)
_MARKER = re.compile(
    r"^<!-- schema: (?P<home>[\w.]+)\.(?P<name>\w+)(?P<parts> and parts)? -->$", re.MULTILINE
)
_WORDS = {"None": "null", "True": "true", "False": "false"}
_TYPES = {
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "mapping",
    "array": "list",
}

Schema = Mapping[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in the pages that stand outside docs/."""
    for source, name in TAKEN_IN.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each link of a page to where its target lies in the site, and each schema's line to its tables."""
    name = page.file.src_uri
    source = next((source for source, own in TAKEN_IN.items() if own == name), f"docs/{name}")
    turned = _CODE_OR_LINK.sub(
        partial(_turned, source=source, config=config, files=files), markdown
    )
    return _MARKER.sub(partial(_tables, shown=set()), turned)


def _turned(found: re.Match[str], source: str, config: MkDocsConfig, files: Files) -> str:
    if found["place"] is None:
        return found[0]
    target = normpath(f"{source}/../{found['place']}")
    if not (ROOT / target).is_file():
        raise PluginError(f"{source}: a link must lead to a file, but {found['place']} is none")
    place = TAKEN_IN.get(target, target.removeprefix("docs/"))
    if place == target:  # neither a page nor beside one
        place = f"repository/{target}"
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
    return f"]({place}{found['anchor'] or ''})"


def _tables(found: re.Match[str], shown: set[str]) -> str:
    """The tables of a class; `shown` are those that the page has already."""
    kind = getattr(import_module(found["home"]), found["name"])
    schema = described_schema(kind)
    known = schema.get("$defs", {})
    parts = known if found["parts"] else {}
    shown.add(found["name"])
    text = (
        f'<a id="{found["name"].lower()}"></a>\n\n{_table(schema, known, linked={*parts, *shown})}'
    )
    for name in sorted(set(parts) - shown):
        shown.add(name)
        if "properties" in parts[name]:
            table = _table(parts[name], known, linked={*parts, *shown})
            text += f"\n\n### {name}\n\n{_plain(parts[name].get('description', ''))}\n\n{table}"
    return text


class _Described(GenerateJsonSchema):
    """Gives each key the string below it in its class, which models themselves keep only where an error shows it."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        for base in schema["cls"].__mro__:
            for name, text in _docstrings(base.__module__, base.__qualname__).items():
                if name in made["properties"]:
                    made["properties"][name].setdefault("description", text)
        return made


def described_schema(kind: type) -> dict[str, Any]:
    """The JSON schema of what a class writes, its keys with their descriptions."""
    return TypeAdapter(kind).json_schema(mode="serialization", schema_generator=_Described)


@cache
def _docstrings(module: str, name: str) -> dict[str, str]:
    """The strings below the fields of one of our own classes; none of others."""
    package, _, inner = module.partition(".")
    if package != "autotune":
        return {}
    fields = _package()[f"{inner}.{name}"].attributes
    return {
        key: field.docstring.value for key, field in fields.items() if field.docstring is not None
    }


@cache
def _package() -> griffe.Object | griffe.Alias:
    """The source of autotune, parsed."""
    return griffe.load("autotune", allow_inspection=False)


def _table(schema: Schema, known: Schema, linked: set[str]) -> str:
    head = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    return "\n".join(
        [head, *(_row(name, own, known, linked) for name, own in schema["properties"].items())]
    )


def _row(name: str, schema: Schema, known: Schema, linked: set[str]) -> str:
    """A key; what has no words of its own means what its class does."""
    default = "" if "default" not in schema else _literal(schema["default"])
    own = known.get(schema.get("$ref", "").rpartition("/")[2], {})
    meaning = schema.get("description") or own.get("description", "")
    return f"| `{name}` | {_value(schema, linked)} | {default} | {_plain(meaning)} |"


def _value(schema: Schema, linked: set[str]) -> str:
    """What a key takes, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return (
            "any"
            if name == "JsonValue"
            else f"[{name}](#{name.lower()})"
            if name in linked
            else f"`{name}`"
        )
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_value(own, linked) for own in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return ", ".join(map(_literal, schema.get("enum", [schema.get("const")])))
    return (
        _collection(schema, linked) or _number(schema) or _TYPES.get(schema.get("type", ""), "any")
    )


def _collection(schema: Schema, linked: set[str]) -> str:
    """A list or a mapping whose parts are known; "" for all else."""
    if "prefixItems" in schema:
        return f"list: {', '.join(_value(own, linked) for own in schema['prefixItems'])}"
    inner = schema.get("items", schema.get("additionalProperties"))
    return (
        f"{_TYPES[schema['type']]} of {_value(inner, linked)}"
        if isinstance(inner, Mapping) and inner
        else ""
    )


def _number(schema: Schema) -> str:
    kind = {"integer": "whole number", "number": "number"}.get(schema.get("type", ""), "")
    return " ".join([kind, *_bounds(schema)])


def _bounds(schema: Schema) -> Iterator[str]:
    for key, word in {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
    }.items():
        if key in schema:
            yield f"{word} {schema[key]:,}"


def _literal(value: object) -> str:
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _plain(text: str) -> str:
    """A docstring on one line of a table, with the words of YAML and JSON for Python's."""
    plain = re.sub(r"\b(None|True|False)\b", lambda found: _WORDS[found[0]], " ".join(text.split()))
    return plain.replace("|", "\\|")
