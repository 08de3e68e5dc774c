"""Boxes in VOC's and YOLO's formats are converted to COCO's."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.errors import refused
from tools import make_data

OBJECT = "<object><name>{}</name><difficult>{}</difficult><bndbox>{}</bndbox></object>"
BOX = "<xmin>3</xmin><ymin>5</ymin><xmax>12</xmax><ymax>24</ymax>"  # pixels 2 to 11, and 4 to 23, from 0
SIZE = "<size><width>{}</width><height>{}</height></size>"


def photo(path: Path, turned: bool = False) -> None:
    """Write a photo that is 40 pixels wide and 30 high when displayed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    Image.new("RGB", (30, 40) if turned else (40, 30)).save(path, exif=exif)


def convert(folder: Path, *words: str) -> dict:
    make_data.main([*words, "--output", str(folder / "out")])
    return json.loads((folder / "out" / "annotations.json").read_text())


def voc(folder: Path, name: str, *objects: str, size: str = "") -> None:
    path = folder / "Annotations" / f"{name}.xml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"<annotation><filename>other.jpg</filename>{size}{''.join(objects)}</annotation>")


def test_voc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jpg", "b.jpg", "not_annotated.jpg"):
        photo(tmp_path / "images" / name, turned=name == "b.jpg")
    voc(tmp_path, "a", OBJECT.format("dog", 0, BOX), OBJECT.format(" cat ", 1, BOX), size=SIZE.format(40, 30))
    voc(tmp_path, "b", size=SIZE.format(0, 0))
    words = ["voc", str(tmp_path / "Annotations"), "--images", str(tmp_path / "images")]
    content = convert(tmp_path, *words)
    size = {"width": 40, "height": 30}
    assert content["images"] == [{"id": 1, "file_name": "a.jpg", **size}, {"id": 2, "file_name": "b.jpg", **size}]
    assert content["categories"] == [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    box = {"image_id": 1, "bbox": [2, 4, 10, 20], "area": 200}
    assert content["annotations"] == [
        {"id": 1, "category_id": 2, "iscrowd": 0, **box},
        {"id": 2, "category_id": 1, "iscrowd": 1, **box},
    ]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "all boxes 2" in lines and "of them crowds 1" in lines
    voc(tmp_path, "b", OBJECT.format("dog", 0, BOX))
    refused(lambda: convert(tmp_path, *words), "contains data that differ in content")  # the output of the earlier file


def test_yolo(tmp_path: Path) -> None:
    for name in ("train/a.jpg", "train/empty.png", "b.jpg"):
        photo(tmp_path / "images" / name, turned=name == "b.jpg")
    (tmp_path / "labels" / "train").mkdir(parents=True)
    (tmp_path / "labels" / "train" / "a.txt").write_text("2 0.5 0.5 0.25 0.2\n\n0 0.1 0.1 0.6 0.1 0.6 0.9\n")
    (tmp_path / "labels" / "b.txt").write_text("0 0.5 0.5 1 1\n")
    (tmp_path / "labels" / "classes.txt").write_text("cat\nunused\ndog\n")
    (tmp_path / "data.yaml").write_text("names: {0: cat, 1: unused, 2: dog}\n")
    words = ["yolo", str(tmp_path / "labels"), "--images", str(tmp_path / "images"), "--names"]
    content = convert(tmp_path, *words, str(tmp_path / "labels" / "classes.txt"))
    assert [image["file_name"] for image in content["images"]] == ["b.jpg", "train/a.jpg", "train/empty.png"]
    assert [category["name"] for category in content["categories"]] == ["cat", "unused", "dog"]
    whole, box, outline = content["annotations"]
    assert (whole["image_id"], whole["bbox"], whole["category_id"]) == (1, [0, 0, 40, 30], 1)
    assert (box["image_id"], box["category_id"]) == (2, 3) and box["bbox"] == pytest.approx([15, 12, 10, 6])
    assert outline["bbox"] == pytest.approx([4, 3, 20, 24])
    assert outline["segmentation"] == [pytest.approx([4, 3, 24, 3, 24, 27])]
    assert content == convert(tmp_path / "again", *words, str(tmp_path / "data.yaml"))


def yolo(folder: Path, labels: str, names: str) -> list[str]:
    """Write the labels of an image and a data.yaml; return the command that converts them."""
    photo(folder / "a.jpg")
    (folder / "a.txt").write_text(labels)
    (folder / "data.yaml").write_text(names)
    return ["yolo", str(folder), "--names", str(folder / "data.yaml")]


@pytest.mark.parametrize(
    ("shape", "points"), [([2, 2], "0.4 0.4 0.6 0.6"), ([2, 3], "0.4 0.4 2 0.6 0.6 1"), ([1, 3], "0.4 0.4 1")]
)
def test_a_pose_label_is_its_box(tmp_path: Path, shape: list[int], points: str) -> None:
    labels = f"0 0.5 0.5 0.4 0.4 {points}\n0 0.5 0.5 0.4 0.4\n"
    words = yolo(tmp_path, labels, f"kpt_shape: {shape}\nnames: [cat]\n")
    for record in convert(tmp_path, *words)["annotations"]:
        assert record["bbox"] == pytest.approx([12, 9, 16, 12]) and "segmentation" not in record
    (tmp_path / "a.txt").write_text("0 0.5 0.5 0.4 0.4 0.4 0.4 0.6 0.6 0.1 0.1 0.3 0.3")  # of another shape
    refused(lambda: convert(tmp_path / "other", *words), "a.txt, line 1")


@pytest.mark.parametrize(
    ("line", "names", "messages"),
    [
        ("3 0.5 0.5 0.1 0.1", "[cat]", ["a class below 1", "number the classes from 0 to 0"]),
        ("0 20 15 4 4", "[cat]", ["a.txt, line 1: '0 20 15 4 4'", "divide pixels by the width and height"]),
        ("0 0.5 0.5 0.1", "[cat]", ["a.txt, line 1", "pose needs kpt_shape"]),
        ("0 0.5 0.5 0 0.1", "[cat]", ["a.txt, line 1", "remove an object without an area"]),
        ("0 0.5 0.5 0.5 0.5 0.5 0.5", "[cat]", ["a.txt, line 1", "remove an object without an area"]),
        ("0 0.1 0.2 0.5 0.2 0.9 0.2", "[cat]", ["a.txt, line 1", "remove an object without an area"]),
        ("0,0.5,0.5,0.1,0.1", "[cat]", ["a.txt, line 1", "separate its numbers by blanks"]),
        ("cat 0.5 0.5 0.1 0.1", "[cat]", ["a.txt, line 1", "write a line of numbers"]),
        ("0 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1 0.1 0.9", "[cat]", ["a.txt, line 2"]),
        ("0 0.5 0.5 0.1 0.1 0.9", "[cat]", ["if the sixth number is a confidence, these are predictions"]),
        ("0 0.5 0.5 0.1 0.1", "[cat, dog]\nnc: 5", ["data.yaml", "nc is 5, but names has 2: cat, dog"]),
        ("0 0.5 0.5 0.1 0.1", "{0: cat, 1: dog}\nnc: 1", ["nc is 1, but names has 2"]),
        ("0 0.5 0.5 0.1 0.1", "[]\nnc: 1", ["nc is 1, but names has 0"]),
        ("0 0.5 0.5 0.1 0.1", "[cat, null]", ["class 1 has no name"]),
        ("0 0.5 0.5 0.1 0.1", "[cat, '']", ["class 1 has no name"]),
        ("0 0.5 0.5 0.1 0.1", "[[cat], dog]", ["class 0 has no name"]),
        (
            "0 0.5 0.5 0.1 0.1",
            "{1: cat}",
            ["data.yaml has no list of one name per class", "are 1; number them 0, 1, ..."],
        ),
        ("0 0.5 0.5 0.1 0.1", "{'0': cat, '1': dog}", ["its numbers of classes are '0', '1'; number them"]),
        ("0 0.5 0.5 0.1 0.1", "cat", ["names is cat; write a list"]),  # its letters are no classes
        ("0 0.5 0.5 0.1 0.1", "[yes, no]", ["names is [True, False]; write a list, and yes, no, on and off in quotes"]),
        (
            "0 0.5 0.5 0.1 0.1",
            "[cat, dog, cat]",
            ["data.yaml: two classes have the same name in ['cat', 'dog', 'cat']"],
        ),
    ],
)
def test_what_is_not_yolos_is_named(tmp_path: Path, line: str, names: str, messages: list[str]) -> None:
    refused(lambda: convert(tmp_path, *yolo(tmp_path, line, f"names: {names}")), *messages)


@pytest.mark.parametrize("names", ["names: [cat, 7]\nnc: 2", "names: {0: cat, 1: 7}\nnc: '2'", "names: [cat, 7]\nnc:"])
def test_the_number_of_classes_may_be_given(tmp_path: Path, names: str) -> None:
    content = convert(tmp_path, *yolo(tmp_path, "1 0.5 0.5 0.1 0.1", names))
    assert [category["name"] for category in content["categories"]] == ["cat", "7"]


def test_a_list_of_names_is_text_or_yaml(tmp_path: Path) -> None:
    words = yolo(tmp_path, "1 0.5 0.5 0.1 0.1", "names: [cat]")
    (tmp_path / "names.json").write_text('{"names": ["cat", "dog"]}')
    content = convert(tmp_path / "json", *words[:-1], str(tmp_path / "names.json"))
    assert [category["name"] for category in content["categories"]] == ["cat", "dog"]
    (tmp_path / "label_map.pbtxt").write_text('item { id: 1 name: "cat" }')
    refused(lambda: convert(tmp_path / "pbtxt", *words[:-1], str(tmp_path / "label_map.pbtxt")), "one name per line")


def test_voc_files_without_any_object_are_refused(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg")
    (tmp_path / "a.xml").write_text("<annotation></annotation>")
    refused(lambda: convert(tmp_path / "out", "voc", str(tmp_path)), "no label file in", "has an object")


def test_files_that_windows_saved(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg")
    photo(tmp_path / "b.jpg")
    (tmp_path / "a.TXT").write_text("1 0.5 0.5 0.1 0.1\r\n", "utf-8-sig")
    (tmp_path / "classes.txt").write_text("gr\u00fcn\r\nblau\r\n\r\n", "utf-8-sig")
    words = ["yolo", str(tmp_path), "--names", str(tmp_path / "classes.txt")]
    content = convert(tmp_path / "out", *words)
    assert [category["name"] for category in content["categories"]] == ["gr\u00fcn", "blau"]
    assert [record["image_id"] for record in content["annotations"]] == [1]
    (tmp_path / "classes.txt").write_text("gr\u00fcn\nblau", "cp1252")
    refused(lambda: convert(tmp_path / "other", *words), "classes.txt is not text in UTF-8", "save it as UTF-8")
    (tmp_path / "classes.txt").write_text("gr\u00fcn\n\nblau")
    refused(lambda: convert(tmp_path / "other", *words), "line 2 is empty, but class 1 needs a name")


@pytest.mark.parametrize("kind", ["voc", "yolo"])
def test_what_macos_and_disk_stations_leave_is_no_label(tmp_path: Path, kind: str) -> None:
    """They decompose letters, and put files with the names of others into folders and next to these."""
    suffix = ".xml" if kind == "voc" else ".txt"
    photo(tmp_path / "f\u00fcr.jpg")
    text = f"<annotation>{OBJECT.format('dog', 0, BOX)}</annotation>" if kind == "voc" else "0 0.5 0.5 0.1 0.1"
    (tmp_path / f"fu\u0308r{suffix}").write_text(text)
    for other in (f"._a{suffix}", f"__MACOSX/a{suffix}", f"@eaDir/a{suffix}"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / "classes.txt").write_text("dog")
    words = [kind, str(tmp_path), *(("--names", str(tmp_path / "classes.txt")) if kind == "yolo" else ())]
    assert len(convert(tmp_path / "out", *words)["annotations"]) == 1


def test_mixed_splits_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("train/a", "val/b"):
        photo(tmp_path / "images" / f"{name}.jpg")
        (tmp_path / "labels" / name).parent.mkdir(parents=True)
        (tmp_path / "labels" / f"{name}.txt").write_text("0 0.5 0.5 0.1 0.1")
    (tmp_path / "names.txt").write_text("dog")
    words = ["--images", str(tmp_path / "images"), "--names", str(tmp_path / "names.txt")]
    convert(tmp_path, "yolo", str(tmp_path / "labels"), *words)
    assert [line.partition(";")[0] for line in caplog.messages] == ["train and val are mixed in one file"]


def test_what_tools_write_into_vocs_files(tmp_path: Path) -> None:
    photo(tmp_path / "a.jpg")
    voc(tmp_path, "a", OBJECT.format("\u7ea2", "Unspecified", BOX), size=SIZE.format("40.0", "30.0"))
    path = tmp_path / "Annotations" / "a.xml"
    words = ["voc", str(tmp_path / "Annotations"), "--images", str(tmp_path)]
    for encoding in ("gb2312", "utf-16", "gb18030", "utf-8-sig"):
        text = f'<?xml version="1.0" encoding="{encoding.removesuffix("-sig")}"?>{path.read_text()}'
        (tmp_path / encoding).mkdir()
        (tmp_path / encoding / "a.xml").write_bytes(text.encode(encoding))
        content = convert(tmp_path / encoding, words[0], str(tmp_path / encoding), *words[2:])
        assert content["categories"] == [{"id": 1, "name": "\u7ea2"}] and content["annotations"][0]["iscrowd"] == 0


def test_all_bad_files_are_named(tmp_path: Path) -> None:
    words = ["voc", str(tmp_path / "Annotations"), "--images", str(tmp_path)]
    for name in "abc":
        photo(tmp_path / f"{name}.jpg")
    voc(tmp_path, "a", OBJECT.format(" ", 0, BOX))
    voc(tmp_path, "b", OBJECT.format("dog", 0, BOX))
    voc(tmp_path, "c", OBJECT.format("dog", 0, BOX.replace("12", "120")))
    text = refused(
        lambda: convert(tmp_path, *words), "a.xml", "has no name", "c.xml", "is not inside its image, 40 x 30"
    )
    assert "b.xml" not in text


def test_what_is_not_vocs_is_named(tmp_path: Path) -> None:
    words = ["voc", str(tmp_path / "Annotations"), "--images", str(tmp_path)]
    refused(lambda: convert(tmp_path, *words), "no folder at", "Annotations")
    voc(tmp_path, "a", OBJECT.format("dog", 0, BOX), size=SIZE.format(30, 40))
    refused(lambda: convert(tmp_path, *words), "no image in", "a.xml")
    photo(tmp_path / "a.jpg")
    refused(lambda: convert(tmp_path, *words), "a.xml", "its width is not that of its image, 40")
    voc(tmp_path, "a", OBJECT.format("dog", 0, BOX.replace("12", "")))
    refused(lambda: convert(tmp_path, *words), "a.xml cannot be read (object 'dog' has no bndbox with xmin")
    (tmp_path / "a.jpg").write_bytes(b"no image")
    refused(lambda: convert(tmp_path, *words), tmp_path / "a.jpg")
    photo(tmp_path / "a.png")
    refused(lambda: convert(tmp_path, *words), "a.jpg and a.png")


@pytest.mark.parametrize(
    "text",
    [
        '<annotation xmlns="http://host/voc">{}</annotation>',
        '<v:annotation xmlns:v="http://host/voc">{}</v:annotation>',
        '<!-- drawn --><Annotation verified="yes">{}</Annotation>',
        "<annotation><objects>{}</objects></annotation>",
    ],
)
def test_objects_are_found_whatever_their_tags_look_like(tmp_path: Path, text: str) -> None:
    photo(tmp_path / "a.jpg")
    body = SIZE.format(40, 30) + OBJECT.format("dog", 0, BOX)
    if "v:" in text:
        body = body.replace("</", "</v:").replace("<", "<v:").replace("<v:/v:", "</v:")
    if "Annotation" in text:
        body = body.replace("object", "Object").replace("bndbox", "BndBox")
    (tmp_path / "a.xml").write_text(text.format(body))
    content = convert(tmp_path, "voc", str(tmp_path))
    assert [box["bbox"] for box in content["annotations"]] == [[2, 4, 10, 20]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotations><image><box/></image></annotations>", "its root is <annotations>, not VOC's <annotation>"),
        ("<annotation><obj><bndbox/></obj></annotation>", "its boxes are not in an <object>"),
        ("<v:annotation></v:annotation>", "unbound prefix"),
        ("", "a.xml cannot be read"),
    ],
)
def test_other_xml_is_named(tmp_path: Path, text: str, message: str) -> None:
    photo(tmp_path / "a.jpg")
    (tmp_path / "a.xml").write_text(text)
    refused(lambda: convert(tmp_path, "voc", str(tmp_path)), "a.xml", message)


@pytest.mark.parametrize(
    ("corners", "box"),
    [
        ((0, 5, 12, 24), [0, 5, 12, 19]),
        ((3, 0, 40, 30), [3, 0, 37, 30]),
        ((0.5, 0.25, 39.5, 29.75), [0.5, 0.25, 39, 29.5]),
        ((3, 5, 12, 24), [3, 5, 9, 19]),
    ],
)
def test_boxes_from_zero_need_their_option(tmp_path: Path, corners: tuple[float, ...], box: list[float]) -> None:
    photo(tmp_path / "a.jpg")
    tags = "".join(
        f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    )
    (tmp_path / "a.xml").write_text(f"<annotation>{OBJECT.format('dog', 0, tags)}</annotation>")
    if min(corners) < 1:
        refused(lambda: convert(tmp_path, "voc", str(tmp_path)), "a.xml", "VOC counts pixels from 1", "--from-zero")
    [record] = convert(tmp_path, "voc", str(tmp_path), "--from-zero")["annotations"]
    assert record["bbox"] == box
    for bad in ((3, 5, 41, 24), (-1, 5, 12, 24), (3, 5, 3, 24)):
        wrong = "".join(
            f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), bad, strict=True)
        )
        (tmp_path / "a.xml").write_text(f"<annotation>{OBJECT.format('dog', 0, wrong)}</annotation>")
        refused(lambda: convert(tmp_path / "bad", "voc", str(tmp_path), "--from-zero"), "a.xml")


def test_label_files_without_an_image_or_for_the_same_one_are_named(tmp_path: Path) -> None:
    words = yolo(tmp_path, "0 0.5 0.5 0.1 0.1", "names: [cat]")
    (tmp_path / "train.txt").write_text("a.jpg")
    refused(lambda: convert(tmp_path, *words), "train.txt; add their images, or remove these files")
    (tmp_path / "train.txt").rename(tmp_path / "a.TXT")
    refused(lambda: convert(tmp_path, *words), "a.TXT and", "are labels of one image")
