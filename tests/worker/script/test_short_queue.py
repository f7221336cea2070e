"""A trial keeps the queue of the loader that its script trains on short until it matters, and no other queue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune.config.training_config import TrainingConfig
from autotune.protocol import messages
from autotune.protocol.disk import TrialFolder
from autotune.protocol.messages import RankReport
from autotune.worker.place import Place
from autotune.worker.script import session
from autotune.worker.script.bench import Scene
from autotune.worker.script.feeds import STEPS_BEYOND_BATCHES, ScriptFeed, StepFeed
from autotune.worker.script.hooks import torchs_own
from autotune.worker.script.overrides import Overrides
from autotune.worker.script.session import Session
from autotune.worker.script.sightings import Sightings
from tests.worker.paper_workers import PaperIterator, use_paper_workers

CONFIGURED = 6


def loader_of(length: int = 400, **settings: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(length))
    return DataLoader(data, batch_size=4, num_workers=2, prefetch_factor=CONFIGURED, **settings)


class Script:
    """A script under a job, whose calls of torch come to the session as the hooks pass them on."""

    def __init__(self, kind: type[messages.WorkloadJob] | None = messages.TrialJob) -> None:
        own: dict[str, Any] = {"script": None, "process": SimpleNamespace(limit_bytes=None)}
        job = None if kind is None else kind.model_construct(**own)
        place = Place(TrialFolder(Path("/nowhere")), 0, 0)
        self.session = Session(job, Overrides(TrainingConfig(), None), place, self._measure)
        self.session.end = lambda report: None  # type: ignore[method-assign] # no process ends
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def _measure(self, scene: Scene) -> RankReport:
        while True:
            scene.trainer.train(scene.feed.take().batch)

    def iterate(self, loader: DataLoader[Any]) -> PaperIterator:
        assert self.session.before_iter(loader) is None
        with self.session.making_iterator(loader):
            iterator = iter(loader)
        self.session.after_iter(loader, iterator)
        own = torchs_own(iterator)
        assert isinstance(own, PaperIterator)
        return own

    def train(self, iterator: PaperIterator, batches: int = 1) -> None:
        for _ in range(batches):
            self.session.on_next(iterator)
            self.step()

    def step(self) -> None:
        self.session.before_step()
        self.session.on_step(self.optimizer)

    @property
    def feed(self) -> ScriptFeed:
        assert isinstance(self.session.feed, ScriptFeed)
        return self.session.feed

    def warm(self, loader: DataLoader[Any]) -> PaperIterator:
        """Train until a first batch was missed after the first steps."""
        iterator = self.iterate(loader)
        self.train(iterator, 2)
        self.feed.allow_full_queue()
        self.train(iterator)
        assert iterator.depth == CONFIGURED
        return iterator


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_paper_workers(monkeypatch)
    monkeypatch.setattr(session, "release_module_calls", lambda: None)
    monkeypatch.setattr(session, "unwatch_children", lambda: None)


@pytest.fixture
def script() -> Script:
    return Script()


def test_queue_is_short_until_a_batch_is_missed(script: Script) -> None:
    loader = loader_of()
    iterator = script.iterate(loader)
    assert loader.prefetch_factor == CONFIGURED
    script.train(iterator, 3)
    assert iterator.depth == 1, "the loader is always empty, and steps are not steady yet"
    iterator.ready = 1
    script.feed.allow_full_queue()
    script.train(iterator, 3)
    assert iterator.depth == 2
    iterator.ready, script.feed.watches_queue = 0, False  # in the window
    script.train(iterator)
    assert iterator.depth == CONFIGURED
    assert script.iterate(loader).depth == CONFIGURED


@pytest.mark.parametrize(
    "kind", [None, messages.ProbeJob, messages.StressJob, messages.CurvesJob, messages.PrecisionJob]
)
def test_other_jobs_have_the_configured_queue(kind: type[messages.WorkloadJob] | None) -> None:
    script, loader = Script(kind), loader_of()
    iterator = script.iterate(loader)
    script.train(iterator, 2)
    if kind is not None:
        script.feed.allow_full_queue()
    assert iterator.depth == script.iterate(loader).depth == CONFIGURED


def test_next_epoch_begins_short_if_none_was_missed(script: Script) -> None:
    """Lightning asks for no batch beyond an epoch's last."""
    loader = loader_of(12)
    iterator = script.iterate(loader)
    script.train(iterator)
    iterator.ready = 1
    script.train(iterator)
    script.feed.allow_full_queue()
    script.train(iterator)
    following = script.iterate(loader)
    assert (iterator.depth, following.depth) == (2, 1)
    script.train(following)
    assert following.depth == CONFIGURED, "an epoch's first batch is missed"


def test_epochs_end_finds_the_queue_empty(script: Script) -> None:
    loader = loader_of(8)
    iterator = script.iterate(loader)
    script.train(iterator, 2)
    script.feed.allow_full_queue()
    with pytest.raises(StopIteration):
        script.train(iterator)
    assert script.iterate(loader).depth == CONFIGURED


def test_persistent_workers_keep_their_depth(script: Script) -> None:
    loader = loader_of(12, persistent_workers=True)
    iterator = script.iterate(loader)
    script.train(iterator, 3)
    assert script.iterate(loader) is iterator
    assert iterator.depth == 1
    script.feed.allow_full_queue()
    script.train(iterator)
    assert iterator.depth == CONFIGURED
    assert script.iterate(loader) is iterator
    assert iterator.depth == CONFIGURED


def test_workers_started_for_each_step(
    script: Script,
) -> None:
    """The script says `next(iter(loader))` in each step."""
    loader = loader_of()
    for _ in range(3):
        script.train(script.iterate(loader))
    script.feed.allow_full_queue()
    script.train(script.iterate(loader))
    assert script.iterate(loader).depth == CONFIGURED


def test_loader_in_step_has_the_configured_queue(
    script: Script,
) -> None:
    """Both may be the one that trains while they are begun: zip(first, second)."""
    first, second = loader_of(), loader_of()
    leading, other = script.iterate(first), script.iterate(second)
    for _ in range(2):
        script.session.on_next(leading)
        script.session.on_next(other)
        script.step()
    assert script.feed.loader is first
    assert (leading.depth, other.depth) == (1, CONFIGURED)
    assert script.iterate(second).depth == CONFIGURED


def test_evaluation_has_the_configured_queue(script: Script) -> None:
    loader, other = loader_of(), loader_of()
    with torch.no_grad():
        assert script.iterate(loader).depth == CONFIGURED
    script.train(script.iterate(loader), 2)
    with torch.no_grad():
        assert script.iterate(loader).depth == script.iterate(other).depth == CONFIGURED
    assert script.iterate(other).depth == CONFIGURED


def test_older_iterator_gets_its_queue(
    script: Script,
) -> None:
    loader = loader_of()
    older = script.iterate(loader)
    script.warm(loader)
    assert older.depth == 1
    script.train(older)
    assert older.depth == CONFIGURED


def test_loader_made_for_each_epoch_is_followed(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Sightings, "is_rebuilt_from", lambda *_: True
    )  # where each is made is not seen without hooks
    loaders = [loader_of(12) for _ in range(3)]
    iterator = script.iterate(loaders[0])
    script.train(iterator, 3)
    feed = script.feed
    for loader, depth in zip(loaders[1:], (1, CONFIGURED), strict=True):
        iterator = script.iterate(loader)
        assert (feed.loader, iterator.depth) == (loader, depth)
        feed.allow_full_queue()
        script.train(iterator, 3)


def test_loader_read_by_another_thread(
    script: Script,
) -> None:
    loader = loader_of()
    with ThreadPoolExecutor(1) as thread:
        iterator = thread.submit(script.iterate, loader).result()
        thread.submit(script.session.on_next, iterator).result()
        script.session.on_call(script.model, (), {})
        for _ in range(5):
            script.model(torch.zeros(1, 1)).sum().backward()
            script.step()
        assert isinstance(script.session.feed, StepFeed)
        assert iterator.depth == 1, "the thread may be reading it"
        thread.submit(script.session.on_next, iterator).result()
        assert iterator.depth == CONFIGURED
        assert thread.submit(script.iterate, loader).result().depth == CONFIGURED


def test_kept_batches_end_the_short_queue(
    script: Script,
) -> None:
    loader = loader_of()
    iterator = script.iterate(loader)
    script.train(iterator, 2)
    script.session.on_call(script.model, (), {})
    for _ in range(script.feed.batches + STEPS_BEYOND_BATCHES + 1):
        script.step()
    assert script.feed.is_dry
    script.session.on_next(iterator)
    assert iterator.depth == script.iterate(loader).depth == CONFIGURED


def test_own_iterator_begins_as_short(script: Script) -> None:
    """Once it has the lead over the loader alone."""
    loader = loader_of(8)
    iterator = script.iterate(loader)
    script.train(iterator, 2)
    feed = script.feed
    feed.take_over()
    feed.allow_full_queue()
    assert iterator.depth == 2
    feed.take()
    own = feed._iterator()
    assert isinstance(own, PaperIterator)
    assert own.depth == CONFIGURED


class OwnIterator(DataLoader[Any]):
    """Wraps torch's iterator, as torch_geometric's loaders do."""

    def _get_iterator(self) -> Any:
        return SimpleNamespace(iterator=super()._get_iterator())


def test_loader_of_another_kind(script: Script) -> None:
    data = TensorDataset(torch.arange(400))
    loader = OwnIterator(data, batch_size=4, num_workers=2, prefetch_factor=CONFIGURED)
    script.session.before_iter(loader)
    with script.session.making_iterator(loader):
        iterator = loader._get_iterator()
    assert iterator.iterator.depth == CONFIGURED
