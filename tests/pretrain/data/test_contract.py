"""What a user's loader returns is checked when it is opened, and each image when it is read."""

import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.common.errors import UserError
from pretrain.common.images import CorruptImage
from pretrain.data.datasets import LOADERS, ImageData, load
from pretrain.data.sources import Array
from tests.errors import refused
from tests.pretrain.images import picture

COUNT = 6
PIXELS = picture(0, 8, 10)
ALTERNATING = np.arange(COUNT) % 2


def same(value: Any) -> Any:
    return value


class Source:
    def __init__(self, change: Any = same, name: Any = str, count: int = COUNT) -> None:
        self.change = change
        self.name = name
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Any:
        return self.change(PIXELS)


class Subclass(np.ndarray):
    pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch):
    """A function that registers a loader, which returns ``loaded``, and loads its data set."""

    def open_it(loaded: Any) -> ImageData:
        monkeypatch.setitem(LOADERS, "mine", lambda split, root: loaded)
        return load("mine", "train")

    return open_it


def read_only(image: np.ndarray) -> np.ndarray:
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.shape)


LABELS = {
    "list": ALTERNATING.tolist(),
    "tuple": tuple(ALTERNATING),
    "uint8": ALTERNATING.astype(np.uint8),
    "uint64": ALTERNATING.astype(np.uint64),
    "big endian": ALTERNATING.astype(">i4"),
    "tensor": torch.tensor(ALTERNATING),
    "int32 tensor": torch.tensor(ALTERNATING, dtype=torch.int32),
    "tensors": [torch.tensor(label) for label in ALTERNATING],
    "Python's": np.array(ALTERNATING.tolist(), object),
    "bool": ALTERNATING > 0,
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_any_integer_kind_become_int64(opened, kind: str):
    data = opened(ImageData(Source(), LABELS[kind], ("a", "b")))  # type: ignore[arg-type]
    assert data.labels.dtype == np.int64 and data.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.classes == ["a", "b"] and data.name == "mine"


def test_images_without_labels(opened):
    assert opened(ImageData(Source(), None, [])).labels is None
    partly = np.array([-1, 0, -1, 1, 0, 0])
    assert opened(ImageData(Source(), partly, ["a", "b"])).select_labeled().labels.tolist() == [
        0,
        1,
        0,
        0,
    ]


WRONG_LABELS = {
    "from 1": (ALTERNATING + 1, ["from 1 to 2", "0 to 1", "subtract 1"]),
    "unnamed": (ALTERNATING * 7, ["from 0 to 7", "0 to 1", "np.unique"]),
    "negative": (ALTERNATING - 2, ["-2", "-1 where"]),
    "huge": ([2**70] * COUNT, [str(2**70)]),
    "float": (ALTERNATING / 1, ["0.0", "float64", "astype(np.int64)"]),
    "half": (ALTERNATING / 2, ["0.5", "np.unique"]),
    "float tensor": (torch.tensor(ALTERNATING / 1, requires_grad=True), ["float64"]),
    "NaN": ([0, float("nan"), 1, 0, 1, 0], ["nan", "-1 where"]),
    "None": ([0, None, 1, 0, 1, 0], ["None", "-1 where"]),
    "text": (["cat", "dog"] * 3, ["'cat'", "np.unique"]),
    "short": (ALTERNATING[:5], ["6 images", "5 labels"]),
    "column": (ALTERNATING[:, None], ["(6, 1)", "reshape(-1)"]),
    "one-hot": (np.eye(2, dtype=int)[ALTERNATING], ["(6, 2)", "argmax"]),
    "ragged": ([[0], [1, 2], [], [], [], []], ["nested list"]),
    "generator": ((label for label in ALTERNATING), ["a generator"]),
    "0-dim": (np.array(1), ["of shape ()"]),
}


@pytest.mark.parametrize("kind", WRONG_LABELS)
def test_other_labels_are_refused(opened, kind: str):
    labels, named = WRONG_LABELS[kind]
    refused(lambda: opened(ImageData(Source(), labels, ["a", "b"])), "'mine'", *named)


@pytest.mark.parametrize("classes", ["ab", {"a": 0, "b": 1}, {"a", "b"}, [0, 1], 2, [b"a", b"b"], None, []])
def test_classes_are_a_list_of_text(opened, classes: Any):
    refused(lambda: opened(ImageData(Source(), ALTERNATING, classes)), "'mine'", "classes")


@pytest.mark.parametrize("change", [np.asfortranarray, read_only, lambda image: image.view(Subclass), np.array])
def test_any_array_of_pixels_is_read(opened, change: Any):
    image = opened(ImageData(Source(change), None, [])).read(3)
    np.testing.assert_array_equal(image, PIXELS)
    assert type(image) is np.ndarray and image.flags.carray


def test_a_flipped_image_is_read(opened):
    image = opened(ImageData(Source(lambda image: image[:, ::-1]), None, [])).read(0)
    np.testing.assert_array_equal(torch.from_numpy(image).flip(1), PIXELS)


def scaled(image: np.ndarray) -> np.ndarray:
    return (image / 255).astype(np.float32)


RGBA = np.concatenate([PIXELS, PIXELS[:, :, :1]], axis=2)
WRONG_IMAGES = {  # what read() returns, and the words of the error; the last is the remedy, which gives the image
    "PIL": (Image.fromarray(PIXELS), "PIL image of mode RGB", 'np.asarray(image.convert("RGB"))'),
    "tensor": (torch.tensor(PIXELS).permute(2, 0, 1), "(3, 8, 10)", "image.numpy().transpose(1, 2, 0)"),
    "float tensor": (
        torch.tensor(scaled(PIXELS)).permute(2, 0, 1),
        "float32",
        "(255 * image.numpy().transpose(1, 2, 0)).round().astype(np.uint8)",
    ),
    "channels first": (PIXELS.transpose(2, 0, 1), "(3, 8, 10)", "image.transpose(1, 2, 0)"),
    "batch": (PIXELS[None], "(1, 8, 10, 3)", "image[0]"),
    "RGBA": (RGBA, "(8, 10, 4)", "image[:, :, :3]"),
    "0 to 1": (scaled(PIXELS), "float32", "(255 * image).round().astype(np.uint8)"),
    "0 to 255": (PIXELS.astype(float), "float64", "image.round().astype(np.uint8)"),
    "int64": (PIXELS.astype(int), "int64", "image.astype(np.uint8)"),
    "uint16": (PIXELS.astype(np.uint16) << 8, "uint16", "(image >> 8).astype(np.uint8)"),
    "list": (PIXELS.tolist(), "a list", "np.asarray(image).astype(np.uint8)"),
}


@pytest.mark.parametrize("kind", WRONG_IMAGES)
def test_other_images_are_refused_with_a_remedy_that_works(opened, kind: str):
    image, problem, remedy = WRONG_IMAGES[kind]
    source = Source(lambda _: image, name=lambda index: f"image_{index}.raw")
    refused(lambda: opened(ImageData(source, None, [])), "image_0.raw", "'mine'", "uint8", problem, remedy)
    np.testing.assert_array_equal(eval(remedy, {"np": np, "image": image}), PIXELS)


GRAY = {"gray": PIXELS[:, :, 0], "one channel": PIXELS[:, :, :1], "one channel first": PIXELS[None, :, :, 0]}


@pytest.mark.parametrize("kind", GRAY)
def test_gray_images_are_refused_with_a_remedy_that_works(opened, kind: str):
    text = refused(lambda: opened(ImageData(Source(lambda _: GRAY[kind]), None, [])), "'mine'")
    converted = eval(text.partition(" RGB: ")[2], {"np": np, "image": GRAY[kind]})
    np.testing.assert_array_equal(converted, np.dstack([PIXELS[:, :, 0]] * 3))


@pytest.mark.parametrize(
    ("image", "named"),
    [
        (None, "return statement"),
        (b"\xff\xd8", "images.decode"),
        ("a.png", "images.decode"),
        ((PIXELS, 1), "labels"),
        ({"image": PIXELS}, "labels"),
        (PIXELS[:0], "empty"),
        (PIXELS[:, :, :2], "3 channels"),
        (PIXELS.astype(object), "not numbers"),
        (scaled(PIXELS) - 0.5, "normalized"),
        (PIXELS > 9, "255 * image"),
        ([[1], [1, 2]], "one length"),
        (torch.rand(3, 8, 8).bfloat16(), "0 to 255"),
    ],
)
def test_what_is_no_image_is_refused(opened, image: Any, named: str):
    refused(lambda: opened(ImageData(Source(lambda _: image), None, [])), "'mine'", named)


@pytest.mark.parametrize("loaded", [None, (PIXELS, ALTERNATING), ImageData, torch.utils.data.TensorDataset()])
def test_a_loader_must_return_image_data(opened, loaded: Any):
    refused(lambda: opened(loaded), "'mine'", "ImageData(source, labels, classes)", "MissingSplit")


@pytest.mark.parametrize("source", [None, Source, PIXELS, [PIXELS], (PIXELS for _ in range(COUNT))])
def test_a_source_must_have_its_methods(opened, source: Any):
    refused(lambda: opened(ImageData(source, None, [])), "'mine'", "source")


def test_an_array_has_a_name():
    refused(lambda: Array(PIXELS[None]), "Array({'NAME': images})")  # pyright: ignore


def test_a_source_of_no_images(opened):
    refused(lambda: opened(ImageData(Source(count=0), None, [])), "'mine'", "no images")


@pytest.mark.parametrize("name", [lambda index: index, lambda index: None, "abc".__getitem__])
def test_every_image_has_a_name_of_text(opened, name: Any):
    refused(lambda: opened(ImageData(Source(name=name), None, [])), "'mine'", "name(5)")


def test_a_path_is_a_name(opened):
    assert opened(ImageData(Source(name=lambda index: Path(str(index))), None, [])).image_name(3) == "3"


def test_errors_of_the_users_code_keep_their_traceback_and_name_the_image(opened, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise KeyError("a bug")

    with pytest.raises(KeyError) as raised:
        opened(ImageData(Source(fail), None, []))
    text = "".join(traceback.format_exception(raised.value))
    assert "read(0) of the data set 'mine' failed" in text and "in fail" in text
    monkeypatch.setitem(LOADERS, "mine", fail)
    with pytest.raises(KeyError) as raised:
        load("mine", "val")
    assert "the loader of the data set 'mine', called for 'val'" in "".join(traceback.format_exception(raised.value))
    monkeypatch.setitem(LOADERS, "mine", ImageData(Source(), None, []))  # type: ignore[arg-type]
    refused(lambda: load("mine", "train"), "'mine'", "load(split, root)")


@pytest.mark.parametrize("error", [CorruptImage("cannot decode image 0"), UserError("the server is down")])
def test_errors_in_one_line_pass(opened, error: UserError):
    """A corrupt image is left to DATALOADER.ON_CORRUPT."""

    def fail(_: Any) -> Any:
        raise error

    if isinstance(error, CorruptImage):
        refused(lambda: opened(ImageData(Source(fail), None, [])).read(0), "cannot decode image 0")
    else:
        refused(lambda: opened(ImageData(Source(fail), None, [])), "the server is down")
