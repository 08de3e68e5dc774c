"""A COCO file is split by image, with every box and every field, and equal proportions of the classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.errors import refused
from tests.tools import coco_file
from tools import make_data
from tools.data.split import stratify

# Class 1 on every image but each tenth, which has no box; 5 on a fifth, 9 on two images only.
CLASSES = [[1] * (n % 10 > 0) + [5] * (n % 5 == 1) + [9] * (n in (3, 50)) for n in range(100)]


@pytest.mark.parametrize(("val", "count"), [("0.2", 20), ("20", 20), ("0.5", 50), ("1", 1), ("99", 99)])
def test_every_record_is_in_one_part(tmp_path: Path, val: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = coco_file.write(tmp_path / "all.json", CLASSES)
    make_data.main(["split", str(tmp_path / "all.json"), "--output", str(tmp_path / "out"), "--val", val])
    train = json.loads((tmp_path / "out/train.json").read_text())
    held_out = json.loads((tmp_path / "out/val.json").read_text())
    assert len(held_out["images"]) == count
    for section in ("images", "annotations"):
        assert sorted(train[section] + held_out[section], key=lambda record: record["id"]) == whole[section]
    for part in (train, held_out):
        assert {box["image_id"] for box in part["annotations"]} <= {image["id"] for image in part["images"]}
        assert (part["info"], part["categories"]) == (whole["info"], whole["categories"])
    total, *parts = (len(content["annotations"]) for content in (whole, train, held_out))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all", "boxes", str(total), *map(str, parts)] in rows and sum(parts) == total
    if count == 20:
        counts = {label: sum(box["category_id"] == label for box in held_out["annotations"]) for label in (1, 5, 9)}
        assert counts == {1: 18, 5: 4, 9: 0}  # of 90, 20 and 2


@pytest.mark.parametrize("seed", range(5))
def test_classes_are_nearer_to_their_share_than_in_a_random_draw(seed: int) -> None:
    rng = np.random.default_rng(seed)
    has_NC = rng.random((500, 12)) < np.geomspace(0.5, 0.01, 12)
    classes_of: dict[Any, set[int]] = {n: set(np.flatnonzero(row).tolist()) for n, row in enumerate(has_NC)}
    chosen = stratify(classes_of, 100, seed)
    assert len(chosen) == 100 and chosen == stratify(classes_of, 100, seed) != stratify(classes_of, 100, seed + 1)

    def error(part: list[int]) -> float:
        return float(np.abs(has_NC[part].sum(0) - has_NC.sum(0) / 5).max())

    drawn = np.mean([error(rng.permutation(500)[:100].tolist()) for _ in range(20)])
    assert error(list(chosen)) <= 1.5 < 4 < drawn


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--val", "0"], "--val must be at least 1 for split, got 0"),
        (["--val", "100"], "--val 100 of 100 images"),
        (["--val", "0.001"], "--val 0.001 of 100 images"),
        (["--images", "nowhere"], "nowhere/0.png"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, words: list[str], named: str) -> None:
    content = coco_file.write(tmp_path / "all.json", CLASSES)
    command = ["split", str(tmp_path / "all.json"), "--output", str(tmp_path / "out")]
    refused(lambda: make_data.main([*command, *words]), named)
    content["annotations"][7]["image_id"] = 1
    (tmp_path / "all.json").write_text(json.dumps(content))
    refused(lambda: make_data.main(command), "annotation 7: unknown image 1")
    content["annotations"] = [{**box, "image_id": 0, "bbox": [4, 4, 8, 8]} for box in content["annotations"]]
    (tmp_path / "all.json").write_text(json.dumps(content))
    refused(lambda: make_data.main(command), "look like [x0, y0, x1, y1]")
    assert not (tmp_path / "out").exists()
