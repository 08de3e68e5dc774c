"""Predictions on images of one's own: those of the evaluation, in COCO's format, under the images' names."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tests.errors import refused
from tests.transfer import tiny_coco
from tests.transfer.test_train_net import ENGINES, work
from tools import predict

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["MASK", "KEYPOINT"])
def test_predictions_are_those_of_the_evaluation(tmp_path: Path, engine: str, kind: str, capsys, monkeypatch) -> None:
    """The run names the engine; an image that cannot be read is named and skipped."""
    data, out, made = tmp_path / "data", tmp_path / "out", tmp_path / "made"
    name = tiny_coco.write(data, keypoints=kind == "KEYPOINT")
    classes = 1 if kind == "KEYPOINT" else 3
    keys = {f"MODEL__{kind}_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": classes}
    keys["MODEL__ROI_HEADS__SCORE_THRESH_TEST"] = 0.0
    words = tiny_coco.command(tmp_path, name, engine, **keys)
    run = tiny_coco.fine_tune(words)["predictions"][name]
    (data / "0.png").write_bytes((data / "1.png").read_bytes()[:300])
    (data / "more").mkdir()
    (data / "more" / "a.HEIC").touch()
    (data / "6.png").rename(data / "more" / "6.png")
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("pretrain.data.folders"), "warning", warnings.append)
    predict.main([str(data), "--run", str(out), "--output", str(made), "--threshold", "0"])
    shown = capsys.readouterr()
    assert "6 images, 1 skipped; " in shown.out and f"the {engine} engine" in shown.out
    assert "0.png" in shown.err and shown.err.count("skipped: ") == 1
    assert len(warnings) == 1 and "1 file is not read: .heic" in warnings[0]
    truth = COCO(str(made / "images.json"))
    assert len(truth.loadRes(str(made / "predictions.json")).anns) > 20
    number = {Path(image["file_name"]).stem: image["id"] for image in truth.dataset["images"]}
    wanted = [{**one, "image_id": number[str(one["image_id"])]} for one in json.loads((out / run).read_text())]
    assert json.loads((made / "predictions.json").read_text()) == wanted
    annotated = json.loads((data / "annotations.json").read_text())
    assert truth.dataset["categories"] == annotated["categories"]
    sizes = {image["file_name"]: (image["width"], image["height"]) for image in truth.dataset["images"]}
    assert sizes == {f"{'more/' * (i == 6)}{i}.png": size for i, size in enumerate(tiny_coco.SIZES, 1)}
    assert {str(p.relative_to(made / "pictures")) for p in (made / "pictures").rglob("*.png")} == sizes.keys()
    drawn = Image.open(made / "pictures" / "1.png")
    assert np.abs(np.asarray(drawn, int) - np.asarray(Image.open(data / "1.png").resize(drawn.size), int)).mean() > 3


def test_another_machine_has_the_run_and_its_own_images(tmp_path: Path, capsys) -> None:
    """The run keeps its classes' names; no pictures."""
    work(tmp_path, "torchvision")
    run, photos = tmp_path / "out", tmp_path / "photos"
    shutil.move(tmp_path / "data", photos)
    words = [str(photos), "--run", str(run), "--output"]
    predict.main([*words, str(tmp_path / "made"), "--no-pictures"])
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["images.json", "predictions.json"]
    content = json.loads((tmp_path / "made" / "images.json").read_text())
    assert content["categories"] == [{"id": number, "name": f"c{number}"} for number in (1, 2, 3)]
    assert len(content["images"]) == 6
    refused(lambda: predict.main([*words, str(tmp_path / "made")]), "made holds predictions.json")
    for name in ("images.json", "pictures"):
        (tmp_path / f"other_{name}" / name).mkdir(parents=True)
        refused(lambda name=name: predict.main([*words, str(tmp_path / f"other_{name}")]), f"holds {name} already")
    for path in photos.glob("*.png"):
        path.write_bytes(b"not an image")
    refused(lambda: predict.main([*words, str(tmp_path / "none")]), "none of the 6 images can be read")
    assert not (tmp_path / "none").exists() and "6.png" in capsys.readouterr().err


def test_another_order_of_the_classes_is_refused(tmp_path: Path) -> None:
    """As the names would be those of other labels; without data sets, the run's own are taken."""
    work(tmp_path, "torchvision", SOLVER__MAX_ITER=1, DATASETS__TEST=())
    name = f"coco:{tmp_path / 'data/annotations.json'}:{tmp_path / 'data'}"
    tiny_coco.edit(name, lambda content: content["categories"][2].update(id=1))
    words = [str(tmp_path / "data"), "--run", str(tmp_path / "out"), "--output", str(tmp_path / "made")]
    refused(lambda: predict.main(words), "'c1' in", "classes.json", "'c3'", name, "DATASETS.TRAIN")
    predict.main([*words, "--no-pictures", "DATASETS.TRAIN", "()"])
    content = json.loads((tmp_path / "made" / "images.json").read_text())
    assert [category["name"] for category in content["categories"]] == ["c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data", "--run", "data"], "data is not the run folder of a detector"),
        (["data", "--config-file", "empty.yaml"], "MODEL.WEIGHTS is empty"),
        (["data", "--config-file", "empty.yaml", "MODEL.WEIGHTS", "no.pth"], "no file of MODEL.WEIGHTS at no.pth"),
        (["--config-file", "empty.yaml", "data", "SOLVER.BASE_LRR", "1"], "SOLVER.BASE_LR"),
        (["no.jpg", "--run", "data"], "no image or folder at no.jpg"),
        (["empty", "--run", "data"], "no images in empty"),
        (["data", "data/1.png", "--run", "data"], "two images are called 1.png"),
        (["data", "--run", "data", "--threshold", "50"], "--threshold is 50"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_coco.write(Path("data"))
    Path("empty").mkdir()
    Path("empty.yaml").write_text("VERSION: 2\n")
    refused(lambda: predict.main([*words, "--output", "made"] if words[0] != "--config-file" else
                                 ["--output", "made", *words]), named)  # fmt: skip
    assert not Path("made").exists()
