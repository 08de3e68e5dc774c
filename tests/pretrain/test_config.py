"""Every key is described; values that cannot work are refused in one line."""

import functools
from pathlib import Path

import pytest

from pretrain.common.config.limits import Range
from pretrain.common.config.yaml_io import flatten
from pretrain.config import default_config, from_yaml_text, load_config, load_recipe
from pretrain.keys import describe_keys, list_keys
from tests.errors import refused

ROOT = Path(__file__).parents[2]


def test_every_recipe_of_a_linear_probe_loads():
    """Recipes of pretraining run in test_recipes.py."""
    files = sorted((ROOT / "configs/linear").glob("*.yaml"))
    assert [load_config(path).METHOD.NAME for path in files]


def test_every_key_says_what_it_means_and_which_methods_read_it():
    described = {key.name: key for key in describe_keys()}
    assert set(described) == {key for key, _ in flatten(default_config())}
    assert [name for name, key in described.items() if not (key.meaning and key.describe_values())] == []
    assert [name for name, key in described.items() if "default:" in key.meaning] == []  # help shows it, too
    assert described["METHOD.K1"].describe_values() == "at least 0"
    assert described["METHOD.K1"].meaning == "weight of the positives' term (tcl)"
    numbers = {key for key, value in flatten(default_config()) if type(value) in (int, float, list)}
    assert numbers == {key for key, row in list_keys().items() if isinstance(row.limits, Range)}


def test_overrides_come_last_and_the_text_round_trips():
    cfg = load_config(ROOT / "configs/pretrain/jcl_R50_IN1k_200ep.yaml", ["SOLVER.BASE_LR", "0.5", "SEED", "3"])
    assert cfg.SOLVER.BASE_LR == 0.5 and cfg.SEED == 3
    assert from_yaml_text(cfg.dump()) == cfg


def test_the_recipe_names_the_run_folder_and_an_earlier_default_folder_is_continued_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "configs/pretrain/jcl_R18_IN100_100ep.yaml"
    assert load_recipe(recipe).OUTPUT_DIR == "runs/jcl_R18_IN100_100ep"
    assert load_recipe(recipe, ["OUTPUT_DIR", "here"]).OUTPUT_DIR == "here"
    assert load_recipe(None, ["METHOD.NAME", "jcl", "MODEL.ARCH", "resnet18"]).OUTPUT_DIR == "runs/jcl_resnet18"
    earlier = Path("runs/jcl_resnet18")
    earlier.mkdir(parents=True)
    (earlier / "config.yaml").write_text(load_config(recipe).dump())
    load_recipe(recipe)  # no checkpoint yet
    (earlier / "checkpoint_00000004.pth").touch()
    refused(lambda: load_recipe(recipe), f"{earlier} contains this run", "OUTPUT_DIR runs/jcl_R18_IN100_100ep")
    refused(lambda: load_recipe(recipe, ["SOLVER.MAX_STEPS", "9"]), f"OUTPUT_DIR {earlier};")
    assert load_recipe(recipe, ["SEED", "3"]).OUTPUT_DIR == "runs/jcl_R18_IN100_100ep"  # another run
    assert load_recipe(recipe, ["OUTPUT_DIR", "runs/jcl_resnet18"]).OUTPUT_DIR == "runs/jcl_resnet18"
    (earlier / "config.yaml").write_text("NO_KEY: 1")
    assert load_recipe(recipe).OUTPUT_DIR == "runs/jcl_R18_IN100_100ep"


BAD_VALUES = (
    "SOLVER.BASE_LR fast; SOLVER 3; SOLVER.BASE_LRR 1; METHOD.NAME jlc; MODEL.STEM cfar; VIEWS.QUERY moco_v3; "
    "MODEL.EMA_MOMENTUM 1.5; MODEL.QUEUE_SIZE 0; METHOD.TEMPERATURE 0.0; SEED 4294967296; LINEAR.GAMMA -0.1; "
    "METHOD.NAME sce METHOD.SCE_LAMBDA 4.0; METHOD.NAME mocov2 METHOD.NUM_KEYS 5; "
    "METHOD.NAME sce METHOD.JCL_LAMBDA 4.0; METHOD.NAME simclr METHOD.LABELS class; "
    "METHOD.NAME simclr MODEL.QUEUE_SIZE 256; METHOD.NAME simclr METHOD.DENSE_WEIGHT 0.5; "
    "METHOD.DENSE_WARMUP_STEPS 5; METHOD.NAME tcl MODEL.EMA_SCHEDULE cosine; "
    "METHOD.NAME sce METHOD.LAMBDA_SCHEDULE linear; SOLVER.LARS_TRUST 0.02; SOLVER.STEPS [9]; "
    "SOLVER.EPOCHS 5 SOLVER.WARMUP_EPOCHS 10; SOLVER.EPOCHS 100 SOLVER.LR_SCHEDULE step; PROBE.RESIZE 15; "
    "PROBE.CROP none PROBE.RESIZE 256; MODEL.HEAD_HIDDEN_DIMS [16,0]; VIEWS.MEAN [0.5,0.5]; "
    "MODEL.HEAD_HIDDEN_DIMS [2.5]; METHOD.NAME simclr SOLVER.IMS_PER_BATCH 1; SOLVER.AMP fp8; "
    "VIEWS.STD [0.2,0.2,0.0]; LINEAR.LRS [1e999]; LINEAR.STEPS [-1]"
)


@pytest.mark.parametrize("words", BAD_VALUES.split("; "))
def test_values_that_cannot_work_are_refused_with_the_key(words: str):
    key = words.split()[-2].replace("LR_SCHEDULE", "STEPS" if "step" in words else "LR_SCHEDULE")
    refused(lambda: load_config(None, words.split()), key.removesuffix("R") if key.endswith("LRR") else key)


def test_keys_that_are_not_read_are_named_together_with_the_files_that_set_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/queue.yaml").write_text("MODEL: {QUEUE_SIZE: 256, EMA_MOMENTUM: 0.99}\nSEED: 3\n")
    (tmp_path / "jcl.yaml").write_text("_BASE_: parts/queue.yaml\nMETHOD: {NAME: jcl, NUM_KEYS: 5}\n")
    simclr = ["METHOD.NAME", "simclr"]
    defaults = ["METHOD.NUM_KEYS", "1", "MODEL.QUEUE_SIZE", "65536", "MODEL.EMA_MOMENTUM", "0.999"]
    text = refused(lambda: load_config("jcl.yaml", simclr))
    assert text == (
        "METHOD.NAME simclr does not read METHOD.NUM_KEYS 5 in jcl.yaml, "
        "MODEL.QUEUE_SIZE 256 and MODEL.EMA_MOMENTUM 0.99 in parts/queue.yaml; "
        f"choose another recipe, or add {' '.join(defaults)} (default), or set METHOD.NAME multikey or jcl"
    )
    assert load_config("jcl.yaml", [*simclr, *defaults]).SEED == 3  # the remedy works
    overridden = refused(lambda: load_config("jcl.yaml", [*simclr, "MODEL.QUEUE_SIZE", "512"]))
    assert overridden.startswith("METHOD.NAME simclr does not read MODEL.QUEUE_SIZE 512; omit it, or set METHOD.NAME m")


def test_a_value_out_of_range_is_named_with_the_file_that_sets_it(tmp_path: Path):
    base = tmp_path / "base.yaml"
    base.write_text("SOLVER: {EPOCHS: 0, BASE_LR: 1.0}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("_BASE_: base.yaml\nSOLVER: {BASE_LR: -1.0}\n")
    refused(lambda: load_config(recipe, ["SOLVER.EPOCHS", "3"]), f"SOLVER.BASE_LR in {recipe} is -1.0")
    refused(lambda: load_config(recipe, ["SOLVER.BASE_LR", "1.0"]), f"SOLVER.EPOCHS in {base} is 0; it must be at")
    refused(lambda: load_config(recipe, ["SOLVER.EPOCHS", "3", "SOLVER.BASE_LR", "-2"]), "SOLVER.BASE_LR is -2.0")


def test_values_follow_from_a_named_data_set_unless_they_are_set(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("DATA: {TRAIN: cifar10}\nMODEL: {STEM: imagenet}\n")
    cfg = load_config(tmp_path / "base.yaml", ["DATA.TRAIN", "cifar100"])
    assert cfg.VIEWS.MEAN == [0.5071, 0.4865, 0.4409]
    assert cfg.VIEWS.IMAGE_SIZE == 32
    assert cfg.MODEL.STEM == "imagenet"
    assert from_yaml_text(cfg.dump()) == cfg
    for several in ("['cifar100']", " cifar100 ", "['cifar100', 'folder:/photos']"):
        cfg = load_config(None, ["DATA.TRAIN", several])
        assert (cfg.MODEL.STEM == "imagenet") == ("photos" in several)
    defaults = default_config().VIEWS
    assert defaults == load_config(tmp_path / "base.yaml", ["DATA.TRAIN", "folder:/photos"]).VIEWS


@pytest.mark.parametrize("key", ["DATA.TRAIN", "DATA.PROBE_TRAIN", "DATA.VAL"])
def test_a_run_folder_in_the_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str):
    """The run's figures would become training images, and it could not be resumed."""
    photos = tmp_path / "photos"
    photos.mkdir()
    (tmp_path / "link").symlink_to(photos)
    monkeypatch.chdir(photos)
    for output in (f"{photos}/runs/a", f"{tmp_path}/link/run", ".", ""):
        words = [key, f"folder:{photos}", "OUTPUT_DIR", output]
        refused(functools.partial(load_config, None, words), "OUTPUT_DIR", photos)
    monkeypatch.setenv("PHOTOS", str(photos))
    refused(lambda: load_config(None, [key, "folder: $PHOTOS", "OUTPUT_DIR", f"{photos}/run"]), "OUTPUT_DIR", photos)
    load_config(None, [key, f"folder:{photos}/a", "OUTPUT_DIR", f"{photos}/ab"])


def test_a_config_of_an_own_module_that_is_not_imported_names_it():
    text = "IMPORTED: my_loss.py@12345678\nMETHOD:\n  OWN: 1.0\n"
    remedy = "add --import with the path of my_loss.py, with which it was written"
    refused(lambda: from_yaml_text(text), "METHOD.OWN", remedy)
    # The configs of a pipeline's other branches have the key, too.
    refused(lambda: from_yaml_text("METHOD:\n  OWN: 1.0\n"), "METHOD.OWN", "the --import with which it was written")
