"""A table of configs/papers as a plan: each row with a recipe has stages, which are compared with it."""

import re
import shutil
from pathlib import Path

import pytest

from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.config import from_yaml_text
from pretrain.probe.protocol import build_linear_protocol
from tests.errors import refused
from tests.tools.launcher.helpers import CONFIGS
from tools import launch
from tools.launcher.graphs import pipeline
from tools.launcher.graphs.paper_pipeline import write_pipeline
from tools.reporting import paper_tables
from tools.reporting.origins import Origin
from tools.reporting.protocols import normalize_protocol
from tools.reporting.runs import BackboneScore
from tools.stages.base import Stage

PAPERS = CONFIGS / "papers"


def stages_of(table: str, folder: Path, word: str = "") -> dict[str, Stage]:
    graph = pipeline.load_pipeline(str(write_pipeline(str(PAPERS / f"{table}.csv"), word, folder)), str(folder))
    return {node.key: node.stage for node in graph.nodes}


def published_top1(config: str) -> float | None:
    """Return the published top-1 of the pretraining and the linear probe that ``config`` describes."""
    cfg = from_yaml_text(config)
    origin = Origin(cfg.METHOD.NAME, config=dict(flatten(parse_yaml(config))))
    test, settings = normalize_protocol("linear", build_linear_protocol(cfg))
    score = BackboneScore(Path(), "linear", origin, test, protocol=settings)
    row = paper_tables.find_published(score).row
    return float(row["top1"]) if row else None


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)


@pytest.mark.parametrize(
    ("table", "word", "count", "top1"),
    [
        ("jcl_table1_linear", "", 4, {68.7, 67.5, 60.6}),
        ("sce_table2_linear", "tiny", 16, {48.35, 51.9}),
        ("tcl_tables_linear", "fashion", 12, {95.42, 95.58, 95.5, 95.7}),
        ("tcl_tables_linear", "Table 2 SupCon", 4, {96.7, 81.0, 95.5, 86.5}),
        ("tcl_studies_linear", "sec.2.3", 6, set()),
    ],
)
def test_a_row_is_a_pretraining_per_seed_with_its_probe(
    table: str, word: str, count: int, top1: set[float], tmp_path: Path
) -> None:
    stages = stages_of(table, tmp_path, word)
    trained = {key for key in stages if key.endswith("/pretrain")}
    assert len(trained) == count
    assert set(stages) == trained | {key.replace("/pretrain", "/linear") for key in trained}
    if table != "jcl_table1_linear":  # its probe has its own file
        assert top1 <= {published_top1(stages[key].config) for key in trained}


def test_the_first_seed_of_every_row_comes_first(tmp_path: Path) -> None:
    """An hour of a GPU then trains one of each, not five of the first."""
    order = [
        key.split("_100ep_")[1] for key in stages_of("tcl_tables_linear", tmp_path, "fashion") if "pretrain" in key
    ]
    seeds = [number for name in order for number in re.findall(r"seed=(\d)", name)]
    assert next(name for name in order if "epochs" not in name) == "name=supcon_k1=1.0_seed=1/pretrain"
    assert seeds == sorted(seeds) and len(seeds) == 10


def test_a_table_that_reports_do_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = shutil.copy(PAPERS / "tcl_tables_linear.csv", tmp_path)
    for file, is_named in ((table, True), ("configs/papers/tcl_tables_linear.csv", False)):
        assert launch.main(["paper", str(file), "--rows", "fashion", "--cluster", "local", "--dry-run"]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "reports will not show its numbers" in line]
        assert len(notes) == is_named and all(f"{file} is not in " in line for line in notes)


def test_a_pretraining_of_two_tables_is_one_and_detectors_start_from_what_the_row_names(tmp_path: Path) -> None:
    linear, coco, voc = (stages_of(name, tmp_path) for name in ("jcl_table1_linear", "jcl_table2_coco_1x", "moco_voc"))
    for key in ("mocov1_R50_IN1k_200ep/pretrain", "jcl_R50_IN1k_200ep/pretrain"):
        assert linear[key].fingerprint() == coco[key].fingerprint() == voc[key].fingerprint()
    trained = [key for key in coco if coco[key].name == "transfer"]
    assert len(trained) == 15 and not [key for key in coco if "linear" in key]
    for key in (name for name in trained if name.startswith("supervised_msra/")):
        assert "supervised_msra/backbone.pth" in coco[key].config and "FORMAT: BGR" in coco[key].config
    assert coco["supervised_msra/convert"].options.source.endswith("weights/R-50.pkl")
    trained = [key for key in voc if voc[key].name == "transfer"]
    starts = {key.split("/")[0] for key in trained}
    assert len(trained) == 5 * len(starts) > 20
    assert {key for key in voc if key.endswith("/convert")} == {f"{start}/convert" for start in starts - {"random"}}
    assert "SEED: 5" in voc["random/voc_R50_C4_24k_seed=5"].config


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "{linear}a.yaml,SOLVER.EPOCHS 5,own,\na.yaml,LINEAR.EPOCHS 5,own,\n",
            ("rows share the output folder a_epochs=5",),
        ),
        ("{recipe}a.yaml,SOLVER.BASE_LR 1,d.yaml,\na.yaml,SOLVER.BASE_LR 2,d.yaml,\n", ("share the output folder d;",)),
        ("{recipe}a.yaml,,d.yaml,\nb/a.yaml,,e.yaml,\n", ("share the output folder a;",)),
        ("name,top1\nJCL,68.7\n", ("is not a results table; pass a CSV file",)),
        ("pretrain,linear,seeds\na.yaml,own,1\n", ("is not a results table; pass a CSV file",)),
        ("", ("is not a results table; pass a CSV file",)),
        ("{linear}a.yaml\n", ("row 1 of", "has not as many values as the table has columns")),
        ("{linear}a.yaml,METHOD.X [1,2],own,1\n", ("row 1 of", "quote a value that contains a comma")),
        ("{linear}a.yaml,,own,\na.yaml,,own,three\n", ("row 2 of", "the seeds 'three'; write their number")),
        ("{linear}a.yaml,SEED,own,1\n", ("the overrides 'SEED'; write KEY VALUE pairs",)),
        ("{recipe}a.yaml,,,1\n", ("a recipe in the column pretrain, but none in recipe",)),
        ("# \xe9\n{linear}a.yaml,,own,1\n", ("is not a table", "save it as CSV, in UTF-8")),
    ],
    ids=lambda value: re.sub(r"\W+", "-", str(value))[:40],
)
def test_what_is_no_table_is_refused(content: str, words: tuple[str, ...], tmp_path: Path) -> None:
    columns = {name: f"pretrain,overrides,{name},seeds\n" for name in ("linear", "recipe")}
    (tmp_path / "t.csv").write_text(content.format(**columns), encoding="latin-1")
    refused(lambda: write_pipeline(str(tmp_path / "t.csv"), "", tmp_path), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_table_may_have_empty_lines_and_the_byte_order_mark_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("# Ours: x\n\npretrain,overrides,linear,seeds\n\na.yaml,,own,2\n", "utf-8-sig")
    plan = parse_yaml(write_pipeline(str(tmp_path / "t.csv"), "", tmp_path).read_text())
    assert list(plan["BRANCHES"]) == ["a_seed=1", "a_seed=2"]
    (tmp_path / "file").touch()
    refused(lambda: write_pipeline(str(tmp_path / "t.csv"), "", tmp_path / "file"), "cannot write")


def test_a_word_of_no_row_is_refused_and_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    absent = "tcl_tables_linear.csv contains 'SupCon IN100'; omit --rows"
    refused(lambda: stages_of("tcl_tables_linear", tmp_path, "SupCon IN100"), "no runnable row of", absent)
    words = ["paper", str(PAPERS / "tcl_studies_linear.csv"), "--rows", "Sec.3 k2", "--output", str(tmp_path / "out")]
    assert launch.main([*words, "--cluster", "slurm", "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
