"""Random datasets and models in the formats that the scripts in `public_scripts.py` read.

Each function writes to the folder in which a script runs. Every call writes the same contents.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image

_WORDS = ("the", "a", "price", "share", "company", "rose", "fell", "said", "new", "old")
_SNAPSHOT = "0" * 40


def write_image_folders(folder: Path) -> None:
    """Write training and validation images of two classes in the layout of ImageFolder."""
    for split, count in (("train", 4), ("val", 2)):
        for label in ("cat", "dog"):
            _write_images(folder / "data" / split / label, label, count)


def write_images_and_autoencoder(folder: Path) -> None:
    """Write training images, and a small autoencoder to the path that DiT passes as the autoencoder's name."""
    from diffusers.models import AutoencoderKL

    write_image_folders(folder)
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
    ).save_pretrained(folder / "stabilityai" / "sd-vae-ft-ema")


def write_pets(folder: Path) -> None:
    """Write images whose names contain their labels, and a ResNet to the Hugging Face cache."""
    from safetensors.torch import save_file
    from timm import create_model

    for label in ("cat", "dog"):
        _write_images(folder / "data", label, 5)
    repository = folder / "huggingface" / "hub" / "models--timm--resnet50d.ra2_in1k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(_SNAPSHOT)
    (repository / "snapshots" / _SNAPSHOT).mkdir(parents=True)
    torch.manual_seed(0)
    save_file(create_model("resnet50d").state_dict(), repository / "snapshots" / _SNAPSHOT / "model.safetensors")


def _write_images(folder: Path, label: str, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(len(label) + ord(label[0]))
    for index in range(count):
        Image.fromarray(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(folder / f"{label}_{index}.jpg")


def write_mnist(folder: Path) -> None:
    """Write random images in the file format of MNIST."""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for split, count in (("train", 64), ("t10k", 32)):
        images = generator.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            magic = 0x800 + values.ndim
            header = np.array([magic, *values.shape], dtype=">i4")
            (raw / f"{split}-{name}-ubyte").write_bytes(header.tobytes() + values.tobytes())


def write_fabric_mnist(folder: Path) -> None:
    """Write random images to the folder that Fabric's example expects."""
    write_mnist(folder)
    shutil.move(folder / "data", folder / "Datasets")


def write_text(folder: Path) -> None:
    """Write random characters in place of nanoGPT's dataset shakespeare_char."""
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        generator.integers(0, 65, 1000, dtype=np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def write_sentence_pairs(folder: Path) -> None:
    """Write random sentences in place of GLUE's MRPC dataset, and a small BERT. Copy the GLUE metric to the path
    from which the script loads it."""
    from transformers import BertConfig, BertForSequenceClassification

    data = folder / "nyu-mll" / "glue"
    (data / "mrpc").mkdir(parents=True)
    splits = {"train": 96, "validation": 16}
    files = "".join(f"  - split: {split}\n    path: mrpc/{split}.jsonl\n" for split in splits)
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    generator = np.random.default_rng(0)
    for split, count in splits.items():
        rows = [
            {
                "sentence1": " ".join(generator.choice(_WORDS, 6)),
                "sentence2": " ".join(generator.choice(_WORDS, 8)),
                "label": int(generator.integers(2)),
                "idx": index,
            }
            for index in range(count)
        ]
        (data / "mrpc" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = folder / "bert-base-cased"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig(
            vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
    ).save_pretrained(model)
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    shutil.copytree(folder / "metrics" / "glue", folder / "glue")
