"""Figures of predictions next to the ground truth."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.transfer import tiny_coco
from transfer.coco import visualize
from transfer.coco.reading import read_annotations


def predictions_of(content) -> list[dict]:
    return [{k: v for k, v in a.items() if k not in ("id", "iscrowd")} | {"score": 0.9} for a in content["annotations"]]


def read(path: Path) -> np.ndarray:
    pixels: Any = cv2.imread(str(path))
    return pixels.astype(int)


@pytest.mark.parametrize("kind", ["polygons", "rle", "keypoints"])
def test_equal_predictions_and_truth_look_the_same(tmp_path, kind):
    content = read_annotations(tiny_coco.write(tmp_path, kind == "keypoints", kind == "rle").split(":")[1])
    visualize.draw(content, tmp_path, predictions_of(content), tmp_path / "out", count=6)
    written = sorted((tmp_path / "out").iterdir())
    assert [p.name for p in written] == [f"{i}.png" for i in range(1, 7)]
    for figure, limit in ((written[0], 8), (written[5], 4)):  # two objects, whose labels differ by the score; none
        canvas = read(figure)
        half = canvas.shape[1] // 2
        assert np.abs(canvas[40:, : half - 4] - canvas[40:, half : 2 * half - 4]).mean() < limit
        image = read(tmp_path / figure.name).astype(np.uint8)
        plain = cv2.resize(image, (half - 4, 480), interpolation=cv2.INTER_CUBIC)
        difference = np.abs(canvas[28 + 110 :, : half - 4] - plain[110:].astype(int)).mean()  # below the labels
        assert (difference > 3) == (figure is written[0])


def draw_truth(folder: Path, content: dict[str, Any]) -> np.ndarray:
    """Draw the truth of the first image."""
    visualize.draw(content, folder, [], folder / "out", count=1)
    return read(folder / "out" / "1.png")


def test_an_object_without_an_outline_is_drawn_as_a_box(tmp_path):
    content = read_annotations(tiny_coco.write(tmp_path).split(":")[1])
    figures = []
    for segmentation in (None, [[]], [[5, 5, 9, 9]]):
        for record in content["annotations"]:
            record["segmentation"] = segmentation
        figures.append(draw_truth(tmp_path, content))
    assert (figures[0] == figures[1]).all() and (figures[0] == figures[2]).all()


def test_a_skeleton_may_have_names_and_what_is_no_pair(tmp_path):
    content = read_annotations(tiny_coco.write(tmp_path, keypoints=True).split(":")[1])
    by_numbers = draw_truth(tmp_path, content)
    content["categories"][0]["skeleton"] = [["nose", "left_eye"], 3, [0, 1], [1.0, 2.0], [1, 99]]
    assert (draw_truth(tmp_path, content) == by_numbers).all()


def test_detectors_stand_beside_the_truth_in_panels_of_one_size(tmp_path):
    content = read_annotations(tiny_coco.write(tmp_path).split(":")[1])
    (first,) = [image for image in content["images"] if image["id"] == 1]
    second = dict(first, id=99)  # the same photo without an object
    truth = predictions_of(content)
    columns = {"all": truth, "none": [], "weak": [p | {"score": 0.1} for p in truth]}
    out = tmp_path / "out.png"
    visualize.draw_comparison(content, [first, second], tmp_path, columns, out)
    canvas = read(out)
    side, title, gap = 360, 28, 4
    assert canvas.shape == (2 * (side + title), 4 * (side + gap), 3)

    def panel(row, column):
        top = row * (side + title) + title
        left = column * (side + gap)
        return canvas[top : top + round(side * first["height"] / first["width"]), left : left + side]

    plain = panel(1, 0)
    drawn = [np.abs(panel(0, column) - plain).sum(axis=2) > 60 for column in range(4)]
    assert not any(np.abs(panel(1, column) - plain).any() for column in range(4))
    assert not drawn[2].any(), "no prediction, nothing drawn"
    scale = side / first["width"]
    boxes = [record["bbox"] for record in truth if record["image_id"] == 1]
    for column, shown in ((0, boxes), (1, boxes), (3, boxes[:1])):  # of weak predictions, only the best is shown
        for box in boxes:
            x, y, w, h = (round(value * scale) for value in box)
            edge = drawn[column][y + h - 4 : y + h + 4, x + 4 : x + w - 4].any(axis=0).mean()
            assert (edge > 0.9) == (box in shown), (column, box)


def test_a_figure_keeps_its_images_name_and_stays_in_its_folder() -> None:
    """Where two images would have one figure, the one that keeps its name is first, wherever it is in the list."""
    names = {"a.jpg": "a.jpg", "b/c.PNG": "b/c.PNG", "c.tif": "c.tif.jpg", "/data/d.jpg": "data/d.jpg", "../e": "e.jpg"}
    names |= {"a.bmp": "a.bmp_3.jpg", "a.bmp_2.jpg": "a.bmp_2.jpg", "a.bmp.jpg": "a.bmp.jpg"}
    names |= {"../e": "e_2.jpg", "e.jpg": "e.jpg", "data/d.jpg": "data/d_2.jpg"}
    assert {name: str(path) for name, path in visualize.name_figures("out", list(names)).items()} == {
        name: f"out/{path}" for name, path in names.items()
    }


def test_a_class_has_one_color_and_labels_lie_within_the_image(tmp_path) -> None:
    Image.new("RGB", (640, 480)).save(tmp_path / "black.png")
    boxes = {1: [[20, 60, 100, 100], [520, 200, 118, 100]], 2: [[300, 5, 100, 100]]}
    items = [{"category_id": c, "bbox": box, "score": 0.9} for c in boxes for box in boxes[c]]
    categories = [{"id": 1, "name": "a long class name"}, {"id": 2, "name": "b"}]
    visualize.draw_predictions(tmp_path / "black.png", items, categories, 0.5, tmp_path / "out.png")
    pixels = read(tmp_path / "out.png")
    edges = [tuple(pixels[y + 50, x]) for x, y, *_ in (boxes[1] + boxes[2])]
    assert edges[0] == edges[1] != edges[2] and min(map(sum, edges)) > 300
    text = [pixels[y - 18 : y, x:] for x, y in ((20, 60), (640 - 180, 200))]  # the second is moved to the left
    assert all((area.sum(axis=2) > 300).any(axis=0).sum() > 150 for area in text)


@pytest.mark.parametrize(("size", "drawn"), [((3000, 2), (3, 4096, 3)), ((66_000, 4), (4, 66_000, 3))])
def test_a_thin_image_is_not_enlarged_beyond_measure(tmp_path, size, drawn):
    """One with a side that JPEG does not allow is drawn, too."""
    Image.new("RGB", size).save(tmp_path / "thin.tif")
    visualize.draw_predictions(tmp_path / "thin.tif", [], [], 0.5, tmp_path / "thin.tif.jpg")
    assert read(tmp_path / "thin.tif.jpg").shape == drawn
