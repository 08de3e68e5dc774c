"""Pipeline files: each of ours loads, a wrong one ends with one line, and a sweep becomes a table and a plot."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.errors import refused
from tests.tools.launcher.helpers import CONFIGS, HERE, complete
from tests.tools.reporting.runs import DIGITS, pretrain
from tools import report
from tools.launcher.graphs import pipeline
from tools.launcher.graphs.graph import Graph, write_graph
from tools.stages import recipes

FILES = [
    path for path in sorted(CONFIGS.rglob("*.yaml")) if re.search("^(BRANCHES|GRID|POINTS):", path.read_text(), re.M)
]


def test_branches_over_seeds_several_data_sets_and_detectors_with_keys_of_their_own(tmp_path: Path):
    (tmp_path / "mask.yaml").write_text("VERSION: 2\n")
    (tmp_path / "p.yaml").write_text(
        "OUTPUT_DIR: out\nDATA: [[digits, data/a], [trees, --test-region, '{seed}', 'data/{seed}']]\n"
        "SEEDS: [4, 7]\nBASELINE: random\n"
        "KNN: own\nEMBEDDING: [own]\nENGINE: torchvision\nTRANSFER_OVERRIDES: [SOLVER.MAX_ITER, 9]\nTRANSFER:\n"
        "  long: mask.yaml\n  short: {CONFIG: mask.yaml, OVERRIDES: SOLVER.MAX_ITER 5, ENGINE: detectron2}\n"
        f"BRANCHES:\n  random: {{WEIGHTS: random}}\n  moco: {{PRETRAIN: {recipes.find_recipe('mocov2')}, "
        "OVERRIDES: [DATA.TRAIN, 'folder:data/{seed}']}\n"
        '  2020: {WEIGHTS: "runs/{seed}.pth"}\n  zoo: {DETECTOR: zoo.pkl}\n'
    )
    graph = pipeline.load_pipeline("p.yaml")
    nodes = {node.key: node for node in graph.nodes}
    of_branch: dict[str, tuple[str, ...]] = {"random": ("knn", "embedding", "long", "short")}
    of_branch["moco"] = ("pretrain", "knn", "embedding", "convert", "long", "short")
    of_branch["2020"] = of_branch["moco"][1:]
    of_branch["zoo"] = of_branch["random"]
    assert set(nodes) == {"data/a", "data/4", "data/7"} | {
        f"{name}_seed={seed}/{stage}" for name, names in of_branch.items() for stage in names for seed in (4, 7)
    }
    data = ("data/a", "data/4", "data/7")
    assert nodes["moco_seed=7/pretrain"].parents == nodes["random_seed=4/long"].parents == data
    assert nodes["moco_seed=7/short"].parents == ("moco_seed=7/convert", *data)
    for name, weights in (("zoo", "zoo.pkl"), ("random", "")):
        assert yaml.safe_load(nodes[f"{name}_seed=4/long"].stage.config)["MODEL"]["WEIGHTS"] == weights
    assert nodes["data/7"].stage.product == str(tmp_path / "data/7")
    for name in ("random", "moco"):  # random weights are probed by the data of their seed
        assert yaml.safe_load(nodes[f"{name}_seed=7/knn"].stage.config)["DATA"]["TRAIN"] == "folder:data/7"
    for name in ("pretrain", "knn", "embedding"):
        assert yaml.safe_load(nodes[f"moco_seed=7/{name}"].stage.config)["SEED"] == 7
    assert nodes["random_seed=4/embedding"].stage.options.weights == "random"
    short, long = (nodes[f"moco_seed=4/{name}"].stage for name in ("short", "long"))
    config = yaml.safe_load(short.config)
    assert (config["SEED"], config["SOLVER"]["MAX_ITER"]) == (4, 5)
    assert config["MODEL"]["WEIGHTS"] == str(tmp_path / "out/moco_seed=4/backbone.pth")
    assert yaml.safe_load(long.config)["SOLVER"]["MAX_ITER"] == 9
    assert (short.options.engine, long.options.engine) == ("detectron2", "torchvision")
    assert nodes["2020_seed=7/knn"].stage.options.weights == str(tmp_path / "runs/7.pth")
    folders = {name: {"4": f"{name}_seed=4", "7": f"{name}_seed=7"} for name in ("random", "moco", 2020, "zoo")}
    assert graph.study == {"branches": folders, "baseline": "random"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_loads(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CONFIGS.parent)
    graph = pipeline.load_pipeline(str(path))
    trained = {node.stage.fingerprint() for node in graph.nodes if node.stage.name == "pretrain"}
    if re.search("^(GRID|POINTS):", path.read_text(), re.M):
        assert graph.output == str(Path("runs/sweeps", path.stem).absolute()) and len(trained) > 1
    else:
        is_converted = "convert" in {node.stage.name for node in graph.nodes}
        assert bool(trained or is_converted) == (path.stem != "frozen_bn")  # which is only initialized at random
        assert {"knn", "linear", "transfer", "embedding"} & {node.stage.name for node in graph.nodes}


RANDOM = "BRANCHES: {a: {WEIGHTS: random}}\n"
SWEEP = f"PRETRAIN: {recipes.find_recipe('jcl')}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BRANCHES: {}", "has no BRANCHES"),
        ("BRANCHES: {a: {}}", "branch a needs one of PRETRAIN"),
        ("BRANCHS: {}", "unknown key BRANCHS.*did you mean 'BRANCHES'"),
        ("BRANCHES: 3", "BRANCHES in .* is 3; it must be KEY: value lines"),
        ("[1", "p.yaml: is not YAML"),
        ("BRANCHES: {no: {WEIGHTS: random}}", "is named False; names may contain letters"),
        (f"{RANDOM}BRANCHES: {{b: {{WEIGHTS: random}}}}", "p.yaml: BRANCHES occurs twice, on lines 1 and 2"),
        (f"{RANDOM}KNN: ['']\nOVERRIDES: a 'b", "is not a list of words"),
        (f"{RANDOM}BASELINE: b", "BASELINE in .* is b; it must be one of the BRANCHES"),
        (f"{RANDOM}SEEDS: [1, 1]", "SEEDS in .* are 1, 1; write distinct integers"),
        (f"{RANDOM}TRANSFER: {{m: {{CONFG: x}}}}", "unknown key CONFG in .* detector m"),
        (f"{RANDOM}KNN: ['', '']", "a/knn_own and a/knn_own would share"),
        (f"{RANDOM}GRID: {{METHOD.JCL_LAMBDA: [1]}}", "needs PRETRAIN, .*and no BRANCHES"),
        (f"{SWEEP}GRID: {{METHOD.JCL_LAMBDA: [1, 1]}}", "would share"),
        (f"{SWEEP}GRID: {{METHOD.JCL_LAMBDA: 1}}", "write a list of values"),
        (f"{SWEEP}SEEDS: [0]", "needs GRID .* or POINTS .*, and not both"),
        (f"{SWEEP}POINTS: [SEED]", "write a list of settings"),
    ],
)
def test_a_file_that_cannot_work_is_one_line(text: str, message: str):
    Path("p.yaml").write_text(text)
    assert re.search(message, refused(lambda: pipeline.load_pipeline("p.yaml")))


def swept(plan: str, done: int) -> tuple[Graph, list[Any]]:
    """Return the sweep of a file whose first pretrainings are ``done``, and the report's table after it was moved."""
    Path("s.yaml").write_text(plan)
    graph = pipeline.load_pipeline("s.yaml", "out")
    for place, node in enumerate(graph.nodes[:done]):
        complete(node.stage)
        pretrain(Path(node.stage.folder), *DIGITS, knn=10.0 + place)
    write_graph(graph, HERE)
    Path("out").rename("moved")
    content = report.build_report([Path("moved")], "report.md")
    assert [figure.file for figure in content.figures] == [Path("report_scores.png")]
    (table,) = (table for table in content.tables if table.title == "moved")
    assert table.head[1:] == ["kNN top-1 after pretraining"]
    return graph, list(table.rows)


def test_a_grid_becomes_a_table_and_a_plot():
    grid = "SEEDS: [0, 1]\nGRID: {METHOD.NUM_KEYS: [2, 5], METHOD.JCL_LAMBDA: [0.5, 4]}\n"
    graph, rows = swept(SWEEP + grid, done=5)
    stage = graph.nodes[-1].stage
    assert "NUM_KEYS: 5" in stage.config and "LAMBDA: 4.0" in stage.config and "SEED: 1" in stage.config
    assert rows == [
        ["num_keys=2_jcl_lambda=0.5", "10.5 ± 6.4"],
        ["num_keys=2_jcl_lambda=4", "12.5 ± 6.4"],
        ["num_keys=5_jcl_lambda=0.5", "14.0 [n 1]"],
    ]


def test_keys_that_vary_together_or_are_lists():
    points = "POINTS: [{SOLVER.IMS_PER_BATCH: 32, SOLVER.BASE_LR: 0.004}, {MODEL.HEAD_HIDDEN_DIMS: [32, 16]}]"
    graph, rows = swept(SWEEP + points, done=2)
    names = ["ims_per_batch=32_base_lr=0.004", "head_hidden_dims=_32__16_"]
    assert [node.key for node in graph.nodes] == [f"{name}_seed=0/pretrain" for name in names]
    assert rows == [[names[0], "10.0"], [names[1], "11.0"]]


def test_variables_and_homes_in_a_file_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No shell does it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/knn.yaml").write_text("PROBE: {KNN_K: 3}\n")
    (tmp_path / "p.yaml").write_text(
        "OUTPUT_DIR: $SCRATCH/out\nDATA: [digits, ~/data]\nKNN: [~/knn.yaml]\nBRANCHES:\n  r50: {WEIGHTS: ~/r50.pth}\n"
    )
    graph = pipeline.load_pipeline("p.yaml")
    nodes = {node.key: node.stage for node in graph.nodes}
    assert graph.output == f"{tmp_path}/scratch/out"
    assert nodes["r50/knn"].options.weights == f"{tmp_path}/home/r50.pth" and nodes["r50/knn"].cfg.PROBE.KNN_K == 3
    assert nodes["data"].product == f"{tmp_path}/home/data"
    refused(lambda: pipeline.load_pipeline("p.yaml", "~/runs"), "--output is '~/runs'")
