"""The model card of an exported backbone: only what its checkpoint and the run folders around it record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.common.checkpoint import FINAL
from pretrain.model.encoder import feature_dim
from tools.reporting.compare import environment
from tools.reporting.files import find
from tools.reporting.runs import Item, Origin, Pretraining, Probe, origin_of, parse, words

if TYPE_CHECKING:
    from .backbone import Backbone

PAPERS = {
    "mocov1": "He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020",
    "mocov2": "Chen et al., Improved Baselines with Momentum Contrastive Learning, arXiv:2003.04297, 2020",
    "multikey": "Cai et al., Joint Contrastive Learning with Infinite Possibilities, NeurIPS 2020 (its baseline)",
    "jcl": "Cai et al., Joint Contrastive Learning with Infinite Possibilities, NeurIPS 2020",
    "sce": "Denize et al., Similarity Contrastive Estimation for Self-Supervised Soft Contrastive Learning, WACV 2023",
    "ressl": "Zheng et al., ReSSL: Relational Self-Supervised Learning with Weak Augmentation, NeurIPS 2021",
    "tcl": "Animesh and Chandraker, Tuned Contrastive Learning, WACV 2025",
    "supcon": "Khosla et al., Supervised Contrastive Learning, NeurIPS 2020",
    "simclr": "Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020",
}
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
_VERSIONS = ("python", "torch", "torchvision", "timm")


def text(backbone: Backbone, target: str, folder: Path, difference: float) -> str:
    """README.md of the export to ``target`` in ``folder``.

    Args:
        difference: the largest relative one between the features of the source and of the export.
    """
    origin, run = origin_of(backbone.provenance), backbone.path.parent
    recorded = backbone.provenance.get("config") or backbone.provenance.get("fine_tuned_on")
    machine = environment(run) if recorded else {}
    resized = f", the middle of a shorter side of {backbone.resize}" if backbone.resize else ""
    method = origin.method or "an unknown method"
    facts = {
        "architecture": backbone.arch,
        "method": origin.method,
        "pretrained on": origin.data,
        "epochs": origin.epochs,
        "steps": str(backbone.provenance.get("step", "")),
        "seed": origin.seed,
        "encoder": backbone.provenance.get("encoder", ""),
        "other than the finished pretraining": origin.altered,
        "checkpoint": f"{backbone.path.name}, SHA-256 {origin.sha256}",
        "commit of pretrain-to-transfer": machine.get("git", ""),
        "versions": ", ".join(f"{name} {machine[name]}" for name in _VERSIONS if name in machine),
        "input": f"RGB, {backbone.size} x {backbone.size}{resized}",
        "mean and standard deviation": f"{backbone.mean}, {backbone.std}{'' if recorded else ' (usual, not recorded)'}",
    }
    table = [f"| {name} | {value} |" for name, value in facts.items() if value]
    results = _results(backbone, origin)
    use = _USE[target].format(folder=folder, width=feature_dim(backbone.resnet))
    paper = PAPERS.get(backbone.provenance.get("method", ""))
    lines = [
        *("---", f"library_name: {target}", "pipeline_tag: image-feature-extraction"),
        *("tags:", f"- {target}", "- image-feature-extraction", "---"),
        *(f"# {backbone.arch} pretrained by {method}", ""),
        "A backbone without classifier, exported by pretrain-to-transfer. One image through its source and through",
        f"this folder: largest relative difference of the features {difference:.1e}. Its license is for its owner to",
        *("state: add `license:` above.", "", "| | |", "|---|---|", *table, ""),
        *("## Use", "", "```python", use, "```", ""),
        *(["## Results", "", *results, ""] if results else []),
        *(["## Citation", "", paper, ""] if paper else []),
    ]
    return "\n".join(lines)


def _results(backbone: Backbone, origin: Origin) -> list[str]:
    """A line per kNN or linear probe of this very checkpoint, in its run folder or beside it, as in a pipeline."""
    run, lines = backbone.path.parent, {}
    is_final = backbone.path.name == FINAL and backbone.provenance.get("encoder") == "query"
    for item in _items([run, run.parent / "knn", run.parent / "linear"]):
        probe = item.probe if isinstance(item, Pretraining) and item.folder == run.absolute() and is_final else item
        if isinstance(probe, Probe) and (probe is not item or probe.origin.sha256 == origin.sha256):
            scores = ", ".join(f"{name} {score:.1f}" for name, score in probe.scores.items())
            protocol = words(probe.protocol, probe.protocol)
            # A kNN run repeats what the pretraining ended with.
            lines[probe.kind, protocol] = f"- {probe.kind} on {probe.scored_on}: {scores} ({protocol})"
    return list(lines.values())


def _items(folders: list[Path]) -> Iterator[Item]:
    for run in find([folder for folder in folders if folder.is_dir()]).runs:
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):  # another version's results.json
            yield from parse(run)
