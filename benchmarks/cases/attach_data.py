"""Small data of the formats that others' training scripts read, for benchmarks/cases/attach.py.

Every function here receives a folder, writes files into it and hands back nothing. The files depend on the code here
alone: the same numbers every time, with something in them to learn. Needs numpy and Pillow; torch, torchvision and
transformers read the files, they don't write them.
"""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = [
    "bert_and_mrpc",
    "causal_model_and_texts",
    "character_tokens",
    "image_folders",
    "images_and_masks",
    "mnist",
    "nothing",
    "story_tokens",
    "wikitext",
]

_WORDS = 1000
_CLASSES = 10
_SPECIAL = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[EOS]")
_WIDTH = 128
_PAIRS = 4000  # MRPC has 3668


def nothing(folder: Path) -> None:
    """For a script that makes its data itself: the folder alone."""
    folder.mkdir(parents=True, exist_ok=True)


def mnist(folder: Path, *, train: int = 12_000, test: int = 1_000) -> None:
    """`MNIST/raw/*-ubyte`, as torchvision keeps MNIST once it is unpacked; a blurred stroke a class, with noise."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    strokes = rng.integers(0, 2, (_CLASSES, 7, 7)).repeat(4, axis=1).repeat(4, axis=2) * 180
    for split, length in (("train", train), ("t10k", test)):
        labels = rng.integers(0, _CLASSES, length)
        images = strokes[labels] + rng.integers(0, 75, (length, 28, 28))
        _write_idx(raw / f"{split}-images-idx3-ubyte", images)
        _write_idx(raw / f"{split}-labels-idx1-ubyte", labels)


def image_folders(folder: Path, *, train: int = 400, validate: int = 40, side: int = 96) -> None:
    """`train/` and `val/` of JPEG files, a folder a class, as ImageFolder and timm read them."""
    rng = np.random.default_rng(1)
    colours = rng.integers(0, 200, (_CLASSES, 3))
    for split, length in (("train", train), ("val", validate)):
        for index in range(length):
            label = index % _CLASSES
            file = folder / split / f"class{label}" / f"{index}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = colours[label] + rng.integers(0, 56, (side, side, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(file)


def images_and_masks(folder: Path, *, length: int = 200, side: int = 64) -> None:
    """`data/imgs/*.jpg` and `data/masks/*_mask.gif`, as Carvana's: a bright square to be found."""
    rng = np.random.default_rng(2)
    (folder / "data" / "imgs").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "masks").mkdir(parents=True, exist_ok=True)
    for index in range(length):
        pixels = rng.integers(0, 120, (side, side, 3))
        mask = np.zeros((side, side), dtype=np.uint8)
        top, left = rng.integers(0, side // 2, 2)
        mask[top : top + side // 2, left : left + side // 2] = 1
        pixels[mask == 1] += 100
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "data" / "imgs" / f"{index}.jpg")
        Image.fromarray(mask).save(folder / "data" / "masks" / f"{index}_mask.gif")


def wikitext(folder: Path, *, tokens: int = 400_000) -> None:
    """`train.txt`, `valid.txt`, `test.txt`, as WikiText-2; the first also as Lightning names it, `wikitext-2.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, length) in enumerate(
        (("train", tokens), ("valid", tokens // 40), ("test", tokens // 40))
    ):
        (folder / f"{name}.txt").write_text(_text(seed, length), encoding="utf-8")
    (folder / "wikitext-2.txt").write_text(_text(0, tokens), encoding="utf-8")


def character_tokens(folder: Path, *, tokens: int = 1_000_000, vocabulary: int = 65) -> None:
    """`train.bin`, `val.bin` and `meta.pkl` in `data/shakespeare_char`, as nanoGPT's prepare.py leaves them."""
    place = folder / "data" / "shakespeare_char"
    place.mkdir(parents=True, exist_ok=True)
    for seed, (name, length) in enumerate((("train", tokens), ("val", tokens // 10))):
        (place / f"{name}.bin").write_bytes(
            _zipf(seed, length, vocabulary).astype(np.uint16).tobytes()
        )
    meta = {
        "vocab_size": vocabulary,
        "itos": {index: chr(32 + index) for index in range(vocabulary)},
    }
    (place / "meta.pkl").write_bytes(pickle.dumps(meta))


def story_tokens(
    folder: Path, *, shards: int = 3, tokens: int = 300_000, vocabulary: int = 512
) -> None:
    """`data/tok512/data??.bin`, as llama2.c's tinystories.py leaves its shards; the first is for validation."""
    place = folder / "data" / f"tok{vocabulary}"
    place.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        numbers = _zipf(shard, tokens, vocabulary).astype(np.uint16)
        (place / f"data{shard:02}.bin").write_bytes(numbers.tobytes())


def bert_and_mrpc(folder: Path) -> None:
    """`bert-base-cased/`, a small BERT, and `nyu-mll/glue/`, MRPC: found by these names beside the script's run."""
    model = folder / "bert-base-cased"
    _write_tokenizer(model, pairs=True)
    _write_model(
        model,
        "bert.embeddings.word_embeddings.weight",
        {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "hidden_size": _WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 4 * _WIDTH,
            "max_position_embeddings": 128,
        },
    )
    glue = folder / "nyu-mll" / "glue"
    splits = {"train": _PAIRS, "validation": _PAIRS // 20, "test": _PAIRS // 20}
    for seed, (split, length) in enumerate(splits.items()):
        _write_lines(glue / "mrpc" / f"{split}.jsonl", _pairs(seed, length))
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in splits)
    header = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    (glue / "README.md").write_text(header, encoding="utf-8")


def causal_model_and_texts(folder: Path) -> None:
    """`model/`, a small GPT-2 with its tokenizer, and two local data sets: `texts/` and `instructions/`."""
    model = folder / "model"
    _write_tokenizer(model, pairs=False)
    _write_model(
        model,
        "transformer.wte.weight",
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": _WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": _SPECIAL.index("[EOS]"),
            "eos_token_id": _SPECIAL.index("[EOS]"),
        },
    )
    lines = _text(0, 160_000).splitlines()
    _write_lines(folder / "texts" / "train.jsonl", [{"text": line} for line in lines])
    pairs: list[dict[str, object]] = [{"instruction": line, "output": line[::-1]} for line in lines]
    _write_lines(folder / "instructions" / "train.jsonl", pairs)


def _write_idx(file: Path, values: NDArray[np.integer[Any]]) -> None:
    """Source: http://yann.lecun.com/exdb/mnist, "the IDX file format": 0, 0, type (8: bytes), dimensions, lengths."""
    header = struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    file.write_bytes(header + values.astype(np.uint8).tobytes())


def _zipf(seed: int, length: int, vocabulary: int) -> NDArray[np.int64]:
    """Numbers below `vocabulary`, the n-th as frequent as 1/n; each second one follows from the one before it."""
    weights = 1 / np.arange(1, vocabulary + 1)
    numbers = np.random.default_rng(seed).choice(vocabulary, length, p=weights / weights.sum())
    half = length // 2
    numbers[1 : 2 * half : 2] = (numbers[0 : 2 * half : 2] * 7 + 1) % vocabulary
    return numbers.astype(np.int64)


def _text(seed: int, words: int) -> str:
    names = [f"w{number}" for number in _zipf(seed, words, _WORDS)]
    return "\n".join(" ".join(names[begin : begin + 20]) for begin in range(0, words, 20)) + "\n"


def _pairs(seed: int, length: int) -> list[dict[str, object]]:
    lines = _text(10 + seed, 20 * length).splitlines()
    rng = np.random.default_rng(seed)
    pairs: list[dict[str, object]] = []
    for index, first in enumerate(lines):
        label = int(rng.integers(2))
        second = first if label else lines[index - 1]
        pairs.append({"idx": index, "sentence1": first, "sentence2": second, "label": label})
    return pairs


def _write_lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_tokenizer(folder: Path, *, pairs: bool) -> None:
    """A tokenizer of whole words, in the format of the library `tokenizers`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {
        word: index
        for index, word in enumerate([*_SPECIAL, *(f"w{number}" for number in range(_WORDS))])
    }
    added = [{"id": index, "content": word, "special": True} for index, word in enumerate(_SPECIAL)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**entry, **plain} for entry in added],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": _pair_template() if pairs else None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 128,
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _pair_template() -> dict[str, object]:
    """`[CLS] a [SEP] b [SEP]`, the second with type 1."""

    def special(name: str, kind: int) -> dict[str, object]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def sequence(name: str, kind: int) -> dict[str, object]:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [special("[CLS]", 0), sequence("A", 0), special("[SEP]", 0)]
    known = {
        name: {"id": name, "ids": [_SPECIAL.index(name)], "tokens": [name]}
        for name in ("[CLS]", "[SEP]")
    }
    pair = [*single, sequence("B", 1), special("[SEP]", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def _write_model(folder: Path, embedding: str, config: dict[str, object]) -> None:
    """A configuration, and a safetensors file of the embedding alone: transformers initialises what isn't in it.

    Source of the format: https://github.com/huggingface/safetensors, "Format": the header's length in 8 bytes, the
    header in JSON, the numbers.
    """
    shape = (len(_SPECIAL) + _WORDS, _WIDTH)
    full = {**config, "vocab_size": shape[0], "pad_token_id": _SPECIAL.index("[PAD]")}
    (folder / "config.json").write_text(json.dumps(full), encoding="utf-8")
    numbers = np.random.default_rng(3).normal(0, 0.02, shape).astype(np.float32).tobytes()
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, len(numbers)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, embedding: entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + numbers)
