"""The site: every page is in it, its reference names all that is public, and nothing public lacks a word."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

import autotune
from autotune.cli import cli
from autotune.config.plan import Plan, SearchSpace
from autotune.files.plan_file import read_plan
from autotune.records.result import Diagnosis, RunSummary
from autotune.report.comparison import Comparison
from autotune.report.json_document import DiagnosisDocument, SummaryDocument
from autotune.testing import FakeLauncher

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {"index.md", "benchmarks.md", "changes.md", "contributing.md", "reporting.md"}
NAMED_BY_THEIR_SETTING = {"SearchSpace", "DdpSpace"}
"""Schemas whose keys mean what they mean in TrainingConfig and DdpConfig."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, as `make docs` builds it."""
    commands, config = (
        pytest.importorskip(f"mkdocs.{name}") for name in ("commands.build", "config")
    )
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        commands.build(
            config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
        )
    return folder


def test_navigation() -> None:
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["nav"]
    pages = {*leaves(navigation)}
    assert pages == {page.name for page in DOCS.glob("*.md")} | ELSEWHERE


@pytest.mark.slow
def test_pages_load_nothing_foreign(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(\S+)", page.read_text()
        )
        assert loaded
        assert not [place for place in loaded if re.match(r"(https?:)?//", place)]


@pytest.mark.slow
def test_linked_files_are_copied(site: Path) -> None:
    assert 'href="repository/configs/quickstart.yaml"' in (site / "index.html").read_text()
    copied = site / "repository" / "configs" / "quickstart.yaml"
    assert copied.read_bytes() == (ROOT / "configs" / "quickstart.yaml").read_bytes()


@pytest.mark.slow
def test_pictures_have_alt_texts(site: Path) -> None:
    for page in site.rglob("*.html"):
        for picture in re.findall(r"<img\b[^>]*>", page.read_text()):
            assert re.search(r"alt=\"[^\"]{10,}\"", picture), picture


@pytest.mark.slow
def test_reference_is_complete(site: Path) -> None:
    page = (DOCS / "python.md").read_text()
    assert set(re.findall(r"^::: autotune\.(\w+)$", page, flags=re.MULTILINE)) == set(
        autotune.__all__
    )
    shown = re.findall(r'<h\d id="autotune\.([\w.]+)"', (site / "python.html").read_text())
    assert {"search", "TrainingConfig.prepare", "Accumulator.backward"} <= set(shown)
    assert not [name for name in shown if any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", autotune.__all__)
def test_public_docstrings(name: str) -> None:
    named = getattr(autotune, name)
    assert inspect.getdoc(named)
    members = vars(named).items() if inspect.isclass(named) else ()
    public = {key: own for key, own in members if not key.startswith("_")}
    bare = [
        key
        for key, own in public.items()
        if (callable(own) or isinstance(own, property)) and not own.__doc__
    ]
    assert not bare


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [Plan, RunSummary, SummaryDocument, Comparison, Diagnosis, DiagnosisDocument],
    ids=lambda kind: kind.__name__,
)
def test_keys_are_described(kind: Any) -> None:
    pytest.importorskip("mkdocs")
    schema = runpy.run_path(str(DOCS / "site.py"))["described_schema"](kind)
    bare = [
        f"{name}.{key}"
        for name, part in {kind.__name__: schema, **schema.get("$defs", {})}.items()
        for key, own in part.get("properties", {}).items()
        if name not in NAMED_BY_THEIR_SETTING
        and not own.keys() & {"description", "$ref"}  # a class has its own words
    ]
    assert not bare


@pytest.mark.slow
def test_key_tables(site: Path) -> None:
    for page, keys in {
        "configuration": {"max_batch_scale", "bucket_cap_mb"},
        "files": {"samples_per_s_ci"},
    }.items():
        text = (site / f"{page}.html").read_text()
        assert all(f"<code>{key}</code>" in text for key in keys)
        assert "schema:" not in text


def test_configuration_page() -> None:
    page = (DOCS / "configuration.md").read_text()
    sections = set(TypeAdapter(Plan).json_schema(mode="serialization")["properties"]) - {"name"}
    assert sections == set(re.findall(r"^\| \[?`(\w+)`", page, flags=re.MULTILINE))
    assert set(SearchSpace.model_fields) <= set(
        re.findall(r"`(\w+)`", (DOCS / "searching.md").read_text())
    )


@pytest.mark.slow
def test_command_line_page(site: Path) -> None:
    shown = re.findall(r'<h\d id="autotune-(\w+)"', (site / "command-line.html").read_text())
    assert set(cli.commands) == set(shown)


@pytest.mark.slow
def test_site_has_no_code(site: Path) -> None:
    assert not [path for path in site.rglob("*.py*") if "repository" not in path.parts]


@pytest.mark.parametrize("page", ["out-of-memory", "slow-loader"])
def test_yaml_of_pages(page: str, tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert blocks
    for block in blocks:
        path = tmp_path / "autotune.yaml"
        path.write_text(
            f"workload: {{model: 'torch:nn.Identity', dataset: 'torch:nn.Identity'}}\n{block}"
        )
        plan = read_plan(path)
        made_up = {
            "launcher": FakeLauncher(),
            "n_trials": 1,
            "run_dir": tmp_path / "run",
            "fresh": True,
        }
        given: Any = {
            "baseline": plan.baseline,
            "space": plan.space,
            "objective": plan.objective,
            **made_up,
        }
        assert autotune.search(object, list, progress=False, **given).trials


def leaves(navigation: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in leaves(part)]
