"""What the functions of the Python interface do in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer import api
from transfer.coco.data import DataSets

pytestmark = pytest.mark.usefixtures("tiny_resnet18")

ENGINES = ["torchvision", pytest.param("detectron2", marks=pytest.mark.detectron2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_annotation_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Two sets are checked, trained on and evaluated three times; a third, without annotations, has predictions."""
    train = tiny_coco.write(tmp_path / "train", keypoints=True)
    test = tiny_coco.write(tmp_path / "test", keypoints=True)
    tiny_coco.edit(train, lambda content: content.update(info="train"))
    tiny_coco.edit(test, lambda content: content.update(info="test"))
    unlabeled = tiny_coco.write(tmp_path / "unlabeled", keypoints=True)
    tiny_coco.edit(unlabeled, lambda content: content.pop("annotations") and content.update(info="unlabeled"))
    parsed: list[str] = []
    loads = json.loads

    def count(text: Any, **options: Any) -> Any:
        value = loads(text, **options)
        if isinstance(value, dict) and "images" in value:
            parsed.append(value["info"])
        return value

    monkeypatch.setattr(json, "loads", count)  # json.load calls it, too
    keys = {"DATASETS__TEST": (test, train, unlabeled), "SOLVER__MAX_ITER": 3, "TEST__EVAL_PERIOD": 1}
    keys |= {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_HEADS__NUM_CLASSES": 1, "SOLVER__STEPS": []}
    words = tiny_coco.run_words(tmp_path / "out", train, keys)
    overrides = dict(zip(words[::2], words[1::2], strict=True))
    results = api.fine_tune(tiny_coco.BASE, overrides, engine=engine)
    assert sorted(parsed) == ["test", "train", "unlabeled"] and list(results["datasets"]) == [test, train, unlabeled]
    assert {value for row in results["datasets"][unlabeled].values() for value in row.values()} == {None}
    assert list(results["unscored"]) == [unlabeled]
    assert results["unscored"][unlabeled] in (tmp_path / "out/log.txt").read_text()
    assert len(json.loads((tmp_path / "out" / results["predictions"][unlabeled]).read_text())) > 0
    refused(lambda: DataSets(tiny_coco.config(tmp_path, unlabeled), [unlabeled]).check_small(), "annotations")
