"""The configuration file as a Plan.

Comes in: the path of a YAML file and the overrides of the command line. Goes out: a Plan; or a ConfigError with all
that is wrong. References are checked for their form, and .py files for being there; whether a module holds what it is
asked for only a trial can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from autotune.errors import ConfigError
from autotune.files.validation import issues_of
from autotune.files.yaml_document import Document, Problem, apply_override, read_document
from autotune.settings.budget import Budget
from autotune.settings.executor import Executor, ExecutorKind, device_obstacle
from autotune.settings.objective import Objective
from autotune.settings.plan import Plan
from autotune.settings.search_options import SearchOptions
from autotune.settings.search_space import SearchSpace
from autotune.settings.training_config import TrainingConfig
from autotune.settings.workload import Ref, StartMethod, Workload

__all__ = ["read_plan"]

_FOLDERS = "folders"  # key of the validation context: where a relative .py path is looked for


def read_plan(path: Path, overrides: Sequence[str] = (), *, executor: ExecutorKind | None = None) -> Plan:
    """Read a configuration file; each override is `a.b=c`, with c in YAML.

    `executor` takes the place of the file's kind of executor, before the overrides; of its address and ranks only
    where the kinds differ.

    Raises:
        ConfigError: the file can't be read, or breaks rules; all that is wrong, a sentence each.
    """
    document = read_document(path)
    malformed: list[str] = []
    for override in (*_chosen(executor, document), *overrides):
        try:
            apply_override(document, override)
        except ConfigError as error:
            malformed.extend(error.problems)
    # An empty section ("space:") is a section left out.
    data = {key: value for key, value in document.data.items() if value is not None or (key,) in document.broken}
    folders = (str(path.parent.resolve()), str(Path.cwd()))
    file, problems = _validate(document, data, folders)
    problems = sorted([*document.problems, *problems], key=_reading_order)
    if file is None or problems or malformed:
        raise ConfigError(*map(str, problems), *malformed)
    return _plan(file, path.stem, folders)


def _chosen(executor: ExecutorKind | None, document: Document) -> Iterator[str]:
    """The override that a kind of executor stands for: in the file's own mapping, unless that is of another kind."""
    if executor is not None:
        own = document.data.get("executor")
        is_alike = isinstance(own, dict) and own.get("kind", executor) == executor
        yield f"executor.kind={executor}" if is_alike else f"executor={{kind: {executor}}}"


def _check_reference(value: str, info: ValidationInfo) -> str:
    code, colon, name = value.partition(":")
    is_path = code.endswith(".py")
    has_form = colon and _is_dotted(name) and (is_path or _is_dotted(code))
    if not has_form:
        raise ValueError(f"a reference must be 'package.module:name' or 'path/to/file.py:name', but got {value!r}")
    folders = (info.context or {}).get(_FOLDERS, ())
    if is_path and not any(_is_file(Path(folder, code)) for folder in folders):
        places = " or ".join(dict.fromkeys(folders))
        raise ValueError(f"the file of a reference must exist, but {code!r} is not in {places}; check the path")
    return value


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _check_device(value: str, info: ValidationInfo) -> str:
    kind, colon, index = value.partition(":")
    if value not in {"auto", "cpu", "mps"} and not (kind in {"cuda", "xpu"} and (index.isdecimal() or not colon)):
        raise ValueError(f"must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, but got {value!r}")
    executor = info.data.get("executor")  # missing where it is wrong itself
    reason = None if executor is None else device_obstacle(value, executor)
    if reason is not None:
        raise ValueError(reason)
    return value


def _check_run_dir(value: str) -> str:
    if "\0" in value:
        raise ValueError(f"must be a folder's path, but got {value!r}")
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        raise ValueError(f"'~' must stand for a known home folder, but got {value!r}; write the path out") from None


_Text = Annotated[str, Field(strict=True, min_length=1)]
_Reference = Annotated[_Text, AfterValidator(_check_reference)]
_Flag = Annotated[bool, Field(strict=True)]


class _WorkloadSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: _Reference
    """a function that returns the model, such as "train.py:build_model\""""
    dataset: _Reference
    """a function that returns the dataset, such as "train.py:build_dataset\""""
    loss: _Reference | None = None
    step: _Reference | None = None
    optimizer: _Reference | None = None
    collate_fn: _Reference | None = None
    sampler: _Reference | None = None
    batch_sampler: _Reference | None = None
    worker_init_fn: _Reference | None = None
    shuffle: _Flag = True
    drop_last: _Flag = True
    multiprocessing_context: StartMethod | None = None


class _RunFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    workload: _WorkloadSection
    """the functions that make the model and the dataset, as workload.model and workload.dataset"""
    baseline: TrainingConfig = Field(default_factory=TrainingConfig)
    space: SearchSpace = Field(default_factory=SearchSpace)
    objective: Objective = Field(default_factory=Objective)
    budget: Budget = Field(default_factory=Budget)
    search: SearchOptions = Field(default_factory=SearchOptions)
    executor: Executor = Field(default_factory=Executor)
    device: Annotated[_Text, AfterValidator(_check_device)] = "auto"
    run_dir: Annotated[_Text, AfterValidator(_check_run_dir)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0


_REFERENCES = tuple(
    name for name in _WorkloadSection.model_fields if name not in {"shuffle", "drop_last", "multiprocessing_context"}
)


def _validate(
    document: Document, data: dict[str, Any], folders: tuple[str, ...]
) -> tuple[_RunFile | None, list[Problem]]:
    try:
        return _RunFile.model_validate(data, context={_FOLDERS: folders}), []
    except ValidationError as error:
        issues = issues_of(error, _RunFile, data)
    issues = [one for one in issues if one.path not in document.broken]
    return None, [document.problem(one.text, one.path, at_key=one.is_about_key) for one in issues]


def _reading_order(problem: Problem) -> tuple[bool, int, int]:
    place = problem.place
    return (True, 0, 0) if place is None or not place.line else (False, place.line, place.column)


def _plan(file: _RunFile, name: str, folders: tuple[str, ...]) -> Plan:
    section = file.workload
    refs = {part: getattr(section, part) for part in _REFERENCES}
    workload = Workload(
        **{part: None if target is None else Ref(target=target, folders=folders) for part, target in refs.items()},
        shuffle=section.shuffle,
        drop_last=section.drop_last,
        multiprocessing_context=section.multiprocessing_context,
    )
    return Plan(
        name=name,
        workload=workload,
        baseline=file.baseline,
        space=file.space,
        objective=file.objective,
        budget=file.budget,
        search=file.search,
        device=file.device,
        executor=file.executor,
        run_dir=None if file.run_dir is None else Path(file.run_dir),
        seed=file.seed,
    )
