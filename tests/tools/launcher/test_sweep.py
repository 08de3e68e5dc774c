"""Sweep files: each shipped one loads, a wrong one is one line, a grid becomes a table and a plot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import CONFIGS
from tools import report
from tools.launcher import pipeline, stages
from tools.launcher.options import Options
from tools.reporting import groups

SWEEPS = [*sorted((CONFIGS / "pretrain" / "sweeps").glob("*.yaml")), CONFIGS / "examples" / "digits_jcl_lambda.yaml"]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_sweep_file_loads(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CONFIGS.parent)
    graph = pipeline.load(str(path))
    assert graph.output == str(Path("runs/sweeps", path.stem).absolute())
    assert len({node.spec.fingerprint() for node in graph.nodes if node.spec.stage == "pretrain"}) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BRANCHES: {a: {WEIGHTS: random}}\nGRID: {METHOD.JCL_LAMBDA: [1]}", "needs PRETRAIN, .*and no BRANCHES"),
        ("GRID: {METHOD.JCL_LAMBDA: [1, 1]}", "would share"),
        ("GRID: {METHOD.JCL_LAMBDA: 1}", "write a list of values"),
        ("GRID: {1: [1]}", "write a list of values"),
        ("SEEDS: [0]", "needs GRID .* or POINTS .*, and not both"),
        ("GRID: {SEED: [1]}\nPOINTS: [{SEED: 1}]", "needs GRID .* or POINTS .*, and not both"),
        ("POINTS: [SEED]", "write a list of settings"),
        ("POINTS: [{1: 2}]", "write a list of settings"),
    ],
)
def test_sweep_files_that_cannot_work(text: str, message: str, tmp_path: Path):
    (tmp_path / "s.yaml").write_text(f"PRETRAIN: {stages.recipe_of('jcl')}\n{text}\n")
    with pytest.raises(UserError, match=message):
        pipeline.load(str(tmp_path / "s.yaml"))


def cells(table: str) -> set[str]:
    return {" ".join(line.replace("|", " ").split()) for line in table.splitlines()}


def test_sweep_grid_table_and_plot(tmp_path: Path):
    file = tmp_path / "s.yaml"
    file.write_text(
        f"PRETRAIN: {stages.recipe_of('jcl')}\nOUTPUT_DIR: out\nSEEDS: [0, 1]\n"
        "GRID: {METHOD.NUM_KEYS: [2, 5], METHOD.JCL_LAMBDA: [0.5, 4]}\n"
    )
    graph = pipeline.load(str(file))
    assert len(graph.nodes) == 8 and not (tmp_path / "out").exists()
    spec = graph.nodes[-1].spec
    assert "NUM_KEYS: 5" in spec.config and "LAMBDA: 4.0" in spec.config and "SEED: 1" in spec.config
    for place, node in enumerate(graph.nodes[:6]):  # the last setting's seeds are not done
        folder = Path(node.spec.folder)
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"metrics": {"knn_top1": 10.0 + place}}))
    Path(graph.nodes[5].spec.folder, "results.json").write_bytes(b"\xff")
    graph.remember(Options(cluster="local"))
    table = groups.draw(graph.output).read_text()
    assert {"2 0.5 10.50 ± 6.35 [n 2]", "5 0.5 14.00"} <= cells(table)
    assert re.search(r"not done: num_keys=5_jcl_lambda=0.5_seed=1 \(.*results.json is not JSON", table)
    assert table.count("not done: num_keys=5_jcl_lambda=4_seed") == 2
    assert (Path(graph.output) / "sweep.png").stat().st_size > 1000
    (tmp_path / "out").rename(tmp_path / "moved")
    (shown,) = (one for one in report.gather([tmp_path / "moved"]).tables if one.title == "Sweep moved")
    assert ["2", "0.5", "10.50 ± 6.35 [n 2]"] in shown.rows


def test_points_vary_keys_together(tmp_path: Path):
    file = tmp_path / "s.yaml"
    file.write_text(
        f"PRETRAIN: {stages.recipe_of('jcl')}\nOUTPUT_DIR: out\nPOINTS:\n"
        "- {SOLVER.IMS_PER_BATCH: 32, SOLVER.BASE_LR: 0.004}\n- {SOLVER.IMS_PER_BATCH: 64}\n"
    )
    graph = pipeline.load(str(file))
    assert [node.key for node in graph.nodes] == [
        "ims_per_batch=32_base_lr=0.004_seed=0/pretrain", "ims_per_batch=64_seed=0/pretrain",
    ]  # fmt: skip
    assert "BASE_LR: 0.004" in graph.nodes[0].spec.config and "BASE_LR: 0.06" in graph.nodes[1].spec.config
    for place, node in enumerate(graph.nodes):
        Path(node.spec.folder).mkdir(parents=True)
        Path(node.spec.folder, "results.json").write_text(json.dumps({"metrics": {"knn_top1": 10.0 + place}}))
    graph.remember(Options(cluster="local"))
    assert {"32 0.004 10.00", "64 - 11.00"} <= cells(groups.draw(graph.output).read_text())
    assert (Path(graph.output) / "sweep.png").stat().st_size > 1000


def test_a_sweep_over_lists_has_a_table(tmp_path: Path):
    (tmp_path / "s.yaml").write_text(
        f"PRETRAIN: {stages.recipe_of('mocov2')}\nGRID: {{MODEL.HEAD_HIDDEN_DIMS: [[16], [32, 16]]}}\n"
    )
    graph = pipeline.load("s.yaml", "out")
    folder = Path(graph.nodes[1].spec.folder)
    assert folder == tmp_path / "out/head_hidden_dims=_32__16__seed=0/pretrain"
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps({"metrics": {"knn_top1": 50.0}}))
    graph.remember(Options(cluster="local"))
    assert "[32, 16] 50.00" in cells(groups.draw(graph.output).read_text())
