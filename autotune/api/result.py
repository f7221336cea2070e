"""The result of a search: right after it, or opened again from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import NothingFeasibleError
from autotune.files.run_folder import RunFolder, read_summary
from autotune.records.run_summary import RunSummary
from autotune.records.trial import TrialRecord
from autotune.report.model import build_report
from autotune.report.render.markdown import render_markdown
from autotune.report.render.notebook import render_notebook
from autotune.report.wording.summary import say_nothing_feasible
from autotune.settings.training_config import TrainingConfig
from autotune.study.storage import open_finished

if TYPE_CHECKING:
    import optuna

__all__ = ["SearchResult", "open_run", "result_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search has found."""

    best: TrainingConfig
    """The configuration to use; its learning rate is scaled to its global batch."""
    baseline: TrainingConfig
    best_same_batch: TrainingConfig | None
    """The best that keeps the baseline's global batch."""
    trials: list[TrialRecord]
    """Every measured trial, in order; the first is the baseline."""
    speedup: float | None
    """What is believed of `best` over the baseline, from all runs of both; None where the baseline is no reference."""
    speedup_ci: tuple[float, float] | None
    """Its 95 % interval."""
    study: optuna.Study
    run_dir: Path
    summary: RunSummary
    """Everything that reports are made from."""

    def report(self) -> str:
        """The report in Markdown."""
        return render_markdown(build_report(self.summary, self.run_dir))

    def _repr_html_(self) -> str:
        """The result as a table, for notebooks."""
        return render_notebook(build_report(self.summary, self.run_dir))


def open_run(path: str | Path) -> SearchResult:
    """Open the result of an earlier search from its run folder alone; nothing is measured again.

    Where the folder can be written, SQLite keeps a log next to study.db as long as the study is in use; else the study
    is a copy of it.

    Args:
        path: The run folder of a search that has ended or was interrupted. One that went on and was killed shows its
            last end.

    Raises:
        ConfigError: the folder holds no result, or one of another version of autotune.
        RunFolderError: its study.db is missing or can't be read.
        NothingFeasibleError: the search has found no configuration that meets the memory limit.
    """
    folder = RunFolder(Path(path).absolute())
    summary = read_summary(folder.path)
    if summary.recommendation is None:
        raise NothingFeasibleError(say_nothing_feasible(summary))
    study = open_finished(folder.study)
    return result_of(summary, study, folder.path)


def result_of(summary: RunSummary, study: optuna.Study, run_dir: Path) -> SearchResult:
    """The result that a summary with a recommendation holds."""
    chosen = summary.recommendation
    assert chosen is not None  # noqa: S101 - without one NothingFeasibleError was raised
    ratio = chosen.speedup
    return SearchResult(
        best=chosen.config,
        baseline=summary.baseline,
        best_same_batch=chosen.same_batch,
        trials=list(summary.trials),
        speedup=None if ratio is None else ratio.value,
        speedup_ci=None if ratio is None else (ratio.low, ratio.high),
        study=study,
        run_dir=run_dir,
        summary=summary,
    )
