"""A config file or an override is merged, or the command ends with one line, whatever it contains."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from fvcore.common.config import CfgNode

from pretrain.common.config import yaml_io
from pretrain.common.config.limits import Range
from pretrain.common.config.yaml_io import dump, get, load_yaml
from pretrain.config import default_config, from_yaml_text
from pretrain.keys import list_keys
from tests.errors import refused
from transfer import config as fine_tuning

FILES = {  # content of a file -> what the error says
    "": "empty",
    "_BASE_: [1]\n": "_BASE_",
    "_BASE_:\n": "_BASE_",
    "_BASE_: a.yaml\n": "refers to itself",
    "_BASE_: .\n": "Is a directory",
    "_BASE_: empty.yaml\nSEED: 1\n": "empty",
    "- SEED\n": "a list",
    "SOLVER: []\n": "section",
    "SEED: {a: 1}\n": "SEED.a",
    "SEED: \xff\n": "save it as UTF-8",
    "SOLVER: {BASE_LR: fast}\n": "a number, not 'fast'",
    "SEED: 1.5\n": "whole number",
    "LINEAR: {LRS: 3}\n": "a list, not 3",
    "DATA: {TRAIN: 3}\n": "a string, not 3",
    "SEED: null\n": "None",
    "DATA: {DOWNLOAD: 3}\n": "true or false, not 3",
    "SEED: 2020-99-99\n": "month",
}


def merge(cfg: CfgNode, file: Path | None, overrides: Sequence[object] = ()) -> None:
    yaml_io.merge(cfg, list_keys(), file, overrides)


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "a.yaml").write_bytes(text.encode("latin1"))
    assert len(refused(lambda: merge(default_config(), tmp_path / "a.yaml"), FILES[text])) < 600


def test_the_file_that_sets_a_key_is_returned_and_named_in_errors(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    recipe = tmp_path / "recipe.yaml"
    base.write_text("SEED: 1\nSOLVER: {BASE_LR: 0.5, GAMMA: 0.5}\n")
    recipe.write_text("_BASE_: base.yaml\nSOLVER: {BASE_LR: 0.25}\n")
    places = yaml_io.merge(default_config(), list_keys(), recipe, ["SEED", "3"])
    assert places == {"SEED": "", "SOLVER.BASE_LR": f" in {recipe}", "SOLVER.GAMMA": f" in {base}"}
    base.write_text("SOLVR: {GAMMA: 0.5}\n")
    refused(lambda: merge(default_config(), recipe), f"SOLVR.GAMMA in {base};")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), None, True])
def test_what_is_no_number_is_called_so(value: object) -> None:
    refused(lambda: Range().check("SOLVER.BASE_LR", value), "SOLVER.BASE_LR", value, "finite number", "at least 0")
    refused(lambda: Range(whole=True).check("SEED", value), "SEED", value, "whole number", "at least 0")


def test_what_python_would_have_to_run_names_its_remedy(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    lazy = tmp_path / "lazy.py"
    base.write_text('SIZES: !!python/object/apply:eval ["[[x, x * 2**(1.0/3)] for x in [32, 64]]"]\n')
    (tmp_path / "a.yaml").write_text("_BASE_: base.yaml\n")
    remedy = "[[32, 40.3175, 50.7968], [64, 80.6349, 101.5937], [128, "
    refused(lambda: merge(default_config(), tmp_path / "a.yaml"), base, "python/object/apply:eval", remedy)
    lazy.write_text("train = dict()\n")
    refused(lambda: merge(default_config(), lazy), lazy, "YAML")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["DATA.DOWNLOAD", "None"], "'None'"),
        (["METHOD.MARGIN", "1"], "--import"),
        (["OUTPUT_DIR", os.fsdecode(b"odd\xff")], "unprintable"),
        (["OUTPUT_DIR", f"runs/{128 * 'é'}"], "longer than 255 bytes"),
        (["OUTPUT_DIR", "s3://bucket/run"], "'s3://bucket/run', a URL"),
        (["OUTPUT_DIR", "$NO_SUCH_DISK/run"], "variable"),
        (["OUTPUT_DIR", "/tmp/$NO_SUCH_NAME"], "variable"),
        (["SEED"], "KEY VALUE"),
        (["VIEWS.MEAN", "['a', 0.5, 0.5]"], "a list, not \"['a', 0.5, 0.5]\"; write it as [0.485, 0.456, 0.406]"),
        (["MODEL.HEAD_HIDDEN_DIMS", "[[32]]"], "write it as [2048]"),
    ],
)
def test_an_override_that_is_no_value_is_one_line(words: list[str], says: str) -> None:
    refused(lambda: merge(default_config(), None, words), words[0], says)


def test_the_output_folder_of_a_file_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell does it, and a folder called ~ is dangerous to remove."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    for written, expected in (("~/runs/a", "/home/me/runs/a"), ("$SCRATCH/${HOME}", "/scratch//home/me")):
        (tmp_path / "a.yaml").write_text(f"OUTPUT_DIR: {written}\n")
        cfg = default_config()
        merge(cfg, tmp_path / "a.yaml")
        assert expected == cfg.OUTPUT_DIR


REPEATED = {  # text: what occurs twice, and where
    "SOLVER: {BASE_LR: 0.5}\nSEED: 1\nSOLVER: {GAMMA: 0.1}\n": ("SOLVER", 1, 3),
    "SOLVER:\n  BASE_LR: 0.5\n  'BASE_LR': 0.5\n": ("SOLVER.BASE_LR", 2, 3),
    "SEED: 1\nSOLVER: {BASE_LR: 0.5}\nSOLVER.BASE_LR: 0.3\n": ("SOLVER.BASE_LR", 2, 3),
    "POINTS:\n- {SEED: 1, SEED: 2}\n": ("POINTS.0.SEED", 2, 2),
}


@pytest.mark.parametrize(("text", "names"), REPEATED.items())
def test_a_key_that_occurs_twice_is_refused(tmp_path: Path, text: str, names: tuple[str, int, int]) -> None:
    key, first, second = names
    for loader in (yaml.SafeLoader, yaml.BaseLoader):
        refused(lambda loader=loader: load_yaml(text, loader), f"{key} occurs twice", f"lines {first} and {second}")
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "a.yaml").write_text("_BASE_: base.yaml\nSEED: 3\n")
    refused(lambda: merge(default_config(), tmp_path / "a.yaml"), f"{key} occurs twice", tmp_path / "base.yaml")


def test_a_key_may_occur_again_in_another_section_an_item_or_over_a_base(tmp_path: Path) -> None:
    text = "SOLVER: &a {GAMMA: 0.5, BASE_LR: 1.0}\nLINEAR: {<<: *a, GAMMA: 0.25}\n"
    (tmp_path / "base.yaml").write_text(text)
    (tmp_path / "a.yaml").write_text("_BASE_: base.yaml\nSOLVER: {GAMMA: 0.125}\n")
    cfg = default_config()
    merge(cfg, tmp_path / "a.yaml")
    assert (cfg.SOLVER.GAMMA, cfg.LINEAR.GAMMA, cfg.LINEAR.BASE_LR) == (0.125, 0.25, 1.0)
    assert load_yaml("POINTS: [{SEED: 1}, {SEED: 2}]") == {"POINTS": [{"SEED": 1}, {"SEED": 2}]}


VALUES = [  # key, value in YAML, value of a command line or of Python, and the value read
    ("LINEAR.LRS", "[1e-1, .5e1, 1E+2, 1]", "[1e-1, .5e1, 1E+2, 1]", [0.1, 5.0, 100.0, 1]),
    ("MODEL.HEAD_HIDDEN_DIMS", "[32.0, 1e2]", "[32.0, 1e2]", [32, 100]),
    ("SOLVER.EPOCHS", "5.0", "5e0", 5),
    ("SOLVER.BASE_LR", "1e-2", "1e-2", 0.01),
    ("SOLVER.BASE_LR", "30", "30", 30.0),
    ("LINEAR.BASE_LR", "-3", "-3", -3.0),
    ("SOLVER.COMPILE", "yes", "true", True),
    ("OUTPUT_DIR", "'2024'", "2024", "2024"),
    ("DATA.VAL", "'[1]'", Path("[1]"), "[1]"),
    ("SOLVER.AMP", "off", "None", "none"),
    ("SOLVER.AMP", "null", "FP32", "none"),
    ("VIEWS.MEAN", "[0.5, 0.25, 1e0]", np.array([0.5, 0.25, 1.0]), [0.5, 0.25, 1.0]),
    ("SEED", "3", np.int64(3), 3),
]


@pytest.mark.parametrize(("key", "text", "word", "value"), VALUES)
def test_values_that_only_look_different_are_read(tmp_path: Path, key: str, text: str, word: object, value) -> None:
    (tmp_path / "a.yaml").write_text(f"{key}: {text}\n")
    by_file = default_config()
    by_word = default_config()
    merge(by_file, tmp_path / "a.yaml")
    merge(by_word, None, [key, word])
    for cfg in (by_file, by_word, from_yaml_text(by_word.dump())):
        read_value = get(cfg, key)
        assert read_value == value and repr(read_value) == repr(value)


def test_names_in_a_list_stay_text_and_sizes_of_a_detector_are_whole() -> None:
    cfg = fine_tuning.load_config(None, ["DATASETS.TRAIN", "('2024', 'b')", "INPUT.MIN_SIZE_TRAIN", "(640.0, 8e2)"])
    assert (cfg.DATASETS.TRAIN, cfg.INPUT.MIN_SIZE_TRAIN) == (["2024", "b"], [640, 800])


@pytest.mark.parametrize(
    "text", ["", "a: b", "yes", "1e-2", " x ", "é 日本", f"folder:/{200 * 'x'} y", os.fsdecode(b"odd\xff")]
)
def test_a_dump_is_that_of_yacs(text: str) -> None:
    cfg = default_config()
    cfg.DATA.TRAIN = text
    cfg.LINEAR.LRS = (0.1, 1e-5)
    assert dump(cfg) == cfg.dump()
    assert text == from_yaml_text(dump(cfg)).DATA.TRAIN
