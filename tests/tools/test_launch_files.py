"""Pipeline and sweep files: each shipped one loads, a wrong one says why, a grid becomes a table and a plot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from pretrain.common.errors import UserError
from tools.launcher import pipeline, stages, sweep
from tools.launcher.options import Options

CONFIGS = Path(__file__).parents[2] / "configs"
SWEEPS = sorted((CONFIGS / "pretrain" / "sweeps").glob("*.yaml"))
PIPELINES = sorted((CONFIGS / "pipeline").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_pipeline_file_becomes_a_graph(tmp_path: Path):
    config = tmp_path / "mask.yaml"
    config.write_text("VERSION: 2\n")
    file = tmp_path / "p.yaml"
    file.write_text(
        "OUTPUT_DIR: out\nDATA: digits data\nKNN: ['']\nTRANSFER: {mask: mask.yaml}\nBRANCHES:\n"
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


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_file_loads_and_says_how_to_run_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parents[3])
    graph = sweep.load(str(path))
    assert f"python tools/launch.py sweep configs/pretrain/sweeps/{path.name}" in path.read_text()
    assert graph.output == str(Path("runs/sweeps", path.stem).absolute())
    assert len({node.spec.fingerprint() for node in graph.nodes if node.spec.stage == "pretrain"}) > 2


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_pipeline_file_loads_and_says_how_to_run_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parents[2])
    graph = pipeline.load(str(path))
    assert path.name in path.read_text() or "make demo" in path.read_text()
    assert {node.spec.stage for node in graph.nodes} >= {"pretrain", "knn" if path.stem != "jcl_table2" else "transfer"}
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
        ("BRANCHES: {a: []}", "branch a must hold"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {mask: []}", "no config file"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nKNN: ['']\nOVERRIDES: a 'b", "is no list of words"),
        ('BRANCHES: {"a\\nscancel": {WEIGHTS: random}}', r"branch in .* is named 'a\\nscancel'; use letters"),
        ("BRANCHES: {no: {WEIGHTS: random}}", "is named False; use letters"),
        ("BRANCHES: {a/b: {WEIGHTS: random}}", "is named 'a/b'; use letters"),
        ("BRANCHES: {..: {WEIGHTS: random}}", "is named '..'; use letters"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {a b: x.yaml}", "a detector of TRANSFER is named 'a b'"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nKNN: ['', '']", "a/knn_own and a/knn_own would share"),
    ],
)
def test_pipeline_files_that_cannot_work(text: str, message: str, tmp_path: Path):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        pipeline.load(str(tmp_path / "p.yaml"))


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path):
    (tmp_path / "p.yaml").write_bytes(b"BRANCHES: \xff")
    for module in (pipeline, sweep):
        with pytest.raises(UserError, match="is not YAML"):
            module.load(str(tmp_path / "p.yaml"))


def test_a_branch_may_be_named_by_a_number(tmp_path: Path):
    (tmp_path / "p.yaml").write_text("BRANCHES: {2020: {WEIGHTS: random}, jcl-4.0_a+b=c: {WEIGHTS: random}}\nKNN: ['']")
    assert [node.key for node in pipeline.load("p.yaml").nodes] == ["2020/knn", "jcl-4.0_a+b=c/knn"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GRID: {METHOD.JCL_LAMBDA: [1]}\nSEEDS: []", "SEEDS in .* is empty"),
        ("GRID: {METHOD.JCL_LAMBDA: [1, 1]}", "would share"),
        ("GRID: {METHOD.JCL_LAMBDA: 1}", "write a list of values"),
        ("GRID: {1: [1]}", "write a list of values"),
    ],
)
def test_sweep_files_that_cannot_work(text: str, message: str, tmp_path: Path):
    (tmp_path / "s.yaml").write_text(f"PRETRAIN: {stages.recipe_of('jcl')}\n{text}\n")
    with pytest.raises(UserError, match=message):
        sweep.load(str(tmp_path / "s.yaml"))


def test_sweep_grid_table_and_plot(tmp_path: Path):
    file = tmp_path / "s.yaml"
    file.write_text(
        f"PRETRAIN: {stages.recipe_of('jcl')}\nOUTPUT_DIR: out\nSEEDS: [0, 1]\n"
        "GRID: {METHOD.NUM_KEYS: [2, 5], METHOD.JCL_LAMBDA: [0.5, 4]}\n"
    )
    graph = sweep.load(str(file))
    assert len(graph.nodes) == 8 and not (tmp_path / "out").exists()
    spec = graph.nodes[-1].spec
    assert "NUM_KEYS: 5" in spec.config and "JCL_LAMBDA: 4.0" in spec.config and "SEED: 1" in spec.config
    for place, node in enumerate(graph.nodes[:6]):  # the last setting's seeds are not done
        folder = Path(node.spec.folder)
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"metrics": {"knn_top1": 10.0 + place}}))
    Path(graph.nodes[5].spec.folder, "results.json").write_bytes(b"\xff")
    graph.remember(Options(cluster="local"))
    table = sweep.draw(graph.output).read_text()
    assert "| 2 | 0.5 | 10.50 | ± 6.35 | 2 |" in table and "| 5 | 0.5 | 14.00 | - | 1 |" in table
    assert re.search(r"not done: num_keys=5_jcl_lambda=0.5_seed=1 \(.*results.json is not JSON", table)
    assert table.count("not done: num_keys=5_jcl_lambda=4_seed") == 2
    assert (Path(graph.output) / "sweep.png").stat().st_size > 1000


def test_a_sweep_over_lists_has_a_table(tmp_path: Path):
    (tmp_path / "s.yaml").write_text(
        f"PRETRAIN: {stages.recipe_of('mocov2')}\nGRID: {{MODEL.HEAD_HIDDEN_DIMS: [[16], [32, 16]]}}\n"
    )
    graph = sweep.load("s.yaml", "out")
    folder = Path(graph.nodes[1].spec.folder)
    assert folder == tmp_path / "out/head_hidden_dims=_32__16__seed=0/pretrain"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"metrics": {"knn_top1": 50.0}}))
    graph.remember(Options(cluster="local"))
    assert "| [32, 16] | 50.00 | - | 1 |" in sweep.draw(graph.output).read_text()


def test_interval_is_students():
    mean, half = sweep.mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert sweep.mean_and_interval([5.0]) == (5.0, None)
    thirty = [float(value % 2) for value in range(30)]  # sample deviation (30 / 116) ** 0.5
    assert sweep.mean_and_interval(thirty)[1] == pytest.approx(2.04523 * (30 / 116) ** 0.5 / 30**0.5, rel=1e-5)
