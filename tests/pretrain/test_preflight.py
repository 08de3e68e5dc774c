"""What is checked before a device is taken."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pretrain import preflight
from pretrain.common.errors import UserError
from pretrain.config import load_config
from pretrain.data import datasets, folders

SMALL = ["SOLVER.MAX_STEPS", "2", "SOLVER.IMS_PER_BATCH", "16", "VIEWS.IMAGE_SIZE", "16", "DATALOADER.NUM_WORKERS", "0"]


def test_a_probes_batch_above_the_labeled_images_is_refused(images: Path) -> None:
    words = ["DATA.TRAIN", f"folder:{images}", "LINEAR.IMS_PER_BATCH"]
    preflight.refuse_missing_data(load_config(None, [*words, "48"]), "linear", weights=True)
    with pytest.raises(UserError, match=r"LINEAR.IMS_PER_BATCH is 49, above the 48 labeled images; lower it"):
        preflight.refuse_missing_data(load_config(None, [*words, "49"]), "linear", weights=True)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize("place", ["class0/000.png", "class1/023.png"])
def test_the_first_and_the_last_image_are_decoded(images: Path, tmp_path: Path, place: str) -> None:
    data = shutil.copytree(images, tmp_path / "data")
    cfg = load_config(None, ["DATA.TRAIN", f"folder:{data}"])
    preflight.refuse_missing_data(cfg, "pretrain", weights=True)
    damage(data / "train" / place)
    with pytest.raises(UserError, match=f"cannot decode image .*train/{place}"):
        preflight.refuse_missing_data(cfg, "pretrain", weights=True)
    cfg = load_config(None, ["DATA.TRAIN", f"folder:{data}", "DATALOADER.ON_CORRUPT", "skip"])
    preflight.refuse_missing_data(cfg, "pretrain", weights=True)
    cfg = load_config(None, ["DATA.TRAIN", f"folder:{data}/val", "DATA.VAL", f"folder:{data}/train"])
    with pytest.raises(UserError, match=f"cannot decode image .*train/{place}"):
        preflight.refuse_missing_data(cfg, "pretrain", weights=True)


@pytest.mark.parametrize(
    "words, processes, problem",
    [
        ("SOLVER.IMS_PER_BATCH 48", 1, ""),
        ("SOLVER.IMS_PER_BATCH 49", 1, "IMS_PER_BATCH is 49, but folder:.* holds only 48 images; .* at most 48"),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 4, ""),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 4", 3, "BN_GROUPS is 4; it must be a multiple of 3 processes"),
        ("SOLVER.IMS_PER_BATCH 8 MODEL.BN_GROUPS 2 SOLVER.ACCUMULATE 4", 1, "multiple of 1 process x SOLVER.ACCUM"),
        ("SOLVER.IMS_PER_BATCH 3", 4, "IMS_PER_BATCH is 3, fewer images than the 4 processes"),
    ],
)
def test_a_batch_that_cannot_be_had(words: str, processes: int, problem: str, images: Path) -> None:
    cfg = load_config(None, ["DATA.TRAIN", f"folder:{images}", *words.split()])
    with pytest.raises(UserError, match=problem) if problem else contextlib.nullcontext():
        preflight.refuse_indivisible(cfg, processes, data=True)


def test_images_are_counted_without_listing_more_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/1.png", "a/2.png", "b/3.png", "c/4.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed: list[Any] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    assert datasets.count_up_to(3, f"folder:{tmp_path}", "train") == 3 and "c" not in listed
    assert datasets.count_up_to(9, f"folder:{tmp_path}", "train") == 4
    (tmp_path / "5.png").touch()
    assert datasets.count_up_to(9, f"folder:{tmp_path}", "train") == 5


def test_the_ends_are_those_of_the_whole_list_and_few_folders_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/x.jpg", "b/1.png", "b/z/2.png", "empty/notes.txt", "c/d/9.jpg", "e/.hidden.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    every = list(folders._images_below(tmp_path))
    listed: list[Any] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    assert folders.ends(tmp_path) == [tmp_path / every[0], tmp_path / every[-1]]
    assert "b" not in listed and {"a", "c"} < set(listed)
    (tmp_path / "flat.png").touch()
    (tmp_path / "fleet.png").touch()
    assert [path.name for path in folders.ends(tmp_path)] == ["flat.png", "fleet.png"]


def test_imagenet_and_sets_of_other_kinds(tmp_path: Path) -> None:
    for name in ("imagenet/train/n1/a.JPEG", "imagenet/train/n2/b.JPEG"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("no image")
    with pytest.raises(UserError, match=r"cannot decode image .*n1/a\.JPEG"):
        datasets.refuse_unreadable("imagenet", "train", tmp_path)
    with pytest.raises(datasets.MissingSplit):
        datasets.refuse_unreadable("imagenet", "val", tmp_path)
    datasets.refuse_unreadable("cifar10", "train", tmp_path)  # checked as it loads
