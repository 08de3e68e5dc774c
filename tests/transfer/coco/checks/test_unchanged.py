"""A resumed run has the training images and objects that it was started with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.coco import data, names

CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an object is gone": (lambda c: c["annotations"].pop(), "the annotations of"),
    "a box is another": (lambda c: c["annotations"][0].update(bbox=[1, 1, 9, 9]), "the annotations of"),
    "an image is gone": (lambda c: c["images"].pop(), "the images of"),
    "an image is another": (lambda c: c["images"][-1].update(file_name="7.png"), "the images of"),
}
KEPT: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda c: None,
    "order": lambda c: (c["images"].reverse(), c["annotations"].reverse()),
    "fields that are not read": lambda c: (c.update(info={"version": 2}), c["annotations"][0].pop("segmentation")),
    "ids of annotations": lambda c: [record.update(id=90 + record["id"]) for record in c["annotations"]],
}


def check(folder: Path, name: str, *, is_resumed: bool, split: str = "TRAIN") -> None:
    other = tiny_coco.write(folder / "other")
    sets = {f"DATASETS__{part}": (name if part == split else other,) for part in ("TRAIN", "TEST")}
    cfg = tiny_coco.config(folder / "out", name, **sets)
    data.DataSets(cfg, [name, other]).check(cfg.OUTPUT_DIR, is_resumed=is_resumed)


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_training_data_end_a_resumed_run(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "data/7.png").write_bytes((tmp_path / "data/6.png").read_bytes())
    check(tmp_path, name, is_resumed=False)
    copy = names.find_checked_copy(name, tmp_path / "out")
    before = copy.read_bytes()
    change, text = CHANGES[kind]
    tiny_coco.edit(name, change)
    refused(lambda: check(tmp_path, name, is_resumed=True), text, name, "choose another OUTPUT_DIR")
    assert copy.read_bytes() == before, "the copy still tells what the run was started with"
    check(tmp_path, name, is_resumed=True, split="TEST")
    copy.write_bytes(before)
    check(tmp_path, name, is_resumed=False)


@pytest.mark.parametrize("kind", KEPT)
def test_what_no_step_reads_may_change(tmp_path: Path, name: str, kind: str) -> None:
    check(tmp_path, name, is_resumed=False)
    tiny_coco.edit(name, KEPT[kind])
    check(tmp_path, name, is_resumed=True)


@pytest.mark.usefixtures("tiny_resnet18")
def test_the_command_of_a_resumed_run_checks_it(tmp_path: Path, name: str) -> None:
    tiny_coco.train(tmp_path, name, "torchvision", MODEL__WEIGHTS="")
    tiny_coco.edit(name, lambda content: content["annotations"].pop())
    words = ("--resume",)
    refused(lambda: tiny_coco.train(tmp_path, name, "torchvision", *words, MODEL__WEIGHTS=""), "the annotations of")
    weights = str(tmp_path / "out/model_final.pth")
    evaluated = tiny_coco.train(tmp_path, name, "torchvision", "--eval-only", MODEL__WEIGHTS=weights)
    assert json.dumps(evaluated["metrics"])
