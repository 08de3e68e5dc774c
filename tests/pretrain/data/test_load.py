"""A data set that is missing is reported with the layout expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from pretrain.data.datasets import load


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        (
            "folder:{}/none",
            "train",
            "no image folder at .*/none; expected images in it, or one folder of images per class",
        ),
        ("folder:{}", "train", "no images in .*; expected files ending in .jpg"),
        ("folder:{}", "unlabelled", "has no split 'unlabelled'; choose train or val"),
        ("imagenet", "train", r"no ImageNet at .*/imagenet/train; expected .*/imagenet/train/n########/\*.JPEG"),
        ("imagenet100", "val", "no ImageNet at .*/imagenet/val"),
        ("cifar10", "train", "cannot read cifar10: expected .*/cifar-10-batches-py/.*; set DATA.DOWNLOAD True"),
        ("cifar100", "val", "cannot read cifar100: expected .*/cifar-100-python/"),
        ("fashion_mnist", "val", "cannot read fashion_mnist: expected .*/FashionMNIST/raw/"),
        ("stl10", "train", "cannot read stl10: expected .*/stl10_binary/"),
        ("tiny_imagenet", "val", "cannot read tiny_imagenet: expected .*/tiny-imagenet-200/"),
        (".", "train", "'.' is a folder; write folder:."),
        ("cifra10", "train", "unknown data set 'cifra10'; .*did you mean 'cifar10'"),
        ("cifar10", "test", "no split 'test'; choose train or val"),
    ],
)
def test_what_is_missing_is_reported(tmp_path: Path, name: str, split: str, said: str):
    with pytest.raises(UserError, match=said):
        load(name.format(tmp_path), split, tmp_path)
