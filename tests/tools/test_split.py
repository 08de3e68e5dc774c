"""A COCO file is split by image, with every box and every field, and equal proportions of the classes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.errors import refused
from tests.tools import coco_file
from tools import make_data
from tools.data.stratify import stratify

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


def write_frames(path: Path, names: list[str], classes: list[list[int]], **fields: list[Any]) -> dict[str, Any]:
    """Write an annotation file of images with these names, classes of boxes and further fields."""
    content = coco_file.write(path, classes)
    for number, image in enumerate(content["images"]):
        more = {field: values[number] for field, values in fields.items() if values[number] is not None}
        image |= {"file_name": names[number], **more}
    path.write_text(json.dumps(content))
    return content


def read_sides(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {split: json.loads((folder / f"{split}.json").read_text())["images"] for split in ("train", "val")}


VIDEOS = [f"vid{video}_{frame:04}.jpg" for video in "ABCDEFGH" for frame in range(10)]
VIDEO_CLASSES = [[1] + [2] * (n // 10 % 2) for n in range(80)]  # class 2 in every other video


@pytest.mark.parametrize(
    ("group_by", "length"),
    [
        (r"^(.*)_\d+", 4),
        ("vid[A-H]", 4),
        (r"(?:no|vid(?P<name>\w))_", 4),
        ("video_id", 4),
        ("extra.video", 4),
        ("^vid[AB]|^vid[CD]|^vid[EF]|^vid[GH]", 4),
    ],
)
def test_groups_are_whole_and_classes_are_balanced(
    tmp_path: Path, group_by: str, length: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "all.json"
    numbers = [n // 10 for n in range(80)]  # 0 is a video, too
    write_frames(file, VIDEOS, VIDEO_CLASSES, video_id=numbers, extra=[{"video": f"v{n}"} for n in numbers])
    words = ["split", str(file), "--val", "0.25", "--group-by", group_by]
    make_data.main([*words, "--output", str(tmp_path / "out")])
    sides = read_sides(tmp_path / "out")
    videos = {split: {image["file_name"][:length] for image in images} for split, images in sides.items()}
    assert not videos["train"] & videos["val"] and len(sides["val"]) == 20
    assert len({ord(video[3]) % 2 for video in videos["val"]}) == 2  # one of the videos has class 2, the other has not
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["groups", "8", "6", "2"] in rows and caplog.messages == []
    make_data.main([*words, "--output", str(tmp_path / "again")])
    assert read_sides(tmp_path / "again") == sides


def test_groups_of_many_sizes_are_nearer_to_their_share_than_in_a_random_draw() -> None:
    rng = np.random.default_rng(0)
    group_N = np.repeat(np.arange(30), rng.integers(1, 40, 30))
    has_NC = rng.random((len(group_N), 6)) < (rng.random((30, 6)) ** 3)[group_N]
    classes_of: dict[Any, set[int]] = {n: set(np.flatnonzero(row).tolist()) for n, row in enumerate(has_NC)}
    chosen = stratify(classes_of, len(group_N) // 5, 0, {n: f"g{group}" for n, group in enumerate(group_N)})
    in_val_N = np.isin(np.arange(len(group_N)), list(chosen))
    assert {*group_N[in_val_N]}.isdisjoint(group_N[~in_val_N])

    def error(is_val_N: np.ndarray) -> float:
        return float(np.abs(has_NC[is_val_N].sum(0) / has_NC.sum(0) - 0.2).max())

    drawn = np.mean([error(np.isin(group_N, rng.permutation(30)[:6])) for _ in range(20)])
    assert abs(in_val_N.mean() - 0.2) < 0.01 and error(in_val_N) < 0.06 < 0.15 < drawn


@pytest.mark.parametrize(
    ("sizes", "val", "val_sizes", "warned"),
    [
        ({"a": 20, "b": 20, "c": 20}, "0.25", [20], ["3 of 3 groups have more images", "15: a (20), b (20), c (20)"]),
        ({"a": 30, "b": 30}, "0.1", [30], ["2 of 2 groups", "6: a (30), b (30); val has 30"]),
        ({"a": 50, "b": 5, "c": 5}, "0.1", [5], ["1 of 3 groups", "6: a (50); val has 5"]),
        ({"a": 7, "b": 5, "c": 3, "d": 1}, "8", [3, 5], []),
        (dict.fromkeys("abcdefgh", 1), "0.25", [1, 1], ["each image is a group by itself"]),
    ],
)
def test_groups_that_do_not_fit_are_named(
    tmp_path: Path, sizes: dict[str, int], val: str, val_sizes: list[int], warned: list[str], caplog: Any
) -> None:
    names = [f"{name}{number}.jpg" for name, size in sizes.items() for number in range(size)]
    write_frames(tmp_path / "all.json", names, [[1]] * len(names))
    words = ["--val", val, "--group-by", "^[a-h]", "--output", str(tmp_path / "out")]
    make_data.main(["split", str(tmp_path / "all.json"), *words])
    groups = sorted({image["file_name"][0] for image in read_sides(tmp_path / "out")["val"]})
    assert sorted(sizes[group] for group in groups) == val_sizes
    assert all(text in caplog.text for text in warned) and len(caplog.messages) == bool(warned)


def test_a_class_of_one_group_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    classes = [[1] + [7] * (n < 10) for n in range(80)]
    write_frames(tmp_path / "all.json", VIDEOS, classes)
    words = ["--group-by", "vid.", "--output", str(tmp_path / "out")]
    make_data.main(["split", str(tmp_path / "all.json"), *words])
    assert [line for line in caplog.messages if "only train has these classes" in line and "c7 (vidA)" in line]


@pytest.mark.parametrize(
    ("group_by", "named"),
    [
        ("vid[A-C]", ["50 of 80 images", "such a file_name: vidD_0000.jpg, vidD_0001.jpg"]),
        ("vid([A-C])?_", ["50 of 80 images", "vidD_0000.jpg"]),
        (r"\d*$", ["80 of 80 images"]),
        ("vid(", ["'vid(' is neither a field of the image records nor a regular expression"]),
        ("vid", ["all images into one group, 'vid'"]),
        ("scene", ["1 of 80 images have no such field: vidA_0005.jpg"]),
        ("boxes", ["80 of 80 images"]),
    ],
)
def test_images_without_a_group_are_refused(tmp_path: Path, group_by: str, named: list[str]) -> None:
    scenes = [None if n == 5 else n // 10 for n in range(80)]
    write_frames(tmp_path / "all.json", VIDEOS, VIDEO_CLASSES, scene=scenes, boxes=[[1]] * 80)
    words = ["split", str(tmp_path / "all.json"), "--group-by", group_by, "--output", str(tmp_path / "out")]
    refused(lambda: make_data.main(words), "--group-by", *named)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (VIDEOS, r"--group-by '^(.*\D)(\d+)\.\w+$'"),
        (
            [f"{video}/{5 * frame}.png" for video in ("in", "out") for frame in range(40)],
            r"--group-by '^(.*\D)(\d+)\.\w+$'",
        ),
        ([f"clip-{n // 40}.mp4.{n % 40}.jpg" for n in range(80)], r"--group-by '^(.*\D)(\d+)\.\w+$'"),
        ([f"photo{n // 3}_jpg.rf.{n:032x}.jpg" for n in range(80)], r"--group-by '^(.+)\.rf\.\w+\.\w+$'"),
        ([f"{n:012}.jpg" for n in range(80)], ""),
        ([f"IMG_{n:04}.jpg" for n in range(80)], ""),
        ([f"200{n % 3}_{n * n:06}.jpg" for n in range(80)], ""),  # numbers with gaps, as in VOC 2012
        ([f"photo{n}_jpg.rf.{n:032x}.jpg" for n in range(80)], ""),
        ([f"{chr(97 + n // 4)}{n % 4}.jpg" for n in range(80)], ""),
    ],
)
def test_obvious_groups_are_reported_with_the_option_that_keeps_them(
    tmp_path: Path, names: list[str], option: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_frames(tmp_path / "all.json", names, VIDEO_CLASSES)
    make_data.main(["split", str(tmp_path / "all.json"), "--output", str(tmp_path / "out")])
    assert len(caplog.messages) == bool(option) and option in caplog.text
    if option:
        caplog.clear()
        words = ["--group-by", option.split("'")[1], "--output", str(tmp_path / "grouped")]
        make_data.main(["split", str(tmp_path / "all.json"), *words])
        assert not [line for line in caplog.messages if "share their scenes" in line]


def test_videos_are_reported_by_their_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"{n:012}.jpg" for n in range(80)]
    write_frames(tmp_path / "all.json", names, VIDEO_CLASSES, video_id=[n // 20 for n in range(80)])
    make_data.main(["split", str(tmp_path / "all.json"), "--output", str(tmp_path / "out")])
    assert len(caplog.messages) == 1 and "--group-by video_id" in caplog.text
