"""What is answered before torch is imported, which takes seconds: help, mistakes, and runs that are complete."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tools.launcher import stages
from tools.launcher.spec import StageSpec

ROOT = Path(__file__).parents[1]
LEAF = str(ROOT / "configs" / "coco_R50_FPN_1x_jcl.yaml")
LAUNCH = "tools/launch.py"
LOCAL = ("--cluster", "local", "--gpus", "0")
TRANSFER = (LAUNCH, "transfer", *LOCAL, "--config-file", LEAF, "--engine", "torchvision")
NO_WEIGHTS = ("MODEL.WEIGHTS", "")
TINY_DATA = ("DATASETS.TRAIN", "('coco:a.json:images',)", "DATASETS.TEST", "()")
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
        imported = sorted({"torch", "torchvision", "fvcore", "submitit"} & sys.modules.keys())
        print(json.dumps([ended.code, out.getvalue(), err.getvalue(), imported]))
"""
HELP = (LAUNCH, "--help")
KEYS = {
    (LAUNCH, "pretrain", "--help-keys", "SOLVER.EP"): "SOLVER.EPOCHS 200  (at least 1 and ",
    (LAUNCH, "knn", "--help-keys", "probe.knn_k"): "PROBE.KNN_K 200  (at least 1 and ",
    (LAUNCH, "transfer", "--help-keys"): "SOLVER.MAX_ITER 40000  (at least 1)\n    iterations",
    ("transfer/train_net.py", "--help-keys", "SOLVER"): "SOLVER.GAMMA 0.1  (at least 0 and ",
}  # fmt: skip
MISTAKES = {
    ("tools/convert_to_d2.py", "nowhere.pth", "out.pth"): "no run folder or checkpoint at nowhere.pth",
    ("tools/convert_to_d2.py", LEAF, "out.txt"): "must end in .pth",
    ("tools/export.py", "nowhere", "out", "--format", "timm"): "no run folder or checkpoint at nowhere",
    ("tools/export.py", LEAF, "out", "--format", "onnx"): "must end in .onnx",
    ("transfer/train_net.py", "--config-file", "nowhere.yaml"): "no config file at nowhere.yaml",
    ("transfer/train_net.py", "--config-file", LEAF, "SOLVER.BASE_LRR", "1"): "did you mean 'SOLVER.BASE_LR'?",
    ("transfer/train_net.py", "--config-file", LEAF, "--num-gpus", "0"): "at least 1 process",
    ("transfer/train_net.py", "--config-file", LEAF, "SEED", "-1", "--num-gpus", "0"): "at least 1 process",
    ("transfer/train_net.py", "--config-file", LEAF, "SEED", "1", "--num-gpu"): "did you mean '--num-gpus'",
    ("transfer/train_net.py", "--config-file", LEAF, "SEED", "1", "--resum3"): "did you mean '--resume'?",
    ("transfer/train_net.py", "--help-keys", "SOLVR"): "did you mean 'SOLVER.'?",
    (LAUNCH, "pretrain", "--method", "jcl", "SOLVER.EPOCHS", "0", "--cluster", "local"): "SOLVER.EPOCHS is 0; it must",
    (LAUNCH, "pretrain", "--method", "foo"): "name a recipe of your own by --config-file FILE",
    (LAUNCH, "pretrain", "--method", "jcl", "METHOD.K1", "2.0"): "METHOD.K1",
    (LAUNCH, "transfer", "--config-file", "nowhere.yaml"): "no config file at nowhere.yaml",
    ("tools/benchmark.py", "views", "--views", "0"): "--views is 0",
    ("tools/show_views.py", "--recipe", "moco_v3", "--data", "x"): "did you mean 'moco_v",
    ("tools/make_data.py", "digits", "x", "--size", "1"): "--size is 1",
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "SEED", "7", "OUTPUT_DIR", "pretrained"): "different config (SEED",
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "SOLVER.EPOCHS", "210", "OUTPUT_DIR", "pretrained"): (
        "(SOLVER.EPOCHS 200 -> 210); the learning rate follows EPOCHS from the first step; to train longer, set "
        "MODEL.WEIGHTS "
    ),
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "DATA.TRAIN", "folder:broken"): "cannot decode image broken/c.jpg",
    ("pretrain/__main__.py", "DATA.TRAIN", "folder:broken"): "cannot decode image broken/c.jpg: ",
    ("pretrain/__main__.py", "DATA.TRAIN", "folder:images"): "IMS_PER_BATCH is 256, but folder:images holds only 1",
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl"): "no ImageNet at datasets/imagenet/train",
    (LAUNCH, "knn", *LOCAL, "pretrained", "DATA.TRAIN", "folder:images", "OUTPUT_DIR", "own"): "has no labels to probe",
    ("pretrain/__main__.py", "SOLVER.EPOCHS", "0"): "SOLVER.EPOCHS is 0; it must be at least 1",
    (*TRANSFER,): "no weights at weights/jcl_R50_IN1k_200ep.pth: neither a file nor a folder",
    (*TRANSFER, *TINY_DATA, "MODEL.WEIGHTS", "pretrained"): (
        "is a run folder of pretraining; convert it first: python tools/convert_to_d2.py pretrained "
        "weights/pretrained.pth\n"
    ),
    ("transfer/train_net.py", "--config-file", LEAF): "no annotation file at datasets/coco/annotations",
    ("transfer/train_net.py", "--config-file", LEAF, *TINY_DATA, "MODEL.WEIGHTS", "lost.pth"): "no file of MODEL.WEIGH",
    (*TRANSFER, *NO_WEIGHTS, *TINY_DATA, "INPUT.MAPPER", "mine", "--cluster", "slurm"): "cannot honor INPUT.MAPPER",
    ("transfer/train_net.py", "--config-file", LEAF, "--engine", "torchvision", "DATASETS.TEST", "('mine',)"): (
        "other names of Detectron2's DatasetCatalog need --engine detectron2"
    ),
    ("transfer/train_net.py", "--config-file", LEAF, "--import", "lost.py"): "--import lost.py: there is no such file",
    ("transfer/train_net.py", "--config-file", LEAF, "OUTPUT_DIR", "box"): "add --resume to continue it, or choose ",
    ("transfer/train_net.py", "--config-file", LEAF, "OUTPUT_DIR", "pretrained"): "is the run folder of pretrain, not ",
    ("transfer/train_net.py", "--resume", "--config-file", LEAF, "SOLVER.GAMMA", "0.2", "OUTPUT_DIR", "box"): (
        "holds a training run with a different config (SOLVER.GAMMA 0.1 -> 0.2)"
    ),
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "OUTPUT_DIR", "pretrained/knn"): "the run folder of knn, not of",
    (LAUNCH, "linear", *LOCAL, "pretrained", "LINEAR.BASE_LR", "1.0"): "a different probe (LINEAR.BASE_LR 30.0 -> 1.0)",
    (LAUNCH, "knn", *LOCAL, "pretrained", "OUTPUT_DIR", "pretrained"): "is the run folder of pretrain, not of knn",
    (*TRANSFER, "SOLVER.BASE_LR", "0.5", "OUTPUT_DIR", "box"): "run with a different config (SOLVER.BASE_LR ",
    (*TRANSFER, "OUTPUT_DIR", "pretrained"): "is the run folder of pretrain, not of transfer",
    (*TRANSFER, "--eval-only", *NO_WEIGHTS, "OUTPUT_DIR", "moved"): "is the run folder of transfer, not of evaluation",
}  # fmt: skip
COMPLETE = [
    (LAUNCH, "pretrain", *LOCAL, "--method", "jcl", "DATALOADER.NUM_WORKERS", "1", "OUTPUT_DIR", "pretrained"),
    (LAUNCH, "linear", *LOCAL, "pretrained"),
    (LAUNCH, "knn", *LOCAL, "pretrained"),
    (LAUNCH, "convert", *LOCAL, "pretrained", "converted.pth"),
    (*TRANSFER, "OUTPUT_DIR", "box"),
]


def finish(spec: StageSpec, config: str = "") -> None:
    """Leaves what the launcher and the stage leave of complete work."""
    folder = Path(spec.folder)
    spec.mark("complete")
    (folder / "stage.txt").write_text(spec.stage)
    (folder / "config.yaml").write_text(config or spec.config)
    (folder / spec.produces).write_text("{}")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Any]:
    """Exit status, output, error output and imported libraries of each command line."""
    from transfer.config import load_config

    root = tmp_path_factory.mktemp("startup")
    with contextlib.chdir(root):
        finish(stages.pretrain(stages.recipe_of("jcl"), ["OUTPUT_DIR", "pretrained"]))
        Path("pretrained/checkpoint_final.pth").write_bytes(b"\0weights")
        for probe in ("linear", "knn"):
            finish(stages.probe(probe, "pretrained"))
        finish(stages.convert("pretrained", "converted.pth"))
        trained = load_config(LEAF, ["OUTPUT_DIR", "box"]).dump()
        finish(stages.transfer(LEAF, ["OUTPUT_DIR", "box"], engine="torchvision"), trained)
        Path("box/model_final.pth").write_bytes(b"\0weights")
        Path("images").mkdir()
        Image.new("RGB", (8, 8)).save("images/a.jpg")
        Path("broken").mkdir()
        for name in "abc":
            (Path("broken") / f"{name}.jpg").write_bytes(
                Path("images/a.jpg").read_bytes()[: -200 if name == "c" else None]
            )
        Path("a.json").touch()
        (root / "moved/eval_only").mkdir(parents=True)
        (root / "moved/eval_only/stage.txt").write_text("transfer")
    commands = [HELP, *KEYS, *MISTAKES, *COMPLETE]
    words = json.dumps([[str(ROOT / file), *rest] for file, *rest in commands])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=words, cwd=root, env=environment, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done
    return dict(zip(commands, map(json.loads, lines), strict=True))


def test_help_imports_no_large_library(answers: dict[tuple[str, ...], Any]) -> None:
    status, out, _, imported = answers[HELP]
    assert (status, imported) == (0, []) and "python tools/launch.py pretrain --method jcl" in out


@pytest.mark.parametrize("words", KEYS, ids=" ".join)
def test_keys_are_listed_without_torch(answers: dict[tuple[str, ...], Any], words: tuple[str, ...]) -> None:
    status, out, err, imported = answers[words]
    assert (status, err) == (0, "") and KEYS[words] in out
    assert not {"torch", "torchvision", "submitit"} & set(imported)


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_answered_without_torch(answers: dict[tuple[str, ...], Any], words: tuple[str, ...]) -> None:
    status, out, err, imported = answers[words]
    assert (status, out) == (2, "") and MISTAKES[words] in err, answers[words]
    assert not {"torch", "torchvision"} & set(imported)


@pytest.mark.parametrize("words", COMPLETE, ids=" ".join)
def test_a_complete_run_is_answered_without_torch(answers: dict[tuple[str, ...], Any], words: tuple[str, ...]) -> None:
    status, out, err, imported = answers[words]
    assert status == 0 and "is already complete" in out, err
    assert not {"torch", "torchvision"} & set(imported)
