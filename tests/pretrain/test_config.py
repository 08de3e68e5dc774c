"""Every recipe loads; every key is read by someone; values that cannot work are refused in one line."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.config_io import flatten
from pretrain.common.errors import UserError
from pretrain.common.limits import Range
from pretrain.config import _keys, default_config, described_keys, from_yaml_text, load_config
from pretrain.data.recipes import RECIPES
from pretrain.methods import METHODS
from pretrain.methods.method import Hyperparameter
from pretrain.probe.features import evaluation_size

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "configs/pretrain").glob("*.yaml")),
    *sorted((ROOT / "configs/linear").glob("*.yaml")),
    *(ROOT / "configs/examples" / f"{name}.yaml" for name in ("demo_mocov2_R18_digits", "own_images_R18")),
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_recipe_loads_and_says_how_to_run_it(path):
    cfg = load_config(path)
    assert cfg.VIEWS.QUERY in RECIPES and cfg.VIEWS.KEY in RECIPES
    header = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    if path.name.startswith("Base-"):
        assert "Not run by itself" in header
    else:
        assert "python tools/launch.py" in header
        named = re.search(rf"configs/{path.parent.name}/\S+\.yaml", header)
        assert named is None or named.group() == str(path.relative_to(ROOT))


def test_every_key_is_read_by_someone():
    code = "".join(p.read_text() for p in (ROOT / "pretrain").rglob("*.py") if p.name != "config.py")
    unread = [key for key, _ in flatten(default_config()) if not re.search(rf"\b{key.split('.')[-1]}\b", code)]
    assert unread == []


def test_every_key_says_what_it_means_and_which_methods_read_it():
    described = {key.name: key for key in described_keys()}
    assert set(described) == {key for key, _ in flatten(default_config())}
    assert [name for name, key in described.items() if not (key.meaning and key.limits)] == []
    assert described["METHOD.K1"] == ("METHOD.K1", 1.0, "at least 0", "weight of the positives' term (tcl)")


def test_jcl_is_the_papers():
    cfg = load_config(ROOT / "configs/pretrain/jcl_R50_IN1k_200ep.yaml")
    got = (cfg.METHOD.NUM_KEYS, cfg.METHOD.TEMPERATURE, cfg.METHOD.JCL_LAMBDA, cfg.MODEL.EMBEDDING_DIM,
           cfg.MODEL.HEAD_HIDDEN_DIMS, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR, cfg.SOLVER.MOMENTUM,
           cfg.SOLVER.WEIGHT_DECAY, cfg.MODEL.EMA_MOMENTUM, cfg.MODEL.QUEUE_SIZE, cfg.SOLVER.LR_SCHEDULE)  # fmt: skip
    assert got == (5, 0.2, 4.0, 128, [2048], 512, 0.06, 0.9, 1e-4, 0.999, 65536, "cosine")


def test_the_protocols_of_tcl_and_sce_are_the_papers():
    """Crop and augmentation of the linear layers, and the rule of SCE's learning rate (Sec. D, E; TCL Sec. 2.1)."""
    found = {}
    for name in ("tcl_supervised_R50_IN100_100ep", "tcl_supervised_R50_cifar100_100ep", "sce_R18_cifar10_200ep",
                 "sce_R18_stl10_200ep", "tcl_R18_cifar10_1000ep"):  # fmt: skip
        cfg = load_config(ROOT / f"configs/pretrain/{name}.yaml")
        found[name] = (evaluation_size(cfg), cfg.LINEAR.AUGMENT, cfg.LINEAR.BASE_LR, cfg.SOLVER.REFERENCE_BATCH)
    assert list(found.values()) == [
        ((224, 0), "autoaugment", 0.5, 0), ((32, 0), "autoaugment_cifar", 0.5, 0), ((32, 0), "pad_flip", 30.0, 256),
        ((96, 0), "flip", 30.0, 256), ((32, 0), "pad_flip", 1.0, 0),
    ]  # fmt: skip


def test_overrides_come_last_and_the_text_round_trips():
    cfg = load_config(ROOT / "configs/pretrain/jcl_R50_IN1k_200ep.yaml", ["SOLVER.BASE_LR", "0.5", "SEED=3"])
    assert cfg.SOLVER.BASE_LR == 0.5 and cfg.SEED == 3
    assert from_yaml_text(cfg.dump()) == cfg


@pytest.mark.parametrize(
    "words, says",
    [
        (["SOLVER.BASE_LR"], "has no value"),
        (["SOLVER.BASE_LR", "fast"], "SOLVER.BASE_LR must be a number, not 'fast'"),
        (["SOLVER", "3"], "SOLVER is a section"),
        (["METHOD.NAME", "mocov2", "METHOD.NUM_KEYS", "5"], "set it to 1, or choose multikey or jcl"),
        (["MODEL.STEM", "cfar"], "choose one of imagenet, cifar"),
        (["MODEL.EMA_MOMENTUM", "1.5"], "at most 1"),
        (["VIEWS.QUERY", "moco_v3"], "moco_v2"),
        (["METHOD.NAME", "sce", "METHOD.SCE_LAMBDA", "4.0"], "at most 1"),
        (["SOLVER.LR_SCHEDULE", "step", "SOLVER.EPOCHS", "100"], "SOLVER.STEPS is [120, 160]; each must be below"),
        (["SOLVER.WARMUP_EPOCHS", "10", "SOLVER.EPOCHS", "5"], "it must be at most SOLVER.EPOCHS 5"),
        (["SOLVER.LARS_TRUST", "0.02"], "which SOLVER.OPTIMIZER sgd does not read; set it to 0.001, or choose lars"),
        (["SOLVER.STEPS", "[9]"], "which SOLVER.LR_SCHEDULE cosine does not read"),
        (["METHOD.NAME", "sce", "METHOD.LAMBDA_SCHEDULE", "linear"], "is linear, which METHOD.NAME sce does not read"),
        (["METHOD.NAME", "sce", "METHOD.JCL_LAMBDA", "4.0"], "set it to 1.0, or choose jcl"),
        (["METHOD.NAME", "simclr", "METHOD.LABELS", "class"], "or choose tcl or supcon"),
        (
            ["METHOD.NAME", "simclr", "MODEL.QUEUE_SIZE", "256"],
            "which METHOD.NAME simclr does not read",
        ),
        (
            ["METHOD.NAME", "tcl", "MODEL.EMA_SCHEDULE", "cosine"],
            "does not read; set it to constant",
        ),
        (["SEED", str(2**32)], "and at most 4294967295"),
        (["SEED", "1" + "0" * 30], "SEED has more than 64 bits"),
        (["MODEL.QUEUE_SIZE", "0"], "MODEL.QUEUE_SIZE is 0; it must be at least 1"),
        (["METHOD.TEMPERATURE", "0.0"], "METHOD.TEMPERATURE is 0.0; it must be above 0"),
        (["METHOD.TEMPERATURE", "1e999"], "METHOD.TEMPERATURE is inf; it must be above 0"),
        (["MODEL.HEAD_HIDDEN_DIMS", "[16, 0]"], "HEAD_HIDDEN_DIMS is [16, 0]; every width must be at least 1"),
        (["METHOD.NAME", "jlc"], "did you mean 'jcl'"),
        (["PROBE.RESIZE", "15"], "PROBE.RESIZE is 15, below the crop of 224 pixels"),
        (["LINEAR.GAMMA", "-0.1"], "LINEAR.GAMMA is -0.1"),
        (["SOLVER.STEPS", "['a', 'b']"], "SOLVER.STEPS is ['a', 'b']; it must be a list of epochs"),
        (["LINEAR.STEPS", "[-1]"], "LINEAR.STEPS is [-1]; it must be a list of epochs, numbers of at least 0"),
        (["VIEWS.MEAN", "[0.5, 0.5]"], "VIEWS.MEAN is [0.5, 0.5]; it must be 3 numbers from 0 to 1"),
        (["VIEWS.STD", "[0.2, 0.2, 0.0]"], "VIEWS.STD is [0.2, 0.2, 0.0]; it must be 3 numbers from 0.001 to 1"),
        (["VIEWS.MEAN", "[124, 116, 104]"], "one per RGB channel"),
        (["PROBE.CROP", "none", "PROBE.RESIZE", "256"], "PROBE.RESIZE is 256, but PROBE.CROP none"),
        (["LINEAR.LRS", "[1e999]"], "LINEAR.LRS is [inf]; it must be a list of learning rates"),
    ],
)
def test_bad_overrides(words, says):
    with pytest.raises(UserError) as caught:
        load_config(None, words)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_every_number_has_a_range():
    numbers = {key for key, value in flatten(default_config()) if type(value) in (int, float)}
    assert numbers == {key for key, (_, limits, _) in _keys().items() if isinstance(limits, Range)}


def test_a_kept_config_of_another_version_is_one_line():
    for text, says in (
        ("SOLVER:\n  FORGOTTEN: 1\n", "Non-existent config key: SOLVER.FORGOTTEN"),
        ("SOLVER: 3\n", "SOLVER"),
        ("SOLVER: [\n", "while parsing"),
        ("- 1\n", "cannot be read by this version"),
    ):
        with pytest.raises(UserError, match="a saved config cannot be read by this version") as caught:
            from_yaml_text(text)
        assert says in str(caught.value) and "\n" not in str(caught.value), text


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match=r"did you mean 'jcl_R50_IN1k_200ep\.yaml'"):
        load_config(ROOT / "configs/pretrain/jcl_R50_IN1k_200e.yaml")
    for name, text, says in (
        ("a.yaml", "SOLVER:\n  BASE_LRR: 1\n", "did you mean 'SOLVER.BASE_LR'"),
        ("b.yaml", "SOLVER: [1\n", "not a YAML"),
        ("c.yaml", "_BASE_: nowhere.yaml\n", "nowhere.yaml"),
        ("d.yaml", "SOLVER: 3\n", "SOLVER"),
        ("e.yaml", "- 1\n", "e.yaml"),
        ("f.yaml", "SOLVER:\n  GAMMA: .nan\n", "SOLVER.GAMMA is nan; it must be at least 0"),
        ("g.yaml", "LINEAR:\n  LRS: [.nan, abc]\n", "LINEAR.LRS is [nan, 'abc']; it must be a list of learning rates"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError) as caught:
            load_config(tmp_path / name)
        assert says in str(caught.value) and "\n" not in str(caught.value), name


@pytest.mark.parametrize("allowed", [(0, 1), Range("0", "1")], ids=["tuple", "text"])  # type: ignore[arg-type]
def test_a_hyperparameter_that_allows_nonsense_is_one_line(allowed: Any, monkeypatch: pytest.MonkeyPatch):
    wrong = Hyperparameter("METHOD.MINE", 0.5, allowed, "of a user's own method")
    method = dataclasses.replace(METHODS["mocov2"], hyper={**METHODS["mocov2"].hyper, "mine": wrong})
    monkeypatch.setitem(METHODS, "mine", method)
    _keys.cache_clear()
    try:
        with pytest.raises(
            UserError, match=r"method 'mine': the allowed values of METHOD\.MINE are .*; use a Range of n"
        ):
            load_config()
    finally:
        _keys.cache_clear()
