"""Exports held against the frameworks that are installed: their fields and schemas, and a tiny model that trains."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from autotune.config.training_config import DdpConfig, TrainingConfig
from autotune.export.accelerate import ddp_handler
from autotune.export.deepspeed import OPTIMIZERS
from autotune.export.hf import HF
from autotune.files.plan_file import read_current
from tests.export.configs import EVERYTHING, flat
from tests.factories.configs import any_configs

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # of the frameworks' own
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
ANY = settings(suppress_health_check=list(HealthCheck))
TINY = TrainingConfig(
    micro_batch_size=4,
    grad_accum_steps=2,
    lr=0.25,
    amp_dtype="bfloat16",
    num_workers=1,
    prefetch_factor=3,
    persistent_workers=True,
)
DATA = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "labels": torch.tensor(index % 2)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.dtypes, self.calls = set(), 0
    def forward(self, x, labels=None):
        self.calls += 1
        outputs = self.linear(x)
        self.dtypes.add(str(outputs.dtype))
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}
"""


def trained(folder: Path, script: str, *start: str, **environment: str) -> dict[str, Any]:
    """What a script has printed last, as JSON, started by a program of this environment."""
    path = folder / "train.py"
    path.write_text(DATA + script)
    words = (
        [str(Path(sys.executable).with_name(start[0])), *start[1:]] if start else [sys.executable]
    )
    own = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    done = subprocess.run(
        [*words, str(path)],
        cwd=folder,
        env={**os.environ, **own},
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1]))


# transformers


@ANY
@given(any_configs())
def test_training_arguments_take_every_export(config: TrainingConfig) -> None:
    transformers = pytest.importorskip("transformers")
    export = config.to("hf", device="cpu")
    fields = {one.name for one in dataclasses.fields(transformers.TrainingArguments)}
    assert set(config.to("hf").settings) <= fields  # of a GPU too, tf32 among them
    made = transformers.TrainingArguments(**export.settings)
    forced = {"dataloader_pin_memory", "accelerator_config"}
    assert {name: getattr(made, name) for name in export.settings if name not in forced} == {
        name: value for name, value in export.settings.items() if name not in forced
    }
    assert made.accelerator_config.non_blocking is config.pin_memory


def test_training_arguments_have_each_name_of_the_table_and_its_default() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {one.name: one.default for one in dataclasses.fields(transformers.TrainingArguments)}
    named = {name.name for name in HF.names.values()} | {
        name for own in HF.precisions.values() for name in own
    }
    assert named <= fields.keys()
    for name in HF.names.values():
        if name.own is not None:
            assert fields[name.name] == name.own
    plain = {"torch_compile": False, "dataloader_num_workers": 0, "gradient_accumulation_steps": 1}
    assert {name: fields[name] for name in plain} == plain
    said = {one.name for one in TrainingConfig().to("hf").defaults} - {"n_gpu"}
    assert (
        fields["lr_scheduler_type"],
        fields["max_grad_norm"],
        fields["dataloader_drop_last"],
    ) == (
        "linear",
        1.0,
        False,
    )
    assert "adamw" in str(fields["optim"])
    assert said == {"optim", "lr_scheduler_type", "max_grad_norm", "dataloader_drop_last"}


def test_a_whole_file_of_training_arguments_reads_back_as_what_it_was_made_of(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        learning_rate=0.1,
        bf16=True,
        use_cpu=True,
        warmup_steps=5,
    )
    (tmp_path / "args.json").write_text(made.to_json_string())
    found = read_current("hf", tmp_path / "args.json").reading
    told = {
        "micro_batch_size": 3,
        "lr": 0.1,
        "amp_dtype": "bfloat16",
        "num_workers": 0,
        "pin_memory": False,
    }
    assert told.items() <= found.baseline.items()
    assert found.assumed == {}
    assert found.unread.keys() == {
        "optim",
        "lr_scheduler_type",
        "warmup_steps",
        "max_grad_norm",
        "use_cpu",
    }
    assert set(found.others) <= {one.name for one in dataclasses.fields(made)} | {"n_gpu", "_n_gpu"}


def test_the_trainer_of_transformers_trains_as_was_exported(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "training_args.json").write_text(TINY.to("hf", device="cpu").text)
    seen = trained(
        tmp_path,
        """
from transformers import Trainer, TrainerCallback, TrainingArguments
given = json.load(open("training_args.json"))
quiet = {"output_dir": "out", "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
arguments = TrainingArguments(**given, **quiet, max_steps=2)
model = Net()
trainer = Trainer(model=model, args=arguments, train_dataset=Data())
loader = trainer.get_train_dataloader()
rates = []
class Rates(TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **_):
        rates.append(optimizer.param_groups[0]["lr"])
trainer.add_callback(Rates())
trainer.train()
print(json.dumps({
    "steps": trainer.state.global_step, "batch": trainer._train_batch_size, "lr": rates[0],
    "forwards": model.calls, "precision": trainer.accelerator.mixed_precision,
    "workers": loader.num_workers, "prefetch": loader.prefetch_factor, "persistent": loader.persistent_workers,
    "device": str(arguments.device), "dtypes": sorted(model.dtypes),
}))
""",
    )
    assert seen == {
        "steps": 2,
        "batch": 4,
        "lr": 0.25,
        "forwards": 4,
        "precision": "bf16",
        "workers": 1,
        "prefetch": 3,
        "persistent": True,
        "device": "cpu",
        "dtypes": ["torch.bfloat16"],
    }


# accelerate

ACCELERATED = """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=int(os.environ.get("STEPS", 1)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Data(), batch_size=4))
for batch in list(loader)[:4]:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
state = accelerator.state
if accelerator.is_main_process:
    print(json.dumps({
        "processes": state.num_processes, "precision": state.mixed_precision, "kind": str(state.distributed_type.value),
        "device": state.device.type, "accumulation": accelerator.gradient_accumulation_steps,
        "compiler": str(state.dynamo_plugin.backend.value),
    }))
accelerator.end_training()
sys.stdout.flush()
os._exit(0)  # gloo's threads now and then abort an interpreter that ends by itself
"""


@ANY
@given(config=any_configs())
def test_the_file_of_accelerate_holds_what_it_knows(
    tmp_path_factory: Any, config: TrainingConfig
) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    export = config.to("accelerate")
    file = tmp_path_factory.getbasetemp() / "accelerate.yaml"
    file.write_text(export.text)
    made = config_args.load_config_from_file(str(file))
    assert (made.num_processes, made.mixed_precision) == (
        config.process_count,
        {"bfloat16": "bf16", "float16": "fp16"}.get(config.amp_dtype, "no"),
    )
    assert str(made.distributed_type.value) == export.settings["distributed_type"]


def test_the_file_that_accelerate_writes_by_default_is_read_without_a_remark(
    tmp_path: Path,
) -> None:
    default = pytest.importorskip("accelerate.commands.config.default")
    default.write_basic_config("bf16", str(tmp_path / "default.json"))
    found = read_current("accelerate", tmp_path / "default.json").reading
    assert found.baseline == {"amp_dtype": "bfloat16"}
    assert list(found.unread) in ([], ["use_cpu"])
    assert found.others == ()


def test_accelerate_launches_what_was_exported(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "own.yaml").write_text(TINY.to("accelerate", device="cpu").text)
    start = ("accelerate", "launch", "--config_file", "own.yaml")
    seen = trained(
        tmp_path,
        ACCELERATED,
        *start,
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS=str(TINY.grad_accum_steps),
    )
    assert seen == {
        "processes": 1,
        "precision": "bf16",
        "kind": "NO",
        "device": "cpu",
        "accumulation": 2,
        "compiler": "NO",
    }


def test_several_processes_of_accelerate_on_a_cpu_start_as_the_reason_says_and_not_by_the_file(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate")
    export = TINY.model_copy(update={"world_size": 2, "strategy": "ddp"}).to(
        "accelerate", device="cpu"
    )
    (tmp_path / "own.yaml").write_text(export.text)
    assert (
        trained(tmp_path, ACCELERATED, "accelerate", "launch", "--config_file", "own.yaml")[
            "processes"
        ]
        == 1
    )
    words = (
        dict(export.dropped)["world_size"]
        .partition("ACCELERATE_USE_CPU=true ")[2]
        .partition(",")[0]
        .split()
    )
    told = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": export.settings["mixed_precision"],
    }
    seen = trained(tmp_path, ACCELERATED, *words, **told)
    assert (seen["processes"], seen["kind"], seen["precision"]) == (2, "MULTI_CPU", "bf16")


def test_several_processes_of_accelerate_on_gpus_are_launched_by_the_file(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    (tmp_path / "own.yaml").write_text(EVERYTHING.to("accelerate", device="cuda").text)
    parsed = launch.launch_command_parser().parse_args(
        ["--config_file", str(tmp_path / "own.yaml"), "train.py"]
    )
    parsed.nondefault = []
    made, *_ = launch._validate_launch_command(parsed)
    assert (made.multi_gpu, made.num_processes, made.mixed_precision, made.use_cpu) == (
        True,
        2,
        "bf16",
        False,
    )
    assert made.dynamo_backend == "INDUCTOR"


def test_accelerate_compiles_where_that_was_exported(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = TrainingConfig(compile=True)
    (tmp_path / "own.yaml").write_text(config.to("accelerate", device="cpu").text)
    script = """
from accelerate import Accelerator
print(json.dumps({"compiler": str(Accelerator().state.dynamo_plugin.backend.value)}))
"""
    assert trained(tmp_path, script, "accelerate", "launch", "--config_file", "own.yaml") == {
        "compiler": "INDUCTOR"
    }


@ANY
@given(any_configs())
def test_the_lines_for_a_script_of_accelerate_are_its_arguments(config: TrainingConfig) -> None:
    utils = pytest.importorskip("accelerate.utils")
    handler = ddp_handler(flat(config))
    made = utils.DistributedDataParallelKwargs(
        **{name: eval(repr(value), vars(utils).copy()) for name, value in handler.items()}
    )
    assert handler.keys() <= {one.name for one in dataclasses.fields(made)}
    assert utils.DataLoaderConfiguration(non_blocking=True).non_blocking


# Lightning

LIT = """
from lightning.pytorch import LightningModule
class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        parallel = self.trainer.strategy.model
        names = ("bucket_bytes_cap", "gradient_as_bucket_view", "find_unused_parameters")
        self.seen = [getattr(parallel, name, None) for name in names]
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)
dataset, module = Data(), Lit()
exec(open("lines.py").read())
loader = DataLoader(dataset, shuffle=True, **loader_arguments)
trainer.fit_loop.max_epochs = 1
trainer.fit_loop.epoch_loop.max_steps = 2
trainer.fit(module, loader)
if trainer.is_global_zero:
    print(json.dumps({
        "steps": trainer.global_step, "precision": trainer.precision, "accumulation": trainer.accumulate_grad_batches,
        "strategy": type(trainer.strategy).__name__, "ranks": trainer.world_size,
        "dtypes": sorted(module.net.dtypes), "batch": loader.batch_size, "workers": loader.num_workers,
        "parallel": module.seen, "threads": torch.get_num_threads(),
    }))
"""


@ANY
@given(any_configs())
def test_the_trainer_of_lightning_takes_every_export(config: TrainingConfig) -> None:
    pytorch = pytest.importorskip("lightning.pytorch")
    export = config.to("lightning", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = pytorch.Trainer(**export.settings, logger=False, enable_checkpointing=False)
    assert (made.precision, made.accumulate_grad_batches, made.world_size) == (
        export.settings["precision"],
        config.grad_accum_steps,
        config.process_count,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_trains_by_the_lines_that_were_exported(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("lightning")
    ddp = DdpConfig(
        bucket_cap_mb=3.0,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
        broadcast_buffers=False,
    )
    group = {"world_size": ranks, "strategy": "ddp", "ddp": ddp} if ranks > 1 else {}
    config = TINY.model_copy(update={**group, "intra_op_threads": 1, "channels_last": True})
    (tmp_path / "lines.py").write_text(config.to("lightning", device="cpu").text)
    seen = trained(tmp_path, LIT)
    assert seen == {
        "steps": 2,
        "precision": "bf16-mixed",
        "accumulation": 2,
        "strategy": "DDPStrategy" if ranks > 1 else "SingleDeviceStrategy",
        "ranks": ranks,
        "dtypes": ["torch.bfloat16"],
        "batch": 4,
        "workers": 1,
        "parallel": [3 * 2**20, True, True] if ranks > 1 else [None, None, None],
        "threads": 1,
    }


@ANY
@given(any_configs())
def test_the_lines_for_lightning_run_whatever_they_say(config: TrainingConfig) -> None:
    pytorch = pytest.importorskip("lightning.pytorch")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    names: dict[str, Any] = {
        "dataset": TensorDataset(torch.zeros(4096, 1)),
        "module": pytorch.LightningModule(),
    }
    try:
        exec(config.to("lightning", device="cpu").text, names)
        assert torch.get_num_threads() == (config.intra_op_threads or before[0])
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
    batches: dict[str, Any] = {} if config.max_tokens is None else {"batch_sampler": [[0]]}
    loader = DataLoader(names["dataset"], **names["loader_arguments"], **batches)
    assert (loader.batch_size, loader.num_workers, loader.in_order) == (
        config.micro_batch_size if config.max_tokens is None else None,
        config.num_workers,
        config.in_order,
    )


def test_lightning_runs_the_step_compiled_by_the_lines_that_were_exported(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    config = TrainingConfig(micro_batch_size=4, compile=True)
    (tmp_path / "lines.py").write_text(config.to("lightning", device="cpu").text)
    script = """
from functools import partial
from lightning.pytorch import LightningModule
class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch["x"]), batch["labels"])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)
frames = []
def counting(graph, inputs):
    frames.append(graph)
    return graph.forward
torch.compile = partial(torch.compile, backend=counting)
dataset, module = Data(), Lit()
exec(open("lines.py").read())
trainer.fit_loop.epoch_loop.max_steps = 2
trainer.fit(module, DataLoader(dataset, **loader_arguments))
print(json.dumps({"steps": trainer.global_step, "is_compiled": bool(frames)}))
"""
    assert trained(tmp_path, script) == {"steps": 2, "is_compiled": True}


# torchrun


def test_torchrun_knows_the_options_that_are_exported() -> None:
    from torch.distributed.run import get_args_parser

    words = EVERYTHING.to("torchrun").text.split()
    made = get_args_parser().parse_args([*words[words.index("torchrun") + 1 :], "train.py"])
    export = EVERYTHING.to("torchrun")
    assert {name: str(getattr(made, name)) for name in export.settings} == {
        name: str(value) for name, value in export.settings.items()
    }


def test_torchrun_starts_the_ranks_that_were_exported(tmp_path: Path) -> None:
    config = TINY.model_copy(update={"world_size": 2, "strategy": "ddp", "intra_op_threads": 2})
    env, variable, *words = config.to("torchrun").text.split()
    name, _, value = variable.partition("=")
    seen = trained(
        tmp_path,
        """
import torch.distributed as dist
dist.init_process_group("gloo")
assert os.environ["WORLD_SIZE"] == "2"
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
for batch in DataLoader(Data(), batch_size=4):
    optimizer.zero_grad()
    model(**batch)["loss"].backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(json.dumps({"ranks": dist.get_world_size(), "threads": os.environ["OMP_NUM_THREADS"]}))
dist.barrier()
dist.destroy_process_group()
""",
        *words,
        **{name: value},
    )
    assert env == "env"
    assert seen == {"ranks": 2, "threads": "2"}


# DeepSpeed


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_deepspeed_knows_each_optimizer_that_an_export_names(name: str) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    import torch

    assert name.lower() in runtime.DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, name)


@ANY
@given(any_configs())
def test_the_schema_of_deepspeed_takes_every_export(config: TrainingConfig) -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    export = config.to("deepspeed", optimizer="AdamW")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.dist, "get_world_size", lambda *_, **__: config.process_count)
        patch.setattr(runtime.dist, "get_rank", lambda *_, **__: 0)
        made = runtime.DeepSpeedConfig(json.loads(export.text))
    assert (
        made.train_batch_size,
        made.train_micro_batch_size_per_gpu,
        made.gradient_accumulation_steps,
    ) == (
        config.micro_batch_size * config.grad_accum_steps * config.process_count,
        config.micro_batch_size,
        config.grad_accum_steps,
    )
    assert (made.bfloat16_config.enabled, made.float16_config.enabled) == (
        config.amp_dtype == "bfloat16",
        config.amp_dtype == "float16",
    )
    assert made.optimizer_params == {"lr": config.lr}
    assert made.gradient_clipping == 1.0
