"""Test images that are training images under another name are found by their content."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.common.image_checks import equal_files
from tests.transfer import tiny_coco


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
    train = equal_files.read_sizes(str(tmp_path / name) for name in ("b", "a", "gone"))
    test = equal_files.read_sizes(
        str(tmp_path / name) for name in ("x", "y", "z", "short", "empty", "link", "gone_too")
    )
    (tmp_path / "removed").write_bytes(content.tobytes())
    train |= equal_files.read_sizes([str(tmp_path / "removed")])
    (tmp_path / "removed").unlink()
    expected = {str(tmp_path / name): str(tmp_path / "a") for name in ("x", "link")}
    assert equal_files.find_equal_files(train, test) == expected
    assert equal_files.find_equal_files(train, {}) == {}


def test_only_files_that_may_be_equal_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"train{number}").write_bytes(bytes(2 * number + 1))
        (tmp_path / f"test{number}").write_bytes(bytes(2 * number + 2))
    (tmp_path / "test7").write_bytes(b"1" * 21)  # the size of train10
    calls: list[str] = []
    for name in ("_read_sample", "sha256"):
        function = getattr(equal_files, name)

        def spy(*arguments: Any, name: str = name, function: Any = function) -> object:
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(equal_files, name, spy)
    sizes = [
        equal_files.read_sizes(str(tmp_path / f"{kind}{number}") for number in range(40)) for kind in ("train", "test")
    ]
    assert equal_files.find_equal_files(*sizes) == {} and calls == 2 * ["_read_sample"]


def test_a_digest_is_the_same_in_another_folder_and_another_for_other_files(tmp_path: Path) -> None:
    def digest(folder: str, **files: int) -> str:
        for name, size in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(size))
        return equal_files.digest_files(equal_files.read_sizes(map(str, sorted((tmp_path / folder).iterdir()))))

    assert digest("first", a=3, b=4) == digest("second", b=4, a=3)
    assert len({digest("first"), digest("third", a=4, b=3), digest("fourth", a=3), digest("fifth", a=3, c=4)}) == 4


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
