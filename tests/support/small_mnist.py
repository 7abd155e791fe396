"""A small dataset in MNIST's file format and torchvision's folder layout: scikit-learn's digits, scaled to 28 x 28
pixels."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def small_mnist(folder: Path) -> Path:
    """Write 512 training images and 100 test images to `folder`, and return `folder`."""
    digits = load_digits()
    images = np.kron(digits.images, np.ones((3, 3)))  # [1797, 24, 24]
    images = (np.pad(images, ((0, 0), (2, 2), (2, 2))) * 255 / 16).astype(np.uint8)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(0, 512)), ("t10k", slice(512, 612))):
        chosen, labels = images[part], digits.target[part].astype(np.uint8)
        header = struct.pack(">IIII", 2051, len(chosen), 28, 28)
        for file_type, content in (
            ("images-idx3", header + chosen.tobytes()),
            ("labels-idx1", struct.pack(">II", 2049, len(labels)) + labels.tobytes()),
        ):
            (raw / f"{name}-{file_type}-ubyte").write_bytes(content)
            (raw / f"{name}-{file_type}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder
