"""Every key of pretraining and probing: neutral default, limits and meaning. Recipes have their values in configs/."""

from typing import Any

from .common.config import extensions
from .common.config.limits import ABOVE_0, AT_LEAST_0, FLOAT32_PRECISION, FRACTION, Choice, Range
from .common.config.overrides import Key
from .common.config.yaml_io import expected_type
from .data.augmentations import AUGMENTATIONS
from .methods import METHODS

# Means and standard deviations are of the training images (CIFAR's as in the released code of SCE and TCL).
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
_COUNT = Range(high=1 << 30)
_AT_LEAST_1 = Range(1, 1 << 30)
_WIDTHS = Range(1, 1 << 30, whole=True)
_ARCHS = Choice(("resnet18", "resnet34", "resnet50", "resnet101"))
_STEMS = Choice(("imagenet", "cifar"))
_SCHEDULES = Choice(("cosine", "step"))
_CROPS = Choice(("auto", "center", "none"))
_UPDATES = Choice(("before_keys", "after_step"))
_ON_CORRUPT = Choice(("error", "skip"))
_SCHEDULE_MEANING = "cosine: falls to 0; step: falls at STEPS"
_BN_GROUPS_MEANING = """parts of the global batch with their own BN statistics; 1 is SyncBN over all; 0 means one per
process and micro-batch, or up to 8 for a single process with keys"""
_TRAIN_MEANING = """a named data set (its train split), folder:/path or tar:/path/*.tar; MODEL.STEM, VIEWS.IMAGE_SIZE,
MEAN and STD follow from a named data set unless they are set"""
_ACCUMULATE_MEANING = """number of micro-batches per process, to save memory; loss and gradients stay the same up
to rounding if the BN groups do"""
_AMP_MEANING = """half precision, on GPUs in channels_last layout: bf16 on A100, H100 and later; fp16, with a gradient
scaler, on older ones"""
_FLOAT32_MEANING = """float32 on GPUs: highest without TF32; high or medium with it; default: torch's, TF32 for
convolutions alone"""
_LRS_MEANING = """one classifier per learning rate, trained in parallel; the best is selected on a held-out tenth of the
training images; [] means [BASE_LR]"""


def list_keys() -> dict[str, tuple[Any, Range | Choice | None, str]]:
    """Return key -> default, limits (of each value in a list) and meaning, including the keys of registered methods.

    The defaults are MoCo v2's where there is no neutral one. Methods declare the other METHOD keys that they read.
    """
    extensions.load()
    remedy = ", or --import the module that registers another"
    methods = Choice(tuple(METHODS), remedy)
    augmentations = Choice(tuple(AUGMENTATIONS), remedy)
    return {
        "METHOD.NAME": ("mocov2", methods, "training objective (see pretrain/methods)"),
        **{h.key: (h.default, h.allowed, h.meaning) for method in METHODS.values() for h in method.hyperparameters()},
        "METHOD.DENSE_WEIGHT": (0.0, FRACTION, "weight w of the dense loss (DenseCL: 0.5); 0 means no dense head"),
        "METHOD.DENSE_WARMUP_STEPS": (0, _COUNT, "optimizer steps before the dense loss is used"),
        "MODEL.ARCH": ("resnet50", _ARCHS, "the backbone"),
        "MODEL.STEM": ("imagenet", _STEMS, "imagenet: 7x7 stride 2, max pool; cifar: 3x3 stride 1, no pool"),
        "MODEL.WEIGHTS": ("", None, "checkpoint that initializes the backbone of both encoders (default: random)"),
        "MODEL.HEAD_HIDDEN_DIMS": ([2048], _WIDTHS, "widths of the head's hidden layers; []: a linear head (MoCo v1)"),
        "MODEL.HEAD_BN": (False, None, "batch norm after each hidden layer of the head (SCE, SimCLR)"),
        "MODEL.EMBEDDING_DIM": (128, Range(1, 1 << 20), "embedding dimension D"),
        "MODEL.QUEUE_SIZE": (65536, _AT_LEAST_1, "K, negatives in the queue"),
        "MODEL.EMA_MOMENTUM": (0.999, FRACTION, "momentum m of the key encoder"),
        "MODEL.EMA_SCHEDULE": ("constant", Choice(("constant", "cosine")), "cosine: m rises to 1"),
        "MODEL.EMA_UPDATE": ("before_keys", _UPDATES, "before_keys: MoCo, JCL; after_step: SCE's pseudo-code"),
        "MODEL.BN_GROUPS": (0, Range(high=1 << 20), _BN_GROUPS_MEANING),
        "VIEWS.QUERY": ("moco_v2", augmentations, "augmentation of the query's view (pretrain/data/augmentations.py)"),
        "VIEWS.KEY": ("moco_v2", augmentations, "augmentation of the keys' views"),
        "VIEWS.IMAGE_SIZE": (224, Range(8, 4096), "pixels per side"),
        "VIEWS.MEAN": (IMAGENET_MEAN, FRACTION, "mean of the RGB channels, from 0 to 1"),
        "VIEWS.STD": (IMAGENET_STD, Range(0.001, 1), "standard deviation of the RGB channels"),
        "DATA.ROOT": ("datasets", None, "folder of the named data sets"),
        "DATA.TRAIN": ("imagenet", None, _TRAIN_MEANING),
        "DATA.VAL": ("", None, "labeled images that probes are scored on (default: val split of the training data)"),
        "DATA.PROBE_TRAIN": ("", None, "labeled images that probes learn from (default: DATA.TRAIN)"),
        "DATA.DOWNLOAD": (False, None, "download the named data set if it is missing (not ImageNet)"),
        "DATALOADER.NUM_WORKERS": (4, Range(high=1024), "worker processes per rank"),
        "DATALOADER.ON_CORRUPT": ("error", _ON_CORRUPT, "skip: replace an unreadable image, and fail above 1 in 1,000"),
        "SOLVER.OPTIMIZER": ("sgd", Choice(("sgd", "adamw", "lars")), "adamw and lars do not decay biases and norms"),
        "SOLVER.BASE_LR": (0.03, AT_LEAST_0, "learning rate, for a batch of REFERENCE_BATCH images if that is set"),
        "SOLVER.REFERENCE_BATCH": (0, _COUNT, "learning rate = BASE_LR x IMS_PER_BATCH / this; 0 means BASE_LR"),
        "SOLVER.MOMENTUM": (0.9, FRACTION, "momentum of sgd and lars"),
        "SOLVER.WEIGHT_DECAY": (1e-4, AT_LEAST_0, "weight decay"),
        "SOLVER.LARS_TRUST": (0.001, ABOVE_0, "lars: trust coefficient eta; a layer's rate is lr x eta |w| / |g|"),
        "SOLVER.LARS_CLIP": (False, None, "lars: a layer's rate is min(eta |w| / |g|, lr), as in LARC and solo-learn"),
        "SOLVER.IMS_PER_BATCH": (256, _AT_LEAST_1, "global batch size N, a multiple of processes x ACCUMULATE"),
        "SOLVER.ACCUMULATE": (1, _AT_LEAST_1, _ACCUMULATE_MEANING),
        "SOLVER.EPOCHS": (200, _AT_LEAST_1, "passes over the training images; the learning rate's schedule spans them"),
        "SOLVER.LR_SCHEDULE": ("cosine", _SCHEDULES, _SCHEDULE_MEANING),
        "SOLVER.STEPS": ([120, 160], AT_LEAST_0, "step: epochs at which the learning rate falls"),
        "SOLVER.GAMMA": (0.1, AT_LEAST_0, "factor of step decay"),
        "SOLVER.WARMUP_EPOCHS": (0.0, AT_LEAST_0, "epochs of linear warm-up from 0"),
        "SOLVER.PER_STEP_LR": (True, None, "False: the learning rate changes between epochs only (MoCo's scripts)"),
        "SOLVER.AMP": ("none", Choice(("none", "bf16", "fp16")), _AMP_MEANING),
        "SOLVER.CHANGE_RECIPE": (False, None, "let a resumed run change AMP, BASE_LR, WARMUP_EPOCHS or your modules"),
        "SOLVER.COMPILE": (False, None, "torch.compile the encoders"),
        "SOLVER.CHECKPOINT_PERIOD": (0, _COUNT, "optimizer steps between checkpoints; 0 means every epoch"),
        "SOLVER.CHECKPOINT_KEEP": (2, _AT_LEAST_1, "number of newest checkpoints to keep, without the final one"),
        "SOLVER.LOG_PERIOD": (20, _AT_LEAST_1, "optimizer steps between lines of metrics.json"),
        "SOLVER.MAX_STEPS": (0, _COUNT, "end the run after this many optimizer steps; 0 means after EPOCHS"),
        "PROBE.KNN_PERIOD": (0, _COUNT, "epochs between kNN evaluations during pretraining; 0 means only at the end"),
        "PROBE.KNN_K": (200, _AT_LEAST_1, "neighbors that vote"),
        "PROBE.KNN_TEMPERATURE": (0.07, ABOVE_0, "temperature T of the vote weights exp(similarity / T)"),
        "PROBE.KNN_MAX_IMAGES": (0, _COUNT, "use at most this many training images, evenly spaced; 0 means all"),
        "PROBE.IMAGE_SIZE": (0, Range(high=4096), "pixels per side for evaluation; 0 means VIEWS.IMAGE_SIZE"),
        "PROBE.CROP": ("auto", _CROPS, "none: resize to a square; auto: center for the imagenet stem, else none"),
        "PROBE.RESIZE": (0, Range(high=1 << 20), "shorter side before the center crop; 0 means image size x 256/224"),
        "LINEAR.ENCODER": ("query", Choice(("query", "key")), "which encoder of a momentum pair is probed"),
        "LINEAR.BASE_LR": (30.0, AT_LEAST_0, "learning rate of the linear classifier"),
        "LINEAR.IMS_PER_BATCH": (256, _AT_LEAST_1, "global batch size"),
        "LINEAR.EPOCHS": (100, _AT_LEAST_1, "passes over the labeled training images"),
        "LINEAR.LR_SCHEDULE": ("step", _SCHEDULES, _SCHEDULE_MEANING),
        "LINEAR.STEPS": ([60, 80], AT_LEAST_0, "step: epochs at which the learning rate falls"),
        "LINEAR.GAMMA": (0.1, AT_LEAST_0, "factor of step decay"),
        "LINEAR.MOMENTUM": (0.9, FRACTION, "momentum of SGD"),
        "LINEAR.WEIGHT_DECAY": (0.0, AT_LEAST_0, "weight decay of the classifier"),
        "LINEAR.AUGMENT": ("crop_flip", augmentations, "augmentation; none: evaluation views, each computed once"),
        "LINEAR.LRS": ([], AT_LEAST_0, _LRS_MEANING),
        "OUTPUT_DIR": ("", None, "the run folder"),
        "IMPORTED": ("", None, "digest of your modules, if METHOD.NAME or a view comes from them; set automatically"),
        # seed * 1_000_003 + step must fit in 64 bits
        "SEED": (0, Range(high=(1 << 32) - 1), "seed of weights, order and augmentation"),
        "FLOAT32_PRECISION": ("", FLOAT32_PRECISION, _FLOAT32_MEANING),
        "DEVICE": ("auto", Choice(("auto", "cpu", "cuda")), "auto: cuda where there is a GPU"),
    }


def describe_keys() -> list[Key]:
    """List every key for --help-keys; a key that not all methods read names those that do."""
    keys = []
    for key, (default, limits, meaning) in list_keys().items():
        chooser, names = find_readers().get(key, ("", []))
        if chooser == "METHOD.NAME" and len(names) < len(METHODS):
            meaning += f" ({', '.join(names)})"
        prefix = "a list, each " if isinstance(default, list) else ""
        values = f"{prefix}{limits or expected_type(default)}"
        keys.append(Key(key, default, values, " ".join(meaning.split())))
    return keys


def find_readers() -> dict[str, tuple[str, list[str]]]:
    """Return key -> (controlling key, its values for which the key is used)."""
    readers = {
        "SOLVER.LARS_TRUST": ("SOLVER.OPTIMIZER", ["lars"]),
        "SOLVER.LARS_CLIP": ("SOLVER.OPTIMIZER", ["lars"]),
        "SOLVER.MOMENTUM": ("SOLVER.OPTIMIZER", ["sgd", "lars"]),
        "SOLVER.STEPS": ("SOLVER.LR_SCHEDULE", ["step"]),
        "SOLVER.GAMMA": ("SOLVER.LR_SCHEDULE", ["step"]),
    }
    queue_keys = [key for key in list_keys() if key.startswith(("MODEL.QUEUE_", "MODEL.EMA_", "METHOD.DENSE_"))]
    for name, method in METHODS.items():
        keys = [h.key for h in method.hyperparameters()] + (queue_keys if method.kind == "queue" else [])
        for key in keys:
            readers.setdefault(key, ("METHOD.NAME", []))[1].append(name)
    return readers
