"""However a training is started, it is measured, ends hard and does no harm; else the reason is said."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from autotune.apply.cores import (
    allowed_cores,
    allowed_nodes,
    compile_cache_variables,
    cores_of_rank,
)
from autotune.launch.local import LocalLauncher
from autotune.records.trial import TrialResult
from tests.processes import marked
from tests.worker.script.scripts import HEAD, LOADER, LOOP, STEP, ScriptRig

_ONE_EPOCH = HEAD + LOADER + "for x, y in loader:\n    step(x, y)\n"


PREPARING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
total = sum(x.sum() for (x,) in DataLoader(TensorDataset(torch.randn(512, 8)), batch_size=32))
"""
"""Reads its data with a loader, and trains nothing."""


def assert_nothing_is_left(rig: ScriptRig) -> None:
    """No process of a trial runs on."""
    assert isinstance(rig.launcher, LocalLauncher)
    server = rig.launcher._server
    left = [
        one.cmdline()
        for one in marked(rig.launcher._token)
        if server is None or one.pid != server.process.pid
    ]
    assert left == []


@pytest.mark.slow
def test_python_m_runs_a_module(rig: ScriptRig) -> None:
    rig.write("", "pkg/__init__.py")
    rig.write("FROM_SIBLING = 7\n", "pkg/other.py")
    own = "import json, sys\nfrom pkg.other import FROM_SIBLING\n"
    own += 'print("SEEN", json.dumps([__name__, __spec__.name, sys.argv[1:], FROM_SIBLING]))\n'
    rig.write(own + LOOP, "pkg/train.py")
    command = ("python", "-m", "pkg.train", "--epochs", "3")
    found = rig.probe(command)
    assert (found.observed.micro_batch_size, found.script.is_in_process) == (16, True)
    assert rig.printed(name="probe") == ["__main__", "pkg.train", ["--epochs", "3"], 7]
    rig.measured(command, found)


def test_script_finds_itself_and_its_neighbours(rig: ScriptRig) -> None:
    rig.write("FROM_SIBLING = 7\n", "sub/neighbour.py")
    own = """
import json, pickle, sys
from pathlib import Path
from neighbour import FROM_SIBLING

class Own:
    pass

def given():
    return pickle.loads(pickle.dumps(Own())).__class__ is Own

print("SEEN", json.dumps([__name__, Path(__file__).name, sys.argv[1:], given(), Path.cwd().name, FROM_SIBLING]))
"""
    rig.write(own + LOOP, "sub/train.py")
    found = rig.probe(("python3", "sub/train.py", "a", "b c"))
    assert found.observed.micro_batch_size == 16
    expected = ["__main__", "train.py", ["a", "b c"], True, rig.folder.name, 7]
    assert rig.printed(name="probe") == expected


@pytest.mark.slow
def test_python_below_a_shell_is_attached_to(
    rig: ScriptRig,
) -> None:
    rig.write(PREPARING, "prepare.py")
    rig.write(
        "import json, sys\nprint('SEEN', json.dumps([sys.executable, *sys.argv[1:]]))\n" + LOOP
    )
    preparing = (
        'if [ "$1" = 0.5 ]; then python prepare.py; fi\n'  # once: an interpreter takes seconds
    )
    rig.write(f'set -e\ncd .\n{preparing}python train.py --lr "$1"\n', "run.sh")
    command = ("bash", "run.sh", "{lr}")
    found = rig.probe(command, lr=0.5)
    assert (found.observed.micro_batch_size, found.script.is_in_process) == (16, False)
    interpreter, *arguments = rig.printed(name="probe")
    assert Path(interpreter).resolve() == Path(sys.executable).resolve()
    assert arguments == ["--lr", "0.5"]
    measured = rig.measured(command, found, micro_batch_size=64, lr=0.25)
    assert all(block.samples == 64 * block.batches for block in measured.blocks)
    assert_nothing_is_left(rig)


@pytest.mark.slow
def test_measured_script_out_of_the_parents_reach_ends_its_shell(rig: ScriptRig) -> None:
    rig.write(LOOP)
    folder = """$(sed -E 's/.*"folder": "([^"]*)".*/\\1/' <<< "$AUTOTUNE_ATTACH")"""
    rig.write(
        f'if [ "$1" = 0.5 ]; then rm -- "{folder}/sockets"; fi\n'
        'python train.py; sleep 5; touch "$PWD/went-on"\n',
        "run.sh",
    )
    command = ("bash", "run.sh", "{lr}")
    found = rig.probe(command, lr=0.1)
    assert rig.measured(command, found, lr=0.5).samples_per_s > 0
    assert not (rig.folder / "went-on").exists()
    assert_nothing_is_left(rig)


_RANKS = (
    """
import json, os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""
    + HEAD
    + """
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
model = DistributedDataParallel(model, find_unused_parameters=True)

def tell(mark, *told):
    os.write(1, f"{mark} {json.dumps(told)}\\n".encode())  # at once, or what two ranks write would be mixed

def place(who):
    tell("PLACE", f"{who} {os.environ['RANK']}", sorted(os.sched_getaffinity(0)))

class Noting(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)
    def __getitem__(self, index):
        if index == 0:
            place("worker")
        return data[index]

place("rank")
loader = DataLoader(Noting(), batch_size=16, sampler=DistributedSampler(data, shuffle=False))
tell("SEEN", model.gradient_as_bucket_view, model.find_unused_parameters, loader.num_workers)
"""
    + STEP
)
_CAN_BIND = len(allowed_cores()) > 1


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torchruns_ranks_are_given_the_settings(rig: ScriptRig) -> None:
    """One test for all rules: it starts six interpreters."""
    rig.write(_RANKS)
    command = ("torchrun", "--standalone", "--nproc-per-node", "2", "train.py")
    found = rig.probe(command)
    observed, reached = found.observed, set(found.script.reached)
    assert (observed.world_size, observed.strategy, observed.micro_batch_size) == (2, "ddp", 16)
    assert observed.ddp is not None
    assert observed.ddp.find_unused_parameters
    assert {"ddp.gradient_as_bucket_view", "num_workers"} <= reached
    assert ("numa_binding" in reached) is _CAN_BIND

    ddp = {"gradient_as_bucket_view": True, "find_unused_parameters": False}
    bound = {"numa_binding": "exclusive"} if _CAN_BIND else {}
    measured = rig.measured(command, found, num_workers=1, prefetch_factor=2, ddp=ddp, **bound)
    assert_nothing_is_left(rig)
    told = [line.split(" ", 1) for line in rig.log().splitlines()]
    seen = [json.loads(line[1]) for line in told if line[0] == "SEEN"]
    assert seen == [[True, False, 1]] * 2
    assert all(block.samples == 2 * 16 * block.batches for block in measured.blocks)
    assert [note.code for note in measured.notes] == ["seen_on_rank_0"]
    if not _CAN_BIND:
        return
    places = dict(json.loads(line[1]) for line in told if line[0] == "PLACE")
    nodes = allowed_nodes(allowed_cores())
    wanted = [frozenset({[*nodes][rank * len(nodes) // 2]}) for rank in (0, 1)]
    for rank in (0, 1):
        assert places[f"rank {rank}"] == sorted(cores_of_rank("exclusive", rank, wanted, nodes))
    assert places["worker 0"] == places["rank 0"], "the first item is the first rank's"


HOSTILE = {
    "re-executes itself": "import os, sys\nif 'AGAIN' not in os.environ:\n    os.environ['AGAIN'] = '1'\n"
    "    os.execv(sys.executable, [sys.executable, *sys.argv])\n" + LOOP,
    "reads stdin": "import sys\nassert sys.stdin.read() == ''\n" + LOOP,
    "changes its folder": "import os\nos.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\n"
    + LOOP,
    "writes when it ends": "import atexit\nfrom pathlib import Path\n"
    "atexit.register(lambda: Path('at-exit').write_text('x'))\n"
    + LOOP
    + "\nPath('ended').write_text('x')\n",
    "catches every exception": HEAD
    + LOADER
    + "for _ in range(1000000):\n    try:\n        for x, y in loader:\n            step(x, y)\n"
    "    except BaseException:\n        pass\n    finally:\n        1 + 1\n",
    "runs a thread": "import threading\nthread = threading.Thread(target=threading.Event().wait)\nthread.start()\n"
    + LOOP,
    "prints much": HEAD + LOADER + STEP.rstrip() + "\n        print('x' * 20000)\n",
    "prints megabytes": "import sys\nfor _ in range(64):\n    sys.stdout.write('x' * 2**20)\n"
    + LOOP,
    "starts processes": "import subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n" + LOOP,
    "trains in a function of another thread": "import threading\n"
    + HEAD
    + LOADER
    + "def train():\n    for _ in range(100000):\n        for x, y in loader:\n            step(x, y)\n"
    "thread = threading.Thread(target=train)\nthread.start()\nthread.join()\n",
}
_FAST = {"writes when it ends", "trains in a function of another thread"}
"""One that is to leave nothing, and one that trains elsewhere; the others are slow."""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=() if name in _FAST else pytest.mark.slow, id=name)
        for name, text in HOSTILE.items()
    ],
)
def test_hostile_script_is_measured_and_ended(rig: ScriptRig, text: str) -> None:
    words = rig.write(text)
    measured = rig.measured(words)
    assert measured.samples_per_s > 0
    assert all(block.samples == 16 * block.batches for block in measured.blocks)
    assert (rig.folder / "trial.log").stat().st_size < 2**20
    assert not list(rig.folder.rglob("at-exit"))
    assert not (rig.folder / "ended").exists()
    assert_nothing_is_left(rig)


def failed(rig: ScriptRig, words: tuple[str, ...]) -> TrialResult:
    """The result of a command that can't be measured."""
    result = rig.trial(words)
    assert result.measurement is None
    assert_nothing_is_left(rig)
    return result


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (_ONE_EPOCH + "    break\n", ["DataLoader", " 1 "]),
        pytest.param(_ONE_EPOCH.replace("512", "64"), [], marks=pytest.mark.slow),
        pytest.param(
            HEAD + LOADER + "for x, y in loader:\n    model(x)\n",
            ["DataLoader", " 0 "],
            marks=pytest.mark.slow,
        ),
        pytest.param("import torch\nprint('nothing')\n", [], marks=pytest.mark.slow),
        pytest.param("print('no torch')\n", [], marks=pytest.mark.slow),
    ],
    ids=["one step", "some steps", "no step", "nothing", "no torch"],
)
def test_script_that_ends_early_is_invalid(rig: ScriptRig, text: str, seen: list[str]) -> None:
    result = failed(rig, rig.write(text))
    assert result.outcome == "invalid"
    assert [one for one in seen if one not in result.reason] == []


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("at its first line", marks=pytest.mark.slow),
        pytest.param("while it trains", marks=pytest.mark.slow),
        pytest.param("below a shell", marks=pytest.mark.slow),
        "while it is measured",
    ],
)
def test_exception_has_the_scripts_traceback_alone(rig: ScriptRig, place: str) -> None:
    raising = 'def fail():\n    raise KeyError("lost")\n\n'
    body = {
        "at its first line": "fail()\n",
        "while it trains": HEAD + LOADER + "for x, y in loader:\n    fail()\n",
        "below a shell": _ONE_EPOCH + "    fail()\n",
        "while it is measured": HEAD
        + LOADER
        + "for number, (x, y) in enumerate(loader):\n    step(x, y)\n    if number == 5:\n        fail()\n",
    }[place]
    words = rig.write(raising + body)
    rig.write("python train.py\n", "run.sh")
    result = failed(rig, ("bash", "run.sh") if place == "below a shell" else words)
    assert (result.outcome, result.reason) == ("crashed", "KeyError: 'lost'")
    assert result.failure is not None
    assert result.failure.signature == "KeyError at train.py:2"
    assert "autotune" not in result.failure.traceback.replace(str(rig.folder), "")
    assert "in fail" in result.failure.traceback
    assert "KeyError: 'lost'" in rig.log()


@pytest.mark.slow
def test_script_is_compiled_as_by_python(rig: ScriptRig) -> None:
    text = (
        "def own(a: int): ...\nprint('SEEN', 1 if own.__annotations__['a'] is int else 0)\n" + LOOP
    )
    rig.measured(rig.write(text))
    assert rig.printed() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words", "outcomes", "named"),
    [
        (_ONE_EPOCH + "    sys.exit(3)\n", "python train.py", {"crashed"}, "SystemExit: 3"),
        ("kill -9 $$\n", "bash train.py", {"crashed", "oom"}, "9|KILL"),
        ("exit 3\n", "bash train.py", {"invalid"}, "exit code 3"),
        ("", "python missing.py", {"invalid"}, "'missing.py'"),
        ("", "no-program train.py", {"invalid"}, "'no-program'"),
    ],
)
def test_end_of_a_command_is_named(
    rig: ScriptRig, text: str, words: str, outcomes: set[str], named: str
) -> None:
    rig.write("import sys\n" + text if "sys." in text else text)
    result = rig.trial(tuple(words.split()))
    assert result.outcome in outcomes
    assert re.search(named, result.reason)


@pytest.mark.slow
def test_trackers_are_quiet(rig: ScriptRig) -> None:
    names = ["WANDB_MODE", "HF_HUB_OFFLINE"]
    own = f'import json, os\nprint("SEEN", json.dumps([os.environ[name] for name in {names}]))\n'
    rig.measured(rig.write(own + LOOP))
    assert rig.printed() == ["disabled", "1"]


@pytest.mark.slow
def test_failing_setting_is_the_scripts_exception(rig: ScriptRig) -> None:
    words = rig.write(
        HEAD
        + LOADER
        + STEP.replace("step(x, y)", "assert len(x) == 16, 'sixteen'\n        step(x, y)")
    )
    found = rig.probe(words)
    result = rig.trial(words, found, micro_batch_size=32)
    assert (result.outcome, result.reason) == ("crashed", "AssertionError: sixteen")


def test_folder_is_left_as_it_was(rig: ScriptRig) -> None:
    checkpoint = rig.folder / "last.pt"
    checkpoint.write_bytes(b"of an earlier training")
    saving = "import torch\ntorch.save(model.state_dict(), 'last.pt')\nopen('log.txt', 'a').write('line')\n"
    saving += "import os\nos.mkdir('out')\ntorch.save(model.state_dict(), 'out/0.pt')\nopen('new', 'w').close()\n"
    reading = "assert torch.load('last.pt').keys() == model.state_dict().keys()\n"
    (rig.folder / "log.txt").write_text("earlier\n")
    words = rig.write(
        HEAD + LOADER + "for x, y in loader:\n    step(x, y)\n    break\n" + saving + reading + STEP
    )
    before = [*rig.folder.iterdir()]
    rig.measured(words)
    assert {*rig.folder.iterdir()} == {*before, rig.folder / "trial.log"}
    assert checkpoint.read_bytes() == b"of an earlier training"
    assert (rig.folder / "log.txt").read_text() == "earlier\n"


def test_compiled_code_is_kept(rig: ScriptRig) -> None:
    code = Path(compile_cache_variables()["TORCHINDUCTOR_CACHE_DIR"]) / "code"
    code.parent.mkdir(exist_ok=True)
    code.write_text("of an earlier trial")
    own = """
import os
from pathlib import Path
(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "code").write_text("of this one")
"""
    rig.measured(rig.write(own + LOOP))
    assert code.read_text() == "of this one"


_SPAWNING = """
if __name__ == "__main__":
    assert sum(len(x) for x, _ in spawning) == 512  # its worker has come to its end
    for epoch in range(100000):
        for x, y in loader:
            step(x, y)
"""


@pytest.mark.slow
def test_spawned_workers_end_nothing(rig: ScriptRig) -> None:
    spawning = "spawning = DataLoader(data, batch_size=64, num_workers=1, multiprocessing_context='spawn')\n"
    head = HEAD.replace(
        "lr=0.05)", "lr=0.05) if __name__ == '__main__' else None"
    )  # what optimizers import takes seconds
    measured = rig.measured(rig.write(head + LOADER + spawning + _SPAWNING))
    assert measured.window.epoch_samples == 512
    assert_nothing_is_left(rig)
