"""Where a backbone comes from: its pretraining, or the file that it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.config.yaml_io import flatten, parse_yaml
from pretrain.common.weights.provenance import Provenance

from .protocols import format_value


@dataclass(frozen=True)
class Origin:
    """Origin of a backbone.

    Attributes:
        method: the objective, or ``random``; empty if the weights do not record it.
        data: data set of the pretraining run, and the weights that initialized it, if any.
        epochs: completed epochs, and the planned number if the pretraining run is not finished.
        source: the checkpoint and the first digits of its SHA-256.
        sha256: SHA-256 of the checkpoint; empty if none was read.
        config: config of the pretraining run, ``{"SOLVER.EPOCHS": 200, ...}``; empty if the weights do not record it.
        altered: why this is not the query encoder of the finished pretraining; empty if it is.
    """

    method: str
    arch: str = ""
    data: str = ""
    epochs: str = ""
    seed: str = ""
    source: str = ""
    sha256: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    altered: str = ""

    @property
    def is_random(self) -> bool:
        """Whether nothing was pretrained."""
        return self.method == "random"


def read_origin(provenance: Provenance) -> Origin:
    """Return the origin of a backbone, from what a conversion or a probe recorded about its checkpoint."""
    try:  # the checkpoint of another project may contain another kind of config
        config = dict(flatten(parse_yaml(provenance.config or "")))
    except ValueError:
        config = {}
    return build_origin(provenance, config)


def build_origin(provenance: Provenance, config: dict[str, Any]) -> Origin:
    if provenance.source == "random":
        return Origin("random", arch=provenance.arch, seed=format_value(provenance.seed))
    method = provenance.method
    epochs = provenance.epoch
    epochs = format_value(round(epochs, 2) if isinstance(epochs, float) else epochs)
    altered = []
    if "SOLVER.EPOCHS" in config and epochs and epochs != format_value(config["SOLVER.EPOCHS"]):
        epochs = f"{epochs} of {format_value(config['SOLVER.EPOCHS'])}"
        altered.append(f"epoch {epochs}")
    if provenance.encoder == "key":
        altered.append("the key encoder")
    names = provenance.fine_tuned_on
    if names:
        tuned = ", ".join(Path(name.split(":")[1]).name if name.startswith("coco:") else name for name in names)
        method = f"{method or '?'}, then {tuned}"
        altered.append(f"fine-tuned on {tuned}")
    data = format_value(config.get("DATA.TRAIN"))
    initial_weights = Path(format_value(config.get("MODEL.WEIGHTS"))).name
    if initial_weights:
        data = f"{data}, from {initial_weights}"
    sha = provenance.sha256
    # The folder is named only if the checkpoint itself was converted, without a conversion or fine-tuning in between.
    folder = () if provenance.earlier else Path(format_value(config.get("OUTPUT_DIR"))).parts[-2:]
    file = "/".join([*folder, provenance.source])
    source = f"{file} ({sha[:8]})" if sha else file
    seed = format_value(config.get("SEED"))
    return Origin(method, provenance.arch, data, epochs, seed, source, sha, config, altered=", ".join(altered))
