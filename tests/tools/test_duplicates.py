"""Test images that are training images, or nearly so, are found by content and by frozen features."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common.config import extensions
from pretrain.data import datasets
from tests.errors import refused
from tools import make_data
from tools.data import overlaps


def write_photos(folder: Path, seeds: range) -> list[Path]:
    """Write images of smooth random colors, which have little in common."""
    folder.mkdir(parents=True)
    for seed in seeds:
        colors = np.random.default_rng(seed).integers(0, 256, (10, 10, 3), np.uint8)
        Image.fromarray(colors).resize((96, 96), Image.Resampling.BICUBIC).save(folder / f"{seed}.png")
    return sorted(folder.iterdir())


def test_copies_are_found_and_other_images_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_photos(tmp_path / "train", range(30))
    test = write_photos(tmp_path / "test", range(100, 120))
    photo = Image.open(train[4])
    variants = {
        "reencoded.jpg": photo,
        "resized.png": photo.resize((50, 60)),
        "flipped.png": photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "cropped.png": photo.crop((3, 3, 93, 93)),
    }
    for name, variant in variants.items():
        variant.save(tmp_path / "test" / name)
    shutil.copy(train[7], tmp_path / "test" / "copy.png")
    boxes = {
        "images": [{"id": n, "file_name": path.name} for n, path in enumerate(train)],
        "annotations": [],
        "categories": [],
    }
    (tmp_path / "train.json").write_text(json.dumps(boxes))
    for name in (f"folder:{tmp_path / 'train'}", f"coco:{tmp_path / 'train.json'}:{tmp_path / 'train'}"):
        output = tmp_path / name.partition(":")[0]
        make_data.main(["duplicates", name, f"folder:{tmp_path / 'test'}", "--output", str(output)])
        content = json.loads((output / "duplicates.json").read_text())
        assert (content["train_images"], content["test_images"]) == (30, len(test) + 5)
        pairs = {Path(pair["test"]).name: pair for pair in content["pairs"]}
        assert pairs.keys() == {*variants, "copy.png"}
        assert content["pairs"][0] == {
            "test": str(tmp_path / "test/copy.png"),
            "train": str(train[7]),
            "similarity": 1.0,
            "overlap": 1.0,
            "equal": True,
        }
        assert {pairs[variant]["train"] for variant in variants} == {str(train[4])}
        assert not any(pairs[variant]["equal"] for variant in variants)
        limits = (content["threshold"], content["overlap_threshold"])
        assert all(pair["similarity"] >= limits[0] or pair["overlap"] >= limits[1] for pair in content["pairs"])
        assert np.asarray(Image.open(output / "duplicates.png")).shape[0] == 2 * 136
        assert "5 of 25 test images" in capsys.readouterr().out


def naive_overlap(test: np.ndarray, train: np.ndarray) -> float:
    """Return the highest correlation of a strip or corner of an image (32, 32) with a window of another one."""
    best = -1.0
    for height, width, corners in (
        (26, 14, [(3, 0), (3, 18)]),
        (14, 26, [(0, 3), (18, 3)]),
        (18, 18, [(0, 0), (0, 14), (14, 0), (14, 14)]),
    ):
        windows = np.lib.stride_tricks.sliding_window_view(train, (height, width)).reshape(-1, height * width)
        for top, left in corners:
            part = test[top : top + height, left : left + width].ravel()
            best = max(best, *(np.corrcoef(part, window)[0, 1] for window in windows))
    return best


def test_overlaps_are_the_highest_correlation_of_a_strip_or_corner() -> None:
    generator = torch.Generator().manual_seed(0)
    train = 20 * torch.randn(3, 1, 32, 32, generator=generator)
    test = 20 * torch.randn(2, 1, 32, 32, generator=generator)
    test[0, :, :, :16] = train[2, :, :, 16:]
    correlation, position = overlaps.find_overlaps(train, test, images=2)
    expected = np.array([[naive_overlap(a[0].numpy(), b[0].numpy()) for b in train] for a in test])
    np.testing.assert_allclose(correlation, expected.max(1), atol=1e-5)
    assert (
        position.tolist() == expected.argmax(1).tolist()
        and position[0] == 2
        and correlation[0] > 0.999 > correlation[1]
    )
    flat, _ = overlaps.find_overlaps(train, torch.ones(1, 1, 32, 32))
    assert flat.tolist() == [0.0]


def test_overlapping_tiles_are_found(tmp_path: Path) -> None:
    """Tiles of 96 pixels share 50% of their pixels with a training tile, or none."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 120, 3), np.uint8)
    photo = Image.fromarray(noise).resize((960, 320), Image.Resampling.BICUBIC)
    corners = {"train": [(96 * n, 0) for n in range(4)], "test": [(240, 0), (144, 3), (600, 0), (700, 200)]}
    for split, tiles in corners.items():
        (tmp_path / split).mkdir()
        for x, y in tiles:
            photo.crop((x, y, x + 96, y + 96)).save(tmp_path / split / f"{x}.png")
    names = [f"folder:{tmp_path / split}" for split in corners]
    make_data.main(["duplicates", *names, "--output", str(tmp_path / "out")])
    pairs = json.loads((tmp_path / "out/duplicates.json").read_text())["pairs"]
    assert sorted(Path(pair["test"]).stem for pair in pairs) == ["144", "240"]
    assert all(pair["similarity"] < 0.9 < pair["overlap"] and not pair["equal"] for pair in pairs)


def test_a_clean_test_set_has_no_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seeds in (("train", range(20)), ("test", range(50, 60))):
        write_photos(tmp_path / name, seeds)
    words = ["duplicates", f"folder:{tmp_path}/train", f"folder:{tmp_path}/test", "--output", str(tmp_path / "out")]
    make_data.main(words)
    assert json.loads((tmp_path / "out/duplicates.json").read_text())["pairs"] == []
    assert not (tmp_path / "out/duplicates.png").exists() and "0 of 10 test images" in capsys.readouterr().out
    make_data.main(words)
    assert "already exists" in capsys.readouterr().out


def test_data_sets_of_an_own_module_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    folder = tmp_path / "set"
    write_photos(folder, range(3))
    (tmp_path / "sets_to_compare.py").write_text(
        "from pretrain.data import datasets\n"
        f"datasets.LOADERS['to_compare'] = lambda split, root: datasets.load('folder:{folder}', split)\n"
    )
    words = ["duplicates", "to_compare", f"folder:{folder}", "--output", str(tmp_path / "out")]
    refused(lambda: make_data.main(words), "unknown data set 'to_compare'")
    make_data.main([*words, "--import", str(tmp_path / "sets_to_compare.py")])
    monkeypatch.delitem(datasets.LOADERS, "to_compare")
    assert len(json.loads((tmp_path / "out/duplicates.json").read_text())["pairs"]) == 3


def test_missing_sets_and_weights_are_named(tmp_path: Path) -> None:
    write_photos(tmp_path / "train", range(3))
    name = f"folder:{tmp_path}/train"
    command = ["duplicates", "--output", str(tmp_path / "out")]
    refused(lambda: make_data.main([*command, name, f"folder:{tmp_path}/gone"]), "gone")
    refused(lambda: make_data.main([*command, f"coco:{tmp_path}/a.json:{tmp_path}/train", name]), "a.json")
    refused(lambda: make_data.main([*command, name, name, "--weights", str(tmp_path / "w.pth")]), "w.pth")
    (tmp_path / "train" / "0.png").write_bytes(b"no image")
    refused(lambda: make_data.main([*command, name, name]), "0.png")
    assert not (tmp_path / "out").exists()
