"""Test images that are training images under another name are found by their content."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.transfer import tiny_coco
from transfer.coco import equal_files


def test_equal_files_are_found_and_only_these(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    changed = content.copy()
    changed[5] ^= 1  # outside of the middle
    other = content.copy()
    other[10_000] ^= 1
    files = {
        "b": content,
        "a": content,
        "x": content,
        "y": changed,
        "z": other,
        "short": content[:-1],
        "empty": content[:0],
    }
    for name, values in files.items():
        (tmp_path / name).write_bytes(values.tobytes())
    (tmp_path / "link").symlink_to(tmp_path / "a")
    train = [str(tmp_path / name) for name in ("b", "a", "gone")]
    test = [str(tmp_path / name) for name in ("x", "y", "z", "short", "empty", "link", "gone_too")]
    expected = {str(tmp_path / name): str(tmp_path / "a") for name in ("x", "link")}
    assert equal_files.find_equal_files(train, test) == expected
    assert equal_files.find_equal_files(train, []) == {}


def test_only_files_that_may_be_equal_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"train{number}").write_bytes(bytes(2 * number + 1))
        (tmp_path / f"test{number}").write_bytes(bytes(2 * number + 2))
    (tmp_path / "test7").write_bytes(b"1" * 21)  # the size of train10
    calls: list[str] = []
    for name in ("_read_sample", "sha256"):
        function = getattr(equal_files, name)

        def spy(path: str, name: str = name, function: Any = function) -> object:
            calls.append(name)
            return function(path)

        monkeypatch.setattr(equal_files, name, spy)
    paths = [[str(tmp_path / f"{kind}{number}") for number in range(40)] for kind in ("train", "test")]
    assert equal_files.find_equal_files(*paths) == {} and calls == 2 * ["_read_sample"]


def test_copies_under_other_names_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = tiny_coco.write(tmp_path / "train")
    test = tiny_coco.write(tmp_path / "test")  # the same drawings
    folder = Path(test.split(":")[2])
    images = sorted(path for path in folder.iterdir() if path.suffix == ".png")
    images[0].write_bytes(images[0].read_bytes() + b" ")  # still a PNG
    cfg = tiny_coco.config(tmp_path / "out", train, DATASETS__TEST=(test,))
    tiny_coco.check_data_sets(cfg, [train, test])
    [line] = [message for message in caplog.messages if "metrics are computed on training images" in message]
    number = len(images)
    assert f"share {number - 1} of {number}" in line and os.path.join(folder, images[1].name) in line
    assert os.path.join(folder, images[0].name) not in line
