"""The Detectron2 engine's reader and loaders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pretrain.common.errors import UserError
from tests.transfer import tiny_coco

pytest.importorskip("detectron2")


@pytest.mark.parametrize("workers", [0, 1])
def test_test_images_are_scaled_or_named(tmp_path: Path, workers: int) -> None:
    from detectron2.config import get_cfg

    from transfer.detectron2_engine import data as detectron2_data

    name = tiny_coco.write(tmp_path / "data")
    cfg = get_cfg()
    keys = {"DATALOADER__NUM_WORKERS": workers, "INPUT__MIN_SIZE_TEST": 0}
    cfg.merge_from_other_cfg(tiny_coco.config(tmp_path / "out", name, **keys))
    detectron2_data.register(name)
    Image.fromarray(np.full((64, 96), 25700, np.uint16)).save(tmp_path / "data" / "1.png")
    batches = detectron2_data.test_batches(cfg, name)
    assert len(batches) == 6
    images = [batch[0]["image"] for batch in batches]
    assert len(images) == 6 and images[0].unique().tolist() == [100]
    path = tmp_path / "data" / "2.png"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=r"cannot read image .*2\.png") as caught:
        list(batches)
    assert "\n" not in str(caught.value)


def test_a_mask_that_would_crash_pycocotools_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer.detectron2_engine import data as detectron2_data

    tiny_coco.write(tmp_path / "coco" / "val2017")
    (tmp_path / "coco" / "annotations").mkdir()
    path = tmp_path / "coco" / "annotations" / "instances_val2017.json"
    content = json.loads((tmp_path / "coco" / "val2017" / "annotations.json").read_text())
    content["annotations"][0]["segmentation"] = [[0, 0, 1e9, 0, 9, 9]]
    path.write_text(json.dumps(content))
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    for name in ("coco_2017_val", f"coco:{path}:{tmp_path / 'coco' / 'val2017'}"):  # the first is Detectron2's own
        with pytest.raises(UserError, match=r"annotation 1 of image 1: polygon reaches from 0 to 1e\+09"):
            detectron2_data.register(name)
