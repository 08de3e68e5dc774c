"""User-defined objectives, views and data sets, from the templates in docs/templates."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.common.config import extensions
from pretrain.config import load_config
from pretrain.data.augmentations import AUGMENTATIONS
from pretrain.methods import METHODS
from pretrain.preflight import check_same_run
from tests.errors import refused
from tests.pretrain.methods.draws import batch_case, sets
from tests.tools.launcher.helpers import build_pretrain, build_probe
from tools.stages.registry import build_stage

ROOT = Path(__file__).parents[4]
METHOD_NAMES = {"my_batch_objective": "decoupled", "my_objective": "margin"}
TEMPLATES = [
    ROOT / "docs" / "templates" / f"my_{name}.py" for name in ("batch_objective", "data", "objective", "views")
]
SMALL = "SOLVER.MAX_STEPS 2 SOLVER.IMS_PER_BATCH 16 VIEWS.IMAGE_SIZE 16 PROBE.RESIZE 16"


@pytest.mark.docs
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_command_of_each_template_runs(path: Path, images: Path, tmp_path: Path):
    """The command at the top of the template runs, for fewer steps, and on our images if the template has none."""
    command = re.search(r"launch\.py pretrain (.+)", path.read_text().split('"""')[1].replace("\\\n", " "))
    assert command
    data = [] if "DATA.TRAIN" in command[1] else ["DATA.TRAIN", f"folder:{images}"]
    where = ["--cluster", "local", "--gpus", "0", *SMALL.split(), *data, "OUTPUT_DIR", str(tmp_path / "run")]
    words = [sys.executable, "tools/launch.py", "pretrain", *command[1].split(), *where]
    environment = {name: value for name, value in os.environ.items() if name != extensions.VARIABLE}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["steps"] == 2
    assert results["method"] == METHOD_NAMES.get(path.stem, "mocov2")
    assert f"P2T_IMPORT={path}" in (tmp_path / "run/environment.txt").read_text()


def test_what_cannot_be_imported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused(lambda: load_config(None, ["METHOD.NAME", "jlc"]), "METHOD.NAME is 'jlc'", "--import", "did you mean 'jcl'")
    refused(lambda: extensions.using([f"{tmp_path}/absent.py"]).__enter__(), f"{tmp_path}/absent.py", "no such file")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(extensions.VARIABLE, f"{tmp_path}/broken.py")
    assert extensions.options() == ["--import", f"{tmp_path}/broken.py"]
    refused(extensions.load, "extension broken", "No module named 'nothing_of_this_name'")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit(3)", "it ends the program"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--unknown'])", 'below if __name__ == "__main__":'),
        ("import os; os.chdir('/')", "changes the working folder"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_what_a_module_should_not_do_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_at_import.py").write_text(code)
    monkeypatch.setenv(extensions.VARIABLE, str(tmp_path / "mine_at_import.py"))
    refused(extensions.load, "the extension mine_at_import", says)
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(("name", "says"), [("a.v2.py", "rename it"), ("a/b", "neither"), ("a.ipynb", "neither")])
def test_what_python_cannot_import_is_named(tmp_path: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.v2.py").touch()
    refused(lambda: extensions.using([name]).__enter__(), f"--import {name}", says)


def test_modules_are_imported_for_one_command_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    files = [tmp_path / "first_command.py", tmp_path / "second_command.py", tmp_path / "other" / "second_command.py"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    for file in files[:2]:
        with extensions.using([str(file)]):
            assert extensions.options() == ["--import", str(file)]
            extensions.load()
        assert sys.modules[file.stem].__file__ == str(file)
        assert extensions.VARIABLE not in os.environ
    with extensions.using([str(files[2])]):
        refused(extensions.load, files[1], files[2], "rename")
        files[1].unlink()
        refused(extensions.load, files[1], files[2], "rename")


def test_a_name_that_is_taken_is_refused():
    registry = {"mine": 1}
    extensions.register(registry, "yours", 2)
    refused(lambda: extensions.register(registry, "mine", 3), "'mine'", "another name")
    assert registry == {"mine": 1, "yours": 2}


@pytest.mark.parametrize(
    ("name", "value", "registry"),
    [("METHODS", 3, METHODS), ("METHODS", len, METHODS), ("AUGMENTATIONS", dict, AUGMENTATIONS)],
)
def test_what_is_no_method_or_view_is_named(name: str, value: object, registry: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry, "mine", value)
    refused(load_config, f"{name}['mine'] is of type {type(value).__name__}", "docs/templates/my_")


def test_python_m_pretrain_imports_modules(images: Path, tmp_path: Path):
    words = (
        "-m pretrain --import docs/templates/my_objective.py METHOD.NAME margin METHOD.MARGIN 0.1 MODEL.ARCH resnet18"
    )
    keys = [*SMALL.split(), "MODEL.QUEUE_SIZE", "32", "DATA.TRAIN", f"folder:{images}", "OUTPUT_DIR", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != extensions.VARIABLE}
    command = [sys.executable, *words.split(), *keys]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["method"] == "margin"


def test_the_margin_of_the_template_lowers_the_positive_logit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(METHODS, "margin", METHODS["mocov2"])  # what the module registers is gone after the test, too
    del METHODS["margin"]
    load_config()
    from docs.templates.my_objective import margin_info_nce  # type: ignore[import-not-found]

    assert load_config(None, ["METHOD.NAME", "margin", "METHOD.MARGIN", "0.1"]).METHOD.MARGIN == 0.1
    q, k, queue = (torch.nn.functional.normalize(torch.randn(4, 8), dim=1) for _ in range(3))
    loss = margin_info_nce(q, k[None], queue.T, temperature=0.2, margin=0.1).loss
    logits = torch.cat([(q * k).sum(1, keepdim=True) - 0.1, q @ queue.T], dim=1) / 0.2
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))


def test_the_decoupled_loss_of_the_template_equals_its_equation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(METHODS, "decoupled", METHODS["simclr"])  # as above
    del METHODS["decoupled"]
    from docs.templates.my_batch_objective import decoupled  # type: ignore[import-not-found]

    assert load_config(None, ["METHOD.NAME", "decoupled"]).METHOD.NAME == "decoupled"
    case = batch_case(0, [0, 1, 2, 0, 1, 2], anchors=slice(2, 5))
    similarities = (case.anchors_AD @ case.candidates_BD.T / 0.2).tolist()
    expected = 0.0
    for i in range(3):
        (positive,), negatives = sets(case, i)
        expected += math.log(sum(math.exp(similarities[i][j]) for j in negatives)) - similarities[i][positive]
    output = decoupled(*case, temperature=0.2)
    assert math.isclose(output.loss.item(), expected / 3, rel_tol=1e-12)
    positives = [similarities[i][sets(case, i)[0][0]] * 0.2 for i in range(3)]
    assert math.isclose(output.metrics["positive_similarity"].item(), sum(positives) / 3, rel_tol=1e-6)
    with pytest.raises(ValueError, match="self_index"):
        decoupled(*case[:4], case.self_index_A[:2], temperature=0.2)


def test_a_run_is_not_continued_with_an_edited_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = tmp_path / "mine.py"
    module.write_text("old = 1")
    monkeypatch.setenv(extensions.VARIABLE, str(module))
    monkeypatch.setitem(METHODS, "mine", METHODS["mocov2"])
    monkeypatch.setattr(extensions, "load", lambda: None)
    words = ["METHOD.NAME", "mine", "OUTPUT_DIR", str(tmp_path / "run")]
    submitted = load_config(None, words)
    record = build_pretrain("", words).to_json()
    built_in = load_config(None, ["METHOD.NAME", "jcl"])
    module.write_text("new = 2")
    assert load_config(None, ["METHOD.NAME", "jcl"]) == built_in
    edited = load_config(None, words)
    earlier = (submitted.dump(), "config.yaml", "run")
    refused(lambda: check_same_run(edited, *earlier), "IMPORTED 'mine.py@", "--change-recipe")
    changed = load_config(None, [*words, "SOLVER.CHANGE_RECIPE", "True"])
    assert check_same_run(changed, *earlier) == [f"IMPORTED {submitted.IMPORTED!r} -> {edited.IMPORTED!r}"]
    resumed = build_stage(record)
    refused(lambda: resumed.check(1, starts_later=True), "modules have changed: mine.py, ", edited.IMPORTED[-8:])
    assert build_pretrain("", words).config == edited.dump()
    assert build_probe("knn", "random", base=submitted.dump(), overrides=words).config == submitted.dump()


def test_the_sources_of_modules_packages_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    files = ["alone.py", "whole/__init__.py", "whole/methods/margin.py", "elsewhere/mine.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    named = ["alone", "whole.methods.margin", str(tmp_path / "elsewhere/mine.py"), "no_such_module"]
    monkeypatch.setenv(extensions.VARIABLE, os.pathsep.join(named))
    assert extensions.sources() == [tmp_path / name for name in files]
