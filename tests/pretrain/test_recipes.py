"""Every recipe learns in its smoke form: the loss falls within a few steps on tiny images, on the same code path."""

import statistics
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.methods import METHODS
from pretrain.train import main
from tests.pretrain.images import write_folder
from tests.pretrain.runs import lines

ROOT = Path(__file__).parents[2] / "configs" / "pretrain"
# One leaf per objective in the ordinary suite (SupCon and SimCLR are TCL's), all on ImageNet's stem: at 32 pixels it is
# faster than CIFAR's at 16.
ORDINARY = {
    "mocov2_R18_IN100_100ep", "multikey_R50_IN1k_200ep", "jcl_R18_IN100_100ep", "sce_R50_IN1k_200ep",
    "ressl_R18_cifar10_200ep", "tcl_R18_IN100_400ep",
}  # fmt: skip
LEAVES = [p for p in sorted(ROOT.glob("*.yaml")) if not p.name.startswith("Base-")]
BATCH, WINDOW = 8, 5
IDLE = ["SOLVER.BASE_LR", "0.0"]


def test_one_leaf_of_every_objective_is_in_the_ordinary_suite():
    assert {load_config(p).METHOD.NAME for p in LEAVES} == set(METHODS)
    assert {load_config(p).METHOD.NAME for p in LEAVES if p.stem in ORDINARY} == {
        name for name in METHODS if name not in ("mocov1", "supcon", "simclr")
    }


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """One batch of different pictures in two classes: in larger sets the draw of a batch outweighs what was learned."""
    names = [f"train/class{i % 2}/{i:02d}.png" for i in range(BATCH)]
    return write_folder(tmp_path_factory.mktemp("images"), names, height=32, width=32)


def _steps(path: Path) -> int:
    """Fewer in the ordinary suite. A moving target makes the loss noisier."""
    return 12 if path.stem in ORDINARY and not path.stem.startswith(("sce", "ressl", "tcl")) else 20


def _smoke(path: Path, images: Path, output: Path) -> list[str]:
    """Overrides for a small network, small images and a few steps; the objective and its hyperparameters stay."""
    cfg = load_config(path)
    stem = "imagenet" if path.stem in ORDINARY else cfg.MODEL.STEM
    small = {
        "MODEL.STEM": stem,
        "MODEL.ARCH": "resnet18",
        "MODEL.HEAD_HIDDEN_DIMS": [32] * len(cfg.MODEL.HEAD_HIDDEN_DIMS),
        "MODEL.EMBEDDING_DIM": 16,
        "MODEL.BN_GROUPS": min(cfg.MODEL.BN_GROUPS, 2),  # of 4 images or more, as in a batch of 8 by default
        "VIEWS.IMAGE_SIZE": 16 if stem == "cifar" else 32,
        "DATA.TRAIN": f"folder:{images}",
        "DATALOADER.NUM_WORKERS": 0,
        "SOLVER.IMS_PER_BATCH": BATCH,
        "SOLVER.OPTIMIZER": "lars" if cfg.SOLVER.OPTIMIZER == "lars" else "sgd",
        "SOLVER.BASE_LR": 0.1 if cfg.SOLVER.OPTIMIZER == "lars" else 0.05,
        "SOLVER.REFERENCE_BATCH": 0,
        "SOLVER.WARMUP_EPOCHS": 0.0,
        "SOLVER.EPOCHS": 100,  # of one step each
        "SOLVER.MAX_STEPS": _steps(path),
        "SOLVER.LOG_PERIOD": 1,
        "SOLVER.CHECKPOINT_PERIOD": 100,
        "PROBE.KNN_PERIOD": 0,
        "PROBE.RESIZE": 0,
        "DEVICE": "cpu",
        "OUTPUT_DIR": output,
    }
    if METHODS[cfg.METHOD.NAME].kind == "queue":
        small["MODEL.QUEUE_SIZE"] = BATCH  # filled after one step: the loss against random vectors is low, then rises
    return [str(word) for pair in small.items() for word in pair]


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.stem in ORDINARY else pytest.mark.slow, id=p.stem) for p in LEAVES]
)
def test_a_recipe_learns(path, images, tmp_path):
    """The loss falls below that of a run whose learning rate is 0; the same views affect the loss of both runs."""
    learnt, idle = (_losses(path, images, tmp_path / name, rate) for name, rate in (("learns", []), ("idle", IDLE)))
    assert statistics.mean(learnt[-WINDOW:]) < statistics.mean(learnt[:WINDOW]), learnt
    assert statistics.mean(learnt[-WINDOW:]) < 0.99 * statistics.mean(idle[-WINDOW:]), (learnt, idle)


def _losses(path: Path, images: Path, output: Path, more: list[str]) -> list[float]:
    results = main(load_config(path, [*_smoke(path, images, output), *more]))
    losses = [line["loss"] for line in lines(output, "loss")]
    assert results["steps"] == len(losses) == _steps(path)
    # In the first step, the queue holds random vectors.
    return losses[1:] if METHODS[results["method"]].kind == "queue" else losses
