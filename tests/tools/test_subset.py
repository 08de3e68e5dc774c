"""Subsets of COCO annotations: fixed by the seed, nested in a fold, whole records, counted."""

import json
import re
import shlex
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from tests.errors import refused
from tests.tools import coco_file
from tools import make_data
from transfer.coco.reading import read_annotations
from transfer.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(name="annotations")
def write_annotations(tmp_path: Path) -> Path:
    """Write 40 images, of which every fourth has no annotation."""
    coco_file.write(tmp_path / "train.json", [[1, 1] if n % 4 else [] for n in range(40)])
    return tmp_path / "train.json"


def _ids(path: Path) -> set[int]:
    return {image["id"] for image in read_annotations(path)["images"]}


def test_subsets_are_nested_counted_and_the_same_again(annotations: Path, tmp_path: Path, capsys) -> None:
    words = ["subset", str(annotations), "--percent", "5", "10", "50", "--folds", "3"]
    whole: dict[str, Any] = json.loads(annotations.read_text())
    flat = [{**record, "bbox": [1, 1, 4, 0.0]} for record in whole["annotations"]]  # as a few in COCO; skipped
    annotations.write_text(json.dumps({**whole, "annotations": whole["annotations"] + flat}))
    make_data.main([*words, "--output", str(tmp_path / "a")])
    shown = capsys.readouterr().out
    for fold in range(3):
        ids = [_ids(tmp_path / f"a/{percent}pct_fold{fold}.json") for percent in (5, 10, 50)]
        assert [len(subset) for subset in ids] == [2, 4, 20] and ids[0] < ids[1] < ids[2]
        half = json.loads((tmp_path / f"a/50pct_fold{fold}.json").read_text())
        assert half["annotations"] == [record for record in whole["annotations"] if record["image_id"] in ids[2]]
        assert (half["info"], half["categories"]) == (whole["info"], whole["categories"])
        row = [f"50pct_fold{fold}.json", "20", str(len(half["annotations"]))]
        assert row in [line.split() for line in shown.splitlines()]
    assert len({frozenset(_ids(tmp_path / f"a/50pct_fold{fold}.json")) for fold in range(3)}) == 3
    make_data.main([*words, "--output", str(tmp_path / "b")])
    make_data.main([*words, "--output", str(tmp_path / "c"), "--seed", "1"])
    first, same, other = ((tmp_path / folder / "50pct_fold0.json").read_bytes() for folder in "abc")
    assert first == same != other


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("images", {"id": "2"}, "image '2': id '2' is not a number like most ids"),
        ("images", {"id": 2}, "image 2: duplicate id"),
        ("images", {"file_name": 7}, "file_name 7 is not text"),
        ("annotations", {"image_id": 99}, "annotation 0 of image 99: unknown or bad image"),
        ("annotations", {"bbox": None}, "box None is not [x, y, width, height]"),
    ],
)
def test_bad_records_are_named(annotations: Path, tmp_path: Path, section: str, change: dict, message: str) -> None:
    content = json.loads(annotations.read_text())
    content[section][0] |= change
    annotations.write_text(json.dumps(content))
    words = ["subset", str(annotations), "--output", str(tmp_path / "a")]
    refused(lambda: make_data.main(words), message, "fix them, then draw subsets")


def test_a_published_list_names_positions_among_annotated_images(annotations: Path, tmp_path: Path) -> None:
    """30 images have annotations, one of which is a crowd's alone."""
    whole: dict[str, Any] = json.loads(annotations.read_text())
    annotated = sorted({record["image_id"] for record in whole["annotations"]})
    for record in whole["annotations"]:
        record["iscrowd"] = int(record["image_id"] == annotated[4])
    annotations.write_text(json.dumps(whole))
    listed = tmp_path / "supervision.txt"
    listed.write_text(json.dumps({"10.0": {"0": [7, 3], "1": [0, 28]}}))
    words = ["subset", str(annotations), "--list", str(listed), "--percent", "10", "--output"]
    make_data.main([*words, str(tmp_path / "out"), "--folds", "2"])
    positions = [image for image in annotated if image != annotated[4]]
    assert _ids(tmp_path / "out/10pct_fold0.json") == {positions[3], positions[7]}
    assert _ids(tmp_path / "out/10pct_fold1.json") == {positions[0], positions[28]}
    words += [str(tmp_path / "more")]
    refused(lambda: make_data.main(words), "no list for 10%, fold 2")
    for wrong in ([0, 29], [0]):  # a list for other annotations
        listed.write_text(json.dumps({"10.0": {"0": wrong}}))
        refused(lambda: make_data.main([*words, "--folds", "1"]), listed, "does not fit")
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--percent", "1"], "1% of 40 images is zero images"),
        (["--percent", "100"], "--percent is 100"),
        (["--folds", "0"], "--folds must be at least 1 for subset, got 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(annotations: Path, tmp_path: Path, words: list[str], says: str) -> None:
    refused(lambda: make_data.main(["subset", str(annotations), "--output", str(tmp_path / "out"), *words]), says)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("percent", [1, 2, 5, 10])
def test_the_schedule_follows_the_rule_that_it_states(percent: int) -> None:
    """1% is the recipe; the words for the other shares are in its header."""
    recipe = CONFIGS / "coco_R50_FPN_1pct.yaml"
    (words,) = re.findall(rf"^#   {percent}%: +(.+)$", recipe.read_text(), re.MULTILINE) or [""]
    solver = load_config(recipe, shlex.split(words)).SOLVER
    assert pytest.approx(90_000 * sqrt(percent / 100), abs=50) == solver.MAX_ITER
    assert [step / solver.MAX_ITER for step in solver.STEPS] == pytest.approx([2 / 3, 8 / 9], abs=0.01)
