"""Files in the layouts of public projects, from layouts.yaml; the ResNet to read is filled with 1, another with 2.

A tensor has one value in memory, so that a file is small. `docs/reference/layouts.md` lists how each is read.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
import yaml
from torch import Tensor, nn

from pretrain.common.weights.resnet_names import to_detectron2, to_transformers

State = dict[str, Tensor]
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def build(content: Any) -> Any:
    """Build what a project would pass to `torch.save` from an entry of the table."""
    if isinstance(content, dict):
        return {name: build(value) for name, value in content.items()}
    if not isinstance(content, list):
        return content
    state: State = {}
    for entry in content:
        prefix, is_network, form = entry.partition("*")
        state |= under(prefix, network(*form.split())) if is_network else heads(entry)
    return state


def network(*forms: str) -> State:
    """Build a ResNet-18, changed by the forms: an architecture, `key` or `student` (value 2), a name in FORMS."""
    arch = next((form for form in forms if hasattr(torchvision.models, form)), "resnet18")
    state = resnet(2 if {"key", "student"} & {*forms} else 1, arch)
    for form in forms:
        state = FORMS[form](state) if form in FORMS else state
    return state


def resnet(value: float = 1, arch: str = "resnet18") -> State:
    """Build a ResNet without classifier, filled with a value."""
    shapes = _shapes(getattr(torchvision.models, arch))
    return {name: torch.tensor(value, dtype=dtype).expand(shape) for name, (dtype, shape) in shapes.items()}


@functools.cache
def _shapes(build: Callable[..., nn.Module]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    with torch.device("meta"):
        state = build(weights=None).state_dict()
    return {name: (t.dtype, t.shape) for name, t in state.items() if not name.startswith("fc.")}


def under(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def heads(*names: str) -> State:
    return dict.fromkeys(names, torch.zeros(2, 2))


def sequential(first: int, state: State) -> State:
    """Rename as in a Sequential of torchvision's children; ``first`` is the position of layer1."""
    positions = {"conv1": 0, "bn1": 1, **{f"layer{i}": first + i - 1 for i in range(1, 5)}}
    return {f"{positions[part]}.{suffix}": t for n, t in state.items() for part, _, suffix in [n.partition(".")]}


def rename(old: str, new: str, state: State) -> State:
    return {re.sub(old, new, name): tensor for name, tensor in state.items()}


def layer0(conv: str, bn: str, state: State) -> State:
    """Rename as in a network with a separate stem module."""
    return rename("^conv1", f"layer0.{conv}", rename("^bn1", f"layer0.{bn}", state))


def c4(state: State) -> State:
    """Rename as in a Detectron2 detector whose last stage is in its head."""
    return rename("^roi_heads.(?!res5)", "backbone.", under("roi_heads.", to_detectron2(state, "resnet50")))


def simclr_v2(state: State) -> State:
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"^conv1\.", "net.0.0.", re.sub(r"^bn1\.", "net.0.1.0.", name))
        name = re.sub(r"^layer(\d)\.(\d+)\.", r"net.\1.blocks.\2.", name)
        name = re.sub(r"\.conv(\d)\.", lambda m: f".net.{2 * int(m[1]) - 2}.", name)
        name = re.sub(r"\.bn(\d)\.", lambda m: f".net.{2 * int(m[1]) - 1}.0.", name)
        renamed[name.replace("downsample.0", "projection.shortcut").replace("downsample.1", "projection.bn.0")] = tensor
    return renamed


FORMS: dict[str, Callable[[State], State]] = {
    **{f"sequential{first}": functools.partial(sequential, first) for first in (2, 3, 4)},
    "cifar": lambda state: state | {"conv1.weight": state["conv1.weight"][..., :3, :3]},
    "shortcut": functools.partial(rename, "downsample", "shortcut"),
    "detectron2": lambda state: to_detectron2(state, "resnet18"),
    "obow": lambda state: rename("^layer", "", rename("^conv1", "0.Conv", rename("^bn1", "0.bn", state))),
    "layer0": functools.partial(layer0, "0", "1"),
    "named_layer0": functools.partial(layer0, "conv1", "bn1"),
    "paddle": functools.partial(rename, "running", ""),
    "ibn": functools.partial(rename, r"(layer[12].\d.bn1)", r"\1.IN"),
    "maskrcnn_benchmark": functools.partial(rename, "^(conv1|bn1)", r"stem.\1"),
    "c4": c4,
    "transformers": lambda state: {to_transformers(n): t for n, t in to_detectron2(state, "resnet18").items()},
    "simclr_v2": simclr_v2,
    "rgba": lambda state: state | {"conv1.weight": torch.ones(8, 4, 7, 7)},
    "group_norm": lambda state: {name: t for name, t in state.items() if "running" not in name},
    "deep_stem": functools.partial(rename, "^conv1", "conv1.0"),
    "mmpretrain_stem": lambda state: rename("^bn1", "stem.1", rename("^conv1", "stem.0", state)),
    "incomplete": lambda state: {name: t for name, t in state.items() if "bn" not in name},
    "uncounted": lambda state: {name: t for name, t in state.items() if "tracked" not in name},
    "half": lambda state: {name: t.half() for name, t in state.items()},
}
LAYOUTS = {name: functools.partial(build, content) for name, content in TABLE["layouts"].items()}
