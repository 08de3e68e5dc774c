"""Every recipe takes two steps in a smoke form: a small network on tiny images, on the same code path."""

from pathlib import Path
from typing import Any

import pytest

from pretrain.config import load_config
from pretrain.methods import METHODS
from pretrain.train import main
from tests.pretrain.images import write_folder
from tests.pretrain.runs import lines
from tools.launcher import stages

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
ROOT = Path(__file__).parents[2] / "configs"
FILES = [*sorted(ROOT.glob("pretrain/*.yaml")), ROOT / "examples/own_images_R50.yaml"]
RECIPES: list[Any] = [pytest.param(path, [], id=path.stem) for path in FILES]
RECIPES += [
    pytest.param(stages.find_recipe(name), overrides, id=name)
    for name in METHODS
    if (overrides := stages.find_recipe_overrides(name))
]
BATCH = 8


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    names = [f"train/class{i % 2}/{i:02d}.png" for i in range(BATCH)]
    return write_folder(tmp_path_factory.mktemp("images"), names, height=32, width=32)


@pytest.mark.parametrize(("path", "overrides"), RECIPES)
def test_a_recipe_runs(path, overrides, images, tmp_path):
    """The smoke form keeps the objective and its hyperparameters."""
    cfg = load_config(path, overrides)
    words = (
        "MODEL.ARCH resnet18 MODEL.EMBEDDING_DIM 16 DATALOADER.NUM_WORKERS 0 SOLVER.MAX_STEPS 2 SOLVER.LOG_PERIOD 1 "
        f"PROBE.KNN_PERIOD 0 PROBE.RESIZE 0 DEVICE cpu SOLVER.IMS_PER_BATCH {BATCH} "
        f"MODEL.BN_GROUPS {min(cfg.MODEL.BN_GROUPS, 2)} VIEWS.IMAGE_SIZE {16 if cfg.MODEL.STEM == 'cifar' else 32}"
    )
    if METHODS[cfg.METHOD.NAME].kind == "queue":
        words += f" MODEL.QUEUE_SIZE {BATCH}"
    paths = ["DATA.TRAIN", f"folder:{images}", "DATA.PROBE_TRAIN", "", "DATA.VAL", "", "MODEL.WEIGHTS", ""]
    paths += ["OUTPUT_DIR", str(tmp_path / "run")]
    head = ["MODEL.HEAD_HIDDEN_DIMS", str([32] * len(cfg.MODEL.HEAD_HIDDEN_DIMS))]
    results = main(load_config(path, [*overrides, *words.split(), *paths, *head]))
    assert len(lines(tmp_path / "run", "loss")) == results["steps"] == 2


def test_every_objective_has_a_recipe():
    assert {load_config(*recipe.values).METHOD.NAME for recipe in RECIPES} == set(METHODS)
