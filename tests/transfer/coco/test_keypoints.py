"""Left and right keypoints are exchanged in a flipped image."""

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.coco.keypoints import flip_indices, flip_pairs, is_flippable, keypoint_names


def content(names, **category):
    return {"categories": [{"id": 1, "name": "a", "keypoints": names, **category}], "annotations": []}


@pytest.mark.parametrize(
    "words",
    ["nose left_eye right_eye", "N L_eye R_eye", "Nose LeftEye RightEye", "n lefteye righteye", "t eyeLeft eyeRight"],
)
def test_pairs_are_found_by_name(words):
    names = words.split()
    pairs = flip_pairs(content(names))
    assert pairs is not None and pairs == [(names[1], names[2])] and flip_indices(names, pairs) == [0, 2, 1]


def test_pairs_of_the_file_come_first():
    for flip, pairs in (([["a", "c"]], [("a", "c")]), ([], []), ([["a", "x"]], None), (["a", "b"], None)):
        assert flip_pairs(content(["a", "b", "c"], flip=flip)) == pairs
    assert flip_pairs(content([1, 2, 3], flip=[[1, 3]])) == [("1", "3")]


def test_keypoints_without_left_and_right_have_no_flip_pairs():
    assert flip_pairs(content(["a", "b"])) is flip_pairs(content(["nose", "left_eye"])) is None
    unnamed = {"categories": [{"id": 1, "name": "a"}], "annotations": [{"keypoints": [0] * 6}]}
    assert keypoint_names(unnamed) == ["0", "1"] and flip_pairs(unnamed) is None


@pytest.mark.parametrize(
    ("second", "known"),
    [("beak left_wing right_wing", True), ("left_eye right_eye nose", False), ("beak tail head", False), ("", True)],
)
def test_all_categories_change_the_same_places(second, known):
    categories = [content(words.split())["categories"][0] for words in ("nose left_eye right_eye", second)]
    assert is_flippable({"categories": categories, "annotations": []}) is known


def test_unknown_pairs_are_refused_only_where_images_are_flipped(tmp_path):
    name = tiny_coco.write(tmp_path, keypoints=True)
    tiny_coco.edit(name, lambda content: content["categories"][0].update(keypoints=[f"p{i}" for i in range(17)]))
    cfg = tiny_coco.config(tmp_path / "out", name, MODEL__KEYPOINT_ON=True, MODEL__ROI_HEADS__NUM_CLASSES=1)
    refused(lambda: tiny_coco.check_data_sets(cfg, [name]), "left from right", "RANDOM_FLIP none")
    cfg.INPUT.RANDOM_FLIP = "none"
    tiny_coco.check_data_sets(cfg, [name])
