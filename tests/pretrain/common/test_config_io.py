"""Whatever a config file or an override holds: it is merged, or it ends in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretrain.common.config_io import merge_file, merge_overrides
from pretrain.config import default_config
from tests.errors import refused

FILES = {
    "": "KEY: VALUE", "_BASE_: [1]\n": "_BASE_", "_BASE_: a.yaml\n": "_BASE_", "_BASE_: .\n": "Is a directory",
    "_BASE_: empty.yaml\nSEED: 1\n": "_BASE_", "SOLVER: []\n": "section", "SEED: {a: 1}\n": "SEED.a",
    "SEED: \xff\n": "a.yaml", "SOLVER: {BASE_LR: fast}\n": "a number, not 'fast'", "SEED: 1.5\n": "whole number",
    "LINEAR: {LRS: 3}\n": "a list, not 3", "DATA: {TRAIN: 3}\n": "a string, not 3", "SEED: null\n": "None",
    "DATA: {DOWNLOAD: 3}\n": "true or false, not 3", "SEED: 2020-99-99\n": "month",
}  # fmt: skip


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "a.yaml").write_bytes(text.encode("latin1"))
    assert len(refused(lambda: merge_file(default_config(), tmp_path / "a.yaml"), FILES[text])) < 600


def test_what_python_would_have_to_run_names_its_remedy(tmp_path: Path) -> None:
    base, lazy = tmp_path / "base.yaml", tmp_path / "lazy.py"
    base.write_text('SIZES: !!python/object/apply:eval ["[[x, x * 2**(1.0/3)] for x in [32, 64]]"]\n')
    (tmp_path / "a.yaml").write_text("_BASE_: base.yaml\n")
    remedy = "[[32, 40.3175, 50.7968], [64, 80.6349, 101.5937], [128, "
    refused(lambda: merge_file(default_config(), tmp_path / "a.yaml"), base, "python/object/apply:eval", remedy)
    lazy.write_text("train = dict()\n")
    refused(lambda: merge_file(default_config(), lazy), lazy, "YAML")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["DATA.DOWNLOAD", "None"], "'None'"),
        (["METHOD.MARGIN", "1"], "--import"),
        (["OUTPUT_DIR", os.fsdecode(b"odd\xff")], "UTF-8"),
        (["SEED"], "KEY VALUE"),
    ],
)
def test_an_override_that_is_no_value_is_one_line(words: list[str], says: str) -> None:
    refused(lambda: merge_overrides(default_config(), words), words[0], says)


def test_a_whole_number_is_a_value_of_a_key_that_takes_fractions(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("SOLVER: {BASE_LR: 30}\n")
    cfg = default_config()
    merge_file(cfg, tmp_path / "a.yaml")
    merge_overrides(cfg, ["LINEAR.BASE_LR", "-3"])
    assert (cfg.SOLVER.BASE_LR, cfg.LINEAR.BASE_LR) == (30.0, -3.0)
