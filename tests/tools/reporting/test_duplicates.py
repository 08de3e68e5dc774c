"""The report scores detectors without test images that are nearly training images, by a table about the same images."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.tools.reporting.runs import column, detector, render, write
from tests.transfer import tiny_coco
from tools import make_data, report
from tools.reporting.runs import DetectorScore
from transfer.coco import data, results
from transfer.coco.names import locate_data_set

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def write_sets(folder: Path) -> tuple[str, str]:
    """Write a training set, and a test set whose images 4 to 6 are the training set's; return their names."""
    train = tiny_coco.write(folder / "train")
    test = tiny_coco.write(folder / "test")
    for number in (1, 2, 3):
        path = folder / "test" / f"{number}.png"
        shape = np.asarray(Image.open(path)).shape
        Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, np.uint8)).save(path)
    return train, test


def write_run(folder: Path, train: tuple[str, ...], test: str) -> dict[str, Any]:
    """Write a run with a perfect prediction for each object but the first; return the annotations of its test set."""
    overrides = ["DATASETS.TRAIN", str(train), "DATASETS.TEST", str((test,)), "OUTPUT_DIR", str(folder)]
    cfg = tiny_coco.config(folder, test, DATASETS__TRAIN=train)
    tiny_coco.check_data_sets(cfg, [*train, test])
    content = data.read_checked(locate_data_set(test), folder).content
    names = ("image_id", "category_id", "bbox")
    objects = [record for record in content["annotations"] if not record["iscrowd"]]
    predictions: list[Any] = [{**{name: record[name] for name in names}, "score": 0.9} for record in objects[1:]]
    file = folder / results.predictions_file(test)
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(predictions))
    metrics = results.evaluate(content, predictions, ["bbox"])
    change = {"datasets": {test: metrics}, "predictions": {test: results.predictions_file(test)}}
    write(folder, detector(*overrides, leaf="coco_R50_FPN_1x", **change))
    return content


def test_scores_without_duplicates_are_those_of_a_test_set_without_them(tmp_path: Path) -> None:
    train, test = write_sets(tmp_path)
    content = write_run(tmp_path / "runs/a", (train,), test)
    assert "without duplicates" not in render([tmp_path / "runs"])
    make_data.main(["duplicates", train, test, "--output", str(tmp_path / "runs/duplicates")])
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    text = render([tmp_path / "moved"])
    assert (
        f"3 of 6 test images are nearly equal to images of {train} ({tmp_path}/moved/duplicates/duplicates.json)"
        in text
    )
    rest = {**content, "images": content["images"][:3]}
    rest["annotations"] = [record for record in content["annotations"] if record["image_id"] <= 3]
    (score,) = report.build_report([tmp_path / "moved"]).scores
    assert isinstance(score, DetectorScore)
    predictions = json.loads((score.folder / score.predictions).read_text())
    expected = results.evaluate(rest, [record for record in predictions if record["image_id"] <= 3], ["bbox"])
    assert score.clean and score.clean.metrics == {f"bbox/{name}": value for name, value in expected["bbox"].items()}
    assert column(text, "a", "box AP without duplicates") == f"{expected['bbox']['AP']:.1f}"
    assert float(column(text, "a", "box AP")) > float(column(text, "a", "box AP without duplicates")) > 0


def test_a_table_is_used_for_runs_on_the_same_images_only(tmp_path: Path) -> None:
    train, test = write_sets(tmp_path)
    table = tmp_path / "duplicates/duplicates.json"
    make_data.main(["duplicates", train, test, "--output", str(table.parent)])
    write_run(tmp_path / "a", (train,), test)
    (tmp_path / "test/1.png").write_bytes((tmp_path / "test/1.png").read_bytes() + b" ")
    write_run(tmp_path / "exported_again", (train,), test)
    write_run(tmp_path / "trained_on_others", (test,), test)
    text = render([tmp_path])
    values = [column(text, name, "box AP without duplicates") for name in ("a", "exported_again")]
    assert values[0] != "-" and values[1] == "-" and text.count("are nearly equal") == 1
    line = f"- {table} compares {test} with {train}, but no run"
    assert line not in text and line in render(
        [tmp_path / "exported_again", tmp_path / "trained_on_others", table.parent]
    )
    table.write_text("{")
    assert f"- {table}" in render([tmp_path]) and "without duplicates" not in render([tmp_path])
    table.write_text("{}")
    assert f"- {table} lacks pairs: make it again" in render([tmp_path])


def test_other_training_sets_are_named_and_evaluations_use_the_record_of_their_training(
    tmp_path: Path,
) -> None:
    train, test = write_sets(tmp_path)
    other = tiny_coco.write(tmp_path / "other")
    (tmp_path / "other/1.png").write_bytes((tmp_path / "test/1.png").read_bytes())
    make_data.main(["duplicates", train, test, "--output", str(tmp_path / "duplicates")])
    write_run(tmp_path / "a", (train, other), test)
    assert f"; not compared with {other}." in render([tmp_path])
    write_run(tmp_path / "a/eval_only", (train,), test)
    digests = tmp_path / "a/eval_only" / data.DIGESTS
    digests.write_text(json.dumps({test: json.loads(digests.read_text())[test]}))
    assert column(render([tmp_path / "a/eval_only", tmp_path / "duplicates"]), "eval_only", "box AP without duplicates")
