"""The whole texts of the errors that users meet most often: the only place where their wording is pinned."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain
from pretrain.common.weights.backbone import read_backbone
from pretrain.common.weights.file import read
from pretrain.config import load_config
from pretrain.data.datasets import check_exists, load
from tests.errors import refused
from tools.stages import recipes
from transfer.weights.convert import convert
from transfer.weights.load import read_weights


@pytest.fixture(autouse=True)
def _in_a_folder_of_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("key.yaml").write_text("SOLVR: {EPOCHS: 3}\n")
    Path("empty.pth").touch()
    Path("page.pth").write_text("<html>")
    torch.save({"name": "x"}, "text.pth")
    torch.save({"a": torch.ones(2)}, "other.pth")


def config(*words: str) -> Callable[[], Any]:
    return partial(load_config, None, words)


TEXTS: list[tuple[Callable[[], Any], str]] = [
    (
        config("SOLVER.EPOCH", "3"),
        "unknown config key SOLVER.EPOCH; did you mean 'SOLVER.EPOCHS' (passes over the training images; "
        "the learning rate's schedule spans them)?",
    ),
    (
        config("BATCH_SIZE", "3"),
        "unknown config key BATCH_SIZE; did you mean 'SOLVER.IMS_PER_BATCH' or 'LINEAR.IMS_PER_BATCH'?",
    ),
    (config("SOLVER.EPOCHS", "many"), "SOLVER.EPOCHS must be a whole number, not 'many'"),
    (config("SOLVER.EPOCHS", "0"), "SOLVER.EPOCHS is 0; it must be at least 1 and at most 1073741824"),
    (config("SOLVER.BASE_LR", "fast"), "SOLVER.BASE_LR must be a number, not 'fast'"),
    (
        config("METHOD.NAME", "jlc"),
        "METHOD.NAME is 'jlc'; choose one of mocov1, mocov2, multikey, jcl, sce, ressl, tcl, supcon, simclr, "
        "or --import the module that registers another; did you mean 'jcl'?",
    ),
    (config("SEED"), "override 'SEED' has no value; write KEY VALUE pairs, as in SOLVER.BASE_LR 0.03"),
    (
        config("SOLVER.STEPS", "[60]"),
        "SOLVER.LR_SCHEDULE cosine does not read SOLVER.STEPS [60]; omit it, or set SOLVER.LR_SCHEDULE step",
    ),
    (partial(load_config, "kez.yaml"), "no config file at kez.yaml; did you mean 'key.yaml'?"),
    (
        partial(load_config, "key.yaml"),
        "unknown config key SOLVR.EPOCHS in key.yaml; did you mean 'SOLVER.EPOCHS' or 'LINEAR.EPOCHS'?",
    ),
    (
        partial(pretrain.pretrain, "", [1]),  # type: ignore[arg-type]
        'overrides are of type list; pass a dictionary of config keys, as in {"SOLVER.BASE_LR": 0.05}',
    ),
    (
        partial(load, "imagnet", "train"),
        "unknown data set 'imagnet'; choose imagenet, imagenet100, cifar10, cifar100, fashion_mnist, stl10, "
        "tiny_imagenet, folder:/path, tar:/path/*.tar or a list of them; did you mean 'imagenet'?",
    ),
    (partial(check_exists, "folder:gone"), "no image folder at gone; expected images, or one folder per class"),
    (
        partial(load, "folder:folder", "train"),
        "folder:folder: no images in folder; expected files ending in .jpg .jpeg .jpe .jfif .png .bmp .ppm .pgm .tif "
        ".tiff .webp .gif .avif .jp2 .j2k .mpo .pbm .pnm, flat or in one folder per class",
    ),
    (
        partial(load, "tar:x-*.tar", "train"),
        "no file matches tar:x-*.tar; write tar:/data/*.tar or tar:/data/{000..146}.tar",
    ),
    (
        partial(check_exists, "s3://bucket/x"),
        "'s3://bucket/x' is an address, but images are read from a disk or a file server; copy or mount the images "
        "here, and write folder:/path or tar:/path/*.tar",
    ),
    (partial(read, "othr.pth"), "no checkpoint at othr.pth; did you mean 'other.pth'?"),
    (partial(read, "folder"), "no checkpoint at folder: it is a folder; pass a file in it"),
    (
        partial(read, "empty.pth"),
        "empty.pth is damaged or not a checkpoint: it is empty, or zeros that a full or failing disk left; "
        "use an earlier or another copy",
    ),
    (
        partial(read, "page.pth"),
        "page.pth is damaged or not a checkpoint: it contains text, '<html>'; download the file itself",
    ),
    (
        partial(read_backbone, "text.pth"),
        "text.pth contains no tensors, only name; pass a file with the weights of a network",
    ),
    (partial(read_backbone, "other.pth"), "other.pth contains no ResNet (a); pass one, such as a checkpoint"),
    (
        partial(read_backbone, "folder"),
        "folder contains no checkpoint_*.pth; pass a run folder of pretraining or a checkpoint file",
    ),
    (
        partial(convert, "folder", "out.pth"),
        "folder contains no checkpoint (checkpoint_*.pth or, of a detector, model_*.pth); resume its training, "
        "or choose another folder or file",
    ),
    (partial(convert, "other.pth", "out.bin"), "OUTPUT out.bin must end in .pth, .safetensors or .pkl"),
    (partial(read_weights, "othr.pth"), "no weights file (MODEL.WEIGHTS) at othr.pth; did you mean 'other.pth'?"),
    (
        partial(recipes.find_recipe, "jlc"),
        "no default recipe for --method jlc; choose one of densecl, jcl, mocov1, mocov2, multikey, ressl, sce, simclr, "
        "supcon, tcl, or pass --config-file FILE; did you mean 'jcl'?",
    ),
]


@pytest.mark.parametrize(("call", "text"), TEXTS, ids=[text[:40] for _, text in TEXTS])
def test_an_error_reads_so(call: Callable[[], Any], text: str) -> None:
    assert refused(call) == text
