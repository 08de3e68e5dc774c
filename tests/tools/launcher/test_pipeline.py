"""Pipeline files: each shipped one loads, and a wrong one is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pretrain.common.errors import UserError
from tests.tools.launcher.helpers import CONFIGS
from tools.launcher import pipeline, stages

PIPELINES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if "\nBRANCHES:\n" in path.read_text()]


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
    starts = [yaml.safe_load(by_key[f"{name}/mask"].config)["MODEL"]["WEIGHTS"] for name in ("moco", "random")]
    assert starts == [weights, ""]


def test_branches_over_seeds_several_data_sets_and_detectors_with_keys_of_their_own(tmp_path: Path):
    (tmp_path / "mask.yaml").write_text("VERSION: 2\n")
    (tmp_path / "p.yaml").write_text(
        "OUTPUT_DIR: out\nDATA: [[digits, data/a], [trees, --test-region, '{seed}', 'data/{seed}']]\n"
        "SEEDS: [4, 7]\nBASELINE: random\n"
        "KNN: own\nDISTRIBUTIONS: [own]\nENGINE: torchvision\nTRANSFER_OVERRIDES: [SOLVER.MAX_ITER, 9]\nTRANSFER:\n"
        "  long: mask.yaml\n  short: {CONFIG: mask.yaml, OVERRIDES: SOLVER.MAX_ITER 5, ENGINE: detectron2}\n"
        f"BRANCHES:\n  random: {{WEIGHTS: random}}\n  moco: {{PRETRAIN: {stages.recipe_of('mocov2')}, "
        "OVERRIDES: [DATA.TRAIN, 'folder:data/{seed}']}\n"
        '  other: {WEIGHTS: "runs/{seed}.pth"}\n  zoo: {DETECTOR: zoo.pkl}\n'
    )
    graph = pipeline.load("p.yaml")
    nodes = {node.key: node for node in graph.nodes}
    of_branch: dict[str, tuple[str, ...]] = {"random": ("knn", "distributions", "long", "short")}
    of_branch["moco"] = ("pretrain", "knn", "distributions", "convert", "long", "short")
    of_branch["other"] = of_branch["moco"][1:]
    of_branch["zoo"] = of_branch["random"]
    assert set(nodes) == {"data/a", "data/4", "data/7"} | {
        f"{name}_seed={seed}/{stage}" for name, names in of_branch.items() for stage in names for seed in (4, 7)
    }
    data = ("data/a", "data/4", "data/7")
    assert nodes["moco_seed=7/pretrain"].parents == nodes["random_seed=4/long"].parents == data
    assert nodes["moco_seed=7/short"].parents == ("moco_seed=7/convert", *data)
    assert yaml.safe_load(nodes["zoo_seed=4/long"].spec.config)["MODEL"]["WEIGHTS"] == "zoo.pkl"
    assert nodes["data/7"].spec.produces == str(tmp_path / "data/7")
    for name in ("random", "moco"):  # random weights are probed by the data of their seed
        assert yaml.safe_load(nodes[f"{name}_seed=7/knn"].spec.config)["DATA"]["TRAIN"] == "folder:data/7"
    for stage in ("pretrain", "knn", "distributions"):
        assert yaml.safe_load(nodes[f"moco_seed=7/{stage}"].spec.config)["SEED"] == 7
    assert nodes["random_seed=4/distributions"].spec.args == ({"random": "random"},)
    short, long = (nodes[f"moco_seed=4/{name}"].spec for name in ("short", "long"))
    found = yaml.safe_load(short.config)
    assert (found["SEED"], found["SOLVER"]["MAX_ITER"]) == (4, 5)
    assert found["MODEL"]["WEIGHTS"] == str(tmp_path / "out/moco_seed=4/backbone.pth")
    assert yaml.safe_load(long.config)["SOLVER"]["MAX_ITER"] == 9
    assert (short.args[0][2], long.args[0][2]) == ("detectron2", "torchvision")
    assert nodes["other_seed=7/knn"].spec.args[0] == str(tmp_path / "runs/7.pth")
    folders = {name: {"4": f"{name}_seed=4", "7": f"{name}_seed=7"} for name in ("random", "moco", "other", "zoo")}
    assert graph.facts == {"branches": folders, "baseline": "random"}


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_pipeline_file_loads(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(CONFIGS.parent)
    graph = pipeline.load(str(path))
    used = {node.spec.stage for node in graph.nodes}
    starts_from_random_alone = path.stem == "frozen_bn"
    assert used & {"pretrain", "convert"} or starts_from_random_alone
    assert used & {"knn", "linear", "transfer", "distributions"}
    assert len({node.spec.folder for node in graph.nodes}) == len(graph.nodes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BRANCHES: {}", "has no BRANCHES"),
        ("BRANCHES: {a: {}}", "branch a needs one of PRETRAIN"),
        ("BRANCHS: {}", "unknown key BRANCHS.*did you mean 'BRANCHES'"),
        ("BRANCHES: 3", "BRANCHES in .* is 3; it must be a dict"),
        ("[1", "is not YAML"),
        ("[]", "holds a list, not KEY: value lines"),
        ("BRANCHES: \xff", "p.yaml: .*decode byte 0xff"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nKNN: ['']\nOVERRIDES: a 'b", "is not a list of words"),
        ("BRANCHES: {no: {WEIGHTS: random}}", "is named False; use letters"),
        ("BRANCHES: {a/b: {WEIGHTS: random}}", "is named 'a/b'; use letters"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {a b: x.yaml}", "a detector of TRANSFER is named 'a b'"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nBASELINE: b", "BASELINE in .* is b; it must be one of BRANCHES"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nSEEDS: [1, 1]", "SEEDS in .* are 1, 1; write whole numbers, each once"),
        ("BRANCHES: {a: {WEIGHTS: random}}\nTRANSFER: {m: {CONFG: x}}", "unknown key CONFG in .* detector m"),
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
