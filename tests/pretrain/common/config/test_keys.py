"""What may differ between two configs follows from each key's effect; other projects' names lead to the right key."""

import pytest

from pretrain.common.config.keys import SAME_RESULT, Effect, Key, compare, index_keys, suggest_key
from pretrain.config import default_config, load_config
from pretrain.keys import list_keys
from tests.errors import refused
from transfer.config import load_config as load_detector_config
from transfer.keys import KEYS as DETECTOR_KEYS

ROWS = index_keys(Key(f"A.{effect.upper()}", 1, None, "", effect) for effect in Effect)
PRETRAINING = list_keys()


@pytest.mark.parametrize("effect", Effect)
def test_a_change_is_named_unless_its_effect_is_allowed(effect: Effect) -> None:
    changed = {f"A.{effect.upper()}": 2}
    assert list(map(str, compare(ROWS, {}, changed))) == [f"A.{effect.upper()} 1 -> 2"]  # 1 is the default
    assert list(map(str, compare(ROWS, changed, {}, set(Effect) - {effect}))) == [f"A.{effect.upper()} 2 -> 1"]
    assert compare(ROWS, changed, {}, {effect}) == []


def test_values_that_only_look_different_are_equal() -> None:
    assert compare(ROWS, {"A.RESULT": 1, "size": (1, (2, 3))}, {"A.RESULT": 1.0, "size": [1, [2, 3]]}) == []
    assert [str(change) for change in compare(ROWS, {"size": 1}, {})] == ["size 1 -> None"]


def test_a_resumed_run_compares_the_images_and_not_their_path() -> None:
    moved = {"DATA.TRAIN": "folder:/moved"}
    assert len(compare(PRETRAINING, {}, moved)) == 1 and not compare(PRETRAINING, {}, moved, is_resumed=True)
    started = {"SEED": 7, "MODEL.WEIGHTS": "moved.pth"}
    assert len(compare(DETECTOR_KEYS, {}, started)) == 2 and not compare(DETECTOR_KEYS, {}, started, is_resumed=True)


def test_places_and_speed_change_no_result() -> None:
    free = {row.name for keys in (PRETRAINING, DETECTOR_KEYS) for row in keys.values() if row.effect in SAME_RESULT}
    assert {"OUTPUT_DIR", "DEVICE", "DATALOADER.NUM_WORKERS", "SOLVER.COMPILE", "TEST.BEST"} <= free
    assert free.isdisjoint({"SEED", "MODEL.WEIGHTS", "DATASETS.TEST", "SOLVER.ACCUMULATE", "FLOAT32_PRECISION"})


def test_a_name_that_is_declared_twice_is_refused() -> None:
    row = ROWS["A.RESULT"]
    assert index_keys([row, row]) == {"A.RESULT": row}
    refused(lambda: index_keys([row, Key("A.RESULT", 2, None, "", Effect.RESULT)]), "A.RESULT", "twice")


ALIASES = {  # what a user of another project writes -> the key of pretraining, the key of fine-tuning
    "SOLVER.BATCH_SIZE": ("SOLVER.IMS_PER_BATCH", "SOLVER.IMS_PER_BATCH"),
    "batch_size": ("SOLVER.IMS_PER_BATCH", "SOLVER.IMS_PER_BATCH"),
    "batch-size": ("SOLVER.IMS_PER_BATCH", "SOLVER.IMS_PER_BATCH"),
    "solver.batchSize": ("SOLVER.IMS_PER_BATCH", "SOLVER.IMS_PER_BATCH"),
    "TRAIN.BATCH_SIZE": ("SOLVER.IMS_PER_BATCH", "SOLVER.IMS_PER_BATCH"),
    "LEARNING_RATE": ("SOLVER.BASE_LR", "SOLVER.BASE_LR"),
    "lr": ("SOLVER.BASE_LR", "SOLVER.BASE_LR"),
    "SOLVER.LR": ("SOLVER.BASE_LR", "SOLVER.BASE_LR"),
    "OPTIMIZER.WD": ("SOLVER.WEIGHT_DECAY", "SOLVER.WEIGHT_DECAY"),
    "NUM_EPOCHS": ("SOLVER.EPOCHS", "SOLVER.MAX_ITER"),
    "epochs": ("SOLVER.EPOCHS", "SOLVER.MAX_ITER"),
    "max_epochs": ("SOLVER.EPOCHS", "SOLVER.MAX_ITER"),
    "workers": ("DATALOADER.NUM_WORKERS", "DATALOADER.NUM_WORKERS"),
    "num_workers": ("DATALOADER.NUM_WORKERS", "DATALOADER.NUM_WORKERS"),
    "MAX_ITER": ("SOLVER.MAX_STEPS", "SOLVER.MAX_ITER"),
    "milestones": ("SOLVER.STEPS", "SOLVER.STEPS"),
    "temperature": ("METHOD.TEMPERATURE", ""),
    "moco_k": ("MODEL.QUEUE_SIZE", ""),
    "moco-t": ("METHOD.TEMPERATURE", ""),
    "arch": ("MODEL.ARCH", "MODEL.RESNETS.DEPTH"),
    "output": ("OUTPUT_DIR", "OUTPUT_DIR"),
    "LINEAR.LR": ("LINEAR.BASE_LR", ""),
    "LINEAR.BATCH_SIZE": ("LINEAR.IMS_PER_BATCH", ""),
    "bs": ("SOLVER.IMS_PER_BATCH", "SOLVER.IMS_PER_BATCH"),
    "SOLVER.EPOCH": ("SOLVER.EPOCHS", "SOLVER.MAX_ITER"),
    "fp16": ("SOLVER.AMP", "SOLVER.AMP.ENABLED"),
    "imgsz": ("VIEWS.IMAGE_SIZE", "INPUT.MIN_SIZE_TRAIN"),
    "method": ("METHOD.NAME", ""),
    "num_gpus": ("--gpus", "--gpus"),
    "SOLVER.WORLD_SIZE": ("--gpus", "--gpus"),
}


@pytest.mark.parametrize("name", ALIASES)
def test_the_names_of_other_projects_lead_to_the_right_key(name: str) -> None:
    for load, expected in zip((load_config, load_detector_config), ALIASES[name], strict=True):
        if expected:
            text = refused(lambda load=load: load(None, [name, "1"]), f"unknown config key {name}", expected)
            assert text.index(expected) < text.index("?") if "?" in text else True


def test_a_typing_error_names_the_nearest_key() -> None:
    assert suggest_key("SOLVER.BASE_LRR", PRETRAINING) == "; did you mean 'SOLVER.BASE_LR'?"
    assert suggest_key("LINEAR.EPOCHS_", PRETRAINING).startswith("; did you mean 'LINEAR.EPOCHS' (passes over")
    assert suggest_key("qqq", PRETRAINING) == ""


def test_what_holds_for_a_key_of_solver_holds_for_its_twin() -> None:
    """The learning rate of a shortened probe would otherwise never fall."""
    leaves = [row.leaf for row in PRETRAINING.values() if row.stage == "linear" and f"SOLVER.{row.leaf}" in PRETRAINING]
    assert set(leaves) > {"BASE_LR", "EPOCHS", "STEPS", "IMS_PER_BATCH", "MOMENTUM", "WEIGHT_DECAY"}
    for leaf in leaves:
        probe, solver = (PRETRAINING[f"{section}.{leaf}"] for section in ("LINEAR", "SOLVER"))
        assert (probe.limits, probe.readers, probe.aliases) == (solver.limits, solver.readers, solver.aliases)
    bad = ("EPOCHS 4 LR_SCHEDULE step", "STEPS [4] EPOCHS 4 LR_SCHEDULE step", "STEPS [9] LR_SCHEDULE cosine")
    for section in ("SOLVER", "LINEAR"):
        for words in bad:
            keys = [f"{section}.{word}" if word.isupper() and word[0].isalpha() else word for word in words.split()]
            refused(lambda keys=keys: load_config(None, keys), f"{section}.STEPS")
    good = load_config(None, ["LINEAR.EPOCHS", "4", "LINEAR.LR_SCHEDULE", "cosine"])
    assert good.LINEAR.STEPS == default_config().LINEAR.STEPS
