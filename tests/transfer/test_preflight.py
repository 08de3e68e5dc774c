"""What fine-tuning checks before it imports torch: the ends of the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.errors import refused
from tests.transfer import tiny_coco
from transfer.coco import data


def test_ends_of_the_data_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = tiny_coco.write(tmp_path)
    cfg = tiny_coco.config(tmp_path, name)
    data.check_early(cfg, [name])
    last = tmp_path / "6.png"
    last.write_bytes(last.read_bytes()[:200])
    refused(lambda: data.check_early(cfg, [name]), last)
    monkeypatch.setattr(data, "_LARGE_BYTES", 1000)
    data.check_early(cfg, [name])  # too slow to read here
