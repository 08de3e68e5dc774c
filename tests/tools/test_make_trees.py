"""Tree crowns: no pixel of the test region is in the training set; a crown is an object where half of it is visible."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.common.files import sha256
from tests.errors import refused
from tools import make_data
from tools.data import trees

COLORS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]  # of the five regions


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def voc(*boxes: tuple[int, int, int, int]) -> str:
    keys = ("xmin", "ymin", "xmax", "ymax")
    objects = ["".join(f"<{key}>{value}</{key}>" for key, value in zip(keys, box, strict=True)) for box in boxes]
    return f"<annotation>{''.join(f'<object><bndbox>{box}</bndbox></object>' for box in objects)}</annotation>"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_wheel(tmp_path / "deepforest.whl", monkeypatch)


def write_wheel(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a wheel of five small regions and three plots, which `make_data.py trees` then takes for the real one."""
    tile = np.zeros((400, 400, 3), np.uint8)
    for number, (y, x) in enumerate(((0, 0), (0, 200), (200, 0), (200, 200))):
        tile[y : y + 200, x : x + 200] = COLORS[number]
    content = {
        # In region 0, at the border of its only window with a quarter in it; and over the border of regions 0 and 1.
        trees._LARGE: (tile, voc((11, 21, 30, 60), (121, 1, 160, 10), (191, 101, 230, 110))),
        trees._SMALL: (np.full((200, 200, 3), COLORS[4], np.uint8), voc((1, 1, 20, 20))),
        "OSBS_029": (np.full((128, 128, 3), 90, np.uint8), voc((5, 5, 24, 24))),
        "SOAP_061": (np.full((128, 128, 3), 90, np.uint8), voc((5, 5, 24, 24))),
        "SOAP_031": (np.full((128, 128, 3), 90, np.uint8), ""),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, (pixels, boxes) in content.items():
            archive.writestr(f"deepforest/data/{name}.png", png(pixels))
            archive.writestr(f"deepforest/data/{name}.xml", boxes)
    monkeypatch.setattr(trees, "_SHA256", sha256(path))
    monkeypatch.setattr(trees, "_WINDOW", 128)
    monkeypatch.setattr(trees, "_PATCH", 64)
    return path


def make(wheel: Path, region: int) -> Path:
    output = wheel.parent / f"trees_{region}"
    make_data.main(["trees", "--output", str(output), "--test-region", str(region), "--wheel", str(wheel)])
    return output


def find_regions(folder: Path) -> set[int]:
    """Return the regions whose color is in an image of the folder."""
    images = [np.asarray(Image.open(path)).reshape(-1, 3) for path in folder.glob("*.jpg")]
    near = [[np.abs(image - np.array(color, np.int16)).max(1).min() < 30 for color in COLORS] for image in images]
    return set(np.flatnonzero(np.any(near, 0)).tolist())


@pytest.mark.parametrize("region", [0, 4])
def test_no_pixel_of_the_test_region_is_in_the_training_set(wheel: Path, region: int):
    folder = make(wheel, region)
    assert find_regions(folder / "coco/val") == {region}
    assert find_regions(folder / "coco/train") == find_regions(folder / "images/train") == set(range(5)) - {region}


def test_a_crown_is_an_object_where_at_least_half_of_it_is_visible(wheel: Path):
    folder = make(wheel, 0)
    annotations = json.loads((folder / "coco/annotations/instances_val.json").read_text())["annotations"]
    assert [(record["bbox"], record["area"], record["iscrowd"]) for record in annotations] == [
        ([10.0, 20.0, 20.0, 40.0], 800.0, 0),
        ([120.0, 0.0, 8.0, 10.0], 80.0, 1),  # 8 of its 40 pixels; the third crown lies outside the window
    ]
    train = json.loads((folder / "coco/annotations/instances_train.json").read_text())
    assert len(train["images"]) == 6  # three quadrants, the second tile and two plots; the third plot has no boxes
    crossing = next(record for record in train["annotations"] if record["bbox"][1] == 100.0)
    assert (crossing["bbox"], crossing["iscrowd"]) == ([0.0, 100.0, 30.0, 10.0], 0)  # 30 of its 40 pixels


def test_another_file_is_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trees, "_SHA256", "0" * 64)
    refused(lambda: make(wheel, 0), "is not the wheel of deepforest==2.1.0")
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
