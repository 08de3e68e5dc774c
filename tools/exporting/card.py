"""The model card of an exported backbone: only what its checkpoint and its run folder record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.model.encoder import feature_dim
from tools.reporting.runs import read_origin

if TYPE_CHECKING:
    from .backbone import Backbone

_USE = {
    "timm": """\
import timm
model = timm.create_model("local-dir:{folder}", pretrained=True).eval()  # (N, 3, H, W) -> (N, {width})
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))  # of a PIL image""",
    "transformers": """\
from transformers import AutoImageProcessor, AutoModel
processor, model = AutoImageProcessor.from_pretrained("{folder}"), AutoModel.from_pretrained("{folder}")
features = model(**processor(image, return_tensors="pt")).pooler_output.flatten(1)  # of a PIL image: (1, {width})""",
}
_TEXT = """\
---
library_name: {target}
pipeline_tag: image-feature-extraction
tags:
- {target}
- image-feature-extraction
---
# {arch} pretrained by {method}

A backbone without classifier, exported by pretrain-to-transfer. One image through its source and through this folder:
largest relative difference of the features {difference:.1e}. Its owner states its license: add `license:` above.

| | |
|---|---|
{facts}

## Use

```python
{use}
```
"""


def text(backbone: Backbone, target: str, folder: Path, difference: float) -> str:
    """README.md of the export to ``target`` in ``folder``.

    Args:
        difference: the largest relative one between the features of the source and of the export.
    """
    recorded = backbone.provenance
    origin = read_origin(recorded)
    doubt = "" if "MODEL.PIXEL_MEAN" in recorded else " (usual, not recorded)"
    resized = f", the middle of a shorter side of {backbone.resize}" if backbone.resize else ""
    facts = {
        "architecture": backbone.arch,
        "method": origin.method,
        "pretrained on": origin.data,
        "epochs": origin.epochs,
        "seed": origin.seed,
        "encoder": recorded.get("encoder"),
        "other than the finished pretraining": origin.altered,
        "checkpoint": f"{backbone.path.name}, SHA-256 {origin.sha256}",
        "input": f"RGB, {backbone.size} x {backbone.size}{resized}",
        "mean and standard deviation": f"{backbone.mean}, {backbone.std}{doubt}",
    }
    return _TEXT.format(
        target=target, arch=backbone.arch, method=origin.method or "an unknown method", difference=difference,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items() if value),
        use=_USE[target].format(folder=folder, width=feature_dim(backbone.resnet)),
    )  # fmt: skip
