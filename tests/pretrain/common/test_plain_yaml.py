"""A config's text, however it was made, is read or is a ValueError."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretrain.common import plain_yaml

LAUGHS = "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40))
MERGES = "a0: &a0 {k0: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "its aliases stand for more than 100,000 values"),
        (MERGES, "its aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "its aliases stand for more than 100,000 values"),
        ("a: !!timestamp b", "is not YAML"),
        ("a: 1" + ":1" * 2000 + ".0", "is not YAML"),
        ("a: !!python/object:os.system {}", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("a: " + "1" * 300_000, "longer than 262,144 characters"),
        ("\x07", "is not YAML"),
        ("", "holds a NoneType"),
        ("[a]", "holds a list"),
    ],
)
def test_what_is_no_config_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain_yaml.load(text)


def test_aliases_are_read() -> None:
    """Detectron2 writes them for lists that two keys share."""
    assert plain_yaml.load("A: &id001 [1, 2]\nB: {C: *id001}\n") == {"A": [1, 2], "B": {"C": [1, 2]}}


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert [plain_yaml.load_file(tmp_path / name) for name in ("pipe", "zero", "none")] == [{}, {}, {}]
    (tmp_path / "a.yaml").write_text("A: 1")
    assert plain_yaml.load_file(tmp_path / "a.yaml") == {"A": 1}
