"""What `autotune apply` reports of a training, and when it stops it; the loaders are never iterated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.config.plan import LoaderSite
from autotune.config.training_config import TrainingConfig
from autotune.worker.script.overrides import Overrides
from autotune.worker.script.session import Applied
from autotune.worker.script.sightings import Made, Sightings
from tests.factories.scripts import make_script

Said = Callable[[], str]
DATA: Dataset[Any] = TensorDataset(torch.zeros(64))
SITE = LoaderSite(
    file="/home/a/train.py",
    line=7,
    code="loader = make()",
    dataset="Images",
    length=64,
    batch_size=16,
)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: capsys.readouterr().err


def training_on(loader: DataLoader[Any], *, is_searched: bool = True, **settings: Any) -> Applied:
    """A training on a loader, to which these settings were to be applied."""
    script = make_script(loaders=(SITE,))
    config = TrainingConfig.model_validate(script.observed.model_dump() | settings)
    made = Made(SITE, ref(loader), lambda: None, takes_batch_size=True, is_searched=is_searched)
    made.was_iterated = made.is_trained_on = True
    return Applied(Overrides(config, script, is_trial=False), Sightings(made=[made]))


def test_loader_with_the_settings_is_named_once(said: Said) -> None:
    loader = DataLoader(DATA, batch_size=32, num_workers=1)
    applied = training_on(loader, micro_batch_size=32, num_workers=1)
    for _ in range(20):
        applied.before_step()
    (line,) = said().splitlines()
    assert "train.py, line 7" in line
    assert line.endswith(" batch_size=32, num_workers=1")


def test_second_loader_of_a_line_is_numbered(said: Said) -> None:
    loader = DataLoader(DATA, batch_size=32)
    applied = training_on(loader, micro_batch_size=32)
    applied._sightings.made[0].site = SITE.model_copy(update={"nth": 1})
    applied.before_step()
    assert "line 7, as number 2" in said()


def test_training_on_another_loader_is_stopped(said: Said) -> None:
    applied = training_on(DataLoader(DATA, batch_size=16), is_searched=False, micro_batch_size=32)
    with pytest.raises(SystemExit) as stopped:
        applied.before_step()
    assert stopped.value.code == 2
    assert "loader = make()" in said()


def test_unchanged_loader_is_not_reported(said: Said) -> None:
    applied = training_on(DataLoader(DATA, batch_size=16), is_searched=False, amp_dtype="bfloat16")
    applied.before_step()
    assert said() == ""


def test_training_without_a_loader_goes_on(said: Said) -> None:
    loader = DataLoader(DATA, batch_size=16)
    applied = training_on(loader, micro_batch_size=32)
    applied._sightings.made.clear()
    for _ in range(10):
        applied.before_step()
    assert said() == "", "its loader may come yet"
    applied.before_step()
    assert len(said().splitlines()) == 1
    applied.before_step()
    assert said() == ""


def test_loader_iterated_without_gradients_may_train(
    said: Said,
) -> None:
    loader = DataLoader(DATA, batch_size=32)
    applied = training_on(loader, micro_batch_size=32)
    applied._sightings.made[0].is_trained_on = False
    applied.before_step()
    assert said().endswith(" batch_size=32\n")


def test_settings_not_in_force_after_ten_steps(said: Said) -> None:
    loader = DataLoader(DATA, batch_size=32)
    threads = torch.get_num_threads() + 1
    applied = training_on(loader, micro_batch_size=32, num_workers=2, intra_op_threads=threads)
    for _ in range(10):
        applied.before_step()
    said()  # that the loader has num_workers=0
    applied.before_step()
    assert [line.partition(";")[0] for line in said().splitlines()] == [
        "autotune: not in force: num_workers=2",
        f"autotune: not in force: intra_op_threads={threads}",
    ]
