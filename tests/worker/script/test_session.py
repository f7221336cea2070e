"""Which loader trains, what else a script does beside training, and that it ends once it has been measured."""

from __future__ import annotations

import pytest

from autotune.policy import WindowRules
from autotune.records.measurement import Measurement
from tests.worker.script.scripts import HEAD, LOOP, Script, ScriptRig

_EVALUATION_S = 0.4
_VALIDATING = (
    f"EACH_S = {_EVALUATION_S}"
    """
import time
loader = DataLoader(data, batch_size=64, shuffle=True)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(EACH_S / 8)
        return data[index]

def evaluate():
    with torch.no_grad():
        for number, (x, y) in enumerate(DataLoader(Slow(), batch_size=4)):
            if number == LAST:
                break
            model(x)

"""
)
_EACH_EPOCH = (
    _VALIDATING.replace("LAST", "None")
    + """
evaluate()
for epoch in range(100000):
    for x, y in loader:
        step(x, y)
    evaluate()
"""
)
_MID_EPOCH = (
    _VALIDATING
    + """
number = 0
for epoch in range(100000):
    for x, y in loader:
        number += 1
        time.sleep(0.002)
        step(x, y)
        if number % 10 == 0:
            evaluate()
"""
)


def sizes(measured: Measurement) -> set[int]:
    """The numbers of samples in a batch."""
    return {round(block.samples / block.batches) for block in measured.blocks}


def lines(found: Script) -> list[int]:
    """The lines of the training loader."""
    return [site.line for site in found.script.loaders]


def test_validation_loader_is_not_training(rig: ScriptRig) -> None:
    found, measured = rig.run(_EACH_EPOCH)
    assert found.observed.micro_batch_size == 64
    assert lines(found) == [line_of(_EACH_EPOCH, "loader = DataLoader")]
    assert found.facts.dataset_length == 512
    (outside,) = measured.notes
    seconds, epochs = outside.figures["seconds"], outside.figures["epochs"]
    assert isinstance(seconds, float)
    assert isinstance(epochs, int)
    assert seconds >= 0.9 * _EVALUATION_S * (epochs - 1)
    assert measured.window.epoch_samples == 512


@pytest.mark.slow
@pytest.mark.parametrize("last", ["None", "1"])
def test_evaluation_within_an_epoch_is_left_out(rig: ScriptRig, last: str) -> None:
    """Also one that ends early, up to its last batch."""
    found, measured = rig.run(_MID_EPOCH.replace("LAST", last))
    assert lines(found) == [line_of(_MID_EPOCH, "loader = DataLoader")]
    assert [note.code for note in measured.notes] == ["outside_training"]


_ON_TRAINING_DATA = """
loader = DataLoader(data, batch_size=16, shuffle=True)

def evaluate(most):
    with torch.no_grad():
        for number, (x, y) in enumerate(loader):
            if number == most:
                break
            model(x)

number = 0
for epoch in range(100000):
    for x, y in loader:
        step(x, y)
        number += 1
        if EVERY and number % EVERY == 0:
            evaluate(3)
    evaluate(None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 10], ids=["after an epoch", "in the middle of an epoch"])
def test_evaluation_on_the_training_loader(rig: ScriptRig, every: int | None) -> None:
    found, measured = rig.run(_ON_TRAINING_DATA.replace("EVERY", str(every)))
    assert (found.observed.micro_batch_size, found.observed.grad_accum_steps) == (16, 1)
    assert measured.window.epoch_samples == 512


_NO_MORE_ASKING = {
    "itertools.cycle": """
from itertools import cycle
for x, y in cycle(DataLoader(data, batch_size=16, shuffle=True)):
    step(x, y)
""",
    "batches that are kept for several passes": """
loader = DataLoader(data, batch_size=16, shuffle=True)
for epoch in range(2):
    for x, y in loader:
        step(x, y)
while True:
    kept = list(loader)
    for x, y in kept * 10:
        step(x, y)
""",
    "a loader for each epoch, left early": """
while True:
    for number, (x, y) in enumerate(DataLoader(data, batch_size=16, shuffle=True)):
        if number == 10:
            break
        step(x, y)
""",
    "a model and an optimizer for each client": """
from copy import deepcopy
while True:
    client = deepcopy(model)
    own = torch.optim.SGD(client.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_size=16, shuffle=True):
        own.zero_grad()
        nn.functional.cross_entropy(client(x), y).backward()
        own.step()
""",
    "a loader for each epoch, made while the former one is held, which was asked for its last batch": """
for epoch in range(100000):
    batches = iter(DataLoader(data, batch_size=16, shuffle=True))
    for number in range(32):
        step(*next(batches))
""",
    "a dataset for each epoch": """
while True:
    fresh = TensorDataset(*data.tensors)
    for x, y in DataLoader(fresh, batch_size=16, shuffle=True):
        step(x, y)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", _NO_MORE_ASKING.values(), ids=_NO_MORE_ASKING)
def test_first_loader_that_is_asked_no_more(rig: ScriptRig, text: str) -> None:
    found, measured = rig.run(text)
    assert (found.observed.micro_batch_size, found.observed.grad_accum_steps) == (16, 1)
    assert sizes(measured) == {16}


@pytest.mark.slow
def test_second_loader_in_turn_is_left_out(rig: ScriptRig) -> None:
    text = """
first, second = DataLoader(data, batch_size=128, shuffle=True), DataLoader(data, batch_size=2, shuffle=True)
while True:
    for loader in (first, second):
        for x, y in loader:
            step(x, y)
"""
    _, measured = rig.run(text, window=WindowRules(max_s=1.0, precision=1e-9))
    assert sizes(measured) == {128}
    (other,) = (note for note in measured.notes if note.code == "other_training")
    place = f"train.py, line {line_of(text, 'first, second')}, as number 2"
    assert other.figures["place"] == place


@pytest.mark.slow
def test_training_that_moves_is_measured_there(
    rig: ScriptRig,
) -> None:
    """A curriculum, whose first look ends before the batches grow."""
    text = """
import time
begun = time.monotonic()
while True:
    size = 4 if time.monotonic() < begun + 4 else 16
    for x, y in DataLoader(torch.utils.data.Subset(data, range(128)), batch_size=size, shuffle=True):
        step(x, y)
"""
    found, measured = rig.run(text, window=WindowRules(max_s=6.0, precision=1e-9))
    assert found.observed.micro_batch_size == 4
    assert sizes(measured) == {16}
    place = f"train.py, line {line_of(text, '    for x, y in DataLoader')}"
    moved = [note.figures for note in measured.notes if note.code == "training_moved"]
    assert moved == [{"place": place, "batch_size": 16}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "begins", ["for batch in DataLoader(data, batch_size=4)", "for batch in first"]
)
def test_warm_up_on_another_loader_is_passed_over(rig: ScriptRig, begins: str) -> None:
    text = f"""
import time
main = DataLoader(data, batch_size=16, shuffle=True)
first, second = iter(DataLoader(data, batch_size=4)), iter(main)
begun = time.monotonic()
{begins}:
    step(*batch)
    if time.monotonic() > begun + 0.3:
        break
for batch in second:
    step(*batch)
while True:
    for batch in main:
        step(*batch)
"""
    found, measured = rig.run(text, num_workers=1)
    assert found.observed.micro_batch_size == 16
    assert lines(found) == [line_of(text, "main = ")]
    assert sizes(measured) == {16}


@pytest.mark.slow
def test_evaluation_in_another_thread_takes_no_time(rig: ScriptRig) -> None:
    text = """
import threading, time
other = DataLoader(data, batch_size=64)

def evaluate():
    while True:
        with torch.no_grad():
            for x, y in other:
                time.sleep(0.005)
                model(x)

threading.Thread(target=evaluate, daemon=True).start()
loader = DataLoader(data, batch_size=16, shuffle=True)
while True:
    for x, y in loader:
        step(x, y)
        time.sleep(0.002)
"""
    _, measured = rig.run(text)
    codes = {note.code for note in measured.notes}
    assert codes.isdisjoint({"outside_training", "other_training"})
    assert measured.samples_per_s <= 16 / 0.002


@pytest.mark.slow
def test_long_validation_is_not_read_in_step(rig: ScriptRig) -> None:
    """PyTorch's tutorial on transfer learning: phases over a dict of loaders, gradients switched within the loop."""
    text = """
loaders = {"train": DataLoader(data, batch_size=16, shuffle=True), "val": DataLoader(data, batch_size=16)}
while True:
    for phase in ("train", "val"):
        for x, y in loaders[phase]:
            with torch.set_grad_enabled(phase == "train"):
                loss = nn.functional.cross_entropy(model(x), y)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
"""
    assert "micro_batch_size" in rig.probe(rig.write(HEAD + text)).script.reached


@pytest.mark.slow
def test_training_in_a_child_process_is_not_measured(
    rig: ScriptRig,
) -> None:
    """A linear probe at each epoch's end; it finishes its first steps long before the epochs do."""
    rig.write(
        HEAD.replace("lr=0.05", "lr=0.5")
        + "loader = DataLoader(data, batch_size=64)\nfor n in range(99):\n    for x, y in loader: step(x, y)\n",
        "helper.py",
    )
    text = """
import subprocess, sys
loader = DataLoader(data, batch_size=128, shuffle=True)
while True:
    for x, y in loader:
        step(x, y)
    subprocess.run([sys.executable, "helper.py"], check=True, cwd=__import__("os").path.dirname(__file__))
"""
    found = rig.probe(rig.write(HEAD + text))
    assert (found.observed.micro_batch_size, found.observed.lr) == (128, 0.05)


@pytest.mark.slow
def test_parameters_without_a_module(rig: ScriptRig) -> None:
    words = rig.write(
        """
import torch

image, target = torch.rand(64, 64, requires_grad=True), torch.rand(64, 64)
optimizer = torch.optim.Adam([image], lr=1e-2)
while True:
    optimizer.zero_grad()
    ((image - target) ** 2).mean().backward()
    optimizer.step()
"""
    )
    found = rig.probe(words)
    assert found.script.loaders == ()
    assert rig.measured(words, found).samples_per_s > 0


@pytest.mark.slow
def test_evaluation_at_a_blocks_edge(rig: ScriptRig) -> None:
    _, measured = rig.run(
        """
import time

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        time.sleep(0.2)
        return index

loader, evaluation = DataLoader(data, batch_size=16), DataLoader(Slow())
while True:
    for x, y in loader:
        time.sleep(0.1)
        step(x, y)
        for _ in evaluation:
            pass
"""
    )
    assert len(measured.blocks) >= 3
    assert all(
        0.1 * block.batches <= block.seconds < 0.35 * block.batches for block in measured.blocks
    )


def test_loader_made_for_each_epoch_is_followed(
    rig: ScriptRig,
) -> None:
    words = rig.write(
        HEAD.replace("512", "128")
        + """
import multiprocessing
validation = TensorDataset(*(part[:64] for part in data.tensors))

def make_loader(of):
    return DataLoader(of, batch_size=16, shuffle=of is data)

for epoch in range(100000):
    loader = make_loader(data)
    for x, y in loader:
        step(x, y)
    other = make_loader(validation)
    for x, y in other:
        model(x)
    workers = len(multiprocessing.active_children())
    print("SEEN", [loader.num_workers, other.num_workers, epoch, workers], flush=True)
"""
    )
    found = rig.probe(words, deadline_s=60.0)
    assert found.observed.micro_batch_size == 16
    window = WindowRules(max_s=2.0, precision=1e-9, block_s=0.01)
    measured = rig.measured(words, found, window=window, num_workers=1, persistent_workers=True)
    assert measured.window.epoch_samples == 128
    *workers_of, epoch, workers = rig.printed()
    assert workers_of == [1, 0]
    assert epoch >= 1, "loaders of several epochs were followed"
    assert workers <= 2, "those of earlier epochs have ended"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        """
import queue, threading
loader, ready = DataLoader(data, batch_size=16), queue.Queue(maxsize=2)

def read():
    while True:
        for batch in loader:
            ready.put(batch)

threading.Thread(target=read, daemon=True).start()
while True:
    step(*ready.get())
""",
        """
batches = list(DataLoader(data, batch_size=16))
while True:
    for x, y in batches:
        step(x, y)
""",
    ],
    ids=["read ahead by another thread", "read beforehand"],
)
def test_loader_out_of_reach_counts_as_none(rig: ScriptRig, text: str) -> None:
    found = rig.probe(rig.write(HEAD + text), deadline_s=60.0)
    assert not {"num_workers", "micro_batch_size"} & set(found.script.reached)
    assert found.observed.micro_batch_size == 16


@pytest.mark.slow
def test_views_of_a_batch_and_accumulation(rig: ScriptRig) -> None:
    text = """
x, y = data.tensors[0][:24], data.tensors[1][:24]

def loss(view):
    return nn.functional.cross_entropy(model(view), y)

while True:
    optimizer.zero_grad()
    BODY
    optimizer.step()
"""
    views = text.replace("BODY", "(loss(x) + loss(-x)).backward()")
    accumulated = text.replace("BODY", "[loss(x).backward() for _ in range(2)]")
    found = [rig.probe(rig.write(HEAD + body)).observed for body in (views, accumulated)]
    assert [(one.micro_batch_size, one.grad_accum_steps) for one in found] == [(24, 1), (24, 2)]


@pytest.mark.slow
def test_loader_read_in_step_is_part_of_training(rig: ScriptRig) -> None:
    _, measured = rig.run(
        """
import time
loader = DataLoader(data, batch_size=16, shuffle=True)
other = DataLoader(TensorDataset(data.tensors[0]), batch_size=16)
for epoch in range(100000):
    for (_,), (x, y) in zip(other, loader):
        time.sleep(0.001)
        step(x, y)
"""
    )
    assert measured.notes == ()
    assert all(block.seconds >= 0.001 * block.batches for block in measured.blocks)


@pytest.mark.slow
def test_short_last_batches_are_counted(rig: ScriptRig) -> None:
    words = rig.write(
        LOOP.replace(
            "torch.randn(512, 8), torch.arange(512)", "torch.randn(40, 8), torch.arange(40)"
        )
    )
    found = rig.probe(words)
    assert found.observed.micro_batch_size == 16
    window = rig.measured(words, found).window
    assert window.epoch_samples == 40
    assert all(
        block.samples * 3 == block.batches * 40 for block in window.blocks
    )  # 16 + 16 + 8, whole epochs


@pytest.mark.slow
def test_short_batches_of_a_stream_are_counted(rig: ScriptRig) -> None:
    _, measured = rig.run(
        """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(*(part[:40] for part in data.tensors))

loader = DataLoader(Stream(), batch_size=16, num_workers=1)
for _ in range(100000):
    for x, y in loader:
        assert 0 < len(x) <= 16
        step(x, y)
"""
    )
    assert measured.window.epoch_samples == 40


def test_script_without_a_loader(rig: ScriptRig) -> None:
    _, measured = rig.run(
        """
import time
x, y = data.tensors
while True:
    time.sleep(0.001)
    step(x[:24], y[:24])
"""
    )
    assert measured.window.epoch_samples is None
    assert all(block.samples == 24 * block.batches for block in measured.window.blocks)
    assert all(block.seconds >= 0.001 * block.batches for block in measured.blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("persists", "loop"),
    [
        (False, "batches = iter(loader)\n    while (batch := next(batches, None)) is not None:"),
        (False, "batches = iter(loader)\n    for batch in batches:"),
        (True, "batches = loader\n    for batch in loader:"),
    ],
    ids=["next", "for", "persistent workers"],
)
def test_each_sample_comes_once_for_any_queue(rig: ScriptRig, persists: bool, loop: str) -> None:
    text = f"""
import json, time

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((8,), index), 0

loader = DataLoader(Slow(), 4, shuffle=True, num_workers=2, prefetch_factor=5, persistent_workers={persists})
depths = []
for epoch in range(100000):
    seen = []
    {loop}
        depths.append(getattr(batches, "_iterator", batches)._prefetch_factor)
        seen += batch[0][:, 0].tolist()
        step(batch[0].float(), batch[1])
    assert sorted(seen) == list(range(32)), seen
    print("SEEN", json.dumps([depths, loader.prefetch_factor]), flush=True)
"""
    found, measured = rig.run(text, window=WindowRules(max_s=20.0, precision=10.0, block_s=0.01))
    assert found.observed.prefetch_factor == 5
    assert measured.window.whole_epochs
    depths, configured = rig.printed()
    assert (depths[0], depths[-1], configured) == (1, 5, 5)


def line_of(text: str, begin: str) -> int:
    """The line of a script, which begins with HEAD, that begins with a text."""
    rows = (HEAD + text).splitlines()
    return 1 + next(number for number, line in enumerate(rows) if line.startswith(begin))
