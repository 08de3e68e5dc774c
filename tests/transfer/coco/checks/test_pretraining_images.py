"""Test images that the backbone was pretrained on are counted."""

import logging
import shutil
from pathlib import Path

import pytest

from pretrain.common.weights.provenance import Provenance
from tests.transfer import tiny_coco
from transfer.coco.checks.pretraining_images import list_pretraining_folders
from transfer.coco.data import DataSets, warn_of_pretraining_images


def describe(train: str) -> str:
    return f"DATA:\n  TRAIN: {train!r}\n"


def test_the_folders_of_a_chain_of_weights_are_listed(tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    for folder in (a, b, c):
        Path(folder).mkdir()
    several = Provenance(config=describe(f"['folder:{b}', 'tar:/x.tar', 'folder:{a}', 'folder:{tmp_path}/none']"))
    chain = Provenance(config=describe(f"folder:{c}"), earlier=Provenance(config="- not ours", earlier=several))
    assert list_pretraining_folders(chain) == [c, b, a]
    (tmp_path / "b/train2017").mkdir()
    (tmp_path / "b/val2017").mkdir()  # which was not pretrained on
    assert list_pretraining_folders(chain) == [c, f"{b}/train2017", a]
    assert list_pretraining_folders(Provenance()) == list_pretraining_folders(None) == []


def test_test_images_among_the_images_of_pretraining_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = tiny_coco.write(tmp_path / "test")
    test_images = sorted(Path(name.split(":")[2]).glob("*.png"))
    photos = tmp_path / "photos" / "camera"
    photos.mkdir(parents=True)
    shutil.copy(test_images[0], photos / "copy.png")
    (photos / "other.png").write_bytes(test_images[1].read_bytes() + b" ")
    cfg = tiny_coco.config(tmp_path / "out", name, DATASETS__TEST=(name,))
    data_sets = DataSets(cfg, [name])
    data_sets.check(tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        warn_of_pretraining_images([data_sets[name]], Provenance(config=describe(f"folder:{tmp_path}/photos")))
    [line] = caplog.messages
    assert f"1 of {len(test_images)} test images" in line and str(photos / "copy.png") in line
    caplog.clear()
    warn_of_pretraining_images([data_sets[name]], None)
    assert not caplog.messages
