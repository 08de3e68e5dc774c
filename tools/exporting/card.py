"""The model card of an exported backbone, which states only what its checkpoint and its run folder record."""

from __future__ import annotations

from pathlib import Path

from tools.reporting.runs import read_origin

from .source import ExportSource

_TEXT = """\
---
library_name: timm
pipeline_tag: image-feature-extraction
---
# {arch} pretrained by {method}

A backbone without classifier, exported by pretrain-to-transfer. The features of one image, computed by its source and
by this folder, differ by at most {difference:.1e} (relative). Its owner states the license: add a `license:` field.

{facts}

```python
import timm
model = timm.create_model("local-dir:{folder}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))  # takes a PIL image
```
"""


def render_card(backbone: ExportSource, folder: Path, difference: float) -> str:
    """Return README.md of the export in ``folder``.

    Args:
        difference: largest relative difference between the features of the source and of the export.
    """
    origin = read_origin(backbone.provenance)
    facts = {
        "pretrained on": origin.data,
        "epochs": origin.epochs,
        "seed": origin.seed,
        "encoder": backbone.provenance.get("encoder"),
        "other than the finished pretraining": origin.altered,
        "checkpoint": f"{backbone.path.name}, SHA-256 {origin.sha256}",
        "mean and standard deviation": "" if "MODEL.PIXEL_MEAN" in backbone.provenance else "ImageNet's, not recorded",
    }
    return _TEXT.format(
        arch=backbone.arch,
        method=origin.method or "an unknown method",
        difference=difference,
        facts="\n".join(f"- {name}: {value}" for name, value in facts.items() if value),
        folder=folder,
    )
