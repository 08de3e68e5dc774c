"""The share of the labels that probes learn from: by class, nested, seeded; or a list of names."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pretrain import datasets, distributed
from pretrain.common import interrupt
from pretrain.common.errors import UserError
from pretrain.config import load_config
from pretrain.probe import knn, labels, linear
from pretrain.probe.data import probe_data
from tests.pretrain.ranks import run_ranks


@pytest.fixture
def train(images):
    return datasets.load(f"folder:{images}", "train")


def _names(data):
    return [data.image_name(position) for position in range(len(data))]


def test_a_share_is_of_each_class_and_within_a_larger_one(train):
    ten, fifty = labels.chosen(train, "10%"), labels.chosen(train, "50%")
    assert np.bincount(ten.labels).tolist() == [2, 2] and np.bincount(fifty.labels).tolist() == [12, 12]
    assert set(_names(ten)) < set(_names(fifty)) < set(_names(train)) and _names(fifty) == sorted(_names(fifty))
    assert _names(ten) == _names(labels.chosen(train, "10%:0")) != _names(labels.chosen(train, "10%:1"))
    assert all(_class_of(name) == label for name, label in zip(_names(ten), ten.labels, strict=True))
    assert len(labels.chosen(train, "0.1%")) == 2  # one per class
    assert _names(labels.chosen(train, "100%")) == _names(labels.chosen(train, "")) == _names(train)


def _class_of(name):
    return int(Path(name).parent.name.removeprefix("class"))


def test_a_list_names_images_with_any_of_their_folders(train, tmp_path):
    file = tmp_path / "list.txt"
    file.write_text("class1/003.png\n\n  train/class0/007.png\n")
    found = labels.chosen(train, str(file))
    assert [Path(name).parts[-2:] for name in _names(found)] == [("class0", "007.png"), ("class1", "003.png")]
    assert found.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("class0/001.png\nclass0/001.png", "names an image twice"),
        ("class0/001.png\ntrain/class0/001.png", "names an image twice"),
        ("001.png", "names 001.png, and several images have that name; write it with its folder"),
        ("class0/001.png\nclass0/1.png", "names images that the data set does not have (1): class0/1.png"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(train, tmp_path, text, says):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(UserError) as caught:
        labels.chosen(train, str(tmp_path / "list.txt"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("0%", "above 0% and at most 100%"),
        ("101%", "above 0% and at most 100%"),
        ("1%:a", "write a share as 1% or 1%:3"),
        ("gone.txt", "no list of images in DATA.PROBE_LABELS at gone.txt"),
    ],
)
def test_what_is_neither_a_share_nor_a_file_is_refused(train, wanted, says):
    for refuse in (labels.refuse_missing, lambda wanted: labels.chosen(train, wanted)):
        with pytest.raises(UserError) as caught:
            refuse(wanted)
        assert says in str(caught.value)


def _config(images, output, wanted):
    return load_config(None, [
        "MODEL.ARCH", "resnet18", "MODEL.STEM", "cifar", "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16",
        "LINEAR.IMS_PER_BATCH", "4", "LINEAR.EPOCHS", "1", "LINEAR.AUGMENT", "none", "DATALOADER.NUM_WORKERS", "0",
        "DEVICE", "cpu", "OUTPUT_DIR", str(output), "DATA.PROBE_LABELS", str(wanted),
    ])  # fmt: skip


def test_probes_learn_from_the_share_alone_and_say_so(images, tmp_path):
    cfg = _config(images, tmp_path, "25%")
    data = probe_data(cfg)
    assert (len(data.train), len(data.val)) == (12, 16)
    linear.main(cfg, "random")
    recorded = json.loads((tmp_path / "results.json").read_text())["protocol"]
    assert (recorded["labels"], recorded["train_images"]) == ("25%", 12)
    for other in ("50%", ""):  # also without the key, of which the results of all labels do not speak
        with pytest.raises(UserError, match=r"holds a different probe.*labels"):
            linear.main(_config(images, tmp_path, other), "random")


def test_a_list_may_move_but_not_change(images, tmp_path):
    names = [f"class{c}/00{i}.png" for c in range(2) for i in range(2)]
    (tmp_path / "list.txt").write_text("\n".join(names))
    done = linear.main(_config(images, tmp_path / "run", tmp_path / "list.txt"), "random")
    moved = (tmp_path / "elsewhere").mkdir() or (tmp_path / "list.txt").rename(tmp_path / "elsewhere/list.txt")
    assert linear.main(_config(images, tmp_path / "run", moved), "random") == done
    moved.write_text("\n".join([*names[1:], "class0/005.png"]))
    with pytest.raises(UserError, match=r"holds a different probe.*list.txt \(sha256 "):
        linear.main(_config(images, tmp_path / "run", moved), "random")


def test_features_of_other_images_are_not_taken_for_those_of_an_edited_list(images, tmp_path, monkeypatch):
    """kNN is stopped between the features that it learns from and those that it is scored on."""
    file = tmp_path / "list.txt"
    file.write_text("class0/001.png\nclass1/001.png\n")
    real = knn.extract

    def stopped(backbone, data, *args, **kwargs):
        if len(data) == 16:
            raise interrupt.Stopped("asked")
        return real(backbone, data, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(interrupt.Stopped):
        patch.setattr(knn, "extract", stopped)
        knn.main(_config(images, tmp_path / "run", file), "random")
    assert list((tmp_path / "run").glob("features_train.*"))
    file.write_text("class0/002.png\nclass1/007.png\n")
    learned, classify = [], knn.classify
    monkeypatch.setattr(knn, "classify", lambda train, *a, **k: learned.append(train) or classify(train, *a, **k))
    for folder in ("run", "new"):
        knn.main(_config(images, tmp_path / folder, file), "random")
    assert torch.equal(learned[0].features_NF, learned[1].features_NF)


def _with_a_list_per_rank(images, folder) -> None:
    file = folder / f"{distributed.rank()}" / "list.txt"
    file.parent.mkdir()
    file.write_text(f"class0/00{distributed.rank()}.png\nclass1/001.png\n")
    with pytest.raises(UserError, match="what the probe learns from differs between ranks"):
        knn.main(_config(images, folder / "run", file), "random")


def test_ranks_with_other_lists_are_refused(images, tmp_path):
    run_ranks(_with_a_list_per_rank, 2, images, tmp_path)


def _with_a_list_that_one_rank_cannot_read(images, folder) -> None:
    file = folder / "list.txt"
    if distributed.rank() == 1:
        labels.sha256 = _unreadable
    for probe in (knn, linear):
        with pytest.raises(UserError, match=r"cannot read .*list\.txt"):
            probe.main(_config(images, folder / probe.__name__, file), "random")


def _unreadable(path):
    raise UserError(f"cannot read {path}")


def test_a_list_that_one_rank_cannot_read_ends_all_ranks(images, tmp_path):
    (tmp_path / "list.txt").write_text("class0/001.png\nclass1/001.png\n")
    run_ranks(_with_a_list_that_one_rank_cannot_read, 2, images, tmp_path)
