"""ImageNet's three tars, as they are downloaded, and the same files unpacked."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets.imagenet as torchvision_imagenet
from scipy.io import savemat

from pretrain.data.datasets import load
from pretrain.data.image_data import MissingSplit
from tests.errors import refused
from tests.pretrain.data.test_tars import assert_same, cache, pack  # noqa: F401  (cache: a fixture for every test)
from tests.pretrain.images import write_folder


def write_imagenet(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the three tars of ImageNet with two classes, and the same files unpacked in ``root``/unpacked."""
    images = ["n00000001/n00000001_2.JPEG", "n00000001/n00000001_10.JPEG", "n00000002/n00000002_1.JPEG"]
    folder = write_folder(root / "unpacked/imagenet/train", images)
    inner = [
        pack(root / f"{name}.tar", folder / name, sorted(os.listdir(folder / name)))
        for name in ("n00000002", "n00000001")
    ]
    pack(root / "packed/imagenet/ILSVRC2012_img_train.tar", root, [path.name for path in inner])
    val = write_folder(root / "flat", [f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 3)])
    pack(root / "packed/imagenet/ILSVRC2012_img_val.tar", val, sorted(os.listdir(val)))
    for number, name in enumerate(("n00000002", "n00000001", "n00000002"), 1):
        target = root / "unpacked/imagenet/val" / name / f"ILSVRC2012_val_0000000{number}.JPEG"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((val / target.name).read_bytes())
    devkit = root / "ILSVRC2012_devkit_t12/data"
    devkit.mkdir(parents=True)
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "i4")]
    synsets = np.array(
        [(1, "n00000002", "b", "", 0), (2, "n00000001", "a", "", 0), (3, "n00000000", "all", "", 2)], kinds
    )
    savemat(devkit / "meta.mat", {"synsets": synsets})
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n1\n")
    with tarfile.open(root / "packed/imagenet/ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        archive.add(devkit.parent, devkit.parent.name)
    monkeypatch.setitem(torchvision_imagenet.ARCHIVE_META, "devkit", ("ILSVRC2012_devkit_t12.tar.gz", None))
    return root


def test_imagenets_tars_equal_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = write_imagenet(tmp_path, monkeypatch)
    for split in ("train", "val"):
        assert_same(load("imagenet", split, root / "packed"), load("imagenet", split, root / "unpacked"))
    refused(lambda: load("imagenet100", "train", root / "packed"), "n01558993")
    devkit = root / "packed/imagenet/ILSVRC2012_devkit_t12.tar.gz"
    devkit.write_bytes(b"damaged")
    refused(lambda: load("imagenet", "val", root / "packed"), devkit, "damaged")
    devkit.unlink()
    with pytest.raises(MissingSplit, match=r"devkit_t12.*is missing.*image-net"):  # pretraining works without kNN
        load("imagenet", "val", root / "packed")
    (root / "packed/imagenet/ILSVRC2012_img_val.tar").unlink()
    with pytest.raises(MissingSplit, match=r"no ILSVRC2012_img_val\.tar"):
        load("imagenet", "val", root / "packed")
    pack(root / "packed/imagenet/ILSVRC2012_img_train.tar", root / "flat", ["ILSVRC2012_val_00000001.JPEG"])
    refused(lambda: load("imagenet", "train", root / "packed"), "img_train.tar", "ImageNet's")
