"""What is recorded of a file is what it says itself; only a detector also takes it from the files next to it.

Every kind of file lies next to every kind of neighbor, and is converted with every option. One rule gives the record.
"""

import functools
import itertools
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import save_file

from pretrain.common.weights import file
from pretrain.common.weights.resnet_names import PREFIX, to_detectron2
from tests.errors import refused
from tests.resnets import moco, resnet_state
from transfer.weights import verify
from transfer.weights.convert import convert, open_source, read_source
from transfer.weights.load import read_weights

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
KEYS = ("INPUT.FORMAT", "MODEL.RESNETS.STRIDE_IN_1X1", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD")
Values = dict[str, Any]
PLAIN: Values = {"INPUT.FORMAT": "RGB", "MODEL.RESNETS.STRIDE_IN_1X1": False}
CAFFE: Values = {"INPUT.FORMAT": "BGR", "MODEL.RESNETS.STRIDE_IN_1X1": True}
MSRA: Values = {**CAFFE, "MODEL.PIXEL_MEAN": [103.53, 116.28, 123.675], "MODEL.PIXEL_STD": [1.0] * 3}
SAID: Values = {"MODEL.PIXEL_MEAN": [1.0, 2.0, 3.0], "MODEL.PIXEL_STD": [4.0, 5.0, 6.0]}
VIEWS: Values = {"MODEL.PIXEL_MEAN": [127.5, 102.0, 76.5], "MODEL.PIXEL_STD": [51.0] * 3}
READ_CONTENT = file.read_content
NO_HEADS = "model_0000004.pth"
PRETRAINING = "METHOD: {NAME: jcl}\nVIEWS: {MEAN: [0.5, 0.4, 0.3], STD: [0.2, 0.2, 0.2]}\n"


def detectron2(prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    return {prefix + name: t for name, t in to_detectron2(resnet_state(head=False), "resnet18").items()}


def detector(prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    return {**detectron2(prefix), "roi_heads.box_predictor.cls_score.weight": torch.ones(4, 8)}


def arrays(state: dict[str, torch.Tensor]) -> Values:
    return {name: tensor.numpy() for name, tensor in state.items()}


def save(content: Any, path: Path) -> None:
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(content))
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)


def save_converted(path: Path, **options: Any) -> None:
    torch.save(resnet_state(seed=1), path.with_name("before.pth"))
    convert(path.with_name("before.pth"), path, pixel_mean=[1.0, 2.0, 3.0], pixel_std=[4.0, 5.0, 6.0], **options)


class Kind(NamedTuple):
    """A kind of source: its name, a function that writes it, and what the file itself records."""

    name: str
    write: Callable[[Path], None]
    own: Values = {}  # noqa: RUF012
    is_detector: bool = False


def kind(name: str, content: Callable[[], Any], *args: Any) -> Kind:
    return Kind(name, lambda path: save(content(), path), *args)


def zoo() -> Values:
    return {"model": arrays(detector()), "__author__": "Detectron2 Model Zoo"}


def mmdetection() -> Values:
    state = {f"backbone.{name}": tensor for name, tensor in resnet_state(head=False).items()}
    return {"meta": {"config": "backbone=dict(style='caffe')"}, "state_dict": state}


SOURCES = {
    "torchvision": kind("resnet50.pth", resnet_state),
    "torchvision, a detector's name": kind("model_final.pth", lambda: {"model": resnet_state(), "iteration": 9}),
    "safetensors": kind("resnet.safetensors", resnet_state),
    "MoCo": kind("checkpoint_0199.pth.tar", lambda: moco(resnet_state(head=False), resnet_state(head=False, seed=2))),
    "pretraining": kind(
        "checkpoint_final.pth", lambda: {**moco(resnet_state(head=False), {}), "config": PRETRAINING}, VIEWS
    ),
    "detector": kind("model_0000009.pth", lambda: {"model": detector(), "iteration": 9}, {}, True),
    "detector, renamed": kind("best.pth", detector, {}, True),
    "detector, no heads": kind(NO_HEADS, lambda: {"model": detectron2(), "iteration": 9}, {}, True),
    "C4": kind("model_final.pth", lambda: {"model": detector("backbone."), "iteration": 9}, {}, True),
    "Detectron2, backbone": kind(
        "model_moco.pkl",
        lambda: {"model": arrays(detectron2("")), "__author__": "MOCO", "matching_heuristics": True},
    ),
    "Detectron2, backbone in full names": kind("model_moco.pth", lambda: {"model": detectron2()}),
    "model zoo": kind("model_final_f10217.pkl", zoo, MSRA),
    "mmdetection, caffe": kind("faster_rcnn.pth", mmdetection, CAFFE),
    "converted .pth": Kind("model_w.pth", save_converted, {**PLAIN, **SAID}),
    "converted .pkl": Kind("w.pkl", save_converted, {**PLAIN, **SAID}),
    "converted .safetensors": Kind("w.safetensors", save_converted, {**PLAIN, **SAID}),
    "converted, plain": Kind(
        "model_plain.pth", functools.partial(save_converted, to_torchvision=True), {**PLAIN, **SAID}
    ),
}


def describe(depth: int = 18, classes: int = 3) -> str:
    """Return the config.yaml of a detector with MSRA's input."""
    resnets = {"STRIDE_IN_1X1": True, "DEPTH": depth}
    model = {"PIXEL_MEAN": MSRA["MODEL.PIXEL_MEAN"], "PIXEL_STD": MSRA["MODEL.PIXEL_STD"], "RESNETS": resnets}
    model["ROI_HEADS"] = {"NUM_CLASSES": classes}
    extra = {"UNKNOWN": {"KEY": 1}}  # of a project that builds on Detectron2
    return yaml.safe_dump({"MODEL": model, "INPUT": {"FORMAT": "BGR"}, "DATASETS": {"TRAIN": ["a"]}, **extra})


BEFORE = {"path": "w.pth", "sha256": "ab", "provenance": {"source": "run.pth", "method": "jcl", "source_sha256": "cd"}}
NEIGHBORS: dict[str, tuple[dict[str, str], Values, list[str]]] = {  # files, and what they record of their detector
    "nothing": ({}, {}, []),
    "a detector's config": ({"config.yaml": describe()}, MSRA, ["a"]),
    "a run folder": ({"config.yaml": describe(), "initial_weights.json": json.dumps(BEFORE)}, MSRA, ["a"]),
    "last_checkpoint of another": ({"config.yaml": describe(), "last_checkpoint": "model_0000004.pth"}, MSRA, ["a"]),
    "a config of another depth": ({"config.yaml": describe(depth=50)}, {}, []),
    "a config of other classes": ({"config.yaml": describe(classes=80)}, {}, []),
    "a config of pretraining": ({"config.yaml": PRETRAINING}, {}, []),
    "another program's config": ({"config.yaml": "{{ template"}, {}, []),
    "another program's record": ({"FILE.json": '{"INPUT.FORMAT": "BGR", "MODEL.PIXEL_MEAN": [7, 7, 7]}'}, {}, []),
}


@functools.cache
def write(source: str) -> dict[str, bytes]:
    """Return the files of a source, by their names: a conversion has its own record."""
    with tempfile.TemporaryDirectory() as folder:
        SOURCES[source].write(Path(folder, SOURCES[source].name))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "before.pth"}


@pytest.fixture(autouse=True)
def _files_are_decoded_once_and_features_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records do not depend on these, and hundreds of conversions take seconds without them."""
    monkeypatch.setattr(verify, "check_conversion", lambda *_, **__: {})
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(file, "read_content", lambda path: decode(path.read_bytes(), path.suffix))


@functools.cache
def decode(content: bytes, suffix: str) -> Any:
    with tempfile.NamedTemporaryFile(suffix=suffix) as copy:
        copy.write(content)
        copy.flush()
        return READ_CONTENT(Path(copy.name))


@pytest.mark.parametrize(("source", "neighbor"), list(itertools.product(SOURCES, NEIGHBORS)))
def test_only_a_detector_takes_something_from_its_neighbors(tmp_path: Path, source: str, neighbor: str) -> None:
    kind = SOURCES[source]
    files, of_neighbor, fine_tuned_on = NEIGHBORS[neighbor]
    path = tmp_path / "folder" / kind.name
    path.parent.mkdir()
    for name, content in write(source).items():
        path.with_name(name).write_bytes(content)
    for name, text in files.items():
        place = path.with_name(name.replace("FILE", path.name))
        if not place.exists():  # a conversion has its own record there
            place.write_text(text)
    if kind.name == NO_HEADS and neighbor == "a config of other classes":
        of_neighbor = MSRA  # nothing in the file says how many classes it has
        fine_tuned_on = ["a"]
    expected = {**of_neighbor} if kind.is_detector else {**PLAIN, **kind.own}  # Detectron2's own default is BGR

    recorded = convert(path, tmp_path / "out.safetensors").provenance.to_json()
    assert {key: recorded[key] for key in KEYS if key in recorded} == expected
    assert recorded.get("fine_tuned_on", []) == (fine_tuned_on if kind.is_detector else [])
    assert recorded["source"] == path.name
    prefix = recorded.get("prefix")
    if prefix:
        assert read_source(open_source(path), prefix=prefix).provenance.to_json() == recorded
    options: Values = {"to_torchvision": True, "encoder": "query"}
    statistics: Values = {"pixel_mean": [1, 2, 3], "pixel_std": [4, 5, 6]}
    if "MODEL.PIXEL_MEAN" in expected:
        refused(lambda: convert(path, tmp_path / "said.safetensors", **statistics), "records MODEL.PIXEL_MEAN")
    else:
        options |= statistics
        expected |= SAID
    plain = convert(path, tmp_path / "plain.safetensors", **options).provenance.to_json()
    assert {key: plain[key] for key in KEYS if key in plain} == expected
    if kind.is_detector:  # as MODEL.WEIGHTS or --eval-only reads it
        direct = read_weights(path).summary()["provenance"]
        assert {key: direct[key] for key in KEYS if key in direct} == of_neighbor


@pytest.mark.parametrize("source", ["torchvision", "detector"])
def test_a_link_belongs_to_the_folder_of_its_file(tmp_path: Path, source: str) -> None:
    kind = SOURCES[source]
    for folder in ("run", "elsewhere"):
        (tmp_path / folder).mkdir()
    kind.write(tmp_path / "elsewhere" / kind.name)
    (tmp_path / "run" / "link.pth").symlink_to(tmp_path / "elsewhere" / kind.name)
    for folder in ("run", "elsewhere"):  # a download cache has config.yaml next to the link, a run next to the file
        (tmp_path / folder / "config.yaml").write_text(describe())
        provenance = convert(tmp_path / "run/link.pth", tmp_path / "out.pth", overwrite=True).provenance
        assert provenance.input and provenance.input.format == ("BGR" if kind.is_detector else "RGB")
        (tmp_path / folder / "config.yaml").unlink()
