"""Recorded output of py-spy becomes shares of parts and lines.

`stacks/*.txt` are py-spy 0.4.3's raw output on `tests/scripts/sampled.py`, one file for each of its
arguments, with folders as placeholders.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotune.records.stacks import StackLine, Stacks
from autotune.worker.script import stack_lines
from autotune.worker.script.stack_lines import sum_stacks

RECORDED = Path(__file__).parent / "stacks"
USER = Path(__file__).parents[2] / "scripts"
TRAIN = "<module> (/home/me/train.py:9)"
PROCESS = 'process 7:"python train.py";thread (7): MainThread'
TORCH = "/x/site-packages/torch"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages with the lines of the torch that was recorded."""
    folder = tmp_path / "site-packages"
    fetcher = folder / "torch/utils/data/_utils/fetch.py"
    fetcher.parent.mkdir(parents=True)
    lines = ["\n"] * 60
    lines[56] = "        return self.collate_fn(data)\n"
    fetcher.write_text("".join(lines))
    return folder


def read(kind: str, site: Path) -> Stacks:
    raw = (RECORDED / f"{kind}.txt").read_text()
    raw = raw.replace("{SITE}", str(site)).replace("{USER}", str(USER))
    found = re.match(r"process (\d+)", raw)
    assert found
    return sum_stacks(raw, thread=int(found[1]), seconds=4.0, folder=USER)


def hottest(lines: tuple[StackLine, ...], part: str) -> StackLine:
    return next(line for line in lines if line.part == part)


def summed(*stacks: str, folder: str = "/home/me") -> Stacks:
    raw = "\n".join(f"{PROCESS};{stack}" for stack in stacks)
    return sum_stacks(raw, thread=7, seconds=1.0, folder=Path(folder))


# Recorded stacks


def test_without_workers_the_training_thread_makes_the_items(site: Path) -> None:
    stacks = read("alone", site)
    assert stacks.worker_samples == 0
    assert stacks.main_parts["item"] == pytest.approx(0.59, abs=0.01)
    assert {"optimizer", "forward", "backward", "other", "collate"} <= stacks.main_parts.keys()
    line = hottest(stacks.main, "item")
    assert line.place == "sampled.py:24"
    assert line.function == "Records.__getitem__"
    assert line.code == "record = json.loads(self.text)"
    assert line.calls == "json.decoder.JSONDecoder.raw_decode"
    assert line.calls_fraction is not None
    assert 0.2 < line.calls_fraction <= line.fraction


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_workers_count_while_they_fetch(kind: str, site: Path) -> None:
    stacks = read(kind, site)
    assert stacks.main_parts["waiting"] > 0.5
    assert "item" not in stacks.main_parts
    assert stacks.worker_samples > 100
    assert set(stacks.worker_parts) == {"item", "collate"}
    line = hottest(stacks.workers, "item")
    assert line.place == "sampled.py:23"
    assert line.calls == "zlib.decompress"
    assert hottest(stacks.workers, "collate").function == "collate"


def test_a_list_of_transforms_is_told_apart_by_its_lines(site: Path) -> None:
    stacks = read("compose", site)
    functions = [line.function for line in stacks.main if line.part == "item"]
    assert functions == ["Smooth.__call__", "Compose.__call__", "Scale.__call__"]
    assert hottest(stacks.main, "sampler").function == "Shuffled.__iter__"
    assert hottest(stacks.main, "forward").place == "sampled.py:87"


def test_a_library_s_item_is_at_the_library_s_file(site: Path) -> None:
    stacks = read("library", site)
    places = [line.place for line in stacks.workers if line.part == "item"]
    assert places == ["rowlib/table.py", "rowlib/formatting.py"]
    assert stacks.workers[0].calls == "json.decoder.JSONDecoder.raw_decode"
    assert stacks.workers[0].code == ""


# Parts


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        (f"{TRAIN};Net.forward (/home/me/model.py:3)", "other"),
        (f"{TRAIN};Module._call_impl ({TORCH}/nn/modules/module.py:9)", "forward"),
        (f"{TRAIN};Tensor.backward ({TORCH}/_tensor.py:9)", "backward"),
        (f"{TRAIN};Adam.step ({TORCH}/optim/adam.py:9)", "optimizer"),
        (f"{TRAIN};StepLR.step ({TORCH}/optim/lr_scheduler.py:9)", "other"),
        (f"{TRAIN};_X.__next__ ({TORCH}/utils/data/dataloader.py:9)", "waiting"),
        (f"{TRAIN};DataLoader.__iter__ ({TORCH}/utils/data/dataloader.py:9)", "waiting"),
    ],
)
def test_torch_s_frames_give_the_part(frames: str, part: str) -> None:
    assert list(summed(f"{frames} 3").main_parts) == [part]


def test_a_closure_s_passes_do_not_belong_to_the_optimizer() -> None:
    step = f"{TRAIN};Optimizer.profile_hook_step.<locals>.wrapper ({TORCH}/optim/optimizer.py:5)"
    call = f"Module._call_impl ({TORCH}/nn/modules/module.py:9)"
    back = f"Tensor.backward ({TORCH}/_tensor.py:9)"
    stacks = summed(f"{step};{call} 1", f"{step};{back} 1", f"{step};{back};{call} 2")
    assert stacks.main_parts == {"backward": 0.75, "forward": 0.25}


# Lines


def test_a_sample_in_a_hook_of_autotune_does_not_count() -> None:
    own = f"{stack_lines._AUTOTUNE}/worker/script"
    files = f"Changes.open_file ({own}/files/changes.py:5)"
    stacks = summed(
        f"{TRAIN};Session.on_step ({own}/session.py:5) 5",
        f"{TRAIN};{files} 3",
        f"next_batch ({own}/hooks.py:5);{TRAIN} 1",
    )
    assert stacks.samples == 4
    assert [line.place for line in stacks.main] == ["train.py:9"]


def test_a_stack_without_its_outer_frames_does_not_count() -> None:
    stacks = summed(f"{TRAIN} 99", "helper (/home/me/train.py:3) 1")
    assert stacks.samples == 99


def test_other_threads_do_not_count() -> None:
    other = f'process 7:"python train.py";thread (8): Thread-1;{TRAIN} 9'
    stacks = sum_stacks(other, thread=7, seconds=1.0, folder=Path("/"))
    assert stacks.samples == 0
    assert stacks.main == ()


def test_a_command_of_several_lines_hides_no_worker() -> None:
    fetch = "fetch (/x/site-packages/torch/utils/data/_utils/fetch.py:3)"
    command = 'process 7:"python -c \nimport train\ntrain.main() 3\n"'
    worker = command.replace("7", "8")
    main = f"{command};thread (7): MainThread;{TRAIN} 5"
    stacks = sum_stacks(
        f"{main}\n{command};{worker};thread (8): MainThread;{TRAIN};{fetch};g (/home/me/g.py:1) 2\n",
        thread=7,
        seconds=1.0,
        folder=Path("/home/me"),
    )
    assert (stacks.samples, stacks.worker_samples) == (5, 2)


def test_small_lines_are_left_out_and_lines_are_limited() -> None:
    many = [f"{TRAIN};f (/home/me/f.py:{line}) 30" for line in range(1, 26)]
    small = f"{TRAIN};g (/home/me/g.py:1) 5"
    stacks = summed(*many, small)
    assert len(stacks.main) == 20
    assert stacks.main_parts == {"other": 1.0}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("raw = zlib.decompress(blob)", "zlib.decompress"),
        ("with zlib.decompress(blob):", "zlib.decompress"),
        ("x = a * np.sqrt(b)", ""),
        ("x = f(g(b))", ""),
        ("x = self.f(b)", ""),
        ("np.stack([", ""),
        (r'x = re.compile("\d")', "re.compile"),
        ("x = " + "(" * 190, ""),
        ("", ""),
    ],
)
def test_native_code_is_named_by_a_line_with_a_single_call(line: str, name: str) -> None:
    assert stack_lines._only_call(line) == name


def test_a_callee_is_named_from_a_third_of_the_line_on() -> None:
    called = [f"{TRAIN};f{one} (/x/site-packages/lib/a.py:3) 1" for one in range(4)]
    assert summed(*called).main[0].calls == ""
    line = summed(*called, f"{TRAIN};f0 (/x/site-packages/lib/a.py:9) 1").main[0]
    assert line.calls == "lib.a.f0"
    assert line.calls_fraction == pytest.approx(2 / 5)


def test_text_that_is_no_stack_is_ignored() -> None:
    strange = [
        "",
        "no stack",
        "process 7 3",
        f"{PROCESS} 3",
        f"{PROCESS};half a frame 3",
        f"{PROCESS};f (/a;b.py:3) 2",
        'process 8:"x" 4',
        'process 7:"python -c ;thread (9): x;y";thread (7): MainThread;' + TRAIN + " 6",
    ]
    stacks = sum_stacks("\n".join(strange), thread=7, seconds=1.0, folder=Path("/home/me"))
    assert stacks.samples == 6


def test_a_program_without_files_of_the_user_is_at_the_library() -> None:
    stacks = summed(
        "main (/x/site-packages/trainer/cli.py:2);fit (/x/site-packages/trainer/loop.py:7);"
        "save (/x/site-packages/other/io.py:1) 3"
    )
    assert stacks.main[0].place == "trainer/loop.py"
    assert stacks.main[0].calls == "other.io.save"


def test_files_elsewhere_are_shown_by_name() -> None:
    stacks = summed("f (/home/me/src/a.py:1) 2", "f (/home/me/src/a.py:2);g (/opt/b.py:4) 1")
    assert [line.place for line in stacks.main] == ["src/a.py:1", "b.py:4"]
