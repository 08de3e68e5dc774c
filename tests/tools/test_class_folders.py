"""Images in class folders become train and val, as links that the probes read."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data import datasets
from tests.errors import refused
from tools import make_data


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label, count in (("cat", 20), ("dog", 10)):
        for number in range(count):
            file = tmp_path / f"my photos/{label}/sub/{number:03d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(f"{label} {number}".encode())
    return tmp_path / "my photos"


def test_every_image_is_in_one_split_in_proportion(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = photos.parent / "datasets/photos"
    make_data.main(["split", str(photos), "--output", str(output), "--val", "0.3"])
    counts = {split: datasets.load(f"folder:{output}", split) for split in ("train", "val")}
    assert {split: np.bincount(data.labels).tolist() for split, data in counts.items() if data.labels is not None} == {
        "train": [14, 7],
        "val": [6, 3],
    }
    links = [path for split in ("train", "val") for path in (output / split).rglob("*.jpg")]
    content = {path.read_bytes() for path in photos.rglob("*.jpg")}
    assert len(links) == 30 and {path.read_bytes() for path in links} == content
    assert ["cat", "20", "14", "6"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    make_data.main(["split", str(photos), "--output", str(output), "--val", "0.3"])
    assert capsys.readouterr().out == f"{output} already exists\n"
    (photos / "dog/new.jpg").write_bytes(b"new")
    refused(lambda: make_data.main(["split", str(photos), "--output", str(output), "--val", "0.3"]), "differ in images")


def test_groups_stay_together(photos: Path) -> None:
    output = photos.parent / "split"
    make_data.main(["split", str(photos), "--output", str(output), "--val", "0.5", "--group-by", r"/(\d\d)\d\.jpg"])
    groups = [{path.name[:2] for path in (output / split).rglob("*.jpg")} for split in ("train", "val")]
    assert groups[0] | groups[1] == {"00", "01"} and not groups[0] & groups[1]


def test_a_folder_that_cannot_be_split_is_refused(photos: Path) -> None:
    output = str(photos.parent / "split")
    refused(
        lambda: make_data.main(["split", str(photos / "cat"), "--output", output]), "one folder of images per class"
    )
    refused(lambda: make_data.main(["split", str(photos), "--output", output, "--images", "x"]), "--images", "omit it")
    refused(lambda: make_data.main(["split", str(photos), "--output", output, "--val", "30"]), "--val 30 of 30 images")
    (photos / "cat").rename(photos / "train")
    (photos / "dog").rename(photos / "val")
    refused(lambda: make_data.main(["split", str(photos), "--output", output]), "splits already")
    assert not (photos.parent / "split").exists()


def test_a_split_in_the_folder_of_the_images_is_refused(photos: Path) -> None:
    """Its links would be images of the folder, and so would the picture of duplicates."""
    words = ["split", str(photos), "--output", str(photos / "splits")]
    refused(lambda: make_data.main(words), "--output", f"inside folder:{photos}")
    name = f"folder:{photos}"
    words = ["duplicates", name, "folder:other", "--output", str(photos / "duplicates")]
    refused(lambda: make_data.main(words), "--output", f"inside {name}")


def test_classes_that_groups_confine_to_one_split_are_named(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Probes refuse a class that only val has."""
    words = ["split", str(photos), "--output", str(photos.parent / "split"), "--val", "0.3"]
    make_data.main([*words, "--group-by", "^(dog|cat/sub/[0-9]+)"])
    assert "has these classes, each of which occurs in one group: dog (dog)" in caplog.text
