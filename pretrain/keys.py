"""Every key of pretraining and probing as one row; the values of recipes are in configs/."""

from dataclasses import replace
from typing import Any

from .common.config import extensions
from .common.config.keys import Effect, Key, index_keys
from .common.config.limits import ABOVE_0, AT_LEAST_0, FLOAT32_PRECISION, FRACTION, Choice, Range
from .data.augmentations import AUGMENTATIONS, Augmentation
from .methods import METHODS, Method

# Means and standard deviations are of the training images (CIFAR's as in the released code of SCE and TCL).
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
_REMEDY = ", or --import the module that registers another"
_METHODS = Choice(METHODS, _REMEDY)
_AUGMENTATIONS = Choice(AUGMENTATIONS, _REMEDY)
_COUNT = Range(high=1 << 30)
_AT_LEAST_1 = Range(1, 1 << 30)
_WIDTHS = Range(1, 1 << 30, whole=True)
_ARCHS = Choice(("resnet18", "resnet34", "resnet50", "resnet101"))
_OPTIMIZERS = Choice(("sgd", "adamw", "lars"))
_PRECISIONS = Choice(("none", "bf16", "fp16"))
_STEMS = Choice(("imagenet", "cifar"))
_SCHEDULES = Choice(("cosine", "step"))
_ENCODERS = Choice(("query", "key"))
_CROPS = Choice(("auto", "center", "none"))
_UPDATES = Choice(("before_keys", "after_step"))
_ON_CORRUPT = Choice(("error", "skip"))
_OUTPUT_MEANING = "the run folder; empty: runs/<recipe>; for a probe, RUN/<probe>"
_IMPORTED_MEANING = "digest of your modules, if METHOD.NAME or a view comes from them; set automatically"
_SCHEDULE_MEANING = "cosine: falls to 0; step: falls at STEPS"
_STEPS_MEANING = "step: epochs at which the learning rate falls"
_AUGMENT_MEANING = "augmentation; none: evaluation views, each computed once"
_CHANGE_MEANING = "let a resumed run change AMP, BASE_LR, WARMUP_EPOCHS or your modules"
_BN_GROUPS_MEANING = """parts of the global batch with their own BN statistics; 1 is SyncBN over all; 0 means one per
process and micro-batch, or up to 8 for a single process with keys"""
_TRAIN_MEANING = """a named data set (its train split), folder:/path or tar:/path/*.tar, or a list of several,
"['folder:/a', 'folder:/b']"; MODEL.STEM, VIEWS.IMAGE_SIZE, MEAN and STD follow from a named data set unless they are
set"""
_REDUCED_MEANING = """decode large JPEGs of training at 1/2, 1/4 or 1/8 of their size, where every crop still has
VIEWS.IMAGE_SIZE pixels per side: faster, with slightly different pixels"""
_ACCUMULATE_MEANING = """number of micro-batches per process, to save memory; loss and gradients stay the same up
to rounding if the BN groups do"""
_AMP_MEANING = """half precision, on GPUs in channels_last layout: bf16 on A100, H100 and later; fp16, with a gradient
scaler, on older ones"""
_FLOAT32_MEANING = """float32 on GPUs: highest without TF32; high or medium with it; empty: torch's default, TF32
for convolutions alone"""
_LRS_MEANING = """one classifier per learning rate, trained in parallel; the best is selected on a held-out tenth of the
training images; [] means [BASE_LR]"""

PLACE, SPEED, MEMORY, PROBE, LENGTH, RECIPE, RESULT = Effect

# Keys that are read only if another key has one of these values; of a kind of methods, `list_keys` names them.
_QUEUE: dict[str, Any] = {"chooser": "METHOD.NAME", "readers": ("queue",)}
_LARS: dict[str, Any] = {"chooser": "SOLVER.OPTIMIZER", "readers": ("lars",)}
_SGD_OR_LARS: dict[str, Any] = {"chooser": "SOLVER.OPTIMIZER", "readers": ("sgd", "lars")}
_STEP: dict[str, Any] = {"chooser": "SOLVER.LR_SCHEDULE", "readers": ("step",)}

_SOLVER = (
    Key(
        "SOLVER.OPTIMIZER", "sgd", _OPTIMIZERS, "adamw and lars do not decay biases and norms", RESULT, aliases="OPTIM"
    ),
    Key(
        "SOLVER.BASE_LR",
        0.03,
        AT_LEAST_0,
        "learning rate, for a batch of REFERENCE_BATCH images if that is set",
        RECIPE,
        aliases="LEARNING_RATE LR",
    ),
    Key("SOLVER.REFERENCE_BATCH", 0, _COUNT, "learning rate = BASE_LR x IMS_PER_BATCH / this; 0 means BASE_LR", RESULT),
    Key("SOLVER.MOMENTUM", 0.9, FRACTION, "momentum of sgd and lars", RESULT, **_SGD_OR_LARS),
    Key("SOLVER.WEIGHT_DECAY", 1e-4, AT_LEAST_0, "weight decay", RESULT, aliases="WD"),
    Key("SOLVER.LARS_TRUST", 0.001, ABOVE_0, "lars: trust coefficient eta; rate = lr x eta |w| / |g|", RESULT, **_LARS),
    Key("SOLVER.LARS_CLIP", False, None, "lars: rate = min(eta |w| / |g|, lr), as in LARC", RESULT, **_LARS),
    Key(
        "SOLVER.IMS_PER_BATCH",
        256,
        _AT_LEAST_1,
        "global batch size N, a multiple of processes x ACCUMULATE",
        RESULT,
        aliases="BATCH_SIZE BATCH BS",
    ),
    Key(
        "SOLVER.ACCUMULATE",
        1,
        _AT_LEAST_1,
        _ACCUMULATE_MEANING,
        MEMORY,
        aliases="ACCUMULATE_GRAD_BATCHES ACCUMULATION_STEPS",
    ),
    Key(
        "SOLVER.EPOCHS",
        200,
        _AT_LEAST_1,
        "passes over the training images; the learning rate's schedule spans them",
        RESULT,
        aliases="NUM_EPOCHS MAX_EPOCHS",
    ),
    Key("SOLVER.LR_SCHEDULE", "cosine", _SCHEDULES, _SCHEDULE_MEANING, RESULT, aliases="SCHEDULER LR_SCHEDULER"),
    Key("SOLVER.STEPS", [120, 160], AT_LEAST_0, _STEPS_MEANING, RESULT, **_STEP, aliases="MILESTONES"),
    Key("SOLVER.GAMMA", 0.1, AT_LEAST_0, "factor of step decay", RESULT, **_STEP),
    Key("SOLVER.WARMUP_EPOCHS", 0.0, AT_LEAST_0, "epochs of linear warm-up from 0", RECIPE, aliases="WARMUP"),
    Key("SOLVER.PER_STEP_LR", True, None, "False: the rate changes between epochs only (MoCo's scripts)", RESULT),
    Key("SOLVER.AMP", "none", _PRECISIONS, _AMP_MEANING, RECIPE, aliases="PRECISION FP16 BF16"),
    Key("SOLVER.CHANGE_RECIPE", False, None, _CHANGE_MEANING, LENGTH),
    Key("SOLVER.COMPILE", False, None, "torch.compile the encoders", SPEED),
    Key(
        "SOLVER.CHECKPOINT_PERIOD",
        0,
        _COUNT,
        "optimizer steps between checkpoints; 0 means every epoch",
        PLACE,
        aliases="SAVE_FREQ",
    ),
    Key(
        "SOLVER.CHECKPOINT_KEEP",
        0,
        _COUNT,
        "number of newest checkpoints to keep; 0: two while the run trains, and after its end only the final one",
        PLACE,
    ),
    Key(
        "SOLVER.LOG_PERIOD",
        20,
        _AT_LEAST_1,
        "optimizer steps between lines of metrics.json",
        PLACE,
        aliases="PRINT_FREQ",
    ),
    Key(
        "SOLVER.MAX_STEPS",
        0,
        _COUNT,
        "end the run after this many optimizer steps; 0 means after EPOCHS",
        LENGTH,
        aliases="MAX_ITER NUM_STEPS",
    ),
)


def _derive_from_solver(name: str, default: Any, meaning: str) -> Key:
    """Return a key of LINEAR with the limits, choices and aliases of the key of SOLVER that has the same last word."""
    row = index_keys(_SOLVER)[name.replace("LINEAR.", "SOLVER.")]
    chooser = "LINEAR.LR_SCHEDULE" if row.chooser == "SOLVER.LR_SCHEDULE" else ""  # a probe has one optimizer
    return replace(row, name=name, default=default, meaning=meaning, effect=PROBE, stage="linear", chooser=chooser)


KEYS = (
    Key("METHOD.NAME", "mocov2", _METHODS, "training objective (see pretrain/methods)", RESULT, aliases="METHOD"),
    Key(
        "METHOD.DENSE_WEIGHT",
        0.0,
        FRACTION,
        "weight w of the dense loss (DenseCL: 0.5); 0 means no dense head",
        RESULT,
        **_QUEUE,
    ),
    Key("METHOD.DENSE_WARMUP_STEPS", 0, _COUNT, "optimizer steps before the dense loss is used", RESULT, **_QUEUE),
    Key("MODEL.ARCH", "resnet50", _ARCHS, "the backbone", RESULT, aliases="BACKBONE ARCHITECTURE ENCODER"),
    Key("MODEL.STEM", "imagenet", _STEMS, "imagenet: 7x7 stride 2, max pool; cifar: 3x3 stride 1, no pool", RESULT),
    Key(
        "MODEL.WEIGHTS",
        "",
        None,
        "checkpoint that initializes the backbone of both encoders; empty: random weights",
        RESULT,
        aliases="PRETRAINED CHECKPOINT",
    ),
    Key(
        "MODEL.HEAD_HIDDEN_DIMS",
        [2048],
        _WIDTHS,
        "widths of the head's hidden layers; []: a linear head (MoCo v1)",
        RESULT,
        aliases="MLP_DIM",
    ),
    Key("MODEL.HEAD_BN", False, None, "batch norm after each hidden layer of the head (SCE, SimCLR)", RESULT),
    Key("MODEL.EMBEDDING_DIM", 128, Range(1, 1 << 20), "embedding dimension D", RESULT, aliases="DIM MOCO_DIM"),
    Key(
        "MODEL.QUEUE_SIZE",
        65536,
        _AT_LEAST_1,
        "K, negatives in the queue",
        RESULT,
        **_QUEUE,
        aliases="K MOCO_K QUEUE_LENGTH",
    ),
    Key("MODEL.EMA_MOMENTUM", 0.999, FRACTION, "momentum m of the key encoder", RESULT, **_QUEUE, aliases="M MOCO_M"),
    Key("MODEL.EMA_SCHEDULE", "constant", Choice(("constant", "cosine")), "cosine: m rises to 1", RESULT, **_QUEUE),
    Key("MODEL.EMA_UPDATE", "before_keys", _UPDATES, "before_keys: MoCo, JCL; after_step: SCE", RESULT, **_QUEUE),
    Key("MODEL.BN_GROUPS", 0, Range(high=1 << 20), _BN_GROUPS_MEANING, RESULT),
    Key(
        "VIEWS.QUERY",
        "moco_v2",
        _AUGMENTATIONS,
        "augmentation of the query's view (pretrain/data/augmentations.py)",
        RESULT,
        aliases="AUGMENT AUGMENTATION",
    ),
    Key("VIEWS.KEY", "moco_v2", _AUGMENTATIONS, "augmentation of the keys' views", RESULT),
    Key("VIEWS.IMAGE_SIZE", 224, Range(8, 4096), "pixels per side", RESULT, aliases="IMG_SIZE IMGSZ"),
    Key("VIEWS.MEAN", IMAGENET_MEAN, FRACTION, "mean of the RGB channels, from 0 to 1", RESULT),
    Key("VIEWS.STD", IMAGENET_STD, Range(0.001, 1), "standard deviation of the RGB channels", RESULT),
    Key("DATA.ROOT", "datasets", None, "folder of the named data sets", PLACE),
    Key(
        "DATA.TRAIN",
        "imagenet",
        None,
        _TRAIN_MEANING,
        RESULT,
        compared_by="the digest of the images",
        aliases="DATASET DATA_DIR DATA_PATH",
    ),
    Key(
        "DATA.VAL",
        "",
        None,
        "labeled images that probes are scored on; empty: val split of the training data",
        PROBE,
        aliases="VAL_DIR",
    ),
    Key("DATA.PROBE_TRAIN", "", None, "labeled images that probes learn from; empty: DATA.TRAIN", PROBE),
    Key("DATA.DOWNLOAD", False, None, "download the named data set if it is missing (not ImageNet)", PLACE),
    Key("DATALOADER.NUM_WORKERS", 4, Range(high=1024), "worker processes per rank", SPEED, aliases="WORKERS"),
    Key(
        "DATALOADER.ON_CORRUPT", "error", _ON_CORRUPT, "skip: replace unreadable images; fails above 1 in 1,000", LENGTH
    ),
    Key("DATALOADER.REDUCED_DECODING", False, None, _REDUCED_MEANING, RESULT),
    *_SOLVER,
    Key("PROBE.KNN_PERIOD", 0, _COUNT, "epochs between evaluations by kNN and RankMe; 0: only at the end", PROBE),
    Key("PROBE.KNN_K", 200, _AT_LEAST_1, "neighbors that vote", PROBE),
    Key("PROBE.KNN_TEMPERATURE", 0.07, ABOVE_0, "temperature T of the vote weights exp(similarity / T)", PROBE),
    Key("PROBE.KNN_MAX_IMAGES", 0, _COUNT, "use at most this many training images, evenly spaced; 0 means all", PROBE),
    Key("PROBE.IMAGE_SIZE", 0, Range(high=4096), "pixels per side for evaluation; 0 means VIEWS.IMAGE_SIZE", PROBE),
    Key("PROBE.CROP", "auto", _CROPS, "none: resize to a square; auto: center for the imagenet stem, else none", PROBE),
    Key("PROBE.RESIZE", 0, Range(high=1 << 20), "shorter side before the crop; 0 means image size x 256/224", PROBE),
    Key("LINEAR.ENCODER", "query", _ENCODERS, "which encoder of a momentum pair is probed", PROBE, stage="linear"),
    _derive_from_solver("LINEAR.BASE_LR", 30.0, "learning rate of the linear classifier"),
    _derive_from_solver("LINEAR.IMS_PER_BATCH", 256, "global batch size"),
    _derive_from_solver("LINEAR.EPOCHS", 100, "passes over the labeled training images"),
    _derive_from_solver("LINEAR.LR_SCHEDULE", "step", _SCHEDULE_MEANING),
    _derive_from_solver("LINEAR.STEPS", [60, 80], _STEPS_MEANING),
    _derive_from_solver("LINEAR.GAMMA", 0.1, "factor of step decay"),
    _derive_from_solver("LINEAR.MOMENTUM", 0.9, "momentum of SGD"),
    _derive_from_solver("LINEAR.WEIGHT_DECAY", 0.0, "weight decay of the classifier"),
    Key("LINEAR.AUGMENT", "crop_flip", _AUGMENTATIONS, _AUGMENT_MEANING, PROBE, stage="linear"),
    Key("LINEAR.LRS", [], AT_LEAST_0, _LRS_MEANING, PROBE, stage="linear"),
    Key("OUTPUT_DIR", "", None, _OUTPUT_MEANING, PLACE, aliases="OUTPUT SAVE_DIR WORK_DIR"),
    Key("IMPORTED", "", None, _IMPORTED_MEANING, RECIPE),
    # seed * 1_000_003 + step must fit in 64 bits
    Key("SEED", 0, Range(high=(1 << 32) - 1), "seed of weights, order and augmentation", RESULT, aliases="RANDOM_SEED"),
    Key("FLOAT32_PRECISION", "", FLOAT32_PRECISION, _FLOAT32_MEANING, RESULT),
    Key("DEVICE", "auto", Choice(("auto", "cpu", "cuda")), "auto: cuda where there is a GPU", PLACE),
)


def list_keys() -> dict[str, Key]:
    """Return the row of every key by its name, including the keys of registered methods.

    The defaults are MoCo v2's where there is no neutral one. Methods declare the other METHOD keys that they read.

    Raises:
        UserError: the user's module cannot be imported or used, or two methods declare one key differently.
    """
    extensions.load()
    extensions.check_type("METHODS", METHODS, Method, "my_objective.py")
    extensions.check_type("AUGMENTATIONS", AUGMENTATIONS, Augmentation, "my_views.py")
    name, *others = KEYS
    readers: dict[str, list[str]] = {}
    kinds: dict[str, list[str]] = {}
    declared = []
    for method_name, method in METHODS.items():
        kinds.setdefault(method.kind, []).append(method_name)
        for row in method.hyperparameters():
            declared.append(row)
            readers.setdefault(row.name, []).append(method_name)
    rows = index_keys(declared)
    hyperparameters = [replace(row, chooser=name.name, readers=readers[row.name]) for row in rows.values()]
    of_kinds = [replace(row, readers=kinds[row.readers[0]]) if row.chooser == name.name else row for row in others]
    return index_keys([name, *hyperparameters, *of_kinds])


def describe_keys() -> list[Key]:
    """List every key for --help-keys; a key that not all methods read names those that do."""
    keys = []
    for row in list_keys().values():
        is_special = row.chooser == "METHOD.NAME" and len(row.readers) < len(METHODS)
        keys.append(replace(row, meaning=f"{row.meaning} ({', '.join(row.readers)})") if is_special else row)
    return keys
