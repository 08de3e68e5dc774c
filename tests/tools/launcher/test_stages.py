"""How a command line's or a pipeline file's words become the spec of a stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pretrain.common.errors import UserError
from pretrain.methods import METHODS
from tests.tools.launcher.helpers import TINY
from tests.tools.launcher.test_spec import detector
from tools.launcher import stages


def test_a_probe_takes_the_runs_own_config(tmp_path: Path):
    trained = stages.pretrain(stages.recipe_of("mocov2"), [*TINY, "OUTPUT_DIR", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(trained.config)
    probe = stages.probe("linear", str(tmp_path / "run"), overrides=["LINEAR.BASE_LR", "10"])
    assert probe.folder == str(tmp_path / "run" / "linear") and probe.args == (str(tmp_path / "run"),)
    assert "ARCH: resnet18" in probe.config and "BASE_LR: 10" in probe.config


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_default_recipe(method: str):
    spec = stages.pretrain(stages.recipe_of(method))
    assert yaml.safe_load(spec.config)["METHOD"]["NAME"] == method and method in stages.methods()


def test_transfer_takes_its_output_from_the_overrides(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text("VERSION: 2\n")
    spec = stages.transfer(str(config), ["OUTPUT_DIR", "here", "SEED", "1"], engine="torchvision")
    assert spec.folder == str(tmp_path / "here")
    assert spec.args[0] == ["--resume", "--engine", "torchvision", "OUTPUT_DIR", spec.folder]
    assert yaml.safe_load(spec.config)["SEED"] == 1


def test_every_shipped_detector_is_resolved_as_its_file_says():
    from transfer.config import load_config

    files = sorted((Path(stages.__file__).parents[2] / "configs").glob("coco_*.yaml"))
    for file in files:
        Path("resolved.yaml").write_text(stages.transfer(str(file), engine="torchvision").config)
        where = ["OUTPUT_DIR", "here"]
        assert load_config("resolved.yaml", where) == load_config(file, where), file
    assert len(files) >= 10


def test_the_engine_is_detectron2_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    for spec, engine in ((object(), "detectron2"), (None, "torchvision")):
        stages._installed_engine.cache_clear()
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert engine in detector(engine="auto").args[0]
    stages._installed_engine.cache_clear()


def test_an_evaluation_has_a_folder_of_its_own():
    Path("mask.yaml").write_text("OUTPUT_DIR: trained\n")
    training = stages.transfer("mask.yaml", engine="torchvision")
    assert training.folder == str(Path("trained").absolute())
    spec = stages.transfer("mask.yaml", engine="torchvision", eval_only=True)
    assert spec.folder == str(Path("trained/eval_only").absolute())
    assert spec.args[0] == ["--eval-only", "--engine", "torchvision", "OUTPUT_DIR", spec.folder]


@pytest.mark.parametrize("name", ["a\nscancel -u $USER", "a\rb", "a\x1b[2J", "a\u2028b", "a\udcffb"])
def test_a_folder_that_no_script_can_hold(name: str):
    with pytest.raises(UserError, match=r"^OUTPUT_DIR is .*; choose another name$") as raised:
        stages.convert("a.pth", "b.pth", name)
    assert str(raised.value).isprintable()
