"""The Detectron2 engine's reader and loaders."""

from __future__ import annotations

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

    from transfer import detectron2_data

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
