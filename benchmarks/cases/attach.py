"""Training scripts of others, run as they are: what the attached mode is tried on.

None of them is kept here: SCRIPTS says of each where it comes from, at which commit or version, and how it is run on
two cores without a network, on data that attach_data.py makes. The user gives one folder (AUTOTUNE_FOREIGN) which holds
a checkout `<owner>+<name>` of every repository and an environment `venv`, in which torch, torchvision, transformers,
accelerate, lightning, torchdata, datasets, evaluate, peft, timm, trl, wandb, sentencepiece, scikit-learn, tensorboard
and jsonargparse[signatures] are. `prepare` makes a run's folder; `command`, `environment` and `working_folder` say how
it is run. Nothing here knows how a script is watched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.cases import attach_data as made

__all__ = [
    "SCRIPTS",
    "Kind",
    "Origin",
    "Script",
    "command",
    "environment",
    "foreign_folder",
    "prepare",
    "working_folder",
]

Kind = Literal[
    "plain loop",
    "GradScaler loop",
    "two optimizers",
    "Trainer",
    "accelerate loop",
    "Lightning",
    "torchrun",
    "iterable data",
    "Stateful loader",
    "no DataLoader",
]

_FOLDER_VARIABLE = "AUTOTUNE_FOREIGN"
_PACKAGES = "venv/lib/python3.11/site-packages"
_GLUE_METRIC = {
    "glue": "huggingface+evaluate/metrics/glue"
}  # at a7dd338386a4fae9a1767e05eb9ef9479513d9e8, Apache-2.0
_ALONE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a script comes from."""

    source: str
    """The repository, or the package."""
    version: str
    """The commit, or the package's version."""
    licence: str


_EXAMPLES = Origin(
    "github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8", "BSD-3-Clause"
)
_ACCELERATE = Origin(
    "github.com/huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", "Apache-2.0"
)
_LIGHTNING = Origin(
    "github.com/Lightning-AI/pytorch-lightning",
    "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "Apache-2.0",
)
_TIMM = Origin(
    "github.com/huggingface/pytorch-image-models",
    "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "Apache-2.0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script of others and one way to run it; texts may hold {python}, {bin}, {script}, {sources} and {data}."""

    name: str
    kind: Kind
    origin: Origin
    path: str
    """The script, from the folder that the user gives."""
    command: tuple[str, ...]
    data: Callable[[Path], None]
    data_folder: str = "."
    """Where in the run's folder the data is made."""
    working_folder: str = "work"
    """Where in the run's folder the script is run."""
    links: Mapping[str, str] = field(default_factory=dict)
    """What the script opens by a name relative to the working folder: the name, and the file in the user's folder."""
    environment: Mapping[str, str] = field(default_factory=dict)


def foreign_folder() -> Path:
    """The folder that AUTOTUNE_FOREIGN names, else ./foreign."""
    return Path(os.environ.get(_FOLDER_VARIABLE, "foreign")).resolve()


def prepare(script: Script, sources: Path, run: Path) -> None:
    """Makes the folder of one run: the data, the working folder and its links. Once made, nothing is made again."""
    made_mark = run / "made"
    if made_mark.exists():
        return
    script.data(run / script.data_folder)
    working = working_folder(script, run)
    working.mkdir(parents=True, exist_ok=True)
    for name, source in script.links.items():
        link = working / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(sources / source)
    made_mark.touch()


def command(script: Script, sources: Path, run: Path) -> tuple[str, ...]:
    """What is run, as its arguments."""
    return tuple(_filled(word, script, sources, run) for word in script.command)


def environment(script: Script, sources: Path, run: Path) -> dict[str, str]:
    """What is set for the run beside what is set anyway: no GPU, no network, caches in the run's folder."""
    own = {name: _filled(value, script, sources, run) for name, value in script.environment.items()}
    return {**_ALONE, "HF_HOME": str(run / "huggingface"), **own}


def working_folder(script: Script, run: Path) -> Path:
    """The folder in which the script is run."""
    return run / script.working_folder


def _filled(text: str, script: Script, sources: Path, run: Path) -> str:
    binaries = sources / "venv" / "bin"
    places = {"python": binaries / "python", "bin": binaries, "script": sources / script.path}
    return text.format(**places, sources=sources, data=run)


SCRIPTS: tuple[Script, ...] = (
    Script(
        name="mnist",
        kind="plain loop",
        origin=_EXAMPLES,
        path="pytorch+examples/mnist/main.py",
        command=("{python}", "{script}"),
        data=made.mnist,
        data_folder="data",
    ),
    Script(
        name="imagenet",
        kind="plain loop",
        origin=_EXAMPLES,
        path="pytorch+examples/imagenet/main.py",
        command=(
            "{python}",
            "{script}",
            "-a",
            "squeezenet1_1",
            "-b",
            "4",
            "-j",
            "2",
            "--lr",
            "0.01",
            "{data}",
        ),
        data=made.image_folders,
    ),
    Script(
        name="mingpt_adder",
        kind="plain loop",
        origin=Origin(
            "github.com/karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26", "MIT"
        ),
        path="karpathy+minGPT/projects/adder/adder.py",
        command=("{python}", "{script}", "--trainer.max_iters=4000"),
        data=made.nothing,
        environment={"PYTHONPATH": "{sources}/karpathy+minGPT"},
    ),
    Script(
        name="timm_amp",
        kind="GradScaler loop",
        origin=_TIMM,
        path="huggingface+pytorch-image-models/train.py",
        command=(
            *(
                "{python}",
                "{script}",
                "--data-dir",
                "{data}",
                "--val-split",
                "val",
                "--device",
                "cpu",
            ),
            *(
                "--model",
                "test_vit",
                "--num-classes",
                "10",
                "-b",
                "8",
                "-j",
                "1",
                "--amp",
                "--amp-dtype",
                "float16",
            ),
            *("--lr", "0.01", "--epochs", "60", "--log-interval", "10", "--output", "out"),
        ),
        data=made.image_folders,
    ),
    Script(
        name="unet",
        kind="GradScaler loop",
        origin=Origin(
            "github.com/milesial/Pytorch-UNet",
            "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
            "GPL-3.0",
        ),
        path="milesial+Pytorch-UNet/train.py",
        command=("{python}", "{script}", "--amp", "--bilinear", "--epochs", "10"),
        data=made.images_and_masks,
        data_folder="work",
    ),
    Script(
        name="dcgan",
        kind="two optimizers",
        origin=_EXAMPLES,
        path="pytorch+examples/dcgan/main.py",
        command=(
            *(
                "{python}",
                "{script}",
                "--dataset",
                "folder",
                "--dataroot",
                "{data}/train",
                "--outf",
                "out",
            ),
            *("--ngf", "16", "--ndf", "16", "--batchSize", "16", "--workers", "1", "--niter", "40"),
        ),
        data=made.image_folders,
    ),
    Script(
        name="gan",
        kind="two optimizers",
        origin=Origin(
            "github.com/eriklindernoren/PyTorch-GAN",
            "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
            "MIT",
        ),
        path="eriklindernoren+PyTorch-GAN/implementations/gan/gan.py",
        command=("{python}", "{script}", "--n_epochs", "40"),
        data=made.mnist,
        data_folder="data/mnist",
        working_folder="implementations/gan",
    ),
    Script(
        name="olora",
        kind="Trainer",
        origin=Origin(
            "github.com/huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40", "Apache-2.0"
        ),
        path="huggingface+peft/examples/olora_finetuning/olora_finetuning.py",
        command=(
            *(
                "{python}",
                "{script}",
                "--base_model",
                "{data}/model",
                "--data_path",
                "{data}/instructions",
            ),
            *(
                "--device_map",
                "cpu",
                "--dtype",
                "float32",
                "--init_lora_weights",
                "gaussian",
                "--cutoff_len",
                "64",
            ),
            *("--batch_size", "16", "--num_epochs", "4", "--output_dir", "out"),
        ),
        data=made.causal_model_and_texts,
        environment={"ACCELERATE_USE_CPU": "true"},
    ),
    Script(
        name="trl_sft",
        kind="Trainer",
        origin=Origin("PyPI trl", "1.16.0", "Apache-2.0"),
        path=f"{_PACKAGES}/trl/scripts/sft.py",
        command=(
            *(
                "{python}",
                "{script}",
                "--model_name_or_path",
                "{data}/model",
                "--dataset_name",
                "{data}/texts",
            ),
            *(
                "--max_length",
                "64",
                "--per_device_train_batch_size",
                "8",
                "--num_train_epochs",
                "3",
                "--use_cpu",
            ),
            *(
                "--bf16",
                "False",
                "--report_to",
                "none",
                "--save_strategy",
                "no",
                "--output_dir",
                "out",
            ),
        ),
        data=made.causal_model_and_texts,
    ),
    Script(
        name="nlp_example",
        kind="accelerate loop",
        origin=_ACCELERATE,
        path="huggingface+accelerate/examples/nlp_example.py",
        command=(
            "{bin}/accelerate",
            "launch",
            "--cpu",
            "--num_processes",
            "1",
            "{script}",
            "--cpu",
        ),
        data=made.bert_and_mrpc,
        data_folder="work",
        links=_GLUE_METRIC,
    ),
    Script(
        name="gradient_accumulation",
        kind="accelerate loop",
        origin=_ACCELERATE,
        path="huggingface+accelerate/examples/by_feature/gradient_accumulation.py",
        command=("{python}", "{script}", "--cpu", "--gradient_accumulation_steps", "4"),
        data=made.bert_and_mrpc,
        data_folder="work",
        links=_GLUE_METRIC,
    ),
    Script(
        name="lightning_transformer",
        kind="Lightning",
        origin=_LIGHTNING,
        path="Lightning-AI+pytorch-lightning/examples/pytorch/basics/transformer.py",
        command=("{python}", "{script}"),
        data=made.wikitext,
        data_folder="work/data",
    ),
    Script(
        name="lightning_imagenet",
        kind="Lightning",
        origin=_LIGHTNING,
        path="Lightning-AI+pytorch-lightning/examples/pytorch/domain_templates/imagenet.py",
        command=(
            *(
                "{python}",
                "{script}",
                "fit",
                "--model.data_path",
                "{data}",
                "--model.arch",
                "squeezenet1_1",
            ),
            *("--model.batch_size", "4", "--model.workers", "2", "--model.lr", "0.01"),
        ),
        data=made.image_folders,
    ),
    Script(
        name="multi_process_metrics",
        kind="torchrun",
        origin=_ACCELERATE,
        path="huggingface+accelerate/examples/by_feature/multi_process_metrics.py",
        command=("{bin}/torchrun", "--standalone", "--nproc-per-node", "2", "{script}", "--cpu"),
        data=made.bert_and_mrpc,
        data_folder="work",
        links=_GLUE_METRIC,
    ),
    Script(
        name="llama2c",
        kind="iterable data",
        origin=Origin(
            "github.com/karpathy/llama2.c", "350e04fe35433e6d2941dce5a1f53308f87058eb", "MIT"
        ),
        path="karpathy+llama2.c/train.py",
        command=(
            *(
                "{python}",
                "{script}",
                "--device=cpu",
                "--dtype=float32",
                "--compile=False",
                "--vocab_source=custom",
            ),
            *(
                "--vocab_size=512",
                "--dim=64",
                "--n_layers=4",
                "--n_heads=4",
                "--n_kv_heads=4",
                "--max_seq_len=64",
            ),
            *(
                "--batch_size=8",
                "--gradient_accumulation_steps=2",
                "--eval_iters=10",
                "--max_iters=3000",
            ),
        ),
        data=made.story_tokens,
        data_folder="work",
        links={"configurator.py": "karpathy+llama2.c/configurator.py"},
    ),
    Script(
        name="complete_nlp_example",
        kind="Stateful loader",
        origin=_ACCELERATE,
        path="huggingface+accelerate/examples/complete_nlp_example.py",
        command=("{python}", "{script}", "--cpu", "--use_stateful_dataloader"),
        data=made.bert_and_mrpc,
        data_folder="work",
        links=_GLUE_METRIC,
    ),
    Script(
        name="nanogpt",
        kind="no DataLoader",
        origin=Origin(
            "github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", "MIT"
        ),
        path="karpathy+nanoGPT/train.py",
        command=(  # the README's for a machine without a GPU
            *(
                "{python}",
                "{script}",
                "config/train_shakespeare_char.py",
                "--device=cpu",
                "--compile=False",
            ),
            *(
                "--eval_iters=20",
                "--log_interval=1",
                "--block_size=64",
                "--batch_size=12",
                "--n_layer=4",
            ),
            *(
                "--n_head=4",
                "--n_embd=128",
                "--max_iters=2000",
                "--lr_decay_iters=2000",
                "--dropout=0.0",
            ),
        ),
        data=made.character_tokens,
        data_folder="work",
        links={
            "config/train_shakespeare_char.py": "karpathy+nanoGPT/config/train_shakespeare_char.py",
            "configurator.py": "karpathy+nanoGPT/configurator.py",
        },
    ),
    Script(
        name="word_language_model",
        kind="no DataLoader",
        origin=_EXAMPLES,
        path="pytorch+examples/word_language_model/main.py",
        command=(
            "{python}",
            "{script}",
            "--data",
            "{data}/data",
            "--use-optimizer",
            "--lr",
            "0.001",
        ),
        data=made.wikitext,
        data_folder="data",
    ),
)
"""The scripts, at least one of every kind."""
