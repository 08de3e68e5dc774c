"""The words of a command line or a pipeline file become a stage."""

from pathlib import Path

import pytest
import yaml

from pretrain.common.files import atomic_write
from pretrain.common.run.state import update_state
from pretrain.config import from_yaml_text, load_recipe
from pretrain.methods import METHODS
from tests.errors import refused
from tests.tools.launcher.helpers import CONFIGS, TINY, build_convert, build_pretrain, build_probe, build_transfer
from tests.tools.stages.test_base import detector
from tools.stages import recipes, transfer
from tools.stages.pretrain import Pretrain


def test_a_probe_takes_the_runs_own_config(tmp_path: Path):
    trained = build_pretrain(recipes.find_recipe("mocov2"), [*TINY, "OUTPUT_DIR", str(tmp_path / "run")])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(trained.config)
    probe = build_probe("linear", str(tmp_path / "run"), overrides=["LINEAR.BASE_LR", "10"])
    assert probe.folder == str(tmp_path / "run" / "linear") and probe.options.weights == str(tmp_path / "run")
    assert "ARCH: resnet18" in probe.config and "BASE_LR: 10" in probe.config
    for stage in (trained, probe):  # is parsed as a job will parse it
        assert stage.cfg.is_frozen() and stage.cfg == from_yaml_text(stage.config)
    update_state(tmp_path / "run", stage="transfer")  # a detector's config is of another kind
    assert "ARCH: resnet50" in build_probe("linear", str(tmp_path / "run")).config


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_default_recipe(method: str):
    recipe = recipes.find_recipe(method)
    overrides = recipes.find_recipe_overrides(method)
    stage = build_pretrain(recipe, overrides)
    by_method = Pretrain.load(Pretrain.Options(method=method))
    direct = Path(load_recipe(recipe, overrides).OUTPUT_DIR).absolute()  # of python -m pretrain
    assert Path(stage.folder) == Path(by_method.folder) == direct
    assert yaml.safe_load(stage.config)["METHOD"]["NAME"] == method and method in recipes.list_methods()


def test_a_detector_has_its_folder_from_the_overrides_and_an_evaluation_one_in_it(tmp_path: Path):
    Path("c.yaml").write_text("VERSION: 2\n")
    for option, folder in (("--resume", tmp_path / "here"), ("--eval-only", tmp_path / "here/eval_only")):
        words = ["OUTPUT_DIR", "here", "SEED", "1"]
        stage = build_transfer("c.yaml", words, engine="torchvision", eval_only=option == "--eval-only")
        assert (stage.folder, yaml.safe_load(stage.config)["SEED"]) == (str(folder), 1)
        assert stage.arguments[1] == [option, "--engine", "torchvision", "OUTPUT_DIR", stage.folder]


def test_every_shipped_detector_is_resolved_as_its_file_says():
    from transfer.config import load_config

    files = sorted(CONFIGS.glob("coco_*.yaml"))
    for file in files:
        Path("resolved.yaml").write_text(build_transfer(str(file), engine="torchvision").config)
        where = ["OUTPUT_DIR", "here"]
        assert load_config("resolved.yaml", where) == load_config(file, where), file
    assert len(files) >= 8


def test_the_engine_is_detectron2_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    for spec, engine in ((object(), "detectron2"), (None, "torchvision")):
        transfer._choose_installed_engine.cache_clear()
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert engine in detector(engine="auto").arguments[1]
    transfer._choose_installed_engine.cache_clear()


@pytest.mark.parametrize("name", ["a\nscancel -u $USER", "a\x1b[2J", "a\udcffb"])
def test_a_folder_name_with_control_characters_is_refused(name: str):
    assert refused(lambda: build_convert("a.pth", "b.pth", name), "OUTPUT_DIR").isprintable()


def test_a_file_may_not_have_a_name_to_which_nothing_can_be_added(tmp_path: Path):
    """It is written under a longer name first, and has a record next to it."""
    longest = "x" * (255 - 48 - len(".pth"))
    target = Path(build_convert("source.pth", str(tmp_path / f"{longest}.pth")).product)
    atomic_write(target.with_name(f"{target.name}.json"), "{}")
    refused(lambda: build_convert("source.pth", f"{longest}é.pth"), "OUTPUT is", "no longer than 207 bytes")


def test_a_pretraining_refuses_weights_at_a_url_unless_it_resumes(tmp_path: Path):
    address = "https://a.b/c.pth"
    words = [*TINY, "OUTPUT_DIR", str(tmp_path / "run"), "MODEL.WEIGHTS", address]
    stage = build_pretrain(recipes.find_recipe("mocov2"), words)
    refused(lambda: stage.check(1, starts_later=False), address, "MODEL.WEIGHTS", "download it")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint_final.pth").touch()
    stage.check(1, starts_later=False)


def test_a_format_of_no_weights_is_refused_before_a_job_waits():
    refused(lambda: build_convert("source.pth", "backbone.pt"), "OUTPUT", "backbone.pt must end in .pth")
