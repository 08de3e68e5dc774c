"""Recipes take two steps in a smoke form: a small network on tiny images, on the same code path.

Half of them do; the others choose no method, augmentation, optimizer, schedule, ... that these do not run.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.config.yaml_io import flatten
from pretrain.config import load_config
from pretrain.methods import METHODS
from pretrain.train import main
from tests.pretrain.images import write_folder
from tests.pretrain.runs import lines
from tools.stages import recipes

pytestmark = pytest.mark.usefixtures("tiny_resnet18")
ROOT = Path(__file__).parents[2] / "configs"
FILES = [*sorted(ROOT.glob("pretrain/*.yaml")), ROOT / "examples/own_images_R50.yaml"]
RECIPES: dict[str, tuple[Path, list[str]]] = {path.stem: (path, []) for path in FILES}
OVERRIDES = {name: recipes.find_recipe_overrides(name) for name in METHODS}
RECIPES |= {name: (recipes.find_recipe(name), overrides) for name, overrides in OVERRIDES.items() if overrides}
RUN = (
    "densecl_R50_IN1k_200ep",
    "jcl_R18_IN100_100ep",
    "mocov1_R50_IN1k_200ep",
    "multikey",
    "own_images_R50",
    "ressl",
    "sce_R18_cifar100_200ep",
    "simclr_R50_IN1k_200ep",
    "supcon",
    "tcl_R18_cifar100_1000ep",
    "tcl_supervised_R50_IN100_100ep",
    "tcl_supervised_R50_fashion_mnist_100ep",
)
SET_BY_SMOKE = ("MODEL.ARCH", "MODEL.WEIGHTS")
BATCH = 8


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    names = [f"train/class{i % 2}/{i:02d}.png" for i in range(BATCH)]
    return write_folder(tmp_path_factory.mktemp("images"), names, height=32, width=32)


@pytest.mark.parametrize("name", RUN)
def test_a_recipe_runs(name, images, tmp_path):
    """The smoke form keeps the objective and its hyperparameters."""
    path, overrides = RECIPES[name]
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


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - set(RUN)))
def test_another_recipe_chooses_only_what_those_run(name):
    run = {choice for recipe in RUN for choice in choices(recipe)}
    assert choices(name) - run == set()


def test_every_method_has_a_recipe():
    assert {load_config(*recipe).METHOD.NAME for recipe in RECIPES.values()} == set(METHODS)


@functools.cache
def choices(name: str) -> set[tuple[str, Any]]:
    """Return what decides which code a recipe's steps run: names, switches, and which numbers are 0, 1 or others."""
    found = set()
    for key, value in flatten(load_config(*RECIPES[name])):
        if key.startswith(("METHOD.", "MODEL.", "SOLVER.", "VIEWS.")) and key not in SET_BY_SMOKE:
            if isinstance(value, list):
                value = f"list of {len(value)}"
            elif not isinstance(value, str | bool) and value not in (0, 1):
                value = "number"
            found.add((key, value))
    return found
