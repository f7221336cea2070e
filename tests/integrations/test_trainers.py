"""Trainers of other frameworks are searched with as they are, and stay as they were."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autotune
from autotune.errors import ConfigError
from autotune.protocol.payload import write_payload
from tests.integrations.searches import Search, assert_runs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),  # of the frameworks
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No framework asks the network for anything."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")


class Words(Dataset[dict[str, torch.Tensor]]):
    """Sentences of a fixed length."""

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 50, (8,))
        return {"input_ids": words, "labels": words}


def head_of(folder: Path) -> str:
    """What the recommendation of a run folder says before its settings."""
    return (folder / "recommended.yaml").read_text().partition("format: 1")[0]


def made_trainer(folder: Path, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Doubled(Trainer):  # type: ignore[misc] # ships no types here
        """Has a loss of its own."""

        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
            self.log({"weight": float(self.weight)})
            return self.weight * super().compute_loss(model, inputs, **options)

    args = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=12,
        gradient_accumulation_steps=2,
        learning_rate=3e-4,
        weight_decay=0.1,
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        dataloader_pin_memory=False,
        report_to="none",
        use_cpu=True,
        **arguments,
    )
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    )
    trainer = Doubled(model=model, args=args, train_dataset=Words())
    trainer.weight = torch.tensor(2.0)
    return trainer


def test_a_trainer_of_transformers_is_searched_with(tmp_path: Path, search: Search) -> None:
    trainer = made_trainer(tmp_path)
    weights, attributes = copy.deepcopy(trainer.model.state_dict()), dict(vars(trainer))
    result = search(
        trainer, None, tmp_path / "run", space={"micro_batch_size": 12, "grad_accum_steps": 2}
    )
    assert_runs(result)
    assert result.baseline.model_dump(
        include={
            "micro_batch_size",
            "grad_accum_steps",
            "lr",
            "num_workers",
            "persistent_workers",
            "amp_dtype",
        }
    ) == {
        "micro_batch_size": 12,
        "grad_accum_steps": 2,
        "lr": 3e-4,
        "num_workers": 1,
        "persistent_workers": True,
        "amp_dtype": "float32",
    }
    assert result.summary.facts.optimizer.name == "AdamW"
    assert result.summary.name == "GPT2LMHeadModel"
    (beside,) = (told for told in result.summary.notes if told.code == "during_training")
    assert "checkpoints" in str(beside.figures["names"])
    assert '.to("hf", device="cpu", optimizer="AdamW")' in head_of(tmp_path / "run")
    assert vars(trainer) == attributes
    assert all(
        torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items()
    )
    assert not list((tmp_path / "out").rglob("*"))


def test_the_loss_and_the_clipping_of_a_trainer_are_its_own(tmp_path: Path) -> None:
    from autotune.trainers.objects import take_trainer

    trainer = made_trainer(
        tmp_path, max_grad_norm=0.001, gradient_checkpointing=True, max_steps=1, bf16=True
    )
    trainer.train()  # accelerate has wrapped model and optimizer since
    taken = take_trainer(trainer)
    write_payload(taken.model, tmp_path / "payload")
    batch = next(iter(taken.dataset))
    own = trainer.compute_loss(trainer.model, dict(batch))
    assert taken.step is not None
    torch.manual_seed(0)
    trainer.model.eval()
    expected = trainer.compute_loss(trainer.model, dict(batch))
    loss = taken.step(taken.model.eval(), batch)
    assert own.shape == loss.shape
    assert torch.allclose(loss, expected, rtol=0.02)  # by accelerate's bfloat16, and in float32
    assert taken.model.model.is_gradient_checkpointing
    parameters = list(taken.model.parameters())
    optimizer = taken.optimizer(parameters, 0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    loss.backward()
    optimizer.step()
    norm = torch.linalg.vector_norm(
        torch.stack([each.grad.norm() for each in parameters if each.grad is not None])
    )
    assert norm.item() == pytest.approx(0.001, rel=0.01)


@pytest.mark.parametrize(
    "beside", [{"dataset": Words()}, {"loss": nn.MSELoss()}, {"optimizer": torch.optim.SGD}]
)
def test_nothing_stands_beside_a_trainer_that_it_decides_itself(
    beside: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(beside))}: .*Trainer"):
        autotune.search(made_trainer(tmp_path), **beside)


def test_steps_see_index_device_and_compilation_as_under_lightning() -> None:
    from lightning import pytorch as lightning

    from autotune.trainers.objects import take_module

    class Net(lightning.LightningModule):  # type: ignore[misc] # ships no types here
        """Sets itself up, and asks for its device."""

        def setup(self, stage: str) -> None:
            self.numbers = Numbers()

        def configure_model(self) -> None:
            self.line = nn.Linear(8, 3)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.line(batch[0] + torch.zeros(8, device=self.device)).sum()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.numbers, 8)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
            ]

        def on_fit_start(self) -> None:
            raise AssertionError("trials don't run this")

    module = Net()
    before = torch.get_rng_state()
    taken = take_module(module, None, None)
    assert not hasattr(module, "line")
    assert not hasattr(module, "numbers")
    assert taken.baseline["lr"] == 0.1
    assert "on_fit_start" in str(taken.notes[0].figures["names"])
    assert before.shape == torch.get_rng_state().shape
    frames = []

    def counting(graph: Any, inputs: Any) -> Any:
        frames.append(inputs)
        return graph.forward

    model = torch.compile(taken.model.to("meta"), backend=counting)
    assert taken.step is not None
    for _ in range(6):
        assert taken.step(model, (torch.zeros(2, 8, device="meta"), None)).device.type == "meta"
    assert 1 <= len(frames) <= 2  # once for a number, once for any


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """An input and a class."""

    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8), index % 3


def made_module() -> Any:
    from lightning import pytorch as lightning

    class Net(lightning.LightningModule):  # type: ignore[misc] # ships no types here
        """Logs, and doubles its batches on the device."""

        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 3)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.line(batch[0]), batch[1])
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            }

        def on_train_batch_end(self, *_: Any) -> None:
            raise AssertionError("trials don't run this")

    return Net()


def made_data() -> Any:
    from lightning import pytorch as lightning

    class Data(lightning.LightningDataModule):  # type: ignore[misc] # ships no types here
        """Sets its dataset up when it is told to."""

        def setup(self, stage: str) -> None:
            assert stage == "fit"
            self.numbers = Numbers()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(
                self.numbers, 16, shuffle=True, num_workers=1, persistent_workers=True
            )

    return Data()


def test_a_lightning_module_with_its_data_is_searched_with(tmp_path: Path, search: Search) -> None:
    from lightning import pytorch as lightning

    module, data = made_module(), made_data()
    module.trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        logger=False,
    )
    result = search(
        module,
        data,
        tmp_path,
        space={"micro_batch_size": 16, "grad_accum_steps": 2, "amp_dtype": "bfloat16"},
    )
    assert_runs(result)
    found = result.baseline
    assert (found.micro_batch_size, found.grad_accum_steps, found.amp_dtype, found.lr) == (
        16,
        2,
        "bfloat16",
        0.02,
    )
    assert (result.summary.name, result.summary.facts.optimizer.name) == ("Net", "AdamW")
    (beside,) = (told for told in result.summary.notes if told.code == "during_training")
    assert {"on_train_batch_end", "checkpoints"} <= {*beside.figures["names"]}  # type: ignore[misc] # a list
    assert '.to("lightning", device="cpu")' in head_of(tmp_path)
    assert not hasattr(data, "numbers")
    assert "log" not in vars(module)


def test_a_lightning_module_that_optimizes_by_hand_is_refused() -> None:
    module = made_module()
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="optimize"):
        autotune.search(module, made_data())


def test_what_accelerate_has_prepared_is_searched_with(tmp_path: Path, search: Search) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    line = nn.Linear(8, 3)
    loader = DataLoader(Numbers(), 16, shuffle=True, num_workers=1)
    model, optimizer, prepared = accelerator.prepare(
        line, torch.optim.AdamW(line.parameters(), lr=0.02), loader
    )
    before = dict(vars(model))
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    result = search(
        model,
        prepared,
        tmp_path,
        optimizer=optimizer,
        accelerator=accelerator,
        space={"micro_batch_size": 16, "grad_accum_steps": 2, "amp_dtype": "bfloat16"},
    )
    assert_runs(result)
    found = result.baseline
    assert (found.micro_batch_size, found.grad_accum_steps, found.amp_dtype, found.lr) == (
        16,
        2,
        "bfloat16",
        0.02,
    )
    assert (found.num_workers, result.summary.facts.optimizer.name) == (1, "AdamW")
    assert '.to("accelerate", device="cpu")' in head_of(tmp_path)
    assert vars(model) == before
    assert len(optimizer.state) == 2


def test_the_code_of_the_page_on_own_objects_runs(tmp_path: Path, search: Search) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    page = Path(__file__).parents[2] / "docs" / "own-objects.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    folders = (tmp_path / str(number) for number in itertools.count())

    def short(model: Any, data: Any = None, **options: Any) -> autotune.SearchResult:
        space = {"micro_batch_size": [16, 12], "grad_accum_steps": [1, 2], "num_workers": 1}
        return search(model, data, next(folders), space=space, **options)

    line = nn.Linear(8, 3)
    names: dict[str, Any] = {
        "autotune": SimpleNamespace(search=short),
        "model": line,
        "loader": DataLoader(Numbers(), 16, shuffle=True, num_workers=1, persistent_workers=True),
        "optimizer": torch.optim.AdamW(line.parameters(), lr=0.02),
        "trainer": made_trainer(tmp_path),
        "module": made_module(),
        "datamodule": made_data(),
        "accelerator": Accelerator(cpu=True),
    }
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
        assert_runs(names["result"])
    assert names["faster"].batch_size in {12, 16}
