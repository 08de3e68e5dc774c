"""Pipeline files: each shipped one loads, and a wrong one is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import CONFIGS
from tools.launcher import pipeline, stages

PIPELINES = sorted((CONFIGS / "pipeline").rglob("*.yaml"))


def test_pipeline_file_becomes_a_graph(tmp_path: Path):
    config = tmp_path / "mask.yaml"
    config.write_text("VERSION: 2\n")
    file = tmp_path / "p.yaml"
    file.write_text(
        "OUTPUT_DIR: out\nDATA: digits data\nKNN: [own]\nTRANSFER: {mask: mask.yaml}\nBRANCHES:\n"
        f"  random: {{WEIGHTS: random}}\n  moco: {{PRETRAIN: {stages.recipe_of('mocov2')}, OVERRIDES: [SEED, 3]}}\n"
    )
    graph = pipeline.load(str(file))
    assert {node.key: node.parents for node in graph.nodes} == {
        "data": (), "random/knn": ("data",), "random/mask": ("data",), "moco/pretrain": ("data",),
        "moco/knn": ("moco/pretrain",), "moco/convert": ("moco/pretrain",), "moco/mask": ("moco/convert", "data"),
    }  # fmt: skip
    by_key = {node.key: node.spec for node in graph.nodes}
    assert "SEED: 3" in by_key["moco/pretrain"].config and by_key["random/knn"].args == ("random",)
    weights = str(tmp_path / "out/moco/backbone.pth")
    assert yaml.safe_load(by_key["moco/mask"].config) == {"MODEL": {"WEIGHTS": weights}}
    assert yaml.safe_load(by_key["random/mask"].config) == {}


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_pipeline_file_loads(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CONFIGS.parent)
    graph = pipeline.load(str(path))
    used = {node.spec.stage for node in graph.nodes}
    assert "pretrain" in used and used & {"knn", "linear", "transfer", "distributions"}
    assert len({node.spec.folder for node in graph.nodes}) == len(graph.nodes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BRANCHES: {}", "has no BRANCHES"),
        ("BRANCHES: {a: {}}", "branch a needs PRETRAIN"),
        ("BRANCHS: {}", "unknown key BRANCHS.*did you mean 'BRANCHES'"),
        ("BRANCHES: 3", "BRANCHES in .* is 3; it must be a dict"),
        ("[1", "is not YAML"),
        ("[]", "must hold 'KEY: value' lines"),
        ("[" * 3000, "is not YAML"),
        ("BRANCHES: \xff", "is not YAML"),
        ("BRANCHES: {a: []}", "branch a must hold"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {mask: []}", "no config file"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nKNN: ['']\nOVERRIDES: a 'b", "is not a list of words"),
        ('BRANCHES: {"a\\nscancel": {WEIGHTS: random}}', r"branch in .* is named 'a\\nscancel'; use letters"),
        ("BRANCHES: {no: {WEIGHTS: random}}", "is named False; use letters"),
        ("BRANCHES: {a/b: {WEIGHTS: random}}", "is named 'a/b'; use letters"),
        ("BRANCHES: {..: {WEIGHTS: random}}", "is named '..'; use letters"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {a b: x.yaml}", "a detector of TRANSFER is named 'a b'"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nKNN: ['', '']", "a/knn_own and a/knn_own would share"),
    ],
)
def test_pipeline_files_that_cannot_work(text: str, message: str, tmp_path: Path):
    (tmp_path / "p.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        pipeline.load("p.yaml")


def test_a_branch_may_be_named_by_a_number(tmp_path: Path):
    (tmp_path / "p.yaml").write_text("BRANCHES: {2020: {WEIGHTS: random}, jcl-4.0_a+b=c: {WEIGHTS: random}}\nKNN: ['']")
    assert [node.key for node in pipeline.load("p.yaml").nodes] == ["2020/knn", "jcl-4.0_a+b=c/knn"]
