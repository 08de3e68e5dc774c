import csv

import pytest

from pretrain.config import load_config
from pretrain.probe import embedding

pytestmark = pytest.mark.usefixtures("tiny_resnet18")


def test_two_colors_are_apart_on_the_map(images, tmp_path):
    cfg = load_config(None, [
        "MODEL.ARCH", "resnet18", "PROBE.CROP", "none", "DATA.TRAIN", f"folder:{images}", "VIEWS.IMAGE_SIZE", "16",
        "DATALOADER.NUM_WORKERS", "0", "DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path),
    ])  # fmt: skip
    results = embedding.main(cfg, "random")
    rows = list(csv.DictReader((tmp_path / "embedding.csv").open()))
    assert len(rows) == results["images"] == 16
    points = [(float(r["x"]), float(r["y"]), r["label"]) for r in rows]
    for x, y, label in points:  # the nearest other point has the same color
        near = min((p for p in points if p[:2] != (x, y)), key=lambda p: (p[0] - x) ** 2 + (p[1] - y) ** 2)
        assert near[2] == label
    assert (tmp_path / "embedding.png").read_bytes().startswith(b"\x89PNG")
