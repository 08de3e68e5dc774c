"""Python interface to contrastive pretraining of ResNets without labels.

    from pretrain import AUGMENTATIONS, METHODS, load_backbone, pretrain

    results = pretrain("configs/examples/demo_jcl_R18_digits.yaml", {"SOLVER.EPOCHS": 5, "OUTPUT_DIR": "runs/digits"})
    resnet = load_backbone("runs/digits")  # torchvision's ResNet: (N, 3, H, W) -> (N, F)
    features = resnet(resnet.transform(["a.jpg", "b.jpg"]))  # (2, F)

`METHODS`: method name -> declaration. `AUGMENTATIONS`: name -> how a view is made. `register` adds to either from a
module of your own. Command lines import this package first, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .common.config.extensions import register
from .data.augmentations import AUGMENTATIONS
from .methods import METHODS

if TYPE_CHECKING:
    from torchvision.models import ResNet

__version__ = "0.1.0"
__all__ = ["AUGMENTATIONS", "METHODS", "load_backbone", "pretrain", "register"]


def pretrain(config_file: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Pretrain in this process and return the content of results.json; resume an interrupted run.

    Ctrl-C (in a notebook: interrupting the cell) stops after the current step and its checkpoint.

    Args:
        config_file: a recipe, as in configs/pretrain/ (default: the defaults of all keys).
        overrides: config keys and their values, as in ``{"SOLVER.BASE_LR": 0.05}``; without OUTPUT_DIR, the run folder
            is runs/<recipe>.

    Raises:
        pretrain.common.errors.UserError: bad input, in one line.
        pretrain.common.interrupt.Stopped: the run was interrupted; its ``remedy`` names the checkpoint.
    """
    from .common import interface, interrupt
    from .config import load_recipe

    if config_file not in (None, ""):
        config_file = interface.read_path(config_file, "config_file")
    key_values = interface.list_words(overrides or {})
    from .common.run.state import RunContext
    from .train import main  # imports torch; a mistake should not wait for that

    context = RunContext()
    with context.stop.handle_signals(), interface.take_turn(context.stop), interface.set_torch_modes():
        try:
            return main(load_recipe(config_file, key_values), context=context)
        except interrupt.Stopped as stop:
            stop.add_note(stop.remedy)  # a notebook shows no more than the exception
            raise


def load_backbone(path: str | Path, encoder: str = "query") -> ResNet:
    """Load the backbone from a run folder (newest checkpoint) or a weights file, in evaluation mode.

    The file may be any that tools/convert_to_d2.py reads, except Caffe2's: one complete ResNet in `.pth`, `.pkl` or
    `.safetensors`. Every tensor is checked.

    Args:
        encoder: which of a momentum method's two encoders: query | key.

    Returns:
        torchvision's ResNet with an identity in place of its classifier: (N, 3, H, W) images, normalized as in the
        pretraining, to (N, F) features, F 512 or 2048. Its attribute ``transform`` prepares images as the probes do:
        a path, a PIL image, an array (H, W, 3) or a tensor (3, H, W) of uint8 RGB to (3, S, S) float32, and a list of
        N of them to (N, 3, S, S). Size, mean and standard deviation are those that the file records, or the defaults
        (224 pixels, ImageNet's statistics).

    Raises:
        pretrain.common.errors.UserError: no such file, or no ResNet in it.
    """
    from .common import interface

    path = interface.read_path(path, "path")
    from .common.weights.backbone import read_backbone
    from .model.encoder import build_backbone
    from .probe.transform import build_transform

    with interface.set_torch_modes():
        file = read_backbone(path, encoder)
        resnet = build_backbone(file.arch, file.stem)
        resnet.load_state_dict(file.state_dict, strict=True)
    resnet.transform = build_transform(file)  # type: ignore[assignment]
    return resnet.eval()
