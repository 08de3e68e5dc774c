"""The torchvision engine's loaders, without Detectron2."""

from __future__ import annotations

import itertools

import pytest
import torch

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco
from tests.transfer.torchvision_engine.test_mapper import mapper
from transfer.torchvision_engine import data, loader


def test_the_same_position_gives_the_same_record_whatever_came_before(tmp_path):
    records, _ = data.load_coco(tiny_coco.write(tmp_path))
    dataset = loader.Mapped(records, mapper(sizes=[64, 70, 90], flip=True, masks="polygon"), seed=3)
    first, other, again = dataset[(17, 2)], dataset[(18, 2)], dataset[(17, 2)]
    assert torch.equal(first["image"], again["image"])
    assert torch.equal(first["target"]["boxes"], again["target"]["boxes"])
    pictures = {
        tuple(dataset[(p, 2)]["image"].shape) + (dataset[(p, 2)]["image"][0, 9, :9].sum().item(),) for p in range(40)
    }
    assert len(pictures) == 6  # three sizes, flipped or not
    assert other["file_name"] == first["file_name"]
    assert "target" not in loader.Mapped(records, mapper(), None)[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named_in_one_line(tmp_path, workers):
    name = tiny_coco.write(tmp_path)
    path = tmp_path / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    cfg = tiny_coco.config(tmp_path / "out", name, DATALOADER__NUM_WORKERS=workers)
    records, info = data.training_records(cfg)
    training = loader.training_batches(cfg, records, info.flip, 0, 1, seed=0, start=0, workers=workers)
    for batches in (itertools.islice(training, 9), loader.evaluation_batches(cfg, records, range(6))):
        with pytest.raises(UserError, match=r"cannot read image .*2\.png") as caught:
            list(batches)
        assert "\n" not in str(caught.value)
