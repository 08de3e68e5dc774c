"""Help, mistakes and complete runs are answered before torch is imported, which takes seconds."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.files import write_json
from tests.tools.launcher.helpers import build_convert, build_pretrain, build_probe, build_transfer, complete
from tools.launcher import record_formats
from tools.launcher.graphs.graph import build_single
from tools.stages import recipes
from tools.stages.base import Stage

ROOT = Path(__file__).parents[1]
LEAF = str(ROOT / "configs" / "coco_R50_FPN_1x_jcl.yaml")
LAUNCH = "tools/launch.py"
LOCAL = ("--cluster", "local", "--gpus", "0")
TRANSFER = (LAUNCH, "transfer", *LOCAL, "--config-file", LEAF, "--engine", "torchvision")
# Runs each command line as the shell does, in one process, and prints how it ended and which large libraries it needed.
SCRIPT = """
import contextlib, io, json, runpy, sys
for words in json.load(sys.stdin):
    sys.argv, out, err = words, io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if words[0].endswith("__main__.py"):
                runpy.run_module("pretrain", run_name="__main__")
            else:
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        imported = sorted({"torch", "torchvision"} & sys.modules.keys())
        print(json.dumps([ended.code, out.getvalue(), err.getvalue(), imported]))
"""
# One row per program, and some for stages of the launcher; the individual checks are tested elsewhere.
MISTAKES = {
    ("tools/convert_to_d2.py", "nowhere.pth", "out.pth"): "no run folder or checkpoint at nowhere.pth",
    ("tools/export.py", "nowhere", "--output", "out", "--format", "timm"): "no run folder or checkpoint at nowhere",
    ("tools/benchmark.py", "views", "--views", "0"): "--views is 0",
    ("tools/predict.py", "nowhere", "--run", "box", "--output", "x"): "no image or folder at nowhere",
    ("tools/show_views.py", "--augmentation", "moco_v3", "--data", "x"): "moco_v",
    ("tools/make_data.py", "digits", "--output", "x", "--size", "1"): "--size must be at least 16 for digits, got 1",
    ("pretrain/__main__.py", "DATA.TRAIN", "folder:nowhere"): "nowhere",
    ("transfer/train_net.py", "--config-file", LEAF, "SOLVER.BASE_LRR", "1"): "SOLVER.BASE_LR'",
    ("transfer/train_net.py", "--config-file", LEAF, "OUTPUT_DIR", "box"): "--resume",
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl"): "datasets/imagenet/train",
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "SEED", "7", "OUTPUT_DIR", "pretrained"): "different config (SEED",
    (
        LAUNCH,
        "pretrain",
        "--method",
        "jcl",
        "--setup",
        "x",
    ): "launch.py pretrain has no option --setup; write the lines into",
    (LAUNCH, "pretrain", "--method", "jcl", "--qos=long"): "pretrain has no option --qos; pass it to sbatch: --sbatch",
    (
        LAUNCH,
        "pretrain",
        "--method",
        "jcl",
        "--gpus-per-node",
        "2",
    ): "no option --gpus-per-node; use --gpus (in the site",
    (LAUNCH, "pretrain", "--method", "jcl", "-p", "gpu"): "no option -p; use --partition (in the site file partition)",
    (LAUNCH, "pretrain", "--method", "jcl", "-C", "a100"): "no option -C; pass it to sbatch: --sbatch constraint=VALUE",
    (LAUNCH, "status", "--time", "1"): "status: unknown option '--time'",
    (LAUNCH, "pretrain", "--method", "jcl", "--cluster", "slrum"): "launch.py pretrain: argument --cluster: invalid",
    (*TRANSFER, "--nodes", "two"): "launch.py transfer: argument --nodes: invalid int value: 'two'",
    (LAUNCH, "pretain"): "no command 'pretain'; did you mean 'pretrain'",
    ("tools/convert_to_d2.py", "a.pth", "b.pth", "--encoder", "keys"): "argument --encoder: invalid choice: 'keys'",
    ("tools/export.py", "nowhere", "--output", "out", "--format", "tim"): "argument --format: invalid choice: 'tim'",
    ("tools/predict.py", "a.jpg", "--run", "box", "--output", "x", "--engine", "mmdet"): "invalid choice: 'mmdet'",
    ("transfer/train_net.py", "--config-file", LEAF, "--engine", "mmdet"): "argument --engine: invalid choice: 'mmdet'",
    ("pretrain/__main__.py", "--config-file"): "argument --config-file: expected one argument",
    (*TRANSFER,): "weights/jcl_R50_IN1k_200ep.pth",
}
DONE = "is already complete"
ANSWERS = {
    (LAUNCH, "--help"): "python tools/launch.py pretrain --method jcl",
    (LAUNCH, "pretrain", "--help-keys", "SOLVER.EP"): "SOLVER.EPOCHS 200  (at least 1 and ",
    (LAUNCH, "transfer", "--help-keys"): "SOLVER.MAX_ITER 40000  (at least 1)\n    number of iterations",
    ("transfer/train_net.py", "--help-keys", "SOLVER"): "SOLVER.GAMMA 0.1  (at least 0)",
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "DATALOADER.NUM_WORKERS", "1", "OUTPUT_DIR", "pretrained"): DONE,
    (LAUNCH, "linear", *LOCAL, "pretrained"): DONE,
    (LAUNCH, "knn", *LOCAL, "pretrained"): DONE,
    (LAUNCH, "convert", "--cluster", "local", "pretrained", "converted.pth"): DONE,
    (*TRANSFER, "OUTPUT_DIR", "box"): DONE,
}

# Commands, and modules that they have no use for: a command imports what it needs.
NOT_NEEDED = {
    ("--help",): "numpy yaml submitit fvcore.common.config tools.convert_to_d2 tools.report tools.launcher.job_options",
    ("pretrain", "--method", "jcl", "--help"): "cv2 tools.report tools.launcher.doctor tools.launcher.graphs.start",
    ("status", "RUN"): "cv2 tools.report tools.convert_to_d2 transfer.api tools.stages.transfer",
    ("report", "RUN"): "scipy.stats matplotlib tools.launcher.graphs.start tools.launcher.doctor",
}


def finish(stage: Stage, config: str = "") -> None:
    """Write what the launcher and a complete stage leave."""
    complete(build_single(stage).nodes[0].stage)
    (Path(stage.folder) / "config.yaml").write_text(config or stage.config)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Any]:
    """Run each command line; return its exit status, output, error output and imported libraries."""
    from transfer.config import load_config

    root = tmp_path_factory.mktemp("startup")
    with contextlib.chdir(root):
        finish(build_pretrain(recipes.find_recipe("jcl"), ["OUTPUT_DIR", "pretrained"]))
        Path("pretrained/checkpoint_final.pth").write_bytes(b"\0weights")
        for probe in ("linear", "knn"):
            finish(build_probe(probe, "pretrained"))
        finish(build_convert("pretrained", "converted.pth"))
        trained = load_config(LEAF, ["OUTPUT_DIR", "box"]).dump()
        finish(build_transfer(LEAF, ["OUTPUT_DIR", "box"], engine="torchvision"), trained)
        Path("box/model_final.pth").write_bytes(b"\0weights")
    commands = [*MISTAKES, *ANSWERS]
    words = json.dumps([[str(ROOT / file), *arguments] for file, *arguments in commands])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=words, cwd=root, env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done
    return dict(zip(commands, map(json.loads, lines), strict=True))


@pytest.mark.core
@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_answered_without_torch(answers: dict[tuple[str, ...], Any], words: tuple[str, ...]) -> None:
    status, out, err, imported = answers[words]
    assert (status, out, imported) == (2, "", []), answers[words]
    assert MISTAKES[words] in err.splitlines()[-1] and "usage:" not in err, answers[words]


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_help_and_complete_runs_are_answered_without_torch(
    answers: dict[tuple[str, ...], Any], words: tuple[str, ...]
) -> None:
    status, out, err, imported = answers[words]
    assert (status, imported) == (0, []) and ANSWERS[words] in out, err


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the pipeline of an earlier version, with the launcher's records as this version writes them."""
    folder = tmp_path_factory.mktemp("golden") / "run"
    shutil.copytree(ROOT / "tests/golden/run", folder)
    for file in folder.rglob(record_formats.PIPELINE_FILE.name):
        write_json(file, asdict(record_formats.read_pipeline(file)))
    for file in folder.rglob(record_formats.LAUNCH_FILE.name):
        write_json(file, asdict(record_formats.read_launch(file.parents[1])))
    return folder


@pytest.mark.parametrize("words", NOT_NEEDED, ids=" ".join)
def test_a_command_imports_only_what_it_needs(words: tuple[str, ...], run_folder: Path) -> None:
    code = "import runpy, sys; sys.argv[0] = sys.argv[1]; del sys.argv[1]\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "finally: print(*sys.modules, file=sys.stderr)"
    command = [str(run_folder) if word == "RUN" else word for word in words]
    done = subprocess.run([sys.executable, "-c", code, LAUNCH, *command], cwd=ROOT, capture_output=True, text=True)
    imported = set(done.stderr.splitlines()[-1].split())
    assert done.returncode == 0 and "tools.launcher.commands" in imported, done.stderr
    assert imported & set(NOT_NEEDED[words].split()) == set()
