"""Each kind of job in a script: what follows a window, both sides alone, the precision check, the largest samples."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.launch.local.fork_server import ForkServerLauncher
from autotune.note import note
from autotune.protocol.jobs import Extras
from autotune.protocol.reports import RankReport
from autotune.records.precision_check import objection
from autotune.settings.training_config import TrainingConfig
from tests.worker.attach.scripts import HEAD, LOOP, STEP, Script, ScriptRig

_DEADLINE_S = 60.0
_LOSING_DIGITS = """
class Losing(nn.Module):
    def forward(self, x):
        return (x + 1000) - 1000

model.insert(1, Losing())
"""
_TEXTS = """
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        return torch.randn(4 + index % 8 + 60 * (index == 99), 8), index % 2

def padded(items):
    import json
    if max(len(x) for x, _ in items) > 60:
        print("LONG", json.dumps([len(x) for x, _ in items]), flush=True)
    long = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return long.mean(1), torch.tensor([y for _, y in items])

loader = DataLoader(Texts(), batch_size=16, shuffle=True, collate_fn=padded)
"""


_STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ((torch.randn(8), index % 2) for index in range(500))

loader = DataLoader(Stream(), batch_size=48)
"""


@pytest.fixture(scope="module")
def shared(fork_server: ForkServerLauncher, tmp_path_factory: pytest.TempPathFactory) -> ScriptRig:
    """A rig whose folder the module's tests share."""
    return ScriptRig(launcher=fork_server, folder=tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def plain(shared: ScriptRig) -> Script:
    """A plain loop, probed."""
    return shared.probe(shared.write(LOOP))


@pytest.fixture(scope="module")
def losing(shared: ScriptRig) -> Script:
    """A script whose model loses its digits in bfloat16."""
    loader = "loader = DataLoader(data, batch_size=16)\n"
    return shared.probe(shared.write(HEAD + _LOSING_DIGITS + loader + STEP, "losing.py"))


@pytest.fixture(scope="module")
def unfed(shared: ScriptRig) -> Script:
    """A script without a DataLoader."""
    return shared.probe(shared.write(HEAD + "while True:\n    step(*data[:16])\n", "unfed.py"))


def guarded(rig: ScriptRig, probed: Script, dtype: str) -> RankReport:
    """The precision check of a script."""
    config = TrainingConfig.model_validate(probed.observed.model_dump() | {"amp_dtype": dtype})
    return rig.runner(probed.words, probed.script).guard(config, name="trial", deadline_s=_DEADLINE_S)


def test_loader_and_device_are_measured_alone_after_the_window(shared: ScriptRig, plain: Script) -> None:
    extras = Extras(loader_ceiling=True, device_ceiling=True, breakdown=True, stretch_s=0.02)
    measured = shared.measured(plain.words, plain, extras=extras, num_workers=1, prefetch_factor=2)
    assert measured.loader_ceiling is not None
    assert measured.device_ceiling is not None
    assert measured.breakdown is not None
    assert measured.remarks == ()


@pytest.mark.slow
def test_a_streams_loader_is_measured_alone_and_a_short_last_batch_counted(shared: ScriptRig) -> None:
    probed = shared.probe(shared.write(HEAD + _STREAM + STEP, "stream.py"))
    varied = [TrainingConfig.model_validate(probed.observed.model_dump() | {"micro_batch_size": 96})]
    runner = shared.runner(probed.words, probed.script)
    report = runner.curves(probed.observed, varied, deadline_s=_DEADLINE_S, stretch_s=0.02)
    assert report.curves is not None, report.result.reason
    assert report.curves.loader
    assert all(point.ceiling is not None for point in report.curves.loader)


def test_curves_of_a_script_give_points_of_loader_and_device(shared: ScriptRig, plain: Script) -> None:
    changes: list[dict[str, Any]] = [{"num_workers": 1, "prefetch_factor": 2}, {"micro_batch_size": 64}]
    changes += [{"amp_dtype": "bfloat16"}]
    own = plain.observed
    varied = [TrainingConfig.model_validate(own.model_dump() | each) for each in changes]
    runner = shared.runner(plain.words, plain.script)
    report = runner.curves(own, varied, deadline_s=_DEADLINE_S, stretch_s=0.02, roofline=True)
    curves = report.curves
    assert curves is not None, report.result.reason
    assert [point.changes for point in curves.loader] == [{}, changes[0]]
    assert [point.changes for point in curves.device][:3] == [{}, *changes[1:]]
    assert all(point.ceiling is not None for point in (*curves.loader, *curves.device))
    assert curves.roofline is not None
    flops_a_sample = 2 * (8 * 32 + 32 * 2) * 3 - 2 * 8 * 32  # no gradient of the inputs
    assert curves.roofline.flops == 16 * flops_a_sample
    assert not curves.is_cut


def test_a_precision_that_trains_alike_is_not_objected_to(shared: ScriptRig, plain: Script) -> None:
    figures = guarded(shared, plain, "bfloat16").guard
    assert figures is not None
    assert figures.steps == len(figures.losses) == len(figures.reference_losses) == 20
    assert figures.losses != figures.reference_losses
    assert objection(figures) is None
    assert figures.gradient_cosine is not None
    assert 0.99 < figures.gradient_cosine < 1


@pytest.mark.slow
def test_a_precision_in_which_a_script_loses_its_digits_is_objected_to(shared: ScriptRig, losing: Script) -> None:
    figures = guarded(shared, losing, "bfloat16").guard
    assert figures is not None
    against = objection(figures)
    assert against is not None
    assert against.code in {"losses_deviate", "gradients_differ"}


@pytest.mark.slow
def test_the_check_begins_each_run_from_the_same_weights(shared: ScriptRig, plain: Script) -> None:
    figures = guarded(shared, plain, "float32").guard
    assert figures is not None
    assert figures.losses == pytest.approx(figures.reference_losses, rel=1e-5)
    assert figures.gradient_cosine == pytest.approx(1)
    assert figures.repeat_deviation == pytest.approx(0, abs=1e-5)


def test_the_largest_samples_are_trained_on_in_the_scripts_own_step(shared: ScriptRig) -> None:
    texts = shared.probe(shared.write(HEAD + _TEXTS + STEP, "texts.py"))
    runner = shared.runner(texts.words, texts.script)
    report = runner.stress(texts.observed, name="trial", deadline_s=_DEADLINE_S, train_s=0.2)
    assert report.stress is not None, report.result.reason
    assert report.stress.items_seen == 512
    assert report.stress.steps > 0
    assert max(shared.printed("LONG ")) == 4 + 99 % 8 + 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["guard", "stress", "curves"])
def test_without_a_loader_what_needs_one_is_refused_with_the_reason(
    shared: ScriptRig, unfed: Script, kind: str
) -> None:
    runner = shared.runner(unfed.words, unfed.script)
    report = {
        "guard": lambda: runner.guard(unfed.observed, name="trial", deadline_s=_DEADLINE_S),
        "stress": lambda: runner.stress(unfed.observed, name="trial", deadline_s=_DEADLINE_S, train_s=0.1),
        "curves": lambda: runner.curves(unfed.observed, (), deadline_s=_DEADLINE_S, stretch_s=0.02),
    }[kind]()
    assert report.result.outcome == "invalid"
    assert "DataLoader" in report.result.reason


@pytest.mark.slow
def test_nothing_follows_the_window_of_a_script_without_a_loader(shared: ScriptRig, unfed: Script) -> None:
    measured = shared.measured(unfed.words, unfed, extras=Extras(loader_ceiling=True, device_ceiling=True))
    assert (measured.loader_ceiling, measured.device_ceiling) == (None, None)
    assert note("no_time_for_extras") not in measured.remarks
