"""Whatever a config file or an override holds: it is merged, or it ends in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretrain.common.config_io import merge_file, merge_overrides
from pretrain.common.errors import UserError
from pretrain.config import default_config

FILES = {
    "empty": ("", "does not hold KEY: VALUE lines"),
    "base is a list of numbers": ("_BASE_: [1]\n", "it or its _BASE_ does not hold KEY: VALUE lines"),
    "base is itself": ("_BASE_: a.yaml\n", "its _BASE_ leads back to itself"),
    "base is a folder": ("_BASE_: .\n", "cannot read its _BASE_ .*: Is a directory"),
    "base is empty": ("_BASE_: empty.yaml\nSEED: 1\n", "it or its _BASE_ does not hold KEY: VALUE lines"),
    "section is a list": ("SOLVER: []\n", "SOLVER in .* is a section, not a value"),
    "value is a section": ("SEED: {a: 1}\n", "unknown config key SEED.a"),
    "not UTF-8": (b"SEED: \xff\n", "is not a YAML config"),
    "a word for a number": ("SOLVER: {BASE_LR: fast}\n", "SOLVER.BASE_LR in .* must be a number, not 'fast'$"),
    "a fraction for a whole number": ("SEED: 1.5\n", "SEED in .* must be a whole number, not 1.5$"),
    "a number for a list": ("LINEAR: {LRS: 3}\n", "LINEAR.LRS in .* must be a list, not 3$"),
    "a number for a string": ("DATA: {TRAIN: 3}\n", "DATA.TRAIN in .* must be a string, not 3$"),
    "a number for a switch": ("DATA: {DOWNLOAD: 3}\n", "DATA.DOWNLOAD in .* must be true or false, not 3$"),
    "a date": ("SEED: 2020-99-99\n", "is not a YAML config: month must be in"),
}

OVERRIDES = {
    "a word for a number": (["SOLVER.BASE_LR", "fast"], "SOLVER.BASE_LR must be a number, not 'fast'$"),
    "a list for a number": (["SEED", "[1]"], r"SEED must be a whole number, not '\[1\]'$"),
    "a number for a switch": (["DATA.DOWNLOAD", "1"], "DATA.DOWNLOAD must be true or false, not '1'$"),
    "not UTF-8": (["OUTPUT_DIR", os.fsdecode(b"odd\xff")], "OUTPUT_DIR is .*bytes that are not UTF-8"),
    "a line break": (["OUTPUT_DIR", "a\nb"], r"OUTPUT_DIR is 'a\\nb', with a line break, a control character or bytes"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "empty.yaml").write_text("")
    return tmp_path


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_config_is_one_line(folder: Path, kind: str) -> None:
    text, message = FILES[kind]
    (folder / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as caught:
        merge_file(default_config(), folder / "a.yaml")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", OVERRIDES)
def test_an_override_that_is_no_value_is_one_line(kind: str) -> None:
    words, message = OVERRIDES[kind]
    with pytest.raises(UserError, match=message) as caught:
        merge_overrides(default_config(), words)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
