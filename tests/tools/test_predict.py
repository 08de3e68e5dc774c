"""Predictions on the user's images equal those of an evaluation, in COCO's format, under the images' names."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from pretrain.common.images import read_image
from pretrain.common.run.lease import claim
from tests.errors import refused
from tests.transfer import tiny_coco
from tests.transfer.test_train_net import ENGINES, work
from tools import predict
from transfer.predict import load_detector

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def pass_logs_to_pytest() -> None:
    """Undo what the logging of an earlier run has set."""
    for name in ("pretrain", "transfer"):
        logging.getLogger(name).propagate = True


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["MASK", "KEYPOINT"])
def test_predictions_are_those_of_the_evaluation(tmp_path: Path, engine: str, kind: str, capsys, caplog) -> None:
    """The run names the engine; an image that cannot be read is named and skipped."""
    data = tmp_path / "data"
    out = tmp_path / "out"
    output = tmp_path / "predictions"
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
    pass_logs_to_pytest()
    predict.main([str(data), "--run", str(out), "--output", str(output), "--threshold", "0"])
    last_line = capsys.readouterr().out
    assert "6 images, 1 skipped; " in last_line and f"the {engine} engine" in last_line
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (skipped,) = (text for text in warnings if text.startswith("skipped: "))
    assert "0.png" in skipped and any("1 file is not read: .heic" in text for text in warnings)
    truth = COCO(str(output / "images.json"))
    assert len(truth.loadRes(str(output / "predictions.json")).anns) > 20
    assert json.loads((output / "images.json").read_text())["info"] == {}
    ids = {Path(image["file_name"]).stem: image["id"] for image in truth.dataset["images"]}
    evaluated = [{**record, "image_id": ids[str(record["image_id"])]} for record in json.loads((out / run).read_text())]
    assert json.loads((output / "predictions.json").read_text()) == evaluated
    detector = load_detector(out)
    detections = detector.predict(data / "1.png")
    assert detections == [{**record, "image_id": 1} for record in evaluated if record["image_id"] == ids["1"]]
    pixels = read_image(str(data / "1.png"))
    images = [pixels, Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1), str(data / "1.png")]
    for number, in_memory in enumerate(detector.predict(images), 1):
        assert in_memory == [{**record, "image_id": number} for record in detections]
    assert detector.predict(pixels) == detections and detector.predict([]) == []
    refused(lambda: detector.predict([pixels, pixels / 255]), "image 2", "float64")
    annotated = json.loads((data / "annotations.json").read_text())
    assert truth.dataset["categories"] == annotated["categories"]
    sizes = {image["file_name"]: (image["width"], image["height"]) for image in truth.dataset["images"]}
    assert sizes == {f"{'more/' * (i == 6)}{i}.png": size for i, size in enumerate(tiny_coco.SIZES, 1)}
    assert {str(p.relative_to(output / "pictures")) for p in (output / "pictures").rglob("*.png")} == sizes.keys()
    figure = Image.open(output / "pictures" / "1.png")
    photo = Image.open(data / "1.png").resize(figure.size)
    assert np.abs(np.asarray(figure, int) - np.asarray(photo, int)).mean() > 3


@pytest.mark.slow
def test_pycocotools_reads_both_files_in_every_supported_version(tmp_path: Path) -> None:
    """2.0.8 is the lowest that pyproject.toml allows; 2.0.9 and 2.0.10 read a field that others do not."""
    assert '"pycocotools>=2.0.8"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    work(tmp_path, "torchvision", MODEL__MASK_ON=True, MODEL__ROI_HEADS__SCORE_THRESH_TEST=0.0)
    output = tmp_path / "predictions"
    predict.main([str(tmp_path / "data"), "--run", str(tmp_path / "out"), "--output", str(output)])
    count = len(json.loads((output / "predictions.json").read_text()))
    code = (
        "from pycocotools import __file__ as file; from pycocotools.coco import COCO; "
        "print(file, len(COCO('images.json').loadRes('predictions.json').anns))"
    )
    for version in ("2.0.8", "2.0.9", "2.0.10"):
        folder = tmp_path / version
        install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target", folder]
        subprocess.run([*install, f"pycocotools=={version}"], check=True, timeout=300)
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, cwd=output, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == f"{folder}/pycocotools/__init__.py {count}", done.stderr
    assert count > 20


def test_another_machine_has_the_run_and_its_own_images(tmp_path: Path, caplog) -> None:
    """The run contains the names of its classes; no pictures are drawn."""
    work(tmp_path, "torchvision")
    pass_logs_to_pytest()
    run = tmp_path / "out"
    photos = tmp_path / "photos"
    shutil.move(tmp_path / "data", photos)
    words = [str(photos), "--run", str(run), "--output"]
    predict.main([*words, str(tmp_path / "predictions"), "--no-pictures"])
    assert sorted(path.name for path in (tmp_path / "predictions").iterdir()) == ["images.json", "predictions.json"]
    content = json.loads((tmp_path / "predictions" / "images.json").read_text())
    assert content["categories"] == [{"id": number, "name": f"c{number}"} for number in (1, 2, 3)]
    assert "their ids count from 1" in caplog.text
    assert len(content["images"]) == 6
    refused(lambda: predict.main([*words, str(tmp_path / "predictions")]), "already contains predictions.json")
    for name in ("images.json", "pictures"):
        (tmp_path / f"other_{name}" / name).mkdir(parents=True)
        refused(lambda name=name: predict.main([*words, str(tmp_path / f"other_{name}")]), f"already contains {name}")
    for path in photos.glob("*.png"):
        path.write_bytes(b"not an image")
    refused(lambda: predict.main([*words, str(tmp_path / "none")]), "none of the 6 images can be read")
    assert not (tmp_path / "none").exists() and "6.png" in caplog.text
    refused(lambda: load_detector(run).predict(photos / "6.png"), "6.png")


def test_scores_below_the_threshold_are_counted_rather_than_drawn(tmp_path: Path, capsys) -> None:
    """The two images whose figures would have one name have two."""
    work(tmp_path, "torchvision", SOLVER__MAX_ITER=1, MODEL__ROI_HEADS__SCORE_THRESH_TEST=0.0)
    (tmp_path / "photos").mkdir()
    for name in ("a.bmp", "a.bmp.jpg"):
        Image.open(tmp_path / "data" / "1.png").save(tmp_path / "photos" / name)
    words = [str(tmp_path / "photos"), "--run", str(tmp_path / "out"), "--output"]
    predict.main([*words, str(tmp_path / "high"), "--threshold", "1"])
    predictions = json.loads((tmp_path / "high" / "predictions.json").read_text())
    highest = max(record["score"] for record in predictions)
    line = capsys.readouterr().out
    assert f"{len(predictions)} predictions" in line and "0 reach --threshold 1" in line and f"{highest:.2g}" in line
    assert not (tmp_path / "high" / "pictures").exists()
    predict.main([*words, str(tmp_path / "low"), "--threshold", "0"])
    assert f"{len(predictions)} reach --threshold 0;" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "low" / "pictures").iterdir()} == {"a.bmp_2.jpg", "a.bmp.jpg"}
    predict.main([*words, str(tmp_path / "none"), "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "1"])
    assert "0 predictions on 2 images" in capsys.readouterr().out and not (tmp_path / "none" / "pictures").exists()


def test_another_order_of_the_classes_is_refused(tmp_path: Path) -> None:
    """Otherwise, labels would get wrong names; without data sets, the run's names are used."""
    work(tmp_path, "torchvision", SOLVER__MAX_ITER=1, DATASETS__TEST=())
    name = f"coco:{tmp_path / 'data/annotations.json'}:{tmp_path / 'data'}"
    tiny_coco.edit(name, lambda content: content["categories"][2].update(id=1))
    words = [str(tmp_path / "data"), "--run", str(tmp_path / "out"), "--output", str(tmp_path / "predictions")]
    refused(lambda: predict.main(words), "'c1' in", "classes.json", "'c3'", name, "DATASETS.TRAIN")
    predict.main([*words, "--no-pictures", "DATASETS.TRAIN", "()"])
    content = json.loads((tmp_path / "predictions" / "images.json").read_text())
    assert [category["name"] for category in content["categories"]] == ["c1", "c2", "c3"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data", "--run", "data"], "data is not the run folder of a detector"),
        (["data", "--run", "nothing"], "no run folder or config file at nothing"),
        (["data", "--config-file", "empty.yaml"], "MODEL.WEIGHTS is empty"),
        (["data", "--config-file", "empty.yaml", "MODEL.WEIGHTS", "no.pth"], "no weights file (MODEL.WEIGHTS)"),
        (["--config-file", "empty.yaml", "data", "SOLVER.BASE_LRR", "1"], "SOLVER.BASE_LR"),
        (["empty", "--run", "data"], "no images in empty"),
        (["data", "data/1.png", "--run", "data"], "duplicate image name 1.png"),
        (["data", "--run", "data", "--threshold", "50"], "--threshold is 50"),
        (["IMG_9.JPG", "--run", "data"], "IMG_9.JPG"),
        (["data", "--run", "data", "--output", "data/predictions"], "data/predictions is inside folder:data"),
        (["data", "--run", "data", "--output", "~/predictions"], "write "),
        (["data", "DCIM/IMG_9", "--run", "data"], "no image or folder at DCIM/IMG_9"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_coco.write(Path("data"))
    Path("empty").mkdir()
    Path("empty.yaml").write_text("VERSION: 2\n")
    refused(lambda: predict.main(["--output", "predictions", *words]), named)
    assert not Path("predictions").exists()


def test_a_second_process_on_the_same_output_is_refused(tmp_path: Path) -> None:
    tiny_coco.write(tmp_path / "data")
    words = [str(tmp_path / "data"), "--run", "run", "--output", str(tmp_path / "predictions")]
    with claim(tmp_path, "a prediction", file="predictions"):
        refused(lambda: predict.main(words), "predictions is in use: a prediction")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
