"""Training scripts as people write them (tests/scripts; the first line of each says what it stands for).

Each is probed and then measured in one trial of its own settings: its training loader, its batch, its accumulation and
its precision are seen as they are, and its folder and the machine's processes are as before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from autotune.config.training_config import TrainingConfig
from autotune.launch.local import LocalLauncher
from tests.factories.scripts import make_script
from tests.worker.script.scripts import SHORT, ScriptRig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMANDS: dict[str, dict[str, Any]] = yaml.safe_load((SCRIPTS / "commands.yaml").read_text())
WORKER = {"num_workers": 1, "prefetch_factor": 2}
WORKERS = {"num_workers": 2, "prefetch_factor": 2}
PAIR = {"world_size": 2, "strategy": "ddp"}


@dataclass(frozen=True)
class Seen:
    """What is to be seen of a script: settings that are not autotune's defaults, and where its loader is made."""

    line: int | None
    """None: it has no DataLoader that can be followed."""
    own: dict[str, Any]
    kept: frozenset[str] = frozenset()
    """Settings of the loader that are not to be changed from outside."""
    file: str = ""
    """Where that is another one than the script."""
    deadline_s: float = 100.0


SEEN: dict[str, Seen] = {
    "s01_pkg": Seen(8, {"lr": 0.1}, file="data.py"),
    "s02_train_acc.py": Seen(6, {}),
    "s03_mid_epoch_train_eval.py": Seen(6, {}),
    "s04_mp_spawn.py": Seen(11, {"lr": 0.1, **PAIR}),
    "s05_torchrun.py": Seen(10, {"lr": 0.1, **PAIR}),
    "s06_accelerate.py": Seen(11, {"micro_batch_size": 16, "grad_accum_steps": 4}),
    "s07_hf_trainer.py": Seen(
        12,
        {"micro_batch_size": 8, "grad_accum_steps": 2, "lr": 5e-5, "fused": True},
    ),
    "s08_gan.py": Seen(5, {"micro_batch_size": 64, "lr": 0.0004}),
    "s09_wgan.py": Seen(5, {"micro_batch_size": 64, "lr": 0.0001}),
    "s10_accum_iter.py": Seen(
        6,
        {"micro_batch_size": 16, "grad_accum_steps": 4, "amp_dtype": "bfloat16", **WORKER},
        frozenset({"amp_dtype"}),
    ),
    "s11_iterable.py": Seen(10, {"micro_batch_size": 48, **WORKERS}),
    "s12_multi_epochs.py": Seen(11, WORKER),
    "s13_nodeloader.py": Seen(12, {}),
    "s14_generator_iterator.py": Seen(None, {}),
    "s15_anew_break.py": Seen(8, {}),
    "s16_ppo.py": Seen(9, {}),
    "s17_cycle.py": Seen(7, {}),
    "s18_resume.py": Seen(7, {}),
    "s19_output_dir.py": Seen(11, {}),
    "s20_short.py": Seen(6, {}),
    "s21_slow_start.py": Seen(7, {}),
    "s22_system.py": Seen(21, {**WORKER, "persistent_workers": True}),
    "s23_bucket.py": Seen(16, {"micro_batch_size": 24}, frozenset({"micro_batch_size"})),
    "s24_hf_plain.py": Seen(10, {"micro_batch_size": 16, "lr": 5e-5}),
    "s25_omp.py": Seen(9, {"intra_op_threads": 1}, frozenset({"intra_op_threads"})),
    "s26_tiny_anew.py": Seen(8, {}),
    "s27_skip_bad.py": Seen(10, {}),
    "s28_zip.py": Seen(
        5, {"micro_batch_size": 16, "lr": 0.03, **WORKER}, frozenset({"micro_batch_size"})
    ),
    "s29_noloader.py": Seen(None, {"micro_batch_size": 12, "grad_accum_steps": 4}),
    "s30_flood.py": Seen(6, {}),
    "s31_reexec.py": Seen(9, {}),
    "s32_launch_child.py": Seen(9, {}, file="s25_omp.py"),
    "s33_onecycle.py": Seen(7, {"lr": 0.01}),
    "s34_pin_int.py": Seen(6, {**WORKER, "persistent_workers": True}),
    "s35_structseq.py": Seen(6, {}),
    "s36_fed.py": Seen(12, {"micro_batch_size": 64, "lr": 0.05}),
    "s37_bf16_weights.py": Seen(6, {"amp_dtype": "bfloat16"}, frozenset({"amp_dtype"})),
    "s38_jit_end.py": Seen(7, {}),
    "s39_fold.py": Seen(8, {}),
    "s40_wrapper.sh": Seen(8, {"lr": 0.1}, file="data.py"),
    "s41_mod": Seen(9, {}, file="train.py"),
    "s42_warn_thread.py": Seen(7, {}),
    "s43_raw_params.py": Seen(None, {"micro_batch_size": 1, "lr": 0.01}),
    "s44_one_second.py": Seen(6, {}),
    "s45_new_dataset_each_epoch.py": Seen(8, {}),
    "s46_dataset_per_epoch_apply.py": Seen(12, {}),
    "s47_resume_latest.py": Seen(7, {}),
    "s48_sleep_step.py": Seen(6, {}),
    "s49_slow_own_data.py": Seen(None, {}),
    "s50_mp_fork.py": Seen(11, {"lr": 0.1, **PAIR}),
    "s51_hogwild.py": Seen(7, {"lr": 0.01, "intra_op_threads": 1}),
    "s52_fork_child.py": Seen(7, {}),
    "s53_two_workers.py": Seen(9, {"intra_op_threads": 1, **WORKERS}),
    "s56_none.py": Seen(6, {"lr": 0.1}),
    "s57_two_tasks.py": Seen(8, {"lr": 0.1}),
    "s58_next_iter.py": Seen(6, {"lr": 0.1, **WORKERS}),
    "s59_infinite.py": Seen(9, {"grad_accum_steps": 2, **WORKER}),
    "s61_lightning_cli.py": Seen(
        36,
        {"micro_batch_size": 16, "lr": 0.002},
    ),
    "s62_accelerate_config.py": Seen(
        15,
        {"micro_batch_size": 16, "grad_accum_steps": 2, "amp_dtype": "bfloat16"},
        frozenset({"amp_dtype"}),
    ),
    "s63_deepspeed.py": Seen(
        19,
        {"micro_batch_size": 16, "grad_accum_steps": 2, "pin_memory": True, **WORKERS, **PAIR},
        deadline_s=180.0,  # it compiles an extension of torch's first
    ),
    "s64_uv_run.py": Seen(9, {"lr": 0.1}),
    "s65_notebook.py": Seen(27, {"micro_batch_size": 64}),
    "s66_monai.py": Seen(21, {"micro_batch_size": 8}),
    "s67_webdataset.py": Seen(
        30,
        {"micro_batch_size": 20, "lr": 0.1, **WORKER},
        frozenset({"micro_batch_size"}),
    ),
    "s68_nodes.py": Seen(None, {"lr": 0.1}),
    "s69_three_optimizers.py": Seen(7, {"lr": 0.01}),
    "s70_replay_buffer.py": Seen(None, {"micro_batch_size": 64, "lr": 0.0005}),
    "s71_curriculum.py": Seen(12, {"micro_batch_size": 16, "lr": 0.1}),
    "s72_distillation.py": Seen(7, WORKER),
    "s73_lora.py": Seen(10, {"micro_batch_size": 8, "lr": 0.0002}),
    "s74_checkpointed.py": Seen(23, {"grad_accum_steps": 2}),
    "s75_ema.py": Seen(10, {"lr": 0.1}),
    "s76_compiled.py": Seen(7, {"lr": 0.1, "compile": True}),
    "s77_wandb.py": Seen(13, {"lr": 0.1}),
    "s78_mlflow.py": Seen(11, {"lr": 0.1}),
    "s80_coverage.py": Seen(16, {"lr": 0.1}),
    "s81_config": Seen(
        13,
        {"micro_batch_size": 48, "lr": 0.05},
        file="train.py",
    ),
    "s82_helper_process.py": Seen(25, {"lr": 0.1}),
    "l1_lightning.py": Seen(14, {"grad_accum_steps": 2}),
    "l1_lightning.py reload": Seen(14, {"grad_accum_steps": 2}),
    "l2_hydra.py": Seen(9, {"lr": 0.01}),
}


@pytest.fixture(scope="module")
def rig(fork_server: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> ScriptRig:
    """A rig in whose folder all scripts lie."""
    folder = tmp_path_factory.mktemp("scripts")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    return ScriptRig(launcher=fork_server, folder=folder)


def files_in(folder: Path) -> set[Path]:
    """All files but the trials' logs and what Python compiles."""
    return {
        path
        for path in folder.rglob("*")
        if path.suffix != ".log" and "__pycache__" not in path.parts
    }


_WAITS_BY_SPINNING = "s63_deepspeed.py"
"""DeepSpeed's ranks on CPUs wait for each other in a loop: beside any other program they hardly come to a step."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.quiet if name == _WAITS_BY_SPINNING else ())
        for name in SEEN
    ],
)
def test_a_script_is_seen_as_it_is_measured_and_leaves_nothing(
    rig: ScriptRig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, started = SEEN[name], COMMANDS.get(name, {})
    if "needs" in started and find_spec(started["needs"]) is None:
        pytest.skip(f"{started['needs']} is not installed")
    monkeypatch.chdir(rig.folder / started.get("folder", ""))
    before = files_in(rig.folder)
    words = started.get("command", f"python {name}").split()
    probed = rig.probe(tuple(words), deadline_s=seen.deadline_s)
    defaults = TrainingConfig().model_dump()
    own = {
        key: value for key, value in probed.observed.model_dump().items() if value != defaults[key]
    }
    expected, kept = dict(seen.own), seen.kept
    if (
        torch.get_num_threads() == 1
    ):  # as where tests run side by side: what the script asks for is what it has
        expected.pop("intra_op_threads", None)
        kept -= {"intra_op_threads"}
    assert own == pytest.approx(expected)
    places = [(Path(site.file).name, site.line) for site in probed.script.loaders]
    assert places[-1:] == (
        [] if seen.line is None else [(seen.file or name.partition(" ")[0], seen.line)]
    )
    assert not kept & set(probed.script.reached)
    result = rig.trial(probed.words, probed, window=SHORT)
    assert result.outcome == "ok", result.reason
    assert files_in(rig.folder) == before
    here = [
        one for one in psutil.Process().children(recursive=True) if name in " ".join(one.cmdline())
    ]
    assert here == []


@dataclass(frozen=True)
class Applied:
    """A script that is run to its end under `autotune apply`."""

    line: int
    settings: dict[str, Any]
    printed: list[str]
    """All that it prints, and nothing of it otherwise than it would be without autotune but for the settings."""
    arguments: tuple[str, ...] = ()
    own: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    """How its loader is made; else its place alone is known."""
    removed: str = ""
    """Text that was taken out of it since it was searched."""
    code: int = 0


APPLIED = {
    "s38_jit_end.py": Applied(
        7,
        {"amp_dtype": "bfloat16"},
        ["save ok", "script ok", "trace ok", "export ok", "compile ok", "fx ok"],
        arguments=("2",),
    ),
    "s46_dataset_per_epoch_apply.py": Applied(
        12,
        {"micro_batch_size": 128, **WORKER},
        [f"epoch {epoch} batch 128 workers 1 steps 25" for epoch in range(3)],
        arguments=("3", "3200"),
        loader={"dataset": "__main__.D", "length": 3200, "order": "shuffle", "batch_size": 32},
    ),
    "s54_persistent_second_iter.py": Applied(
        6,
        {"persistent_workers": True},
        [f"epoch {epoch} steps 20 persistent True" for epoch in range(2)],
        own=WORKER,
    ),
    "s55_set_epoch.py": Applied(
        10,
        {"persistent_workers": True},
        [f"epoch {epoch} the workers' dataset is at epoch {{{epoch}}}" for epoch in range(3)],
        own=WORKER,
    ),
    "s82_helper_process.py": Applied(
        25,
        {"micro_batch_size": 64},
        ["epoch 0 batch 64", "probe ended", "epoch 1 batch 64", "probe ended"],
        arguments=("2",),
    ),
    "s60_moved_line.py": Applied(6, {"micro_batch_size": 256}, ["train batch 256 val batch 16"]),
    "s60_moved_line.py, moved": Applied(
        6, {"micro_batch_size": 256}, [], removed="A = 1  # a line that is later removed\n", code=2
    ),
}


@pytest.mark.parametrize("name", APPLIED)
def test_a_script_trains_under_apply_as_by_itself_but_for_the_settings(
    name: str, tmp_path: Path
) -> None:
    applied, script = APPLIED[name], tmp_path / name.partition(",")[0]
    script.write_text((SCRIPTS / script.name).read_text().replace(applied.removed or "\0", ""))
    observed = TrainingConfig.model_validate({"micro_batch_size": 32, "lr": 0.1, **applied.own})
    loader = {"file": str(script), "line": applied.line, **applied.loader}
    facts = make_script(observed=observed, loaders=[loader], reached=[*applied.settings])
    found = {
        "format": 1,
        "settings": observed.model_copy(update=applied.settings).model_dump(),
        "command": ["python", script.name],
        "script": facts.model_dump(mode="json", exclude={"unreached", "modules", "new_files"}),
    }
    (tmp_path / "recommended.yaml").write_text(yaml.safe_dump(found))
    words = [
        sys.executable,
        "-m",
        "autotune",
        "apply",
        "recommended.yaml",
        "--",
        "python",
        script.name,
    ]
    done = subprocess.run(
        [*words, *applied.arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == applied.code, done.stderr
    assert done.stdout.splitlines() == applied.printed


def test_a_folder_that_cannot_be_written_keeps_no_script_from_being_looked_at(
    tmp_path: Path,
) -> None:
    """As an ordinary user has it in another's folder; the user root is held to a folder's mode by `setpriv` alone."""
    held = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if held and shutil.which(held[0]) is None:
        pytest.skip("root may write to any folder")
    folder = tmp_path / "theirs"
    folder.mkdir()
    shutil.copy(SCRIPTS / "s79_read_only.py", folder)
    folder.chmod(0o555)
    words = [
        *held,
        sys.executable,
        "-m",
        "autotune",
        "OURS",
        "--set",
        "budget.timeout_s=20",
        "--",
        "python",
    ]
    looked, searched = (
        subprocess.run(
            [ours if word == "OURS" else word for word in [*words, "s79_read_only.py"]],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        for ours in ("diagnose", "run")
    )
    assert looked.returncode == 0, looked.stderr
    assert "samples/s" in looked.stdout
    assert (searched.returncode, searched.stderr.count("run_dir")) == (2, 1)
    assert [path.name for path in folder.iterdir()] == ["s79_read_only.py"]
