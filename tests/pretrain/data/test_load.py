"""A data set that is missing is reported with the layout expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.data.datasets import load
from tests.errors import refused


@pytest.mark.parametrize(
    ("name", "split", "named"),
    [
        ("folder:{}/none", "train", "/none"), ("folder:{}", "train", ".jpg"),
        ("imagenet", "train", "/imagenet/train/n########"), ("imagenet100", "val", "/imagenet/val"),
        ("cifar10", "train", "/cifar-10-batches-py"), ("cifar100", "val", "/cifar-100-python"),
        ("fashion_mnist", "val", "/FashionMNIST/raw"), ("stl10", "train", "/stl10_binary"),
        ("tiny_imagenet", "val", "/tiny-imagenet-200"), (".", "train", "folder:."), ("cifra10", "train", "'cifar10'"),
        ("cifar10", "test", "'test'"),
    ],
)  # fmt: skip
def test_what_is_missing_is_reported(tmp_path: Path, name: str, split: str, named: str):
    refused(lambda: load(name.format(tmp_path), split, tmp_path), named)
