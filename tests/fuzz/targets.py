"""What is fuzzed: readers of files that a user or a fault may have changed, each with valid files to begin from.

A reader may refuse a file with a UserError. If it accepts it, what it returns must be right as far as can be told.
"""

from __future__ import annotations

import io
import json
import random
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from pycocotools.coco import COCO

from pretrain.common import curves, image_io, metrics
from pretrain.config import default_config, from_yaml_text, load_config
from tests.fuzz import draw, mutate, weights
from tests.transfer import tiny_coco
from tools.launcher import commands, control, pipeline, resolve, stages, status, sweep
from tools.launcher.options import Options
from tools.launcher.spec import StageSpec
from tools.report import gather
from transfer.coco import check, data
from transfer.config import load_config as load_detector_config
from transfer.torchvision_engine.data import load_coco

_CONFIGS = Path(__file__).parents[2] / "configs"
_PRETRAINING = _CONFIGS / "pretrain"
_NUMBERED = "checkpoint_00000004.pth"


@dataclass(frozen=True)
class Target:
    """A reader, and how to make files for it.

    Attributes:
        name: of the file that it reads.
        read: given the file; raises UserError, or returns.
        draw: a mutated file's bytes.
    """

    name: str
    read: Callable[[Path], Any]
    draw: Callable[[random.Random], bytes]


def targets(root: Path) -> dict[str, Target]:
    """All targets; ``root`` is a folder for what they share."""
    return {
        "pretraining_config": Target("a.yaml", _pretraining_config, draw.text(_yaml(_PRETRAINING, "*R18*.yaml"))),
        "detector_config": Target("a.yaml", _detector_config, draw.text(_yaml(_CONFIGS, "demo_*.yaml"))),
        "overrides": Target("words.txt", _overrides, _words),
        "pipeline": Target("p.yaml", _load(pipeline), draw.text(_yaml(_CONFIGS / "pipeline", "**/*.yaml"))),
        "sweep": Target("s.yaml", _load(sweep), draw.text(_yaml(_PRETRAINING / "sweeps", "*.yaml"))),
        "site": Target("site.yaml", lambda file: resolve.resolve({"cluster": "local"}, str(file)), draw.text(_SITES)),
        "launch.json": Target("launch/launch.json", _launch, draw.as_json([_launch_record(root)])),
        "results.json": Target("results.json", lambda file: gather([file.parent]), draw.as_json(_results(root))),
        "coco": Target("annotations.json", _coco(root / "coco"), draw.as_json(_coco_contents(root / "coco"))),
        "image": Target("a.img", _image, lambda rng: mutate.data(rng, _IMAGES)),
        "checkpoint": Target(_NUMBERED, weights.checkpoint_reader(root), draw.as_torch(weights.checkpoints(root))),
        "checkpoint_probe": Target(_NUMBERED, weights.read_probe, draw.as_torch([weights.probe_state()])),
        "checkpoint_torchvision": Target(
            "model_0000004.pth", weights.read_detector, draw.as_torch([weights.detector_state()])
        ),
        "weights_pth": Target("a.pth", weights.read_weights, draw.as_torch(weights.STATES)),
        "weights_pkl": Target("a.pkl", weights.read_weights, weights.draw_pickled),
        "weights_safetensors": Target("a.safetensors", weights.read_weights, weights.draw_safetensors),
        "metrics.json": Target("metrics.json", _metrics, _metrics_lines),
    }  # fmt: skip


def _load(module: Any) -> Callable[[Path], Any]:
    return lambda file: module.load(str(file))


def _yaml(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted(folder.glob(pattern))]


def _pretraining_config(file: Path) -> None:
    cfg = load_config(file, [])
    assert from_yaml_text(cfg.dump()).dump() == cfg.dump()


def _detector_config(file: Path) -> None:
    load_detector_config(file, []).dump()


def _words(rng: random.Random) -> bytes:
    keys = [f"{block}.{key}" for block, keys in default_config().items() if isinstance(keys, dict) for key in keys]
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        words += [rng.choice(keys), str(rng.choice([*mutate.NASTY, "0.1", "1e-3", "[1,2]", "jcl", "True"]))]
    text = shlex.join(words).encode(errors="replace")
    return mutate.data(rng, [text]) if rng.randrange(3) == 0 else text


def _overrides(file: Path) -> None:
    try:
        words = shlex.split(file.read_text(errors="surrogateescape"))
    except ValueError:  # an open quote: no shell would pass it on
        return
    load_config(None, words)


_SITES = [
    {"cluster": "local", "gpus": "0", "stages": {"convert": {"gpus": "0"}}},
    {"cluster": "slurm", "account": "0042", "time": "4:00:00", "partition": "a,b", "setup": ["module load cuda"],
     "sbatch": {"constraint": "h100", "exclusive": ""}, "max-timeouts": "3", "stages": {"linear": {"gpus": "1"}}},
]  # fmt: skip


def _launch_record(root: Path) -> dict[str, Any]:
    spec = stages.probe("knn", "random", "", ["OUTPUT_DIR", str(root / "run")])
    job = {"id": "1", "cluster": "local", "name": "knn", "logs": str(root), "host": "h", "tasks": 1, "started": 0.5}
    return {"spec": spec.to_json(), "options": {**asdict(Options(cluster="local")), "setup": []}, "jobs": [job]}


def _launch(file: Path) -> None:
    status.print_status(file.parents[1])
    record = control.read_launch(file)
    spec = StageSpec.from_json(record["spec"])
    resolve.from_record(record, file)
    assert commands.ENTRIES.get(spec.stage) is None or isinstance(spec.fingerprint(), str)


def _results(root: Path) -> list[Any]:
    from tests.tools.reporting.runs import detector, pretrain, probe, provenance

    config = pretrain(root / "reported")
    probe(root / "probed", config, 50.0)
    found = [json.loads((root / name / "results.json").read_text()) for name in ("reported", "probed")]
    return [*found, detector(weights=provenance(config))]


def _coco_contents(folder: Path) -> list[Any]:
    found = []
    for kind in ({}, {"keypoints": True}, {"rle": True}):
        tiny_coco.write(folder, **kind)
        found.append(json.loads((folder / "annotations.json").read_text()))
    return found


def _coco(images: Path) -> Callable[[Path], None]:
    def read(file: Path) -> None:
        content = data.read(file)
        if not list(check.check(content, images)):
            load_coco(f"coco:{file}:{images}")
        truth = COCO(str(file))
        for annotation in truth.dataset["annotations"]:
            if annotation.get("segmentation") and annotation["image_id"] in truth.imgs:
                truth.annToMask(annotation)

    return read


def _pictures() -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    forms = [
        ("PNG", "RGB", {}), ("PNG", "P", {}), ("PNG", "I;16", {}), ("PNG", "RGBA", {}), ("JPEG", "RGB", {"exif": exif}),
        ("JPEG", "CMYK", {}), ("JPEG", "L", {"progressive": True}), ("WEBP", "RGB", {}), ("BMP", "RGB", {}),
        ("GIF", "P", {}), ("TIFF", "RGB", {"compression": "tiff_lzw"}), ("PPM", "RGB", {}),
    ]  # fmt: skip
    found = []
    for form, mode, more in forms:
        image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
        if mode == "I;16":
            image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
        file = io.BytesIO()
        image.save(file, form, **more)
        found.append(file.getvalue())
    return found


_IMAGES = _pictures()


def _image(file: Path) -> None:
    found = image_io.decode(file.read_bytes(), "a")
    assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3 and found.size
    image_io.open_upright(str(file))


def _metrics_lines(rng: random.Random) -> bytes:
    line = {"iteration": 9, "loss": 1.5, "total_loss": 0.5, "images_per_second": 80.0, "eta_seconds": 3.0}
    text = [json.dumps({**line, "iteration": n}).encode() + b"\n" for n in range(3)]
    if rng.randrange(2) == 0:
        return mutate.data(rng, [b"".join(text)])
    return b"".join(text) + json.dumps(mutate.value(rng, line)).encode() + b"\n"


def _metrics(file: Path) -> None:
    status.progress(file.parent)
    metrics.drop_metrics(file.parent, 10)
    metrics.append(file, 10, {"loss": 0.5})
    found = metrics.read_metrics(file.parent)
    assert found[-1] == {"iteration": 10, "loss": 0.5} and all(line["iteration"] < 10 for line in found[:-1])
    for drawn in curves.points(found).values():
        Axes(Figure(), (0, 0, 1, 1)).plot(*zip(*drawn, strict=True))


_NAMES = [b"n01_1.JPEG\nn02_2.JPEG\n", b"ant/n01_1.JPEG\r\nbee/n02_2.JPEG"]
